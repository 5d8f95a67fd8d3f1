//! The program `neuropil`.
//!
//! Each verb is one file in `verbs`; it reads its flags, calls the engine, and hands its result to `output`. This file
//! only picks the verb and turns its failure into one line and an exit code.

mod args;
mod budget;
mod cache;
mod chat_prompt;
mod engine;
mod error;
mod fetch;
mod files;
mod generation;
mod memory;
mod output;
mod progress;
mod signal;
mod storage_report;
mod units;
mod verbs;

use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Verb};
use error::{CliError, Exit, message_line};
use signal::Interrupts;

fn main() -> ExitCode {
    // A bug must look like one: one line, and a code of its own instead of the usual 101.
    panic::set_hook(Box::new(|info| {
        output::say(&format!("bug: {}; please report it", message_line(&info.to_string())))
    }));
    match panic::catch_unwind(AssertUnwindSafe(start)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            if !error.message.is_empty() {
                output::say(&format!("error: {}", message_line(&error.message)));
            }
            ExitCode::from(error.exit as u8)
        }
        Err(_) => ExitCode::from(Exit::Bug as u8),
    }
}

fn start() -> Result<(), CliError> {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => return error.print().map_err(output::output_error),
        Err(error) => return Err(CliError::new(Exit::Usage, usage_line(&error))),
    };
    let interrupts = Interrupts::listen();
    match cli.verb {
        Verb::Run(args) => verbs::run::run(&args, &interrupts),
        Verb::Chat(args) => verbs::chat::run(&args, &interrupts),
        Verb::Demo(args) => verbs::demo::run(&args, &interrupts),
        Verb::Inspect(args) => verbs::inspect::run(&args),
        Verb::Verify(args) => verbs::verify::run(&args),
        Verb::Tokenize(args) => verbs::tokenize::run(&args),
        Verb::Logits(args) => verbs::logits::run(&args, &interrupts),
        Verb::Perplexity(args) => verbs::perplexity::run(&args, &interrupts),
        Verb::Bench(args) => verbs::bench::run(&args, &interrupts),
        Verb::Convert(args) => verbs::convert::run(&args, &interrupts),
        Verb::Calibrate(args) => verbs::calibrate::run(&args, &interrupts),
        Verb::Synth(args) => verbs::synth::run(&args, &interrupts),
        Verb::Devices(args) => verbs::devices::run(&args),
        Verb::Plugin(args) => verbs::plugin::run(&args),
    }
}

/// The parser's message without its usage part, on one line.
fn usage_line(error: &clap::Error) -> String {
    if error.kind() == clap::error::ErrorKind::InvalidUtf8 {
        return "an argument is not valid UTF-8; only file names and the text of -p may be".into();
    }
    let text = error.to_string();
    let said = text.split("\n\nUsage:").next().unwrap_or_default().split("\n\nFor more information").next();
    let mut line = String::new();
    for part in said.unwrap_or_default().lines().map(str::trim).filter(|part| !part.is_empty()) {
        // "to pass '--x' as a value, use '-- --x'": no verb takes such a value there.
        if part.starts_with("tip: to pass") {
            continue;
        }
        let part = part.strip_prefix("error: ").unwrap_or(part);
        let joint = match line.chars().last() {
            None => "",
            Some(':') => " ",
            Some(_) if part.starts_with('[') => " ",
            Some(_) if part.starts_with('<') || part.starts_with('-') => " ",
            Some(_) => "; ",
        };
        line += joint;
        line += part;
    }
    if line.is_empty() || text.contains("\n\nCommands:") {
        line = "no verb was given".into();
    }
    format!("{line}; see neuropil --help, or --help after a verb")
}
