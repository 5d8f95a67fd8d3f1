//! From the names of `--device` to open units.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use neuropil::engine::EngineBuilder;
use neuropil_cpu::CpuBackend;
use neuropil_device::Device;
use neuropil_plugin_host::{Options, PluginBackend, PluginDevice, find_plugins, probe_in_child};

use crate::args::Unit;
use crate::error::{CliError, Exit};
use crate::{cache, output};

/// What `--device` names, opened.
pub struct Units {
    cpu: CpuBackend,
    /// In order; the processor is `None`.
    order: Vec<Option<Arc<PluginDevice>>>,
    /// The plugins of the units, in the same order.
    backends: Vec<PluginBackend>,
    /// What could not be opened: its name and the reason.
    missing: Vec<(String, String)>,
}

impl Units {
    /// Opens the units. The processor comes last if it is not named: something must take what the others do not.
    /// Another unit that cannot be opened is left out with a note, or an error if `strict`.
    pub fn open(
        names: &[Unit],
        cpu: CpuBackend,
        strict: bool,
        cache_dir: Option<&Path>,
    ) -> Result<Units, CliError> {
        let (mut order, mut backends, mut missing) = (Vec::new(), Vec::new(), Vec::new());
        for name in names {
            let Unit::Plugin { path, options } = name else {
                order.push(None);
                continue;
            };
            Options::parse(options).map_err(|error| CliError::new(Exit::Usage, error))?;
            for (path, opened) in plugins(path) {
                let opened = opened.and_then(|()| plugin(&path, options));
                let opened = opened.and_then(|(backend, unit)| {
                    // Without a directory nothing is kept, which costs time alone.
                    let backend = match cache::directory(cache_dir) {
                        Ok(directory) => backend.plans_in(directory.join("plans")),
                        Err(_) => backend,
                    };
                    open_unit(&backend, unit).map(|device| (backend, device))
                });
                match opened {
                    Ok((backend, device)) => {
                        order.push(Some(device));
                        backends.push(backend);
                    }
                    Err(reason) if strict => return Err(CliError::new(Exit::Device, reason)),
                    Err(reason) => {
                        output::note(format!("{reason}; going on without it"));
                        missing.push((path.display().to_string(), reason));
                    }
                }
            }
        }
        if !names.contains(&Unit::Cpu) {
            order.push(None);
        }
        Ok(Units { cpu, order, backends, missing })
    }

    /// How many could not be opened.
    pub fn missing(&self) -> usize {
        self.missing.len()
    }

    /// Tells the builder.
    pub fn apply<'a>(
        &self,
        mut builder: EngineBuilder<'a>,
    ) -> Result<EngineBuilder<'a>, neuropil::engine::EngineError> {
        for unit in &self.order {
            builder = match unit {
                None => builder.backend(&self.cpu)?,
                Some(device) => builder.device(device.clone() as Arc<dyn Device>),
            };
        }
        for (name, reason) in &self.missing {
            builder = builder.missing(name, reason);
        }
        Ok(builder)
    }
}

impl Drop for Units {
    /// Passes on what plugins warned of while the model was loaded.
    fn drop(&mut self) {
        let said = self.backends.iter().flat_map(PluginBackend::messages);
        said.filter(|said| !said.starts_with("info") && !said.starts_with("debug")).for_each(output::note);
    }
}

/// Libraries with what is wrong with their folder.
type Found = Vec<(PathBuf, Result<(), String>)>;

/// The library, or those of a folder.
pub fn plugins(path: &Path) -> Found {
    if !path.is_dir() {
        return vec![(path.into(), Ok(()))];
    }
    match find_plugins(path) {
        Ok(found) if !found.is_empty() => found.into_iter().map(|path| (path, Ok(()))).collect(),
        Ok(_) => vec![(path.into(), Err(format!("plugin folder {} has no library in it", path.display())))],
        Err(error) => vec![(path.into(), Err(error.to_string()))],
    }
}

/// Loads a plugin, after a process of its own did; and the number of the unit to use.
pub fn plugin(path: &Path, text: &str) -> Result<(PluginBackend, usize), String> {
    let options = Options::parse(text).map_err(|error| error.to_string())?;
    if options.probe {
        let program = std::env::current_exe().map_err(|error| format!("the program's path: {error}"))?;
        let mut command = Command::new(program);
        command.args(["plugin", "probe", "--"]).arg(path).arg(text);
        probe_in_child(path, command, &options).map_err(|error| error.to_string())?;
    }
    let backend = PluginBackend::load(path, text).map_err(|error| error.to_string())?;
    Ok((backend, options.unit))
}

/// Opens one unit of a plugin.
pub fn open_unit(backend: &PluginBackend, unit: usize) -> Result<Arc<PluginDevice>, String> {
    let count = backend.units().map_err(|error| error.to_string())?.len();
    if unit >= count {
        return Err(format!(
            "plugin {} has no unit {unit}: it has {count}, counted from 0",
            backend.path().display()
        ));
    }
    backend.open_unit(unit).map_err(|error| error.to_string())
}
