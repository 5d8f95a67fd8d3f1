//! The numbers of the header, under the same names.

#![allow(missing_docs, reason = "the header describes them")]

/// Declares the constants, and a table of them that a test compares with the header.
macro_rules! constants {
    ($($name:ident: $type:ty = $value:literal;)*) => {
        $(pub const $name: $type = $value;)*
        pub(crate) const CONSTANTS: &[(&str, u64)] = &[$((stringify!($name), $value)),*];
    };
}

constants! {
    NEUROPIL_PLUGIN_ABI_MAJOR: u32 = 1;
    NEUROPIL_PLUGIN_ABI_MINOR: u32 = 0;
    NP_OK: i32 = 0;
    NP_UNSUPPORTED: i32 = 1;
    NP_INVALID: i32 = 2;
    NP_OUT_OF_MEMORY: i32 = 3;
    NP_LOST: i32 = 4;
    NP_TIMEOUT: i32 = 5;
    NP_CANCELLED: i32 = 6;
    NP_INTERNAL: i32 = 7;
    NP_REPORT_ZERO_COPY_INPUT: u32 = 1;
    NP_REPORT_ZERO_COPY_OUTPUT: u32 = 2;
    NP_LOG_ERROR: u32 = 1;
    NP_LOG_WARNING: u32 = 2;
    NP_LOG_INFO: u32 = 3;
    NP_LOG_DEBUG: u32 = 4;
    NP_KIND_OTHER: u32 = 0;
    NP_KIND_CPU: u32 = 1;
    NP_KIND_GPU: u32 = 2;
    NP_KIND_NPU: u32 = 3;
    NP_DEVICE_PARALLEL: u32 = 1;
    NP_MEMORY_HOST: u32 = 1;
    NP_MEMORY_DMA_BUF: u32 = 2;
    NP_MEMORY_HARDWARE_BUFFER: u32 = 4;
    NP_MEMORY_RPCMEM: u32 = 8;
    NP_SCHEME_F32: u32 = 1;
    NP_SCHEME_F16: u32 = 2;
    NP_SCHEME_GROUP8: u32 = 3;
    NP_SCHEME_GROUP4: u32 = 4;
    NP_SCHEME_GROUP4M: u32 = 5;
    NP_SCHEME_CHANNEL8: u32 = 6;
    NP_SCHEME_CHANNEL4: u32 = 7;
    NP_LIFETIME_CALL: u32 = 0;
    NP_LIFETIME_WEIGHT: u32 = 1;
    NP_OP_MATMUL: u32 = 1;
    NP_OP_CLUSTER: u32 = 2;
    NP_STAGE_GATE: u32 = 1;
    NP_STAGE_UP: u32 = 2;
    NP_STAGE_DOWN: u32 = 3;
    NP_STAGE_GATE_UP: u32 = 4;
    NP_STAGE_UP_DOWN: u32 = 5;
    NP_STAGE_FUSED: u32 = 6;
    NP_ACT_SILU: u32 = 1;
    NP_ACT_GELU: u32 = 2;
    NP_ACT_RELU: u32 = 3;
    NP_ACT_RELU2: u32 = 4;
    NP_ACT_DRELU: u32 = 5;
    NP_ACT_LINEAR: u32 = 6;
    NP_SUPPORT_NATIVE: u32 = 1;
    NP_SUPPORT_EMULATED: u32 = 2;
    NP_SUPPORT_OUTLIERS: u32 = 4;
}
