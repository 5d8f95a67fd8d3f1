//! Sparsity for models whose gate never is zero.
//!
//! Most neurons of a SiLU model rest in the function's negative trough, so their values are not small, but they are
//! nearly *constant*. With a constant c_i per neuron, `act(g_i) u_i = c_i u_i + (act(g_i) − c_i) u_i`: the first part of all
//! neurons is one matrix Σ c_i d_i u_iᵀ of `width × width`, folded once; of the second part only the neurons are computed
//! whose gate strays from its constant. No training; any model that has a gate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use neuropil_device::{Buffer, DeviceError, MatmulJob, Product};

use crate::submit::{Jobs, Placed};

/// The constants of one layer.
pub struct Centred {
    /// Σ c_i d_i u_iᵀ.
    fold: Placed,
    /// c_i, one per neuron.
    center: Vec<f32>,
    /// A neuron that strays no more than its layer's entry is left out.
    thresholds: Thresholds,
    layer: usize,
}

/// One cut per layer, that may be moved while the engine runs: how calibration finds them. Clones are the same cuts.
#[derive(Clone, Debug, Default)]
pub struct Thresholds(Arc<[AtomicU32]>);

impl Thresholds {
    /// These cuts.
    pub fn new(cuts: impl IntoIterator<Item = f32>) -> Thresholds {
        Thresholds(cuts.into_iter().map(|cut| AtomicU32::new(cut.to_bits())).collect())
    }

    /// The cut of a layer; 0 where there is none.
    pub fn get(&self, layer: usize) -> f32 {
        self.0.get(layer).map_or(0.0, |cut| f32::from_bits(cut.load(Ordering::Relaxed)))
    }

    /// Moves the cut of a layer. A step that is under way may take the old one or the new one.
    pub fn set(&self, layer: usize, cut: f32) {
        if let Some(of_layer) = self.0.get(layer) {
            of_layer.store(cut.to_bits(), Ordering::Relaxed);
        }
    }
}

impl Centred {
    /// Of layer `layer`, from the folded matrix (`width × width`) and one constant per neuron.
    pub fn new(fold: Placed, center: Vec<f32>, thresholds: Thresholds, layer: usize) -> Centred {
        Centred { fold, center, thresholds, layer }
    }

    /// Bytes of the folded matrix and the constants.
    pub fn bytes(&self) -> u64 {
        (self.fold.weight.bytes() + 4 * self.center.len()) as u64
    }

    /// The layer's cut, to be used for all tokens of a step.
    pub fn cut(&self) -> f32 {
        self.thresholds.get(self.layer)
    }

    /// Replaces the activated gates of one token by what strays from the constants, and by 0 what strays no more than
    /// the cut.
    pub fn stray(&self, gates: &mut [f32], cut: f32) {
        for (gate, center) in gates.iter_mut().zip(&self.center) {
            let stray = *gate - center;
            *gate = if stray.abs() <= cut { 0.0 } else { stray };
        }
    }

    /// Adds the constant part, `y[tokens, width] += fold · h`, for rows of `h` that are not zero.
    ///
    /// # Errors
    /// The device's.
    pub fn add_constant(
        &self,
        tokens: usize,
        h: &Buffer,
        y: &Buffer,
        jobs: &mut Jobs,
    ) -> Result<(), DeviceError> {
        let product = Product { weight: self.fold.weight.clone(), y: y.write()?, accumulate: true };
        jobs.matmul(&*self.fold.device, MatmulJob::new(tokens, h.read()?).with(product))
    }
}
