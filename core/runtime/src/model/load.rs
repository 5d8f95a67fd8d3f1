//! From a file's tensors to weights on units.
//!
//! The file's directory was checked before (see [`super::check`]), so what is left to go wrong is reading and memory.

use std::sync::Arc;

use neuropil_device::{DType, Device, HostOps, OpShape, Stage};

use crate::gguf::{Gguf, TensorInfo};
use crate::pipeline::Storage;
use crate::predict::{MakePredictor, Prediction};
use crate::sched::{Asked, Recipe, Refused, Units, Weights, WeightsKind, first_no};
use crate::submit::Placed;

use super::ModelError;
use super::ffn::Ffn;
use super::kv::KvType;
use super::load_neurons::StoreView;
use super::load_storage::StorageOptions;
use super::source::{self, Part};

/// How a model is loaded.
#[derive(Clone, Default)]
pub(crate) struct LoadOptions {
    /// Weights widened to F32, activations not quantised.
    pub exact: bool,
    /// Who chooses neurons.
    pub prediction: Prediction,
    /// Makes the predictors of [`Prediction::Custom`].
    pub predictors: Option<MakePredictor>,
    /// Bytes that the process may take.
    pub memory: Option<u64>,
    /// The longest context that will be asked for, and the precision of its keys and values.
    pub context: Option<usize>,
    pub kv: KvType,
    /// Leave neurons in the file's map.
    pub mapped: bool,
    /// How neurons are kept that do not fit.
    pub storage: StorageOptions,
}

/// Told how many of how many bytes are loaded.
pub type Progress<'a> = dyn FnMut(u64, u64) + 'a;

/// Loads the tensors of one file onto devices.
pub(crate) struct Loader<'a> {
    pub(super) gguf: &'a Arc<Gguf>,
    pub(super) units: Arc<Units>,
    pub(super) exact: bool,
    /// Whether neurons stay in the file's map.
    pub(super) mapped: bool,
    loaded: u64,
    total: u64,
    /// Bytes of prepared weights so far.
    pub weight_bytes: u64,
    /// Bytes that units hold of weights beside what a budget was planned with.
    pub extra_bytes: u64,
    /// Whether neurons that fire often are on another unit.
    pub has_hot_blocks: bool,
    progress: &'a mut Progress<'a>,
    /// The store that the file is, if it is one.
    store: Option<Arc<StoreView>>,
    /// Where its neurons are, if they are not all in memory.
    pub(super) storage: Option<Arc<Storage>>,
    /// Makes predictors that the app brings.
    pub(super) predictors: Option<MakePredictor>,
    pub(super) ops: Arc<dyn HostOps>,
}

impl<'a> Loader<'a> {
    pub(crate) fn new(
        gguf: &'a Arc<Gguf>,
        units: &Arc<Units>,
        ops: &Arc<dyn HostOps>,
        options: &LoadOptions,
        store: Option<Arc<StoreView>>,
        storage: Option<Arc<Storage>>,
        progress: &'a mut Progress<'a>,
    ) -> Loader<'a> {
        let read = |tensor: &&TensorInfo| storage.is_none() || !tensor.name.contains(".ffn_bundle.");
        let total = gguf.tensors().iter().filter(read).map(|t| t.bytes).sum();
        Loader {
            gguf,
            units: units.clone(),
            exact: options.exact,
            mapped: options.mapped,
            predictors: options.predictors.clone(),
            ops: ops.clone(),
            loaded: 0,
            total,
            weight_bytes: 0,
            extra_bytes: 0,
            has_hot_blocks: false,
            progress,
            store,
            storage,
        }
    }

    /// A small tensor as numbers: a norm's weight, rotary factors.
    pub(crate) fn vector(&mut self, name: &str) -> Result<Vec<f32>, ModelError> {
        let part = self.part(name, (0, 1))?;
        self.loaded += part.bytes();
        part.numbers()
    }

    /// One matrix at home.
    pub(crate) fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Placed, ModelError> {
        let part = self.part(name, (0, 1))?;
        let op = OpShape::Matmul { dtype: part.dtype()?, rows, cols, tokens: 1 };
        let (unit, device) = self.choose(name, &[op])?;
        let weight = part.matrix(&*device, rows, cols)?;
        self.count(weight.bytes() as u64, part.bytes());
        self.units.place(format!("{} {}", role(name), part.dtype()?), unit, self.only("it stays at home"));
        Ok(Placed { device, weight })
    }

    /// Matrices that share an input of `cols` channels, for one job on any unit.
    pub(crate) fn matrices(
        &mut self,
        op: &str,
        matrices: &[(&str, usize)],
        cols: usize,
    ) -> Result<Weights, ModelError> {
        let parts = matrices.iter().map(|(name, rows)| Ok((self.part(name, (0, 1))?, *rows)));
        let parts = parts.collect::<Result<Vec<_>, ModelError>>()?;
        let shapes = parts
            .iter()
            .map(|(part, rows)| Ok(OpShape::Matmul { dtype: part.dtype()?, rows: *rows, cols, tokens: 1 }));
        let shapes = shapes.collect::<Result<Vec<_>, ModelError>>()?;
        let bytes = parts.iter().map(|(part, _)| part.bytes()).sum();
        let recipe: Recipe = Box::new(move |device| {
            let prepare = |(part, rows): &(Part, usize)| part.matrix(device, *rows, cols);
            parts.iter().map(prepare).collect::<Result<_, _>>().map_err(source::into_device_error)
        });
        self.place(op, WeightsKind::Matmul, matrices[0].0, &shapes, bytes, recipe)
    }

    /// The feed-forward of a layer, or of one of its experts, `expert` saying which of how many: out of the store, or
    /// the three matrices as one block. In a model file the matrices of all experts lie one after the other in each
    /// tensor.
    pub(crate) fn ffn(
        &mut self,
        layer: usize,
        expert: Option<(usize, usize)>,
        names: [&str; 3],
        neurons: usize,
        width: usize,
    ) -> Result<Ffn, ModelError> {
        match self.store.clone() {
            Some(view) => {
                let expert = expert.map(|(index, _)| index);
                Ok(Ffn::Neurons(Box::new(self.store_neurons(&view, layer, expert)?)))
            }
            None => Ok(Ffn::Block(self.neurons(expert.unwrap_or((0, 1)), names, neurons, width)?)),
        }
    }

    /// All neurons of a feed-forward layer as one block, or those of part `index` of `of`.
    fn neurons(
        &mut self,
        part: (usize, usize),
        names: [&str; 3],
        neurons: usize,
        width: usize,
    ) -> Result<Weights, ModelError> {
        let [gate, up, down] = names;
        let parts = [self.part(gate, part)?, self.part(up, part)?, self.part(down, part)?];
        let shape = OpShape::Cluster {
            stage: Stage::Fused,
            dtype: parts[0].dtype()?,
            down_dtype: parts[2].dtype()?,
            neurons,
            width,
            tokens: 1,
            bundles: false,
        };
        let bytes = parts.iter().map(Part::bytes).sum();
        let recipe: Recipe = Box::new(move |device| {
            let block = source::block(&parts, device, neurons, width);
            block.map(|weight| vec![weight]).map_err(source::into_device_error)
        });
        self.place("ffn", WeightsKind::Block, names[0], &[shape], bytes, recipe)
    }

    /// Weights of `bytes` in the file on the units that take them; `name` is that of their first tensor.
    fn place(
        &mut self,
        op: &str,
        kind: WeightsKind,
        name: &str,
        shapes: &[OpShape],
        bytes: u64,
        recipe: Recipe,
    ) -> Result<Weights, ModelError> {
        let dtype = dtype(shapes);
        let placed = Weights::place(&self.units, kind, &Asked { op, dtype, shapes }, recipe);
        let weights = placed.map_err(|refused| not_placed(refused, name, dtype))?;
        self.count(weights.bytes(), bytes);
        // What the budget was planned with is about what the file has.
        self.extra_bytes =
            self.extra_bytes.saturating_add(weights.bytes().saturating_sub(bytes.max(weights.home_bytes())));
        Ok(weights)
    }

    fn part(&self, name: &str, part: (usize, usize)) -> Result<Part, ModelError> {
        Part::new(self.gguf, name, part, self.exact)
    }

    /// A unit that can do all of it, the home if that can, and its number.
    pub(super) fn choose(
        &self,
        name: &str,
        shapes: &[OpShape],
    ) -> Result<(usize, Arc<dyn Device>), ModelError> {
        let mut reasons = Vec::new();
        let home = self.units.home();
        let others = self.units.devices().enumerate().filter(|(unit, _)| *unit != home);
        for (unit, device) in self.units.devices().enumerate().skip(home).take(1).chain(others) {
            match first_no(&**device, shapes) {
                None => return Ok((unit, device.clone())),
                Some(reason) => reasons.push(format!("{}: {reason}", device.info().name)),
            }
        }
        let (dtype, reasons) = (dtype(shapes).to_string(), reasons.join("; "));
        Err(ModelError::NoDevice { name: name.into(), dtype, reasons })
    }

    /// A reason for a place, where there is anything to choose from.
    fn only(&self, reason: &str) -> String {
        if self.units.devices().len() == 1 { "it is the only unit".into() } else { reason.into() }
    }

    /// Counts memory that was taken, and bytes of the file that were read.
    pub(super) fn count(&mut self, memory: u64, bytes: u64) {
        self.weight_bytes = self.weight_bytes.saturating_add(memory);
        self.loaded += bytes;
        (self.progress)(self.loaded, self.total);
    }
}

/// That weights, whose first tensor is named, have no unit.
pub(super) fn not_placed(refused: Refused, name: &str, dtype: DType) -> ModelError {
    match refused {
        Refused::Nobody(reasons) => {
            ModelError::NoDevice { name: name.into(), dtype: dtype.to_string(), reasons }
        }
        Refused::Strict(source) | Refused::Source(source) => ModelError::Weight { name: name.into(), source },
    }
}

/// The type of the first weight that is asked for.
fn dtype(shapes: &[OpShape]) -> DType {
    match shapes.first() {
        Some(OpShape::Matmul { dtype, .. } | OpShape::Cluster { dtype, .. }) => *dtype,
        _ => DType::F32,
    }
}

/// What a tensor is for, without the number of its layer: `ffn_gate_inp` of `blk.3.ffn_gate_inp.weight`.
fn role(name: &str) -> &str {
    let name = name.strip_suffix(".weight").unwrap_or(name);
    if name == "token_embd" {
        // As a matrix it is what other files call the output.
        return "output";
    }
    name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map_or(name, |(_, role)| role)
}
