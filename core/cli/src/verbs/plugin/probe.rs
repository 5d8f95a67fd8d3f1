//! `plugin probe`: what a process of its own does with a plugin before this one loads it.

use std::path::PathBuf;

use neuropil_plugin_host::{REFUSED, try_plugin};

use crate::error::CliError;

/// Flags of `plugin probe`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  neuropil plugin probe ./libmy_npu.so")]
pub struct Args {
    /// The library
    path: PathBuf,
    /// key=value&key=value
    #[arg(default_value = "", allow_hyphen_values = true)]
    options: String,
}

/// Runs the verb.
pub fn run(args: &Args) -> Result<(), CliError> {
    match try_plugin(&args.path, &args.options) {
        Ok(()) => Ok(()),
        // Who started this process loads the plugin too, and tells the reason.
        Err(_) => std::process::exit(REFUSED.into()),
    }
}
