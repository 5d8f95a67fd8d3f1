//! Metadata values.
//!
//! Arrays are dense: numbers lie in one slice of their own type, and the strings of an array lie in one block of
//! bytes with a table of ends. A vocabulary of 150,000 pieces is two allocations, and never takes more memory than
//! it takes in the file. GGUF strings are bytes; vocabulary pieces need not be UTF-8, so bytes they stay.

use std::fmt;

/// A metadata value of any of the 13 GGUF types. Arrays of arrays are refused by the reader.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the variants are the names of the types
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    /// The bytes of a string; [`Value::text`] gives it as text.
    Str(Box<[u8]>),
    Array(Array),
}

/// An array of one element type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the variants are the names of the types
pub enum Array {
    U8(Box<[u8]>),
    I8(Box<[i8]>),
    U16(Box<[u16]>),
    I16(Box<[i16]>),
    U32(Box<[u32]>),
    I32(Box<[i32]>),
    U64(Box<[u64]>),
    I64(Box<[i64]>),
    F32(Box<[f32]>),
    F64(Box<[f64]>),
    Bool(Box<[bool]>),
    Str(Strings),
}

/// The strings of an array, in one block of bytes.
#[derive(Clone, PartialEq)]
pub struct Strings {
    bytes: Box<[u8]>,
    /// Where each string ends in `bytes`; it begins where the one before ends.
    ends: Box<[u32]>,
}

impl Strings {
    /// `ends` rises, and its last entry is the length of `bytes`.
    pub(super) fn new(bytes: Box<[u8]>, ends: Box<[u32]>) -> Strings {
        Strings { bytes, ends }
    }

    /// The strings of a list; `None` when they are more bytes than a header may have.
    pub fn of<'a>(texts: impl IntoIterator<Item = &'a [u8]>) -> Option<Strings> {
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for text in texts {
            bytes.extend_from_slice(text);
            if bytes.len() > super::MAX_HEADER_BYTES {
                return None;
            }
            ends.push(bytes.len() as u32);
        }
        Some(Strings::new(bytes.into(), ends.into()))
    }

    /// The number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of string `index`, which need not be UTF-8.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)? as usize;
        let start = match index.checked_sub(1) {
            Some(before) => *self.ends.get(before)? as usize,
            None => 0,
        };
        self.bytes.get(start..end)
    }

    /// The bytes of each string, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (0..self.len()).map(|index| self.get(index).unwrap_or_default())
    }
}

impl fmt::Debug for Strings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(String::from_utf8_lossy)).finish()
    }
}

impl Value {
    /// The name of the type: `u32`, `string`, `array of f32`.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::U8(_) => "u8",
            Value::I8(_) => "i8",
            Value::U16(_) => "u16",
            Value::I16(_) => "i16",
            Value::U32(_) => "u32",
            Value::I32(_) => "i32",
            Value::U64(_) => "u64",
            Value::I64(_) => "i64",
            Value::F32(_) => "f32",
            Value::F64(_) => "f64",
            Value::Bool(_) => "bool",
            Value::Str(_) => "string",
            Value::Array(array) => array.type_name(),
        }
    }

    /// The value of any integer type, unless it is negative.
    pub fn unsigned(&self) -> Option<u64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// Whether the value has an integer type.
    pub(super) fn is_integer(&self) -> bool {
        self.unsigned().is_some()
            || matches!(self, Value::I8(_) | Value::I16(_) | Value::I32(_) | Value::I64(_))
    }

    /// The text of a string; `None` for another type and for bytes that are not UTF-8.
    pub fn text(&self) -> Option<&str> {
        match self {
            Value::Str(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Str(text.as_bytes().into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::Str(text.into_bytes().into())
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Value {
        Value::U32(number)
    }
}

impl From<f32> for Value {
    fn from(number: f32) -> Value {
        Value::F32(number)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Value {
        Value::Bool(value)
    }
}

impl From<Vec<u32>> for Value {
    fn from(numbers: Vec<u32>) -> Value {
        Value::Array(Array::U32(numbers.into()))
    }
}

impl From<Vec<i32>> for Value {
    fn from(numbers: Vec<i32>) -> Value {
        Value::Array(Array::I32(numbers.into()))
    }
}

impl From<Vec<f32>> for Value {
    fn from(numbers: Vec<f32>) -> Value {
        Value::Array(Array::F32(numbers.into()))
    }
}

impl Array {
    /// The number of elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::F64(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::Str(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The name of the type: `array of f32`.
    pub fn type_name(&self) -> &'static str {
        match self {
            Array::U8(_) => "array of u8",
            Array::I8(_) => "array of i8",
            Array::U16(_) => "array of u16",
            Array::I16(_) => "array of i16",
            Array::U32(_) => "array of u32",
            Array::I32(_) => "array of i32",
            Array::U64(_) => "array of u64",
            Array::I64(_) => "array of i64",
            Array::F32(_) => "array of f32",
            Array::F64(_) => "array of f64",
            Array::Bool(_) => "array of bool",
            Array::Str(_) => "array of string",
        }
    }
}

/// A scalar as it is, a string escaped and with its bad bytes replaced, an array by its type and length.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(v) => write!(f, "{v}"),
            Value::I8(v) => write!(f, "{v}"),
            Value::U16(v) => write!(f, "{v}"),
            Value::I16(v) => write!(f, "{v}"),
            Value::U32(v) => write!(f, "{v}"),
            Value::I32(v) => write!(f, "{v}"),
            Value::U64(v) => write!(f, "{v}"),
            Value::I64(v) => write!(f, "{v}"),
            Value::F32(v) => write!(f, "{v}"),
            Value::F64(v) => write!(f, "{v}"),
            Value::Bool(v) => write!(f, "{v}"),
            Value::Str(v) => write!(f, "{:?}", String::from_utf8_lossy(v)),
            Value::Array(array) => write!(f, "{} ({})", array.type_name(), array.len()),
        }
    }
}
