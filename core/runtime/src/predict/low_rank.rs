//! Two small matrices: with a ReLU between in the predictors that models bring (PowerInfer section 5; `fc1`, `fc2`),
//! without in those that calibration fits to a gate.

use neuropil_device::{DeviceError, MatmulJob, Product};

use crate::submit::Placed;

use super::{Marks, PredictCall, Predictor, PredictorInput};

/// `fc2 · relu(fc1 · x)`, or `fc2 · fc1 · x`, above a threshold.
pub struct LowRank {
    fc1: Placed,
    fc2: Placed,
    rank: usize,
    relu: bool,
    input: PredictorInput,
    threshold: f32,
}

impl LowRank {
    /// From `fc1` (`rank × width`) and `fc2` (`neurons × rank`); `relu` stands between them or does not.
    pub fn new(
        [fc1, fc2]: [Placed; 2],
        rank: usize,
        relu: bool,
        input: PredictorInput,
        threshold: f32,
    ) -> LowRank {
        LowRank { fc1, fc2, rank, relu, input, threshold }
    }
}

impl Predictor for LowRank {
    fn input(&self) -> PredictorInput {
        self.input
    }

    fn bytes(&self) -> u64 {
        (self.fc1.weight.bytes() + self.fc2.weight.bytes()) as u64
    }

    fn predict(&self, call: &mut PredictCall<'_>, marks: &mut Marks) -> Result<(), DeviceError> {
        let len = call.tokens * self.rank;
        let hidden = call.memory.floats(0, len)?.clone();
        let product = Product { weight: self.fc1.weight.clone(), y: hidden.write()?, accumulate: false };
        let job = MatmulJob::new(call.tokens, call.input.read()?).with(product);
        call.jobs.matmul(&*self.fc1.device, job)?;
        if self.relu {
            hidden.write()?.slice_mut::<f32>()[..len].iter_mut().for_each(|h| *h = h.max(0.0));
        }
        call.mark_above(&*self.fc2.device, &self.fc2.weight, hidden.read()?, self.threshold, marks)
    }
}
