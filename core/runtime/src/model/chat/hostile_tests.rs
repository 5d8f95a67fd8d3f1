//! Templates made to exhaust the stack, the memory or the patience.

use super::*;

/// Parses and renders on a small stack, as an app's worker thread may have it.
fn on_a_small_stack(source: String) -> Result<String, ChatError> {
    let work = move || ChatTemplate::new(Some(&source), "", "").render(&[Message::new("user", "x")], true);
    std::thread::Builder::new().stack_size(256 << 10).spawn(work).unwrap().join().unwrap()
}

fn too_complex(source: String) {
    let direct = ChatTemplate::new(Some(&source), "", "").check();
    assert!(matches!(direct, Err(ChatError::TooComplex { .. })), "{direct:?}");
    assert_eq!(on_a_small_stack(source).map(|_| ()), direct);
}

/// Both lengths that pass the limit on bytes and those that do not.
fn chains(begin: &str, link: &str, end: &str) {
    for links in [1_100, 20_000, 200_000] {
        too_complex(format!("{begin}{}{end}", link.repeat(links)));
    }
    // Just within the limit everything works, whatever the stack.
    let within = format!("{begin}{}{end}", link.repeat(450));
    let result = on_a_small_stack(within);
    assert!(!matches!(result, Err(ChatError::TooComplex { .. })), "{result:?}");
}

#[test]
fn long_chains_are_refused() {
    chains("{{ ", "not ", "1 }}");
    chains("{{ ", "-", "1 }}");
    chains("{{ 1", "+1", " }}");
    chains("{{ 1", "|string", " }}");
    chains("{{ 1", " is odd", " }}");
    chains("{{ a", ".b", " }}");
    chains("{{ a", "[0]", " }}");
    chains("{{ a", "()", " }}");
    chains("{{ ", "1 if 1 else ", "1 }}");
    chains("{{ 1", " or 1", " }}");
    chains("{{ '}}' ", "~ '}}' ", " }}");
    chains("{% filter upper", "|upper", " %}x{% endfilter %}");
    chains("{% raw %}{{ ' {% endraw %}{# \" #}{{ 1", "+1", " }}");
    chains("{%- set x = {'a': {}} %}{{- 1", "-1", " -}}");
    too_complex(format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(10_000)));
    too_complex("x".repeat(300_000));
}

#[test]
fn the_longest_chain_of_elif_runs() {
    let source = format!("{{% if 0 %}}{}{{% else %}}ok{{% endif %}}", "{% elif 0 %}".repeat(1000));
    assert_eq!(on_a_small_stack(source).unwrap(), "ok");
}

#[test]
fn values_nested_at_run_time_end_with_the_budget() {
    let nested = "{% set ns = namespace(a=1) %}{% for i in range(100000) %}{% set ns.a=[ns.a] %}{% endfor %}";
    for tail in [
        "{{ ns.a }}",
        "{{ ns.a|string|length }}",
        "{{ ns.a == ns.a }}",
        "{{ [ns.a, ns.a]|sort }}",
        "{{ {ns.a: 1} }}",
    ] {
        assert_eq!(on_a_small_stack(format!("{nested}{tail}")), Err(ChatError::TooExpensive));
    }
    // As deep as the budget allows.
    let deep = |rounds: usize, tail: &str| {
        let list = format!("{}ns.a{}", "[".repeat(60), "]".repeat(60));
        format!(
            "{{% set ns = namespace(a=1) %}}{{% for i in range({rounds}) %}}{{% set ns.a={list} %}}{{% endfor %}}{tail}"
        )
    };
    for tail in [
        "{{ ns.a }}",
        "{{ ns.a|string|length }}",
        "{{ ns.a == ns.a }}",
        "{{ {ns.a: 1} }}",
        "{{ ns.a|tojson }}",
        "x",
    ] {
        for rounds in [500, 600, 700, 750, 800, 850] {
            let _ = on_a_small_stack(deep(rounds, tail));
        }
    }
    let source = deep(90_000, "{{ ns.a }}");
    let messages = vec![Message::new("user", "x"); 3000];
    let template = ChatTemplate::new(Some(&source), "", "");
    assert_eq!(template.render(&messages, true), Err(ChatError::TooExpensive));
}
