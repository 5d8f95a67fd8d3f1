//! From the bundles of a neuron store to slots in memory, and to what decides which of them are computed.

use std::sync::Arc;

use neuropil_device::{
    Activation, ActivationKind, Arena, DType, Device, DeviceError, Matrix, OpShape, PreparedWeight, Stage,
    WeightSource, quant,
};

use crate::gguf::{Gguf, TensorInfo};
use crate::pipeline::{Decision, NeuronWeights, Neurons};
use crate::predict::{Centred, Gate4, LowRank, Prediction, PredictorInput, Thresholds};
use crate::store::{BATCHES, Layout, Store, keys, neuron_tensor_name};
use crate::submit::Placed;

use super::load::Loader;
use super::tensors::TensorShape;
use super::{ModelError, ModelSpec};

/// Bytes of bundles that are read at a time.
const CHUNK: usize = 1 << 20;

/// Bytes of a group of neurons that the cache knows as one, at most, and how many they are at most: from some hundred
/// KiB on reads are as fast as they get.
const GROUP_BYTES: usize = 256 << 10;
const MOST_GROUPED: usize = 64;

/// A store's layers, and how its neurons are chosen.
pub(crate) struct StoreView {
    pub store: Store,
    prediction: Prediction,
    input: PredictorInput,
    /// Whether a ReLU stands between a predictor's two matrices.
    relu: bool,
    hot: usize,
    thresholds: Thresholds,
}

impl StoreView {
    /// Of a file; `None` when it is no store. `prediction` is what the user asks for.
    ///
    /// # Errors
    /// [`ModelError::Prediction`] for one that the file has nothing for.
    pub(crate) fn new(
        gguf: &Gguf,
        activation: Activation,
        prediction: Prediction,
    ) -> Result<Option<StoreView>, ModelError> {
        if !Store::is_store(gguf) {
            return match prediction {
                Prediction::Auto | Prediction::Off => Ok(None),
                asked => Err(ModelError::Prediction {
                    asked: asked.name(),
                    reason: "the file is no neuron store; make one with `neuropil convert`".into(),
                }),
            };
        }
        let metadata = gguf.metadata();
        let store = Store::read(gguf)?;
        let prediction = choose(gguf, &store, activation, prediction)?;
        let input = match metadata.str(keys::PREDICTOR_INPUT)? {
            None | Some("residual") => PredictorInput::Residual,
            Some("normed") => PredictorInput::Normed,
            Some(other) => {
                let reason = "it must be residual or normed";
                return Err(ModelError::key(keys::PREDICTOR_INPUT, other, reason));
            }
        };
        let relu = match metadata.str(keys::PREDICTOR_ACTIVATION)? {
            None | Some("relu") => true,
            Some("linear") => false,
            Some(other) => {
                let reason = "it must be relu or linear";
                return Err(ModelError::key(keys::PREDICTOR_ACTIVATION, other, reason));
            }
        };
        let hot = metadata.u64(keys::HOT_COUNT)?.unwrap_or(0);
        let hot = usize::try_from(hot).unwrap_or(usize::MAX);
        let cuts = metadata.f32s(keys::THRESHOLD)?.unwrap_or_default();
        if let Some(cut) = cuts.iter().find(|cut| !cut.is_finite()) {
            return Err(ModelError::key(keys::THRESHOLD, cut, "it must be a finite number"));
        }
        if !cuts.is_empty() && cuts.len() != store.layers.len() {
            return Err(ModelError::key(keys::THRESHOLD, cuts.len(), "it must have an entry for each layer"));
        }
        let none = store.layers.iter().map(|_| 0.0).skip(cuts.len());
        let thresholds = Thresholds::new(cuts.iter().copied().chain(none));
        Ok(Some(StoreView { store, prediction, input, relu, hot, thresholds }))
    }

    /// The cuts of the centred thresholds.
    pub(crate) fn thresholds(&self) -> &Thresholds {
        &self.thresholds
    }

    /// Whether gates lie in memory as whole matrices, and slots hold the other two rows alone.
    pub(crate) fn gate_apart(&self) -> bool {
        matches!(self.prediction, Prediction::Gate | Prediction::Threshold)
    }

    /// Whether the gates of experts lie in memory, those of all for the few that a token uses.
    pub(crate) fn keeps_idle_gates(&self) -> bool {
        let gates = matches!(self.prediction, Prediction::Gate | Prediction::Gate4);
        gates && self.store.layers.iter().any(|layer| layer.bundles.len() > 1)
    }

    /// Neurons that a cache knows as one: 1, but for experts whose neurons nobody chooses from as many as are read well
    /// together.
    pub(crate) fn group(&self) -> usize {
        let layers = &self.store.layers;
        if self.prediction != Prediction::Off || layers.iter().all(|layer| layer.bundles.len() == 1) {
            return 1;
        }
        let stride = layers.iter().map(|layer| layer.layout.stride).max().unwrap_or(1);
        let fits = (GROUP_BYTES / stride.max(1)).clamp(1, MOST_GROUPED);
        1 << fits.ilog2()
    }

    /// Neurons that are always computed, by the file's word.
    pub(super) fn hot(&self) -> usize {
        self.hot
    }

    /// How neurons are chosen.
    pub(crate) fn prediction(&self) -> Prediction {
        self.prediction
    }
}

/// What a choice comes to for a store.
fn choose(
    gguf: &Gguf,
    store: &Store,
    activation: Activation,
    asked: Prediction,
) -> Result<Prediction, ModelError> {
    let has = |part: &str| {
        let of = |suffix: &str| gguf.tensor(&format!("blk.0.{part}{suffix}")).is_some();
        of("") || of(".weight") || of(".0") || of(".0.weight")
    };
    let relu = activation.is_off(-1.0);
    let (model, calibrated) = (has("fc1"), has("ffn_center"));
    let lacks = |reason: &str| ModelError::Prediction { asked: asked.name(), reason: reason.into() };
    let smooth = matches!(activation.kind, ActivationKind::Silu | ActivationKind::Gelu);
    match asked {
        Prediction::Custom => Ok(Prediction::Custom),
        Prediction::Auto if model && gguf.metadata().get(keys::PREDICTOR_ACTIVE).is_none() => {
            Ok(Prediction::Model)
        }
        Prediction::Auto if relu => match gguf.metadata().str(keys::PREDICT)? {
            Some("gate") => Ok(Prediction::Gate),
            _ => cheapest(gguf, store, model),
        },
        Prediction::Auto if smooth && calibrated => Ok(Prediction::Threshold),
        Prediction::Auto => Ok(Prediction::Off),
        Prediction::Model if !model => Err(lacks(
            "the store has no predictors; `neuropil calibrate --predictors auto` fits some to a ReLU model",
        )),
        Prediction::Threshold if !smooth => {
            Err(lacks("thresholds are for the activations silu and gelu; use --predict gate"))
        }
        Prediction::Threshold if !calibrated => {
            Err(lacks("the store has no thresholds; find them with `neuropil calibrate`"))
        }
        Prediction::Gate4 if !relu => Err(lacks(
            "the sign of a gate says nothing of this activation; for silu and gelu there is --predict threshold",
        )),
        asked => Ok(asked),
    }
}

/// Of the ways that a calibrated store of a ReLU model offers, the one that reads least for a token. The exact gate needs
/// no more than a quarter more than the best to be taken: what it leaves out changes no bit, and it is one step less.
fn cheapest(gguf: &Gguf, store: &Store, model: bool) -> Result<Prediction, ModelError> {
    const NEAR: f64 = 1.25;
    let metadata = gguf.metadata();
    let mean = |key: &str| -> Result<Option<f64>, ModelError> {
        let values = metadata.f32s(key)?.filter(|values| !values.is_empty());
        Ok(values.map(|values| values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len() as f64))
    };
    let (Some(gate4), Some(layer)) = (mean(keys::GATE4_ACTIVE)?, store.layers.first()) else {
        return Ok(Prediction::Gate);
    };
    let Layout { width, neurons, gate_bytes, stride, .. } = layer.layout;
    // A calibrated gate in 4 bits evaluates about as many neurons as fire.
    let neurons_read = |share: f64| share * neurons as f64;
    let exact = (neurons * gate_bytes) as f64 + neurons_read(gate4) * (stride - gate_bytes) as f64;
    let four_bits = match DType::Q4_0.row_bytes(width) {
        Some(row) => (neurons * row) as f64 + neurons_read(gate4) * stride as f64,
        None => f64::INFINITY,
    };
    let low_rank = match mean(keys::PREDICTOR_ACTIVE)?.filter(|_| model) {
        None => f64::INFINITY,
        Some(active) => {
            let expert = layer.numbered.then_some(0);
            let of = |part: &str| {
                gguf.tensor(&neuron_tensor_name(0, part, expert)).map_or(0, |tensor| tensor.bytes)
            };
            (of("fc1") + of("fc2")) as f64 + neurons_read(active) * stride as f64
        }
    };
    let least = exact.min(four_bits).min(low_rank);
    Ok(match () {
        () if exact <= NEAR * least => Prediction::Gate,
        () if four_bits <= low_rank => Prediction::Gate4,
        () => Prediction::Model,
    })
}

/// A layer, and one of its experts if it has several.
pub(super) type Place = (usize, Option<usize>);

impl Loader<'_> {
    /// The neurons of a layer, or of one of its experts, out of the store.
    pub(crate) fn store_neurons(
        &mut self,
        view: &StoreView,
        layer: usize,
        expert: Option<usize>,
    ) -> Result<Neurons, ModelError> {
        let place = (layer, expert);
        let missing = || ModelError::StoreShape {
            found: "too few layers or experts".into(),
            wanted: format!("layer {layer}, expert {}", expert.unwrap_or(0)),
        };
        let of = view.store.layers.get(layer).ok_or_else(missing)?;
        let bundles = of.bundles.get(expert.unwrap_or(0)).ok_or_else(missing)?;
        let file = of.layout;
        let memory = if self.exact {
            Layout::new(file.width, file.neurons, DType::F32, DType::F32, 64)?
        } else {
            file
        };
        let gate_apart = view.gate_apart();
        let gate_copy = gate_apart || view.prediction == Prediction::Gate4;
        let dtype = if view.prediction == Prediction::Gate4 { DType::Q4_0 } else { memory.gate_type };
        let mut ops = vec![OpShape::Cluster {
            stage: Stage::Fused,
            dtype: memory.gate_type,
            down_dtype: memory.down_type,
            neurons: memory.neurons,
            width: memory.width,
            tokens: 1,
            bundles: true,
        }];
        if gate_copy {
            ops.push(OpShape::Matmul { dtype, rows: memory.neurons, cols: memory.width, tokens: 1 });
        }
        let (_, device) = self.choose(&bundles.name, &ops)?;
        let mut slot = memory.slot();
        let mut slot_bytes = memory.stride;
        if gate_apart {
            // The gate's row is not in the slot, and nobody reads it there.
            (slot.up, slot.down) = (0, slot.down - slot.up);
            slot_bytes -= memory.gate_bytes;
        }
        let mapped = self.mapped && memory == file && !gate_apart;
        let arena = match &self.storage {
            Some(_) => None,
            None if mapped => {
                let bytes = Arc::new(MappedTensor { gguf: self.gguf.clone(), tensor: bundles.clone() });
                let arena = Arena::mapped(bytes, 0, memory.neurons, slot_bytes);
                Some(arena.map_err(|source| weight_error(bundles, source))?)
            }
            None => {
                let arena = Arena::new(memory.neurons, slot_bytes, 64);
                Some(arena.map_err(|source| weight_error(bundles, source))?)
            }
        };
        let gate_row = dtype.row_bytes(memory.width);
        let gate_row = gate_row
            .ok_or_else(|| ModelError::GateWidth { name: bundles.name.clone(), dtype: dtype.to_string() })?;
        let mut gate = reserve(if gate_copy { gate_row * memory.neurons } else { 0 }, &bundles.name)?;
        let per_read = (CHUNK / file.stride).clamp(1, file.neurons.max(1));
        let mut chunk = reserve(per_read * file.stride, &bundles.name)?;
        let mut values = reserve_floats(file.width, &bundles.name)?;
        let arena_reads = arena.is_some() && !mapped;
        let passes = if arena_reads || gate_copy { file.neurons } else { 0 };
        for start in (0..passes).step_by(per_read) {
            let end = file.neurons.min(start + per_read);
            let chunk = &mut chunk[..(end - start) * file.stride];
            self.gguf.read_part(bundles, file.run(start..end).start, chunk)?;
            for (bundle, position) in chunk.chunks_exact(file.stride).zip(start..) {
                if let Some(arena) = arena.as_ref().filter(|_| arena_reads) {
                    let mut lease = arena.write(position).map_err(|source| weight_error(bundles, source))?;
                    fill(&file, &memory, bundle, lease.bytes_mut(), gate_apart, &mut values);
                }
                if gate_copy {
                    let row = &bundle[..quant::bundle_row_bytes(file.gate_type, file.width).unwrap_or(0)];
                    let out = &mut gate[position * gate_row..][..gate_row];
                    if dtype == file.gate_type {
                        quant::unbundle_row(dtype, file.width, row, out);
                    } else {
                        quant::dequantize_bundle_row(file.gate_type, row, &mut values);
                        quant::quantize_row(dtype, &values, out);
                    }
                }
            }
        }
        drop(chunk);
        if arena_reads {
            self.count((slot_bytes * memory.neurons) as u64, bundles.bytes);
        } else {
            self.gguf.release(bundles);
        }
        let rows: &[u8] = &gate;
        let matrix = Matrix { dtype, rows: memory.neurons, cols: memory.width, data: &rows };
        let mut prepare = |device: &dyn Device| -> Result<PreparedWeight, ModelError> {
            let weight = device.prepare(WeightSource::Matrix(matrix), None);
            let weight = weight.map_err(|source| weight_error(bundles, source))?;
            self.count(weight.bytes() as u64, 0);
            Ok(weight)
        };
        let decision = match view.prediction {
            Prediction::Off | Prediction::Auto => Decision::All,
            Prediction::Gate => {
                let gate = Placed { weight: prepare(&*device)?, device: device.clone() };
                Decision::Gate { gate, centred: None }
            }
            Prediction::Threshold => {
                let gate = Placed { weight: prepare(&*device)?, device: device.clone() };
                Decision::Gate { gate, centred: Some(self.centred(view, place, &file)?) }
            }
            Prediction::Gate4 => {
                let weight = prepare(&*device)?;
                let threshold = self.per_layer(keys::GATE4_THRESHOLD, layer)?.unwrap_or(0.0);
                Decision::Predicted(Box::new(Gate4::new(
                    Placed { weight, device: device.clone() },
                    threshold,
                )))
            }
            Prediction::Model => Decision::Predicted(Box::new(self.low_rank(view, place, &file)?)),
            Prediction::Custom => match &self.predictors {
                Some(make) => Decision::Predicted(make(layer, expert)),
                None => Decision::All,
            },
        };
        let weights = match (arena, &self.storage) {
            (Some(arena), _) => NeuronWeights::Memory(arena),
            (None, Some(storage)) => {
                let before =
                    view.store.layers.iter().take(layer).map(|layer| layer.bundles.len()).sum::<usize>();
                NeuronWeights::Storage { storage: storage.clone(), unit: before + expert.unwrap_or(0) }
            }
            (None, None) => return Err(missing()),
        };
        // What is read in order, or expert by expert, has no part of its own for a unit.
        let by_neuron = view.prediction != Prediction::Off && view.group() == 1;
        let hot_block = match weights {
            // Experts hold what is read for them until their turn, and a unit that fails needs room for its neurons.
            NeuronWeights::Storage { .. } if !by_neuron || expert.is_some() => None,
            _ => self.hot_block(view, place, bundles)?,
        };
        // What a unit always computes is computed when it is gone, too.
        let on_unit = hot_block.as_ref().map_or(0, |block| block.count);
        Ok(Neurons {
            device,
            hot_block,
            weights,
            slot,
            count: memory.neurons,
            layer,
            expert,
            hot: view.hot.min(memory.neurons).max(on_unit),
            decision,
            ops: self.ops.clone(),
        })
    }

    fn centred(
        &mut self,
        view: &StoreView,
        (layer, expert): Place,
        layout: &Layout,
    ) -> Result<Centred, ModelError> {
        let fold = self.matrix(&neuron_tensor_name(layer, "ffn_fold", expert), layout.width, layout.width)?;
        let center = neuron_tensor_name(layer, "ffn_center", expert);
        let center = self.vector(center.trim_end_matches(".weight"))?;
        Ok(Centred::new(fold, center, view.thresholds.clone(), layer))
    }

    fn low_rank(
        &mut self,
        view: &StoreView,
        (layer, expert): Place,
        layout: &Layout,
    ) -> Result<LowRank, ModelError> {
        let (fc1, fc2) = (neuron_tensor_name(layer, "fc1", expert), neuron_tensor_name(layer, "fc2", expert));
        let rank = self.gguf.require(&fc1)?.dims.get(1).copied().unwrap_or(1) as usize;
        let first = self.matrix(&fc1, rank, layout.width)?;
        let second = self.matrix(&fc2, layout.neurons, rank)?;
        let threshold = self.per_layer(keys::PREDICTOR_THRESHOLD, layer)?.unwrap_or(0.0);
        Ok(LowRank::new([first, second], rank, view.relu, view.input, threshold))
    }

    /// The entry of a key that has one per layer.
    fn per_layer(&self, key: &str, layer: usize) -> Result<Option<f32>, ModelError> {
        let Some(values) = self.gguf.metadata().f32s(key)? else { return Ok(None) };
        match values.get(layer) {
            Some(value) if value.is_finite() => Ok(Some(*value)),
            Some(value) => Err(ModelError::key(key, value, "it must be a finite number")),
            None => Err(ModelError::key(key, values.len(), "it has no entry for each layer")),
        }
    }
}

/// A tensor's bytes in the map of its file.
struct MappedTensor {
    gguf: Arc<Gguf>,
    tensor: TensorInfo,
}

impl AsRef<[u8]> for MappedTensor {
    fn as_ref(&self) -> &[u8] {
        self.gguf.data(&self.tensor)
    }
}

/// Copies the rows of a bundle to its slot, widened where the slot holds F32.
fn fill(
    file: &Layout,
    memory: &Layout,
    bundle: &[u8],
    slot: &mut [u8],
    gate_apart: bool,
    values: &mut [f32],
) {
    let skipped = if gate_apart { memory.gate_bytes } else { 0 };
    if file == memory {
        slot.copy_from_slice(&bundle[skipped..]);
        return;
    }
    let rows = [
        (file.gate_type, 0, 0),
        (file.gate_type, file.gate_bytes, memory.gate_bytes),
        (file.down_type, file.down_at, memory.down_at),
    ];
    for (dtype, from, to) in rows.into_iter().skip(usize::from(gate_apart)) {
        let bytes = quant::bundle_row_bytes(dtype, file.width).unwrap_or(0);
        quant::dequantize_bundle_row(dtype, &bundle[from..][..bytes], values);
        slot[to - skipped..][..4 * file.width].copy_from_slice(bytemuck::cast_slice(values));
    }
}

fn weight_error(tensor: &TensorInfo, source: DeviceError) -> ModelError {
    ModelError::Weight { name: tensor.name.clone(), source }
}

fn reserve(bytes: usize, name: &str) -> Result<Vec<u8>, ModelError> {
    let mut buffer = Vec::new();
    let refused = |_| ModelError::OutOfMemory { what: name.into(), bytes: bytes as u64 };
    buffer.try_reserve_exact(bytes).map_err(refused)?;
    buffer.resize(bytes, 0);
    Ok(buffer)
}

fn reserve_floats(count: usize, name: &str) -> Result<Vec<f32>, ModelError> {
    let mut buffer = Vec::new();
    let refused = |_| ModelError::OutOfMemory { what: name.into(), bytes: 4 * count as u64 };
    buffer.try_reserve_exact(count).map_err(refused)?;
    buffer.resize(count, 0.0);
    Ok(buffer)
}

/// The tensors of a store that stand in for the feed-forward matrices of a model, with their dimensions (fastest
/// first), of those that the file has; that the bundles are the model's.
pub(crate) fn store_tensors(
    spec: &ModelSpec,
    store: &Store,
    gguf: &Gguf,
) -> Result<Vec<TensorShape>, ModelError> {
    let mut tensors = Vec::new();
    let found = store.layers.len();
    if found != spec.layers {
        let (found, wanted) = (format!("{found} layers"), spec.layers.to_string());
        return Err(ModelError::StoreShape { found, wanted });
    }
    for (layer, of) in store.layers.iter().enumerate() {
        let Layout { width, neurons, stride, .. } = of.layout;
        let of_spec = spec.experts.map_or(spec.neurons, |experts| experts.neurons);
        if [width, neurons] != [spec.width, of_spec] {
            let found = format!("neurons of width {width} and {neurons} of them in layer {layer}");
            return Err(ModelError::StoreShape { found, wanted: format!("{} and {of_spec}", spec.width) });
        }
        let experts = spec.experts.map(|experts| experts.count);
        if of.bundles.len() != experts.unwrap_or(1) {
            let found = format!("{} experts in layer {layer}", of.bundles.len());
            return Err(ModelError::StoreShape { found, wanted: experts.unwrap_or(0).to_string() });
        }
        let mut add = |part: String, dims: &[usize]| {
            let name = format!("blk.{layer}.{part}");
            if gguf.tensor(&name).is_some() {
                tensors.push(TensorShape { name, dims: dims.to_vec() });
            }
        };
        add("ffn_perm".into(), &[&[neurons], experts.as_slice()].concat());
        add("ffn_count".into(), &[&[neurons, BATCHES.len()], experts.as_slice()].concat());
        for expert in 0..of.bundles.len() {
            let which = experts.map(|_| format!(".{expert}")).unwrap_or_default();
            let rank = gguf.tensor(&format!("blk.{layer}.fc1{which}.weight"));
            let rank = rank.and_then(|fc1| fc1.dims.get(1).copied()).unwrap_or(1) as usize;
            add(format!("ffn_bundle{which}.weight"), &[stride, neurons]);
            add(format!("ffn_center{which}"), &[neurons]);
            add(format!("ffn_fold{which}.weight"), &[width, width]);
            add(format!("fc1{which}.weight"), &[width, rank]);
            add(format!("fc2{which}.weight"), &[rank, neurons]);
        }
    }
    Ok(tensors)
}
