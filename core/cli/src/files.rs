//! What several verbs ask of the names of files.

use std::path::Path;

use crate::error::{CliError, Exit};

/// Refuses at once a name that nothing can be written to: a folder, or one in a folder that is not there.
pub fn check_output(path: &Path) -> Result<(), CliError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let reason = if path.is_dir() {
        "is a folder; give the name of a file"
    } else if !folder.is_dir() {
        "its folder does not exist; make it, or give another path"
    } else {
        return Ok(());
    };
    Err(CliError::new(Exit::Output, format!("{}: {reason}", path.display())))
}

/// Whether both names lead to one file that exists.
pub fn same(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}
