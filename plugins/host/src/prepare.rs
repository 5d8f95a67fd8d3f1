//! From a weight of the host to one of the unit: encoded, and compiled by the unit or loaded as it was compiled before.
//!
//! Files are read and written by whoever asks for the weight. The unit's thread only calls the plugin, so that a slow
//! disk is not taken for a driver that hangs.

use std::sync::Arc;

use neuropil_device::{Device, DeviceError, Matrix, WeightSource};

use crate::border::Parts;
use crate::choose::{BlockChoice, Choice};
use crate::session::Session;
use crate::weight::{Part, Weight};
use crate::{Encoded, PluginDevice};

/// What goes to the unit.
#[derive(Clone)]
enum Source {
    One(Arc<Encoded>),
    /// Gate, up and down.
    Neurons(Arc<[Encoded; 3]>),
}

impl Source {
    fn parts(&self) -> Parts<'_> {
        match self {
            Source::One(matrix) => Parts::One(matrix),
            Source::Neurons(block) => {
                let [gate, up, down] = &**block;
                Parts::Neurons { gate, up, down }
            }
        }
    }
}

impl PluginDevice {
    /// The unit's form of a weight, and the memory that it takes.
    pub(crate) fn make(&self, weight: &WeightSource<'_>) -> Result<(Weight, usize), DeviceError> {
        match weight {
            WeightSource::Matrix(matrix) => {
                let Matrix { dtype, rows, cols, .. } = *matrix;
                let choice = self.choose(move |session| session.choose_matrix(dtype, rows, cols))?;
                let (part, bytes) = self.make_matrix(matrix, choice)?;
                Ok((Weight::Matrix(part), bytes))
            }
            WeightSource::Neurons { gate, up, down } => {
                let (types, neurons, width) = ([gate.dtype, up.dtype, down.dtype], gate.rows, gate.cols);
                match self.choose(move |session| session.choose_block(types, neurons, width))? {
                    BlockChoice::Whole(choice, down_scheme) => {
                        let down_choice = Choice { scheme: down_scheme, ..choice.clone() };
                        let block = [
                            self.encode(gate, &choice)?,
                            self.encode(up, &choice)?,
                            self.encode(down, &down_choice)?,
                        ];
                        let source = Source::Neurons(Arc::new(block));
                        let (part, bytes) = self.make_part(source, choice.buckets)?;
                        Ok((Weight::Block(part), bytes))
                    }
                    BlockChoice::Apart { gate: g, up: u, down: d } => {
                        let (gate, gate_bytes) = self.make_matrix(gate, g)?;
                        let (up, up_bytes) = self.make_matrix(up, u)?;
                        let (down, down_bytes) = self.make_matrix(down, d)?;
                        let bytes = gate_bytes.saturating_add(up_bytes).saturating_add(down_bytes);
                        Ok((Weight::Apart(Box::new([gate, up, down])), bytes))
                    }
                }
            }
        }
    }

    fn encode(&self, matrix: &Matrix<'_>, choice: &Choice) -> Result<Encoded, DeviceError> {
        Encoded::new(matrix, choice.scheme, if choice.outliers { self.options.outliers } else { 0 })
    }

    /// Chooses on the unit's thread; a no is an error.
    fn choose<T: Send + 'static>(
        &self,
        choose: impl FnOnce(&mut Session) -> Result<T, String> + Send + 'static,
    ) -> Result<T, DeviceError> {
        self.worker.call(|session| Ok(choose(session)))?.map_err(|reason| self.unsupported(&reason))
    }

    fn make_matrix(&self, matrix: &Matrix<'_>, choice: Choice) -> Result<(Part, usize), DeviceError> {
        self.make_part(Source::One(Arc::new(self.encode(matrix, &choice)?)), choice.buckets)
    }

    /// Loads the plan of a weight if there is one, otherwise lets the unit compile it and keeps the plan.
    fn make_part(&self, source: Source, buckets: Vec<usize>) -> Result<(Part, usize), DeviceError> {
        let hand_over = |plan: Option<Vec<u8>>| {
            let (source, buckets) = (source.clone(), buckets.clone());
            self.worker.call(move |session| session.prepare(&source.parts(), buckets, plan.as_deref()))
        };
        let Some(plans) = &self.plans else { return hand_over(None) };
        let place = plans.place(&source.parts(), &buckets);
        if let Some(plan) = place.read() {
            // After any error the file is gone, even if it is the unit that is lost: the plan may be why, every time.
            match place.while_away(|| hand_over(Some(plan))) {
                Ok((part, bytes)) => return Ok((Part { plan: Some(place.path), ..part }, bytes)),
                Err(error @ DeviceError::Lost { .. }) => return Err(error),
                Err(_) => {}
            }
        }
        let (mut part, bytes) = hand_over(None)?;
        drop(source);
        if let Some(most) = plans.room() {
            let (saved, saved_part) =
                self.worker.call(move |session| Ok((session.save(&part, most), part)))?;
            part = saved_part;
            match saved {
                Ok(plan) => {
                    place.write(&plan);
                    part.plan = Some(place.path);
                }
                Err(error @ DeviceError::Lost { .. }) => return Err(error),
                // This weight has none.
                Err(DeviceError::Unsupported { .. }) => {}
                Err(error) => plans.tell(&error.to_string()),
            }
        }
        Ok((part, bytes))
    }
}
