//! Weights that a unit has compiled, kept in a folder: a driver that compiles for minutes does so once.
//!
//! A file belongs to one weight on one unit. Its name is a SHA-256 of all that the plan depends on: the plugin, the unit,
//! its compatibility text, the counts of tokens, and every byte of the weight. It is written to another name first, so it
//! is whole or not there, and a checksum stands before the plan, so nothing else ever gets to a driver:
//!
//! ```text
//!   "neuropil kept 1\n"  the key, 32 bytes  | length of the plan, u64  its SHA-256, 32 bytes |  the plan
//! ```
//!
//! While a driver reads a plan its file has another name: a plan that crashes the process does so once.
//!
//! The folder is a cache: whatever is wrong with it costs time and nothing else. It is bounded. The files that were not
//! used for longest make room, but never those that this unit has used since it was opened: a model whose plans do not
//! all fit keeps those that do, where throwing out the oldest would keep none of them until the next run.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use neuropil_device::DeviceError;
use sha2::{Digest, Sha256};

use crate::border::{Library, Parts, UnitInfo};
use crate::{Encoded, Options};

const MAGIC: &[u8; 16] = b"neuropil kept 1\n";
const HEAD: usize = 88;
const SUFFIX: &str = ".plan";
/// The suffix of a file that is being written or loaded; one that is older than this was left behind by a crash.
const UNFINISHED: &str = ".tmp";
const LEFT_BEHIND: Duration = Duration::from_secs(3600);

/// The kept plans of one open unit.
pub(crate) struct PlanFolder {
    folder: PathBuf,
    /// Bytes that the folder may have.
    most: u64,
    /// The beginning of every key.
    unit: Sha256,
    library: Arc<Library>,
    used: Mutex<HashSet<PathBuf>>,
    told: AtomicBool,
    stopped: AtomicBool,
}

/// The place of one plan.
pub(crate) struct Place<'a> {
    plans: &'a PlanFolder,
    key: [u8; 32],
    pub path: PathBuf,
}

/// Adds something of a length of its own: no two lists of such things have the same bytes.
fn add(hash: &mut Sha256, bytes: &[u8]) {
    add_number(hash, bytes.len());
    hash.update(bytes);
}

fn add_number(hash: &mut Sha256, number: usize) {
    hash.update((number as u64).to_le_bytes());
}

fn add_matrix(hash: &mut Sha256, matrix: &Encoded) {
    let numbers = [matrix.scheme.number() as usize, matrix.scheme.group(), matrix.rows, matrix.cols];
    numbers.into_iter().for_each(|number| add_number(hash, number));
    [&matrix.data, &matrix.scales, &matrix.mins].into_iter().for_each(|bytes| add(hash, bytes.as_ref()));
    let outliers = matrix.outliers.as_ref();
    add_number(hash, outliers.map_or(0, |outliers| outliers.columns.len()));
    if let Some(outliers) = outliers {
        outliers.columns.iter().for_each(|column| hash.update(column.to_le_bytes()));
        add(hash, outliers.codes.as_ref());
        outliers.scales.iter().for_each(|scale| hash.update(scale.to_le_bytes()));
    }
}

fn head(key: &[u8; 32], plan: &[u8]) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..16].copy_from_slice(MAGIC);
    head[16..48].copy_from_slice(key);
    head[48..56].copy_from_slice(&(plan.len() as u64).to_le_bytes());
    head[56..].copy_from_slice(&Sha256::digest(plan));
    head
}

impl PlanFolder {
    /// Where the plans of this unit are kept; `None` when they are not.
    pub fn new(
        library: &Arc<Library>,
        unit: &UnitInfo,
        offered: bool,
        options: &Options,
    ) -> Option<PlanFolder> {
        let folder = options.plans.folder()?;
        if !offered || unit.compatibility.is_empty() {
            return None;
        }
        let mut hash = Sha256::new_with_prefix(MAGIC);
        for text in [&library.name, &library.version, &unit.name, &unit.compatibility] {
            add(&mut hash, text.as_bytes());
        }
        Some(PlanFolder {
            folder: folder.into(),
            most: options.plans_bytes,
            unit: hash,
            library: library.clone(),
            used: Mutex::default(),
            told: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        })
    }

    /// The largest plan that can be kept; `None` when no more are.
    pub fn room(&self) -> Option<usize> {
        let most = usize::try_from(self.most.saturating_sub(HEAD as u64)).unwrap_or(usize::MAX);
        (!self.stopped.load(Ordering::Relaxed)).then_some(most)
    }

    /// Tells the user why compiled weights are not kept, once.
    pub fn tell(&self, reason: &str) {
        if !self.told.swap(true, Ordering::Relaxed) {
            let folder = self.folder.display();
            self.library.warn(&format!("not every compiled weight is kept in {folder}: {reason}"));
        }
    }

    /// The place of the plan of a weight that gets jobs of these counts of tokens.
    pub fn place(&self, parts: &Parts<'_>, buckets: &[usize]) -> Place<'_> {
        let mut hash = self.unit.clone();
        add_number(&mut hash, buckets.len());
        buckets.iter().for_each(|bucket| add_number(&mut hash, *bucket));
        match parts {
            Parts::One(matrix) => add_matrix(&mut hash, matrix),
            Parts::Neurons { gate, up, down } => {
                [gate, up, down].into_iter().for_each(|matrix| add_matrix(&mut hash, matrix));
            }
        }
        let key: [u8; 32] = hash.finalize().into();
        let name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        let path = self.folder.join(name + SUFFIX);
        self.used.lock().unwrap_or_else(PoisonError::into_inner).insert(path.clone());
        Place { plans: self, key, path }
    }

    /// Makes room for a file of `bytes` bytes.
    fn make_room(&self, bytes: u64) -> io::Result<()> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let unfinished = name.ends_with(UNFINISHED);
            if !is_ours(&name) {
                continue;
            }
            // It may be gone by now.
            let Ok(data) = entry.metadata() else { continue };
            let modified = data.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let age = SystemTime::now().duration_since(modified).unwrap_or_default();
            if data.is_file() && !(unfinished && age > LEFT_BEHIND && fs::remove_file(entry.path()).is_ok()) {
                files.push((modified, data.len(), entry.path()));
            }
        }
        files.sort();
        let mut total = files.iter().fold(bytes, |total, (_, bytes, _)| total.saturating_add(*bytes));
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, bytes, path) in files {
            let unfinished = path.extension().is_some_and(|e| e == &UNFINISHED[1..]);
            if total > self.most && !unfinished && !used.contains(&path) {
                match fs::remove_file(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => total -= bytes,
                }
            }
        }
        match total <= self.most {
            true => Ok(()),
            false => Err(io::Error::other(format!(
                "those of one run take more than the {} MiB that plans_mib allows",
                self.most >> 20
            ))),
        }
    }
}

/// Whether a file of this name is one of ours: nothing else in the folder is ever removed.
fn is_ours(name: &str) -> bool {
    let key = name.split_at_checked(64).filter(|(key, _)| key.bytes().all(|byte| byte.is_ascii_hexdigit()));
    key.is_some_and(|(_, rest)| rest == SUFFIX || rest.starts_with('.') && rest.ends_with(UNFINISHED))
}

impl Place<'_> {
    /// The plan, if there is one. A file with anything else in it is removed.
    pub fn read(&self) -> Option<Vec<u8>> {
        // What is no file, such as a pipe, is not even opened.
        if !fs::symlink_metadata(&self.path).ok()?.is_file() {
            return None;
        }
        let plan = self.checked();
        if plan.is_none() {
            self.remove();
        }
        plan
    }

    fn checked(&self) -> Option<Vec<u8>> {
        let mut file = File::open(&self.path).ok()?;
        let len = file.metadata().ok()?.len();
        let mut start = [0; HEAD];
        file.read_exact(&mut start).ok()?;
        let len = usize::try_from(len.checked_sub(HEAD as u64)?).ok()?;
        // Before its length is believed.
        if start[..48] != self::head(&self.key, &[])[..48] || start[48..56] != (len as u64).to_le_bytes() {
            return None;
        }
        let mut plan = Vec::new();
        plan.try_reserve_exact(len).ok()?;
        (&file).take(len as u64).read_to_end(&mut plan).ok()?;
        if self::head(&self.key, &plan) != start {
            return None;
        }
        // It was used: the others make room first. Where that cannot be said it is as old as it is.
        let _ = file.set_modified(SystemTime::now());
        Some(plan)
    }

    /// Removes the file, if that is possible; if not it is read and found wrong again.
    pub fn remove(&self) {
        remove(&self.path);
    }

    /// Another name in the folder, which nobody else has.
    fn aside(&self) -> PathBuf {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.path.with_extension(format!("{}-{}{UNFINISHED}", std::process::id(), now.as_nanos()))
    }

    /// Takes the file out of its place while `load` hands the plan to a driver. It comes back if that goes well.
    pub fn while_away<T>(&self, load: impl FnOnce() -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        let aside = self.aside();
        // A folder that cannot be written is good enough to read.
        let away = fs::rename(&self.path, &aside).is_ok();
        let loaded = load();
        match (&loaded, away) {
            // If it cannot come back, it is left behind.
            (Ok(_), true) => drop(fs::rename(&aside, &self.path)),
            (Ok(_), false) => {}
            (Err(_), true) => remove(&aside),
            (Err(_), false) => self.remove(),
        }
        loaded
    }

    /// Keeps a plan. When that fails no more plans are kept.
    pub fn write(&self, plan: &[u8]) {
        if let Err(error) = self.try_write(plan) {
            self.plans.stopped.store(true, Ordering::Relaxed);
            self.plans.tell(&error.to_string());
        }
    }

    fn try_write(&self, plan: &[u8]) -> io::Result<()> {
        create_folder(&self.plans.folder)?;
        self.plans.make_room((HEAD + plan.len()) as u64)?;
        let unfinished = self.aside();
        let written = create(&unfinished).and_then(|mut file| {
            file.write_all(&head(&self.key, plan))?;
            file.write_all(plan)
        });
        let kept = written.and_then(|()| fs::rename(&unfinished, &self.path));
        if kept.is_err() {
            remove(&unfinished);
        }
        kept
    }
}

/// Forgets a plan.
pub(crate) fn remove(path: &Path) {
    // It may be gone, or not ours to remove: then it is looked at again, and checked again.
    let _ = fs::remove_file(path);
}

/// A new file that only this user can read.
fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// The folder, which only this user can read, if it has to be made.
fn create_folder(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_with_our_names_are_ours() {
        let key = "0123456789abcdef".repeat(4);
        for (name, ours) in [
            (format!("{key}.plan"), true),
            (format!("{key}.12-34.tmp"), true),
            (format!("{key}.txt"), false),
            (format!("{key}0.plan"), false),
            (key[1..].to_string() + ".plan", false),
            ("my.plan".into(), false),
            ("g".repeat(64) + ".plan", false),
            ("ä".repeat(40) + ".plan", false),
        ] {
            assert_eq!(is_ours(&name), ours, "{name}");
        }
    }
}
