//! The header as bytes, little-endian: the opposite of [`super::parse`].

use super::value::{Array, Value};
use super::write::{NewTensor, Pairs};

/// The header without the padding at its end, and where each key's value lies.
pub(super) fn header(
    pairs: &Pairs,
    tensors: &[NewTensor],
    offsets: &[u64],
) -> (Vec<u8>, Vec<(String, u64, usize)>) {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((pairs.iter().len() as u64).to_le_bytes());
    let mut values = Vec::new();
    for (key, value) in pairs.iter() {
        string(&mut out, key.as_bytes());
        let at = out.len();
        self::value(&mut out, value);
        values.push((key.to_owned(), at as u64, out.len() - at));
    }
    for (tensor, offset) in tensors.iter().zip(offsets) {
        string(&mut out, tensor.name.as_bytes());
        out.extend((tensor.dims.len() as u32).to_le_bytes());
        tensor.dims.iter().for_each(|size| out.extend(size.to_le_bytes()));
        out.extend(tensor.type_id.to_le_bytes());
        out.extend(offset.to_le_bytes());
    }
    (out, values)
}

fn string(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

pub(super) fn value(out: &mut Vec<u8>, value: &Value) {
    let mut scalar = |type_id: u32, bytes: &[u8]| {
        out.extend(type_id.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Value::U8(v) => scalar(0, &v.to_le_bytes()),
        Value::I8(v) => scalar(1, &v.to_le_bytes()),
        Value::U16(v) => scalar(2, &v.to_le_bytes()),
        Value::I16(v) => scalar(3, &v.to_le_bytes()),
        Value::U32(v) => scalar(4, &v.to_le_bytes()),
        Value::I32(v) => scalar(5, &v.to_le_bytes()),
        Value::F32(v) => scalar(6, &v.to_le_bytes()),
        Value::Bool(v) => scalar(7, &[u8::from(*v)]),
        Value::U64(v) => scalar(10, &v.to_le_bytes()),
        Value::I64(v) => scalar(11, &v.to_le_bytes()),
        Value::F64(v) => scalar(12, &v.to_le_bytes()),
        Value::Str(v) => {
            out.extend(8u32.to_le_bytes());
            string(out, v);
        }
        Value::Array(v) => {
            out.extend(9u32.to_le_bytes());
            array(out, v);
        }
    }
}

fn array(out: &mut Vec<u8>, array: &Array) {
    fn numbers<T: Copy, const N: usize>(out: &mut Vec<u8>, id: u32, items: &[T], bytes: fn(T) -> [u8; N]) {
        out.extend(id.to_le_bytes());
        out.extend((items.len() as u64).to_le_bytes());
        items.iter().for_each(|item| out.extend(bytes(*item)));
    }
    match array {
        Array::U8(v) => numbers(out, 0, v, u8::to_le_bytes),
        Array::I8(v) => numbers(out, 1, v, i8::to_le_bytes),
        Array::U16(v) => numbers(out, 2, v, u16::to_le_bytes),
        Array::I16(v) => numbers(out, 3, v, i16::to_le_bytes),
        Array::U32(v) => numbers(out, 4, v, u32::to_le_bytes),
        Array::I32(v) => numbers(out, 5, v, i32::to_le_bytes),
        Array::F32(v) => numbers(out, 6, v, f32::to_le_bytes),
        Array::Bool(v) => numbers(out, 7, v, |v| [u8::from(v)]),
        Array::U64(v) => numbers(out, 10, v, u64::to_le_bytes),
        Array::I64(v) => numbers(out, 11, v, i64::to_le_bytes),
        Array::F64(v) => numbers(out, 12, v, f64::to_le_bytes),
        Array::Str(v) => {
            out.extend(8u32.to_le_bytes());
            out.extend((v.len() as u64).to_le_bytes());
            v.iter().for_each(|text| string(out, text));
        }
    }
}
