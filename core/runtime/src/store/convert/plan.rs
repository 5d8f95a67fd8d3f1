//! What the result will look like: the type and layout of each layer, its keys, its tensors and their order.

use neuropil_device::DType;

use super::order::{Order, perm_name};
use super::source::{Content, Down, Layer, Resident, Source};
use super::{ConvertError, ConvertOptions};
use crate::gguf::{I8, I32, NewTensor, Pairs, tensor_id};
use crate::store::{DOWN_TYPES, Layout, READ_UNITS, StoreError, VERSION, bundle_name, gate_types, keys};

/// The result.
pub(super) struct Plan {
    pub pairs: Pairs,
    pub layouts: Vec<Layout>,
    /// Tensors that are not bundles, in their order.
    pub resident: Vec<Resident>,
    /// The whole directory: the resident tensors, then the bundles, layer after layer and expert after expert.
    pub tensors: Vec<NewTensor>,
    /// What the user should know.
    pub notes: Vec<String>,
}

impl Plan {
    pub(super) fn new(
        source: &Source,
        options: &ConvertOptions,
        orders: &[Order],
    ) -> Result<Plan, ConvertError> {
        let mut notes = Vec::new();
        let types: Result<Vec<_>, ConvertError> =
            source.layers.iter().map(|layer| types(layer, source.width, options)).collect();
        let types = types?;
        note_types(source, options, &types, &mut notes);
        let layouts = layouts(source, &types, options.read_unit)?;
        let mut pairs = source.pairs.clone();
        let stale = Stale::of(source, &types);
        pairs.retain(|key| !stale.key(key));
        stale.note(source, &mut notes);
        options.additions.pairs.iter().for_each(|(key, value)| pairs.set(key, value.clone()));
        layout_keys(&mut pairs, &layouts);
        let resident = resident(source, options, orders, stale);
        let mut tensors: Vec<NewTensor> =
            resident.iter().map(|t| NewTensor::new(t.name.clone(), t.type_id, t.dims.clone())).collect();
        for (index, (layer, layout)) in source.layers.iter().zip(&layouts).enumerate() {
            for expert in 0..layer.experts.len() {
                let name = bundle_name(index, layer.has_experts.then_some(expert));
                tensors.push(NewTensor::new(name, I8, [layout.stride as u64, layout.neurons as u64]));
            }
        }
        Ok(Plan { pairs, layouts, resident, tensors, notes })
    }
}

/// The types of gate and up rows, and of down rows.
fn types(layer: &Layer, width: usize, options: &ConvertOptions) -> Result<(DType, DType), ConvertError> {
    let fits = |dtype: &DType| dtype.row_bytes(width).is_some();
    let list = |types: &[DType]| {
        types.iter().filter(|t| fits(t)).map(|dtype| dtype.name()).collect::<Vec<_>>().join(" ")
    };
    let check = |what, dtype: DType, among: &[DType]| {
        if among.contains(&dtype) && fits(&dtype) {
            return Ok(dtype);
        }
        Err(ConvertError::Type { what, dtype, fitting: list(among) })
    };
    let best = |dtype| if fits(&dtype) { dtype } else { DType::F32 };
    let gate = match options.ffn_type {
        Some(dtype) => check("gate and up", dtype, &gate_types())?,
        None => {
            let mut sources = layer.experts.iter().flat_map(|e| [e.gate.dtype, e.up.dtype]);
            let first = sources.next().unwrap_or(DType::F32);
            let is_float = |dtype: &DType| dtype.block_elements() == 1;
            let mut all = sources.clone().chain([first]);
            if sources.all(|dtype| dtype == first) && !first.is_expanded() {
                first
            } else if all.all(|dtype| is_float(&dtype)) {
                DType::F32
            } else {
                best(DType::Q8_0)
            }
        }
    };
    let down = match (options.down_type, options.ffn_type) {
        (Some(dtype), _) => check("down", dtype, &DOWN_TYPES)?,
        (None, Some(dtype)) if DOWN_TYPES.contains(&dtype) => dtype,
        (None, Some(_)) => best(DType::Q8_0),
        (None, None) => {
            let mut kept = layer.experts.iter().map(|expert| match expert.down {
                Down::Columns { dtype, .. } => (dtype.block_elements() == 1).then_some(dtype),
                Down::Rows(rows) => DOWN_TYPES.contains(&rows.dtype).then_some(rows.dtype),
            });
            let first = kept.next().flatten();
            first.filter(|first| kept.all(|dtype| dtype == Some(*first))).unwrap_or(best(DType::Q8_0))
        }
    };
    Ok((gate, down))
}

/// Says which layers are requantised although nobody asked.
fn note_types(source: &Source, options: &ConvertOptions, types: &[(DType, DType)], notes: &mut Vec<String>) {
    if options.ffn_type.is_some() {
        return;
    }
    let changed = |(layer, (gate, _)): &(&Layer, &(DType, DType))| {
        layer.experts.iter().any(|e| e.gate.dtype != *gate || e.up.dtype != *gate)
    };
    let count = source.layers.iter().zip(types).filter(changed).count();
    if count > 0 {
        notes.push(format!(
            "gate and up of {count} of {} layers have a type that neurons cannot be cut from, or two different ones; \
             they were requantised to {}",
            source.layers.len(),
            types.iter().zip(&source.layers).find(|(t, l)| changed(&(*l, *t))).map_or("q8_0", |(t, _)| t.0.name()),
        ));
    }
}

/// What a source says of its weights that is no longer true when these are quantised anew.
#[derive(Clone, Copy)]
struct Stale {
    /// What calibration measured.
    measured: bool,
    /// Predictors that were fitted to the weights; those of a model were trained with it and stay.
    predictors: bool,
}

impl Stale {
    fn of(source: &Source, types: &[(DType, DType)]) -> Stale {
        let changed = |(layer, (gate, down)): (&Layer, &(DType, DType))| {
            layer.experts.iter().any(|expert| {
                let from = match expert.down {
                    Down::Columns { dtype, .. } => dtype,
                    Down::Rows(rows) => rows.dtype,
                };
                expert.gate.dtype != *gate || expert.up.dtype != *gate || from != *down
            })
        };
        let measured = source.layers.iter().zip(types).any(changed);
        let input = source.pairs.get(keys::PREDICTOR_INPUT).and_then(|input| input.text());
        Stale { measured, predictors: measured && input.is_some_and(|input| input != keys::RESIDUAL) }
    }

    fn key(self, key: &str) -> bool {
        self.measured && keys::is_measured(key) || self.predictors && keys::is_of_predictors(key)
    }

    fn tensor(self, name: &str) -> bool {
        let part = layer_of(name).and_then(|_| name.splitn(3, '.').nth(2)).unwrap_or_default();
        let begins = |all: [&str; 2]| all.iter().any(|begin| part.starts_with(begin));
        self.measured && begins(["ffn_center", "ffn_fold."]) || self.predictors && begins(["fc1.", "fc2."])
    }

    fn note(self, source: &Source, notes: &mut Vec<String>) {
        let keys = source.pairs.iter().any(|(key, _)| self.key(key));
        if keys || source.resident.iter().any(|tensor| self.tensor(&tensor.name)) {
            notes.push(
                "the weights take another type, so what was calibrated for the old ones was left out; run neuropil \
                 calibrate again"
                    .into(),
            );
        }
    }
}

/// The layouts with the largest read unit that pads no layer by much, or with the one asked for.
fn layouts(
    source: &Source,
    types: &[(DType, DType)],
    read_unit: Option<usize>,
) -> Result<Vec<Layout>, ConvertError> {
    let with = |unit: usize| -> Result<Vec<Layout>, StoreError> {
        let of = |(layer, (gate, down)): (&Layer, &(DType, DType))| {
            Layout::new(source.width, layer.neurons, *gate, *down, unit)
        };
        source.layers.iter().zip(types).map(of).collect()
    };
    let mut last = with(read_unit.unwrap_or(READ_UNITS[0]))?;
    if read_unit.is_none() {
        for unit in READ_UNITS {
            last = with(unit)?;
            if last.iter().all(Layout::pads_little) {
                break;
            }
        }
    }
    Ok(last)
}

fn layout_keys(pairs: &mut Pairs, layouts: &[Layout]) {
    let array = |of: &dyn Fn(&Layout) -> u32| layouts.iter().map(of).collect::<Vec<u32>>();
    pairs.set(keys::VERSION, VERSION);
    pairs.set(keys::READ_UNIT, layouts.first().map_or(64, |l| l.read_unit as u32));
    pairs.set(keys::GROUP, 1);
    pairs.set(keys::GATE_TYPE, array(&|l| tensor_id(l.gate_type)));
    pairs.set(keys::DOWN_TYPE, array(&|l| tensor_id(l.down_type)));
    pairs.set(keys::GATE_BYTES, array(&|l| l.gate_bytes as u32));
    pairs.set(keys::STRIDE, array(&|l| l.stride as u32));
}

/// Those that are not bundles: what belongs to no layer, then layer after layer.
fn resident(source: &Source, options: &ConvertOptions, orders: &[Order], stale: Stale) -> Vec<Resident> {
    let additions = &options.additions;
    let replaced = |name: &str| additions.tensors.iter().any(|(tensor, _)| tensor.name == name);
    let dropped = |name: &str| additions.removed.iter().any(|removed| removed == name);
    let out = |name: &str| replaced(name) || dropped(name) || stale.tensor(name);
    let kept = source.resident.iter().filter(|t| !out(&t.name));
    let mut all: Vec<Resident> = kept.cloned().collect();
    all.extend(additions.tensors.iter().map(|(tensor, bytes)| Resident {
        name: tensor.name.clone(),
        type_id: tensor.type_id,
        dims: tensor.dims.clone(),
        content: Content::Owned(bytes.clone()),
    }));
    for (index, (layer, order)) in source.layers.iter().zip(orders).enumerate() {
        let mut dims = vec![layer.neurons as u64];
        if layer.has_experts {
            dims.push(layer.experts.len() as u64);
        }
        let content = Content::Owned(order.perm.clone());
        all.push(Resident { name: perm_name(index), type_id: I32, dims, content });
    }
    all.sort_by_key(|tensor| layer_of(&tensor.name).map_or(0, |layer| layer + 1));
    all
}

/// The layer that a tensor belongs to.
pub(super) fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}
