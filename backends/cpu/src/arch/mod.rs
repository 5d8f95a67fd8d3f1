//! Instruction sets: the only place with SIMD code.
//!
//! The kernels are written once ([`tile`], [`passes`]) over a small set of vector operations ([`lanes`]). Each instruction set
//! implements the operations and instantiates the kernels inside functions that enable its features ([`entries`]). A
//! value of [`Isa`] proves that the machine has them; there is no other way to reach a kernel.

#[macro_use]
mod entries;

mod attention;
mod axpy;
mod down;
mod format;
mod gather;
mod host;
mod lanes;
mod panel;
mod passes;
mod plan;
mod product;
mod scalar;
mod softmax;
mod tile;
mod widen;

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::ops::Range;

use crate::kernels::{Groups, Input, RECORD};
use crate::mem::ColumnRange;
use neuropil_device::DType;
use neuropil_device::quant::ACT_BLOCK;

pub(crate) use attention::AttentionParts;
pub(crate) use axpy::Axpy;
pub(crate) use down::DOWN_TYPES;
pub(crate) use gather::Gather;
pub(crate) use host::HostOp;
pub(crate) use panel::PANEL_COLUMNS;
pub(crate) use plan::AttentionPlan;

#[cfg(target_arch = "aarch64")]
pub use aarch64::{Neon, NeonDot, NeonI8mm};
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
    /// NEON with the dot-product and the 8-bit matrix extension.
    #[cfg(target_arch = "aarch64")]
    NeonI8mm(NeonI8mm),
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
            if let Some(isa) = NeonI8mm::detect() {
                return Isa::NeonI8mm(isa);
            }
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
            all.extend(NeonI8mm::detect().map(Isa::NeonI8mm));
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
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm(_) => "neon-i8mm",
        }
    }

    /// Runs a job whose shapes were checked.
    pub(crate) fn matmul(self, job: &mut Job<'_, '_>) {
        with_kernels!(self, kernels => matmul(kernels, job))
    }

    /// Turns some columns of rows of neurons into a packed group.
    ///
    /// # Panics
    /// When there are no such columns, they are not whole blocks, or `to` is no group of them.
    pub(crate) fn gather(self, job: &Gather<'_>, columns: Range<usize>, to: &mut [u8]) {
        with_kernels!(self, kernels => gather(kernels, job, columns, to))
    }

    /// Adds up some columns of down rows, of one of [`DOWN_TYPES`].
    pub(crate) fn axpy(self, job: &Axpy<'_>, out: &mut ColumnRange<'_>) {
        with_kernels!(self, kernels => axpy(kernels, job, out))
    }

    /// Widens some columns of the down rows at those places of the list, as [`Axpy::panel`] does.
    ///
    /// # Panics
    /// As it.
    pub(crate) fn down_panel(
        self,
        job: &Axpy<'_>,
        neurons: Range<usize>,
        columns: Range<usize>,
        to: &mut [f32],
    ) {
        with_kernels!(self, kernels => down_panel(kernels, job, neurons, columns, to))
    }

    /// Quantises `height` rows of `cols` activations into the records of a tile.
    pub(crate) fn quantize(self, x: &[f32], cols: usize, height: usize, records: &mut [u8]) {
        let blocks = cols / ACT_BLOCK;
        assert!(2 * blocks * height * RECORD == records.len(), "records are those of the rows");
        assert!(height * cols <= x.len() && cols.is_multiple_of(ACT_BLOCK), "x has the rows");
        let x = FloatRows { x: x.as_ptr(), height, blocks };
        with_kernels!(self, kernels => kernels.quantize(x, records))
    }

    /// Runs a host operation.
    pub(crate) fn host(self, op: HostOp<'_>) {
        with_kernels!(self, kernels => kernels.host(op))
    }
}

/// A matmul over some row groups. Made by the safe entry, which checks that input, weight and output match.
pub(crate) struct Job<'a, 'y> {
    pub w: Groups<'a>,
    pub input: Input<'a>,
    /// Columns of the input.
    pub pitch: usize,
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
    /// Turns rows of format F into a packed group.
    fn gather<F: format::Format>(self, job: &Gather<'_>, columns: Range<usize>, to: &mut [u8]);
    /// Turns rows of plain floats of N bytes.
    fn gather_floats<const N: usize>(self, job: &Gather<'_>, columns: Range<usize>, to: &mut [u8]);
    /// Adds up some columns of down rows of type D.
    fn axpy<D: down::Down>(self, job: &Axpy<'_>, out: &mut ColumnRange<'_>);
    /// Widens some columns of down rows of type D.
    fn down_panel<D: down::Down>(
        self,
        job: &Axpy<'_>,
        neurons: Range<usize>,
        columns: Range<usize>,
        to: &mut [f32],
    );
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

fn gather<K: Kernels>(kernels: K, job: &Gather<'_>, columns: Range<usize>, to: &mut [u8]) {
    match job.dtype() {
        DType::F32 => kernels.gather_floats::<4>(job, columns, to),
        DType::F16 | DType::BF16 => kernels.gather_floats::<2>(job, columns, to),
        DType::Q4_0 => kernels.gather::<format::Q4_0>(job, columns, to),
        DType::Q4_1 => kernels.gather::<format::Q4_1>(job, columns, to),
        DType::Q5_0 => kernels.gather::<format::Q5_0>(job, columns, to),
        DType::Q5_1 => kernels.gather::<format::Q5_1>(job, columns, to),
        DType::Q8_0 => kernels.gather::<format::Q8_0>(job, columns, to),
        DType::Q4_K => kernels.gather::<format::Q4K>(job, columns, to),
        DType::Q5_K => kernels.gather::<format::Q5K>(job, columns, to),
        DType::Q6_K => kernels.gather::<format::Q6K>(job, columns, to),
        DType::Q2_K | DType::Q3_K | DType::IQ4_NL | DType::IQ4_XS | DType::MXFP4 => {
            unreachable!("rows of {} are not turned", job.dtype())
        }
    }
}

fn axpy<K: Kernels>(kernels: K, job: &Axpy<'_>, out: &mut ColumnRange<'_>) {
    match job.dtype() {
        DType::F32 => kernels.axpy::<down::F32>(job, out),
        DType::F16 => kernels.axpy::<down::F16>(job, out),
        DType::BF16 => kernels.axpy::<down::BF16>(job, out),
        DType::Q4_0 => kernels.axpy::<down::Q4_0>(job, out),
        DType::Q4_1 => kernels.axpy::<down::Q4_1>(job, out),
        DType::Q8_0 => kernels.axpy::<down::Q8_0>(job, out),
        other => unreachable!("{other} is not among the types of down rows"),
    }
}

fn down_panel<K: Kernels>(
    kernels: K,
    job: &Axpy<'_>,
    neurons: Range<usize>,
    columns: Range<usize>,
    to: &mut [f32],
) {
    match job.dtype() {
        DType::F32 => kernels.down_panel::<down::F32>(job, neurons, columns, to),
        DType::F16 => kernels.down_panel::<down::F16>(job, neurons, columns, to),
        DType::BF16 => kernels.down_panel::<down::BF16>(job, neurons, columns, to),
        DType::Q4_0 => kernels.down_panel::<down::Q4_0>(job, neurons, columns, to),
        DType::Q4_1 => kernels.down_panel::<down::Q4_1>(job, neurons, columns, to),
        DType::Q8_0 => kernels.down_panel::<down::Q8_0>(job, neurons, columns, to),
        other => unreachable!("{other} is not among the types of down rows"),
    }
}
