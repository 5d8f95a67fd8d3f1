//! Jobs on single neurons give the bits of a dense layer in which the other neurons are silent.

use std::sync::Arc;

use neuropil_cpu::Isa;
use neuropil_device::quant::{SLICE, bundle_row, bundle_row_bytes, dequantize_row, reference};
use neuropil_device::{
    Activation, ActivationKind, Arena, Buffer, BundleLayout, ClusterJob, ClusterWeights, DType, Device,
    DeviceError, Matrix, Stage, WeightSource,
};
use proptest::prelude::*;

mod common;
use common::{Weights, bits, buffer, device, numbers, run_cluster, to_bits};

/// A layer by neuron: row n of each matrix is neuron n's, down's too.
struct Layer {
    gate: Weights,
    up: Weights,
    down: Weights,
    layout: BundleLayout,
    arena: Arena,
}

impl Layer {
    fn new(dtype: DType, down_dtype: DType, neurons: usize, width: usize) -> Layer {
        let [gate, up] = [1, 2].map(|seed| Weights::new(seed, dtype, neurons, width));
        let down = Weights::new(3, down_dtype, neurons, width);
        let row = bundle_row_bytes(dtype, width).unwrap();
        let layout = BundleLayout { width, dtype, down_dtype, gate: 0, up: row, down: 2 * row };
        let bytes = 2 * row + bundle_row_bytes(down_dtype, width).unwrap();
        let arena = Arena::new(neurons, bytes, 64).unwrap();
        for n in 0..neurons {
            let mut slot = arena.write(n).unwrap();
            for (weights, at) in [(&gate, layout.gate), (&up, layout.up), (&down, layout.down)] {
                let bytes = bundle_row_bytes(weights.dtype, width).unwrap();
                let row = weights.bytes.len() / neurons;
                let row = &weights.bytes[n * row..][..row];
                bundle_row(weights.dtype, width, row, &mut slot.bytes_mut()[at..][..bytes]);
            }
        }
        Layer { gate, up, down, layout, arena }
    }

    fn neurons(&self) -> usize {
        self.gate.rows
    }

    fn bundles(&self, device: &dyn Device, neurons: &[u32]) -> ClusterWeights {
        let positions = device.alloc(neurons.len() * 4).unwrap();
        positions.write().unwrap().slice_mut::<u32>().copy_from_slice(neurons);
        ClusterWeights::Bundles {
            layout: self.layout,
            slots: self.arena.pin(neurons.to_vec()).unwrap(),
            positions: positions.read().unwrap(),
        }
    }

    fn job(&self, device: &dyn Device, neurons: &[u32], activation: Activation, x: &Buffer) -> ClusterJob {
        ClusterJob {
            stage: Stage::Fused,
            tokens: x.len() / 4 / self.layout.width,
            activation,
            weights: self.bundles(device, neurons),
            x: x.read().unwrap(),
            hidden: None,
            y: None,
            accumulate: false,
        }
    }

    /// The down matrix as a dense layer has it: widened, `width` rows of all neurons.
    fn dense_down(&self) -> Vec<f32> {
        let (neurons, width) = (self.neurons(), self.layout.width);
        let mut dense = vec![0.0; neurons * width];
        let mut row = vec![0.0; width];
        for (n, bytes) in self.down.bytes.chunks_exact(self.down.bytes.len() / neurons).enumerate() {
            dequantize_row(self.down.dtype, bytes, &mut row);
            row.iter().enumerate().for_each(|(c, w)| dense[c * neurons + n] = *w);
        }
        dense
    }

    /// The law: every neuron that is not listed has the hidden value 0.
    fn reference(&self, listed: &[u32], activation: Activation, x: &[f32], y: &mut [f32], accumulate: bool) {
        let (neurons, width) = (self.neurons(), self.layout.width);
        let tokens = x.len() / width;
        let mut gate = vec![0.0; tokens * neurons];
        let mut up = gate.clone();
        self.gate.reference(x, &mut gate, false);
        self.up.reference(x, &mut up, false);
        let mut hidden = vec![0.0; tokens * neurons];
        for t in 0..tokens {
            for n in listed {
                let at = t * neurons + *n as usize;
                hidden[at] = activation.apply(gate[at], up[at]);
            }
        }
        let down: Vec<u8> = self.dense_down().iter().flat_map(|w| w.to_le_bytes()).collect();
        if !accumulate {
            y.fill(0.0);
        }
        // A job goes on with the sum that is there, slice by slice.
        for slice in (0..neurons).step_by(SLICE) {
            let mut part = vec![0.0; hidden.len()];
            for (part, hidden) in part.chunks_exact_mut(neurons).zip(hidden.chunks_exact(neurons)) {
                let slice = slice..neurons.min(slice + SLICE);
                part[slice.clone()].copy_from_slice(&hidden[slice]);
            }
            reference::matmul(DType::F32, &down, width, neurons, tokens, &part, y, true);
        }
    }
}

fn check(layer: &Layer, device: &Arc<dyn Device>, listed: &[u32], activation: Activation, tokens: usize) {
    let x = numbers(5, tokens * layer.layout.width);
    let before = numbers(6, tokens * layer.layout.width);
    let input = buffer(&**device, &x);
    for accumulate in [false, true] {
        let mut want = before.clone();
        layer.reference(listed, activation, &x, &mut want, accumulate);
        let fused = buffer(&**device, &before);
        let job = layer.job(&**device, listed, activation, &input);
        let y = Some(fused.write().unwrap());
        run_cluster(&**device, ClusterJob { y, accumulate, ..job }).unwrap();
        assert_eq!(bits(&fused), to_bits(&want), "fused, {activation:?}, {tokens} tokens");

        let staged = buffer(&**device, &before);
        let hidden = device.alloc(tokens * listed.len() * 4).unwrap();
        let job = layer.job(&**device, listed, activation, &input);
        let gates = Some(hidden.write().unwrap());
        run_cluster(&**device, ClusterJob { stage: Stage::Gate, hidden: gates, ..job }).unwrap();
        let job = layer.job(&**device, listed, activation, &input);
        let (gates, y) = (Some(hidden.write().unwrap()), Some(staged.write().unwrap()));
        let job = ClusterJob { stage: Stage::UpDown, hidden: gates, y, accumulate, ..job };
        run_cluster(&**device, job).unwrap();
        assert_eq!(bits(&staged), to_bits(&want), "gate first, {activation:?}, {tokens} tokens");
    }
}

const RELU: Activation = Activation::new(ActivationKind::Relu);

const DOWN_TYPES: [DType; 6] = [DType::F32, DType::F16, DType::BF16, DType::Q4_0, DType::Q4_1, DType::Q8_0];

#[test]
fn every_type_and_instruction_set_gives_the_bits_of_the_reference() {
    for (number, dtype) in DType::ALL.into_iter().filter(|dtype| !dtype.is_expanded()).enumerate() {
        let layer = Layer::new(dtype, DOWN_TYPES[number % DOWN_TYPES.len()], 70, 768);
        let listed: Vec<u32> = (0..70).filter(|n| n % 3 != 1).collect();
        for isa in Isa::all_available() {
            for threads in [1, 3] {
                check(&layer, &device(threads, isa), &listed, RELU, 1 + number % 3);
            }
        }
    }
}

#[test]
fn batches_and_activations_and_slices() {
    // Three slices of the down sum, of which the middle one is silent.
    let layer = Layer::new(DType::Q4_0, DType::Q4_0, 1100, 576);
    let listed: Vec<u32> = (0..1100).filter(|n| !(512..1024).contains(n) && n % 7 < 2).collect();
    for isa in Isa::all_available() {
        let device = device(2, isa);
        for tokens in [1, 2, 4, 8, 13] {
            check(&layer, &device, &listed, RELU, tokens);
        }
        for (_, kind) in ActivationKind::NAMES {
            check(&layer, &device, &listed, Activation { kind, threshold: 0.05 }, 2);
        }
        check(&layer, &device, &[], RELU, 2);
        check(&layer, &device, &[1099], RELU, 1);
    }
}

#[test]
fn down_rows_of_every_type_with_many_tokens() {
    // From 16 tokens on down rows are widened for all of them. The widths end within what a thread takes at a time, and
    // that of floats within 16 columns.
    for down_dtype in DOWN_TYPES {
        let floats = [DType::F32, DType::F16, DType::BF16].contains(&down_dtype);
        let (dtype, width) = if floats { (down_dtype, 141) } else { (DType::Q4_0, 160) };
        let layer = Layer::new(dtype, down_dtype, 1050, width);
        let listed: Vec<u32> = (0..1050).filter(|n| n % 11 == 3 || (500..520).contains(n)).collect();
        for isa in Isa::all_available() {
            for tokens in [8, 15, 16, 23] {
                check(&layer, &device(1 + tokens % 3, isa), &listed, RELU, tokens);
            }
        }
    }
}

#[test]
fn rows_of_every_type_with_many_tokens() {
    // From 64 tokens on gate and up rows are turned whole; 2 slices of them here.
    for (number, dtype) in DType::ALL.into_iter().filter(|dtype| !dtype.is_expanded()).enumerate() {
        let layer = Layer::new(dtype, DType::Q8_0, 40, 768);
        let listed: Vec<u32> = (0..40).filter(|n| n % 5 != 1).collect();
        for isa in Isa::all_available() {
            check(&layer, &device(1 + number % 2, isa), &listed, RELU, 64 + number % 4);
        }
    }
    let layer = Layer::new(DType::Q4_0, DType::Q4_0, 1100, 64);
    for isa in Isa::all_available() {
        let all: Vec<u32> = (0..1100).collect();
        check(&layer, &device(2, isa), &all, Activation::new(ActivationKind::Silu), 66);
        check(&layer, &device(2, isa), &[], RELU, 66);
        check(&layer, &device(2, isa), &[1099], RELU, 66);
    }
}

#[test]
fn all_neurons_equal_a_dense_block() {
    let layer = Layer::new(DType::Q4_1, DType::Q8_0, 600, 320);
    let device = device(2, Isa::detect());
    let (x, all) = (numbers(5, 3 * 320), (0..600).collect::<Vec<u32>>());
    let input = buffer(&*device, &x);
    let down: Vec<u8> = layer.dense_down().iter().flat_map(|w| w.to_le_bytes()).collect();
    let source = WeightSource::Neurons {
        gate: layer.gate.matrix(),
        up: layer.up.matrix(),
        down: Matrix { dtype: DType::F32, rows: 320, cols: 600, data: &down },
    };
    let block = ClusterWeights::Block(device.prepare(source, None).unwrap());
    let silu = Activation::new(ActivationKind::Silu);
    let outputs = [block, layer.bundles(&*device, &all)].map(|weights| {
        let y = device.alloc(3 * 320 * 4).unwrap();
        let job = layer.job(&*device, &all, silu, &input);
        let y_lease = Some(y.write().unwrap());
        run_cluster(&*device, ClusterJob { weights, y: y_lease, ..job }).unwrap();
        bits(&y)
    });
    assert_eq!(outputs[0], outputs[1]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// Any list of neurons, any number of tokens and threads.
    #[test]
    fn any_list(
        chosen in proptest::collection::vec(any::<bool>(), 90),
        tokens in 1usize..10,
        threads in 1usize..4,
        groups in 1usize..40,
        kind in 0usize..5,
    ) {
        let layer = Layer::new(DType::Q5_0, DType::Q4_1, 90, 32 * groups);
        let listed: Vec<u32> = (0..90).filter(|n| chosen[*n as usize]).collect();
        let activation = Activation::new(ActivationKind::NAMES[kind].1);
        check(&layer, &device(threads, Isa::detect()), &listed, activation, tokens);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Any neurons of three slices, whichever way down rows are added up.
    #[test]
    fn any_list_of_slices(
        chosen in proptest::collection::vec(any::<bool>(), 70),
        places in proptest::sample::subsequence((0..1300u32).collect::<Vec<u32>>(), 70),
        tokens in 12usize..20,
        down in 0usize..6,
        isa in any::<proptest::sample::Index>(),
    ) {
        let layer = SLICES.with(|layers| layers[down].clone());
        let listed: Vec<u32> = places.iter().zip(chosen).filter(|(_, on)| *on).map(|(n, _)| *n).collect();
        let isa = *isa.get(&Isa::all_available());
        check(&layer, &device(2, isa), &listed, RELU, tokens);
    }
}

std::thread_local! {
    static SLICES: [Arc<Layer>; 6] = DOWN_TYPES.map(|down| Arc::new(Layer::new(DType::Q5_1, down, 1300, 64)));
}

#[test]
fn widths_of_floats_need_be_no_multiple_of_anything() {
    for width in [4, 33, 100] {
        for dtype in [DType::F32, DType::F16] {
            let layer = Layer::new(dtype, dtype, 20, width);
            for isa in Isa::all_available() {
                check(&layer, &device(2, isa), &[0, 3, 4, 5, 6, 19], RELU, 3);
            }
        }
    }
}

/// Neurons, at their places in a sum of four slices, that are computed in pieces.
struct Pieces<'a> {
    device: &'a dyn Device,
    layer: &'a Layer,
    positions: &'a [u32],
    activation: Activation,
    x: &'a Buffer,
}

impl Pieces<'_> {
    /// One stage for those neurons that `of` lists, from an arena in which no other rows are valid.
    fn run(&self, stage: Stage, of: &[u32], hidden: Option<&Buffer>, y: Option<&Buffer>, accumulate: bool) {
        let BundleLayout { up, down, .. } = self.layer.layout;
        let rows =
            [(stage.has_gate(), 0..up), (stage.has_up(), up..down), (stage.has_down(), down..usize::MAX)];
        let arena = Arena::new(self.layer.neurons(), self.layer.arena.slot_bytes(), 64).unwrap();
        for n in of {
            let (from, mut to) =
                (self.layer.arena.read(*n as usize).unwrap(), arena.write(*n as usize).unwrap());
            for (byte, (from, to)) in from.bytes().iter().zip(to.bytes_mut()).enumerate() {
                *to = if rows.iter().any(|(valid, at)| *valid && at.contains(&byte)) { *from } else { 0xFF };
            }
        }
        let positions = self.device.alloc(of.len() * 4).unwrap();
        let list: Vec<u32> = of.iter().map(|n| self.positions[*n as usize]).collect();
        positions.write().unwrap().slice_mut::<u32>().copy_from_slice(&list);
        let job = ClusterJob {
            stage,
            weights: ClusterWeights::Bundles {
                layout: self.layer.layout,
                slots: arena.pin(of.to_vec()).unwrap(),
                positions: positions.read().unwrap(),
            },
            hidden: hidden.map(|buffer| buffer.write().unwrap()),
            y: y.map(|buffer| buffer.write().unwrap()),
            accumulate,
            ..self.layer.job(self.device, &[], self.activation, self.x)
        };
        run_cluster(self.device, job).unwrap();
    }

    fn tokens(&self) -> usize {
        self.x.len() / 4 / self.layer.layout.width
    }

    /// The hidden values of some neurons, as a buffer for a job on them.
    fn hidden(&self, values: &[Vec<f32>], of: &[u32]) -> Buffer {
        let tokens = 0..self.tokens();
        let all: Vec<f32> = tokens.flat_map(|t| of.iter().map(move |n| values[*n as usize][t])).collect();
        buffer(self.device, &all)
    }

    /// The hidden values of all neurons, computed piece by piece, by `ways` in turn.
    fn values(&self, pieces: &[&[u32]], ways: &[&[Stage]]) -> Vec<Vec<f32>> {
        let mut values = vec![vec![0.0; self.tokens()]; self.layer.neurons()];
        for (piece, way) in pieces.iter().zip(ways.iter().cycle()) {
            for stage in *way {
                let hidden = self.hidden(&values, piece);
                self.run(*stage, piece, Some(&hidden), None, false);
                let hidden = hidden.read().unwrap();
                for (t, hidden) in hidden.slice::<f32>().chunks_exact(piece.len()).enumerate() {
                    piece.iter().zip(hidden).for_each(|(n, h)| values[*n as usize][t] = *h);
                }
            }
        }
        values
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]
    /// However the work is cut: gate and up for any neurons in any order, the sum for whole slices.
    #[test]
    fn pieces_in_any_order_have_the_bits_of_one_job(
        types in 0usize..100,
        positions in proptest::sample::subsequence((0..2000u32).collect::<Vec<u32>>(), 50),
        order in Just((0..50u32).collect::<Vec<u32>>()).prop_shuffle(),
        at_once in 1usize..40,
        tokens in prop_oneof![3 => 1usize..20, 1 => Just(70usize)],
        (threads, isa) in (1usize..4, any::<proptest::sample::Index>()),
        kind in 0usize..6,
        (accumulate, by_slice) in any::<(bool, bool)>(),
    ) {
        let turned: Vec<DType> = DType::ALL.into_iter().filter(|dtype| !dtype.is_expanded()).collect();
        let layer = Layer::new(turned[types % turned.len()], DOWN_TYPES[types % 6], 50, 768);
        let device = &*device(threads, *isa.get(&Isa::all_available()));
        let activation = Activation { kind: ActivationKind::NAMES[kind].1, threshold: 0.05 };
        let [x, before] = [5, 6].map(|seed| numbers(seed, tokens * 768));
        let x = &buffer(device, &x);
        let pieces = Pieces { device, layer: &layer, positions: &positions, activation, x };
        let all: Vec<u32> = (0..50).collect();
        let fused = buffer(device, &before);
        pieces.run(Stage::Fused, &all, None, Some(&fused), accumulate);

        let ways: [&[Stage]; 2] = [&[Stage::GateUp], &[Stage::Gate, Stage::Up]];
        let cut: Vec<&[u32]> = order.chunks(at_once).collect();
        let values = pieces.values(&cut, &ways);
        let y = buffer(device, &before);
        if by_slice {
            let place = |n: &u32| positions[*n as usize] as usize / SLICE;
            for (i, slice) in all.chunk_by(|a, b| place(a) == place(b)).enumerate() {
                let hidden = pieces.hidden(&values, slice);
                pieces.run(Stage::Down, slice, Some(&hidden), Some(&y), accumulate || i > 0);
            }
        } else {
            pieces.run(Stage::Down, &all, Some(&pieces.hidden(&values, &all)), Some(&y), accumulate);
        }
        prop_assert_eq!(bits(&y), bits(&fused));

        let gates = pieces.values(&cut, &[&[Stage::Gate]]);
        let (hidden, y) = (pieces.hidden(&gates, &all), buffer(device, &before));
        let left = bits(&hidden);
        pieces.run(Stage::UpDown, &all, Some(&hidden), Some(&y), accumulate);
        prop_assert_eq!((bits(&y), bits(&hidden)), (bits(&fused), left));
    }
}

#[test]
fn what_the_gate_switches_off_is_left_as_zero() {
    let layer = Layer::new(DType::Q8_0, DType::Q8_0, 40, 64);
    let device = &*device(2, Isa::detect());
    let x = &buffer(device, &numbers(5, 3 * 64));
    let positions: Vec<u32> = (0..40).collect();
    let pieces = Pieces { device, layer: &layer, positions: &positions, activation: RELU, x };
    let gates = pieces.values(&[&positions], &[&[Stage::Gate]]);
    let values = pieces.values(&[&positions], &[&[Stage::GateUp]]);
    let off = |gate: &f32| RELU.is_off(*gate);
    assert!(gates.iter().any(|gates| gates.iter().all(off)) && !gates.iter().flatten().all(off));
    for (gate, value) in gates.iter().flatten().zip(values.iter().flatten()) {
        assert_eq!(off(gate), *value == 0.0, "{gate} {value}");
    }
}

#[test]
fn bundles_that_do_not_fit_are_errors() {
    let layer = Layer::new(DType::Q4_0, DType::Q4_0, 8, 64);
    let device = device(2, Isa::detect());
    let x = buffer(&*device, &[0.5; 64]);
    let y = || Some(device.alloc(64 * 4).unwrap().write().unwrap());
    let job = |layout: BundleLayout, positions: &[u32]| {
        let list = device.alloc(positions.len() * 4).unwrap();
        list.write().unwrap().slice_mut::<u32>().copy_from_slice(positions);
        let slots = layer.arena.pin(vec![0, 1]).unwrap();
        let weights = ClusterWeights::Bundles { layout, slots, positions: list.read().unwrap() };
        run_cluster(&*device, ClusterJob { weights, y: y(), ..layer.job(&*device, &[], RELU, &x) })
    };
    let layout = layer.layout;
    assert_eq!(job(layout, &[3, 4]), Ok(()));
    assert!(matches!(job(layout, &[4, 3]), Err(DeviceError::Unsupported { .. })));
    assert!(matches!(job(layout, &[3]), Err(DeviceError::Mismatch { what: "positions", .. })));
    let wide = BundleLayout { width: 128, ..layout };
    assert!(matches!(job(wide, &[3, 4]), Err(DeviceError::Mismatch { what: "bytes of a slot", .. })));
    let far = BundleLayout { down: usize::MAX, ..layout };
    assert!(matches!(job(far, &[3, 4]), Err(DeviceError::Mismatch { what: "bytes of a slot", .. })));
    let odd = BundleLayout { width: 33, ..layout };
    assert!(matches!(job(odd, &[3, 4]), Err(DeviceError::Shape { .. })));
    let other = BundleLayout { down_dtype: DType::Q5_0, down: 0, ..layout };
    assert!(matches!(job(other, &[3, 4]), Err(DeviceError::Unsupported { .. })));
    for stage in [Stage::Gate, Stage::Up, Stage::Down, Stage::GateUp, Stage::UpDown] {
        let short = ClusterJob { stage, y: y(), ..layer.job(&*device, &[0, 1], RELU, &x) };
        let missing = DeviceError::Mismatch { what: "values of hidden", needed: 2, found: 0 };
        assert_eq!(run_cluster(&*device, short), Err(missing), "{stage:?}");
    }
    let short = ClusterJob { y: None, ..layer.job(&*device, &[0, 1], RELU, &x) };
    assert!(matches!(run_cluster(&*device, short), Err(DeviceError::Mismatch { .. })));
}
