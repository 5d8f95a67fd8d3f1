//! The numbers and structs of the C interface. They are written down here once, from the public description, and shared
//! with no client: a client that reads the description differently must fail.

/// What a call comes to: a value, or one of the result codes below.
pub(crate) type Outcome<T = ()> = Result<T, i32>;

/// All went well.
pub const NO_ERROR: i32 = 0;
/// A pointer was NULL that must not be.
pub const UNEXPECTED_NULL: i32 = 3;
/// An argument is out of its range, or does not fit the others.
pub const BAD_DATA: i32 = 4;
/// The operation was tried and did not work.
pub const OP_FAILED: i32 = 5;
/// The object is in a state in which the call is not allowed.
pub const BAD_STATE: i32 = 6;
/// Memory could not be mapped, or not with this protection.
pub const UNMAPPABLE: i32 = 7;
/// An output buffer with open dimensions is too small.
pub const OUTPUT_INSUFFICIENT_SIZE: i32 = 8;
/// The device is not there.
pub const UNAVAILABLE_DEVICE: i32 = 9;
/// The deadline passed; another try may work.
pub const MISSED_DEADLINE_TRANSIENT: i32 = 10;
/// The device's service died.
pub const DEAD_OBJECT: i32 = 14;

/// A single F32.
pub const FLOAT32: i32 = 0;
/// A single 32-bit integer.
pub const INT32: i32 = 1;
/// A single unsigned 32-bit integer.
pub const UINT32: i32 = 2;
/// F32 elements.
pub const TENSOR_FLOAT32: i32 = 3;
/// 32-bit integers, with a scale where they are a bias.
pub const TENSOR_INT32: i32 = 4;
/// Unsigned bytes with scale and zero point.
pub const TENSOR_QUANT8_ASYMM: i32 = 5;
/// A single truth value, one byte.
pub const BOOL: i32 = 6;
/// 16-bit integers with a scale.
pub const TENSOR_QUANT16_SYMM: i32 = 7;
/// F16 elements.
pub const TENSOR_FLOAT16: i32 = 8;
/// Truth values, one byte each.
pub const TENSOR_BOOL8: i32 = 9;
/// A single F16.
pub const FLOAT16: i32 = 10;
/// Signed bytes with a scale per channel.
pub const TENSOR_QUANT8_SYMM_PER_CHANNEL: i32 = 11;
/// Unsigned 16-bit integers with scale and zero point.
pub const TENSOR_QUANT16_ASYMM: i32 = 12;
/// Signed bytes with a scale.
pub const TENSOR_QUANT8_SYMM: i32 = 13;
/// Signed bytes with scale and zero point.
pub const TENSOR_QUANT8_ASYMM_SIGNED: i32 = 14;

/// The sum of two tensors.
pub const ADD: i32 = 0;
/// A convolution over height and width.
pub const CONV_2D: i32 = 3;
/// Rows times weights, plus a bias.
pub const FULLY_CONNECTED: i32 = 9;
/// The logistic function of each element.
pub const LOGISTIC: i32 = 14;
/// The product of two tensors, element by element.
pub const MUL: i32 = 18;

/// Feature levels, as the library reports them.
pub const LEVELS: [i64; 8] = [27, 28, 29, 30, 31, 1_000_006, 1_000_007, 1_000_008];

/// Values up to this many bytes are copied when they are set.
pub const COPIED_AT_ONCE: usize = 128;

/// Bytes of a cache token.
pub const TOKEN: usize = 32;

/// The type of an operand.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct OperandType {
    /// One of the type codes.
    pub kind: i32,
    /// The number of dimensions.
    pub dimension_count: u32,
    /// The dimensions; 0 is one that is not known yet.
    pub dimensions: *const u32,
    /// The value of one step, for quantised types.
    pub scale: f32,
    /// The code that stands for zero, for asymmetric types.
    pub zero_point: i32,
}

/// The scales of a tensor with one per channel.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ChannelScales {
    /// The dimension that counts channels.
    pub dimension: u32,
    /// The number of scales.
    pub count: u32,
    /// The scales.
    pub scales: *const f32,
}

const _: () = assert!(size_of::<OperandType>() == 24 && size_of::<ChannelScales>() == 16);

/// The name of an operation, as `control` knows it.
pub(crate) fn operation_name(kind: i32) -> &'static str {
    match kind {
        ADD => "ADD",
        CONV_2D => "CONV_2D",
        FULLY_CONNECTED => "FULLY_CONNECTED",
        LOGISTIC => "LOGISTIC",
        MUL => "MUL",
        _ => "OTHER",
    }
}

/// The name of a tensor type, as `control` knows it.
pub(crate) fn type_name(kind: i32) -> &'static str {
    match kind {
        TENSOR_FLOAT32 => "FLOAT32",
        TENSOR_FLOAT16 => "FLOAT16",
        TENSOR_QUANT8_ASYMM => "QUANT8_ASYMM",
        TENSOR_QUANT8_ASYMM_SIGNED => "QUANT8_ASYMM_SIGNED",
        TENSOR_QUANT8_SYMM_PER_CHANNEL => "QUANT8_SYMM_PER_CHANNEL",
        TENSOR_INT32 => "INT32",
        _ => "OTHER",
    }
}
