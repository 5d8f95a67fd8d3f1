//! JSON as Python's `json.dumps` writes it, which is what chat templates were written against: a space after `,` and
//! `:`, no escaping for HTML, non-ASCII characters kept unless asked otherwise.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// The filter `tojson(indent=None, ensure_ascii=False, sort_keys=False)`.
pub(super) fn filter(
    state: &State,
    value: &Value,
    indent: Option<Value>,
    options: Kwargs,
) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<Value>>("indent")?,
    };
    let indent = indent.filter(|value| !value.is_none()).map(usize::try_from).transpose()?;
    let ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut writer = Writer { out: String::new(), indent, ascii, sorted };
    writer.value(state, value, 0)?;
    Ok(Value::from_safe_string(writer.out))
}

struct Writer {
    out: String,
    indent: Option<usize>,
    ascii: bool,
    sorted: bool,
}

/// Deeper values are refused before they could use up the stack.
const DEEPEST: usize = 100;

impl Writer {
    fn value(&mut self, state: &State, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEEPEST {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: the value is nested too deeply"));
        }
        state.consume_fuel(1)?;
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&value.to_string()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', ']', items.len(), depth, |writer, at| {
                    writer.value(state, &items[at], depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.list('{', '}', keys.len(), depth, |writer, at| {
                    writer.string(&keys[at].to_string());
                    writer.out.push_str(": ");
                    writer.value(state, &value.get_item(&keys[at])?, depth + 1)
                })?;
            }
            _ => self.string(&value.to_string()),
        }
        Ok(())
    }

    fn list(
        &mut self,
        open: char,
        close: char,
        len: usize,
        depth: usize,
        mut item: impl FnMut(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for at in 0..len {
            if at > 0 {
                self.out.push_str(if self.indent.is_some() { "," } else { ", " });
            }
            self.line(depth + 1);
            item(self, at)?;
        }
        if len > 0 {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent.min(64) * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{C}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}
