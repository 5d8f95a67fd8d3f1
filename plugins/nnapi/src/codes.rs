//! The numbers of NNAPI, and what its results mean to the host.

use neuropil_plugin_sdk::{Code, Error};

/// The first feature level with a choice of devices, bursts, F16 and caching: Android 10.
pub(crate) const LEVEL_DEVICES: i64 = 29;
/// The first one with deadlines and signed 8-bit activations: Android 11.
pub(crate) const LEVEL_SIGNED: i64 = 30;
/// The first one with executions that may run again: Android 12.
pub(crate) const LEVEL_REUSABLE: i64 = 31;

/// Types of operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Type {
    Int32 = 1,
    TensorFloat32 = 3,
    TensorInt32 = 4,
    TensorQuant8Asymm = 5,
    TensorFloat16 = 8,
    TensorQuant8SymmPerChannel = 11,
    TensorQuant8AsymmSigned = 14,
}

/// Operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Operation {
    Conv2d = 3,
    FullyConnected = 9,
}

/// No activation after an operation.
pub(crate) const FUSE_NONE: i32 = 0;
/// No padding around the input of a convolution.
pub(crate) const PADDING_VALID: i32 = 2;

/// Types of devices.
pub(crate) const DEVICE_CPU: i32 = 2;
pub(crate) const DEVICE_GPU: i32 = 3;
pub(crate) const DEVICE_ACCELERATOR: i32 = 4;

/// Bytes of the token of a cached compilation.
pub(crate) const TOKEN_BYTES: usize = 32;

/// The results, by their numbers.
const RESULTS: [&str; 15] = [
    "no error",
    "out of memory",
    "incomplete",
    "an unexpected null",
    "bad data",
    "the operation failed",
    "bad state",
    "unmappable memory",
    "an output of insufficient size",
    "the device is unavailable",
    "missed deadline",
    "missed deadline, and will again",
    "resources exhausted",
    "resources exhausted, and will be again",
    "dead object",
];

/// Turns a result into an error. NNAPI has no texts of its own.
pub(crate) fn check(result: i32, what: &str) -> Result<(), Error> {
    let code = match result {
        0 => return Ok(()),
        1 | 12 | 13 => Code::OutOfMemory,
        9 | 14 => Code::Lost,
        10 | 11 => Code::Timeout,
        _ => Code::Internal,
    };
    let name = usize::try_from(result).ok().and_then(|result| RESULTS.get(result).copied());
    let text = format!("NNAPI cannot {what}: {} (result {result})", name.unwrap_or("an unknown result"));
    Err(Error::new(code, text).with_vendor_code(i64::from(result)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_a_code_a_name_and_their_number() {
        assert_eq!(check(0, "x"), Ok(()));
        let want = [
            (1, Code::OutOfMemory),
            (4, Code::Internal),
            (9, Code::Lost),
            (10, Code::Timeout),
            (11, Code::Timeout),
            (12, Code::OutOfMemory),
            (13, Code::OutOfMemory),
            (14, Code::Lost),
            (15, Code::Internal),
            (-1, Code::Internal),
        ];
        for (result, code) in want {
            let error = check(result, "run the graph").unwrap_err();
            assert_eq!((error.code, error.vendor_code), (code, i64::from(result)));
        }
        let text = check(14, "run the graph").unwrap_err().text;
        assert_eq!(text, "NNAPI cannot run the graph: dead object (result 14)");
        assert!(check(99, "x").unwrap_err().text.contains("an unknown result (result 99)"));
    }
}
