//! One sequence of tokens: its KV cache, its logits, its bounds.

use std::mem;
use std::sync::Arc;

use neuropil_device::{AttentionRow, KV_PAGE};

use crate::model::sampler::log_sum_exp;
use crate::model::{KvCache, KvShape, KvType, Sequences, Step};
use crate::pipeline::{Activity, CancelToken, StepTimes};
use crate::predict::SharedObserver;

use super::{Engine, EngineError, Record};

/// How a session is set up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionOptions {
    /// Most tokens it can hold; `None` for as many as the model was made for. Memory is taken as tokens come.
    pub context: Option<usize>,
    /// Precision of keys and values.
    pub kv: KvType,
    /// Leave neurons out in prompts too, all positions but the first, as in decode: to measure what that costs.
    pub sparse_prompt: bool,
}

/// One sequence of tokens. It is at a *position*, the number of tokens it holds, and has the logits of what comes next.
pub struct Session {
    engine: Engine,
    cache: KvCache,
    tokens: Vec<u32>,
    context: usize,
    /// `[vocab]`, or empty before the first token.
    logits: Vec<f32>,
    cancel: CancelToken,
    record: Record,
    sparse_prompt: bool,
    lists: StepLists,
}

/// Where a scored prefill hands its logits.
type OnLogits<'a> = dyn FnMut(usize, &[f32]) -> Result<(), EngineError> + Sync + 'a;

impl Session {
    pub(super) fn new(engine: Engine, options: SessionOptions) -> Result<Session, EngineError> {
        let spec = engine.spec();
        let context = options.context.unwrap_or(spec.context);
        if context > spec.context {
            return Err(EngineError::ContextTooLarge { asked: context, context: spec.context });
        }
        let shape = KvShape {
            layers: spec.layers,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            kind: options.kv,
        };
        let cache = KvCache::new(shape, engine.inner.room.clone());
        Ok(Session {
            engine,
            cache,
            tokens: Vec::new(),
            context,
            logits: Vec::new(),
            cancel: CancelToken::default(),
            record: Record::default(),
            sparse_prompt: options.sparse_prompt,
            lists: StepLists::default(),
        })
    }

    /// The engine it belongs to.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The tokens it holds.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Most tokens it can hold.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Logits of the next token, `[vocab]`; empty before the first token and after [`Session::truncate`].
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// Bytes of its KV cache, pages that it shares with forks included.
    pub fn kv_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Where its time went so far.
    pub fn times(&self) -> StepTimes {
        self.record.times
    }

    /// How many of the neurons of a store were computed for its tokens, prompts aside. What sessions decode together is
    /// counted with the first of them, as their time is.
    pub fn activity(&self) -> &Activity {
        &self.record.activity
    }

    /// Lets somebody watch the gates while its tokens run, and those of sessions that decode with it as the first;
    /// needs an engine with [`Prediction::Gate`] or [`Prediction::Threshold`].
    ///
    /// [`Prediction::Gate`]: crate::predict::Prediction::Gate
    /// [`Prediction::Threshold`]: crate::predict::Prediction::Threshold
    pub fn observe(&mut self, observer: Option<SharedObserver>) {
        self.record.observer = observer;
    }

    /// A switch that stops its work from another thread, seen within one layer.
    pub fn cancel_token(&self) -> CancelToken {
        self.cancel.clone()
    }

    /// Another session with the same tokens and a switch of its own. The two share the cache of what they have in
    /// common, so many answers to one prompt cost one prefill.
    pub fn fork(&self) -> Session {
        Session {
            engine: self.engine.clone(),
            cache: self.cache.fork(),
            tokens: self.tokens.clone(),
            context: self.context,
            logits: self.logits.clone(),
            cancel: CancelToken::default(),
            record: Record::default(),
            sparse_prompt: self.sparse_prompt,
            lists: StepLists::default(),
        }
    }

    /// Forgets the tokens from `len` on.
    pub fn truncate(&mut self, len: usize) {
        if len < self.tokens.len() {
            self.tokens.truncate(len);
            self.cache.truncate(len);
            self.logits.clear();
        }
    }

    /// Makes `tokens` the session's tokens, and computes only what it does not hold already: the common beginning
    /// is kept.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn set_tokens(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        if tokens.len() > self.context {
            return Err(EngineError::ContextFull { tokens: tokens.len(), context: self.context });
        }
        let common = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        // The last token always goes through the model, for its logits.
        self.truncate(common.min(tokens.len().saturating_sub(1)));
        let rest = &tokens[self.tokens.len()..];
        self.prefill(rest)
    }

    /// Appends tokens, the prompt or a part of it. The logits are those after the last one.
    ///
    /// # Errors
    /// [`EngineError::ContextFull`] before any work when they do not fit, [`EngineError::EmptyPrompt`],
    /// [`EngineError::Token`], [`EngineError::Cancelled`]. After an error the session holds the tokens of the chunks
    /// that were done.
    ///
    /// [`GgufError::Changed`](crate::gguf::GgufError::Changed) when somebody has written into the model's file: then the
    /// engine is of no use any more. A file that another one is renamed over is read to the end as it was.
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        self.append(tokens, None)
    }

    /// As [`Session::prefill`], and hands over the logits after each token from `tokens[from]` on, with the token's
    /// index.
    ///
    /// # Errors
    /// As [`Session::prefill`], and what `on_logits` returns.
    pub fn prefill_scored(
        &mut self,
        tokens: &[u32],
        from: usize,
        on_logits: &mut OnLogits<'_>,
    ) -> Result<(), EngineError> {
        self.append(tokens, Some((from, on_logits)))
    }

    /// How badly the model predicts a chunk of text: the sum of `-ln p` of the tokens in its second half, each given
    /// those before it. What the session held is forgotten. Perplexity is `exp` of the mean over chunks.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn loss(&mut self, chunk: &[u32]) -> Result<f64, EngineError> {
        self.truncate(0);
        let Some((_, read)) = chunk.split_last() else { return Ok(0.0) };
        let mut sum = 0.0;
        self.prefill_scored(read, chunk.len() / 2, &mut |at, logits| {
            let token = chunk.get(at + 1).copied().unwrap_or(0);
            let next = logits.get(token as usize);
            let next = next.ok_or(EngineError::Token { token, vocab: logits.len() })?;
            sum += log_sum_exp(logits) - f64::from(*next);
            Ok(())
        })?;
        Ok(sum)
    }

    /// Appends one token; the logits are those after it.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn decode(&mut self, token: u32) -> Result<(), EngineError> {
        let engine = self.engine.clone();
        engine.decode(std::slice::from_mut(self), &[(0, token)])
    }

    /// Makes room for `len` tokens, up to the end of a page of the cache: within a page a token allocates nothing.
    fn reserve(&mut self, len: usize) -> Result<(), EngineError> {
        self.cache.reserve(len)?;
        self.tokens.reserve(len.next_multiple_of(KV_PAGE) - self.tokens.len());
        Ok(())
    }

    fn append(
        &mut self,
        tokens: &[u32],
        mut scored: Option<(usize, &mut OnLogits<'_>)>,
    ) -> Result<(), EngineError> {
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let total = self.tokens.len() + tokens.len();
        if total > self.context {
            return Err(EngineError::ContextFull { tokens: total, context: self.context });
        }
        let mut rows = Vec::new();
        let mut outputs = Vec::new();
        let mut predict = Vec::new();
        let mut done = 0;
        for chunk in tokens.chunks(self.engine.prefill_chunk()) {
            let first = self.tokens.len();
            rows.clear();
            rows.extend((0..chunk.len()).map(|i| AttentionRow { sequence: 0, position: first + i }));
            // A prompt is computed with all neurons, and the first position, the attention sink, always is.
            predict.clear();
            predict.extend((first..first + chunk.len()).map(|position| self.sparse_prompt && position > 0));
            let last = done + chunk.len() == tokens.len();
            let from = match &scored {
                Some((from, _)) => from.saturating_sub(done).min(chunk.len()),
                None => chunk.len(),
            };
            outputs.clear();
            outputs.extend(from..chunk.len());
            if last && outputs.is_empty() {
                outputs.push(chunk.len() - 1);
            }
            self.reserve(first + chunk.len())?;
            let mut sequence = Prefill {
                cache: &mut self.cache,
                logits: &mut self.logits,
                last_row: last.then_some(chunk.len() - 1),
                cancel: &self.cancel,
                scored: scored.as_mut().map(|(from, on_logits)| (*from, done, &mut **on_logits)),
            };
            let step = Step {
                tokens: chunk,
                rows: &rows,
                sequences: &mut sequence,
                outputs: &outputs,
                predict: &predict,
            };
            self.engine.run(step, true, &mut self.record)?;
            self.cache.commit(first + chunk.len());
            self.tokens.extend_from_slice(chunk);
            if !last {
                self.logits.clear();
            }
            done += chunk.len();
        }
        Ok(())
    }
}

/// The one sequence of a prefill.
struct Prefill<'a, 'b> {
    cache: &'a mut KvCache,
    logits: &'a mut Vec<f32>,
    last_row: Option<usize>,
    cancel: &'a CancelToken,
    /// First index to score, index of the chunk's first token, receiver.
    scored: Option<(usize, usize, &'a mut OnLogits<'b>)>,
}

impl Sequences for Prefill<'_, '_> {
    fn cache(&self, _: usize) -> &KvCache {
        self.cache
    }

    fn cache_mut(&mut self, _: usize) -> &mut KvCache {
        self.cache
    }

    fn take_logits(&mut self, row: usize, logits: &[f32]) -> Result<(), EngineError> {
        if self.last_row == Some(row) {
            self.logits.clear();
            self.logits.extend_from_slice(logits);
        }
        match &mut self.scored {
            Some((from, first, on_logits)) if *first + row >= *from => on_logits(*first + row, logits),
            _ => Ok(()),
        }
    }

    fn cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }
}

/// Sessions that decode together.
struct Batch<'a> {
    sessions: &'a mut [Session],
    inputs: &'a [(usize, u32)],
}

impl Sequences for Batch<'_> {
    fn cache(&self, sequence: usize) -> &KvCache {
        &self.sessions[sequence].cache
    }

    fn cache_mut(&mut self, sequence: usize) -> &mut KvCache {
        &mut self.sessions[sequence].cache
    }

    fn take_logits(&mut self, row: usize, logits: &[f32]) -> Result<(), EngineError> {
        let session = &mut self.sessions[self.inputs[row].0];
        session.logits.clear();
        session.logits.extend_from_slice(logits);
        Ok(())
    }

    fn cancelled(&self) -> bool {
        self.inputs.iter().all(|(index, _)| self.sessions[*index].cancel.is_cancelled())
    }
}

impl Engine {
    /// Appends one token to each of some sessions, all in one step. `inputs` holds pairs of a session's index and its
    /// token, in ascending order of index. Each session's logits are the same as if it ran alone.
    ///
    /// # Errors
    /// [`EngineError::ContextFull`], [`EngineError::Token`], [`EngineError::Sequence`], and
    /// [`EngineError::Cancelled`] when all of the sessions are. After an error no session holds a new token.
    pub fn decode(&self, sessions: &mut [Session], inputs: &[(usize, u32)]) -> Result<(), EngineError> {
        let Some((first, _)) = inputs.first() else { return Ok(()) };
        let count = sessions.len();
        if let Some((index, _)) = inputs.iter().find(|(index, _)| *index >= count) {
            return Err(EngineError::Sequence(*index));
        }
        if let Some(foreign) = sessions.iter().position(|s| !Arc::ptr_eq(&s.engine.inner, &self.inner)) {
            return Err(EngineError::Sequence(foreign));
        }
        if let Some(pair) = inputs.windows(2).find(|pair| pair[0].0 >= pair[1].0) {
            return Err(EngineError::Sequence(pair[1].0));
        }
        for (index, _) in inputs {
            let session = &mut sessions[*index];
            let tokens = session.tokens.len() + 1;
            if tokens > session.context {
                return Err(EngineError::ContextFull { tokens, context: session.context });
            }
            session.reserve(tokens)?;
        }
        // The step's lists live with the first session's, so that a token allocates nothing once they have grown.
        let mut lists = mem::take(&mut sessions[*first].lists);
        lists.fill(inputs, sessions);
        let mut record = mem::take(&mut sessions[*first].record);
        let step = Step {
            tokens: &lists.tokens,
            rows: &lists.rows,
            sequences: &mut Batch { sessions, inputs },
            outputs: &lists.outputs,
            predict: &lists.predict,
        };
        if let Some(storage) = &self.inner.storage {
            storage.batch(inputs.len());
        }
        let result = self.run(step, false, &mut record);
        let first = &mut sessions[*first];
        first.lists = lists;
        first.record = record;
        result?;
        for (index, token) in inputs {
            let session = &mut sessions[*index];
            session.tokens.push(*token);
            session.cache.commit(session.tokens.len());
        }
        Ok(())
    }
}

/// What a decode step lists, one entry per session.
#[derive(Default)]
struct StepLists {
    tokens: Vec<u32>,
    rows: Vec<AttentionRow>,
    outputs: Vec<usize>,
    predict: Vec<bool>,
}

impl StepLists {
    fn fill(&mut self, inputs: &[(usize, u32)], sessions: &[Session]) {
        self.tokens.clear();
        self.rows.clear();
        self.outputs.clear();
        self.predict.clear();
        for (row, (index, token)) in inputs.iter().enumerate() {
            self.tokens.push(*token);
            self.rows.push(AttentionRow { sequence: *index, position: sessions[*index].tokens.len() });
            self.outputs.push(row);
            // The first position carries the attention sink: it is always computed with all neurons.
            self.predict.push(!sessions[*index].tokens.is_empty());
        }
    }
}
