//! The gate matrix itself in 4 bits: no training, and on a real ReLU model 98 % of the neurons that fire for 8 % more
//! than those. Its rows come out of the store, so it costs no file.

use neuropil_device::DeviceError;

use crate::submit::Placed;

use super::{Marks, PredictCall, Predictor, PredictorInput};

/// The gate in 4 bits, above a threshold a little below the model's own.
pub struct Gate4 {
    gate: Placed,
    threshold: f32,
}

impl Gate4 {
    /// From the gate (`neurons × width`) in 4 bits.
    pub fn new(gate: Placed, threshold: f32) -> Gate4 {
        Gate4 { gate, threshold }
    }
}

impl Predictor for Gate4 {
    fn input(&self) -> PredictorInput {
        PredictorInput::Normed
    }

    fn bytes(&self) -> u64 {
        self.gate.weight.bytes() as u64
    }

    fn predict(&self, call: &mut PredictCall<'_>, marks: &mut Marks) -> Result<(), DeviceError> {
        let input = call.input.read()?;
        call.mark_above(&*self.gate.device, &self.gate.weight, input, self.threshold, marks)
    }
}
