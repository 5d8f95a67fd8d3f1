//! Why a call of the host failed: a code that the host acts on, a text for people, and the driver's own number.

use neuropil_plugin_abi as abi;

/// What the host does about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Code {
    /// The unit does not offer this; the host takes another way.
    Unsupported,
    /// The arguments do not fit together.
    Invalid,
    /// The unit or the process has no more memory.
    OutOfMemory,
    /// The unit is gone. The SDK answers every later call on the device with this.
    Lost,
    /// The deadline passed.
    Timeout,
    /// [`crate::PluginDevice::cancel`] was called.
    Cancelled,
    /// Anything else.
    Internal,
}

impl Code {
    pub(crate) fn number(self) -> i32 {
        match self {
            Code::Unsupported => abi::NP_UNSUPPORTED,
            Code::Invalid => abi::NP_INVALID,
            Code::OutOfMemory => abi::NP_OUT_OF_MEMORY,
            Code::Lost => abi::NP_LOST,
            Code::Timeout => abi::NP_TIMEOUT,
            Code::Cancelled => abi::NP_CANCELLED,
            Code::Internal => abi::NP_INTERNAL,
        }
    }
}

/// An error of a plugin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Error {
    /// What the host does about it.
    pub code: Code,
    /// One sentence for people.
    pub text: String,
    /// The driver's own number; 0 when there is none.
    pub vendor_code: i64,
}

impl Error {
    /// An error with a code and a text.
    pub fn new(code: Code, text: impl Into<String>) -> Error {
        Error { code, text: text.into(), vendor_code: 0 }
    }

    /// [`Code::Unsupported`].
    pub fn unsupported(text: impl Into<String>) -> Error {
        Error::new(Code::Unsupported, text)
    }

    /// [`Code::Invalid`].
    pub fn invalid(text: impl Into<String>) -> Error {
        Error::new(Code::Invalid, text)
    }

    /// [`Code::OutOfMemory`].
    pub fn out_of_memory(text: impl Into<String>) -> Error {
        Error::new(Code::OutOfMemory, text)
    }

    /// [`Code::Lost`].
    pub fn lost(text: impl Into<String>) -> Error {
        Error::new(Code::Lost, text)
    }

    /// [`Code::Timeout`].
    pub fn timeout(text: impl Into<String>) -> Error {
        Error::new(Code::Timeout, text)
    }

    /// [`Code::Cancelled`].
    pub fn cancelled(text: impl Into<String>) -> Error {
        Error::new(Code::Cancelled, text)
    }

    /// [`Code::Internal`].
    pub fn internal(text: impl Into<String>) -> Error {
        Error::new(Code::Internal, text)
    }

    /// The same error with the driver's own number.
    pub fn with_vendor_code(self, vendor_code: i64) -> Error {
        Error { vendor_code, ..self }
    }
}
