//! Asks a model one question: `cargo run --release -p neuropil --example embed -- MODEL.gguf`.

use std::io::Write;
use std::ops::ControlFlow;

use neuropil::model::chat::Message;
use neuropil::{Engine, GenerateOptions, SessionOptions};
use neuropil_cpu::{CpuBackend, CpuOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("give the path of a GGUF file")?;
    let engine = Engine::builder(path).backend(&CpuBackend::new(CpuOptions::default())?)?.build()?;
    let question = Message::new("user", "What is the capital of France?");
    let tokens = engine.chat_template()?.prompt(engine.tokenizer()?, &[question], true)?;
    let mut session = engine.session(SessionOptions::default())?;
    session.prefill(&tokens)?;
    session.generate(&GenerateOptions::default(), &mut |piece| {
        print!("{}", piece.text);
        std::io::stdout().flush().map_or(ControlFlow::Break(()), |()| ControlFlow::Continue(()))
    })?;
    Ok(())
}
