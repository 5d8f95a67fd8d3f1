//! Why a well-formed file is not a model that can run.

use neuropil_device::DeviceError;

use crate::gguf::GgufError;

/// An error of a model's description or weights.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file itself.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// No code for this architecture.
    #[error("architecture '{found}' is not supported; supported: {supported}")]
    Architecture {
        /// `general.architecture` of the file.
        found: String,
        /// Those that are.
        supported: String,
    },
    /// A key has a value that no model can have.
    #[error("{key} = {value}: {reason}")]
    Key {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor has another shape than the keys say.
    #[error("tensor {name} is {found}, but the model's keys need {wanted}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape, fastest dimension first.
        found: String,
        /// The shape that was expected.
        wanted: String,
    },
    /// A tensor has a type that nothing here can multiply by.
    #[error(
        "tensor {name} has type {found}, which cannot run; convert the file to a type that `inspect` lists"
    )]
    Type {
        /// The tensor.
        name: String,
        /// Its type.
        found: String,
    },
    /// A tensor that this architecture does not use: running without it would give wrong answers.
    #[error("tensor {name} is not part of architecture '{architecture}' as it is supported here")]
    UnusedTensor {
        /// The tensor.
        name: String,
        /// The architecture.
        architecture: String,
    },
    /// A device refused a weight.
    #[error("tensor {name}: {source}")]
    Weight {
        /// The tensor.
        name: String,
        /// Why.
        source: DeviceError,
    },
    /// No device of the engine can multiply by this type.
    #[error("no device can run tensor {name} of type {dtype}: {reasons}")]
    NoDevice {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: String,
        /// Each device's reason.
        reasons: String,
    },
    /// What units hold does not fit the budget.
    #[error(
        "the units hold {} MiB of weights, which do not fit in {} MiB beside the rest: raise --memory, or name fewer units",
        bytes >> 20, budget >> 20
    )]
    UnitMemory {
        /// Bytes on units, beyond what the processor would need.
        bytes: u64,
        /// The budget.
        budget: u64,
    },
    /// The neuron store itself.
    #[error(transparent)]
    Store(#[from] crate::store::StoreError),
    /// Neurons are to be predicted by what the file does not have.
    #[error("--predict {asked}: {reason}")]
    Prediction {
        /// What was asked for.
        asked: &'static str,
        /// What is missing, and the cure.
        reason: String,
    },
    /// The neurons of a store are not those that the model's keys describe.
    #[error("the store has {found}, but the model's keys need {wanted}; convert the model again")]
    StoreShape {
        /// What the store has.
        found: String,
        /// What the keys say.
        wanted: String,
    },
    /// A gate that cannot be copied in 4 bits.
    #[error("tensor {name}: its width is no multiple of the blocks of {dtype}; use --predict gate")]
    GateWidth {
        /// The tensor.
        name: String,
        /// The type.
        dtype: String,
    },
    /// The memory budget is too small.
    #[error(
        "the memory budget of {} is too small: with these settings the model needs at least {}; {fix}",
        given(*budget),
        size(*smallest)
    )]
    Budget {
        /// Bytes allowed.
        budget: u64,
        /// The least that is enough.
        smallest: u64,
        /// What to do.
        fix: &'static str,
    },
    /// Keys and values grow beyond the memory budget.
    #[error(
        "the keys and values of the context need {}, which the memory budget of {} has no room for; \
         raise --memory, lower --ctx, or use --kv q8_0",
        size(*keys),
        given(*budget)
    )]
    ContextMemory {
        /// Bytes allowed for everything.
        budget: u64,
        /// Bytes of keys and values.
        keys: u64,
    },
    /// Neurons cannot be read from storage.
    #[error(transparent)]
    Io(#[from] crate::io::IoError),
    /// The cache of neurons refused its size.
    #[error(transparent)]
    Cache(#[from] crate::cache::CacheError),
    /// The host refused memory.
    #[error("out of memory: {what} needs {bytes} more bytes")]
    OutOfMemory {
        /// What it was for.
        what: String,
        /// Bytes asked for.
        bytes: u64,
    },
}

impl ModelError {
    pub(crate) fn key(key: &str, value: impl ToString, reason: impl Into<String>) -> ModelError {
        ModelError::Key { key: key.into(), value: value.to_string(), reason: reason.into() }
    }
}

/// A budget in the unit of the flag. Rounded down, or it could look like the one that is enough.
fn given(bytes: u64) -> String {
    format!("{}MiB", bytes >> 20)
}

/// A size in the unit of the flag, rounded up so that it works when it is typed back.
fn size(bytes: u64) -> String {
    format!("{}MiB", bytes.div_ceil(1 << 20))
}
