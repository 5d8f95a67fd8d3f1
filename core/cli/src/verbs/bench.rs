//! `bench`: speed, measured and named as llama-bench does, so that rows of both stand in one table.
//!
//! `pp` reads a prompt of random tokens as one batch, `tg` decodes random tokens one by one; both start from an empty
//! context every time, or from one of so many tokens, after one run that warms up (a whole prompt, or one token). Random
//! tokens are the same in every run of the program.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use neuropil::engine::{Engine, Session};
use neuropil::model::chat::civil;
use neuropil::pipeline::StorageReport;
use neuropil::store::{self, Store};
use serde_json::{Value, json};

use crate::args::{EngineFlags, ModelFile};
use crate::engine;
use crate::error::{CliError, Exit};
use crate::generation::latency_json;
use crate::output;
use crate::progress::Bar;
use crate::signal::Interrupts;
use crate::{memory, storage_report};

/// Tokens that the engine takes through the model at a time.
const BATCH: usize = 512;

/// Flags of `bench`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  neuropil bench model.gguf -p 512 -n 128 -r 5 --json

Rows have llama-bench's names and are measured its way: one run to warm up, then -r runs of each test, every one from
an empty context. The first token of a context is computed with all neurons of a neuron store; with -d the speed is that
after a prompt.")]
pub struct Args {
    #[command(flatten)]
    model: ModelFile,
    /// Tokens of the prompt test; 0 leaves it out
    #[arg(short = 'p', long, value_name = "N", default_value_t = 512, allow_negative_numbers = true)]
    n_prompt: u32,
    /// Tokens of the generation test; 0 leaves it out
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128, allow_negative_numbers = true)]
    n_gen: u32,
    /// Tokens that the context holds before each test; reading them is not measured
    #[arg(short = 'd', long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    n_depth: u32,
    /// Runs of each test
    #[arg(short, long, value_name = "N", default_value_t = 5, allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..=100_000))]
    repetitions: u32,
    #[command(flatten)]
    engine: EngineFlags,
    /// Print one JSON document, an array of rows
    #[arg(long)]
    json: bool,
}

/// One test and its times.
struct Row {
    n_prompt: usize,
    n_gen: usize,
    n_depth: usize,
    test_time: String,
    samples_ns: Vec<u64>,
    /// Share of the neurons that were computed, of a neuron store.
    active: Option<f64>,
    /// What was read in all runs, where neurons are not all in memory.
    storage: Option<StorageReport>,
    /// Time of each token of a generation.
    latencies: Vec<Duration>,
}

/// Runs the verb.
pub fn run(args: &Args, interrupts: &Interrupts) -> Result<(), CliError> {
    let (n_prompt, n_gen) = (args.n_prompt as usize, args.n_gen as usize);
    if n_prompt + n_gen == 0 {
        return Err(CliError::new(
            Exit::Usage,
            "-p 0 and -n 0 leave nothing to measure; give one of them more; see neuropil --help, or --help after a verb",
        ));
    }
    let engine = engine::open(&args.model.path, &args.engine)?;
    let _units = engine::UnitWatch::new(&engine);
    let mut session = engine.session(engine::session_options(&args.engine))?;
    let depth = args.n_depth as usize;
    let longest = n_prompt.max(n_gen) + depth;
    if longest > session.context() {
        let context = session.context();
        let reason = format!(
            "a test of {longest} tokens does not fit the context of {context}; give smaller -p, -n and -d"
        );
        return Err(CliError::new(Exit::Prompt, reason));
    }
    let _watch = interrupts.watch(vec![session.cancel_token()]);
    let tests: Vec<(usize, usize)> = [(n_prompt, 0), (0, n_gen)]
        .into_iter()
        .filter(|(prompt, gen_count)| prompt + gen_count > 0)
        .collect();
    let repetitions = args.repetitions as usize;
    let bar = Bar::steps("measuring");
    let mut rows = Vec::new();
    for (index, (n_prompt, n_gen)) in tests.iter().copied().enumerate() {
        let mut tokens = Tokens::new(&engine);
        let mut row = Row::new(n_prompt, n_gen, depth);
        session.truncate(0);
        if depth > 0 {
            read(&mut session, &mut tokens, depth)?;
        }
        test(&mut session, &mut tokens, (depth, n_prompt, n_gen.min(1)), &mut Vec::new())?;
        let before = engine.storage();
        for run in 0..repetitions {
            let start = Instant::now();
            test(&mut session, &mut tokens, (depth, n_prompt, n_gen), &mut row.latencies)?;
            row.samples_ns.push(start.elapsed().as_nanos() as u64);
            bar.set((index * repetitions + run + 1) as u64, (tests.len() * repetitions) as u64);
        }
        let activity = session.activity();
        row.active = (n_gen > 0 && !activity.is_empty()).then(|| activity.share());
        row.storage = engine.storage().zip(before).map(|(after, before)| after.since(&before));
        rows.push(row);
    }
    drop(bar);
    args.engine.memory.write_trace(&engine)?;
    let about = About::new(args, &engine);
    if args.json {
        return output::json(&rows.iter().map(|row| row.json(&about)).collect());
    }
    let mut table =
        format!("{} | {} threads | kv {}\n", about.model_type, about.threads, args.engine.kv.name());
    table += &format!("{:>12} {:>12} {:>10}\n", "test", "tokens/s", "±");
    for row in &rows {
        let mut name =
            if row.n_prompt > 0 { format!("pp{}", row.n_prompt) } else { format!("tg{}", row.n_gen) };
        if row.n_depth > 0 {
            name += &format!(" @ d{}", row.n_depth);
        }
        let rates = row.rates();
        table += &format!("{name:>12} {:>12.2} {:>10.2}\n", mean(&rates), deviation(&rates));
    }
    output::text(&table)
}

/// Reads tokens as one batch, then decodes some one by one, after the first `depth` of the context.
fn test(
    session: &mut Session,
    tokens: &mut Tokens,
    (depth, n_prompt, n_gen): (usize, usize, usize),
    latencies: &mut Vec<Duration>,
) -> Result<(), CliError> {
    session.truncate(depth);
    if n_prompt > 0 {
        read(session, tokens, n_prompt)?;
    }
    for i in 0..n_gen {
        let start = Instant::now();
        session.decode(tokens.next(depth + n_prompt + i == 0))?;
        latencies.push(start.elapsed());
    }
    Ok(())
}

/// Reads `count` tokens as one batch.
fn read(session: &mut Session, tokens: &mut Tokens, count: usize) -> Result<(), CliError> {
    let first = session.tokens().is_empty();
    let prompt: Vec<u32> = (0..count).map(|i| tokens.next(first && i == 0)).collect();
    Ok(session.prefill(&prompt)?)
}

/// Random tokens, BOS first where the file asks for it.
struct Tokens {
    state: u64,
    vocab: u64,
    bos: Option<u32>,
}

impl Tokens {
    fn new(engine: &Engine) -> Tokens {
        let bos = engine.tokenizer().ok().and_then(|t| t.bos().filter(|_| t.adds_bos()));
        Tokens { state: 1, vocab: engine.spec().vocab as u64, bos }
    }

    fn next(&mut self, first: bool) -> u32 {
        // Knuth's linear congruential generator; its high bits are random enough to spread over a vocabulary.
        self.state = self.state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let random = ((self.state >> 33) % self.vocab.max(1)) as u32;
        self.bos.filter(|_| first).unwrap_or(random)
    }
}

/// What is the same in all rows.
struct About {
    file: String,
    model_type: String,
    bytes: u64,
    parameters: u64,
    threads: usize,
    cpu: String,
    /// All units.
    units: Vec<String>,
    kv: &'static str,
    exact: bool,
    /// Who chooses neurons, of a neuron store.
    predict: Option<&'static str>,
}

impl About {
    fn new(args: &Args, engine: &Engine) -> About {
        let tensors = engine.gguf().tensors();
        let parameters = store::parameters(engine.gguf());
        let bytes = tensors.iter().map(|t| t.bytes).sum();
        // The type that most of the bytes have.
        let mut types: Vec<(&str, u64)> = Vec::new();
        for tensor in tensors.iter().filter(|tensor| tensor.dtype.is_some()) {
            match types.iter_mut().find(|(name, _)| *name == tensor.type_name()) {
                Some((_, bytes)) => *bytes += tensor.bytes,
                None => types.push((tensor.type_name(), tensor.bytes)),
            }
        }
        let main = types.iter().max_by_key(|(_, bytes)| *bytes).map_or("", |(name, _)| name);
        let info = engine.home().info().clone();
        let units = engine.devices().iter().map(|device| device.info().name.clone()).collect();
        About {
            file: args.model.path.display().to_string(),
            model_type: format!("{} {} {main}", engine.spec().architecture, count(parameters)),
            bytes,
            parameters,
            threads: info.threads,
            cpu: info.name,
            units,
            kv: args.engine.kv.name(),
            exact: args.engine.exact,
            predict: Store::is_store(engine.gguf()).then(|| engine.prediction().name()),
        }
    }
}

impl Row {
    fn new(n_prompt: usize, n_gen: usize, n_depth: usize) -> Row {
        let (samples_ns, latencies) = (Vec::new(), Vec::new());
        Row { n_prompt, n_gen, n_depth, test_time: now(), samples_ns, active: None, storage: None, latencies }
    }

    fn rates(&self) -> Vec<f64> {
        let tokens = (self.n_prompt + self.n_gen) as f64;
        self.samples_ns.iter().map(|ns| 1e9 * tokens / (*ns).max(1) as f64).collect()
    }

    fn json(&self, about: &About) -> Value {
        let times: Vec<f64> = self.samples_ns.iter().map(|ns| *ns as f64).collect();
        let rates = self.rates();
        let mut row = json!({
            "build_commit": concat!("neuropil ", env!("CARGO_PKG_VERSION")),
            "build_number": 0,
            "cpu_info": about.cpu,
            "gpu_info": "",
            "backends": "CPU",
            "model_filename": about.file,
            "model_type": about.model_type,
            "model_size": about.bytes,
            "model_n_params": about.parameters,
            "n_batch": BATCH,
            "n_ubatch": BATCH,
            "n_threads": about.threads,
            "type_k": about.kv,
            "type_v": about.kv,
            "n_gpu_layers": 0,
            "devices": if about.units.len() > 1 { about.units.join(", ") } else { "cpu".into() },
            "exact": about.exact,
            "n_prompt": self.n_prompt,
            "n_gen": self.n_gen,
            "n_depth": self.n_depth,
            "test_time": self.test_time,
            "avg_ns": mean(&times) as u64,
            "stddev_ns": deviation(&times) as u64,
            "avg_ts": mean(&rates),
            "stddev_ts": deviation(&rates),
            "samples_ns": self.samples_ns,
            "samples_ts": rates,
        });
        if let (Some(row), Some(predict)) = (row.as_object_mut(), about.predict) {
            row.insert("predict".into(), json!(predict));
            row.extend(self.active.map(|active| ("active".to_owned(), json!(active))));
            let total = self.samples_ns.iter().map(|ns| Duration::from_nanos(*ns)).sum();
            let tokens = self.samples_ns.len() * (self.n_prompt + self.n_gen);
            if let Some(storage) = &self.storage {
                storage_report::insert(row, storage, tokens, total);
            }
            // The first token of a context is computed with all neurons.
            let first = usize::from(self.n_depth == 0);
            let runs = self.latencies.chunks(self.n_gen.max(1));
            let later = runs.flat_map(|run| run.get(first..).unwrap_or_default());
            let later: Vec<Duration> = later.copied().collect();
            row.extend(latency_json(&later).map(|latency| ("latency_ms".to_owned(), latency)));
            row.extend(memory::peak_bytes().map(|peak| ("peak_bytes".to_owned(), json!(peak))));
        }
        row
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The standard deviation of a sample; 0 for a single value.
fn deviation(values: &[f64]) -> f64 {
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    if values.len() < 2 { 0.0 } else { (squares / (values.len() - 1) as f64).sqrt() }
}

/// `134.5M`, `1.2B`.
fn count(parameters: u64) -> String {
    match parameters as f64 {
        n if n >= 1e9 => format!("{:.1}B", n / 1e9),
        n if n >= 1e6 => format!("{:.1}M", n / 1e6),
        n => format!("{:.1}K", n / 1e3),
    }
}

/// The time in UTC, as `2026-01-31T12:34:56Z`.
fn now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    timestamp(seconds)
}

fn timestamp(seconds: u64) -> String {
    let (days, second) = (seconds / 86400, seconds % 86400);
    let (year, month, date) = civil(days as i64);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_know_leap_days() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00Z");
        assert_eq!(timestamp(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(timestamp(1_767_225_599), "2025-12-31T23:59:59Z");
        assert_eq!(timestamp(4_107_542_400), "2100-03-01T00:00:00Z");
    }

    #[test]
    fn deviation_is_of_a_sample() {
        assert_eq!(deviation(&[1.0, 3.0]), 2f64.sqrt());
        assert_eq!((deviation(&[5.0]), mean(&[1.0, 3.0])), (0.0, 2.0));
    }
}
