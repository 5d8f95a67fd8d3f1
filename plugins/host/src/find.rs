//! Finding plugins, and looking at a file before the system runs code of it.
//!
//! What `dlopen` says of a file that is no library, or one for another processor, helps nobody; so the first bytes are
//! read before. Where libraries are no ELF files, the system's word must do.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::PluginError;

/// The processors that plugins are built for, with their numbers in an ELF header.
const MACHINES: [(u16, &str); 8] = [
    (3, "x86 (32 bit)"),
    (8, "MIPS"),
    (21, "PowerPC"),
    (40, "ARM (32 bit)"),
    (62, "x86_64"),
    (164, "Hexagon"),
    (183, "aarch64"),
    (243, "RISC-V"),
];

/// Every shared library in a folder, by name; it does not look into further folders. Whether they are plugins is seen
/// when they are loaded.
///
/// # Errors
/// [`PluginError::Read`].
pub fn find_plugins(folder: &Path) -> Result<Vec<PathBuf>, PluginError> {
    let refuse = |source| PluginError::Read { path: folder.into(), source };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(refuse)? {
        let path = entry.map_err(refuse)?.path();
        if path.extension().is_some_and(|e| e == std::env::consts::DLL_EXTENSION) && path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Checks that a file is a shared library for this machine, as far as its header tells.
pub(crate) fn check_library(path: &Path) -> Result<(), PluginError> {
    let refuse = |source| PluginError::Read { path: path.into(), source };
    let file = File::open(path).map_err(refuse)?;
    if !file.metadata().map_err(refuse)?.is_file() {
        return Err(PluginError::NotALibrary { path: path.into(), reason: "it is no file" });
    }
    let mut head = Vec::new();
    file.take(20).read_to_end(&mut head).map_err(refuse)?;
    if cfg!(any(target_os = "macos", target_os = "ios", windows)) { Ok(()) } else { check_elf(path, &head) }
}

fn check_elf(path: &Path, head: &[u8]) -> Result<(), PluginError> {
    let no_library = |reason| Err(PluginError::NotALibrary { path: path.into(), reason });
    if head.is_empty() {
        return no_library("the file is empty");
    }
    let Some(head) = head.first_chunk::<20>().filter(|head| head.starts_with(b"\x7fELF")) else {
        return no_library("it is no ELF file");
    };
    let word = |at: usize| match head[5] {
        2 => u16::from_be_bytes([head[at], head[at + 1]]),
        _ => u16::from_le_bytes([head[at], head[at + 1]]),
    };
    let machine = word(18);
    let name = MACHINES.iter().find(|(number, _)| *number == machine).map(|(_, name)| *name);
    let needed = std::env::consts::ARCH;
    if head[4] != 2 || head[5] != 1 || name != Some(needed) {
        let found = name.map_or_else(|| format!("machine {machine}"), str::to_string);
        let found = if head[4] != 2 && !found.contains("32") { format!("{found} (32 bit)") } else { found };
        return Err(PluginError::Architecture { path: path.into(), found, needed });
    }
    match word(16) {
        3 => Ok(()),
        1 => no_library("it is an object file: link it with -shared"),
        2 => no_library("it is a program"),
        _ => no_library("it is an ELF file of another kind"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_tells_what_a_file_is() {
        let machine = if cfg!(target_arch = "x86_64") { 62 } else { 183 };
        let mut head = [0u8; 20];
        head[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        (head[16], head[18]) = (3, machine);
        let said =
            |head: &[u8]| check_elf("p.so".as_ref(), head).err().map_or(String::new(), |e| e.to_string());
        let change = |at: usize, value: u8| {
            let mut head = head;
            head[at] = value;
            said(&head)
        };
        assert_eq!(said(&head), "");
        assert_eq!(said(&head[..19]), "plugin p.so is no shared library: it is no ELF file");
        assert_eq!(said(&[]), "plugin p.so is no shared library: the file is empty");
        assert_eq!(change(0, 0), "plugin p.so is no shared library: it is no ELF file");
        assert!(
            change(18, 40).starts_with("plugin p.so is built for ARM (32 bit), but this program runs on")
        );
        assert!(change(18, 77).contains("built for machine 77"));
        assert!(change(4, 1).contains("(32 bit)"));
        assert!(change(16, 1).ends_with("link it with -shared"));
        assert!(change(16, 2).ends_with("it is a program"));
    }
}
