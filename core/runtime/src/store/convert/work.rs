//! The threads of a conversion: some build bundles, one computes the digest, and the caller writes.
//!
//! The bundles are cut into units, which the builders take in turn; the caller takes them in the order of the file. A
//! builder owns two buffers, of which it fills one while the other is written, so memory is bounded whatever the model.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread;

use sha2::{Digest, Sha256};

use super::neurons::{Losses, Unit};
use super::order::Order;
use super::plan::Plan;
use super::source::Source;
use super::{ConvertError, ConvertReport, LayerReport, resident};
use crate::gguf::{CHECKSUM_KEY, GgufError, GgufWriter};
use crate::store::{ALIGNMENT, keys};

/// Bytes of all buffers of the builders.
const BUFFERS: usize = 576 << 20;
/// Most builders: beyond that the writer is the limit.
const MOST_BUILDERS: usize = 4;
/// Bytes that are written between two questions whether to go on.
const PIECE: usize = 4 << 20;

/// A unit that is built: its bundles and what it lost.
type Built = Result<(Vec<u8>, Losses), ConvertError>;

/// Writes the store that was planned.
pub(super) fn run(
    source: &Source,
    orders: &[Order],
    plan: Plan,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<ConvertReport, ConvertError> {
    let Plan { mut pairs, layouts, resident, tensors, notes } = plan;
    let digest_room = "0".repeat(64);
    pairs.set(keys::SOURCE_SHA256, source.sha256.clone().unwrap_or(digest_room));
    debug_assert!(pairs.get(CHECKSUM_KEY).is_none());
    let mut writer = GgufWriter::create(out, &pairs, ALIGNMENT, &tensors, true)?;
    let total = writer.file_bytes();
    let mut written = 0;
    let mut tick = |bytes: u64| {
        written += bytes;
        if progress(written, total) { Ok(()) } else { Err(ConvertError::Cancelled) }
    };

    let builders = thread::available_parallelism().map_or(1, usize::from).min(MOST_BUILDERS);
    let units = units(source, orders, &layouts, BUFFERS / (2 * builders));
    let stop = AtomicBool::new(false);
    let mut losses = vec![Losses::default(); layouts.len()];
    let sha256 = thread::scope(|scope| -> Result<String, ConvertError> {
        let _stop = StopOnExit(&stop);
        let hashing = source.sha256.is_none().then(|| scope.spawn(|| digest(source.bytes.paths(), &stop)));
        let lanes: Vec<_> = (0..builders)
            .map(|first| {
                let (send, built) = sync_channel::<Built>(0);
                let (give_back, free) = channel::<Vec<u8>>();
                let mine = units.iter().skip(first).step_by(builders);
                scope.spawn(move || build(mine.map(|(_, _, unit)| unit), &send, &free));
                (built, give_back)
            })
            .collect();
        for tensor in &resident {
            resident::write(source, orders, tensor, &mut writer, &mut tick)?;
        }
        let mut names = tensors.iter().skip(resident.len());
        for ((index, (layer, first, _)), (built, give_back)) in
            units.iter().enumerate().zip(lanes.iter().cycle())
        {
            debug_assert_eq!(index % builders, index % lanes.len());
            if *first && let Some(tensor) = names.next() {
                writer.begin(&tensor.name)?;
            }
            let (bundles, lost) = built.recv().unwrap_or(Err(ConvertError::Cancelled))?;
            for piece in bundles.chunks(PIECE) {
                writer.write(piece)?;
                tick(piece.len() as u64)?;
            }
            if let Some(losses) = losses.get_mut(*layer) {
                losses.iter_mut().zip(lost).for_each(|(sum, lost)| sum.merge(lost));
            }
            let _ = give_back.send(bundles);
        }
        match (hashing, &source.sha256) {
            (Some(hashing), _) => hashing.join().unwrap_or(Err(ConvertError::Cancelled)),
            (None, known) => Ok(known.clone().unwrap_or_default()),
        }
    })?;
    if source.sha256.is_none() {
        writer.set_late(keys::SOURCE_SHA256, &sha256.as_str().into())?;
    }
    for (layer, (lost, layout)) in losses.iter().zip(&layouts).enumerate() {
        for (lost, dtype) in lost.iter().zip([layout.gate_type, layout.down_type]) {
            if !lost.relative().is_finite() {
                return Err(ConvertError::NotFinite { file: source.path.clone(), layer, dtype });
            }
        }
    }
    let bytes = writer.finish()?;
    let _ = progress(total, total);

    let experts = |layer: usize| source.layers.get(layer).map_or(1, |layer| layer.experts.len());
    let over = |of: &dyn Fn(&crate::store::Layout) -> u64| -> u64 {
        layouts.iter().enumerate().map(|(index, layout)| of(layout) * experts(index) as u64).sum()
    };
    let bundle_bytes = over(&|layout| layout.bytes());
    let layers = layouts.iter().zip(&losses).enumerate().map(|(index, (layout, losses))| LayerReport {
        gate_type: layout.gate_type,
        down_type: layout.down_type,
        neurons: layout.neurons,
        experts: experts(index),
        gate_up_loss: losses[0].relative(),
        down_loss: losses[1].relative(),
    });
    Ok(ConvertReport {
        source_bytes: source.bytes.paths().iter().filter_map(|p| p.metadata().ok()).map(|m| m.len()).sum(),
        bytes,
        resident_bytes: resident.iter().map(|tensor| tensor.content.bytes()).sum(),
        bundle_bytes,
        padding_bytes: bundle_bytes - over(&|layout| layout.row_bytes() as u64 * layout.neurons as u64),
        read_unit: layouts.first().map_or(0, |layout| layout.read_unit),
        sha256,
        sorted: orders.iter().any(|order| order.from.is_some()),
        layers: layers.collect(),
        notes,
    })
}

/// Tells the other threads to stop, however the scope is left.
struct StopOnExit<'a>(&'a AtomicBool);

impl Drop for StopOnExit<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// All units in the order of the file, each with its layer and whether it is the first of its tensor.
fn units<'a>(
    source: &'a Source,
    orders: &'a [Order],
    layouts: &[crate::store::Layout],
    most_bytes: usize,
) -> Vec<(usize, bool, Unit<'a>)> {
    let mut units = Vec::new();
    for (index, (layer, layout)) in source.layers.iter().zip(layouts).enumerate() {
        // Whole blocks of any type, so that no block of down is widened twice.
        let most = (most_bytes / layout.stride / 256 * 256).max(256);
        for (expert, neurons) in layer.experts.iter().enumerate() {
            let order =
                orders.get(index).and_then(|order| order.from.as_ref()).and_then(|from| from.get(expert));
            for start in (0..layout.neurons).step_by(most) {
                let positions = start..layout.neurons.min(start + most);
                let order = order.map(Vec::as_slice);
                let unit = Unit { source, neurons: *neurons, layout: *layout, order, positions };
                units.push((index, start == 0, unit));
            }
        }
    }
    units
}

/// Builds units one after the other, into buffers that come back.
fn build<'a>(units: impl Iterator<Item = &'a Unit<'a>>, send: &SyncSender<Built>, free: &Receiver<Vec<u8>>) {
    for (index, unit) in units.enumerate() {
        // The first two units get new buffers, and each later one that of the unit before the last.
        let recycled = if index < 2 { Ok(Vec::new()) } else { free.recv() };
        let Ok(mut bundles) = recycled else { return };
        let built = unit.build(&mut bundles).map(|losses| (bundles, losses));
        let failed = built.is_err();
        if send.send(built).is_err() || failed {
            return;
        }
    }
}

/// The digest of some files, one after the other, in hex.
fn digest(paths: Vec<PathBuf>, stop: &AtomicBool) -> Result<String, ConvertError> {
    let mut hasher = Sha256::new();
    let mut buffer = super::buffer(1 << 20)?;
    for path in paths {
        let failed = |source| GgufError::Io { file: path.clone(), source };
        let mut file = File::open(&path).map_err(failed)?;
        loop {
            if stop.load(Ordering::Relaxed) {
                return Err(ConvertError::Cancelled);
            }
            match file.read(&mut buffer).map_err(failed)? {
                0 => break,
                read => hasher.update(buffer.get(..read).unwrap_or_default()),
            }
        }
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
