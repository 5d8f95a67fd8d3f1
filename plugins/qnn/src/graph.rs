//! A compiled graph and the buffers of its ends.

use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use neuropil_plugin_sdk::{Deadline, Error};

use crate::abi::{self, Handle, Tensor};
use crate::memory::{Buffer, Buffers};
use crate::runtime::Context;
use crate::tensor::{Held, Kind, raw_memory};

/// An input or output of a graph.
struct End {
    held: Held,
    buffer: Option<Bound>,
}

/// The buffer of an end, and the handle by which the library knows it in this context.
struct Bound {
    buffer: Arc<Buffer>,
    handle: Option<Handle>,
}

/// Who fills the inputs of a graph and takes its outputs. Both are numbered from 0, and come with exactly their bytes.
pub(crate) trait Exchange {
    /// Fills an input.
    fn write(&mut self, index: usize, bytes: &mut [u8]);
    /// Takes an output.
    fn read(&mut self, index: usize, bytes: &[u8]);
}

/// A compiled graph.
pub(crate) struct Graph {
    graph: Handle,
    ends: Mutex<Vec<End>>,
    context: Arc<Context>,
}

// SAFETY: QNN ties no handle to a thread. The tensors point to memory that they hold, and are behind a lock.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        let ends = self.ends.get_mut().unwrap_or_else(PoisonError::into_inner);
        for handle in ends.iter().filter_map(|end| end.buffer.as_ref()?.handle) {
            // SAFETY: the handle is one of this context, which is still there, and is given back once. A refusal leaves
            // nothing to do.
            self.context.session().vendor().call(|functions| unsafe {
                functions.deregister.map(|deregister| deregister(&handle, 1));
            });
        }
    }
}

impl Graph {
    pub(crate) fn new(context: Arc<Context>, graph: Handle, ends: Vec<Held>) -> Result<Graph, Error> {
        if graph.is_null() {
            return Err(Error::internal("QNN made no graph and says that it did"));
        }
        let ends = ends.into_iter().map(|held| End { held, buffer: None });
        Ok(Graph { graph, ends: Mutex::new(ends.collect()), context })
    }

    /// The numbers that the library gave to inputs and outputs.
    pub fn ids(&self) -> Vec<u32> {
        let ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.iter().map(|end| end.held.raw.id).collect()
    }

    /// Runs the graph.
    ///
    /// A deadline is looked at before the graph starts: QNN has no way to stop one.
    pub fn run(
        &self,
        buffers: &Buffers,
        deadline: Deadline,
        values: &mut impl Exchange,
    ) -> Result<(), Error> {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, end) in ends.iter_mut().enumerate() {
            if end.buffer.is_none() {
                let buffer = buffers.get(index, end.held.bytes)?;
                let handle = self.register(&end.held, &buffer);
                end.buffer = Some(Bound { buffer, handle });
            }
        }
        let bound = ends.iter().filter_map(|end| Some((end, end.buffer.as_ref()?)));
        // Every graph takes the locks in the order of its ends, which is that of the buffers.
        let mut pieces: Vec<_> = bound
            .map(|(end, bound)| {
                let piece = bound.buffer.piece.lock().unwrap_or_else(PoisonError::into_inner);
                (end, bound.handle, piece)
            })
            .collect();
        let (mut inputs, mut outputs): (Vec<Tensor>, Vec<Tensor>) = (Vec::new(), Vec::new());
        for (end, handle, piece) in &mut pieces {
            let bytes = piece.bytes();
            let Some(bytes) = bytes.get_mut(..end.held.bytes) else {
                return Err(Error::internal("a buffer is shorter than its tensor"));
            };
            let mut tensor = end.held.raw;
            match handle {
                Some(handle) => {
                    tensor.memory_kind = abi::MEMORY_HANDLE;
                    tensor.memory = abi::Memory { handle: *handle };
                }
                None => tensor.memory = raw_memory(bytes.as_mut_ptr(), bytes.len()),
            }
            if end.held.spec.kind == Kind::Input {
                values.write(inputs.len(), bytes);
                inputs.push(tensor);
            } else {
                // What is not written must not look like the results of another job: no float is a number, and no code
                // lies in the range.
                bytes.fill(0xff);
                outputs.push(tensor);
            }
        }
        if deadline.passed() {
            return Err(Error::timeout("the deadline passed before a graph ran"));
        }
        let vendor = self.context.session().vendor();
        // SAFETY: each tensor names memory of as many bytes as its shape needs, which this holds the locks of.
        let code = vendor.call(|functions| unsafe {
            let (count_in, count_out) = (inputs.len() as u32, outputs.len() as u32);
            (functions.execute)(
                self.graph,
                inputs.as_ptr(),
                count_in,
                outputs.as_mut_ptr(),
                count_out,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        });
        vendor.check(code, "run a graph")?;
        let outputs = pieces.iter_mut().filter(|(end, ..)| end.held.spec.kind == Kind::Output);
        for (index, (end, _, piece)) in outputs.enumerate() {
            values.read(index, piece.bytes().get(..end.held.bytes).unwrap_or_default());
        }
        Ok(())
    }

    /// Tells the library of a buffer of rpcmem; without a handle it is copied.
    fn register(&self, held: &Held, buffer: &Buffer) -> Option<Handle> {
        let fd = buffer.fd?;
        let descriptor = abi::MemoryDescriptor {
            rank: held.spec.dims.len() as u32,
            dims: held.spec.dims.as_ptr(),
            shape_config: ptr::null(),
            element: held.raw.element,
            kind: abi::MEMORY_ION,
            fd,
            rest: 0,
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the struct and what it points to are there; the buffer is larger than the tensor, and held by the
        // graph until the handle is given back.
        let code = self.context.session().vendor().call(|functions| unsafe {
            let register = functions.register.filter(|_| functions.deregister.is_some())?;
            Some(register(self.context.handle(), &descriptor, 1, &mut handle))
        });
        (code == Some(0) && !handle.is_null()).then_some(handle)
    }
}
