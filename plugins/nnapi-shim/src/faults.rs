//! Faults that tests inject: which one, and on which of the next passes through its place.

use crate::codes::*;
use crate::symbols::short_name;

/// When a fault strikes, counted in passes since it was set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum When {
    /// The n-th pass, counted from 1.
    At(u64),
    /// Every pass after the first n.
    After(u64),
}

impl When {
    /// Reads `once`, `always`, `at=N` or `after=N`.
    pub(crate) fn parse(text: &str) -> Option<When> {
        match text.split_once('=') {
            None if text == "once" => Some(When::At(1)),
            None if text == "always" => Some(When::After(0)),
            Some(("at", n)) => n.parse().ok().filter(|n| *n > 0).map(When::At),
            Some(("after", n)) => n.parse().ok().map(When::After),
            _ => None,
        }
    }
}

/// A fault with the passes it has seen.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    when: When,
    passes: u64,
}

impl Fault {
    fn new(when: When) -> Fault {
        Fault { when, passes: 0 }
    }

    /// One more pass: does it strike?
    fn strikes(&mut self) -> bool {
        self.passes += 1;
        match self.when {
            When::At(n) => self.passes == n,
            When::After(n) => self.passes > n,
        }
    }
}

/// Faults of an execution that is about to start.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Injected {
    /// Milliseconds to sleep before the work.
    pub(crate) hang_ms: u64,
    /// The code to end with, without any work.
    pub(crate) code: Option<i32>,
    /// Fill the outputs with bits that are NaN as floats.
    pub(crate) nan: bool,
    /// Spoil the last elements of the outputs.
    pub(crate) tile: bool,
}

/// Every fault that is set.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    functions: Vec<(&'static str, i32, Fault)>,
    hang: Option<(u64, Fault)>,
    compile_hang: Option<(u64, Fault)>,
    nan: Option<Fault>,
    tile: Option<Fault>,
    deadline: Option<Fault>,
    dead: Option<Fault>,
    /// A fault of `dead` has struck, and no client has waited for the device since.
    pub(crate) is_dead: bool,
}

impl Faults {
    /// Sets a fault, or none with `off`. `None` when key or value are not understood.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Option<()> {
        let words: Vec<&str> = value.split_whitespace().collect();
        let off = words == ["off"];
        let simple = |text: &str| When::parse(text).map(Fault::new);
        let with_ms = |words: &[&str]| match words {
            [ms] => Some((ms.parse().ok()?, Fault::new(When::After(0)))),
            [ms, when] => Some((ms.parse().ok()?, simple(when)?)),
            _ => None,
        };
        match key {
            "fail" if off => self.functions.clear(),
            "fail" => {
                let [function, code, rest @ ..] = words.as_slice() else { return None };
                let fault = match rest {
                    [] => Fault::new(When::At(1)),
                    [when] => simple(when)?,
                    _ => return None,
                };
                self.functions.push((short_name(function)?, code.parse().ok()?, fault));
            }
            "hang_ms" => self.hang = if off { None } else { Some(with_ms(&words)?) },
            "compile_hang_ms" => self.compile_hang = if off { None } else { Some(with_ms(&words)?) },
            "nan_outputs" => self.nan = if off { None } else { Some(simple(value)?) },
            "wrong_tile" => self.tile = if off { None } else { Some(simple(value)?) },
            "missed_deadline" => self.deadline = if off { None } else { Some(simple(value)?) },
            "dead_object" => {
                self.dead = if off { None } else { Some(simple(value)?) };
                self.is_dead = false;
            }
            _ => return None,
        }
        Some(())
    }

    /// The code that a call of this function must return, if any.
    pub(crate) fn of_function(&mut self, function: &str) -> Outcome {
        let mut outcome = Ok(());
        for (name, code, fault) in &mut self.functions {
            if *name == function && fault.strikes() && outcome.is_ok() {
                outcome = if *code == NO_ERROR { Ok(()) } else { Err(*code) };
            }
        }
        outcome
    }

    /// The faults of the execution that starts now.
    pub(crate) fn of_execution(&mut self) -> Injected {
        let strikes = |fault: &mut Option<Fault>| fault.as_mut().is_some_and(Fault::strikes);
        self.is_dead |= strikes(&mut self.dead);
        let late = strikes(&mut self.deadline);
        let hang_ms = hang_of(&mut self.hang);
        Injected {
            hang_ms,
            code: if self.is_dead { Some(DEAD_OBJECT) } else { late.then_some(MISSED_DEADLINE_TRANSIENT) },
            nan: strikes(&mut self.nan),
            tile: strikes(&mut self.tile),
        }
    }

    /// The device lives again, until the next fault of that kind is set.
    pub(crate) fn revive(&mut self) {
        self.dead = None;
        self.is_dead = false;
    }

    /// Milliseconds that the compilation which starts now must sleep.
    pub(crate) fn of_compilation(&mut self) -> u64 {
        hang_of(&mut self.compile_hang)
    }
}

/// The milliseconds of a hang that strikes now.
fn hang_of(hang: &mut Option<(u64, Fault)>) -> u64 {
    match hang {
        Some((ms, fault)) => u64::from(fault.strikes()) * *ms,
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_strike_when_they_should() {
        let mut faults = Faults::default();
        assert!(faults.set("fail", "ANeuralNetworksExecution_compute 5 at=2").is_some());
        assert_eq!(faults.of_function("Execution_compute"), Ok(()));
        assert_eq!(faults.of_function("Model_finish"), Ok(()));
        assert_eq!(faults.of_function("Execution_compute"), Err(5));
        assert_eq!(faults.of_function("Execution_compute"), Ok(()));
        assert!(faults.set("nan_outputs", "after=1").is_some());
        assert!(!faults.of_execution().nan);
        assert!(faults.of_execution().nan && faults.of_execution().nan);
        assert!(faults.set("dead_object", "once").is_some());
        assert_eq!(faults.of_execution().code, Some(DEAD_OBJECT));
        assert_eq!(faults.of_execution().code, Some(DEAD_OBJECT), "the dead stay dead");
        for wrong in [("fail", "Nothing 5"), ("fail", "Model_finish x"), ("hang_ms", ""), ("fly", "once")] {
            assert!(faults.set(wrong.0, wrong.1).is_none(), "{wrong:?}");
        }
    }
}
