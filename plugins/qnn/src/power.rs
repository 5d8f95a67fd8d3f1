//! How fast the DSP runs while a unit is open: a vote that the system may or may not follow.
//!
//! A vote is made through functions of the HTP backend that have no name. They are called only for backend versions for
//! which the layout of a vote is known, and a refusal is told and changes nothing.

use std::sync::Arc;

use neuropil_plugin_sdk::Error;

use crate::abi::{Code, HtpInfrastructure, PowerConfig};
use crate::library::{Backend, Vendor};
use crate::settings::Power;

/// Backend API minors of HTP 5 for which votes were made.
const KNOWN: std::ops::RangeInclusive<u32> = 47..=51;

/// `kind` of the infrastructure that has power functions.
const HTP_POWER: u32 = 0;

/// Options of votes.
const DCVS: u32 = 1;
const CONTROL_LATENCY: u32 = 2;
const POLLING_TIME: u32 = 3;

type CreateFn = unsafe extern "C" fn(u32, u32, *mut u32) -> Code;
type DestroyFn = unsafe extern "C" fn(u32) -> Code;
type SetFn = unsafe extern "C" fn(u32, *const *const PowerConfig) -> Code;

/// A vote; taken back when it is dropped.
pub(crate) struct Vote {
    id: u32,
    destroy: DestroyFn,
    set: SetFn,
    vendor: Arc<Vendor>,
}

/// Corners of voltage.
const CORNER_SVS2: u32 = 0x30;
const CORNER_NOMINAL: u32 = 0x60;
const CORNER_MAX: u32 = 0xa0;

/// Modes of DCVS.
const PERFORMANCE: u32 = 0x10;
const POWER_SAVER: u32 = 0x4;

/// The words of a DCVS vote: all clocks at one corner.
fn dcvs(id: u32, scaling: bool, mode: u32, latency_us: u32, corner: u32) -> PowerConfig {
    let [set, on] = [1, u32::from(scaling)];
    // Context; scaling; mode; latency of sleep; no ban on sleep; the bus and the core, each least, target and most.
    let words =
        [id, set, on, mode, set, latency_us, 0, 0, set, corner, corner, corner, set, corner, corner, corner];
    PowerConfig { option: DCVS, words }
}

fn single(option: u32, value: u32) -> PowerConfig {
    let mut words = [0; 16];
    words[0] = value;
    PowerConfig { option, words }
}

impl Vote {
    /// Votes, if `power` is no default.
    pub fn new(vendor: &Arc<Vendor>, power: Power) -> Result<Option<Vote>, Error> {
        if power == Power::Default || vendor.backend != Backend::Htp {
            return Ok(None);
        }
        let refuse = |why: &str| Error::unsupported(format!("option power: no vote was made: {why}"));
        if !KNOWN.contains(&vendor.versions[1].minor) {
            return Err(refuse(&format!("how {} takes one is not known here", vendor.describe())));
        }
        let mut found = std::ptr::null();
        // SAFETY: the function writes a pointer to a struct of the library's own, which stays.
        let code = vendor.call(|functions| functions.infrastructure.map(|get| unsafe { get(&mut found) }));
        let code = code.ok_or_else(|| refuse("the library has no infrastructure"))?;
        vendor.check(code, "give its infrastructure")?;
        let found: *const HtpInfrastructure = found.cast();
        // SAFETY: the pointer is that of the library, and the struct of these versions is this.
        let parts = unsafe { found.as_ref() }.filter(|found| found.kind == HTP_POWER);
        let parts = parts.ok_or_else(|| refuse("the infrastructure is of another kind"))?;
        if [parts.create_power, parts.destroy_power, parts.set_power].iter().any(|entry| entry.is_null()) {
            return Err(refuse("the infrastructure lacks functions"));
        }
        // SAFETY: the entries are not NULL and have these types in these versions.
        let (create, destroy, set) = unsafe {
            (
                std::mem::transmute::<*const std::ffi::c_void, CreateFn>(parts.create_power),
                std::mem::transmute::<*const std::ffi::c_void, DestroyFn>(parts.destroy_power),
                std::mem::transmute::<*const std::ffi::c_void, SetFn>(parts.set_power),
            )
        };
        let mut id = 0;
        // SAFETY: the first device and core; the function writes a number.
        let code = vendor.call(|_| unsafe { create(0, 0, &mut id) });
        vendor.check(code, "begin a vote for power")?;
        let vote = Vote { id, destroy, set, vendor: vendor.clone() };
        let votes = match power {
            Power::Burst => vec![
                dcvs(id, false, PERFORMANCE, 40, CORNER_MAX),
                single(CONTROL_LATENCY, 100),
                single(POLLING_TIME, 9999),
            ],
            _ => vec![dcvs(id, true, PERFORMANCE, 1000, CORNER_NOMINAL), single(CONTROL_LATENCY, 100)],
        };
        vendor.check(vote.cast(&votes), "vote for power")?;
        Ok(Some(vote))
    }

    fn cast(&self, votes: &[PowerConfig]) -> Code {
        let mut list: Vec<*const PowerConfig> = votes.iter().map(|vote| &raw const *vote).collect();
        list.push(std::ptr::null());
        // SAFETY: the list ends with NULL, and all that it points to lives until the call returns.
        self.vendor.call(|_| unsafe { (self.set)(self.id, list.as_ptr()) })
    }
}

impl Drop for Vote {
    fn drop(&mut self) {
        // A refusal leaves nothing to do.
        self.cast(&[dcvs(self.id, true, POWER_SAVER, 2000, CORNER_SVS2)]);
        // SAFETY: the number is that of the vote, which ends here.
        self.vendor.call(|_| unsafe { (self.destroy)(self.id) });
    }
}
