//! The key-value pairs of a file, and typed questions to them.
//!
//! A getter tells three things apart: the key is absent (`Ok(None)`), it is there with the type that was asked
//! for, or it is there with another one, which is an error and never a reinterpretation of its bytes.

use std::path::{Path, PathBuf};

use super::error::{GgufError, shown};
use super::value::{Array, Strings, Value};

/// The metadata of a file, in the file's order.
#[derive(Clone, Debug)]
pub struct Metadata {
    file: PathBuf,
    pairs: Vec<(Box<str>, Value)>,
    /// Indices into `pairs`, sorted by key.
    order: Vec<u32>,
}

impl Metadata {
    /// Takes the pairs of `file`; a key that appears twice is an error.
    pub(super) fn new(file: &Path, pairs: Vec<(Box<str>, Value)>) -> Result<Metadata, GgufError> {
        let order = sorted_by_name(&pairs, file, |pair| &pair.0)?;
        if let Some(key) = twice(&pairs, &order, |pair| &pair.0) {
            return Err(GgufError::DuplicateKey { file: file.into(), key: shown(&key.0) });
        }
        Ok(Metadata { file: file.into(), pairs, order })
    }

    /// The pairs, in the file's order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.pairs.iter().map(|(key, value)| (&**key, value))
    }

    /// The number of pairs.
    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    /// Whether there are no pairs.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// The value of `key`, of whatever type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        position(&self.pairs, &self.order, |pair| &pair.0, key).map(|pair| &pair.1)
    }

    /// A non-negative integer of any integer type that fits 32 bits.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        let fits = |v: &Value| v.unsigned().and_then(|v| u32::try_from(v).ok());
        self.integer(key, fits, "u32", "a number from 0 to 4294967295")
    }

    /// A non-negative integer of any integer type.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.integer(key, Value::unsigned, "u64", "a number that is not negative")
    }

    /// An F32, or an F64 rounded to it.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        self.typed(key, "f32", |value| match value {
            Value::F32(v) => Some(*v),
            Value::F64(v) => Some(*v as f32),
            _ => None,
        })
    }

    /// A bool.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.typed(key, "bool", |value| if let Value::Bool(v) = value { Some(*v) } else { None })
    }

    /// The bytes of a string.
    pub fn bytes(&self, key: &str) -> Result<Option<&[u8]>, GgufError> {
        self.typed(key, "string", |value| if let Value::Str(v) = value { Some(&**v) } else { None })
    }

    /// A string as text; bytes that are not UTF-8 are an error.
    pub fn str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        let Some(bytes) = self.bytes(key)? else { return Ok(None) };
        let not_text = |_| GgufError::NotUtf8 {
            file: self.file.clone(),
            what: format!("the value of the key \"{}\"", shown(key)),
        };
        std::str::from_utf8(bytes).map(Some).map_err(not_text)
    }

    /// An array of strings, as bytes.
    pub fn strings(&self, key: &str) -> Result<Option<&Strings>, GgufError> {
        self.array(key, "array of string", |array| if let Array::Str(v) = array { Some(v) } else { None })
    }

    /// An array of F32.
    pub fn f32s(&self, key: &str) -> Result<Option<&[f32]>, GgufError> {
        self.array(key, "array of f32", |array| if let Array::F32(v) = array { Some(&**v) } else { None })
    }

    /// An array of U32.
    pub fn u32s(&self, key: &str) -> Result<Option<&[u32]>, GgufError> {
        self.array(key, "array of u32", |array| if let Array::U32(v) = array { Some(&**v) } else { None })
    }

    /// An array of I32.
    pub fn i32s(&self, key: &str) -> Result<Option<&[i32]>, GgufError> {
        self.array(key, "array of i32", |array| if let Array::I32(v) = array { Some(&**v) } else { None })
    }

    /// As [`Metadata::u32`]; an absent key is an error.
    pub fn require_u32(&self, key: &str) -> Result<u32, GgufError> {
        self.required(key, self.u32(key))
    }

    /// As [`Metadata::u64`]; an absent key is an error.
    pub fn require_u64(&self, key: &str) -> Result<u64, GgufError> {
        self.required(key, self.u64(key))
    }

    /// As [`Metadata::f32`]; an absent key is an error.
    pub fn require_f32(&self, key: &str) -> Result<f32, GgufError> {
        self.required(key, self.f32(key))
    }

    /// As [`Metadata::str`]; an absent key is an error.
    pub fn require_str(&self, key: &str) -> Result<&str, GgufError> {
        self.required(key, self.str(key))
    }

    /// As [`Metadata::strings`]; an absent key is an error.
    pub fn require_strings(&self, key: &str) -> Result<&Strings, GgufError> {
        self.required(key, self.strings(key))
    }

    /// As [`Metadata::f32s`]; an absent key is an error.
    pub fn require_f32s(&self, key: &str) -> Result<&[f32], GgufError> {
        self.required(key, self.f32s(key))
    }

    fn required<T>(&self, key: &str, found: Result<Option<T>, GgufError>) -> Result<T, GgufError> {
        found?.ok_or_else(|| GgufError::MissingKey { file: self.file.clone(), key: shown(key) })
    }

    fn array<'a, T>(
        &'a self,
        key: &str,
        wanted: &'static str,
        pick: impl FnOnce(&'a Array) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        self.typed(key, wanted, |value| if let Value::Array(array) = value { pick(array) } else { None })
    }

    fn integer<T>(
        &self,
        key: &str,
        pick: impl FnOnce(&Value) -> Option<T>,
        wanted: &'static str,
        range: &'static str,
    ) -> Result<Option<T>, GgufError> {
        match self.get(key) {
            Some(value) if value.is_integer() => match pick(value) {
                Some(number) => Ok(Some(number)),
                None => Err(self.bad_value(key, value, range)),
            },
            _ => self.typed(key, wanted, |_| None),
        }
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &'static str,
        pick: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match pick(value) {
            Some(found) => Ok(Some(found)),
            None => Err(GgufError::WrongType {
                file: self.file.clone(),
                key: shown(key),
                wanted,
                found: value.type_name(),
            }),
        }
    }

    /// The error of a value that has the right type and is not usable.
    pub(super) fn bad_value(&self, key: &str, value: &Value, wanted: &'static str) -> GgufError {
        let (file, key, value) = (self.file.clone(), shown(key), value.to_string());
        GgufError::BadValue { file, key, value, wanted }
    }
}

/// The indices of `items` in the order of their names: a dictionary of four bytes per entry.
pub(super) fn sorted_by_name<T>(
    items: &[T],
    file: &Path,
    name: impl Fn(&T) -> &str,
) -> Result<Vec<u32>, GgufError> {
    let mut order: Vec<u32> = super::cursor::reserve(items.len() as u64, file)?;
    order.extend(0..items.len() as u32);
    order.sort_unstable_by(|&a, &b| {
        let of = |index: u32| items.get(index as usize).map(&name);
        of(a).cmp(&of(b)).then(a.cmp(&b))
    });
    Ok(order)
}

/// The second of two items with the same name, if there are two.
pub(super) fn twice<'a, T>(items: &'a [T], order: &[u32], name: impl Fn(&T) -> &str) -> Option<&'a T> {
    let mut sorted = order.iter().filter_map(|&index| items.get(index as usize));
    let mut before = sorted.next()?;
    for item in sorted {
        if name(before) == name(item) {
            return Some(item);
        }
        before = item;
    }
    None
}

/// The item called `wanted`.
pub(super) fn position<'a, T>(
    items: &'a [T],
    order: &[u32],
    name: impl Fn(&T) -> &str,
    wanted: &str,
) -> Option<&'a T> {
    items.get(index(items, order, name, wanted)?)
}

/// Where the item called `wanted` is.
pub(super) fn index<T>(items: &[T], order: &[u32], name: impl Fn(&T) -> &str, wanted: &str) -> Option<usize> {
    let compare = |index: &u32| match items.get(*index as usize) {
        Some(item) => name(item).cmp(wanted),
        None => std::cmp::Ordering::Greater,
    };
    let found = order.binary_search_by(compare).ok()?;
    order.get(found).map(|index| *index as usize)
}
