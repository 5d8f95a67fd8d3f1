//! Memory objects, buffers of the library, and the cache on disk.

use std::ffi::{CString, c_void};
use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::ptr::{null, null_mut};

use neuropil_nnapi_shim::c::{compilation::*, execution::*, memory::*, model::*};
use neuropil_nnapi_shim::codes::*;

use crate::kit::*;

/// A folder of this test's own.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("nnapi-shim-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    /// A file of some bytes, open for reading and writing.
    fn file(&self, bytes: &[u8]) -> File {
        let mut file = File::options();
        let mut file =
            file.read(true).write(true).create(true).truncate(true).open(self.0.join("memory")).unwrap();
        file.write_all(bytes).unwrap();
        file.rewind().unwrap();
        file
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn map(file: &File, size: usize, protect: i32, offset: usize) -> (i32, *mut c_void) {
    let mut memory = null_mut();
    // SAFETY: a slot and an open file.
    let rc =
        unsafe { ANeuralNetworksMemory_createFromFd(size, protect, file.as_raw_fd(), offset, &mut memory) };
    (rc, memory)
}

#[test]
fn files_are_mapped_by_the_rules() {
    let _one = alone();
    let folder = Folder::new("map");
    let file = folder.file(&[0; 8192]);
    for (what, size, protect, offset) in [
        ("no size", 0, 1, 0),
        ("longer than the file", 8193, 1, 0),
        ("beyond the file", 4097, 1, 4096),
        ("not at a page", 10, 1, 100),
        ("may run code", 10, 5, 0),
        ("no such protection", 10, -1, 0),
    ] {
        assert_eq!(map(&file, size, protect, offset), (BAD_DATA, null_mut()), "{what}");
    }
    let mut slot = null_mut();
    // SAFETY: a slot; the descriptor is none.
    assert_eq!(unsafe { ANeuralNetworksMemory_createFromFd(8, 1, -1, 0, &mut slot) }, BAD_DATA);
    let (rc, memory) = map(&file, 4096, 3, 4096);
    assert_eq!(rc, NO_ERROR);
    // SAFETY: a handle.
    unsafe { ANeuralNetworksMemory_free(memory) };
    assert_eq!((query("live"), query("violations")), (0, 0));
}

#[test]
fn values_lie_in_memory_objects() {
    let _one = alone();
    let folder = Folder::new("values");
    let (x, w, b) = (bytes_of(&noise(3, 16)), bytes_of(&noise(1, 24)), bytes_of(&noise(2, 3)));
    // The weights at 0, the input at 256, the output at 512.
    let mut bytes = vec![0u8; 1024];
    bytes[..96].copy_from_slice(&w);
    bytes[256..320].copy_from_slice(&x);
    let file = folder.file(&bytes);
    let (rc, memory) = map(&file, 1024, 3, 0);
    assert_eq!(rc, NO_ERROR);
    let mut net = Net::new();
    let xi = net.operand((TENSOR_FLOAT32, &[2, 8], 0.0, 0));
    let wi = net.operand((TENSOR_FLOAT32, &[3, 8], 0.0, 0));
    // SAFETY: handles.
    let set = |offset, len| unsafe {
        ANeuralNetworksModel_setOperandValueFromMemory(net.model, wi as i32, memory, offset, len)
    };
    assert_eq!(set(0, 95), BAD_DATA);
    assert_eq!(set(1000, 96), BAD_DATA);
    assert_eq!(set(usize::MAX, 96), BAD_DATA);
    assert_eq!(set(0, 96), NO_ERROR);
    let bi = net.constant((TENSOR_FLOAT32, &[3], 0.0, 0), b);
    let f = net.number(0);
    let y = net.operand((TENSOR_FLOAT32, &[2, 3], 0.0, 0));
    assert_eq!(net.operation(FULLY_CONNECTED, &[xi, wi, bi, f], &[y]), NO_ERROR);
    assert_eq!(net.io(&[xi], &[y]), NO_ERROR);
    let net = net.compile();
    let (_, want) = linear(2, 8, 3, 0).compile().run(&x, 24);
    let run = net.execution();
    // SAFETY: handles.
    unsafe {
        let (input, output) =
            (ANeuralNetworksExecution_setInputFromMemory, ANeuralNetworksExecution_setOutputFromMemory);
        assert_eq!(input(run.0, 0, null(), memory, 256, 60), BAD_DATA);
        assert_eq!(input(run.0, 0, null(), memory, 1000, 64), BAD_DATA);
        assert_eq!(input(run.0, 0, null(), memory, usize::MAX, 64), BAD_DATA);
        assert_eq!(input(run.0, 0, null(), memory, 256, 64), NO_ERROR);
        assert_eq!(output(run.0, 0, null(), memory, 300, 24), NO_ERROR);
        assert_eq!(run.compute(), BAD_DATA, "the output lies over the input");
        assert_eq!(output(run.0, 0, null(), memory, 512, 24), NO_ERROR);
        assert_eq!(run.compute(), NO_ERROR);
    }
    let mut got = vec![0; 24];
    file.read_exact_at(&mut got, 512).unwrap();
    assert_eq!(got, want);
    assert_eq!(query("violations.overlap"), 1);
    // SAFETY: a handle.
    unsafe { ANeuralNetworksMemory_free(memory) };
    assert_eq!(query("violations.order"), 2, "model and execution still use it");
    drop(run);
    file.write_all_at(&[9], 3).unwrap();
    drop(net);
    assert_eq!(query("violations.constant_changed"), 1);
    assert_eq!((query("live"), query("violations")), (0, 4));
}

#[test]
fn protection_and_cut_files_are_told() {
    let _one = alone();
    let folder = Folder::new("cut");
    let net = linear(2, 8, 3, 0).compile();
    let file = folder.file(&[0; 256]);
    let (x, mut y) = (bytes_of(&noise(3, 16)), vec![0; 24]);
    let (rc, read) = map(&file, 256, 1, 0);
    let (also, write) = map(&file, 256, 2, 0);
    let (third, both) = map(&file, 256, 3, 0);
    assert_eq!((rc, also, third), (NO_ERROR, NO_ERROR, NO_ERROR));
    let [first, second, third] = [net.execution(), net.execution(), net.execution()];
    // SAFETY: handles.
    unsafe {
        assert_eq!(first.input(&x), NO_ERROR);
        assert_eq!(ANeuralNetworksExecution_setOutputFromMemory(first.0, 0, null(), read, 0, 24), NO_ERROR);
        assert_eq!(first.compute(), UNMAPPABLE);
        assert_eq!(ANeuralNetworksExecution_setInputFromMemory(second.0, 0, null(), write, 0, 64), NO_ERROR);
        assert_eq!(second.output(&mut y), NO_ERROR);
        assert_eq!(second.compute(), UNMAPPABLE);
        assert_eq!(ANeuralNetworksExecution_setInputFromMemory(third.0, 0, null(), both, 0, 64), NO_ERROR);
        assert_eq!(third.output(&mut y), NO_ERROR);
        file.set_len(10).unwrap();
        assert_eq!(third.compute(), UNMAPPABLE, "the file is shorter than the mapping");
    }
    drop((first, second, third));
    // SAFETY: handles.
    unsafe { [read, write, both].into_iter().for_each(|m| ANeuralNetworksMemory_free(m)) };
    assert_eq!(query("violations"), 0);
}

#[test]
fn buffers_of_the_library_keep_to_their_roles() {
    let _one = alone();
    let folder = Folder::new("roles");
    let net = linear(2, 8, 3, 0).compile();
    let other = linear(2, 8, 3, 0).compile();
    let x = bytes_of(&noise(3, 16));
    let (_, want) = net.run(&x, 24);
    let (mut desc, mut input, mut output) = (null_mut(), null_mut(), null_mut());
    // SAFETY: handles, slots and lists.
    unsafe {
        assert_eq!(ANeuralNetworksMemoryDesc_create(&mut desc), NO_ERROR);
        assert_eq!(ANeuralNetworksMemory_createFromDesc(desc, &mut input), BAD_STATE);
        assert_eq!(ANeuralNetworksMemoryDesc_finish(desc), BAD_DATA, "no role");
        assert_eq!(ANeuralNetworksMemoryDesc_addInputRole(desc, net.compilation, 1, 1.0), BAD_DATA);
        assert_eq!(ANeuralNetworksMemoryDesc_addInputRole(desc, net.compilation, 0, 0.0), BAD_DATA);
        assert_eq!(ANeuralNetworksMemoryDesc_addInputRole(desc, net.compilation, 0, 1.5), BAD_DATA);
        assert_eq!(ANeuralNetworksMemoryDesc_addInputRole(desc, net.compilation, 0, 1.0), NO_ERROR);
        assert_eq!(ANeuralNetworksMemoryDesc_addInputRole(desc, net.compilation, 0, 1.0), BAD_DATA, "twice");
        assert_eq!(
            ANeuralNetworksMemoryDesc_addOutputRole(desc, net.compilation, 0, 1.0),
            BAD_DATA,
            "other size"
        );
        assert_eq!(ANeuralNetworksMemoryDesc_setDimensions(desc, 2, [2u32, 9].as_ptr()), BAD_DATA);
        assert_eq!(ANeuralNetworksMemoryDesc_setDimensions(desc, 2, [2u32, 8].as_ptr()), NO_ERROR);
        assert_eq!(ANeuralNetworksMemoryDesc_finish(desc), NO_ERROR);
        assert_eq!(ANeuralNetworksMemoryDesc_finish(desc), BAD_STATE);
        assert_eq!(ANeuralNetworksMemoryDesc_addInputRole(desc, other.compilation, 0, 1.0), BAD_STATE);
        assert_eq!(ANeuralNetworksMemory_createFromDesc(desc, &mut input), NO_ERROR);
        ANeuralNetworksMemoryDesc_free(desc);
        assert_eq!(ANeuralNetworksMemoryDesc_create(&mut desc), NO_ERROR);
        assert_eq!(ANeuralNetworksMemoryDesc_addOutputRole(desc, net.compilation, 0, 0.5), NO_ERROR);
        assert_eq!(ANeuralNetworksMemoryDesc_finish(desc), NO_ERROR);
        assert_eq!(ANeuralNetworksMemory_createFromDesc(desc, &mut output), NO_ERROR);
        ANeuralNetworksMemoryDesc_free(desc);

        let bind = ANeuralNetworksExecution_setInputFromMemory;
        let strange = other.execution();
        assert_eq!(bind(strange.0, 0, null(), input, 0, 0), BAD_DATA, "not its role");
        let empty = net.execution();
        assert_eq!(bind(empty.0, 0, null(), input, 0, 64), BAD_DATA, "the whole of it only");
        assert_eq!(bind(empty.0, 0, null(), input, 0, 0), NO_ERROR);
        let mut y = vec![0; 24];
        assert_eq!(empty.output(&mut y), NO_ERROR);
        assert_eq!(empty.compute(), OP_FAILED, "it has no value yet");

        let (rc, file) = map(&folder.file(&x), 64, 3, 0);
        assert_eq!(rc, NO_ERROR);
        assert_eq!(ANeuralNetworksMemory_copy(output, file), BAD_DATA, "it has no value yet");
        assert_eq!(ANeuralNetworksMemory_copy(file, output), BAD_DATA, "other size");
        assert_eq!(ANeuralNetworksMemory_copy(file, input), NO_ERROR);
        let run = net.execution();
        assert_eq!(bind(run.0, 0, null(), input, 0, 0), NO_ERROR);
        assert_eq!(ANeuralNetworksExecution_setOutputFromMemory(run.0, 0, null(), output, 0, 0), NO_ERROR);
        assert_eq!(run.compute(), NO_ERROR);
        let (rc, result) = map(&folder.file(&[0; 24]), 24, 3, 0);
        assert_eq!(rc, NO_ERROR);
        assert_eq!(ANeuralNetworksMemory_copy(output, result), NO_ERROR);
        assert_eq!(std::fs::read(folder.0.join("memory")).unwrap(), want);
        drop((run, empty, strange));
        [input, output, file, result].into_iter().for_each(|m| ANeuralNetworksMemory_free(m));
    }
    assert_eq!(query("violations"), 0);
}

/// Compiles with a cache and gives the result of one run.
fn cached(folder: &Folder, token: u8, fuse: i32) -> Vec<u8> {
    let mut net = linear(2, 64, 3, fuse);
    assert_eq!(net.finish(), NO_ERROR);
    let compilation = net.open_compilation();
    let (path, token) = (CString::new(folder.0.to_str().unwrap()).unwrap(), [token; 32]);
    // SAFETY: a handle, a text and 32 bytes.
    unsafe {
        assert_eq!(
            ANeuralNetworksCompilation_setCaching(compilation, path.as_ptr(), token.as_ptr()),
            NO_ERROR
        );
        assert_eq!(ANeuralNetworksCompilation_finish(compilation), NO_ERROR);
    }
    let (code, y) = net.run(&bytes_of(&noise(3, 128)), 24);
    assert_eq!(code, NO_ERROR);
    y
}

#[test]
fn compiled_models_come_from_the_cache() {
    let _one = alone();
    let folder = Folder::new("cache");
    let counts = || ["compilations.from_cache", "cache.written", "cache.corrupt", "violations"].map(query);
    let first = cached(&folder, 1, 0);
    assert_eq!(counts(), [0, 1, 0, 0]);
    assert_eq!(cached(&folder, 1, 0), first);
    assert_eq!(counts(), [1, 1, 0, 0]);
    cached(&folder, 2, 0);
    assert_eq!(counts(), [1, 2, 0, 0], "another token is another model");
    let path = std::fs::read_dir(&folder.0)
        .unwrap()
        .flatten()
        .map(|e| e.path())
        .find(|p| p.to_string_lossy().contains("shim-0101"));
    let path = path.unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[40] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(cached(&folder, 1, 0), first);
    assert_eq!(counts(), [1, 3, 1, 0], "a damaged one is made again");
    std::fs::write(&path, &bytes[..20]).unwrap();
    assert_eq!(cached(&folder, 1, 0), first);
    assert_eq!(cached(&folder, 1, 0), first);
    assert_eq!(counts(), [2, 4, 2, 0]);
    assert_ne!(cached(&folder, 1, 1), first);
    assert_eq!(counts(), [2, 5, 2, 1], "one token for two models");
    control("devices", "shim-accelerator:accelerator:31:2.0");
    cached(&folder, 2, 0);
    assert_eq!(query("compilations.from_cache"), 2, "a new driver compiles anew");
    // A folder that is not there costs only the cache.
    cached(&Folder(folder.0.join("none")), 3, 0);
}
