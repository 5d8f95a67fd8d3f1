//! `devices`: the units that are there, and what each says it can do.

use std::path::Path;

use neuropil::system::Machine;
use neuropil_device::{Backend, DType, Device, DeviceInfo, DeviceKind, OpShape, Stage, Support};
use neuropil_plugin_host::{Description, Disabled, PluginBackend};
use serde_json::{Value, json};

use crate::args::{self, Unit};
use crate::error::{CliError, one_line};
use crate::{engine, memory, output, units};

/// Rows and columns of the matrices that a unit is asked about; a multiple of every block.
const SIDE: usize = 1024;

/// Flags of `devices`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  neuropil devices --json
  neuropil devices --device cpu,plugin:./libmy_npu.so

An entry of supports is {\"op\",\"dtype\",\"how\"}: how is native, or emulated where it works by a detour. An entry of
disabled is {\"op\",\"reason\"}. A unit of a plugin has \"plugin\" besides: the library, its versions, and how far off its
results were when it was tested.")]
pub struct Args {
    /// List these units alone: cpu, or plugin:PATH for those of a library or of all libraries in a folder
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "cpu", value_parser = args::unit)]
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
    /// Of a plugin.
    plugin: Option<Description>,
}

/// Runs the verb.
pub fn run(args: &Args) -> Result<(), CliError> {
    let mut units = Vec::new();
    for unit in &args.device {
        match unit {
            Unit::Cpu => list(&engine::cpu(0)?, &mut units),
            Unit::Plugin { path, options } => {
                for (path, found) in units::plugins(path) {
                    match found.and_then(|()| units::plugin(&path, options)) {
                        Ok((backend, _)) => list_plugin(&backend, &mut units),
                        Err(reason) => units.push(missing(&path, reason)),
                    }
                }
            }
        }
    }
    if args.json {
        return output::json(&units.iter().map(Listed::json).collect());
    }
    output::text(&units.iter().map(Listed::text).collect::<String>())
}

fn list(backend: &dyn Backend, units: &mut Vec<Listed>) {
    for (index, info) in backend.probe().into_iter().enumerate() {
        units.push(match backend.open(index) {
            Ok(device) => Listed::new(info, backend.name(), Ok(capabilities(&*device))),
            Err(error) => Listed::new(info, backend.name(), Err(error.to_string())),
        });
    }
}

fn list_plugin(backend: &PluginBackend, units: &mut Vec<Listed>) {
    let found = match backend.units() {
        Ok(found) => found,
        Err(error) => return units.push(missing(&backend.path(), error.to_string())),
    };
    if found.is_empty() {
        units.push(missing(&backend.path(), "the plugin finds no unit".into()));
    }
    for (index, info) in found.into_iter().enumerate() {
        units.push(match backend.open_unit(index) {
            Ok(device) => {
                let mut listed = Listed::new(info, backend.name(), Ok(capabilities(&*device)));
                let description = device.describe();
                let off = |no: &Disabled| (no.op.clone(), no.reason.clone());
                listed.disabled.extend(description.disabled.iter().map(off));
                listed.plugin = Some(description.clone());
                listed
            }
            Err(error) => Listed::new(info, backend.name(), Err(error.to_string())),
        });
    }
}

/// A plugin that cannot be used at all.
fn missing(path: &Path, reason: String) -> Listed {
    let info = DeviceInfo::new(path.display().to_string(), DeviceKind::Npu);
    Listed::new(info, &format!("plugin:{}", path.display()), Err(reason))
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
    /// A unit that can do something, or cannot be opened.
    fn new(info: DeviceInfo, backend: &str, capabilities: Result<Capabilities, String>) -> Listed {
        let (supports, disabled) =
            capabilities.unwrap_or_else(|reason| (Vec::new(), vec![("all".to_owned(), reason)]));
        Listed {
            name: info.name,
            backend: backend.to_owned(),
            kind: info.kind.name(),
            // The CPU's memory is the machine's.
            memory_bytes: match (info.memory_bytes, info.kind) {
                (0, DeviceKind::Cpu) => Machine::this().total().unwrap_or(0),
                (bytes, _) => bytes,
            },
            threads: info.threads,
            supports,
            disabled,
            plugin: None,
        }
    }

    fn json(&self) -> Value {
        let supports =
            self.supports.iter().map(|(op, dtype, how)| json!({ "op": op, "dtype": dtype, "how": how }));
        let disabled = self.disabled.iter().map(|(op, reason)| json!({ "op": op, "reason": reason }));
        let mut unit = json!({
            "name": self.name,
            "backend": self.backend,
            "kind": self.kind,
            "memory_bytes": self.memory_bytes,
            "threads": self.threads,
            "supports": supports.collect::<Vec<_>>(),
            "disabled": disabled.collect::<Vec<_>>(),
        });
        if let Some(plugin) = &self.plugin {
            let (major, minor) = plugin.abi;
            unit["plugin"] = json!({
                "name": plugin.plugin,
                "version": plugin.version,
                "abi": format!("{major}.{minor}"),
                "path": plugin.path.display().to_string(),
                "vendor": plugin.vendor,
                "driver": plugin.driver,
                "token_buckets": plugin.token_buckets,
                "tested": plugin.supports,
            });
        }
        unit
    }

    fn text(&self) -> String {
        let memory = match self.memory_bytes {
            0 => String::new(),
            bytes => format!(", {}", memory::shown(bytes)),
        };
        let mut text = format!("{}: {}{memory}\n", self.backend, one_line(&self.name));
        if let Some(plugin) = &self.plugin {
            text += &format!("  plugin {} {}", plugin.plugin, plugin.version);
            text += &format!(", interface {}.{}", plugin.abi.0, plugin.abi.1);
            match plugin.driver.as_str() {
                "" => text += "\n",
                driver => text += &format!(", driver {}\n", one_line(driver)),
            }
            if !plugin.supports.is_empty() {
                text += &format!("  tested: {}\n", plugin.supports.join(", "));
            }
        }
        for how in ["native", "emulated"] {
            for op in ["matmul", "ffn"] {
                let types: Vec<&str> =
                    self.supports.iter().filter(|s| s.0 == op && s.2 == how).map(|s| s.1).collect();
                if !types.is_empty() {
                    text += &format!("  {op:<6} {how}: {}\n", types.join(" "));
                }
            }
        }
        // One line for all operations that have the same reason.
        let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for (op, reason) in &self.disabled {
            match reasons.iter_mut().find(|(known, _)| known == reason) {
                Some((_, ops)) if ops.contains(&op.as_str()) => {}
                Some((_, ops)) => ops.push(op),
                None => reasons.push((reason, vec![op])),
            }
        }
        for (reason, ops) in reasons {
            text += &format!("  {}: no, {}\n", ops.join(", "), one_line(reason));
        }
        text
    }
}
