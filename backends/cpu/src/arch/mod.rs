//! Instruction sets: the only place with SIMD code.
//!
//! The kernels are written once ([`tile`], [`passes`]) over a small set of vector operations ([`lanes`]). Each instruction set
//! implements the operations and instantiates the kernels inside functions that enable its features. A value of
//! [`Isa`] proves that the machine has them; there is no other way to reach a kernel.

mod attention;
mod format;
mod host;
mod lanes;
mod passes;
mod product;
mod scalar;
mod tile;

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use crate::kernels::{Groups, Input, RECORD};
use crate::mem::ColumnRange;
use neuropil_device::DType;
use neuropil_device::quant::ACT_BLOCK;

pub(crate) use attention::AttentionParts;
pub(crate) use host::HostOp;

#[cfg(target_arch = "aarch64")]
pub use aarch64::{Neon, NeonDot};
#[cfg(target_arch = "x86_64")]
pub use x86_64::{Avx2, Avx512Vnni};

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, for any machine.
    Scalar,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// AVX-512 F, BW, VL with VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512Vnni),
    /// NEON, as every aarch64 has it.
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    /// NEON with the dot-product extension.
    #[cfg(target_arch = "aarch64")]
    NeonDot(NeonDot),
}

impl Isa {
    /// The fastest instruction set of this machine.
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(isa) = Avx512Vnni::detect() {
                return Isa::Avx512Vnni(isa);
            }
            if let Some(isa) = Avx2::detect() {
                return Isa::Avx2(isa);
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            if let Some(isa) = NeonDot::detect() {
                return Isa::NeonDot(isa);
            }
            if let Some(isa) = Neon::detect() {
                return Isa::Neon(isa);
            }
        }
        Isa::Scalar
    }

    /// All instruction sets of this machine, slowest first.
    pub fn all_available() -> Vec<Isa> {
        let mut all = vec![Isa::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(Avx2::detect().map(Isa::Avx2));
            all.extend(Avx512Vnni::detect().map(Isa::Avx512Vnni));
        }
        #[cfg(target_arch = "aarch64")]
        {
            all.extend(Neon::detect().map(Isa::Neon));
            all.extend(NeonDot::detect().map(Isa::NeonDot));
        }
        all
    }

    /// A name for reports.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni(_) => "avx512-vnni",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(_) => "neon",
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot(_) => "neon-dotprod",
        }
    }

    /// Runs a job whose shapes were checked.
    pub(crate) fn matmul(self, job: &mut Job<'_, '_>) {
        match self {
            Isa::Scalar => matmul(scalar::ScalarKernels, job),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(isa) => matmul(isa, job),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni(isa) => matmul(isa, job),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(isa) => matmul(isa, job),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot(isa) => matmul(isa, job),
        }
    }

    /// Quantises `height` rows of `cols` activations into the records of a tile.
    pub(crate) fn quantize(self, x: &[f32], cols: usize, height: usize, records: &mut [u8]) {
        let blocks = cols / ACT_BLOCK;
        assert!(2 * blocks * height * RECORD == records.len(), "records are those of the rows");
        assert!(height * cols <= x.len() && cols.is_multiple_of(ACT_BLOCK), "x has the rows");
        let x = FloatRows { x: x.as_ptr(), height, blocks };
        match self {
            Isa::Scalar => scalar::ScalarKernels.quantize(x, records),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(isa) => isa.quantize(x, records),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni(isa) => isa.quantize(x, records),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(isa) => isa.quantize(x, records),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot(isa) => isa.quantize(x, records),
        }
    }
}

impl Isa {
    /// Runs a host operation.
    pub(crate) fn host(self, op: HostOp<'_>) {
        match self {
            Isa::Scalar => scalar::ScalarKernels.host(op),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(isa) => isa.host(op),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni(isa) => isa.host(op),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(isa) => isa.host(op),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot(isa) => isa.host(op),
        }
    }
}

/// A matmul over some row groups. Made by the safe entry, which checks that input, weight and output match.
pub(crate) struct Job<'a, 'y> {
    pub w: Groups<'a>,
    pub input: Input<'a>,
    pub out: &'a mut ColumnRange<'y>,
    pub accumulate: bool,
}

/// Activations to quantise: `blocks` blocks of 32 in each of `height` rows, which were checked to exist.
#[derive(Clone, Copy)]
pub(crate) struct FloatRows {
    x: *const f32,
    height: usize,
    blocks: usize,
}

impl FloatRows {
    /// Where a block of row `t` lies.
    ///
    /// # Safety
    /// There is such a block.
    #[inline(always)]
    unsafe fn at(&self, t: usize, block: usize) -> *const f32 {
        // SAFETY: as for this function.
        unsafe { self.x.add((t * self.blocks + block) * ACT_BLOCK) }
    }
}

/// The kernels of one instruction set; a value proves that the machine has it.
trait Kernels: Copy {
    /// A job with a quantised weight in format `F`.
    fn quantized<F: format::Format>(self, job: &mut Job<'_, '_>);
    /// A job with a weight of float type `F`.
    fn floats<F: format::FloatFormat>(self, job: &mut Job<'_, '_>);
    /// Quantises activations into the records of a tile, which has room for `x.height` × `x.blocks`.
    fn quantize(self, x: FloatRows, records: &mut [u8]);
    /// A host operation.
    fn host(self, op: HostOp<'_>);
}

fn matmul<K: Kernels>(kernels: K, job: &mut Job<'_, '_>) {
    match job.w.dtype() {
        DType::F32 => kernels.floats::<format::F32>(job),
        DType::F16 => kernels.floats::<format::F16>(job),
        DType::BF16 => kernels.floats::<format::BF16>(job),
        DType::Q4_0 => kernels.quantized::<format::Q4_0>(job),
        DType::Q4_1 => kernels.quantized::<format::Q4_1>(job),
        DType::Q5_0 => kernels.quantized::<format::Q5_0>(job),
        DType::Q5_1 => kernels.quantized::<format::Q5_1>(job),
        DType::Q8_0 => kernels.quantized::<format::Q8_0>(job),
        DType::Q4_K => kernels.quantized::<format::Q4K>(job),
        DType::Q5_K => kernels.quantized::<format::Q5K>(job),
        DType::Q6_K => kernels.quantized::<format::Q6K>(job),
        DType::Q2_K | DType::Q3_K | DType::IQ4_NL | DType::IQ4_XS | DType::MXFP4 => {
            unreachable!("the entry expands {}", job.w.dtype())
        }
    }
}
