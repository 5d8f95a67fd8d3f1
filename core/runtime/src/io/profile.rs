//! How fast a device's storage reads, as data: bandwidth by block size, for reads in sequence and for reads all over a
//! span.
//!
//! The figures of the built-in profiles are those of the PowerInfer-2 paper (section 2.3.2, UFS 4.0 of a OnePlus 12).
//! What the paper does not state is inferred, and the comment beside it says from what.

use std::time::Duration;

use super::IoError;

/// Bandwidth by block size: points of (bytes, bytes per second), ascending. Between points it is linear over the
/// logarithm of the size, beyond them as at the nearest.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve(Vec<(f64, f64)>);

impl Curve {
    /// A curve through these points.
    ///
    /// # Panics
    /// When there is none, a number is not positive, or sizes do not ascend.
    pub fn new(points: Vec<(f64, f64)>) -> Curve {
        let positive = |(size, speed): &(f64, f64)| *size > 0.0 && *speed > 0.0 && speed.is_finite();
        let ascending = points.windows(2).all(|pair| pair[0].0 < pair[1].0);
        assert!(!points.is_empty() && points.iter().all(positive) && ascending, "no curve: {points:?}");
        Curve(points)
    }

    /// Bytes of the smallest block for which there is a figure.
    pub fn smallest(&self) -> usize {
        self.0.first().map_or(0, |(size, _)| *size as usize)
    }

    /// Bytes per second with blocks of so many bytes.
    pub fn at(&self, bytes: usize) -> f64 {
        let size = (bytes as f64).max(1.0);
        let above = self.0.partition_point(|point| point.0 <= size);
        match (above.checked_sub(1).and_then(|below| self.0.get(below)), self.0.get(above)) {
            (Some(low), Some(high)) => {
                let share = (size / low.0).ln() / (high.0 / low.0).ln();
                low.1 + share * (high.1 - low.1)
            }
            (Some(end), None) | (None, Some(end)) => end.1,
            (None, None) => f64::INFINITY,
        }
    }
}

/// A device's storage.
#[derive(Clone, Debug, PartialEq)]
pub struct StorageProfile {
    /// Its name.
    pub name: String,
    /// Where its figures come from.
    pub provenance: String,
    /// Least time from the submission of a read to its end.
    pub latency: Duration,
    /// Reads that each begin where the one before ended.
    pub sequential: Curve,
    /// Reads all over a span of so many bytes, ascending; a longer span is like the longest.
    pub random: Vec<(u64, Curve)>,
}

const KIB: f64 = 1024.0;
const MB: f64 = 1e6;
const MIB: u64 = 1 << 20;

impl StorageProfile {
    /// The built-in profiles.
    pub const NAMES: [&str; 2] = ["ufs4.0", "ufs3.1"];

    /// The built-in profile of this name.
    ///
    /// # Errors
    /// [`IoError::UnknownProfile`].
    pub fn named(name: &str) -> Result<StorageProfile, IoError> {
        match name {
            "ufs4.0" => Ok(StorageProfile::ufs4_0()),
            "ufs3.1" => Ok(StorageProfile::ufs3_1()),
            _ => Err(IoError::UnknownProfile { found: name.into(), known: Self::NAMES.join(", ") }),
        }
    }

    fn ufs4_0() -> StorageProfile {
        // Published: 450 MB/s in blocks of 4 KB, 4 GB/s in blocks of 512 KB.
        let sequential = Curve::new(vec![(4.0 * KIB, 450.0 * MB), (512.0 * KIB, 4000.0 * MB)]);
        // Published: 1076.10 MB/s at 4 KB within 128 MB from the big core, under 850 MB/s at 4 KB within 512 MB, and
        // 3.5 GB/s at 512 KB, of which the span is not stated, so it stands for both. Also published: two reads of 4 KB
        // are faster than one of 8 KB, so 8 KB cannot have more bandwidth; as much is inferred.
        let random =
            |small| Curve::new(vec![(4.0 * KIB, small), (8.0 * KIB, small), (512.0 * KIB, 3500.0 * MB)]);
        StorageProfile {
            name: "ufs4.0".into(),
            provenance: "PowerInfer-2, section 2.3.2, OnePlus 12; latency inferred".into(),
            // Inferred: the sequential figure at 4 KB, taken as one read at a time, is 9.1 us per read.
            latency: Duration::from_nanos(9100),
            sequential,
            random: vec![(128 * MIB, random(1076.1 * MB)), (512 * MIB, random(850.0 * MB))],
        }
    }

    /// Inferred as a whole: the paper gives no figures of this storage. From its prefill speeds follow about 2 GB/s of
    /// UFS 4.0 in use and 1.6 GB/s of UFS 3.1, a ratio of 0.8; every bandwidth is that share of UFS 4.0's.
    fn ufs3_1() -> StorageProfile {
        const SHARE: f64 = 0.8;
        let slower =
            |curve: Curve| Curve::new(curve.0.into_iter().map(|(size, s)| (size, s * SHARE)).collect());
        let fast = StorageProfile::ufs4_0();
        StorageProfile {
            name: "ufs3.1".into(),
            provenance: "inferred from ufs4.0 by the ratio of prefill speeds, 0.8".into(),
            latency: fast.latency.div_f64(SHARE),
            sequential: slower(fast.sequential),
            random: fast.random.into_iter().map(|(span, curve)| (span, slower(curve))).collect(),
        }
    }

    /// Time that the storage is busy with a read of `bytes`; `span` is that of recent reads, or `None` for a read in
    /// sequence. Storage reads whole blocks: less than the smallest of the curve takes as long as that.
    pub fn busy(&self, bytes: usize, span: Option<u64>) -> Duration {
        let curve = span.and_then(|span| {
            let fitting = self.random.iter().find(|(most, _)| span <= *most);
            fitting.or(self.random.last()).map(|(_, curve)| curve)
        });
        let curve = curve.unwrap_or(&self.sequential);
        let bytes = bytes.max(curve.smallest());
        Duration::from_secs_f64(bytes as f64 / curve.at(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_pass_through_their_points_and_bend_by_the_logarithm() {
        let curve = Curve::new(vec![(4096.0, 1e9), (65536.0, 3e9)]);
        assert_eq!([curve.at(0), curve.at(4096), curve.at(1 << 30)], [1e9, 1e9, 3e9]);
        assert!((curve.at(16384) - 2e9).abs() < 1.0);
    }

    #[test]
    fn the_published_figures_come_out() {
        let ufs = StorageProfile::named("ufs4.0").unwrap();
        let speed = |bytes: usize, span| bytes as f64 / ufs.busy(bytes, span).as_secs_f64() / 1e6;
        let close = |a: f64, b: f64| (a - b).abs() < b * 1e-3;
        assert!(close(speed(4096, None), 450.0) && close(speed(512 << 10, None), 4000.0));
        assert!(close(speed(4096, Some(100 << 20)), 1076.1) && close(speed(4096, Some(4 << 30)), 850.0));
        assert!(close(speed(512 << 10, Some(4 << 30)), 3500.0));
        let time = |bytes: usize| ufs.busy(bytes, Some(4 << 30)).as_nanos() as u64;
        assert!(2 * time(4096) <= time(8192) + 1, "two of 4 KB are no slower than one of 8 KB");
        assert_eq!(time(512), time(4096), "blocks of 4 KB");
        let older = StorageProfile::named("ufs3.1").unwrap();
        assert!(older.busy(8192, Some(0)) > ufs.busy(8192, Some(0)));
    }
}
