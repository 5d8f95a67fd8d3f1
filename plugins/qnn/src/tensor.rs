//! Tensors: what they are, and the structs of QNN that say so.

use std::ffi::CString;
use std::ptr;

use neuropil_plugin_sdk::Error;

use crate::abi::{self, Tensor};

/// A text of C.
pub(crate) fn c_text(text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::invalid(format!("{text:?} has a zero byte")))
}

/// Types of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F32,
    F16,
    /// Codes 0 to 255.
    U8,
    /// Codes 0 to 65535.
    U16,
    /// Codes -128 to 127.
    I8,
    /// Numbers of parameters.
    Count,
}

impl Element {
    pub fn bytes(self) -> usize {
        match self {
            Element::U8 | Element::I8 => 1,
            Element::F16 | Element::U16 => 2,
            Element::F32 | Element::Count => 4,
        }
    }

    fn number(self) -> u32 {
        match self {
            Element::F32 => abi::FLOAT_32,
            Element::F16 => abi::FLOAT_16,
            Element::U8 => abi::UFIXED_8,
            Element::U16 => abi::UFIXED_16,
            Element::I8 => abi::SFIXED_8,
            Element::Count => abi::UINT_32,
        }
    }
}

/// What codes are worth.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Encoding {
    /// The elements are numbers.
    Plain,
    /// `scale * (code + offset)`.
    Whole { scale: f32, offset: i32 },
    /// `scale * code` with a scale for each place of an axis; of codes of 4 bits if it is narrow.
    Axis { axis: u32, scales: Vec<f32>, narrow: bool },
}

/// Where a tensor belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Input,
    Output,
    Static,
}

/// A tensor to be.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Spec {
    pub kind: Kind,
    pub name: String,
    pub element: Element,
    pub dims: Vec<u32>,
    pub encoding: Encoding,
}

impl Spec {
    /// Bytes of all elements; an error when that is no number of 32 bits, which is what the library takes.
    pub fn bytes(&self) -> Result<usize, Error> {
        let mut dims = self.dims.iter().map(|dim| *dim as usize);
        let count = dims.try_fold(self.element.bytes(), |product, dim| product.checked_mul(dim));
        let fits = count.filter(|bytes| *bytes > 0 && u32::try_from(*bytes).is_ok());
        fits.ok_or_else(|| {
            Error::unsupported(format!("a tensor of {:?} is empty or larger than 4 GiB", self.dims))
        })
    }
}

/// A tensor with everything that its struct points to.
pub(crate) struct Held {
    pub spec: Spec,
    /// Bytes of all elements.
    pub bytes: usize,
    /// What `raw` points to: heap memory that stays in its place.
    _name: CString,
    _pairs: Vec<abi::ScaleOffset>,
    _offsets: Vec<i32>,
    _data: Vec<u8>,
    pub raw: Tensor,
}

impl Held {
    /// `data` is that of a static tensor, and empty for others.
    pub fn new(spec: Spec, data: Vec<u8>) -> Result<Held, Error> {
        let bytes = spec.bytes()?;
        let needed = if spec.kind == Kind::Static { bytes } else { 0 };
        if data.len() != needed {
            let (found, name) = (data.len(), &spec.name);
            return Err(Error::internal(format!("tensor {name} has {found} bytes and needs {needed}")));
        }
        let name = c_text(&spec.name)?;
        let (mut pairs, mut offsets) = (Vec::new(), Vec::new());
        let quantize = match &spec.encoding {
            Encoding::Plain => abi::Quantize::NONE,
            Encoding::Whole { scale, offset } => {
                let scale_offset = abi::ScaleOffset { scale: *scale, offset: *offset };
                defined(abi::ENCODING_SCALE_OFFSET, abi::EncodingForm { scale_offset })
            }
            Encoding::Axis { axis, scales, narrow } => {
                if spec.dims.get(*axis as usize).map(|dim| *dim as usize) != Some(scales.len()) {
                    return Err(Error::internal(format!("tensor {} has too few scales", spec.name)));
                }
                let (axis, count) = (*axis as i32, scales.len() as u32);
                if *narrow {
                    offsets = vec![0; scales.len()];
                    let (scales, offsets) = (scales.as_ptr(), offsets.as_ptr());
                    let narrow_axis = abi::NarrowAxisScales { bits: 4, axis, count, scales, offsets };
                    defined(abi::ENCODING_NARROW_AXIS, abi::EncodingForm { narrow_axis })
                } else {
                    pairs.extend(scales.iter().map(|scale| abi::ScaleOffset { scale: *scale, offset: 0 }));
                    let axis = abi::AxisScales { axis, count, scales: pairs.as_ptr() };
                    defined(abi::ENCODING_AXIS, abi::EncodingForm { axis })
                }
            }
        };
        let raw = Tensor {
            version: 1,
            gap: 0,
            id: 0,
            name: name.as_ptr(),
            kind: match spec.kind {
                Kind::Input => abi::APP_WRITE,
                Kind::Output => abi::APP_READ,
                Kind::Static => abi::STATIC,
            },
            layout: 0,
            element: spec.element.number(),
            quantize,
            rank: spec.dims.len() as u32,
            dims: spec.dims.as_ptr(),
            memory_kind: abi::MEMORY_RAW,
            memory: match spec.kind {
                // The library only reads it, although the type of the pointer is one that can be written.
                Kind::Static => raw_memory(data.as_ptr().cast_mut(), data.len()),
                _ => raw_memory(ptr::null_mut(), 0),
            },
            later: [0; 3],
        };
        Ok(Held { spec, bytes, _name: name, _pairs: pairs, _offsets: offsets, _data: data, raw })
    }
}

fn defined(encoding: u32, form: abi::EncodingForm) -> abi::Quantize {
    abi::Quantize { definition: abi::DEFINED, encoding, form }
}

/// Memory of the process, as a tensor names it.
pub(crate) fn raw_memory(data: *mut u8, len: usize) -> abi::Memory {
    // Lengths were compared with those of tensors, which fit.
    abi::Memory { bytes: abi::Bytes { data: data.cast(), size: len as u32 } }
}
