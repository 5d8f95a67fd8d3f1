//! Files that vanish with the test that made them.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A folder of its own, removed when dropped.
#[derive(Debug)]
pub struct TempDir {
    path: PathBuf,
}

impl TempDir {
    /// Makes the folder.
    ///
    /// # Panics
    /// When the system refuses.
    #[allow(clippy::new_without_default)]
    pub fn new() -> TempDir {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("neuropil-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("the temporary folder can be made");
        TempDir { path }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file into it and gives back where.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path.join(name);
        std::fs::write(&path, bytes).expect("the temporary file can be written");
        path
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        // A folder that cannot be removed is the system's to clean.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
