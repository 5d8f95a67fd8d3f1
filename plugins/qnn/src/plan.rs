//! A compiled weight as bytes: a head that says for what, and the library's binary of the context.
//!
//! ```text
//!   "neuropil qnn 1\n\0" | key [32] | text: the library, the chip, the settings | numbers, rows
//!   parts: cols, columns, factors | the numbers of the tensors of each graph | the binary | SHA-256 of all before
//! ```
//!
//! What the library says of its own binaries is not relied on: it takes some that it then refuses to run. A binary goes
//! to it only when the text is equal to the unit's, letter by letter, and the hash is right.

use std::sync::Arc;

use neuropil_plugin_sdk::{Error, Prepared, Shape};
use sha2::{Digest, Sha256};

use crate::product::{self, Numbers, Part};
use crate::runtime::Session;
use crate::settings::Settings;
use crate::unit::Weight;

/// The hash of a weight and of what compiles it.
pub(crate) type Key = [u8; 32];

const MAGIC: &[u8; 16] = b"neuropil qnn 1\n\0";

/// Parts of a weight at most.
const MOST_PARTS: usize = 2;

/// A weight as bytes.
pub(crate) fn write(weight: &Weight, compatibility: &str, key: &Key) -> Result<Vec<u8>, Error> {
    let binary = weight.context.save()?;
    let mut out = Vec::new();
    let refuse = |_| Error::out_of_memory("there is no memory for a saved weight");
    out.try_reserve_exact(binary.len() + (1 << 16)).map_err(refuse)?;
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(key);
    bytes(&mut out, compatibility.as_bytes());
    number(&mut out, weight.numbers as usize);
    number(&mut out, weight.rows);
    number(&mut out, weight.parts.len());
    for part in &weight.parts {
        number(&mut out, part.cols);
        words(&mut out, part.columns.iter().copied());
        words(&mut out, part.factors.iter().map(|factor| factor.to_bits()));
    }
    for graph in &weight.graphs {
        words(&mut out, graph.ids().into_iter());
    }
    bytes(&mut out, &binary);
    let hash: Key = Sha256::digest(&out).into();
    out.extend_from_slice(&hash);
    Ok(out)
}

fn number(out: &mut Vec<u8>, number: usize) {
    out.extend_from_slice(&(number as u64).to_le_bytes());
}

fn bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    number(out, bytes.len());
    out.extend_from_slice(bytes);
}

fn words(out: &mut Vec<u8>, words: impl ExactSizeIterator<Item = u32>) {
    number(out, words.len());
    words.for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
}

fn damaged() -> Error {
    Error::invalid("the saved weight is damaged or of another version")
}

/// What is left to read.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], Error> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or_else(damaged)?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<usize, Error> {
        let bytes = self.take(8)?.try_into().map_err(|_| damaged())?;
        usize::try_from(u64::from_le_bytes(bytes)).map_err(|_| damaged())
    }

    fn bytes(&mut self) -> Result<&'a [u8], Error> {
        let count = self.number()?;
        self.take(count)
    }

    fn words(&mut self) -> Result<Vec<u32>, Error> {
        let count = self.number()?.checked_mul(4).ok_or_else(damaged)?;
        Ok(self.take(count)?.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}

/// The head of a saved weight, and its binary.
struct Saved<'a> {
    key: &'a [u8],
    compatibility: &'a str,
    numbers: Numbers,
    rows: usize,
    parts: Vec<Part>,
    /// Of each graph.
    ids: Vec<Vec<u32>>,
    binary: &'a [u8],
}

fn open(saved: &[u8], graphs: usize) -> Result<Saved<'_>, Error> {
    let (body, hash) = saved.split_last_chunk::<32>().ok_or_else(damaged)?;
    let found: Key = Sha256::digest(body).into();
    let mut reader = Reader(body);
    if found != *hash || reader.take(16)? != MAGIC {
        return Err(damaged());
    }
    let key = reader.take(32)?;
    let compatibility = str::from_utf8(reader.bytes()?).map_err(|_| damaged())?;
    let kind = reader.number()?;
    let all = [Numbers::F32, Numbers::F16, Numbers::A8, Numbers::A16];
    let numbers = all.into_iter().find(|numbers| *numbers as usize == kind).ok_or_else(damaged)?;
    let rows = reader.number()?;
    let count = reader.number()?;
    if !(1..=MOST_PARTS).contains(&count) {
        return Err(damaged());
    }
    let mut parts = Vec::new();
    for _ in 0..count {
        let cols = reader.number()?;
        let columns = reader.words()?;
        let factors: Vec<f32> = reader.words()?.into_iter().map(f32::from_bits).collect();
        let columns_fit = columns.is_empty() || columns.len() == cols;
        if !columns_fit || !(factors.is_empty() || factors.len() == rows) {
            return Err(damaged());
        }
        parts.push(Part { columns, cols, factors });
    }
    let ids = (0..graphs).map(|_| reader.words()).collect::<Result<_, _>>()?;
    let binary = reader.bytes()?;
    if !reader.0.is_empty() {
        return Err(damaged());
    }
    Ok(Saved { key, compatibility, numbers, rows, parts, ids, binary })
}

/// The weight of [`write`], if it was written for this unit, and for this key where one is given.
pub(crate) fn read(
    saved: &[u8],
    session: &Arc<Session>,
    settings: &Settings,
    compatibility: &str,
    shape: Shape,
    key: Option<&Key>,
) -> Result<Prepared<Weight>, Error> {
    let Saved { key: found_key, compatibility: found, numbers, rows, parts, ids, binary } =
        open(saved, settings.tokens.len())?;
    if found != compatibility {
        let text = format!("the saved weight is for {found}, and this unit is {compatibility}");
        return Err(Error::unsupported(text));
    }
    if key.is_some_and(|key| key != found_key) {
        return Err(Error::invalid("the saved weight is another one"));
    }
    let whole = parts.first().filter(|part| part.columns.is_empty()).map(|part| part.cols);
    let Some(cols) = whole.filter(|cols| shape == Shape::Matrix { rows, cols: *cols }) else {
        return Err(damaged());
    };
    let outside = |column: &u32| *column as usize >= cols;
    if parts.iter().any(|part| part.columns.iter().any(outside)) {
        return Err(damaged());
    }
    let context = session.load(binary)?;
    let mut graphs = Vec::new();
    for (tokens, ids) in settings.tokens.iter().zip(ids) {
        let mut ends = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            ends.extend(product::ends(number, part, rows, *tokens, numbers, settings.op)?);
        }
        if ids.len() != ends.len() {
            return Err(damaged());
        }
        graphs.push(context.find(&product::graph_name(*tokens), ends.into_iter().zip(ids).collect())?);
    }
    let bytes = binary.len() as u64;
    Ok(Prepared { weight: Weight { numbers, rows, parts, graphs, context, loaded: true }, bytes })
}
