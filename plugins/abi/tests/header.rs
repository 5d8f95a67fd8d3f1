//! The header, its Rust twin and `layout.txt` say the same, and the header is clean C11 and C++17.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use neuropil_plugin_abi::{HEADER, QUERY_SYMBOL, layout_text};

const GOLDEN: &str = include_str!("../layout.txt");
const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-pedantic", "-Werror"];

/// A folder of this test alone.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Compiles `source`; `None` when there is no such compiler.
fn compile(compiler: &str, standard: &str, source: &Path, output: &Path) -> Option<()> {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let mut command = Command::new(compiler);
    command.arg(standard).args(WARNINGS).arg("-I").arg(include).arg(source).arg("-o").arg(output);
    let run = command.output().ok()?;
    assert!(run.status.success(), "{compiler} {standard}: {}", String::from_utf8_lossy(&run.stderr));
    Some(())
}

/// A program that prints what the golden file has, and asserts it when it is compiled.
fn program(assert: &str) -> String {
    let (mut asserts, mut prints) = (String::new(), String::new());
    for line in GOLDEN.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let (condition, print) = match words[..] {
            [name, "=", value] => {
                (format!("{name} == {value}"), format!(r#"printf("{name} = %llu\n", (T){name});"#))
            }
            [name, size] => (
                format!("sizeof({name}) == {size}"),
                format!(r#"printf("{name} %llu\n", (T)sizeof({name}));"#),
            ),
            [name, offset, size] => {
                let (outer, field) = name.split_once('.').unwrap();
                let bytes = format!("sizeof((({outer} *)0)->{field})");
                (
                    format!("offsetof({outer}, {field}) == {offset} && {bytes} == {size}"),
                    format!(r#"printf("{name} %llu %llu\n", (T)offsetof({outer}, {field}), (T){bytes});"#),
                )
            }
            _ => panic!("a line of layout.txt has two or three words: {line}"),
        };
        asserts += &format!("{assert}({condition}, \"{line}\");\n");
        prints += &format!("    {print}\n");
    }
    format!(
        "#include <neuropil_plugin.h>\n#include <stddef.h>\n#include <stdio.h>\ntypedef unsigned long long T;\n\
         {asserts}\nint main(void) {{\n{prints}    return 0;\n}}\n"
    )
}

#[test]
fn rust_has_the_golden_layout() {
    assert_eq!(layout_text(), GOLDEN, "layout.txt changes only when fields are added at the end");
}

#[test]
fn c_and_cpp_have_the_golden_layout() {
    let folder = folder("layout");
    for (compiler, standard, assert, file) in
        [("cc", "-std=c11", "_Static_assert", "a.c"), ("c++", "-std=c++17", "static_assert", "b.cpp")]
    {
        let (source, binary) = (folder.join(file), folder.join(format!("{file}.out")));
        let text = program(assert).replace(
            "typedef unsigned long long T;",
            match compiler {
                "cc" => "typedef unsigned long long T;",
                _ => "using T = unsigned long long;",
            },
        );
        fs::write(&source, text).unwrap();
        if compile(compiler, standard, &source, &binary).is_none() {
            println!("there is no {compiler} here: its side of the layout was not checked");
            continue;
        }
        let printed = Command::new(&binary).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&printed.stdout), GOLDEN, "{compiler}");
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn every_struct_and_number_of_the_header_is_in_the_golden_layout() {
    let lines: BTreeSet<&str> = GOLDEN.lines().filter_map(|line| line.split(' ').next()).collect();
    let mut seen = 0;
    for line in HEADER.lines() {
        let name = if let Some(rest) = line.strip_prefix("#define N") {
            let mut words = rest.split_whitespace();
            let (name, value) = (words.next().unwrap(), words.next());
            if !value.is_some_and(|value| value.bytes().all(|b| b.is_ascii_digit())) {
                continue;
            }
            format!("N{name}")
        } else if let Some(rest) = line.strip_prefix("typedef struct ").and_then(|l| l.strip_suffix(" {")) {
            rest.to_string()
        } else {
            continue;
        };
        assert!(lines.contains(name.as_str()), "{name} is not in layout.txt");
        seen += 1;
    }
    assert!(seen > 60, "{seen}");
}

#[test]
fn the_header_keeps_its_rules() {
    let words: BTreeSet<&str> = HEADER.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    for refused in ["int", "long", "short", "unsigned", "signed", "size_t", "bool", "enum", "union"] {
        assert!(!words.contains(refused), "the header has the word {refused}");
    }
    assert_eq!(HEADER.matches("NP_EXPORT const").count(), 1, "one function is exported");
    assert!(HEADER.contains(&format!("np_plugin *{QUERY_SYMBOL}(const np_host *host);")));
    let mut lines = HEADER.lines().peekable();
    let mut structs = 0;
    while let Some(line) = lines.next() {
        if line.starts_with("typedef struct ") && line.ends_with('{') {
            assert_eq!(lines.peek(), Some(&"    uint32_t size;"), "{line}");
            structs += 1;
        }
    }
    assert!(structs > 15);
    assert!(HEADER.lines().count() <= 450);
}
