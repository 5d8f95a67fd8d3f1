//! Ctrl-C.
//!
//! The first one asks the work that is going on to stop, which then prints what it has and ends; with no such work
//! (the model is being loaded) it ends the program. The second one ends the program whatever happens.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use neuropil::pipeline::CancelToken;

use crate::error::Exit;
use crate::output;

/// The program's ear for Ctrl-C; clones listen together.
#[derive(Clone, Default)]
pub struct Interrupts(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// What stops the work that is going on.
    work: Vec<CancelToken>,
    /// What to say instead of ending when there is no work.
    idle_hint: Option<&'static str>,
    pressed: bool,
}

impl Interrupts {
    /// Starts to listen. Where the system does not allow it, Ctrl-C does what it always does.
    pub fn listen() -> Interrupts {
        let interrupts = Interrupts::default();
        let heard = interrupts.clone();
        let _ = ctrlc::set_handler(move || heard.press());
        interrupts
    }

    /// From now until the guard is dropped, Ctrl-C stops this work.
    pub fn watch(&self, work: Vec<CancelToken>) -> Watch<'_> {
        let mut state = self.state();
        state.work = work;
        state.pressed = false;
        Watch(self)
    }

    /// From now on the first Ctrl-C without work says this and ends nothing.
    pub fn hint_when_idle(&self, hint: &'static str) {
        let mut state = self.state();
        state.idle_hint = Some(hint);
        state.pressed = false;
    }

    fn press(&self) {
        let mut state = self.state();
        if state.pressed {
            std::process::exit(Exit::Killed as i32);
        }
        match state.idle_hint {
            Some(hint) if state.work.is_empty() => {
                state.pressed = true;
                output::prompt(hint);
            }
            None if state.work.is_empty() => std::process::exit(Exit::Interrupted as i32),
            _ => {
                state.pressed = true;
                state.work.iter().for_each(CancelToken::cancel);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Work that Ctrl-C stops.
pub struct Watch<'a>(&'a Interrupts);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.work.clear();
        state.pressed = false;
    }
}
