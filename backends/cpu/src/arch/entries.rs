//! The entries of an instruction set, written once for all.
//!
//! Generic code has no features of its own: it must be inlined into a function that enables them, and each entry of
//! [`Kernels`](super::Kernels) is such a function. The macros are flat: an entry more is a block more in `kernels!`,
//! and an instruction set more is a line that calls it and an arm of `with_kernels!`.

/// Implements the kernels for `$proof`, whose values prove that the machine has `$features`, on vectors `$lanes`;
/// `$floats` are those for all work on floats alone, and `$n` as in [`AttentionParts`](super::AttentionParts).
macro_rules! kernels {
    ($proof:ty, $lanes:ty, floats: $floats:ty, $n:literal $(, $features:literal)?) => {
        impl $crate::arch::Kernels for $proof {
            fn quantized<F: $crate::arch::format::Format>(self, job: &mut $crate::arch::Job<'_, '_>) {
                /// # Safety
                /// The weight of the job has format F.
                $(#[target_feature(enable = $features)])?
                unsafe fn entry<F: $crate::arch::format::Format>(job: &mut $crate::arch::Job<'_, '_>) {
                    // SAFETY: the features are enabled here.
                    unsafe { $crate::arch::passes::run::<$lanes, $crate::arch::tile::Quantized<F>>(job) }
                }
                // SAFETY: self proves the features; the dispatch chose F by the weight.
                unsafe { entry::<F>(job) }
            }

            fn floats<F: $crate::arch::format::FloatFormat>(self, job: &mut $crate::arch::Job<'_, '_>) {
                /// # Safety
                /// The weight of the job has type F.
                $(#[target_feature(enable = $features)])?
                unsafe fn entry<F: $crate::arch::format::FloatFormat>(job: &mut $crate::arch::Job<'_, '_>) {
                    // SAFETY: the features are enabled here.
                    unsafe { $crate::arch::passes::run::<$floats, $crate::arch::tile::Floats<F>>(job) }
                }
                // SAFETY: self proves the features; the dispatch chose F by the weight.
                unsafe { entry::<F>(job) }
            }

            fn gather<F: $crate::arch::format::Format>(
                self,
                job: &$crate::arch::Gather<'_>,
                columns: std::ops::Range<usize>,
                to: &mut [u8],
            ) {
                /// # Safety
                /// The rows have format F.
                $(#[target_feature(enable = $features)])?
                unsafe fn entry<F: $crate::arch::format::Format>(
                    job: &$crate::arch::Gather<'_>,
                    columns: std::ops::Range<usize>,
                    to: &mut [u8],
                ) {
                    // SAFETY: the features are enabled here.
                    unsafe { job.quantized::<$floats, F>(columns, to) }
                }
                // SAFETY: self proves the features; the dispatch chose F by the rows.
                unsafe { entry::<F>(job, columns, to) }
            }

            fn gather_floats<const N: usize>(
                self,
                job: &$crate::arch::Gather<'_>,
                columns: std::ops::Range<usize>,
                to: &mut [u8],
            ) {
                /// # Safety
                /// The rows are plain floats of N bytes.
                $(#[target_feature(enable = $features)])?
                unsafe fn entry<const N: usize>(
                    job: &$crate::arch::Gather<'_>,
                    columns: std::ops::Range<usize>,
                    to: &mut [u8],
                ) {
                    // SAFETY: the features are enabled here.
                    unsafe { job.floats::<$floats, N>(columns, to) }
                }
                // SAFETY: self proves the features; the dispatch chose N by the rows.
                unsafe { entry::<N>(job, columns, to) }
            }

            fn axpy<D: $crate::arch::down::Down>(
                self,
                job: &$crate::arch::Axpy<'_>,
                out: &mut $crate::mem::ColumnRange<'_>,
            ) {
                /// # Safety
                /// The down rows have type D.
                $(#[target_feature(enable = $features)])?
                unsafe fn entry<D: $crate::arch::down::Down>(
                    job: &$crate::arch::Axpy<'_>,
                    out: &mut $crate::mem::ColumnRange<'_>,
                ) {
                    // SAFETY: the features are enabled here.
                    unsafe { job.run::<$floats, D>(out) }
                }
                // SAFETY: self proves the features; the dispatch chose D by the rows.
                unsafe { entry::<D>(job, out) }
            }

            fn down_panel<D: $crate::arch::down::Down>(
                self,
                job: &$crate::arch::Axpy<'_>,
                neurons: std::ops::Range<usize>,
                columns: std::ops::Range<usize>,
                to: &mut [f32],
            ) {
                /// # Safety
                /// The down rows have type D.
                $(#[target_feature(enable = $features)])?
                unsafe fn entry<D: $crate::arch::down::Down>(
                    job: &$crate::arch::Axpy<'_>,
                    neurons: std::ops::Range<usize>,
                    columns: std::ops::Range<usize>,
                    to: &mut [f32],
                ) {
                    // SAFETY: the features are enabled here.
                    unsafe { job.panel::<$floats, D>(neurons, columns, to) }
                }
                // SAFETY: self proves the features; the dispatch chose D by the rows.
                unsafe { entry::<D>(job, neurons, columns, to) }
            }

            fn quantize(self, x: $crate::arch::FloatRows, records: &mut [u8]) {
                /// # Safety
                /// x and the records have matching lengths.
                $(#[target_feature(enable = $features)])?
                unsafe fn entry(x: $crate::arch::FloatRows, records: &mut [u8]) {
                    // SAFETY: the features are enabled here.
                    unsafe { $crate::arch::tile::quantize::<$floats>(x, records) }
                }
                // SAFETY: self proves the features; the caller checked the lengths.
                unsafe { entry(x, records) }
            }

            fn host(self, op: $crate::arch::HostOp<'_>) {
                /// # Safety
                /// The machine has the features.
                $(#[target_feature(enable = $features)])?
                unsafe fn entry(op: $crate::arch::HostOp<'_>) {
                    // SAFETY: the features are enabled here.
                    unsafe { op.run::<$floats, $n>() }
                }
                // SAFETY: self proves the features.
                unsafe { entry(op) }
            }
        }
    };
}

/// Evaluates `$run` with the kernels of `$isa` as `$kernels`.
macro_rules! with_kernels {
    ($isa:expr, $kernels:ident => $run:expr) => {
        match $isa {
            Isa::Scalar => {
                let $kernels = scalar::ScalarKernels;
                $run
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2($kernels) => $run,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni($kernels) => $run,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon($kernels) => $run,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot($kernels) => $run,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm($kernels) => $run,
        }
    };
}
