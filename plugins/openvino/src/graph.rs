//! Products as graphs in OpenVINO's format of models: a text of layers and edges, and a block of constants.
//!
//! ```text
//!   codes ── Convert f32 ──[ Subtract zeros ]── Multiply scales ──[ Reshape ]──┐
//!                                                                  x ───── MatMul ── y
//! ```
//!
//! OpenVINO knows this form of compressed weights and keeps the codes; other forms it would widen when it compiles.
//! Scales are widened to F32, because the arithmetic of this part is that of their type.

use std::fmt::Write;

use neuropil_plugin_sdk::{Error, GROUP, Matrix, Scheme, f16_at};

/// Constants begin at multiples of this in the block.
const ALIGNMENT: usize = 64;

/// The text of a graph, and the block of constants.
pub(crate) struct Graph {
    pub text: String,
    pub constants: Vec<u8>,
}

/// The type of a value: its name in attributes, and in ports.
#[derive(Clone, Copy)]
struct Type(&'static str, &'static str);

const F32: Type = Type("f32", "FP32");
const F16: Type = Type("f16", "FP16");
const I8: Type = Type("i8", "I8");
const I4: Type = Type("i4", "I4");
const U4: Type = Type("u4", "U4");
const I64: Type = Type("i64", "I64");

/// The output of a layer.
struct Value {
    layer: usize,
    /// Its port: outputs are numbered after inputs.
    port: usize,
    element: Type,
    dims: Vec<i64>,
}

#[derive(Default)]
struct Builder {
    layers: String,
    edges: String,
    count: usize,
    constants: Vec<u8>,
}

impl Builder {
    /// Adds a layer. `what` is its type and version, `data` its attributes.
    fn layer(&mut self, what: &str, data: &str, inputs: &[&Value], element: Type, dims: &[i64]) -> Value {
        let id = self.count;
        self.count += 1;
        let port = |index: usize, element: Type, dims: &[i64]| {
            let dims: String = dims.iter().map(|dim| format!("<dim>{dim}</dim>")).collect();
            format!("<port id=\"{index}\" precision=\"{}\">{dims}</port>", element.1)
        };
        let (kind, version) = what.split_once(' ').unwrap_or((what, "opset1"));
        let layer = format!("<layer id=\"{id}\" name=\"{kind}{id}\" type=\"{kind}\" version=\"{version}\">");
        self.layers.push_str(&layer);
        if kind == "Convert" && inputs.iter().all(|input| input.element.0 == F16.0) {
            // Without this mark the constant is widened before the device sees it; codes need none.
            self.layers += "<rt_info><attribute name=\"decompression\" version=\"0\"/></rt_info>";
        }
        if !data.is_empty() {
            self.layers += &format!("<data {data}/>");
        }
        if !inputs.is_empty() {
            let ports =
                inputs.iter().enumerate().map(|(index, input)| port(index, input.element, &input.dims));
            self.layers += &format!("<input>{}</input>", ports.collect::<String>());
        }
        if kind != "Result" {
            self.layers += &format!("<output>{}</output>", port(inputs.len(), element, dims));
        }
        self.layers += "</layer>\n";
        for (index, input) in inputs.iter().enumerate() {
            self.edges += &format!(
                "<edge from-layer=\"{}\" from-port=\"{}\" to-layer=\"{id}\" to-port=\"{index}\"/>\n",
                input.layer, input.port
            );
        }
        Value { layer: id, port: inputs.len(), element, dims: dims.to_vec() }
    }

    /// Adds a constant; `write` appends its bytes to the block.
    fn constant(&mut self, element: Type, dims: &[i64], write: impl FnOnce(&mut Vec<u8>)) -> Value {
        let offset = self.constants.len().next_multiple_of(ALIGNMENT);
        self.constants.resize(offset, 0);
        write(&mut self.constants);
        let size = self.constants.len() - offset;
        let data = format!(
            "element_type=\"{}\" shape=\"{}\" offset=\"{offset}\" size=\"{size}\"",
            element.0,
            list(dims)
        );
        self.layer("Const", &data, &[], element, dims)
    }

    fn convert(&mut self, value: &Value) -> Value {
        self.layer("Convert", "destination_type=\"f32\"", &[value], F32, &value.dims)
    }

    fn combine(&mut self, kind: &str, a: &Value, b: &Value) -> Value {
        self.layer(kind, "auto_broadcast=\"numpy\"", &[a, b], F32, &a.dims)
    }

    /// The matrix as F32 values `[rows, cols]`.
    fn matrix(&mut self, matrix: &Matrix<'_>) -> Value {
        let (rows, cols, group) = (matrix.rows as i64, matrix.cols as i64, GROUP as i64);
        let grouped = [rows, cols / group, group];
        let of_groups = [rows, cols / group, 1];
        let (element, dims) = match matrix.scheme {
            Scheme::F16 => (F16, &[rows, cols][..]),
            Scheme::Group8 => (I8, &grouped[..]),
            Scheme::Group4 => (I4, &grouped[..]),
            Scheme::Group4Min => (U4, &grouped[..]),
            Scheme::Channel8 => (I8, &[rows, cols][..]),
            Scheme::Channel4 => (I4, &[rows, cols][..]),
            _ => return self.constant(F32, &[rows, cols], |block| block.extend_from_slice(matrix.data)),
        };
        let affine = (matrix.scheme == Scheme::Group4Min).then(|| Affine::of(matrix));
        let codes = affine.as_ref().map_or(matrix.data, |affine| &affine.codes);
        let codes = self.constant(element, dims, |block| block.extend_from_slice(codes));
        let wide = self.convert(&codes);
        let scaled = match matrix.scheme {
            Scheme::F16 => return wide,
            Scheme::Channel8 | Scheme::Channel4 => {
                let scales = self.constant(F32, &[rows, 1], |block| block.extend_from_slice(matrix.scales));
                return self.combine("Multiply", &wide, &scales);
            }
            _ => match affine {
                Some(affine) => {
                    let zeros = self.constant(F32, &of_groups, |block| extend(block, &affine.zeros));
                    let scales = self.constant(F32, &of_groups, |block| extend(block, &affine.scales));
                    let centred = self.combine("Subtract", &wide, &zeros);
                    self.combine("Multiply", &centred, &scales)
                }
                None => {
                    let scales = self.constant(F32, &of_groups, |block| {
                        let count = matrix.scales.len() / 2;
                        block.extend((0..count).flat_map(|i| f16_at(matrix.scales, i).to_le_bytes()));
                    });
                    self.combine("Multiply", &wide, &scales)
                }
            },
        };
        let shape = self.constant(I64, &[2], |block| {
            block.extend([rows, cols].into_iter().flat_map(i64::to_le_bytes));
        });
        self.layer("Reshape", "special_zero=\"false\"", &[&scaled, &shape], F32, &[rows, cols])
    }
}

/// Codes with a minimum, in the form that OpenVINO knows: `scale * code + min` is `scale * (code - zero)`.
struct Affine {
    codes: Vec<u8>,
    scales: Vec<f32>,
    zeros: Vec<f32>,
}

impl Affine {
    fn of(matrix: &Matrix<'_>) -> Affine {
        let mut affine = Affine { codes: matrix.data.to_vec(), scales: Vec::new(), zeros: Vec::new() };
        for (index, codes) in affine.codes.chunks_exact_mut(GROUP / 2).enumerate() {
            let (mut scale, min) = (f16_at(matrix.scales, index), f16_at(matrix.mins, index));
            let mut zero = -min / scale;
            if !zero.is_finite() {
                // All values are the minimum: once that.
                codes.fill(0x11);
                (scale, zero) = (min, 0.0);
            }
            affine.scales.push(scale);
            affine.zeros.push(zero);
        }
        affine
    }
}

fn extend(block: &mut Vec<u8>, values: &[f32]) {
    block.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

fn list(dims: &[i64]) -> String {
    dims.iter().map(i64::to_string).collect::<Vec<_>>().join(",")
}

/// The graph of `x * matrix` for `tokens` rows of `x`, or for any number.
pub(crate) fn product(matrix: &Matrix<'_>, tokens: Option<u64>) -> Result<Graph, Error> {
    let (rows, cols) = (matrix.rows as i64, matrix.cols as i64);
    let tokens = match tokens {
        None => -1,
        Some(tokens) => {
            i64::try_from(tokens).map_err(|_| Error::invalid(format!("{tokens} tokens are too many")))?
        }
    };
    let mut builder = Builder::default();
    builder
        .constants
        .try_reserve_exact(matrix.data.len() + 4 * matrix.scales.len() + 4 * ALIGNMENT)
        .map_err(|_| Error::out_of_memory("there is no memory for a weight"))?;
    let shape = if tokens < 0 { format!("?,{cols}") } else { format!("{tokens},{cols}") };
    let data = format!("shape=\"{shape}\" element_type=\"f32\"");
    let x = builder.layer("Parameter", &data, &[], F32, &[tokens, cols]);
    let w = builder.matrix(matrix);
    let data = "transpose_a=\"false\" transpose_b=\"true\"";
    let y = builder.layer("MatMul", data, &[&x, &w], F32, &[tokens, rows]);
    builder.layer("Result", "", &[&y], F32, &[]);
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write!(
        text,
        "<?xml version=\"1.0\"?>\n<net name=\"neuropil\" version=\"11\">\n<layers>\n{}</layers>\n<edges>\n{}</edges>\n\
         </net>\n",
        builder.layers, builder.edges
    );
    Ok(Graph { text, constants: builder.constants })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix<'a>(
        scheme: Scheme,
        cols: usize,
        data: &'a [u8],
        scales: &'a [u8],
        mins: &'a [u8],
    ) -> Matrix<'a> {
        Matrix { scheme, rows: 1, cols, data, scales, mins, outliers: None }
    }

    #[test]
    fn a_graph_names_its_constants_where_they_lie() {
        let scale = 0.5f32.to_le_bytes();
        let graph = product(&matrix(Scheme::Channel8, 3, &[1, 2, 3], &scale, &[]), None).unwrap();
        assert!(graph.text.contains("element_type=\"i8\" shape=\"1,3\" offset=\"0\" size=\"3\""));
        assert!(graph.text.contains("element_type=\"f32\" shape=\"1,1\" offset=\"64\" size=\"4\""));
        assert!(graph.text.contains("<dim>-1</dim><dim>3</dim>"));
        assert_eq!((&graph.constants[..3], &graph.constants[64..]), (&[1, 2, 3][..], &scale[..]));
        let graph = product(&matrix(Scheme::F32, 1, &scale, &[], &[]), Some(8)).unwrap();
        assert!(graph.text.contains("shape=\"8,1\""), "{}", graph.text);
    }

    #[test]
    fn a_group_of_one_value_keeps_it() {
        let codes = [0x21; 32];
        // Scales 2 and 0, minima 3 and 5, as halves.
        let (scales, mins) = ([0x00, 0x40, 0, 0], [0x00, 0x42, 0x00, 0x45]);
        let affine = Affine::of(&matrix(Scheme::Group4Min, 64, &codes, &scales, &mins));
        assert_eq!((&affine.scales[..], &affine.zeros[..]), (&[2.0, 5.0][..], &[-1.5, 0.0][..]));
        assert_eq!((affine.codes[0], affine.codes[16]), (0x21, 0x11));
    }
}
