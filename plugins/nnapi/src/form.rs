//! Which operation of NNAPI computes a scheme, and what it cannot.
//!
//! ```text
//!   form   x, y                    weight                          operation
//!   F32    F32 [tokens, ..]        F32 [rows, cols]                FULLY_CONNECTED
//!   F16    F16 [tokens, ..]        F16 [rows, cols]                FULLY_CONNECTED
//!   Int8   8 bits [1, 1, tokens, ..]   int8 [rows, 1, 1, cols], a scale per row   CONV_2D of 1 x 1
//! ```
//!
//! FULLY_CONNECTED has no scales per row, hence the convolution. There is no type of 4 bits, and none with a scale per
//! group of columns.

use std::sync::Arc;

use neuropil_plugin_sdk::{Error, Scheme};

use crate::codes::{FUSE_NONE, LEVEL_SIGNED, Operation, PADDING_VALID, Type};
use crate::library::Runtime;
use crate::memory::{DriverMemory, Place};
use crate::rows::{INPUT_SCALE, OUTPUT_SCALE};
use crate::runtime::Model;
use crate::settings::{Precision, Settings};

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Form {
    F32,
    F16,
    Int8 {
        /// Activations are int8, and not uint8 around 128 as before feature level 30.
        signed: bool,
    },
}

/// Columns of 8-bit codes whose sum fits 32 bits.
const MOST_INT8_COLS: usize = 1 << 17;

/// Constants begin at multiples of this.
const ALIGNMENT: usize = 64;

impl Form {
    /// The form of a scheme on a device of a feature level; and whether codes are widened for it.
    pub fn of(scheme: Scheme, settings: &Settings, level: i64) -> Result<(Form, bool), Error> {
        let floats = |own| match settings.precision.unwrap_or(own) {
            Precision::F32 => Form::F32,
            Precision::F16 => Form::F16,
        };
        let reason = match scheme {
            Scheme::F32 => return Ok((floats(Precision::F32), false)),
            Scheme::F16 => return Ok((floats(Precision::F16), false)),
            Scheme::Channel8 if settings.int8 => {
                return Ok((Form::Int8 { signed: level >= LEVEL_SIGNED }, false));
            }
            _ if settings.widen => return Ok((floats(Precision::F16), true)),
            // Not unasked: the errors are ten times those of halves.
            Scheme::Channel8 => "NNAPI multiplies them by 8-bit activations only, which int8=on allows",
            Scheme::Group8 => "NNAPI has no scales per group of columns",
            _ => "NNAPI has no type of 4 bits",
        };
        let name = scheme.name();
        Err(Error::unsupported(format!("{name}: {reason}; with widen=on such weights become floats")))
    }

    /// The operation by its name.
    pub fn name(self) -> &'static str {
        match self {
            Form::F32 => "FULLY_CONNECTED of F32",
            Form::F16 => "FULLY_CONNECTED of F16",
            Form::Int8 { .. } => "CONV_2D of per-channel int8",
        }
    }

    /// Bytes of a value of x or y, or of an element of the weight.
    pub fn value_bytes(self) -> usize {
        match self {
            Form::F32 => 4,
            Form::F16 => 2,
            Form::Int8 { .. } => 1,
        }
    }
}

/// A product of fixed shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Product {
    pub form: Form,
    pub rows: usize,
    pub cols: usize,
    pub tokens: usize,
}

/// Where the constants of a product lie in their memory: first the weight, then a bias of zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub weight_bytes: usize,
    bias_at: usize,
    bias_bytes: usize,
    pub bytes: usize,
}

impl Product {
    /// The layout, unless something is larger than NNAPI counts.
    pub fn layout(&self) -> Result<Layout, Error> {
        let Product { form, rows, cols, tokens } = *self;
        let refuse = || {
            let name = form.name();
            Error::unsupported(format!(
                "a {name} of {rows} rows, {cols} columns and {tokens} tokens is too large"
            ))
        };
        // Sizes of operands are counted in 32 bits.
        let bytes = |a: usize, b: usize, each: usize| {
            let bytes = a.checked_mul(b).and_then(|count| count.checked_mul(each));
            bytes.filter(|bytes| (1..=u32::MAX as usize).contains(bytes)).ok_or_else(refuse)
        };
        if matches!(form, Form::Int8 { .. }) && cols > MOST_INT8_COLS {
            return Err(refuse());
        }
        let weight_bytes = bytes(rows, cols, form.value_bytes())?;
        bytes(tokens, cols, form.value_bytes())?;
        bytes(tokens, rows, form.value_bytes())?;
        // The bias of codes is of 32 bits.
        let bias_bytes = bytes(rows, 1, form.value_bytes().max(if form == Form::F16 { 2 } else { 4 }))?;
        let bias_at = weight_bytes.next_multiple_of(ALIGNMENT);
        Ok(Layout { weight_bytes, bias_at, bias_bytes, bytes: bias_at + bias_bytes })
    }

    /// The graph over constants that lie as `layout` says. `scales` has one per row for codes, and none for floats.
    pub fn model(
        &self,
        runtime: &Arc<Runtime>,
        constants: &Arc<DriverMemory>,
        scales: &[f32],
        relaxed: bool,
    ) -> Result<Model, Error> {
        let layout = self.layout()?;
        let weight_place = Place::new(constants, 0, layout.weight_bytes)?;
        let bias_place = Place::new(constants, layout.bias_at, layout.bias_bytes)?;
        // The layout has checked that these fit.
        let (rows, cols, tokens) = (self.rows as u32, self.cols as u32, self.tokens as u32);
        let mut model = Model::new(runtime)?;
        let (x, y) = match self.form {
            Form::F32 | Form::F16 => {
                let tensor = if self.form == Form::F32 { Type::TensorFloat32 } else { Type::TensorFloat16 };
                let x = model.operand(tensor, &[tokens, cols], 0.0, 0)?;
                let weight = model.operand(tensor, &[rows, cols], 0.0, 0)?;
                let bias = model.operand(tensor, &[rows], 0.0, 0)?;
                let fuse = model.number(FUSE_NONE)?;
                let y = model.operand(tensor, &[tokens, rows], 0.0, 0)?;
                model.set_constant(weight, &weight_place)?;
                model.set_constant(bias, &bias_place)?;
                model.operation(Operation::FullyConnected, &[x, weight, bias, fuse], y)?;
                (x, y)
            }
            Form::Int8 { signed } => {
                let (tensor, zero) = match signed {
                    true => (Type::TensorQuant8AsymmSigned, 0),
                    false => (Type::TensorQuant8Asymm, 128),
                };
                let x = model.operand(tensor, &[1, 1, tokens, cols], INPUT_SCALE, zero)?;
                let weight = model.operand(Type::TensorQuant8SymmPerChannel, &[rows, 1, 1, cols], 0.0, 0)?;
                // Its scales are those of the weight times that of the input.
                let bias = model.operand(Type::TensorInt32, &[rows], 0.0, 0)?;
                let padding = model.number(PADDING_VALID)?;
                let (step_x, step_y) = (model.number(1)?, model.number(1)?);
                let fuse = model.number(FUSE_NONE)?;
                let y = model.operand(tensor, &[1, 1, tokens, rows], OUTPUT_SCALE, zero)?;
                model.set_channel_scales(weight, scales)?;
                model.set_constant(weight, &weight_place)?;
                model.set_constant(bias, &bias_place)?;
                model.operation(Operation::Conv2d, &[x, weight, bias, padding, step_x, step_y, fuse], y)?;
                (x, y)
            }
        };
        model.finish(x, y, relaxed && self.form == Form::F32)?;
        Ok(model)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Settings {
        Settings::new(&pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect())
            .unwrap()
    }

    #[test]
    fn each_scheme_has_its_form_or_a_reason() {
        let plain = settings(&[]);
        let int8 = settings(&[("int8", "on"), ("widen", "on")]);
        assert_eq!(Form::of(Scheme::F32, &plain, 29), Ok((Form::F32, false)));
        assert_eq!(Form::of(Scheme::F16, &plain, 29), Ok((Form::F16, false)));
        assert_eq!(Form::of(Scheme::Channel8, &int8, 29), Ok((Form::Int8 { signed: false }, false)));
        assert_eq!(Form::of(Scheme::Channel8, &int8, 1_000_006), Ok((Form::Int8 { signed: true }, false)));
        let text = |scheme| Form::of(scheme, &plain, 31).unwrap_err().text;
        assert!(text(Scheme::Channel8).contains("int8=on"), "{}", text(Scheme::Channel8));
        assert!(
            text(Scheme::Group8).contains("no scales per group") && text(Scheme::Group8).contains("widen=on")
        );
        for scheme in [Scheme::Group4, Scheme::Group4Min, Scheme::Channel4] {
            assert!(text(scheme).contains("no type of 4 bits"), "{}", text(scheme));
        }
        let f32 = settings(&[("precision", "f32"), ("widen", "on")]);
        for scheme in Scheme::ALL {
            let widened = !matches!(scheme, Scheme::F32 | Scheme::F16);
            assert_eq!(Form::of(scheme, &f32, 31), Ok((Form::F32, widened)));
        }
    }

    #[test]
    fn what_cannot_be_counted_is_refused() {
        let product = |form, rows, cols, tokens| Product { form, rows, cols, tokens }.layout();
        let layout = product(Form::F16, 3, 5, 1).unwrap();
        assert_eq!((layout.weight_bytes, layout.bias_at, layout.bias_bytes, layout.bytes), (30, 64, 6, 70));
        let layout = product(Form::Int8 { signed: true }, 3, 5, 1).unwrap();
        assert_eq!((layout.weight_bytes, layout.bias_bytes), (15, 12));
        for (form, rows, cols, tokens) in [
            (Form::F32, 1 << 15, 1 << 15, 1),
            (Form::F16, usize::MAX, 2, 1),
            (Form::F32, 4, 1 << 20, 1 << 16),
            (Form::F32, 1 << 20, 4, 1 << 16),
            (Form::Int8 { signed: true }, 1, (1 << 17) + 1, 1),
            (Form::F32, 0, 1, 1),
        ] {
            assert!(product(form, rows, cols, tokens).is_err(), "{form:?} {rows} {cols} {tokens}");
        }
    }
}
