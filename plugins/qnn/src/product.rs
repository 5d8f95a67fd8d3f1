//! A product of a matrix as a graph of one node per part.
//!
//! ```text
//!   x ── as codes or halves ── FullyConnected (or Conv2d 1×1) ── times a factor per row and token ──┐
//!   x at the outlier columns ── the same with their codes ──────────────────────────────────────── + ── y
//! ```
//!
//! A graph is compiled once, and with it the ranges of its codes. The ranges of a job are not known then, so the graph
//! gets no scales of the job at all. Each token is divided by its largest value, which fits the range -1 to 1 of the
//! inputs. Each row of the weight is divided by a bound of its results, so that all rows use the same range of outputs.
//! Both are undone in 32-bit floats, which is exact but for the last bit: the product is linear.

use std::sync::Arc;

use half::f16;
use neuropil_plugin_sdk::{Error, Matrix, Scheme, f32_at, int4_at};

use crate::graph::Graph;
use crate::runtime::{Builder, Context};
use crate::tensor::{Element, Encoding, Kind, Spec};

/// What inputs and outputs of a graph are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Numbers {
    F32,
    F16,
    /// Codes of 8 bits.
    A8,
    /// Codes of 16 bits.
    A16,
}

/// How many times the root of the sum of squares of a row its results may be, for inputs from -1 to 1. Results are as
/// coarse as the range is wide, and inputs must be made smaller where it is narrow. These were the best for random
/// inputs with and without large ones among them: codes of 16 bits are exact in 10 or 11 bits of the range only.
const BOUND_A8: f32 = 1.0;
const BOUND_A16: f32 = 0.5;

impl Numbers {
    /// The types of the input and of the output.
    pub fn elements(self) -> [Element; 2] {
        match self {
            Numbers::F32 => [Element::F32; 2],
            Numbers::F16 => [Element::F16; 2],
            Numbers::A8 => [Element::U8; 2],
            Numbers::A16 => [Element::U16; 2],
        }
    }

    /// The range of the results of a row, as a multiple of the root of its sum of squares; `None` for floats.
    pub fn bound(self) -> Option<f32> {
        match self {
            Numbers::F32 | Numbers::F16 => None,
            Numbers::A8 => Some(BOUND_A8),
            Numbers::A16 => Some(BOUND_A16),
        }
    }
}

/// Largest code of an element, when the middle is 0.
pub(crate) fn largest_code(element: Element) -> i32 {
    if element == Element::U8 { 127 } else { 32767 }
}

/// Codes from -1 to 1.
fn unit_range(element: Element) -> Encoding {
    match element {
        Element::U8 | Element::U16 => {
            let largest = largest_code(element);
            Encoding::Whole { scale: 1.0 / largest as f32, offset: -largest - 1 }
        }
        _ => Encoding::Plain,
    }
}

/// The operation that multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    FullyConnected,
    Convolution,
}

/// Inputs of a node with codes are a multiple of this, the rest zeros. With halves as inputs, HTP multiplies codes wrong
/// for widths that are no multiple of 4, and says nothing.
const WIDTH: usize = 32;

/// A part of a matrix.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Part {
    /// The columns of the matrix that it has; empty: all.
    pub columns: Vec<u32>,
    /// How many these are.
    pub cols: usize,
    /// What results of a row are multiplied with; empty: 1.
    pub factors: Vec<f32>,
}

impl Part {
    /// Inputs of its node: at least its columns.
    pub fn width(&self) -> usize {
        if self.factors.is_empty() { self.cols } else { self.cols.next_multiple_of(WIDTH) }
    }
}

/// The elements of a part, row after row.
pub(crate) struct Elements {
    pub bytes: Vec<u8>,
    pub element: Element,
    /// Scales of rows; empty for numbers.
    pub scales: Vec<f32>,
    /// Whether codes have 4 bits.
    pub narrow: bool,
}

/// Empty memory for `count` elements.
fn room(count: usize) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    let refuse = |_| Error::out_of_memory("there is no memory for a weight");
    bytes.try_reserve_exact(count).map_err(refuse)?;
    Ok(bytes)
}

/// Whether graphs of these numbers take the codes of a matrix; otherwise they take its values as floats.
pub(crate) fn keeps_codes(scheme: Scheme, numbers: Numbers) -> bool {
    matches!(scheme, Scheme::Channel8 | Scheme::Channel4) && numbers != Numbers::F32
}

/// The parts of a matrix for graphs of these numbers.
pub(crate) fn parts(matrix: &Matrix<'_>, numbers: Numbers) -> Result<Vec<(Part, Elements)>, Error> {
    if !keeps_codes(matrix.scheme, numbers) {
        return Ok(vec![widened(matrix, numbers.elements()[0])?]);
    }
    let cells = matrix.rows * matrix.cols;
    let narrow = matrix.scheme == Scheme::Channel4;
    let mut bytes = room(cells)?;
    match narrow {
        false => bytes.extend_from_slice(matrix.data),
        true => bytes.extend((0..cells).map(|index| int4_at(matrix.data, index) as u8)),
    }
    let whole = Codes { columns: &[], bytes, cols: matrix.cols, scales: matrix.scales, narrow };
    let mut list = vec![whole.scaled(numbers)?];
    if let Some(outliers) = matrix.outliers.filter(|outliers| !outliers.columns.is_empty()) {
        let mut bytes = room(outliers.data.len())?;
        bytes.extend_from_slice(outliers.data);
        let (columns, scales) = (outliers.columns, outliers.scales);
        list.push(Codes { columns, bytes, cols: columns.len(), scales, narrow: false }.scaled(numbers)?);
    }
    Ok(list)
}

/// A matrix as floats.
fn widened(matrix: &Matrix<'_>, element: Element) -> Result<(Part, Elements), Error> {
    let Matrix { rows, cols, .. } = *matrix;
    let mut bytes = room(rows * cols * element.bytes())?;
    let mut values = vec![0.0; cols];
    for row in 0..rows {
        matrix.widen_row(row, &mut values);
        match element {
            Element::F16 => bytes.extend(values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes())),
            _ => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        }
    }
    let part = Part { columns: Vec::new(), cols, factors: Vec::new() };
    Ok((part, Elements { bytes, element, scales: Vec::new(), narrow: false }))
}

/// Codes with a scale per row, as the border has them.
struct Codes<'a> {
    columns: &'a [u32],
    bytes: Vec<u8>,
    cols: usize,
    scales: &'a [u8],
    narrow: bool,
}

impl Codes<'_> {
    /// The part with scales that suit the range of outputs instead of its own, and factors for the difference.
    fn scaled(self, numbers: Numbers) -> Result<(Part, Elements), Error> {
        let Codes { columns, bytes, cols, scales, narrow } = self;
        let (mut factors, mut units) = (Vec::new(), Vec::new());
        for (row, codes) in bytes.chunks_exact(cols).enumerate() {
            let scale = f32_at(scales, row);
            if !scale.is_finite() {
                return Err(Error::invalid(format!("the scale of row {row} is not a number")));
            }
            let range = match numbers.bound() {
                // Weights up to 1, which halves hold without loss.
                None if narrow => 8.0,
                None => 128.0,
                Some(bound) => {
                    let squares: f32 = codes.iter().map(|code| f32::from(*code as i8).powi(2)).sum();
                    // A row of zeros needs a scale too.
                    bound * squares.sqrt().max(1.0)
                }
            };
            units.push(1.0 / range);
            factors.push(scale * range);
        }
        let part = Part { columns: columns.to_vec(), cols, factors };
        let width = part.width();
        let mut padded = bytes;
        if width != cols {
            let mut wide = room(units.len() * width)?;
            for row in padded.chunks_exact(cols) {
                wide.extend_from_slice(row);
                wide.resize(wide.len() + width - cols, 0);
            }
            padded = wide;
        }
        Ok((part, Elements { bytes: padded, element: Element::I8, scales: units, narrow }))
    }
}

/// Inputs and outputs of a part: `x` and `y` with its number.
pub(crate) fn ends(
    number: usize,
    part: &Part,
    rows: usize,
    tokens: u64,
    numbers: Numbers,
    op: Op,
) -> Result<[Spec; 2], Error> {
    let size = |size: usize| {
        u32::try_from(size).map_err(|_| Error::unsupported(format!("a side of {size} is too long for QNN")))
    };
    let tokens =
        u32::try_from(tokens).map_err(|_| Error::invalid(format!("{tokens} tokens are too many")))?;
    let [x, y] = numbers.elements();
    let end = |kind, name: &str, element, width: usize| {
        let width = size(width)?;
        Ok(Spec {
            kind,
            name: format!("{name}{number}"),
            element,
            dims: match op {
                Op::FullyConnected => vec![tokens, width],
                Op::Convolution => vec![1, 1, tokens, width],
            },
            encoding: unit_range(element),
        })
    };
    Ok([end(Kind::Input, "x", x, part.width())?, end(Kind::Output, "y", y, rows)?])
}

/// The name of the graph for a token count.
pub(crate) fn graph_name(tokens: u64) -> String {
    format!("tokens{tokens}")
}

/// Compiles the graph of some parts for `tokens` tokens.
pub(crate) fn compile(
    context: &Arc<Context>,
    parts: &[(Part, Elements)],
    rows: usize,
    tokens: u64,
    numbers: Numbers,
    op: Op,
) -> Result<Graph, Error> {
    let mut graph = context.graph(&graph_name(tokens))?;
    for (number, (part, elements)) in parts.iter().enumerate() {
        let [x, y] = ends(number, part, rows, tokens, numbers, op)?;
        let inputs = x.dims.last().copied().unwrap_or(0);
        let outputs = y.dims.last().copied().unwrap_or(0);
        let x = graph.tensor(x, Vec::new())?;
        let (dims, axis, bytes) = match op {
            Op::FullyConnected => {
                let mut bytes = room(elements.bytes.len())?;
                bytes.extend_from_slice(&elements.bytes);
                (vec![outputs, inputs], 0, bytes)
            }
            Op::Convolution => (vec![1, 1, inputs, outputs], 3, transposed(elements, part.width())?),
        };
        let encoding = match elements.scales.is_empty() {
            true => Encoding::Plain,
            false => Encoding::Axis { axis, scales: elements.scales.clone(), narrow: elements.narrow },
        };
        let name = format!("w{number}of{tokens}");
        let w = Spec { kind: Kind::Static, name, element: elements.element, dims, encoding };
        let w = graph.tensor(w, bytes)?;
        let y = graph.tensor(y, Vec::new())?;
        match op {
            Op::FullyConnected => graph.node("FullyConnected", &[], &[x, w], &[y])?,
            Op::Convolution => convolution(&mut graph, number, &[x, w], y)?,
        }
    }
    graph.finish()
}

/// A convolution with one place per filter.
fn convolution(graph: &mut Builder, number: usize, inputs: &[usize], output: usize) -> Result<(), Error> {
    let mut parameter = |name: &str, dims: &[u32], values: &[u32]| {
        let spec = Spec {
            kind: Kind::Static,
            name: format!("{name}{number}"),
            element: Element::Count,
            dims: dims.to_vec(),
            encoding: Encoding::Plain,
        };
        graph.tensor(spec, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    };
    let stride = parameter("stride", &[2], &[1, 1])?;
    let padding = parameter("pad", &[2, 2], &[0; 4])?;
    let params = [("stride", stride), ("pad_amount", padding)];
    graph.node("Conv2d", &params, inputs, &[output])
}

/// The elements column after column.
fn transposed(elements: &Elements, cols: usize) -> Result<Vec<u8>, Error> {
    let width = elements.element.bytes();
    let mut out = room(elements.bytes.len())?;
    for col in 0..cols {
        for row in elements.bytes.chunks_exact(cols * width) {
            out.extend_from_slice(&row[col * width..][..width]);
        }
    }
    Ok(out)
}
