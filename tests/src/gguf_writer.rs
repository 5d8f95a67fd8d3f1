//! A GGUF writer for tests: every field can be made wrong on purpose.
//!
//! It shares no code with the reader under test.

use std::path::Path;

/// A metadata value, with its GGUF type id.
#[derive(Clone, Debug)]
pub enum Value {
    /// Type 0.
    U8(u8),
    /// Type 4.
    U32(u32),
    /// Type 5.
    I32(i32),
    /// Type 6.
    F32(f32),
    /// Type 7.
    Bool(bool),
    /// Type 8.
    Str(String),
    /// Type 10.
    U64(u64),
    /// Type 9 of type 8.
    Strings(Vec<String>),
    /// Type 9 of type 6.
    F32s(Vec<f32>),
    /// Type 9 of type 5.
    I32s(Vec<i32>),
    /// Type 9 of type 0.
    U8s(Vec<u8>),
    /// A type id and the bytes that follow it, as they are.
    Raw(u32, Vec<u8>),
}

/// One tensor: its entry in the header and its data.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name, as written.
    pub name: String,
    /// Dimensions, fastest first.
    pub dims: Vec<u64>,
    /// GGUF type id.
    pub type_id: u32,
    /// Data, as written.
    pub data: Vec<u8>,
    /// Offset to write instead of the right one.
    pub offset: Option<u64>,
}

/// A file in the making.
#[derive(Clone, Debug)]
pub struct GgufFile {
    /// Version field.
    pub version: u32,
    /// Metadata pairs, in order, duplicates allowed.
    pub pairs: Vec<(String, Value)>,
    /// Tensors, in order, duplicates allowed.
    pub tensors: Vec<Tensor>,
    /// Alignment of the data, whatever `general.alignment` says.
    pub alignment: usize,
}

impl Default for GgufFile {
    fn default() -> Self {
        GgufFile { version: 3, pairs: Vec::new(), tensors: Vec::new(), alignment: 32 }
    }
}

impl GgufFile {
    /// Adds a metadata pair.
    pub fn pair(mut self, key: &str, value: Value) -> Self {
        self.pairs.push((key.into(), value));
        self
    }

    /// Changes a metadata pair, or adds it.
    pub fn set(mut self, key: &str, value: Value) -> Self {
        match self.pairs.iter_mut().find(|(k, _)| k == key) {
            Some(pair) => pair.1 = value,
            None => self.pairs.push((key.into(), value)),
        }
        self
    }

    /// Leaves out a metadata pair.
    pub fn without(mut self, key: &str) -> Self {
        self.pairs.retain(|(k, _)| k != key);
        self
    }

    /// Adds an F32 tensor.
    pub fn f32_tensor(self, name: &str, dims: &[u64], data: &[f32]) -> Self {
        let bytes = data.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.tensor(name, dims, 0, bytes)
    }

    /// Adds a tensor of any type id with its bytes.
    pub fn tensor(mut self, name: &str, dims: &[u64], type_id: u32, data: Vec<u8>) -> Self {
        self.tensors.push(Tensor { name: name.into(), dims: dims.to_vec(), type_id, data, offset: None });
        self
    }

    /// Writes the file.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        std::fs::write(path, self.bytes())
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        for (key, value) in &self.pairs {
            string(&mut out, key);
            write_value(&mut out, value);
        }
        let mut next = 0usize;
        for tensor in &self.tensors {
            string(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(tensor.type_id.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(next as u64).to_le_bytes());
            next = (next + tensor.data.len()).next_multiple_of(self.alignment);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(&tensor.data);
        }
        out
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn array<T>(out: &mut Vec<u8>, type_id: u32, items: &[T], mut write: impl FnMut(&mut Vec<u8>, &T)) {
    out.extend(9u32.to_le_bytes());
    out.extend(type_id.to_le_bytes());
    out.extend((items.len() as u64).to_le_bytes());
    items.iter().for_each(|item| write(out, item));
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    let mut scalar = |type_id: u32, bytes: &[u8]| {
        out.extend(type_id.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Value::U8(v) => scalar(0, &v.to_le_bytes()),
        Value::U32(v) => scalar(4, &v.to_le_bytes()),
        Value::I32(v) => scalar(5, &v.to_le_bytes()),
        Value::F32(v) => scalar(6, &v.to_le_bytes()),
        Value::Bool(v) => scalar(7, &[u8::from(*v)]),
        Value::U64(v) => scalar(10, &v.to_le_bytes()),
        Value::Raw(type_id, bytes) => scalar(*type_id, bytes),
        Value::Str(v) => {
            out.extend(8u32.to_le_bytes());
            string(out, v);
        }
        Value::Strings(v) => array(out, 8, v, |out, item| string(out, item)),
        Value::F32s(v) => array(out, 6, v, |out, item| out.extend(item.to_le_bytes())),
        Value::I32s(v) => array(out, 5, v, |out, item| out.extend(item.to_le_bytes())),
        Value::U8s(v) => array(out, 0, v, |out, item| out.push(*item)),
    }
}
