//! The verbs that run a model, on a toy with random weights.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::Stdio;

use common::{arg, command, neuropil, with_input};
use neuropil_tests::temp::TempDir;
use neuropil_tests::toy::{BOS, Toy, tokens};
use serde_json::{Value, json};

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
                        {% if add_generation_prompt %}<assistant>{% endif %}";

fn toy() -> (TempDir, PathBuf) {
    Toy { width: 64, ffn: 96, chat_template: Some(TEMPLATE.into()), ..Toy::default() }.temp()
}

/// Adds flags to `run MODEL`.
fn run(model: &std::path::Path, flags: &[&str]) -> common::Ran {
    let mut args = vec!["run", arg(model)];
    args.extend(flags);
    neuropil(&args)
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

#[test]
fn run_reports_every_field_that_has_a_subject() {
    let (_dir, model) = toy();
    let json = run(&model, &["-p", "abc", "-n", "8", "--temp", "0", "--ignore-eos", "--json"]).json();
    let prompt: Vec<u32> = std::iter::once(BOS).chain(tokens("abc")).collect();
    assert_eq!(json["prompt_tokens"], json!(prompt));
    assert_eq!(numbers(&json["tokens"]).len(), 8);
    assert_eq!(json["finish_reason"], "length");
    let timings = json["timings"].as_object().unwrap();
    for name in ["load_ms", "prefill_ms", "prefill_tokens_per_second", "decode_tokens_per_second"] {
        assert!(timings[name].as_f64().unwrap() > 0.0, "{name}");
    }
    for name in ["mean", "p50", "p90", "p99"] {
        assert!(timings["latency_ms"][name].as_f64().unwrap() > 0.0, "{name}");
    }
    assert!(json["memory"]["resident_bytes"].as_u64().unwrap() > 0);
    assert!(json["memory"]["kv_bytes"].as_u64().unwrap() > 0);
    #[cfg(target_os = "linux")]
    assert!(
        json["memory"]["peak_bytes"].as_u64().unwrap() > json["memory"]["resident_bytes"].as_u64().unwrap()
    );
    assert!(
        json["placement"].as_array().unwrap().iter().all(|place| place["reason"] == "it is the only unit")
    );
    assert_eq!(json["events"], json!([]));
    for absent in ["samples", "activity", "cache", "io"] {
        assert_eq!(json.get(absent), None);
    }
    assert!(json["memory"]["budget_bytes"].as_u64().unwrap() > 0);
    assert_eq!(json["memory"].get("cold_bytes"), None);
}

#[test]
fn the_text_is_the_same_with_and_without_json() {
    let (_dir, model) = toy();
    let flags = ["-p", "abc", "-n", "40", "--seed", "5", "--temp", "1", "--ignore-eos"];
    let json = run(&model, &[&flags[..], &["--json"]].concat()).json();
    assert_eq!(run(&model, &flags).text(), json["text"].as_str().unwrap());
    let piped =
        with_input(&["run", arg(&model), "-n", "40", "--seed", "5", "--temp", "1", "--ignore-eos"], b"abc");
    assert_eq!(piped.text(), json["text"].as_str().unwrap());
    assert_eq!(json["seed"], 5);
}

#[test]
fn tokens_do_not_depend_on_threads() {
    let (_dir, model) = toy();
    let tokens = |threads: &str| {
        run(&model, &["-p", "abc", "-n", "24", "--temp", "0", "--ignore-eos", "-t", threads, "--json"]).json()
            ["tokens"]
            .clone()
    };
    assert_eq!(tokens("1"), tokens("2"));
    assert_eq!(tokens("1"), tokens("7"));
}

#[test]
fn a_sample_is_what_its_seed_gives_alone() {
    let (_dir, model) = toy();
    let flags = ["-p", "abc", "-n", "12", "--temp", "1", "--ignore-eos"];
    let batch = run(&model, &[&flags[..], &["--seed", "3", "--samples", "3", "--json"]].concat()).json();
    let samples = batch["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 3);
    for (i, sample) in samples.iter().enumerate() {
        let seed = (3 + i).to_string();
        let alone = run(&model, &[&flags[..], &["--seed", &seed, "--json"]].concat()).json();
        assert_eq!(sample["tokens"], alone["tokens"], "seed {seed}");
    }
    assert_eq!(batch["tokens"], samples[0]["tokens"]);
    let shown = run(&model, &[&flags[..], &["--seed", "3", "--samples", "2"]].concat());
    assert!(shown.text().starts_with("--- sample 1 ---\n") && shown.text().contains("\n--- sample 2 ---\n"));
}

#[test]
fn generation_ends_where_it_is_told() {
    let (_dir, model) = toy();
    let none = run(&model, &["-p", "abc", "-n", "0", "--json"]).json();
    assert_eq!((&none["tokens"], &none["finish_reason"]), (&json!([]), &"length".into()));
    // No count: the context of 128 is the bound.
    let all = run(&model, &["-p", "abc", "--temp", "0", "--ignore-eos", "--ctx", "20", "--json"]).json();
    assert_eq!(all["finish_reason"], "length");
    assert_eq!(numbers(&all["prompt_tokens"]).len() + numbers(&all["tokens"]).len(), 21);
    let forced =
        run(&model, &["-p", "abc", "-n", "5", "--temp", "0", "--logit-bias", "2=1000", "--json"]).json();
    assert_eq!((&forced["tokens"], &forced["finish_reason"]), (&json!([]), &"stop".into()));
    let a = u64::from(tokens("a")[0]);
    let bias = format!("{a}=1000");
    let stopped = run(
        &model,
        &["-p", "abc", "-n", "9", "--temp", "0", "--logit-bias", &bias, "--stop", "aaa", "--json"],
    )
    .json();
    assert_eq!((&stopped["text"], &stopped["finish_reason"]), (&"".into(), &"stop".into()));
}

#[test]
fn a_prompt_that_does_not_fit_is_an_error_with_both_counts() {
    let (_dir, model) = toy();
    let line = run(&model, &["-p", "abcdefgh", "--ctx", "8", "--json"]);
    assert!(line.error(5).contains('9') && line.error(5).contains('8'), "{}", line.stderr);
    let exact = run(&model, &["-p", "abcdefg", "--ctx", "8", "--json", "--temp", "0", "--ignore-eos"]);
    assert_eq!(numbers(&exact.json()["tokens"]).len(), 1);
    assert!(exact.stderr.contains("exactly"), "{}", exact.stderr);
    assert!(run(&model, &["-p", "x", "--ctx", "129"]).error(5).contains("128"));
}

#[test]
fn an_empty_prompt_is_bos_alone_where_the_model_has_it() {
    let (_dir, model) = toy();
    let json = run(&model, &["-p", "", "-n", "4", "--temp", "0", "--ignore-eos", "--json"]).json();
    assert_eq!((&json["prompt_tokens"], numbers(&json["tokens"]).len()), (&json!([BOS]), 4));
    assert!(run(&model, &["-p", "", "--no-special"]).error(5).contains("at least one"));
    let (_dir, bare) = Toy { width: 64, ffn: 96, add_bos: Some(false), ..Toy::default() }.temp();
    run(&bare, &["-p", "", "--json"]).error(5);
    with_input(&["run", arg(&bare), "--json"], b"").error(5);
}

#[cfg(unix)]
#[test]
fn a_prompt_of_any_bytes_is_taken_as_it_is() {
    use std::os::unix::ffi::OsStrExt;
    let (_dir, model) = toy();
    let bytes = b"a\xff\xc3b";
    let flags = ["run", arg(&model), "-n", "0", "--json"];
    let given = command(&flags).arg("-p").arg(std::ffi::OsStr::from_bytes(bytes)).output().unwrap();
    let given = common::Ran::new(given).json();
    assert_eq!(given["prompt_tokens"], with_input(&flags, bytes).json()["prompt_tokens"]);
    let expected: Vec<u32> = std::iter::once(BOS).chain(bytes.iter().map(|b| 4 + u32::from(*b))).collect();
    assert_eq!(given["prompt_tokens"], json!(expected));
}

/// A run that cannot finish before it is told to stop, with its first byte of output read.
fn endless(model: &std::path::Path) -> (std::process::Child, std::process::ChildStdout) {
    let args = ["run", arg(model), "-p", "abc", "--temp", "1", "--ignore-eos", "--logit-bias", "101=30"];
    let mut child =
        command(&args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0]).unwrap();
    (child, out)
}

/// The model for it.
fn slow() -> (TempDir, PathBuf) {
    Toy { width: 512, ffn: 2048, layers: 8, context: 100_000, ..Toy::default() }.temp()
}

#[test]
fn a_reader_that_leaves_is_no_panic() {
    let (_dir, model) = slow();
    let (mut child, out) = endless(&model);
    drop(out);
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!((child.wait().unwrap().code(), said.as_str()), (Some(9), ""));
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_generation_with_what_there_is() {
    let (_dir, model) = slow();
    let (mut child, mut out) = endless(&model);
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("what is printed is text");
    assert_eq!(child.wait().unwrap().code(), Some(10));
}

#[cfg(unix)]
#[test]
fn ctrl_c_while_the_prompt_is_read_is_an_empty_answer() {
    let (_dir, model) = slow();
    let mut child = command(&["run", arg(&model), "-n", "1", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The program reads its input when the model is loaded, and a pipe holds less than this prompt: when all of it is
    // sent, the model is about to read it, which takes long.
    let mut to = child.stdin.take().unwrap();
    to.write_all(&[b'a'; 90_000]).unwrap();
    drop(to);
    std::thread::sleep(std::time::Duration::from_millis(2000));
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(10));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&json["tokens"], &json["text"], &json["finish_reason"]),
        (&json!([]), &"".into(), &"cancelled".into())
    );
    assert_eq!(numbers(&json["prompt_tokens"]).len(), 90_001);
}

#[test]
fn tokenize_goes_there_and_back_byte_for_byte() {
    let (_dir, model) = toy();
    // No spaces: the toy's vocabulary has none, and SPM writes three bytes for each.
    let text = b"\ta\n\xff\xc3\xa9\r\n<s>\n";
    let json = with_input(&["tokenize", arg(&model), "--no-special"], text).json();
    let ids = numbers(&json["tokens"]);
    assert_eq!(ids.len(), text.len());
    let ids: Vec<String> = ids.iter().map(u64::to_string).collect();
    assert_eq!(neuropil(&["tokenize", arg(&model), "--decode", &ids.join(",")]).stdout, text);
    let special = with_input(&["tokenize", arg(&model), "--parse-special", "--json"], b"<s>a").json();
    assert_eq!(special["tokens"], json!([BOS, BOS, tokens("a")[0]]));
    let shown = neuropil(&["tokenize", arg(&model), "--decode", "1,101", "--parse-special", "--json"]).json();
    assert_eq!(shown["text"], "<s>a");
    assert!(neuropil(&["tokenize", arg(&model), "--decode", "260"]).error(5).contains("260"));
}

#[test]
fn logits_are_the_same_bits_for_any_thread_count() {
    let (_dir, model) = toy();
    let of = |threads: &str| {
        let args = ["logits", arg(&model), "-p", "abc", "--top", "260", "-t", threads];
        neuropil(&args).json()
    };
    let one = of("1");
    let top = one["top"].as_array().unwrap();
    assert_eq!(top.len(), 260);
    assert!(top.is_sorted_by(|a, b| a[1].as_f64() >= b[1].as_f64()));
    let sum: f64 = top.iter().map(|pair| pair[1].as_f64().unwrap().exp()).sum();
    assert!((sum.ln() - one["log_sum_exp"].as_f64().unwrap()).abs() < 1e-9);
    assert_eq!(one, of("3"));
    let ids = neuropil(&["logits", arg(&model), "--tokens", "1,101,102,103", "--top", "260"]).json();
    assert_eq!(ids, one);
    assert!(neuropil(&["logits", arg(&model), "--tokens", "1,260"]).error(5).contains("260"));
    let few = neuropil(&["logits", arg(&model), "-p", "abc", "--top", "1"]).json();
    assert_eq!(few["top"].as_array().unwrap()[..], top[..5]);
}

#[test]
fn perplexity_scores_the_second_halves() {
    let (dir, model) = toy();
    let text = dir.file("text", b"The-quick-brown-fox-jumps-over-the-lazy-dog,-again-and-again.");
    let json = neuropil(&["perplexity", arg(&model), "-f", arg(&text), "--chunk", "16", "--json"]).json();
    // 61 bytes and BOS: three chunks, in each 7 predictions after the first half.
    assert_eq!((&json["chunks"], &json["tokens"]), (&json!(3), &json!(21)));
    let running = json["running"].as_array().unwrap();
    assert_eq!((running.len(), &json["ppl"]), (3, running.last().unwrap()));
    assert!(running.iter().all(|ppl| ppl.as_f64().unwrap() > 1.0));
    let short = neuropil(&["perplexity", arg(&model), "-f", arg(&text), "--chunk", "100"]);
    assert!(short.error(5).contains("62") && short.error(5).contains("100"));
}

#[test]
fn bench_has_the_names_of_llama_bench() {
    let (_dir, model) = toy();
    let args = ["bench", arg(&model), "-p", "16", "-n", "4", "-r", "3", "-t", "2"];
    let rows = neuropil(&[&args[..], &["--json"]].concat()).json();
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (row, (prompt, n_gen)) in rows.iter().zip([(16, 0), (0, 4)]) {
        assert_eq!(
            (&row["n_prompt"], &row["n_gen"], &row["n_threads"]),
            (&json!(prompt), &json!(n_gen), &json!(2))
        );
        let ns = numbers(&row["samples_ns"]);
        assert_eq!((ns.len(), row["samples_ts"].as_array().unwrap().len()), (3, 3));
        assert_eq!(row["avg_ns"].as_u64().unwrap(), ns.iter().sum::<u64>() / 3);
        let rate = 1e9 * f64::from(prompt + n_gen) / ns[0] as f64;
        assert!((row["samples_ts"][0].as_f64().unwrap() / rate - 1.0).abs() < 1e-9);
        assert!(row["avg_ts"].is_f64() && row["stddev_ts"].is_f64() && row["stddev_ns"].is_u64());
        assert_eq!(row["model_filename"], arg(&model));
        assert!(row["model_size"].as_u64().unwrap() > 0 && row["model_n_params"].as_u64().unwrap() > 0);
    }
    let table = neuropil(&args);
    assert!(table.text().contains("pp16") && table.text().contains("tg4"));
    let only = neuropil(&["bench", arg(&model), "-p", "0", "-n", "2", "-r", "1", "--json"]).json();
    assert_eq!(only.as_array().unwrap().len(), 1);
    assert!(neuropil(&["bench", arg(&model), "-p", "129"]).error(5).contains("129"));
    let deep = ["bench", arg(&model), "-p", "8", "-n", "2", "-r", "2", "-d", "20"];
    let rows = neuropil(&[&deep[..], &["--json"]].concat()).json();
    assert!(rows.as_array().unwrap().iter().all(|row| row["n_depth"] == 20));
    assert!(neuropil(&deep).text().contains("tg2 @ d20"));
    let too_deep = ["bench", arg(&model), "-p", "8", "-n", "2", "-d", "121"];
    assert!(neuropil(&too_deep).error(5).contains("129"));
}

#[test]
fn chat_reads_a_turn_per_line_and_knows_its_commands() {
    let (_dir, model) = toy();
    let args = ["chat", arg(&model), "-n", "3", "--temp", "0", "--logit-bias", "101=1000"];
    let ran = with_input(&args, b"hi\n\n/stats\nagain\r\n");
    assert_eq!(ran.text(), "aaa\naaa\n");
    assert!(ran.stderr.contains("context"));
    let json = with_input(&[&args[..], &["--json"]].concat(), b"hi\nho\n/reset\nhi\n/system S\nhi").json();
    let turns = json["turns"].as_array().unwrap();
    let prompt = |i: usize| turns[i]["prompt_tokens"].clone();
    let rendered = |text: &str| json!(std::iter::once(BOS).chain(tokens(text)).collect::<Vec<u32>>());
    assert_eq!(prompt(0), rendered("<user>hi<assistant>"));
    assert_eq!(prompt(1), rendered("<user>hi<assistant>aaa<user>ho<assistant>"));
    assert_eq!(prompt(2), prompt(0));
    assert_eq!(prompt(3), rendered("<system>S<user>hi<assistant>"));
    assert_eq!((&turns[0]["user"], &turns[0]["text"]), (&"hi".into(), &"aaa".into()));
    let tab = with_input(&[&args[..], &["--json"]].concat(), b"/system\tS\nhi").json();
    assert_eq!(tab["turns"][0]["prompt_tokens"], prompt(3));
    let slash = with_input(&args, b" /resett\n");
    assert_eq!(slash.text(), "aaa\n");
}

#[test]
fn a_bad_turn_of_a_chat_takes_no_other_with_it() {
    let (_dir, model) = toy();
    let full = with_input(&["chat", arg(&model), "--ctx", "8"], b"a long line that cannot fit\n");
    assert!(full.error(5).contains('8'));
    let unknown = with_input(&["chat", arg(&model)], b"/resett\n");
    assert!(
        ["/resett", "/reset,", "/stats", "/system", "/help"].iter().all(|w| unknown.error(2).contains(w))
    );
    assert!(with_input(&["chat", arg(&model)], b"/help\n").stderr.contains("/reset"));
    let args = ["chat", arg(&model), "-n", "1", "--json", "--ctx", "24"];
    let cut = with_input(&args, b"hi\na line that does not fit\nhi\n");
    assert_eq!(cut.code, Some(5));
    assert!(cut.stderr.contains("error: ") && cut.stderr.contains("24"), "{}", cut.stderr);
    let json: Value = serde_json::from_slice(&cut.stdout).unwrap();
    let turns = json["turns"].as_array().unwrap();
    assert_eq!((turns.len(), &turns[0]["user"]), (1, &"hi".into()));
    with_input(&args, b"a line that does not fit at all\n").error(5);
}

#[test]
fn chat_answers_before_its_input_ends() {
    let (_dir, model) = toy();
    let args = ["chat", arg(&model), "-n", "2", "--temp", "0", "--logit-bias", "101=1000"];
    let mut child =
        command(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut to = child.stdin.take().unwrap();
    let mut from = BufReader::new(child.stdout.take().unwrap());
    for _ in 0..2 {
        to.write_all(b"hi\n").unwrap();
        let mut line = String::new();
        from.read_line(&mut line).unwrap();
        assert_eq!(line, "aa\n");
    }
    drop(to);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn run_wraps_a_message_by_the_template() {
    let (_dir, model) = toy();
    let json = run(&model, &["--chat", "--system", "S", "-p", "hi", "-n", "0", "--json"]).json();
    let expected: Vec<u32> = std::iter::once(BOS).chain(tokens("<system>S<user>hi<assistant>")).collect();
    assert_eq!(json["prompt_tokens"], json!(expected));
    let (_dir, bare) = Toy { chat_template: None, width: 64, ffn: 96, ..Toy::default() }.temp();
    assert!(run(&bare, &["--chat", "-p", "hi"]).error(4).contains("template"));
    neuropil(&["chat", arg(&bare)]).error(4);
}

#[test]
fn demo_answers_with_a_given_model_and_shows_what_it_took() {
    let (_dir, model) = toy();
    let args = ["demo", "--model", arg(&model), "-p", "hi"];
    let shown = neuropil(&args);
    for word in ["> hi", "prompt", "per second", "weights", "attention", "ffn"] {
        assert!(shown.text().contains(word), "{word}: {}", shown.text());
    }
    let json = neuropil(&[&args[..], &["--json"]].concat()).json();
    assert!(json["tokens"].is_array() && json["timings"]["parts_ms"]["ffn"].is_f64());
}

#[test]
fn exact_weights_take_four_bytes_each() {
    let (_dir, model) =
        Toy { width: 64, ffn: 96, dtypes: vec![("blk", neuropil_device::DType::Q8_0)], ..Toy::default() }
            .temp();
    let resident = |flags: &[&str]| {
        let json = run(&model, &[&["-p", "abc", "-n", "1", "--json"], flags].concat()).json();
        json["memory"]["resident_bytes"].as_u64().unwrap()
    };
    assert!(resident(&["--exact"]) > 2 * resident(&[]));
    let kv = |kind: &str| {
        let json = run(&model, &["-p", "abc", "-n", "1", "--kv", kind, "--json"]).json();
        json["memory"]["kv_bytes"].as_u64().unwrap()
    };
    assert_eq!(kv("f32"), 2 * kv("f16"));
}
