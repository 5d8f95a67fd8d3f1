//! Synthetic models: real shapes, random weights, and a chosen way of firing.
//!
//! What an engine for sparse models gains depends on three figures of a model: how many neurons fire for a token, how
//! many of them fire for the next one too, and how well that is predicted. Models that have them at the sizes of the
//! PowerInfer papers are tens of gigabytes that nobody may pass on. These are made on the spot, and the figures are what
//! was asked for: `firing` turns them into thresholds and a cosine, `stream` turns the cosine into a residual
//! stream, `weights` makes rows, `file` writes them, and `measure` runs the result and says what came out.
//!
//! The text that comes out means nothing. Costs of memory, storage and compute are those of a real model of the shape.

mod error;
mod file;
mod firing;
mod measure;
mod normal;
mod random;
mod row;
mod shapes;
mod stream;
mod vocabulary;
mod weights;

use std::path::{Path, PathBuf};

use neuropil_device::{ActivationKind, DType};

use crate::pipeline::CancelToken;
use crate::store::Layout;

use file::{Kind, ModelFile};
use firing::Firing;
use stream::Stream;
use weights::Weights;

pub use error::SynthError;
pub use firing::{PRESETS, Preset};
pub use measure::Measured;
pub use shapes::{Experts, SHAPES, Shape};

/// Types that weights can be made in, by their names on the command line.
pub const TYPES: [DType; 3] = [DType::Q4_0, DType::Q8_0, DType::F16];

/// The least rank of a predictor: a block for its threshold, and one pair of blocks for each part of the stream.
pub const LEAST_RANK: usize = 224;

/// The greatest skew of experts: beyond it, a token's own choice is all but gone.
pub const MOST_SKEW: f64 = 4.0;

/// Predictors of `fc2 · relu(fc1 · x)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Predictor {
    /// Rows of `fc1`, a multiple of 32.
    pub rank: usize,
    /// The share of the neurons that fire that they find; as many again are found for nothing as are missed.
    pub recall: f64,
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct SynthOptions {
    /// The shape, with as many layers as are wanted.
    pub shape: Shape,
    /// The way of firing.
    pub preset: Preset,
    /// Share of active neurons.
    pub active: f64,
    /// Share of a token's active neurons that are active for the next token too.
    pub overlap: f64,
    /// Predictors, if there are to be some.
    pub predictor: Option<Predictor>,
    /// How unevenly experts are used: deviation of what a router adds for the expert alone, in deviations of what it adds
    /// for the token. From 0 to [`MOST_SKEW`]; 0 in shapes without experts.
    pub skew: f64,
    /// Same seed, same bytes.
    pub seed: u64,
    /// The type of all large matrices.
    pub dtype: DType,
}

impl SynthOptions {
    /// What `preset` says for `shape`.
    pub fn new(shape: Shape, preset: Preset) -> SynthOptions {
        let (active, overlap) = (preset.active, preset.overlap);
        let dtype = DType::Q4_0;
        SynthOptions { shape, preset, active, overlap, predictor: None, skew: 0.0, seed: 1, dtype }
    }
}

/// The type of that name.
///
/// # Errors
/// [`SynthError::Type`], which lists the names.
pub fn type_named(name: &str) -> Result<DType, SynthError> {
    TYPES
        .into_iter()
        .find(|dtype| dtype.name() == name)
        .ok_or_else(|| SynthError::Type { found: name.into(), known: TYPES.map(DType::name).join(" ") })
}

/// A synthetic model: everything is decided, nothing written.
pub struct Synth {
    options: SynthOptions,
    layout: Layout,
    weights: Weights,
}

impl Synth {
    /// Checks what is asked for.
    ///
    /// # Errors
    /// [`SynthError::Range`] and its like, naming what is out of range and what is in it.
    pub fn new(options: SynthOptions) -> Result<Synth, SynthError> {
        let SynthOptions { shape, predictor, skew, dtype, .. } = &options;
        let range =
            |what, found: usize, wanted: String| SynthError::Range { what, found: found as f64, wanted };
        let least = shape.first_rotating() + 1;
        if shape.layers < least || shape.layers > 1000 {
            return Err(range("the number of layers", shape.layers, format!("{least} to 1000")));
        }
        if let Some(Predictor { rank, .. }) = predictor
            && (!rank.is_multiple_of(32) || *rank < LEAST_RANK || *rank > 4 * shape.width)
        {
            let wanted = format!("a multiple of 32 from {LEAST_RANK} to {}", 4 * shape.width);
            return Err(range("the predictor's rank", *rank, wanted));
        }
        let most = if shape.experts.is_some() { MOST_SKEW } else { 0.0 };
        if !(0.0..=most).contains(skew) {
            let wanted = format!("0 to {most} for {}", shape.name);
            return Err(SynthError::Range { what: "the skew of experts", found: *skew, wanted });
        }
        let layout = Layout::choose(shape.width, shape.neurons, *dtype, *dtype)?;
        let weights = weights(&options)?;
        Ok(Synth { options, layout, weights })
    }

    /// What is asked for.
    pub fn options(&self) -> &SynthOptions {
        &self.options
    }

    fn made_by(&self) -> String {
        let SynthOptions { shape, preset, active, overlap, predictor, skew, seed, .. } = &self.options;
        let mut text = format!(
            "shape={} preset={} active={active} overlap={overlap} seed={seed}",
            shape.name, preset.name
        );
        if let Some(Predictor { rank, recall }) = predictor {
            text += &format!(" rank={rank} recall={recall}");
        }
        if *skew > 0.0 {
            text += &format!(" skew={skew}");
        }
        text
    }

    /// Writes the store to `path` and returns its size.
    ///
    /// # Errors
    /// [`SynthError::NoSpace`] before anything is written, and those of writing; nothing is left behind.
    pub fn write_store(
        &self,
        path: &Path,
        cancel: &CancelToken,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<u64, SynthError> {
        self.write(path, &self.weights, Kind::Store(self.layout), cancel, progress)
    }

    /// Writes the same shape as an ordinary file of matrices to `path` and returns its size. Gate and up are those of
    /// the store, down is as random, but quantised along the neurons.
    ///
    /// # Errors
    /// As [`Synth::write_store`].
    pub fn write_twin(
        &self,
        path: &Path,
        cancel: &CancelToken,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<u64, SynthError> {
        self.write(path, &self.weights, Kind::Matrices, cancel, progress)
    }

    fn write(
        &self,
        path: &Path,
        weights: &Weights,
        kind: Kind,
        cancel: &CancelToken,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<u64, SynthError> {
        let file = ModelFile::new(weights, self.options.dtype, kind);
        check_room(path, file.bytes())?;
        let pairs = file::pairs(weights, self.options.dtype, kind, &self.made_by());
        file.write(path, &pairs, cancel, progress)
    }
}

/// Turns what is asked for into what makes it.
fn weights(options: &SynthOptions) -> Result<Weights, SynthError> {
    let SynthOptions { shape, preset, active, overlap, predictor, skew, seed, .. } = options;
    let drelu = shape.activation.kind == ActivationKind::Drelu;
    let firing = Firing::new(preset, *active, shape.layers, drelu)?;
    let cosine = firing.cosine(*overlap)?;
    let predictor = match predictor {
        Some(predictor) => Some((*predictor, firing.correlation(predictor.recall)?)),
        None => None,
    };
    // Of the rows of the first layer, the first block is for the threshold, and two make a column.
    let seen = predictor.map(|(p, correlation)| ((p.rank - 32) / 2, correlation * correlation));
    let stream = Stream::new(shape, preset, cosine, seen);
    Ok(Weights::new(*shape, (stream, firing), predictor, *skew, *seed))
}

/// Refuses a file that the disk has no room for.
fn check_room(path: &Path, needed: u64) -> Result<(), SynthError> {
    #[cfg(unix)]
    {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = PathBuf::from(folder.unwrap_or(Path::new(".")));
        if let Ok(disk) = rustix::fs::statvfs(&folder) {
            let free = disk.f_bavail.saturating_mul(disk.f_frsize);
            if free < needed {
                return Err(SynthError::NoSpace { folder, needed, free });
            }
        }
    }
    let _ = (path, needed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl Fn(&mut SynthOptions)) -> String {
        let mut options = SynthOptions::new(SHAPES[0], PRESETS[0]);
        change(&mut options);
        Synth::new(options).err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn what_cannot_be_is_refused_with_what_can() {
        for active in [0.0, -1.0, 1.0, 2.0, f64::NAN, f64::INFINITY] {
            assert!(refused(|o| o.active = active).contains("0.002 to 0.9"), "{active}");
        }
        for overlap in [0.0, 0.2, 1.0, f64::NAN] {
            assert!(refused(|o| o.overlap = overlap).contains("independent tokens"), "{overlap}");
        }
        for rank in [0, 1, 32, 225, 1 << 20] {
            let text = refused(|o| o.predictor = Some(Predictor { rank, recall: 0.9 }));
            assert!(text.contains("a multiple of 32 from 224 to 2048"), "{text}");
        }
        for recall in [0.0, 1.0, f64::NAN] {
            let text = refused(|o| o.predictor = Some(Predictor { rank: 256, recall }));
            assert!(text.contains("the recall is"), "{text}");
        }
        for skew in [-0.1, 4.1, f64::NAN, 0.5] {
            assert!(refused(|o| o.skew = skew).contains("skew of experts"), "{skew}");
        }
        assert!(refused(|o| o.shape.layers = 0).contains("1 to 1000"));
        assert!(type_named("q4_k").unwrap_err().to_string().contains("q4_0 q8_0 f16"));
        assert!(Preset::named("easy").unwrap_err().to_string().contains("paper smollm2"));
        assert_eq!(refused(|_| {}), "");
    }

    #[test]
    #[cfg(unix)]
    fn a_disk_without_room_is_told_before_anything_is_written() {
        let error = check_room(Path::new("model.gguf"), u64::MAX).unwrap_err().to_string();
        assert!(
            error.contains("18446744073709551615 bytes are needed") && error.contains("--layers"),
            "{error}"
        );
    }
}
