//! Runs a synthetic model and counts: what was asked for is one thing, what came out another.
//!
//! A model that is larger than `MOST` is measured on a cut of it, which has all of the first layers' attention and the
//! neurons of some layers, the same bytes as in the whole.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use neuropil_device::{Activation, ActivationKind, Backend, quant};

use crate::engine::{Engine, EngineError, SessionOptions};
use crate::gguf::{Gguf, TensorInfo};
use crate::pipeline::{Activity, CancelToken};
use crate::predict::{GateObserver, GateSeen, Prediction};
use crate::store::{Layout, Store};

use super::file::{Kind, ModelFile};
use super::{Synth, SynthError, weights};

/// Most bytes of a file that is loaded to be measured.
const MOST: u64 = 1300 << 20;

/// Layers that a cut has at most: more do not change the means.
const MOST_LAYERS: usize = 9;

/// Sequences, tokens of the prompt of each, and tokens that are watched after it. One sequence alone has its own topic,
/// and is louder or quieter than the mean.
const SEQUENCES: usize = 4;
const PROMPT: usize = 16;
const TOKENS: usize = 16;

/// Of so many tokens one is compared with the predictor.
const RECALL_EVERY: usize = 4;

/// What a run of the model gave. Shares are means over tokens and layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Share of the neurons (of the experts that a token uses) that fired.
    pub active: f64,
    /// Share of a token's active neurons that were active for the token before. With experts: in those that both used.
    pub overlap: f64,
    /// Share of the active neurons that the predictors found.
    pub recall: Option<f64>,
    /// Share of the neurons that the predictors marked.
    pub predicted: Option<f64>,
    /// Tokens that were decoded.
    pub tokens: usize,
    /// The layers whose neurons ran.
    pub layers: Vec<usize>,
}

impl Synth {
    /// Runs the store at `path` on `backend` and counts what fires. Of a store that is large a cut is written beside
    /// it, measured and removed.
    ///
    /// # Errors
    /// Those of writing the cut, and [`SynthError::Engine`].
    pub fn measure(
        &self,
        path: &Path,
        backend: &dyn Backend,
        cancel: &CancelToken,
    ) -> Result<Measured, SynthError> {
        let layers = self.options.shape.layers;
        let chosen = self.chosen_layers();
        if chosen.len() == layers {
            return self.run(path, backend, chosen, cancel);
        }
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(".cut");
        let cut = Removed(path.with_file_name(name));
        let weights = self.weights.cut(chosen.clone());
        self.write(&cut.0, &weights, Kind::Store(self.layout), cancel, &mut |_, _| {})?;
        self.run(&cut.0, backend, chosen, cancel)
    }

    /// The layers that are measured: as many as fit, evenly spread, the first ones where attention needs them.
    fn chosen_layers(&self) -> Vec<usize> {
        let layers = self.options.shape.layers;
        let size = |layers: usize| {
            let weights = self.weights.cut((0..layers).collect());
            ModelFile::new(&weights, self.options.dtype, Kind::Store(self.layout)).bytes()
        };
        let least = self.options.shape.first_rotating() + 1;
        if size(layers) <= MOST {
            return (0..layers).collect();
        }
        let mut count = least;
        while count < layers.min(MOST_LAYERS) && size(count + 1) <= MOST {
            count += 1;
        }
        let rest = count + 1 - least;
        // Layers before the means are made stay what they are; the others are spread over the model.
        let spread = (0..rest).map(|i| least - 1 + (2 * i + 1) * (layers + 1 - least) / (2 * rest));
        (0..least - 1).chain(spread).collect()
    }

    fn run(
        &self,
        path: &Path,
        backend: &dyn Backend,
        layers: Vec<usize>,
        cancel: &CancelToken,
    ) -> Result<Measured, SynthError> {
        let shape = &self.options.shape;
        let prompt = |sequence| weights::prompt(self.options.seed, sequence, shape.vocab, PROMPT);
        let prompts: Vec<Vec<u32>> = (0..SEQUENCES).map(prompt).collect();
        let seen = Arc::new(Mutex::new(Seen { activation: shape.activation, ..Seen::default() }));
        let engine = Engine::builder(path).backend(backend)?.prediction(Prediction::Gate).build()?;
        decode(&engine, &prompts, Some(&seen), cancel)?;
        let store = Store::read(engine.gguf())?;
        let mut counts = Counts::default();
        {
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            let gguf = engine.gguf();
            for (layer, of) in store.layers.iter().enumerate() {
                let several = of.numbered;
                for (expert, bundles) in of.bundles.iter().enumerate() {
                    let is_own = |moment: &mut Moment| (moment.layer, moment.expert) == (layer, expert);
                    let mut own: Vec<Moment> = seen.moments.extract_if(.., is_own).collect();
                    if shape.activation.kind == ActivationKind::Drelu {
                        drop_silent_ups(&mut own, (gguf, bundles), &of.layout, shape.activation)?;
                    }
                    let predictor = self.options.predictor.map(|_| {
                        let which = if several { format!(".{expert}") } else { String::new() };
                        ["fc1", "fc2"].map(|part| format!("blk.{layer}.{part}{which}.weight"))
                    });
                    counts.add(&own, of.layout.neurons);
                    if let Some(names) = predictor {
                        counts.compare(&own, gguf, &names)?;
                    }
                }
            }
        }
        drop(engine);
        let share = |[some, all]: [u64; 2]| some as f64 / all.max(1) as f64;
        let predicted = match self.options.predictor {
            None => None,
            Some(_) => {
                let engine = Engine::builder(path).backend(backend)?.prediction(Prediction::Model).build()?;
                Some(decode(&engine, &prompts, None, cancel)?)
            }
        };
        Ok(Measured {
            active: share(counts.active),
            overlap: share(counts.shared),
            recall: predicted.map(|_| share(counts.found)),
            predicted,
            tokens: SEQUENCES * TOKENS,
            layers,
        })
    }
}

/// A file that is gone when this is.
struct Removed(std::path::PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        // One that cannot be removed stays; its name says what it is.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Reads each prompt and decodes greedily; returns the share of neurons that the engine computed.
fn decode(
    engine: &Engine,
    prompts: &[Vec<u32>],
    seen: Option<&Arc<Mutex<Seen>>>,
    cancel: &CancelToken,
) -> Result<f64, SynthError> {
    let mut activity = Activity::default();
    for (sequence, prompt) in prompts.iter().enumerate() {
        let mut session = engine.session(SessionOptions::default())?;
        session.prefill(prompt)?;
        session.observe(seen.map(|seen| seen.clone() as _));
        for index in 0..TOKENS {
            if cancel.is_cancelled() {
                return Err(SynthError::Cancelled);
            }
            if let Some(seen) = seen {
                // Between sequences the count jumps, so that their tokens are not taken for neighbours.
                let token = sequence * (TOKENS + 1) + index;
                seen.lock().unwrap_or_else(PoisonError::into_inner).token = token;
            }
            let logits = session.logits().iter().enumerate();
            let next = logits.reduce(|best, next| if next.1 > best.1 { next } else { best });
            session.decode(next.map_or(0, |(id, _)| id as u32))?;
        }
        activity.merge(session.activity());
    }
    Ok(activity.share())
}

/// What one feed-forward read, and which of its gates were on.
struct Moment {
    token: usize,
    layer: usize,
    expert: usize,
    h: Vec<f32>,
    /// Positions of the neurons that fired, ascending.
    on: Vec<u32>,
}

struct Seen {
    activation: Activation,
    token: usize,
    moments: Vec<Moment>,
}

impl Default for Seen {
    fn default() -> Seen {
        Seen { activation: Activation::new(ActivationKind::Relu), token: 0, moments: Vec::new() }
    }
}

impl GateObserver for Seen {
    fn gate(&mut self, seen: &GateSeen<'_>) {
        let on = (0u32..).zip(seen.gate).filter(|(_, gate)| !self.activation.is_off(**gate));
        let on = on.map(|(position, _)| position).collect();
        let (token, layer, expert, h) = (self.token, seen.layer, seen.expert, seen.h.to_vec());
        self.moments.push(Moment { token, layer, expert, h, on });
    }
}

/// Leaves only the neurons on whose up value is positive too.
fn drop_silent_ups(
    moments: &mut [Moment],
    (gguf, bundles): (&Gguf, &TensorInfo),
    layout: &Layout,
    activation: Activation,
) -> Result<(), SynthError> {
    if moments.is_empty() {
        return Ok(());
    }
    let mut at = vec![0; moments.len()];
    let mut kept: Vec<Vec<u32>> = vec![Vec::new(); moments.len()];
    for position in 0..layout.neurons {
        let needs = |moment: &Moment, at: usize| moment.on.get(at) == Some(&(position as u32));
        if !moments.iter().zip(&at).any(|(moment, at)| needs(moment, *at)) {
            continue;
        }
        let up = row(gguf, bundles, layout, position, layout.gate_bytes)?;
        for ((moment, at), kept) in moments.iter().zip(&mut at).zip(&mut kept) {
            if needs(moment, *at) {
                *at += 1;
                if dot(&up, &moment.h) > activation.threshold {
                    kept.push(position as u32);
                }
            }
        }
    }
    moments.iter_mut().zip(kept).for_each(|(moment, kept)| moment.on = kept);
    Ok(())
}

/// A row of a bundle.
fn row(
    gguf: &Gguf,
    bundles: &TensorInfo,
    layout: &Layout,
    position: usize,
    at: usize,
) -> Result<Vec<f32>, SynthError> {
    let mut bytes = vec![0; quant::bundle_row_bytes(layout.gate_type, layout.width).unwrap_or(0)];
    let from = (position * layout.stride + at) as u64;
    gguf.read_part(bundles, from, &mut bytes).map_err(EngineError::Gguf)?;
    let mut values = vec![0.0; layout.width];
    quant::dequantize_bundle_row(layout.gate_type, &bytes, &mut values);
    Ok(values)
}

/// Eight sums, so that the compiler makes vectors of them.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, b) = (a.as_chunks::<8>().0, b.as_chunks::<8>().0);
    let mut sums = [0f32; 8];
    for (a, b) in a.iter().zip(b) {
        (0..8).for_each(|i| sums[i] += a[i] * b[i]);
    }
    sums.iter().sum()
}

/// Some of how many.
#[derive(Default)]
struct Counts {
    active: [u64; 2],
    shared: [u64; 2],
    found: [u64; 2],
}

impl Counts {
    /// Counts what one feed-forward did.
    fn add(&mut self, moments: &[Moment], neurons: usize) {
        for moment in moments {
            self.active[0] += moment.on.len() as u64;
            self.active[1] += neurons as u64;
        }
        for pair in moments.windows(2) {
            let [before, now] = pair else { continue };
            if now.token == before.token + 1 {
                let both = now.on.iter().filter(|position| before.on.binary_search(position).is_ok());
                self.shared[0] += both.count() as u64;
                self.shared[1] += now.on.len() as u64;
            }
        }
    }

    /// Counts the neurons that fired whose score is positive. The norm's weights are 1, so the normed stream gives the
    /// signs that the stream gives.
    fn compare(&mut self, moments: &[Moment], gguf: &Gguf, names: &[String; 2]) -> Result<(), SynthError> {
        let moments: Vec<&Moment> = moments.iter().filter(|m| m.token % RECALL_EVERY == 0).collect();
        if moments.is_empty() {
            return Ok(());
        }
        let [first, second] = names.each_ref().map(|name| gguf.require(name).map_err(EngineError::Gguf));
        let mut hidden = vec![Vec::new(); moments.len()];
        each_row(gguf, first?, |_, row| {
            for (moment, hidden) in moments.iter().zip(&mut hidden) {
                hidden.push(dot(row, &moment.h).max(0.0));
            }
        })?;
        let mut at = vec![0; moments.len()];
        let mut found = 0;
        each_row(gguf, second?, |position, row| {
            for ((moment, at), hidden) in moments.iter().zip(&mut at).zip(&hidden) {
                if moment.on.get(*at) == Some(&(position as u32)) {
                    *at += 1;
                    found += u64::from(dot(row, hidden) > 0.0);
                }
            }
        })?;
        self.found[0] += found;
        self.found[1] += moments.iter().map(|moment| moment.on.len() as u64).sum::<u64>();
        Ok(())
    }
}

/// Calls `visit` with each row of a matrix, widened.
fn each_row(
    gguf: &Gguf,
    tensor: &TensorInfo,
    mut visit: impl FnMut(usize, &[f32]),
) -> Result<(), SynthError> {
    let (Some(dtype), Some(cols)) = (tensor.dtype, tensor.dims.first()) else { return Ok(()) };
    let cols = *cols as usize;
    let row_bytes = dtype.row_bytes(cols).unwrap_or(1);
    let mut bytes = vec![0; row_bytes];
    let mut values = vec![0.0; cols];
    for index in 0..tensor.bytes as usize / row_bytes {
        gguf.read_part(tensor, (index * row_bytes) as u64, &mut bytes).map_err(EngineError::Gguf)?;
        quant::dequantize_row(dtype, &bytes, &mut values);
        visit(index, &values);
    }
    Ok(())
}
