//! The structs of QNN's C interface that the plugin passes, as facts about sizes and offsets.
//!
//! No header of QNN is needed to build, and none was copied: the layouts are asserted here when this is compiled, and
//! the tests with a real library show that it reads them so. They are the same in every release from core API 2.32 to
//! 2.40. All enums are 32 bits; numbers of a kind are constants, so that an unknown one cannot become a wrong variant.

use std::ffi::{c_char, c_void};
use std::mem::offset_of;

/// A handle of the library.
pub(crate) type Handle = *mut c_void;

/// A code of the library; 0 is success.
pub(crate) type Code = u64;

/// `major.minor.patch`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

/// Entries of the function table that are looked at.
pub(crate) const ENTRIES: usize = 49;

/// What `QnnInterface_getProviders` points to.
#[repr(C)]
pub(crate) struct Interface {
    pub backend_id: u32,
    pub provider: *const c_char,
    pub core: Version,
    pub backend: Version,
    /// Functions; NULL where the backend has none.
    pub table: [*const c_void; ENTRIES],
}

/// Kinds of tensors.
pub(crate) const APP_WRITE: u32 = 0;
pub(crate) const APP_READ: u32 = 1;
pub(crate) const STATIC: u32 = 4;

/// Types of elements.
pub(crate) const UINT_32: u32 = 0x132;
pub(crate) const FLOAT_16: u32 = 0x216;
pub(crate) const FLOAT_32: u32 = 0x232;
pub(crate) const SFIXED_8: u32 = 0x308;
pub(crate) const UFIXED_8: u32 = 0x408;
pub(crate) const UFIXED_16: u32 = 0x416;

/// Where the bytes of a tensor are.
pub(crate) const MEMORY_RAW: u32 = 0;
pub(crate) const MEMORY_HANDLE: u32 = 1;

/// `scale * (code + offset)`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScaleOffset {
    pub scale: f32,
    pub offset: i32,
}

/// A scale for each element of an axis.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AxisScales {
    pub axis: i32,
    pub count: u32,
    pub scales: *const ScaleOffset,
}

/// The same for codes of fewer bits than their container.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct NarrowAxisScales {
    pub bits: u32,
    pub axis: i32,
    pub count: u32,
    pub scales: *const f32,
    pub offsets: *const i32,
}

/// The forms of an encoding.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union EncodingForm {
    pub scale_offset: ScaleOffset,
    pub axis: AxisScales,
    pub narrow_axis: NarrowAxisScales,
}

/// `definition` of an encoding that counts.
pub(crate) const DEFINED: u32 = 1;
const UNDEFINED: u32 = 0x7fff_ffff;

/// `encoding` numbers.
pub(crate) const ENCODING_SCALE_OFFSET: u32 = 0;
pub(crate) const ENCODING_AXIS: u32 = 1;
pub(crate) const ENCODING_NARROW_AXIS: u32 = 3;

/// How codes are worth numbers.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Quantize {
    pub definition: u32,
    pub encoding: u32,
    pub form: EncodingForm,
}

impl Quantize {
    /// For elements that are numbers themselves.
    pub const NONE: Quantize = {
        let nothing = NarrowAxisScales {
            bits: 0,
            axis: 0,
            count: 0,
            scales: std::ptr::null(),
            offsets: std::ptr::null(),
        };
        Quantize { definition: UNDEFINED, encoding: UNDEFINED, form: EncodingForm { narrow_axis: nothing } }
    };
}

/// Memory of the caller.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Bytes {
    pub data: *mut c_void,
    pub size: u32,
}

/// The bytes of a tensor.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union Memory {
    pub bytes: Bytes,
    pub handle: Handle,
}

/// A tensor of version 1, with room for the fields of version 2.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Tensor {
    pub version: u32,
    pub gap: u32,
    pub id: u32,
    pub name: *const c_char,
    pub kind: u32,
    pub layout: u32,
    pub element: u32,
    pub quantize: Quantize,
    pub rank: u32,
    pub dims: *const u32,
    pub memory_kind: u32,
    pub memory: Memory,
    pub later: [u64; 3],
}

/// A number: its type and its bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Scalar {
    pub element: u32,
    pub value: u64,
}

/// `kind` of a parameter that is a tensor.
pub(crate) const PARAM_TENSOR: u32 = 1;

/// What a parameter is.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union ParamValue {
    pub scalar: Scalar,
    pub tensor: Tensor,
}

/// A parameter of an operation.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Param {
    pub kind: u32,
    pub name: *const c_char,
    pub value: ParamValue,
}

/// An operation; passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct OpConfig {
    pub version: u32,
    pub name: *const c_char,
    pub package: *const c_char,
    pub op: *const c_char,
    pub param_count: u32,
    pub params: *const Param,
    pub input_count: u32,
    pub inputs: *const Tensor,
    pub output_count: u32,
    pub outputs: *const Tensor,
}

/// `option` of a device's configuration that is the backend's own.
pub(crate) const CONFIG_CUSTOM: u32 = 0;

/// One configuration of a device.
#[repr(C)]
pub(crate) struct DeviceConfig {
    pub option: u32,
    pub custom: *const c_void,
}

/// The SoC of an HTP device. Releases read the number at 4 or at 8 bytes from the start, so it stands at both.
#[repr(C)]
pub(crate) struct HtpSoc {
    pub option: u32,
    pub soc: u32,
    pub soc_again: u32,
    pub rest: [u32; 5],
}

/// Memory to be registered.
#[repr(C)]
pub(crate) struct MemoryDescriptor {
    pub rank: u32,
    pub dims: *const u32,
    pub shape_config: *const c_char,
    pub element: u32,
    pub kind: u32,
    pub fd: i32,
    pub rest: u64,
}

/// `kind` of memory behind a file descriptor of rpcmem.
pub(crate) const MEMORY_ION: u32 = 1;

/// What `deviceGetInfrastructure` gives of HTP: four functions.
#[repr(C)]
pub(crate) struct HtpInfrastructure {
    pub kind: u32,
    pub create_power: *const c_void,
    pub destroy_power: *const c_void,
    pub set_power: *const c_void,
    pub set_memory: *const c_void,
}

/// One vote for power: an option and its words.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PowerConfig {
    pub option: u32,
    pub words: [u32; 16],
}

// What was read and run, not what is hoped. Only 64-bit little-endian systems have QNN.
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(offset_of!(Interface, provider) == 8 && offset_of!(Interface, core) == 16);
    assert!(offset_of!(Interface, table) == 40);
    assert!(size_of::<Quantize>() == 40 && offset_of!(Quantize, form) == 8);
    assert!(offset_of!(AxisScales, scales) == 8);
    assert!(offset_of!(NarrowAxisScales, scales) == 16 && offset_of!(NarrowAxisScales, offsets) == 24);
    // The offsets of version 1 count from its own start, at 8.
    assert!(size_of::<Tensor>() == 144 && offset_of!(Tensor, id) == 8 && offset_of!(Tensor, name) == 8 + 8);
    assert!(offset_of!(Tensor, kind) == 8 + 16 && offset_of!(Tensor, layout) == 8 + 20);
    assert!(offset_of!(Tensor, element) == 8 + 24 && offset_of!(Tensor, quantize) == 8 + 32);
    assert!(offset_of!(Tensor, rank) == 8 + 72 && offset_of!(Tensor, dims) == 8 + 80);
    assert!(offset_of!(Tensor, memory_kind) == 8 + 88 && offset_of!(Tensor, memory) == 8 + 96);
    assert!(offset_of!(Tensor, later) == 8 + 112 && offset_of!(Bytes, size) == 8);
    assert!(size_of::<Scalar>() == 16 && offset_of!(Scalar, value) == 8);
    assert!(size_of::<Param>() == 160 && offset_of!(Param, value) == 16);
    assert!(size_of::<OpConfig>() == 80 && offset_of!(OpConfig, name) == 8);
    assert!(offset_of!(OpConfig, params) == 40 && offset_of!(OpConfig, inputs) == 56);
    assert!(offset_of!(OpConfig, outputs) == 72);
    assert!(size_of::<HtpSoc>() == 32 && offset_of!(HtpSoc, soc_again) == 8);
    assert!(size_of::<MemoryDescriptor>() == 48 && offset_of!(MemoryDescriptor, element) == 24);
    assert!(offset_of!(MemoryDescriptor, kind) == 28 && offset_of!(MemoryDescriptor, fd) == 32);
    assert!(offset_of!(HtpInfrastructure, create_power) == 8);
    assert!(size_of::<PowerConfig>() == 68);
};
