//! Compiled models on disk, by token. What is read was perhaps cut or changed, so a checksum ends the file and every length
//! is checked; a file that fails is made again.
//!
//! Layout, little endian: 8 bytes of magic, `u64` digest, `u64` number of operands, then for each `u64` length and the
//! bytes, then `u64` checksum of all before it.

use std::path::{Path, PathBuf};

use crate::codes::TOKEN;
use crate::peek::Checksum;

const MAGIC: &[u8; 8] = b"NPSHIM1\n";

/// What lay under a token.
#[derive(Debug)]
pub(crate) enum Found {
    Nothing,
    /// Not what was written.
    Corrupt,
    /// A good file of another model or device.
    Other,
    /// The constants of each operand.
    Good(Vec<Vec<u8>>),
}

fn path(folder: &Path, token: &[u8; TOKEN]) -> PathBuf {
    let hex: String = token.iter().map(|b| format!("{b:02x}")).collect();
    folder.join(format!("shim-{hex}.cache"))
}

/// Looks a token up.
pub(crate) fn load(folder: &Path, token: &[u8; TOKEN], digest: u64) -> Found {
    let Ok(bytes) = std::fs::read(path(folder, token)) else { return Found::Nothing };
    parse(&bytes, digest).unwrap_or(Found::Corrupt)
}

fn parse(bytes: &[u8], digest: u64) -> Option<Found> {
    let (body, end) = bytes.split_last_chunk::<8>()?;
    if u64::from_le_bytes(*end) != Checksum::of(body) {
        return None;
    }
    let mut rest = body.strip_prefix(MAGIC)?;
    let mut number = || {
        let (first, after) = rest.split_first_chunk::<8>()?;
        rest = after;
        Some(u64::from_le_bytes(*first))
    };
    if number()? != digest {
        return Some(Found::Other);
    }
    let count = number()?;
    let mut operands = Vec::new();
    for _ in 0..count {
        let (length, after) = rest.split_first_chunk::<8>()?;
        let (value, after) = after.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        operands.push(value.to_vec());
        rest = after;
    }
    rest.is_empty().then_some(Found::Good(operands))
}

/// Writes a compiled model; a reader finds the old file or the new one, never a part.
pub(crate) fn store(
    folder: &Path,
    token: &[u8; TOKEN],
    digest: u64,
    operands: &[Vec<u8>],
) -> std::io::Result<()> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(digest.to_le_bytes());
    bytes.extend((operands.len() as u64).to_le_bytes());
    for operand in operands {
        bytes.extend((operand.len() as u64).to_le_bytes());
        bytes.extend(operand);
    }
    let end = Checksum::of(&bytes);
    bytes.extend(end.to_le_bytes());
    let target = path(folder, token);
    let new = target.with_extension(format!("new-{}", std::process::id()));
    std::fs::write(&new, bytes)?;
    std::fs::rename(new, target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cut_and_every_change_is_noticed() {
        let folder = std::env::temp_dir().join(format!("nnapi-shim-cache-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the test");
        store(&folder, &[7; TOKEN], 42, &[vec![1, 2, 3], vec![], vec![9; 20]]).expect("it is written");
        let bytes = std::fs::read(path(&folder, &[7; TOKEN])).expect("it is there");
        let good = parse(&bytes, 42);
        assert!(matches!(&good, Some(Found::Good(v)) if v.len() == 3 && v[0] == [1, 2, 3]), "{good:?}");
        assert!(matches!(parse(&bytes, 43), Some(Found::Other)));
        for cut in 0..bytes.len() {
            assert!(parse(&bytes[..cut], 42).is_none(), "cut at {cut}");
        }
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            assert!(parse(&changed, 42).is_none(), "changed at {at}");
        }
        std::fs::remove_dir_all(folder).expect("the test's own folder");
    }
}
