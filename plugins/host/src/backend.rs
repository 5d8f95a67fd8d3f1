//! A loaded plugin as a backend.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use neuropil_device::{Backend, Device, DeviceError, DeviceInfo, DeviceKind};
use neuropil_plugin_abi as abi;

use crate::border::{Failure, Library, UnitInfo};
use crate::options::Plans;
use crate::slot::Reply;
use crate::{Options, PluginDevice, PluginError};

/// A plugin with its options. The library stays loaded until the process ends.
pub struct PluginBackend {
    library: Arc<Library>,
    options: Arc<Options>,
    name: String,
    /// The program's folder for compiled weights.
    plans: Option<PathBuf>,
}

pub(crate) fn device_info(info: &UnitInfo) -> DeviceInfo {
    let kind = match info.kind {
        abi::NP_KIND_CPU => DeviceKind::Cpu,
        abi::NP_KIND_GPU => DeviceKind::Gpu,
        _ => DeviceKind::Npu,
    };
    let mut out = DeviceInfo::new(info.name.clone(), kind);
    out.vendor = info.vendor.clone();
    out.memory_bytes = info.memory_bytes;
    out.token_buckets = info.token_buckets.clone();
    out
}

impl PluginBackend {
    /// Loads the plugin at `path`, with options as [`Options::parse`] takes them.
    ///
    /// # Errors
    /// One sentence that says why the file is no plugin for this program.
    pub fn load(path: &Path, options: &str) -> Result<PluginBackend, PluginError> {
        let options = Options::parse(options)?;
        Ok(PluginBackend::new(Arc::new(Library::load(path)?), options, None))
    }

    /// The same plugin with other options.
    ///
    /// # Errors
    /// [`PluginError::Option`].
    pub fn with_options(&self, options: &str) -> Result<PluginBackend, PluginError> {
        Ok(PluginBackend::new(self.library.clone(), Options::parse(options)?, self.plans.clone()))
    }

    fn new(library: Arc<Library>, mut options: Options, plans: Option<PathBuf>) -> PluginBackend {
        let name = format!("plugin:{}", library.path.display());
        if let (Plans::Default, Some(folder)) = (&options.plans, &plans) {
            options.plans = Plans::Folder(folder.clone());
        }
        PluginBackend { library, options: Arc::new(options), name, plans }
    }

    /// Keeps weights that units have compiled in `folder`, which is made when it is needed, unless the options name
    /// another one or say `plans=off`. Only for plugins that save and load plans; the folder may be shared by all.
    pub fn plans_in(self, folder: impl Into<PathBuf>) -> PluginBackend {
        PluginBackend::new(self.library, Options::clone(&self.options), Some(folder.into()))
    }

    /// The plugin's own name.
    pub fn plugin_name(&self) -> &str {
        &self.library.name
    }

    /// The plugin's version.
    pub fn version(&self) -> &str {
        &self.library.version
    }

    /// Major and minor version of the interface that the plugin speaks.
    pub fn abi(&self) -> (u32, u32) {
        self.library.abi
    }

    /// The library.
    pub fn path(&self) -> PathBuf {
        self.library.path.clone()
    }

    /// The last things that the plugin had to say, and the host about it, the oldest first: `warning: ...`.
    pub fn messages(&self) -> Vec<String> {
        self.library.messages()
    }

    /// The units that are there, or why that cannot be said.
    ///
    /// # Errors
    /// [`DeviceError::Plugin`], or [`DeviceError::Lost`] when the plugin does not answer within the deadline.
    pub fn units(&self) -> Result<Vec<DeviceInfo>, DeviceError> {
        let deadline = self.options.deadline;
        let silent = || DeviceError::Lost {
            device: self.library.name.clone(),
            reason: format!("probe did not return within {deadline:?}"),
        };
        if !self.library.begin_opening(deadline) {
            return Err(silent());
        }
        let (reply, answer) = Reply::new();
        let (library, options) = (self.library.clone(), self.options.clone());
        let spawned = thread::Builder::new().name("npu probe".into()).spawn(move || {
            let units = library.probe(&options.plugin);
            library.end_opening();
            reply.send(Ok(units));
        });
        if let Err(error) = spawned {
            self.library.end_opening();
            return Err(self.failed(&format!("no thread: {error}"), 0));
        }
        let units: Result<Vec<UnitInfo>, Failure> = answer.recv_timeout(deadline).map_err(|_| silent())??;
        match units {
            Ok(units) => Ok(units.iter().map(device_info).collect()),
            Err(failure) => Err(self.failed(&failure.text, failure.vendor_code)),
        }
    }

    fn failed(&self, text: &str, code: i64) -> DeviceError {
        DeviceError::Plugin { plugin: self.library.name.clone(), code, text: text.into() }
    }

    /// Opens unit `index` and tests it.
    ///
    /// # Errors
    /// As [`Backend::open`].
    pub fn open_unit(&self, index: usize) -> Result<Arc<PluginDevice>, DeviceError> {
        PluginDevice::open(&self.library, index, &self.options).map(Arc::new)
    }
}

impl Backend for PluginBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn probe(&self) -> Vec<DeviceInfo> {
        self.units().unwrap_or_default()
    }

    fn open(&self, index: usize) -> Result<Arc<dyn Device>, DeviceError> {
        if index >= self.units()?.len() {
            return Err(DeviceError::NoSuchDevice { name: self.name.clone(), index });
        }
        Ok(self.open_unit(index)?)
    }
}
