//! `devices`: the units that are there, and what each says it can do.

use neuropil::system::Machine;
use neuropil_device::{Backend, DType, Device, DeviceKind, OpShape, Stage, Support};
use serde_json::{Value, json};

use crate::args::Unit;
use crate::error::{CliError, one_line};
use crate::{engine, memory, output};

/// Rows and columns of the matrices that a unit is asked about; a multiple of every block.
const SIDE: usize = 1024;

/// Flags of `devices`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  neuropil devices --json

An entry of supports is {\"op\",\"dtype\",\"how\"}: how is native, or emulated where it works by a detour. An entry of
disabled is {\"op\",\"reason\"}.")]
pub struct Args {
    /// List these units alone
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "cpu")]
    device: Vec<Unit>,
    /// Print one JSON document, an array of units
    #[arg(long)]
    json: bool,
}

struct Listed {
    name: String,
    backend: String,
    kind: &'static str,
    memory_bytes: u64,
    threads: usize,
    /// Operation, type, how.
    supports: Vec<(&'static str, &'static str, &'static str)>,
    /// Operation, reason.
    disabled: Vec<(String, String)>,
}

/// Runs the verb.
pub fn run(args: &Args) -> Result<(), CliError> {
    let mut units = Vec::new();
    if args.device.contains(&Unit::Cpu) {
        list(&engine::cpu(0)?, &mut units);
    }
    if args.json {
        return output::json(&units.iter().map(Listed::json).collect());
    }
    output::text(&units.iter().map(Listed::text).collect::<String>())
}

fn list(backend: &dyn Backend, units: &mut Vec<Listed>) {
    for (index, info) in backend.probe().into_iter().enumerate() {
        let (supports, disabled) = match backend.open(index) {
            Ok(device) => capabilities(&*device),
            // A unit that cannot be opened is listed with the reason.
            Err(error) => (Vec::new(), vec![("all".to_owned(), error.to_string())]),
        };
        units.push(Listed {
            name: info.name,
            backend: backend.name().to_owned(),
            kind: info.kind.name(),
            // The CPU's memory is the machine's.
            memory_bytes: match (info.memory_bytes, info.kind) {
                (0, DeviceKind::Cpu) => Machine::this().total().unwrap_or(0),
                (bytes, _) => bytes,
            },
            threads: info.threads,
            supports,
            disabled,
        });
    }
}

type Capabilities = (Vec<(&'static str, &'static str, &'static str)>, Vec<(String, String)>);

fn capabilities(device: &dyn Device) -> Capabilities {
    let (mut supports, mut disabled) = (Vec::new(), Vec::new());
    for dtype in DType::ALL {
        let matmul = OpShape::Matmul { dtype, rows: SIDE, cols: SIDE, tokens: 1 };
        let ffn = OpShape::Cluster {
            stage: Stage::Fused,
            dtype,
            down_dtype: dtype,
            neurons: SIDE,
            width: SIDE,
            tokens: 1,
            bundles: false,
        };
        for (op, shape) in [("matmul", matmul), ("ffn", ffn)] {
            match device.supports(&shape) {
                Support::Native => supports.push((op, dtype.name(), "native")),
                Support::Emulated => supports.push((op, dtype.name(), "emulated")),
                Support::No(reason) => disabled.push((format!("{op} {dtype}"), reason)),
            }
        }
    }
    (supports, disabled)
}

impl Listed {
    fn json(&self) -> Value {
        let supports =
            self.supports.iter().map(|(op, dtype, how)| json!({ "op": op, "dtype": dtype, "how": how }));
        let disabled = self.disabled.iter().map(|(op, reason)| json!({ "op": op, "reason": reason }));
        json!({
            "name": self.name,
            "backend": self.backend,
            "kind": self.kind,
            "memory_bytes": self.memory_bytes,
            "threads": self.threads,
            "supports": supports.collect::<Vec<_>>(),
            "disabled": disabled.collect::<Vec<_>>(),
        })
    }

    fn text(&self) -> String {
        let mut text =
            format!("{}: {}, {}\n", self.backend, one_line(&self.name), memory::shown(self.memory_bytes));
        for how in ["native", "emulated"] {
            for op in ["matmul", "ffn"] {
                let types: Vec<&str> =
                    self.supports.iter().filter(|s| s.0 == op && s.2 == how).map(|s| s.1).collect();
                if !types.is_empty() {
                    text += &format!("  {op:<6} {how}: {}\n", types.join(" "));
                }
            }
        }
        for (op, reason) in &self.disabled {
            text += &format!("  {op}: no, {}\n", one_line(reason));
        }
        text
    }
}
