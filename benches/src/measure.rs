//! Repeated timing. On a shared machine a single time means nothing, so what is kept is the median and the spread.

use std::time::{Duration, Instant};

/// The middle of some measurements, and how far they lie apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Half of the measurements are below.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
}

impl Spread {
    /// Of at least one measurement.
    ///
    /// # Panics
    /// When there is none.
    pub fn of(mut values: Vec<f64>) -> Spread {
        assert!(!values.is_empty(), "a median of something");
        values.sort_by(f64::total_cmp);
        Spread { median: values[values.len() / 2], least: values[0], most: values[values.len() - 1] }
    }
}

/// Seconds that a call takes.
pub fn seconds(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

/// Median seconds of a call, after one that is not counted; at least 5 calls and about a quarter of a second.
pub fn median(mut f: impl FnMut()) -> f64 {
    f();
    let (start, mut times) = (Instant::now(), Vec::new());
    while times.len() < 5 || start.elapsed() < Duration::from_millis(250) {
        times.push(seconds(&mut f));
    }
    Spread::of(times).median
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        let spread = Spread::of(vec![5.0, 1.0, 2.0, 9.0, 3.0]);
        assert_eq!(spread, Spread { median: 3.0, least: 1.0, most: 9.0 });
    }
}
