//! The directory for what the program keeps between runs: `$XDG_CACHE_HOME/neuropil` or what stands for it.

use std::path::{Path, PathBuf};

use crate::error::{CliError, Exit};

/// The cache directory: the one given, or the user's. It is made when it does not exist.
pub fn directory(given: Option<&Path>) -> Result<PathBuf, CliError> {
    let directory = match given {
        Some(directory) => directory.to_path_buf(),
        None => user_directory()?,
    };
    std::fs::create_dir_all(&directory).map_err(|error| {
        let directory = directory.display();
        CliError::new(
            Exit::File,
            format!(
                "the cache directory {directory} cannot be made ({error}); give another with --cache-dir"
            ),
        )
    })?;
    Ok(directory)
}

fn user_directory() -> Result<PathBuf, CliError> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = variable("XDG_CACHE_HOME")
        .or_else(|| if cfg!(windows) { variable("LOCALAPPDATA") } else { None })
        .or_else(|| std::env::home_dir().filter(|home| home.is_absolute()).map(|home| home.join(".cache")));
    match base {
        Some(base) => Ok(base.join("neuropil")),
        None => Err(CliError::new(
            Exit::File,
            "this user has no home directory; name a cache directory with --cache-dir",
        )),
    }
}
