//! Open devices, and what they handed out. A handle is a number that looks like a pointer: no two handles of a process
//! are equal, and none is ever followed.

use std::any::Any;
use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use super::queue::Queue;
use crate::{Code, DeviceInfo, Error, PluginDevice, Prepared, Shape};

/// The next handle. It starts high, so that a small number that a host made up is not one.
static NEXT: AtomicU64 = AtomicU64::new(0x6e70_0000_0010);

/// Values by their handles.
pub(crate) struct Handles<T> {
    values: RwLock<BTreeMap<u64, Arc<T>>>,
}

impl<T> Handles<T> {
    pub const fn new() -> Handles<T> {
        Handles { values: RwLock::new(BTreeMap::new()) }
    }

    /// Keeps a value; the handle looks like a pointer that the host may carry about.
    pub fn keep<H>(&self, value: T) -> *mut H {
        let handle = NEXT.fetch_add(16, Ordering::Relaxed);
        self.values.write().unwrap_or_else(PoisonError::into_inner).insert(handle, Arc::new(value));
        ptr::without_provenance_mut(handle as usize)
    }

    /// The value of a handle.
    pub fn get<H>(&self, handle: *mut H, what: &str) -> Result<Arc<T>, Error> {
        let values = self.values.read().unwrap_or_else(PoisonError::into_inner);
        let value = values.get(&(handle.addr() as u64)).cloned();
        value.ok_or_else(|| Error::invalid(format!("the handle is of no {what} that is there")))
    }

    /// Forgets a handle.
    pub fn take<H>(&self, handle: *mut H) -> Option<Arc<T>> {
        self.values.write().unwrap_or_else(PoisonError::into_inner).remove(&(handle.addr() as u64))
    }
}

/// The open devices of a plugin.
pub(crate) type Devices<D> = Handles<Open<D>>;

/// An open device as the host holds it. The thread of its queue holds only the state, so it ends when this is dropped.
pub(crate) struct Open<D: PluginDevice> {
    pub state: Arc<State<D>>,
    pub queue: OnceLock<Queue<D>>,
}

/// A weight, and what the SDK must know of it.
pub(crate) struct Kept<W> {
    pub weight: W,
    pub shape: Shape,
}

/// Imported memory.
pub(crate) struct Imported {
    pub memory: Box<dyn Any + Send + Sync>,
    pub bytes: usize,
}

/// A device and all that belongs to it.
pub(crate) struct State<D: PluginDevice> {
    pub device: D,
    pub info: DeviceInfo,
    pub weights: Handles<Kept<D::Weight>>,
    pub memories: Handles<Imported>,
    turn: Mutex<()>,
    lost: OnceLock<Error>,
}

impl<D: PluginDevice> State<D> {
    pub fn new(device: D) -> State<D> {
        let info = device.info();
        let (weights, memories) = (Handles::new(), Handles::new());
        State { device, info, weights, memories, turn: Mutex::new(()), lost: OnceLock::new() }
    }

    /// Calls `work` when it is its turn, unless the device is lost.
    pub fn run<T>(&self, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let _turn = self.turn();
        if let Some(lost) = self.lost.get() {
            return Err(lost.clone());
        }
        let result = work();
        if let Err(error) = &result
            && error.code == Code::Lost
        {
            // A second error of this kind says nothing new.
            let _ = self.lost.set(error.clone());
        }
        result
    }

    fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        // A panic of the plugin was reported; the lock guards nothing that it could have left in disorder.
        (!self.info.parallel).then(|| self.turn.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Keeps a prepared weight.
    pub fn keep(&self, prepared: Prepared<D::Weight>, shape: Shape) -> neuropil_plugin_abi::NpPrepared {
        let mut out: neuropil_plugin_abi::NpPrepared = neuropil_plugin_abi::AbiStruct::new();
        out.bytes = prepared.bytes;
        out.weight = self.weights.keep(Kept { weight: prepared.weight, shape });
        out
    }

    /// A token count of a job or a question, if there is a graph for it.
    pub fn tokens(&self, tokens: u64) -> Result<usize, Error> {
        let buckets = &self.info.token_buckets;
        if tokens == 0 || !buckets.is_empty() && !buckets.contains(&tokens) {
            let text = format!("{tokens} tokens are none of the buckets {buckets:?} of this unit");
            return Err(Error::invalid(text));
        }
        usize::try_from(tokens).map_err(|_| Error::invalid(format!("{tokens} tokens are too many")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_good_until_it_is_given_back() {
        let (a, b) = (Handles::new(), Handles::new());
        let (x, y): (*mut u8, *mut u8) = (a.keep(1), b.keep(2));
        assert_ne!(x, y);
        assert_eq!(*a.get(x, "x").unwrap(), 1);
        assert!(a.get(y, "x").is_err() && a.get(ptr::null_mut::<u8>(), "x").is_err());
        assert!(a.take(x).is_some() && a.take(x).is_none() && a.get(x, "x").is_err());
    }
}
