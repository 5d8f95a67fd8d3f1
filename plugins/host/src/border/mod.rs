//! The C functions of a plugin as safe ones. All unsafe code of the host is in this folder.
//!
//! - `library`: from a path to a table that was checked;
//! - `unit`: an open device and its weights;
//! - `plan`: its weights as bytes.
//!
//! A [`Unit`] stays on the thread that opened it, so a plugin gets one call at a time, and it is closed there, after its
//! weights. What the plugin passes is copied before it is looked at; what is passed to the plugin outlives the call.
//! A plugin that writes outside of what it was given cannot be stopped: it runs in this process.

mod library;
mod plan;
mod unit;

use std::ffi::{c_char, c_void};
use std::sync::{Mutex, PoisonError};

use neuropil_plugin_abi::{self as abi, AbiStruct, NpDeviceInfo, NpStatus};

pub(crate) use library::Library;
pub(crate) use unit::{Answer, Canceller, ClusterCall, Parts, Question, Unit, WeightHandle};

/// Bytes of a plugin's text that are kept.
const MOST_TEXT: usize = 4096;
/// Units and buckets that are kept.
const MOST_ITEMS: usize = 1024;
/// Tokens of a bucket at most.
const MOST_TOKENS: u64 = 1 << 20;

/// A call that did not succeed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// `NP_UNSUPPORTED`, ...
    pub code: i32,
    pub vendor_code: i64,
    pub text: String,
}

impl Failure {
    fn new(code: i32, text: impl Into<String>) -> Failure {
        Failure { code, vendor_code: 0, text: text.into() }
    }
}

/// What a plugin says of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnitInfo {
    pub kind: u32,
    pub name: String,
    pub vendor: String,
    pub driver: String,
    /// What a saved plan depends on; empty: it has none.
    pub compatibility: String,
    pub memory_bytes: u64,
    /// Ascending.
    pub token_buckets: Vec<usize>,
}

/// Copies a text of the plugin; what is no UTF-8 is replaced.
///
/// # Safety
/// `from` is NULL or has `len` bytes that can be read.
unsafe fn text(from: *const c_char, len: u64) -> String {
    if from.is_null() {
        return String::new();
    }
    let len = usize::try_from(len).unwrap_or(MOST_TEXT).min(MOST_TEXT);
    // SAFETY: as of this function; fewer bytes than the plugin vouches for.
    let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) };
    String::from_utf8_lossy(bytes).into_owned()
}

/// Makes a call that answers with a status.
fn call(function: impl FnOnce(*mut NpStatus) -> i32) -> Result<(), Failure> {
    let mut room = [0u8; MOST_TEXT];
    let mut status = NpStatus::new();
    (status.text, status.text_capacity) = (room.as_mut_ptr().cast(), room.len() as u64);
    let code = function(&mut status);
    if code == abi::NP_OK {
        return Ok(());
    }
    let len = usize::try_from(status.text_bytes).unwrap_or(0).min(room.len());
    let text = String::from_utf8_lossy(&room[..len]);
    let text = if text.trim().is_empty() { "it gives no reason".into() } else { text.trim().into() };
    Err(Failure { code, vendor_code: status.vendor_code, text })
}

/// The answer to a function that the plugin does not offer.
fn not_offered(name: &str) -> Failure {
    Failure::new(abi::NP_UNSUPPORTED, format!("the plugin does not offer {name}"))
}

/// Where a plugin tells of its units. It may do so from any thread.
type Found = Mutex<Vec<UnitInfo>>;

unsafe extern "C" fn found(context: *mut c_void, info: *const NpDeviceInfo) {
    // SAFETY: the context is the list of the call under way, and the plugin vouches for the struct and its texts.
    let (list, unit) = unsafe {
        let Some(info) = NpDeviceInfo::read(info) else { return };
        (&*context.cast::<Found>(), unit_info(&info))
    };
    let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
    if list.len() < MOST_ITEMS {
        list.push(unit);
    }
}

/// # Safety
/// The texts and buckets can be read.
unsafe fn unit_info(info: &NpDeviceInfo) -> UnitInfo {
    let mut token_buckets = Vec::new();
    if !info.token_buckets.is_null() && info.token_buckets.is_aligned() {
        for index in 0..info.token_bucket_count.min(MOST_ITEMS as u64) as usize {
            // SAFETY: there are as many.
            let bucket = unsafe { info.token_buckets.add(index).read() };
            if (1..=MOST_TOKENS).contains(&bucket) {
                token_buckets.push(bucket as usize);
            }
        }
    }
    token_buckets.sort_unstable();
    token_buckets.dedup();
    // Texts that are cut may be equal where the whole ones are not.
    let compatibility_bytes =
        Some(info.compatibility_bytes).filter(|bytes| *bytes <= MOST_TEXT as u64).unwrap_or(0);
    // SAFETY: as of this function.
    unsafe {
        UnitInfo {
            kind: info.kind,
            name: text(info.name, info.name_bytes),
            vendor: text(info.vendor, info.vendor_bytes),
            driver: text(info.driver, info.driver_bytes),
            compatibility: text(info.compatibility, compatibility_bytes),
            memory_bytes: info.memory_bytes,
            token_buckets,
        }
    }
}
