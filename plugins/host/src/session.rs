//! What the thread of a unit does: calls of the plugin, with tokens cut into buckets and results looked at.
//!
//! Inputs come as copies with a tail of zeros, outputs as new memory full of NaN; so the pieces of a long input are
//! neighbouring parts of both, and what the unit did not write is seen.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use neuropil_device::{Activation, DeviceError, Stage};
use neuropil_plugin_abi as abi;

use crate::Scheme;
use crate::border::{
    Answer, Canceller, ClusterCall, Failure, Library, Parts, Question, Unit, UnitInfo, WeightHandle,
};
use crate::options::Options;
use crate::pieces::pieces;
use crate::plans;
use crate::projection::Projection;
use crate::weight::{Part, Weight};
use crate::worker::{Held, Shared};

/// An open unit, on its thread.
pub(crate) struct Session {
    unit: Unit,
    pub info: UnitInfo,
    pub options: Arc<Options>,
    plugin: String,
    shared: Arc<Shared>,
    answers: HashMap<Question, Result<Answer, String>>,
    /// What failed its test, with the reason: schemes of matmuls (false) and clusters (true).
    off: HashMap<(bool, Scheme), String>,
    /// Whether blocks of two schemes work.
    pub pairs: HashMap<(Scheme, Scheme), bool>,
    /// The errors of products in the self-test.
    errors: HashMap<Scheme, f64>,
}

/// What a stage of a feed-forward reads.
pub(crate) struct Inputs {
    /// `[tokens, width]`; empty for [`Stage::Down`].
    pub x: Vec<f32>,
    /// `[tokens, neurons]`; empty where the stage does not read it.
    pub hidden: Vec<f32>,
}

/// What it writes; empty where it does not.
#[derive(Default)]
pub(crate) struct Outputs {
    /// `[tokens, neurons]`.
    pub hidden: Vec<f32>,
    /// `[tokens, width]`.
    pub y: Vec<f32>,
}

impl Session {
    /// Opens a unit.
    pub fn open(
        library: &Arc<Library>,
        index: usize,
        options: &Arc<Options>,
        shared: &Arc<Shared>,
    ) -> Result<Session, DeviceError> {
        let plugin = library.name.clone();
        let opened = Unit::open(library, index, &options.plugin).and_then(|unit| Ok((unit.info()?, unit)));
        let (info, unit) = opened.map_err(|failure| error(shared, &plugin, failure, 0))?;
        let (options, shared) = (options.clone(), shared.clone());
        let (answers, off, errors, pairs) = Default::default();
        Ok(Session { unit, info, options, plugin, shared, answers, off, pairs, errors })
    }

    pub fn canceller(&self) -> Canceller {
        self.unit.canceller()
    }

    pub fn has_clusters(&self) -> bool {
        self.unit.has_clusters()
    }

    pub fn has_plans(&self) -> bool {
        self.unit.has_plans()
    }

    pub fn free(&self, handle: WeightHandle) {
        self.unit.free(handle);
    }

    /// Never uses a scheme for matmuls, or for clusters, again.
    pub fn switch_off(&mut self, clusters: bool, scheme: Scheme, reason: String) {
        self.off.insert((clusters, scheme), reason);
    }

    /// Remembers how far off the products of a scheme were in their test.
    pub fn remember_error(&mut self, scheme: Scheme, error: f64) {
        self.errors.insert(scheme, error);
    }

    /// Asks the plugin, once per question; a no comes with its reason.
    pub fn ask(&mut self, question: Question) -> Result<Answer, String> {
        let clusters = question.cluster.is_some();
        let schemes = [Some(question.scheme), question.cluster.map(|(_, _, down)| down)];
        if let Some(reason) =
            schemes.into_iter().flatten().find_map(|scheme| self.off.get(&(clusters, scheme)))
        {
            return Err(reason.clone());
        }
        if let Some(answer) = self.answers.get(&question) {
            return answer.clone();
        }
        self.alive().map_err(|lost| lost.to_string())?;
        let answer = self.unit.query(&question).map_err(|failure| {
            if failure.code == abi::NP_LOST {
                self.shared.lose(&failure.text);
            }
            failure.text
        });
        self.answers.insert(question, answer.clone());
        answer
    }

    /// Hands a weight over, with the buckets that its jobs may have; as the plan that was saved of it, if there is one.
    pub fn prepare(
        &self,
        parts: &Parts<'_>,
        buckets: Vec<usize>,
        plan: Option<&[u8]>,
    ) -> Result<(Part, usize), DeviceError> {
        let bytes = match parts {
            Parts::One(matrix) => matrix.bytes(),
            Parts::Neurons { gate, up, down } => gate.bytes() + up.bytes() + down.bytes(),
        };
        self.alive()?;
        let handle = match plan {
            Some(plan) => self.unit.load_plan(plan, parts),
            None => self.unit.prepare(parts),
        };
        let handle = handle.map_err(|failure| self.error(failure, bytes))?;
        let bytes = handle.bytes;
        let held: Held = self.shared.hold(handle);
        let projection = match parts {
            Parts::One(matrix) => Some(Projection::new(matrix, self.errors.get(&matrix.scheme).copied())?),
            Parts::Neurons { .. } => None,
        };
        Ok((Part { held, buckets, projection, plan: None }, bytes))
    }

    /// The plan of a weight, of at most `most` bytes. The weight stays good when that fails.
    pub fn save(&self, part: &Part, most: usize) -> Result<Vec<u8>, DeviceError> {
        self.alive()?;
        self.unit.save_plan(self.handle(part)?, most).map_err(|failure| self.error(failure, 0))
    }

    fn error(&self, failure: Failure, bytes: usize) -> DeviceError {
        error(&self.shared, &self.plugin, failure, bytes)
    }

    fn wrong(&self, what: &str) -> DeviceError {
        DeviceError::Plugin { plugin: self.plugin.clone(), code: 0, text: what.into() }
    }

    fn handle<'a>(&self, part: &'a Part) -> Result<&'a WeightHandle, DeviceError> {
        part.held.handle().ok_or(DeviceError::ForeignHandle { device: self.shared.name.clone() })
    }

    /// The error for wrong results. Kept plans of the weights are not used again: they may be why.
    fn wrong_result(&self, parts: &[&Part], what: &str) -> DeviceError {
        parts.iter().filter_map(|part| part.plan.as_deref()).for_each(plans::remove);
        self.wrong(what)
    }

    /// Values that are not finite, where the inputs are, are the unit's fault.
    fn check(&self, parts: &[&Part], inputs: &[&[f32]], outputs: &[Vec<f32>]) -> Result<(), DeviceError> {
        let finite = |values: &[f32]| values.iter().all(|value| value.is_finite());
        if outputs.iter().all(|y| finite(y)) || !inputs.iter().all(|x| finite(x)) {
            return Ok(());
        }
        Err(self.wrong_result(parts, "the result has values that are not finite, or that it did not write"))
    }

    /// Multiplies `x`, `[tokens, cols]`, with weights that share it; each output is `[tokens, rows]`.
    pub fn multiply(
        &self,
        parts: &[&Part],
        tokens: usize,
        mut x: Vec<f32>,
    ) -> Result<Vec<Vec<f32>>, DeviceError> {
        let alike = parts.windows(2).all(|pair| pair[0].buckets == pair[1].buckets);
        let mut outputs = Vec::with_capacity(parts.len());
        for parts in parts.chunks(if alike { parts.len().max(1) } else { 1 }) {
            let handles = parts.iter().map(|part| self.handle(part)).collect::<Result<Vec<_>, _>>()?;
            let cols = handles.first().map_or(0, |handle| handle.shape.1);
            let buckets = pieces(tokens, &parts[0].buckets);
            let padded = buckets.iter().sum::<usize>();
            resize(&mut x, padded, cols, 0.0)?;
            let mut group = Vec::with_capacity(parts.len());
            for handle in &handles {
                let mut y = Vec::new();
                resize(&mut y, padded, handle.shape.0, f32::NAN)?;
                group.push(y);
            }
            let mut first = 0;
            for bucket in buckets {
                let x = &x[first * cols..(first + bucket) * cols];
                let ys = group.iter_mut().zip(&handles);
                let ys = ys.map(|(y, h)| (*h, &mut y[first * h.shape.0..(first + bucket) * h.shape.0]));
                let mut products: Vec<(&WeightHandle, &mut [f32])> = ys.collect();
                self.alive()?;
                let done = self.unit.matmul(bucket, self.limit(), x, &mut products);
                done.map_err(|failure| self.error(failure, 0))?;
                first += bucket;
            }
            x.truncate(tokens * cols);
            for ((y, handle), part) in group.iter_mut().zip(&handles).zip(parts) {
                y.truncate(tokens * handle.shape.0);
                if part.projection.as_ref().is_some_and(|projection| !projection.fits(&x, y)) {
                    return Err(self.wrong_result(&[part], "the result of a product is wrong"));
                }
            }
            outputs.append(&mut group);
        }
        self.check(parts, &[&x], &outputs)?;
        Ok(outputs)
    }

    /// A unit that was given up is not called any more.
    fn alive(&self) -> Result<(), DeviceError> {
        self.shared.lost().map_or(Ok(()), |lost| Err(lost.clone()))
    }

    fn limit(&self) -> Duration {
        self.options.deadline
    }

    /// Runs a stage of the feed-forward of a block.
    pub fn feed_forward(
        &self,
        weight: &Weight,
        stage: Stage,
        activation: Activation,
        tokens: usize,
        inputs: Inputs,
    ) -> Result<Outputs, DeviceError> {
        match weight {
            Weight::Matrix(_) => Err(self.wrong("a matrix is no block of neurons")),
            Weight::Block(part) => self.whole(part, stage, activation, tokens, inputs),
            Weight::Apart(parts) => self.apart(parts, stage, activation, tokens, inputs),
        }
    }

    /// The unit runs the stage.
    fn whole(
        &self,
        part: &Part,
        stage: Stage,
        activation: Activation,
        tokens: usize,
        Inputs { mut x, mut hidden }: Inputs,
    ) -> Result<Outputs, DeviceError> {
        let weight = self.handle(part)?;
        let (neurons, width) = weight.shape;
        let buckets = pieces(tokens, &part.buckets);
        let padded = buckets.iter().sum::<usize>();
        let mut y = Vec::new();
        let input_hidden = if stage.reads_hidden() { hidden.clone() } else { Vec::new() };
        if stage.reads_x() {
            resize(&mut x, padded, width, 0.0)?;
        }
        if stage.has_hidden() {
            resize(&mut hidden, padded, neurons, if stage.reads_hidden() { 0.0 } else { f32::NAN })?;
        }
        if stage.has_down() {
            resize(&mut y, padded, width, f32::NAN)?;
        }
        let mut first = 0;
        for bucket in buckets {
            let of = |cols: usize| first * cols..(first + bucket) * cols;
            let job = ClusterCall {
                stage,
                activation,
                tokens: bucket,
                deadline: self.limit(),
                weight,
                x: stage.reads_x().then(|| &x[of(width)]),
                hidden: if stage.has_hidden() { Some(&mut hidden[of(neurons)]) } else { None },
                y: if stage.has_down() { Some(&mut y[of(width)]) } else { None },
            };
            self.alive()?;
            self.unit.cluster(job).map_err(|failure| self.error(failure, 0))?;
            first += bucket;
        }
        if !stage.writes_hidden() {
            hidden = Vec::new();
        }
        hidden.truncate(tokens * neurons);
        y.truncate(tokens * width);
        let outputs = [hidden, y];
        self.check(&[part], &[&x, &input_hidden], &outputs)?;
        let [hidden, y] = outputs;
        Ok(Outputs { hidden, y })
    }

    /// The unit multiplies, and the host does the rest.
    fn apart(
        &self,
        [gate, up, down]: &[Part; 3],
        stage: Stage,
        activation: Activation,
        tokens: usize,
        Inputs { x, mut hidden }: Inputs,
    ) -> Result<Outputs, DeviceError> {
        let first: &[&Part] = match (stage.has_gate(), stage.has_up()) {
            (true, true) => &[gate, up],
            (true, false) => &[gate],
            (false, true) => &[up],
            (false, false) => &[],
        };
        let mut products = if first.is_empty() { Vec::new() } else { self.multiply(first, tokens, x)? };
        let ups = if stage.has_up() { products.pop() } else { None };
        if let Some(gates) = products.pop() {
            hidden = gates;
        }
        if let Some(ups) = ups {
            activation.apply_slice(&mut hidden, &ups);
        }
        if !stage.has_down() {
            return Ok(Outputs { hidden, y: Vec::new() });
        }
        let y = self.multiply(&[down], tokens, hidden)?.pop().unwrap_or_default();
        Ok(Outputs { hidden: Vec::new(), y })
    }
}

/// Makes a buffer `tokens` times `cols` values long.
fn resize(values: &mut Vec<f32>, tokens: usize, cols: usize, fill: f32) -> Result<(), DeviceError> {
    let refuse = || DeviceError::OutOfMemory {
        device: "host".into(),
        bytes: tokens.saturating_mul(cols).saturating_mul(size_of::<f32>()),
    };
    let len = tokens.checked_mul(cols).ok_or_else(refuse)?;
    values.try_reserve(len.saturating_sub(values.len())).map_err(|_| refuse())?;
    values.resize(len, fill);
    Ok(())
}

/// What the host says of a call that did not succeed; a unit that says that it is gone is lost.
pub(crate) fn error(shared: &Shared, plugin: &str, failure: Failure, bytes: usize) -> DeviceError {
    let Failure { code, vendor_code, text } = failure;
    match code {
        abi::NP_LOST => shared.lose(&text),
        abi::NP_OUT_OF_MEMORY => DeviceError::OutOfMemory { device: shared.name.clone(), bytes },
        abi::NP_UNSUPPORTED => DeviceError::Unsupported { device: shared.name.clone(), what: text },
        _ => {
            let name = match code {
                abi::NP_INVALID => "invalid: ",
                abi::NP_TIMEOUT => "timeout: ",
                abi::NP_CANCELLED => "cancelled: ",
                _ => "",
            };
            DeviceError::Plugin { plugin: plugin.into(), code: vendor_code, text: format!("{name}{text}") }
        }
    }
}
