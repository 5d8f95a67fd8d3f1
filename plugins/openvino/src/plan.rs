//! A compiled graph as bytes. OpenVINO's C functions write it to a file only, so it goes through a file of this process
//! that has no place in the file system but its descriptor.

use neuropil_plugin_sdk::Error;

use crate::runtime::Model;

/// Whether plans can be saved on this system.
pub(crate) const OFFERED: bool = cfg!(any(target_os = "linux", target_os = "android"));

/// The bytes that [`crate::runtime::Core::import`] takes.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn export(model: &Model) -> Result<Vec<u8>, Error> {
    use std::fs::File;
    use std::io::{Read, Seek};
    use std::os::fd::AsRawFd;

    let refuse = |error: std::io::Error| Error::internal(format!("there is no file for a plan: {error}"));
    let mut file: File = rustix::fs::memfd_create("neuropil plan", rustix::fs::MemfdFlags::CLOEXEC)
        .map_err(|error| refuse(error.into()))?
        .into();
    model.export(&format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    file.rewind().map_err(refuse)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(refuse)?;
    Ok(bytes)
}

/// There is no such file on this system.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) fn export(_model: &Model) -> Result<Vec<u8>, Error> {
    Err(Error::unsupported("this plugin saves plans on Linux and Android only"))
}
