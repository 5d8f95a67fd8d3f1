//! Memory whose size a file or a text decides: a refusal is an error and not the end of the process.

use neuropil_device::DeviceError;

/// `len` times the default.
pub(super) fn zeros<T: Copy + Default>(len: usize) -> Result<Vec<T>, DeviceError> {
    let mut values = room(len)?;
    values.resize(len, T::default());
    Ok(values)
}

/// An empty vector with room for `len` values.
pub(super) fn room<T>(len: usize) -> Result<Vec<T>, DeviceError> {
    let mut values = Vec::new();
    reserve(&mut values, len)?;
    Ok(values)
}

/// Makes room for `more` values.
pub(super) fn reserve<T>(values: &mut Vec<T>, more: usize) -> Result<(), DeviceError> {
    let bytes = more.saturating_mul(size_of::<T>());
    values.try_reserve(more).map_err(|_| DeviceError::OutOfMemory { device: "host".into(), bytes })
}
