//! A prefill and a generation with its measurements, shared by `run`, `chat` and `demo`.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use neuropil::engine::{Engine, EngineError, FinishReason, GenerateOptions, Generation, Piece, Session};
use neuropil::model::sampler::{SamplerError, SamplerOptions};
use neuropil::pipeline::{Activity, StepTimes, StorageReport};
use neuropil::sched::{Placement, UnitEvent};
use neuropil_device::KV_PAGE;
use serde_json::{Map, Value, json};

use crate::args::SamplingFlags;
use crate::engine::UnitWatch;
use crate::error::{CliError, Exit};
use crate::memory;
use crate::output;
use crate::signal::Interrupts;
use crate::storage_report;

/// The seed of the flags, or a new one.
pub fn seed(flags: &SamplingFlags) -> u64 {
    // A fresh hasher is seeded by the system; 53 bits survive every JSON reader.
    flags.seed.unwrap_or_else(|| RandomState::new().hash_one(0u8) >> 11)
}

/// What the flags ask to generate.
pub fn options(flags: &SamplingFlags, seed: u64) -> GenerateOptions {
    GenerateOptions {
        max_tokens: usize::try_from(flags.count).ok(),
        sampler: SamplerOptions {
            temperature: flags.temp,
            top_k: flags.top_k,
            top_p: flags.top_p,
            min_p: flags.min_p,
            repeat_penalty: flags.repeat_penalty,
            repeat_last_n: flags.repeat_last_n,
            presence_penalty: flags.presence_penalty,
            frequency_penalty: flags.frequency_penalty,
            logit_bias: flags.logit_bias.clone(),
            seed: Some(seed),
        },
        stop: flags.stop.clone(),
        ignore_eos: flags.ignore_eos,
    }
}

/// What came of one prompt.
pub struct Outcome {
    /// One per sample.
    pub generations: Vec<Generation>,
    /// Tokens that the model read before the first answer.
    pub prefilled: usize,
    /// How long it read them.
    pub prefill: Duration,
    /// How long all generations took together.
    pub decode: Duration,
    /// Where the time went, reading and generating.
    pub times: StepTimes,
    /// Bytes of all KV caches.
    pub kv_bytes: u64,
    /// How many neurons were computed.
    pub activity: Activity,
    /// What was read meanwhile, where neurons are not all in memory.
    pub storage: Option<StorageReport>,
}

/// Reads the prompt into `session` (what it holds already is kept) and generates one sample per entry of `options`.
/// Returns the sessions too.
pub fn generate(
    mut session: Session,
    prompt: &[u32],
    options: &[GenerateOptions],
    interrupts: &Interrupts,
    mut on_text: impl FnMut(usize, &str) -> Result<(), CliError>,
) -> Result<(Outcome, Vec<Session>), CliError> {
    let engine = session.engine().clone();
    let _units = UnitWatch::new(&engine);
    let (before, storage_before) = (session.times(), engine.storage());
    let held = session.tokens().iter().zip(prompt).take_while(|(a, b)| a == b).count();
    let start = Instant::now();
    session.cancel_token().reset();
    let watch = interrupts.watch(vec![session.cancel_token()]);
    let read = session.set_tokens(prompt);
    let prefill = start.elapsed();
    drop(watch);
    if read.is_ok() && prompt.len() == session.context() {
        output::note(format!(
            "the prompt fills the context of {} tokens exactly; there is room for one token of an answer",
            prompt.len()
        ));
    }

    let mut sessions = vec![session];
    for _ in options.iter().skip(1) {
        sessions.extend(sessions.first().map(Session::fork));
    }
    let watch = interrupts.watch(sessions.iter().map(Session::cancel_token).collect());
    let mut failure = None;
    let mut on_piece = |piece: Piece<'_>| match on_text(piece.sequence, piece.text) {
        Ok(()) => ControlFlow::Continue(()),
        Err(error) => {
            failure.get_or_insert(error);
            ControlFlow::Break(())
        }
    };
    let start = Instant::now();
    let generated = read.and_then(|()| engine.generate(&mut sessions, options, &mut on_piece)).and_then(
        |mut generations| match generations.iter_mut().find_map(|generation| generation.error.take()) {
            Some(error) => Err(error),
            None => Ok(generations),
        },
    );
    let generations = match generated {
        Ok(generations) => generations,
        // Ctrl-C before the first token: that is an answer too, an empty one.
        Err(EngineError::Cancelled) => options.iter().map(|_| cancelled()).collect(),
        Err(error @ (EngineError::Sampler(SamplerError::NotANumber { .. }) | EngineError::Device(_))) => {
            return Err(CliError::of_model(engine.gguf().path(), error));
        }
        Err(error) => return Err(error.into()),
    };
    let decode = start.elapsed();
    drop(watch);
    if let Some(error) = failure {
        return Err(error);
    }
    // `-n` ends a generation before the context does; then there is nothing to tell.
    let full = |(session, options): &(&Session, &GenerateOptions)| {
        let context = session.context();
        prompt.len() < context
            && session.tokens().len() >= context
            && options.max_tokens.is_none_or(|max| max > 1)
    };
    if let Some((session, _)) = sessions.iter().zip(options).find(full) {
        output::note(format!("the context of {} tokens is full; --ctx sets a larger one", session.context()));
    }
    let mut times = StepTimes::default();
    sessions.iter().for_each(|session| times += session.times());
    let mut activity = Activity::default();
    sessions.iter().for_each(|session| activity.merge(session.activity()));
    let outcome = Outcome {
        generations,
        prefilled: prompt.len() - held.min(prompt.len().saturating_sub(1)),
        prefill,
        decode,
        times: difference(times, before),
        kv_bytes: kv_bytes(&sessions, prompt.len()),
        activity,
        storage: engine.storage().zip(storage_before).map(|(after, before)| after.since(&before)),
    };
    Ok((outcome, sessions))
}

fn cancelled() -> Generation {
    Generation {
        tokens: Vec::new(),
        text: String::new(),
        finish_reason: FinishReason::Cancelled,
        error: None,
        latencies: Vec::new(),
    }
}

fn difference(after: StepTimes, before: StepTimes) -> StepTimes {
    StepTimes {
        projections: after.projections.saturating_sub(before.projections),
        attention: after.attention.saturating_sub(before.attention),
        ffn: after.ffn.saturating_sub(before.ffn),
        head: after.head.saturating_sub(before.head),
        other: after.other.saturating_sub(before.other),
    }
}

/// Bytes of the caches of sessions that share the full pages of a prompt.
fn kv_bytes(sessions: &[Session], prompt: usize) -> u64 {
    let all: usize = sessions.iter().map(Session::kv_bytes).sum();
    let shared = sessions.first().map_or(0, |first| {
        let pages = first.tokens().len().div_ceil(KV_PAGE).max(1);
        first.kv_bytes() / pages * (prompt / KV_PAGE).min(pages)
    });
    all.saturating_sub(shared * sessions.len().saturating_sub(1)) as u64
}

impl Outcome {
    /// The first sample.
    pub fn first(&self) -> Option<&Generation> {
        self.generations.first()
    }

    /// Whether Ctrl-C ended it.
    pub fn interrupted(&self) -> bool {
        self.generations.iter().any(|g| g.finish_reason == FinishReason::Cancelled)
    }

    /// Success, or the exit code of Ctrl-C.
    pub fn exit(&self) -> Result<(), CliError> {
        if self.interrupted() { Err(CliError::silent(Exit::Interrupted)) } else { Ok(()) }
    }

    /// Prompt tokens per second.
    pub fn prefill_rate(&self) -> Option<f64> {
        rate(self.prefilled, self.prefill)
    }

    /// Steps after the first token: their times, token to token.
    fn latencies(&self) -> &[Duration] {
        // Samples decode together: the longest has seen every step.
        self.generations.iter().map(|g| &g.latencies[..]).max_by_key(|l| l.len()).unwrap_or_default()
    }

    /// Tokens per second after the first one, all samples together; `None` when there was no step.
    pub fn decode_rate(&self) -> Option<f64> {
        let tokens = self.generations.iter().map(|g| g.latencies.len()).sum();
        rate(tokens, self.latencies().iter().sum())
    }

    /// The document of `run --json`.
    pub fn json(&self, engine: &Engine, prompt: &[u32], samples: bool, seed: u64) -> Value {
        let mut document = Map::new();
        document.insert("prompt_tokens".into(), json!(prompt));
        if let Some(Value::Object(first)) = self.first().map(sample_json) {
            document.extend(first);
        }
        if samples {
            document.insert("samples".into(), self.generations.iter().map(sample_json).collect());
        }
        document.insert("seed".into(), json!(seed));
        document.insert("timings".into(), self.timings(engine));
        if let Some(activity) = activity_json(&self.activity) {
            document.insert("activity".into(), activity);
        }
        document.insert("memory".into(), memory_json(engine, self.kv_bytes));
        if let Some(storage) = &self.storage {
            storage_report::insert(&mut document, storage, self.tokens(), self.times.total());
        }
        let place = |placement: Placement| json!({ "op": placement.op, "unit": placement.unit, "reason": placement.reason, "weights": placement.weights });
        document.insert("placement".into(), engine.placements().into_iter().map(place).collect());
        document.insert("events".into(), engine.events().iter().map(UnitEvent::to_string).collect());
        Value::Object(document)
    }

    /// The object `timings`.
    pub fn timings(&self, engine: &Engine) -> Value {
        let mut timings = Map::new();
        timings.insert("load_ms".into(), json!(ms(engine.load_time())));
        timings.insert("prefill_ms".into(), json!(ms(self.prefill)));
        if let Some(rate) = self.prefill_rate() {
            timings.insert("prefill_tokens_per_second".into(), json!(rate));
        }
        timings.insert("decode_ms".into(), json!(ms(self.decode)));
        if let Some(rate) = self.decode_rate() {
            timings.insert("decode_tokens_per_second".into(), json!(rate));
        }
        if let Some(latency) = latency_json(self.latencies()) {
            timings.insert("latency_ms".into(), latency);
        }
        let parts = parts(&self.times).map(|(name, time)| (name.to_owned(), json!(ms(time))));
        timings.insert("parts_ms".into(), Value::Object(parts.into_iter().collect()));
        Value::Object(timings)
    }

    /// Tokens that went through the model.
    pub fn tokens(&self) -> usize {
        self.prefilled + self.generations.iter().map(|g| g.latencies.len()).sum::<usize>()
    }

    /// One line for people.
    pub fn summary(&self) -> String {
        let rate = |rate: Option<f64>| rate.map_or("-".to_owned(), |rate| format!("{rate:.1}"));
        let tokens: usize = self.generations.iter().map(|g| g.tokens.len()).sum();
        format!(
            "prompt {} tokens at {} per second, answer {tokens} tokens at {} per second",
            self.prefilled,
            rate(self.prefill_rate()),
            rate(self.decode_rate()),
        )
    }
}

/// The share of neurons that were computed, if the model runs neuron by neuron.
pub fn activity_json(activity: &Activity) -> Option<Value> {
    let per_layer: Vec<f64> = activity.per_layer().collect();
    (!activity.is_empty()).then(|| json!({ "active": activity.share(), "per_layer": per_layer }))
}

/// The parts of a step with the names that reports use.
pub fn parts(times: &StepTimes) -> [(&'static str, Duration); 5] {
    [
        ("projections", times.projections),
        ("attention", times.attention),
        ("ffn", times.ffn),
        ("head", times.head),
        ("other", times.other),
    ]
}

/// The object `memory`.
pub fn memory_json(engine: &Engine, kv_bytes: u64) -> Value {
    let mut object = Map::new();
    if let Some(peak) = memory::peak_bytes() {
        object.insert("peak_bytes".into(), json!(peak));
    }
    let used = engine.memory();
    if let Some(budget) = used.budget {
        object.insert("budget_bytes".into(), json!(budget));
    }
    object.insert("resident_bytes".into(), json!(used.weights));
    if used.hot + used.cold > 0 {
        object.insert("hot_bytes".into(), json!(used.hot));
        object.insert("cold_bytes".into(), json!(used.cold));
    }
    object.insert("kv_bytes".into(), json!(kv_bytes));
    Value::Object(object)
}

fn sample_json(generation: &Generation) -> Value {
    json!({
        "tokens": generation.tokens,
        "text": generation.text,
        "finish_reason": generation.finish_reason.name(),
    })
}

/// Milliseconds.
pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn rate(tokens: usize, time: Duration) -> Option<f64> {
    (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64())
}

/// Mean and nearest-rank percentiles.
pub fn latency_json(latencies: &[Duration]) -> Option<Value> {
    let mut sorted: Vec<f64> = latencies.iter().map(|time| ms(*time)).collect();
    sorted.sort_by(f64::total_cmp);
    let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
    let at = |percent: usize| sorted.get((sorted.len() * percent).div_ceil(100).saturating_sub(1));
    Some(json!({ "mean": mean, "p50": at(50)?, "p90": at(90)?, "p99": at(99)? }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let latencies: Vec<_> = (1..=10).rev().map(Duration::from_millis).collect();
        let json = latency_json(&latencies).unwrap();
        let at = |name: &str| json[name].as_f64().unwrap();
        assert_eq!((at("mean"), at("p50"), at("p90"), at("p99")), (5.5, 5.0, 9.0, 10.0));
        assert_eq!(latency_json(&[]), None);
    }
}
