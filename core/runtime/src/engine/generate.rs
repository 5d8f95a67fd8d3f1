//! Generation: sample, check for an end, stream the text, decode, again; for one session or a batch.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use crate::model::sampler::{Sampler, SamplerOptions};
use crate::model::stream::TextStream;
use crate::model::tokenizer::Tokenizer;

use super::{Engine, EngineError, Session};

/// What to generate.
#[derive(Clone, Debug, Default)]
pub struct GenerateOptions {
    /// Most tokens to generate; `None` for as many as the context has room for. When the context is full, the token
    /// after its last one is still given, and the generation ends there.
    pub max_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Texts that end the generation; they are not part of its text. One that is a control token's text also stops
    /// when that token comes.
    pub stop: Vec<String>,
    /// Goes on after the model's end tokens.
    pub ignore_eos: bool,
}

/// A piece of a generation, as it is made.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The session, as its index in the batch; 0 alone.
    pub sequence: usize,
    /// The token; `None` for text that was held back until the end.
    pub token: Option<u32>,
    /// The token's raw bytes.
    pub bytes: &'a [u8],
    /// Text that is complete with this token: whole characters, and nothing that may still turn out to be a stop
    /// text. The pieces' texts joined are [`Generation::text`].
    pub text: &'a str,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// `max_tokens` or the context's end.
    Length,
    /// An end token or a stop text.
    Stop,
    /// The session's switch, or the receiver of the pieces.
    Cancelled,
    /// An error of this session's own; see [`Generation::error`].
    Failed,
}

impl FinishReason {
    /// `length`, `stop`, `cancelled` or `failed`.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Length => "length",
            FinishReason::Stop => "stop",
            FinishReason::Cancelled => "cancelled",
            FinishReason::Failed => "failed",
        }
    }
}

/// What was generated for one session.
#[derive(Debug)]
pub struct Generation {
    /// The tokens, without the end token.
    pub tokens: Vec<u32>,
    /// Their text, without a stop text; bytes that are no UTF-8 are U+FFFD.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What went wrong with this session alone, such as logits that are not numbers: its neighbours went on.
    pub error: Option<EngineError>,
    /// Time from token to token, sampling included; the first token, which came from the prompt's logits, excepted.
    pub latencies: Vec<Duration>,
}

impl Session {
    /// Generates from the session's logits on, after a prefill. `on_piece` gets each piece and may end it.
    ///
    /// # Errors
    /// [`EngineError::EmptyPrompt`] without logits, [`EngineError::Sampler`], and what decoding a token says.
    pub fn generate(
        &mut self,
        options: &GenerateOptions,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation, EngineError> {
        let engine = self.engine().clone();
        let batch = std::slice::from_mut(self);
        let mut generation = engine.generate(batch, std::slice::from_ref(options), on_piece)?.remove(0);
        match generation.error.take() {
            Some(error) => Err(error),
            None => Ok(generation),
        }
    }
}

impl Engine {
    /// Generates for some sessions together, each from its own logits on and by its own options (one per session).
    /// A session's tokens are the same as alone.
    ///
    /// # Errors
    /// What ends all of them: an option out of range, a unit that fails, [`EngineError::Sequence`] when there are not as
    /// many options as sessions. What concerns one session is in its [`Generation::error`].
    pub fn generate(
        &self,
        sessions: &mut [Session],
        options: &[GenerateOptions],
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Vec<Generation>, EngineError> {
        if sessions.len() != options.len() {
            return Err(EngineError::Sequence(sessions.len().min(options.len())));
        }
        let tokenizer = self.tokenizer().ok();
        let vocab = self.spec().vocab;
        let mut tasks = Vec::with_capacity(sessions.len());
        for (sequence, options) in options.iter().enumerate() {
            tasks.push(Task::new(sequence, options, tokenizer, vocab)?);
        }
        let mut inputs = Vec::with_capacity(sessions.len());
        let mut last = Instant::now();
        loop {
            inputs.clear();
            for (task, session) in tasks.iter_mut().zip(&*sessions) {
                match task.next(session, on_piece) {
                    Ok(Some(token)) => inputs.push((task.sequence, token)),
                    Ok(None) => {}
                    Err(error) => {
                        task.end(FinishReason::Failed);
                        task.error = Some(error);
                    }
                }
            }
            if inputs.is_empty() {
                break;
            }
            match self.decode(sessions, &inputs) {
                Ok(()) => {}
                Err(EngineError::Cancelled) => {
                    tasks.iter_mut().for_each(|task| task.end(FinishReason::Cancelled));
                    break;
                }
                Err(error) => return Err(error),
            }
            let now = Instant::now();
            for (sequence, _) in &inputs {
                tasks[*sequence].latencies.push(now - last);
            }
            last = now;
        }
        self.verify_rest()?;
        Ok(tasks.into_iter().map(|task| task.into_generation(on_piece)).collect())
    }
}

/// One session's generation in the making.
struct Task<'a> {
    sequence: usize,
    options: &'a GenerateOptions,
    tokenizer: Option<&'a Tokenizer>,
    sampler: Sampler,
    stream: TextStream,
    /// Control tokens that are named as stop texts.
    stop_tokens: Vec<u32>,
    bytes: Vec<u8>,
    tokens: Vec<u32>,
    text: String,
    finish: Option<FinishReason>,
    error: Option<EngineError>,
    latencies: Vec<Duration>,
}

impl<'a> Task<'a> {
    fn new(
        sequence: usize,
        options: &'a GenerateOptions,
        tokenizer: Option<&'a Tokenizer>,
        vocab: usize,
    ) -> Result<Task<'a>, EngineError> {
        let control = |text: &String| {
            let tokenizer = tokenizer?;
            tokenizer.find(text).filter(|id| tokenizer.is_control(*id))
        };
        Ok(Task {
            sequence,
            options,
            tokenizer,
            sampler: Sampler::new(options.sampler.clone(), vocab)?,
            stream: TextStream::new(options.stop.clone()),
            stop_tokens: options.stop.iter().filter_map(control).collect(),
            bytes: Vec::new(),
            tokens: Vec::new(),
            text: String::new(),
            finish: None,
            error: None,
            latencies: Vec::new(),
        })
    }

    /// Chooses the session's next token and hands its piece over. Returns the token if the session must decode it for
    /// another one to follow.
    fn next(
        &mut self,
        session: &Session,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Option<u32>, EngineError> {
        if self.finish.is_some() {
            return Ok(None);
        }
        if session.cancel_token().is_cancelled() {
            self.end(FinishReason::Cancelled);
            return Ok(None);
        }
        let left = self.options.max_tokens.map(|max| max - self.tokens.len().min(max));
        if left == Some(0) {
            self.end(FinishReason::Length);
            return Ok(None);
        }
        if session.logits().is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let token = self.sampler.sample(session.logits(), session.tokens())?;
        let ends = self.tokenizer.is_some_and(|t| t.is_end(token)) && !self.options.ignore_eos;
        if ends || self.stop_tokens.contains(&token) {
            self.end(FinishReason::Stop);
            return Ok(None);
        }
        self.tokens.push(token);
        self.bytes.clear();
        if let Some(tokenizer) = self.tokenizer {
            tokenizer.decode_token(token, &mut self.bytes)?;
        }
        let step = self.stream.push(&self.bytes);
        self.text.push_str(&step.text);
        let piece =
            Piece { sequence: self.sequence, token: Some(token), bytes: &self.bytes, text: &step.text };
        let flow = on_piece(piece);
        if step.stopped {
            self.end(FinishReason::Stop);
        } else if flow.is_break() {
            self.end(FinishReason::Cancelled);
        } else if left == Some(1) || session.tokens().len() >= session.context() {
            self.end(FinishReason::Length);
        }
        Ok(self.finish.is_none().then_some(token))
    }

    fn end(&mut self, reason: FinishReason) {
        self.finish.get_or_insert(reason);
    }

    fn into_generation(mut self, on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>) -> Generation {
        let rest = self.stream.finish().text;
        if !rest.is_empty() {
            self.text.push_str(&rest);
            let piece = Piece { sequence: self.sequence, token: None, bytes: &[], text: &rest };
            // The generation is over: there is nothing left to stop.
            let _ = on_piece(piece);
        }
        Generation {
            tokens: self.tokens,
            text: self.text,
            finish_reason: self.finish.unwrap_or(FinishReason::Length),
            error: self.error,
            latencies: self.latencies,
        }
    }
}
