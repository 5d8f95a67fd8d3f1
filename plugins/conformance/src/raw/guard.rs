//! Values with marks on both sides, and structs of a host that knows more or fewer fields.

use neuropil_plugin_abi::{AbiStruct, NpBuffer};

use super::Failure;

/// A buffer of the header over values. It borrows them.
pub fn buffer(values: &mut [f32]) -> NpBuffer {
    NpBuffer { data: values.as_mut_ptr().cast(), bytes: size_of_val(values) as u64, ..NpBuffer::new() }
}

/// The value of a mark.
pub(crate) const MARK: f32 = -77.25;
const MARKS: usize = 16;

/// Values between marks that nobody may touch.
pub(crate) struct Guarded(Vec<f32>);

impl Guarded {
    pub fn new(inner: &[f32]) -> Guarded {
        Guarded([&[MARK; MARKS][..], inner, &[MARK; MARKS]].concat())
    }

    /// As many values that are not numbers.
    pub fn nan(len: usize) -> Guarded {
        Guarded::new(&vec![f32::NAN; len])
    }

    pub fn inner(&mut self) -> &mut [f32] {
        let len = self.0.len();
        &mut self.0[MARKS..len - MARKS]
    }

    pub fn buffer(&mut self) -> NpBuffer {
        buffer(self.inner())
    }

    /// The values, if the marks are whole.
    pub fn open(self) -> Result<Vec<f32>, Failure> {
        let len = self.0.len();
        let mut marks = self.0[..MARKS].iter().chain(&self.0[len - MARKS..]);
        if marks.any(|value| value.to_bits() != MARK.to_bits()) {
            return Err(Failure::breach("values beside an output were written"));
        }
        Ok(self.0[MARKS..len - MARKS].to_vec())
    }

    /// The same for an input, which must be as it was.
    pub fn unchanged(self, was: &[f32], what: &str) -> Result<(), Failure> {
        let is = self.open()?;
        match is.iter().zip(was).all(|(is, was)| is.to_bits() == was.to_bits()) {
            true => Ok(()),
            false => Err(Failure::breach(format!("{what}, an input of the job, was written"))),
        }
    }
}

/// A struct of a newer minor version: it says that it is longer, and has bytes that this version does not know.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Padded<T> {
    /// What this version knows.
    pub known: T,
    extra: [u8; EXTRA],
}

const EXTRA: usize = 40;

impl<T: AbiStruct> Padded<T> {
    /// The same struct, longer.
    pub fn new(mut known: T) -> Padded<T> {
        let size = (known.size() + EXTRA) as u32;
        // SAFETY: every struct of the header begins with its size.
        unsafe { (&raw mut known).cast::<u32>().write(size) };
        Padded { known, extra: [0xa5; EXTRA] }
    }

    /// A pointer to it as the plugin gets it.
    pub fn pointer(&self) -> *const T {
        (&raw const *self).cast()
    }

    /// The same, to be filled in.
    pub fn pointer_mut(&mut self) -> *mut T {
        (&raw mut *self).cast()
    }

    /// Whether the bytes that this version does not know are as they were.
    pub fn is_whole(&self) -> bool {
        self.extra == [0xa5; EXTRA]
    }
}

/// The same struct of an older version, which ends before byte `size`.
pub(crate) fn shortened<T: AbiStruct>(mut value: T, size: usize) -> T {
    // SAFETY: every struct of the header begins with its size.
    unsafe { (&raw mut value).cast::<u32>().write(size as u32) };
    value
}

/// A copy of a struct behind a pointer that the suite itself made.
pub(crate) fn copied<T: AbiStruct>(from: *const T) -> T {
    // SAFETY: the pointers of the suite are NULL or good.
    unsafe { T::read(from) }.unwrap_or_else(T::new)
}
