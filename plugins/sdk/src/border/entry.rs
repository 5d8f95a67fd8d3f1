//! The functions of the table. Each is the same three steps: read what came, call the trait, write what it says. A panic
//! on the way becomes an error, because nothing may unwind into C.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use neuropil_plugin_abi::{
    self as abi, AbiStruct, NpClusterJob, NpCompletion, NpDevice, NpDeviceInfo, NpFoundFn, NpMatmulJob,
    NpMemory, NpOptions, NpPlan, NpPlugin, NpPrepared, NpQuery, NpRegion, NpReport, NpStatus, NpSupport,
    NpWeight, NpWeightSource, NpWriteFn,
};

use super::queue::{Queue, Task};
use super::state::{Imported, Open, State};
use super::{Exported, read, work};
use crate::plan::{self, Checksum};
use crate::{Code, DeviceInfo, Error, PluginDevice, Report, Shape};

/// The table of a plugin.
pub(crate) const fn table<P: Exported>() -> NpPlugin {
    let offers = P::Device::OFFERS;
    macro_rules! offered {
        ($when:expr, $function:expr) => {
            if $when { Some($function) } else { None }
        };
    }
    NpPlugin {
        size: size_of::<NpPlugin>() as u32,
        abi_major: abi::NEUROPIL_PLUGIN_ABI_MAJOR,
        abi_minor: abi::NEUROPIL_PLUGIN_ABI_MINOR,
        reserved: 0,
        name: P::NAME.as_ptr().cast(),
        name_bytes: P::NAME.len() as u64,
        version: P::VERSION.as_ptr().cast(),
        version_bytes: P::VERSION.len() as u64,
        probe: Some(probe::<P>),
        open: Some(open::<P>),
        close: Some(close::<P>),
        info: Some(info::<P>),
        query: Some(query::<P>),
        prepare: Some(prepare::<P>),
        free_weight: Some(free_weight::<P>),
        matmul: Some(matmul::<P>),
        cluster: offered!(offers.cluster, cluster::<P>),
        submit_matmul: offered!(offers.submit, submit_matmul::<P>),
        submit_cluster: offered!(offers.submit && offers.cluster, submit_cluster::<P>),
        cancel: offered!(offers.cancel, cancel::<P>),
        import_memory: offered!(offers.import, import_memory::<P>),
        release_memory: offered!(offers.import, release_memory::<P>),
        save_plan: offered!(offers.plans, save_plan::<P>),
        load_plan: offered!(offers.plans, load_plan::<P>),
    }
}

/// Runs `body`; a panic in it is an error.
pub(crate) fn within<T>(body: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic_text(&*panic);
        // Its drop could panic again.
        std::mem::forget(panic);
        Err(Error::internal(format!("the plugin panicked: {text}")))
    })
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// The host's status of an error, or of success; without a text.
pub(crate) fn status_of(error: Option<&Error>) -> NpStatus {
    let mut status = NpStatus::new();
    if let Some(error) = error {
        (status.code, status.vendor_code) = (error.code.number(), error.vendor_code);
    }
    status
}

pub(crate) fn report_of(report: &Report) -> NpReport {
    let mut out = NpReport::new();
    out.device_ns = report.device_time.as_nanos().try_into().unwrap_or(u64::MAX);
    for (set, flag) in [
        (report.zero_copy_input, abi::NP_REPORT_ZERO_COPY_INPUT),
        (report.zero_copy_output, abi::NP_REPORT_ZERO_COPY_OUTPUT),
    ] {
        out.flags |= if set { flag } else { 0 };
    }
    out
}

/// Runs the body of a function of the table and writes how it ended.
///
/// # Safety
/// `status` is NULL or a status of the host.
unsafe fn answer(status: *mut NpStatus, body: impl FnOnce() -> Result<(), Error>) -> i32 {
    let result = within(body);
    // SAFETY: as of this function; a text is written only as far as the host has room for it.
    unsafe {
        let Some(room) = NpStatus::read(status) else {
            return status_of(result.as_ref().err()).code;
        };
        let mut out = status_of(result.as_ref().err());
        (out.text, out.text_capacity) = (room.text, room.text_capacity);
        if let Err(error) = &result
            && !room.text.is_null()
        {
            let mut bytes = error.text.len().min(usize::try_from(room.text_capacity).unwrap_or(usize::MAX));
            while !error.text.is_char_boundary(bytes) {
                bytes -= 1;
            }
            std::ptr::copy_nonoverlapping(error.text.as_ptr(), room.text.cast(), bytes);
            out.text_bytes = bytes as u64;
        }
        out.write(status);
        out.code
    }
}

fn device<P: Exported>(handle: *mut NpDevice) -> Result<Arc<Open<P::Device>>, Error> {
    P::export().devices.get(handle, "device")
}

/// Tells the host of a unit.
///
/// # Safety
/// `found` is a function of the host, for `context`.
unsafe fn tell(info: &DeviceInfo, context: *mut c_void, found: Option<NpFoundFn>) -> Result<(), Error> {
    let found = found.ok_or_else(|| Error::invalid("there is no function to tell about units"))?;
    let mut out = NpDeviceInfo::new();
    out.kind = info.kind as u32;
    (out.name, out.name_bytes) = (info.name.as_ptr().cast(), info.name.len() as u64);
    (out.vendor, out.vendor_bytes) = (info.vendor.as_ptr().cast(), info.vendor.len() as u64);
    (out.driver, out.driver_bytes) = (info.driver.as_ptr().cast(), info.driver.len() as u64);
    (out.compatibility, out.compatibility_bytes) =
        (info.compatibility.as_ptr().cast(), info.compatibility.len() as u64);
    out.memory_bytes = info.memory_bytes;
    out.flags = if info.parallel { abi::NP_DEVICE_PARALLEL } else { 0 };
    (out.memory_kinds, out.memory_alignment) = (info.memory_kinds, info.memory_alignment);
    out.token_buckets = info.token_buckets.as_ptr();
    out.token_bucket_count = info.token_buckets.len() as u64;
    // SAFETY: the host's function and context; what is passed lives until it returns.
    unsafe { found(context, &out) };
    Ok(())
}

// What follows are the functions of the header. The host vouches for its pointers: that they are NULL or point to what
// the header says, for as long as it says.

unsafe extern "C" fn probe<P: Exported>(
    options: *const NpOptions,
    context: *mut c_void,
    found: Option<NpFoundFn>,
    status: *mut NpStatus,
) -> i32 {
    // SAFETY: the host vouches for its pointers.
    unsafe {
        answer(status, || {
            let options = read::options(options)?;
            for info in P::export().backend()?.probe(&options)? {
                tell(&info, context, found)?;
            }
            Ok(())
        })
    }
}

unsafe extern "C" fn open<P: Exported>(
    index: u64,
    options: *const NpOptions,
    device: *mut *mut NpDevice,
    status: *mut NpStatus,
) -> i32 {
    // SAFETY: the host vouches for its pointers.
    unsafe {
        answer(status, || {
            let options = read::options(options)?;
            let place = out(device)?;
            let opened = P::export().backend()?.open(read::size(index, "units")?, &options)?;
            let open = Open { state: Arc::new(State::new(opened)), queue: OnceLock::new() };
            place.write(P::export().devices.keep(open));
            Ok(())
        })
    }
}

unsafe extern "C" fn close<P: Exported>(device: *mut NpDevice) {
    let _ = within(|| {
        drop(P::export().devices.take(device));
        Ok(())
    });
}

unsafe extern "C" fn info<P: Exported>(
    device: *mut NpDevice,
    context: *mut c_void,
    found: Option<NpFoundFn>,
    status: *mut NpStatus,
) -> i32 {
    // SAFETY: the host vouches for its pointers.
    unsafe { answer(status, || tell(&self::device::<P>(device)?.state.info, context, found)) }
}

unsafe extern "C" fn query<P: Exported>(
    device: *mut NpDevice,
    query: *const NpQuery,
    support: *mut NpSupport,
    status: *mut NpStatus,
) -> i32 {
    // SAFETY: the host vouches for its pointers.
    unsafe {
        answer(status, || {
            let state = &self::device::<P>(device)?.state;
            read::room(support)?;
            let (query, tokens) = read::query(query)?;
            if matches!(query, crate::Query::Cluster { .. }) && !P::Device::OFFERS.cluster {
                return Err(Error::unsupported("this plugin has no neuron clusters"));
            }
            state.tokens(tokens).map_err(|error| Error { code: Code::Unsupported, ..error })?;
            let answer = state.device.query(&query)?;
            let mut out = NpSupport::new();
            out.flags = match answer.emulated {
                true => abi::NP_SUPPORT_EMULATED,
                false => abi::NP_SUPPORT_NATIVE,
            };
            out.flags |= if answer.outliers { abi::NP_SUPPORT_OUTLIERS } else { 0 };
            out.write(support);
            Ok(())
        })
    }
}

unsafe extern "C" fn prepare<P: Exported>(
    device: *mut NpDevice,
    source: *const NpWeightSource,
    prepared: *mut NpPrepared,
    status: *mut NpStatus,
) -> i32 {
    // SAFETY: the host vouches for its pointers.
    unsafe {
        answer(status, || {
            let state = &self::device::<P>(device)?.state;
            read::room(prepared)?;
            let source = read::weight_source(source)?;
            let shape = source.shape()?;
            if matches!(shape, Shape::Neurons { .. }) && !P::Device::OFFERS.cluster {
                return Err(Error::unsupported("this plugin has no neuron clusters"));
            }
            let weight = state.run(|| state.device.prepare(&source))?;
            state.keep(weight, shape).write(prepared);
            Ok(())
        })
    }
}

unsafe extern "C" fn free_weight<P: Exported>(device: *mut NpDevice, weight: *mut NpWeight) {
    let _ = within(|| {
        drop(self::device::<P>(device)?.state.weights.take(weight));
        Ok(())
    });
}

unsafe extern "C" fn matmul<P: Exported>(
    device: *mut NpDevice,
    job: *const NpMatmulJob,
    report: *mut NpReport,
    status: *mut NpStatus,
) -> i32 {
    // SAFETY: the host vouches for its pointers.
    unsafe {
        answer(status, || {
            let done = work::matmul(&self::device::<P>(device)?.state, job)?;
            report_of(&done).write(report);
            Ok(())
        })
    }
}

unsafe extern "C" fn cluster<P: Exported>(
    device: *mut NpDevice,
    job: *const NpClusterJob,
    report: *mut NpReport,
    status: *mut NpStatus,
) -> i32 {
    // SAFETY: the host vouches for its pointers.
    unsafe {
        answer(status, || {
            let done = work::cluster(&self::device::<P>(device)?.state, job)?;
            report_of(&done).write(report);
            Ok(())
        })
    }
}

/// # Safety
/// As for [`Queue::push`].
unsafe fn submit<D: PluginDevice>(
    open: &Open<D>,
    task: Task,
    completion: *const NpCompletion,
) -> Result<(), Error> {
    // SAFETY: the host vouches for its pointers.
    let completion: NpCompletion = unsafe { read::read(completion)? };
    if completion.done.is_none() {
        return Err(Error::invalid("there is nobody to tell that the job has ended"));
    }
    let queue = match open.queue.get() {
        Some(queue) => queue,
        None => {
            let queue = Queue::start(&open.state)?;
            open.queue.get_or_init(|| queue)
        }
    };
    // SAFETY: as of this function.
    unsafe { queue.push(task, completion) }
}

unsafe extern "C" fn submit_matmul<P: Exported>(
    device: *mut NpDevice,
    job: *const NpMatmulJob,
    completion: *const NpCompletion,
    status: *mut NpStatus,
) -> i32 {
    // SAFETY: the host vouches for its pointers, until the completion is told.
    unsafe { answer(status, || submit(&*self::device::<P>(device)?, Task::Matmul(job), completion)) }
}

unsafe extern "C" fn submit_cluster<P: Exported>(
    device: *mut NpDevice,
    job: *const NpClusterJob,
    completion: *const NpCompletion,
    status: *mut NpStatus,
) -> i32 {
    // SAFETY: the host vouches for its pointers, until the completion is told.
    unsafe { answer(status, || submit(&*self::device::<P>(device)?, Task::Cluster(job), completion)) }
}

unsafe extern "C" fn cancel<P: Exported>(device: *mut NpDevice) {
    let _ = within(|| {
        self::device::<P>(device)?.state.device.cancel();
        Ok(())
    });
}

unsafe extern "C" fn import_memory<P: Exported>(
    device: *mut NpDevice,
    region: *const NpRegion,
    memory: *mut *mut NpMemory,
    status: *mut NpStatus,
) -> i32 {
    // SAFETY: the host vouches for its pointers.
    unsafe {
        answer(status, || {
            let state = &self::device::<P>(device)?.state;
            let place = out(memory)?;
            let region = read::region(region, state.info.memory_kinds, state.info.memory_alignment)?;
            let memory = state.run(|| state.device.import(&region))?;
            place.write(state.memories.keep(Imported { memory, bytes: region.bytes }));
            Ok(())
        })
    }
}

unsafe extern "C" fn release_memory<P: Exported>(device: *mut NpDevice, memory: *mut NpMemory) {
    let _ = within(|| {
        drop(self::device::<P>(device)?.state.memories.take(memory));
        Ok(())
    });
}

unsafe extern "C" fn save_plan<P: Exported>(
    device: *mut NpDevice,
    weight: *mut NpWeight,
    context: *mut c_void,
    write: Option<NpWriteFn>,
    status: *mut NpStatus,
) -> i32 {
    // SAFETY: the host vouches for its pointers.
    unsafe {
        answer(status, || {
            let state = &self::device::<P>(device)?.state;
            let kept = state.weights.get(weight, "weight")?;
            let write = write.ok_or_else(|| Error::invalid("there is no function to write a plan"))?;
            let put = |bytes: &[u8]| match write(context, bytes.as_ptr().cast(), bytes.len() as u64) {
                0 => Ok(()),
                _ => Err(Error::cancelled("the host stopped the saving of a plan")),
            };
            let (mut checksum, mut bytes) = (Checksum::new(), 0);
            let head = plan::head(kept.shape);
            checksum.add(&head);
            put(&head)?;
            state.run(|| {
                state.device.save_plan(&kept.weight, &mut |piece| {
                    checksum.add(piece);
                    bytes += piece.len() as u64;
                    put(piece)
                })
            })?;
            put(&plan::tail(bytes, checksum))
        })
    }
}

unsafe extern "C" fn load_plan<P: Exported>(
    device: *mut NpDevice,
    plan: *const NpPlan,
    prepared: *mut NpPrepared,
    status: *mut NpStatus,
) -> i32 {
    // SAFETY: the host vouches for its pointers.
    unsafe {
        answer(status, || {
            let state = &self::device::<P>(device)?.state;
            read::room(prepared)?;
            let saved: NpPlan = read::read(plan)?;
            let (body, shape) = plan::open(read::bytes(saved.data, saved.data_bytes, "bytes of a plan")?)?;
            let weight = state.run(|| state.device.load_plan(body, shape))?;
            state.keep(weight, shape).write(prepared);
            Ok(())
        })
    }
}

/// A place for a handle.
fn out<T>(place: *mut T) -> Result<*mut T, Error> {
    if place.is_null() || !place.is_aligned() {
        return Err(Error::invalid("there is no place for the handle"));
    }
    Ok(place)
}
