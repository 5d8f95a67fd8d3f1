//! The structs of the header, field by field, with their offsets on 64-bit machines.
//!
//! The number before a field is its offset, and that after a name its size in bytes; both are asserted when the crate
//! is compiled. The header says what the fields mean. Nothing here may ever move: new fields go to the end.

#![allow(missing_docs, reason = "the header describes the fields")]

use std::ffi::{c_char, c_void};

use crate::AbiStruct;
use crate::table::abi_struct;

/// A unit that was opened; the plugin's own.
#[repr(C)]
#[derive(Debug)]
pub struct NpDevice {
    _opaque: [u8; 0],
}

/// A weight in the unit's own form; the plugin's own.
#[repr(C)]
#[derive(Debug)]
pub struct NpWeight {
    _opaque: [u8; 0],
}

/// Host memory that a unit can reach; the plugin's own.
#[repr(C)]
#[derive(Debug)]
pub struct NpMemory {
    _opaque: [u8; 0],
}

/// Takes a message of the plugin.
pub type NpLogFn =
    unsafe extern "C" fn(context: *mut c_void, level: u32, text: *const c_char, text_bytes: u64);
/// Takes the description of a unit.
pub type NpFoundFn = unsafe extern "C" fn(context: *mut c_void, info: *const NpDeviceInfo);
/// Is told that a submitted job has ended.
pub type NpDoneFn =
    unsafe extern "C" fn(context: *mut c_void, status: *const NpStatus, report: *const NpReport);
/// Takes a piece of a saved plan; 0 to go on.
pub type NpWriteFn = unsafe extern "C" fn(context: *mut c_void, data: *const c_void, bytes: u64) -> i32;
/// The type of `neuropil_plugin_query`.
pub type NpPluginQueryFn = unsafe extern "C" fn(host: *const NpHost) -> *const NpPlugin;

abi_struct! {
    /// What a call answers. Memory of the host.
    NpStatus = "np_status", 40 {
        0 size: u32,
        4 code: i32,
        8 vendor_code: i64,
        16 text: *mut c_char,
        24 text_capacity: u64,
        32 text_bytes: u64,
    }
}

abi_struct! {
    /// How a job ran. Memory of the host.
    NpReport = "np_report", 16 {
        0 size: u32,
        4 flags: u32,
        8 device_ns: u64,
    }
}

abi_struct! {
    /// The host, as the plugin sees it. Lives until the process ends.
    NpHost = "np_host", 32 {
        0 size: u32,
        4 abi_major: u32,
        8 abi_minor: u32,
        12 reserved: u32,
        16 context: *mut c_void,
        24 log: Option<NpLogFn>,
    }
}

abi_struct! {
    /// One setting of the user.
    NpOption = "np_option", 40 {
        0 size: u32,
        4 reserved: u32,
        8 key: *const c_char,
        16 key_bytes: u64,
        24 value: *const c_char,
        32 value_bytes: u64,
    }
}

abi_struct! {
    /// The settings of the user.
    NpOptions = "np_options", 24 {
        0 size: u32,
        4 reserved: u32,
        8 items: *const *const NpOption,
        16 count: u64,
    }
}

abi_struct! {
    /// What a unit is.
    NpDeviceInfo = "np_device_info", 112 {
        0 size: u32,
        4 kind: u32,
        8 name: *const c_char,
        16 name_bytes: u64,
        24 vendor: *const c_char,
        32 vendor_bytes: u64,
        40 driver: *const c_char,
        48 driver_bytes: u64,
        56 compatibility: *const c_char,
        64 compatibility_bytes: u64,
        72 memory_bytes: u64,
        80 flags: u32,
        84 memory_kinds: u32,
        88 memory_alignment: u64,
        96 token_buckets: *const u64,
        104 token_bucket_count: u64,
    }
}

abi_struct! {
    /// One matrix, in one of the schemes that the header draws.
    NpMatrix = "np_matrix", 112 {
        0 size: u32,
        4 scheme: u32,
        8 rows: u64,
        16 cols: u64,
        24 group: u64,
        32 data: *const c_void,
        40 data_bytes: u64,
        48 scales: *const c_void,
        56 scales_bytes: u64,
        64 mins: *const c_void,
        72 mins_bytes: u64,
        80 outlier_columns: *const u32,
        88 outlier_data: *const c_void,
        96 outlier_scales: *const c_void,
        104 outlier_count: u64,
    }
}

abi_struct! {
    /// What `prepare` takes: a matrix, or the three of a block of neurons.
    NpWeightSource = "np_weight_source", 56 {
        0 size: u32,
        4 lifetime: u32,
        8 name: *const c_char,
        16 name_bytes: u64,
        24 matrix: *const NpMatrix,
        32 gate: *const NpMatrix,
        40 up: *const NpMatrix,
        48 down: *const NpMatrix,
    }
}

abi_struct! {
    /// What `prepare` and `load_plan` give.
    NpPrepared = "np_prepared", 24 {
        0 size: u32,
        4 reserved: u32,
        8 weight: *mut NpWeight,
        16 bytes: u64,
    }
}

abi_struct! {
    /// A weight as `save_plan` wrote it.
    NpPlan = "np_plan", 24 {
        0 size: u32,
        4 reserved: u32,
        8 data: *const c_void,
        16 data_bytes: u64,
    }
}

abi_struct! {
    /// Can the unit do this?
    NpQuery = "np_query", 56 {
        0 size: u32,
        4 op: u32,
        8 scheme: u32,
        12 down_scheme: u32,
        16 stage: u32,
        20 activation: u32,
        24 rows: u64,
        32 cols: u64,
        40 group: u64,
        48 tokens: u64,
    }
}

abi_struct! {
    /// Yes, and how.
    NpSupport = "np_support", 8 {
        0 size: u32,
        4 flags: u32,
    }
}

abi_struct! {
    /// Host memory to import.
    NpRegion = "np_region", 48 {
        0 size: u32,
        4 kind: u32,
        8 host: *mut c_void,
        16 native: *mut c_void,
        24 fd: i32,
        28 reserved: u32,
        32 offset: u64,
        40 bytes: u64,
    }
}

abi_struct! {
    /// F32 values of a job.
    NpBuffer = "np_buffer", 40 {
        0 size: u32,
        4 reserved: u32,
        8 data: *mut c_void,
        16 bytes: u64,
        24 memory: *mut NpMemory,
        32 memory_offset: u64,
    }
}

abi_struct! {
    /// One product of a job.
    NpProduct = "np_product", 24 {
        0 size: u32,
        4 reserved: u32,
        8 weight: *mut NpWeight,
        16 y: *const NpBuffer,
    }
}

abi_struct! {
    /// One input times 1 to 4 weights that share it.
    NpMatmulJob = "np_matmul_job", 48 {
        0 size: u32,
        4 reserved: u32,
        8 tokens: u64,
        16 deadline_ns: u64,
        24 x: *const NpBuffer,
        32 products: *const *const NpProduct,
        40 product_count: u64,
    }
}

abi_struct! {
    /// The feed-forward of a prepared block of neurons.
    NpClusterJob = "np_cluster_job", 64 {
        0 size: u32,
        4 stage: u32,
        8 activation: u32,
        12 threshold: f32,
        16 tokens: u64,
        24 deadline_ns: u64,
        32 weight: *mut NpWeight,
        40 x: *const NpBuffer,
        48 hidden: *const NpBuffer,
        56 y: *const NpBuffer,
    }
}

abi_struct! {
    /// Who is told that a submitted job has ended.
    NpCompletion = "np_completion", 24 {
        0 size: u32,
        4 reserved: u32,
        8 context: *mut c_void,
        16 done: Option<NpDoneFn>,
    }
}

abi_struct! {
    /// The table of a plugin. Lives until the process ends.
    NpPlugin = "np_plugin", 176 {
        0 size: u32,
        4 abi_major: u32,
        8 abi_minor: u32,
        12 reserved: u32,
        16 name: *const c_char,
        24 name_bytes: u64,
        32 version: *const c_char,
        40 version_bytes: u64,
        48 probe: Option<unsafe extern "C" fn(options: *const NpOptions, context: *mut c_void, found: Option<NpFoundFn>, status: *mut NpStatus) -> i32>,
        56 open: Option<unsafe extern "C" fn(index: u64, options: *const NpOptions, device: *mut *mut NpDevice, status: *mut NpStatus) -> i32>,
        64 close: Option<unsafe extern "C" fn(device: *mut NpDevice)>,
        72 info: Option<unsafe extern "C" fn(device: *mut NpDevice, context: *mut c_void, found: Option<NpFoundFn>, status: *mut NpStatus) -> i32>,
        80 query: Option<unsafe extern "C" fn(device: *mut NpDevice, query: *const NpQuery, support: *mut NpSupport, status: *mut NpStatus) -> i32>,
        88 prepare: Option<unsafe extern "C" fn(device: *mut NpDevice, source: *const NpWeightSource, prepared: *mut NpPrepared, status: *mut NpStatus) -> i32>,
        96 free_weight: Option<unsafe extern "C" fn(device: *mut NpDevice, weight: *mut NpWeight)>,
        104 matmul: Option<unsafe extern "C" fn(device: *mut NpDevice, job: *const NpMatmulJob, report: *mut NpReport, status: *mut NpStatus) -> i32>,
        112 cluster: Option<unsafe extern "C" fn(device: *mut NpDevice, job: *const NpClusterJob, report: *mut NpReport, status: *mut NpStatus) -> i32>,
        120 submit_matmul: Option<unsafe extern "C" fn(device: *mut NpDevice, job: *const NpMatmulJob, completion: *const NpCompletion, status: *mut NpStatus) -> i32>,
        128 submit_cluster: Option<unsafe extern "C" fn(device: *mut NpDevice, job: *const NpClusterJob, completion: *const NpCompletion, status: *mut NpStatus) -> i32>,
        136 cancel: Option<unsafe extern "C" fn(device: *mut NpDevice)>,
        144 import_memory: Option<unsafe extern "C" fn(device: *mut NpDevice, region: *const NpRegion, memory: *mut *mut NpMemory, status: *mut NpStatus) -> i32>,
        152 release_memory: Option<unsafe extern "C" fn(device: *mut NpDevice, memory: *mut NpMemory)>,
        160 save_plan: Option<unsafe extern "C" fn(device: *mut NpDevice, weight: *mut NpWeight, context: *mut c_void, write: Option<NpWriteFn>, status: *mut NpStatus) -> i32>,
        168 load_plan: Option<unsafe extern "C" fn(device: *mut NpDevice, plan: *const NpPlan, prepared: *mut NpPrepared, status: *mut NpStatus) -> i32>,
    }
}

/// Every struct of the header, in its order.
pub(crate) const STRUCTS: [&crate::StructLayout; 19] = [
    NpStatus::LAYOUT,
    NpReport::LAYOUT,
    NpHost::LAYOUT,
    NpOption::LAYOUT,
    NpOptions::LAYOUT,
    NpDeviceInfo::LAYOUT,
    NpMatrix::LAYOUT,
    NpWeightSource::LAYOUT,
    NpPrepared::LAYOUT,
    NpPlan::LAYOUT,
    NpQuery::LAYOUT,
    NpSupport::LAYOUT,
    NpRegion::LAYOUT,
    NpBuffer::LAYOUT,
    NpProduct::LAYOUT,
    NpMatmulJob::LAYOUT,
    NpClusterJob::LAYOUT,
    NpCompletion::LAYOUT,
    NpPlugin::LAYOUT,
];
