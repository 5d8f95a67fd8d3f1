//! A frame around saved plans, so that a damaged file is refused before a driver sees it.
//!
//! ```text
//!   "neuropil plan 1\n"  kind u64  rows u64  cols u64  | what the plugin wrote |  its length u64  its checksum u64
//! ```

use crate::{Error, Shape};

const MAGIC: &[u8; 16] = b"neuropil plan 1\n";
const HEAD: usize = 40;
const TAIL: usize = 16;

/// FNV-1a over what comes before the tail.
#[derive(Clone, Copy)]
pub(crate) struct Checksum(u64);

impl Checksum {
    pub fn new() -> Checksum {
        Checksum(0xcbf2_9ce4_8422_2325)
    }

    pub fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// What comes before the plugin's bytes.
pub(crate) fn head(shape: Shape) -> [u8; HEAD] {
    let (kind, a, b) = match shape {
        Shape::Matrix { rows, cols } => (1u64, rows, cols),
        Shape::Neurons { neurons, width } => (2, neurons, width),
    };
    let mut head = [0; HEAD];
    head[..16].copy_from_slice(MAGIC);
    for (place, value) in head[16..].chunks_exact_mut(8).zip([kind, a as u64, b as u64]) {
        place.copy_from_slice(&value.to_le_bytes());
    }
    head
}

/// What comes after them.
pub(crate) fn tail(bytes: u64, checksum: Checksum) -> [u8; TAIL] {
    let mut tail = [0; TAIL];
    tail[..8].copy_from_slice(&bytes.to_le_bytes());
    tail[8..].copy_from_slice(&checksum.0.to_le_bytes());
    tail
}

/// The plugin's bytes of a plan, and the shape of the weight.
pub(crate) fn open(plan: &[u8]) -> Result<(&[u8], Shape), Error> {
    let damaged = || Error::invalid("the saved plan is damaged or of another version");
    let (head, rest) = plan.split_first_chunk::<HEAD>().ok_or_else(damaged)?;
    let (body, tail) = rest.split_last_chunk::<TAIL>().ok_or_else(damaged)?;
    let (magic, numbers) = head.split_first_chunk::<16>().ok_or_else(damaged)?;
    let (numbers, _) = numbers.as_chunks::<8>();
    let [kind, a, b] = numbers else { return Err(damaged()) };
    let size = |bytes: &[u8; 8]| usize::try_from(u64::from_le_bytes(*bytes)).map_err(|_| damaged());
    let mut checksum = Checksum::new();
    checksum.add(head);
    checksum.add(body);
    if magic != MAGIC || *tail != self::tail(body.len() as u64, checksum) {
        return Err(damaged());
    }
    let (a, b) = (size(a)?, size(b)?);
    match u64::from_le_bytes(*kind) {
        1 => Ok((body, Shape::Matrix { rows: a, cols: b })),
        2 => Ok((body, Shape::Neurons { neurons: a, width: b })),
        _ => Err(damaged()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_changed_byte_and_any_cut_is_refused() {
        let shape = Shape::Neurons { neurons: 3, width: 7 };
        let mut checksum = Checksum::new();
        checksum.add(&head(shape));
        checksum.add(b"body");
        let plan = [&head(shape)[..], b"body", &tail(4, checksum)].concat();
        assert_eq!(open(&plan), Ok((&b"body"[..], shape)));
        for cut in 0..plan.len() {
            assert!(open(&plan[..cut]).is_err(), "{cut}");
        }
        for at in 0..plan.len() {
            let mut plan = plan.clone();
            plan[at] ^= 4;
            assert!(open(&plan).is_err(), "{at}");
        }
    }
}
