use std::sync::Arc;

use super::*;

fn render(source: &str, messages: &[Message]) -> Result<String, ChatError> {
    ChatTemplate::with_clock(Some(source), "<s>", "</s>", Arc::new(|| 1_722_000_000)).render(messages, true)
}

fn hello() -> Vec<Message> {
    vec![Message::new("user", "Grüße")]
}

#[test]
fn a_plain_chat_template() {
    let source = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
        {{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}\
        {{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let want =
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nGrüße<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(render(source, &hello()).unwrap(), want);
    let template = ChatTemplate::new(Some(source), "", "");
    let system = [Message::new("system", "S"), Message::new("user", "U")];
    assert_eq!(
        template.render(&system, false).unwrap(),
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    );
}

#[test]
fn json_keeps_non_ascii_when_asked() {
    let source = "{% if tools is iterable and tools | length %}{% endif %}{% if tools %}{{ tools | tojson(ensure_ascii=False) }}{% endif %}\
        {{ {'ü': 'é<&>', 'n': 1, 'a': none} | tojson(ensure_ascii=False) }}";
    assert_eq!(render(source, &hello()).unwrap(), "{\"ü\": \"é<&>\", \"n\": 1, \"a\": null}");
    let source = "{{ ['é🦙\n', 1.5, true] | tojson(ensure_ascii=true) }}";
    assert_eq!(render(source, &hello()).unwrap(), r#"["\u00e9\ud83e\udd99\n", 1.5, true]"#);
}

#[test]
fn json_with_indent_and_maps_as_truth_values() {
    let source = "{{ {'a': [1, 2], 'b': {}} | tojson(indent=4) }}{% if {} %}no{% endif %}{% if {'x': 1} %}yes{% endif %}";
    let want = "{\n    \"a\": [\n        1,\n        2\n    ],\n    \"b\": {}\n}yes";
    assert_eq!(render(source, &hello()).unwrap(), want);
    assert_eq!(render("{{ [1] | tojson(2) }}", &hello()).unwrap(), "[\n  1\n]");
}

#[test]
fn generation_tags_are_no_ops() {
    let source = "a {%- generation -%} b {%- endgeneration %} c{% for m in messages %}{%generation%}{{ m.content }}\
        {%+ endgeneration -%}  {% endfor %}";
    assert_eq!(render(source, &hello()).unwrap(), "ab cGrüße");
    assert_eq!(
        render("{{ 'generation' }}{% set generation = 1 %}{{ generation }}", &[]).unwrap(),
        "generation1"
    );
}

#[test]
fn the_date_comes_from_the_clock() {
    assert_eq!(render("{{ strftime_now('%d %b %Y') }}", &hello()).unwrap(), "26 Jul 2024");
}

#[test]
fn string_methods_chain_and_split_takes_negative_indices() {
    let source = "{% set content = 'a</think>\\n\\n b ' %}{{ content.split('</think>')[-1].lstrip('\\n').strip() }}|\
        {{ messages[0].role.upper() }}|{{ messages[-1]['content'][:2] }}|{{ messages[0].get('x', 'none') }}|\
        {{ 'a,b'.split(',')[::-1] | join('') }}|{{ 'abc'.startswith('ab') }}";
    assert_eq!(render(source, &hello()).unwrap(), "b|USER|Gr|none|ba|True");
}

#[test]
fn loops_break_and_blocks_are_trimmed() {
    let source =
        "{% for i in range(9) %}\n  {% if i == 2 %}\n{% break %}{% endif %}\n{{ i }}\n{% endfor %}\nend\n";
    assert_eq!(render(source, &hello()).unwrap(), "0\n1\nend");
}

#[test]
fn a_refusal_has_the_templates_words() {
    let source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok";
    let refusal = ChatError::Raised { message: "System role not supported".into() };
    assert_eq!(render(source, &[Message::new("system", "x")]), Err(refusal));
    assert_eq!(render(source, &hello()).unwrap(), "ok");
}

#[test]
fn a_broken_template_says_where() {
    let template = ChatTemplate::new(Some("ok\n  {% if %}x"), "", "");
    let error = template.render(&hello(), true).unwrap_err();
    assert!(matches!(error, ChatError::Syntax { line: 2, column: 6.., .. }), "{error:?}");
    assert!(error.to_string().contains("line 2, column"), "{error}");
    assert_eq!(template.check(), Err(error));
}

#[test]
fn a_template_that_fails_says_where() {
    let error = render("a\n{{ messages.nothing.at_all }}", &hello()).unwrap_err();
    assert!(matches!(error, ChatError::Failed { line: 2, .. }), "{error:?}");
    assert_eq!(ChatTemplate::new(None, "", "").render(&hello(), true), Err(ChatError::NoTemplate));
}

#[test]
fn a_template_that_would_never_end_is_stopped() {
    let long = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}";
    assert_eq!(render(long, &hello()), Err(ChatError::TooExpensive));
    let large =
        "{% set n = namespace(s='xxxxxxxx') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}";
    assert_eq!(render(large, &hello()), Err(ChatError::TooExpensive));
    let deep = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(render(deep, &hello()).is_err());
}
