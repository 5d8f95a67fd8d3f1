//! The two traits that a plugin implements.

use std::any::Any;
use std::ffi::c_void;

use crate::{
    ClusterJob, DeviceInfo, Error, Log, MatmulJob, Options, Query, Report, Shape, Support, WeightSource,
};

/// A family of units: what `export_plugin!` makes a library of.
pub trait PluginBackend: Send + Sync + Sized + 'static {
    /// The name of the plugin.
    const NAME: &'static str;
    /// Its version: `env!("CARGO_PKG_VERSION")`.
    const VERSION: &'static str;
    /// Its units.
    type Device: PluginDevice;

    /// Called once, before the first `probe` or `open`. Keep `log` to tell the host something.
    fn new(log: Log) -> Self;

    /// The units that are there, in the order of their index. Cheap: it opens none. Refuse keys that you do not know
    /// ([`Options::check`]).
    ///
    /// # Errors
    /// When it cannot be said, such as for a library of the vendor that is not there.
    fn probe(&self, options: &Options) -> Result<Vec<DeviceInfo>, Error>;

    /// Opens a unit.
    ///
    /// # Errors
    /// [`crate::Code::Invalid`] when there is no such unit, or what the driver says.
    fn open(&self, index: usize, options: &Options) -> Result<Self::Device, Error>;
}

/// What a device offers besides [`PluginDevice::matmul`]: the host sees only what is named here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offers {
    /// [`PluginDevice::cluster`].
    pub cluster: bool,
    /// The host hands jobs over and goes on; a thread of the SDK runs them one after the other. Without it the host uses
    /// a thread of its own, which is as good for a unit with a blocking driver.
    pub submit: bool,
    /// [`PluginDevice::cancel`].
    pub cancel: bool,
    /// [`PluginDevice::import`].
    pub import: bool,
    /// [`PluginDevice::save_plan`] and [`PluginDevice::load_plan`].
    pub plans: bool,
}

impl Offers {
    /// Only what is required.
    pub const NONE: Offers =
        Offers { cluster: false, submit: false, cancel: false, import: false, plans: false };
}

/// A weight in the unit's own form, with the memory that it takes there.
#[derive(Debug)]
pub struct Prepared<W> {
    /// The weight.
    pub weight: W,
    /// Bytes that it takes.
    pub bytes: u64,
}

/// One open unit.
///
/// The SDK has checked what arrives here: lengths, shapes, handles, token counts. A panic becomes an error. Without
/// [`DeviceInfo::parallel`] one of `prepare`, `matmul`, `cluster`, `import`, `save_plan` and `load_plan` runs at a time.
pub trait PluginDevice: Send + Sync + Sized + 'static {
    /// A weight in the unit's own form. Dropped when the host gives it back.
    type Weight: Send + Sync + 'static;

    /// What is offered besides `matmul`.
    const OFFERS: Offers = Offers::NONE;

    /// What the unit is. Called once, after it was opened.
    fn info(&self) -> DeviceInfo;

    /// Can it do this? Pure: the same answer for the life of the device.
    ///
    /// # Errors
    /// [`crate::Code::Unsupported`] with the reason.
    fn query(&self, query: &Query) -> Result<Support, Error>;

    /// Packs, uploads or compiles a weight.
    ///
    /// # Errors
    /// As `query`, [`crate::Code::OutOfMemory`], or what the driver says.
    fn prepare(&self, source: &WeightSource<'_>) -> Result<Prepared<Self::Weight>, Error>;

    /// Multiplies; returns when the outputs are there.
    ///
    /// # Errors
    /// What the driver says.
    fn matmul(&self, job: &mut MatmulJob<'_, Self::Weight>) -> Result<Report, Error>;

    /// Runs a stage of a feed-forward; returns when the outputs are there.
    ///
    /// # Errors
    /// What the driver says.
    fn cluster(&self, job: &mut ClusterJob<'_, Self::Weight>) -> Result<Report, Error> {
        let _ = job;
        Err(Error::unsupported("this plugin has no neuron clusters"))
    }

    /// Asks the jobs under way to end soon with [`crate::Code::Cancelled`]. Comes at any time, from any thread.
    fn cancel(&self) {}

    /// Makes host memory reachable for the unit. The memory stays in its place until what is returned is dropped.
    /// The host that neuropil has today gives jobs copies of its own and never calls this.
    ///
    /// # Errors
    /// [`crate::Code::Unsupported`], or what the driver says.
    fn import(&self, region: &Region) -> Result<Box<dyn Any + Send + Sync>, Error> {
        let _ = region;
        Err(Error::unsupported("this plugin imports no memory"))
    }

    /// Writes a weight down, piece by piece; pass errors of `write` on. The SDK adds shape and checksum, and the host
    /// keeps the bytes for the next time that it needs the weight.
    ///
    /// # Errors
    /// Those of `write`, or what the driver says.
    fn save_plan(
        &self,
        weight: &Self::Weight,
        write: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (_, _) = (weight, write);
        Err(Error::unsupported("this plugin saves no plans"))
    }

    /// Makes a weight of what `save_plan` wrote. The bytes are those that it wrote, unless somebody forged them.
    ///
    /// # Errors
    /// Any: the host then prepares the weight anew.
    fn load_plan(&self, plan: &[u8], shape: Shape) -> Result<Prepared<Self::Weight>, Error> {
        let (_, _) = (plan, shape);
        Err(Error::unsupported("this plugin loads no plans"))
    }
}

/// Host memory to import: what the header calls `np_region`. The SDK has checked kind and alignment.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// One of `NP_MEMORY_*`.
    pub kind: u32,
    /// Where it is mapped; NULL for a kind without a pointer.
    pub host: *mut c_void,
    /// An `AHardwareBuffer`, or NULL.
    pub native: *mut c_void,
    /// A file descriptor of the host, or -1. Duplicate it to keep it.
    pub fd: i32,
    /// Bytes from the start of the object behind `fd` or `native`.
    pub offset: usize,
    /// Bytes of the region.
    pub bytes: usize,
}
