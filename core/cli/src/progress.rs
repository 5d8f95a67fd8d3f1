//! Progress bars: on standard error, and only when that is a terminal.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar, or nothing where nobody would see it. It is wiped when it is dropped.
pub struct Bar(Option<ProgressBar>);

impl Bar {
    /// A bar over bytes.
    pub fn bytes(what: &str) -> Bar {
        Bar::new(what, "{msg} {wide_bar} {bytes}/{total_bytes}")
    }

    /// A bar over pieces of work.
    pub fn steps(what: &str) -> Bar {
        Bar::new(what, "{msg} {wide_bar} {pos}/{len}")
    }

    fn new(what: &str, template: &str) -> Bar {
        if !io::stderr().is_terminal() {
            return Bar(None);
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        Bar(Some(bar))
    }

    /// Says what is being done.
    pub fn say(&self, what: &str) {
        if let Some(bar) = &self.0
            && bar.message() != what
        {
            bar.set_message(what.to_owned());
        }
    }

    /// Says how much of how much is done.
    pub fn set(&self, done: u64, total: u64) {
        if let Some(bar) = &self.0 {
            bar.set_length(total);
            bar.set_position(done);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
