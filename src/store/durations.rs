//! A histogram of durations in a few bytes: counts in buckets, each a tenth wider than the one before. A percentile is
//! within 5% of the true one.

/// The last bucket: they go from 10 µs to more than a day.
const LAST: u8 = 241;

/// The end of the first bucket, in milliseconds.
const FIRST: f64 = 0.01;

const WIDER: f64 = 1.1;

/// The counts of the buckets, up to the last that is not empty: a page may merge a hundred thousand histograms, which a map of
/// the buckets made slow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Durations(Vec<u64>);

impl Durations {
    pub fn add(&mut self, milliseconds: f64) {
        let bucket = ((milliseconds / FIRST).ln() / WIDER.ln()).ceil();
        // The conversion turns NaN and what is below 0 into 0.
        self.count((bucket as u8).min(LAST), 1);
    }

    fn count(&mut self, bucket: u8, more: u64) {
        let bucket = usize::from(bucket);
        if self.0.len() <= bucket {
            self.0.resize(bucket + 1, 0);
        }
        self.0[bucket] = self.0[bucket].saturating_add(more);
    }

    /// The buckets that are not empty, and their counts.
    pub(super) fn buckets(&self) -> impl Iterator<Item = (u8, u64)> {
        (0..=u8::MAX).zip(self.0.iter().copied()).filter(|(_, count)| *count > 0)
    }

    /// The milliseconds that a share of them, from 0 to 1, did not exceed. `None` if it is empty.
    pub fn percentile(&self, share: f64) -> Option<f64> {
        let all: u64 = self.0.iter().sum();
        let wanted = ((all as f64 * share).ceil() as u64).max(1);
        let mut passed = 0;
        let (bucket, _) = self.buckets().find(|(_, count)| {
            passed += count;
            passed >= wanted
        })?;
        // The middle of the bucket.
        Some(FIRST * WIDER.powf(f64::from(bucket) - 0.5))
    }

    pub fn merge(&mut self, other: &Self) {
        other.buckets().for_each(|(bucket, count)| self.count(bucket, count));
    }

    /// The number of each bucket, and its count in groups of seven bits.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (bucket, count) in self.buckets() {
            bytes.push(bucket);
            let mut left = count;
            while left >= 0x80 {
                bytes.push(left as u8 | 0x80);
                left >>= 7;
            }
            bytes.push(left as u8);
        }
        bytes
    }

    /// Adds what `to_bytes` returned. Other bytes add wrong counts and do no further harm.
    pub fn merge_bytes(&mut self, bytes: &[u8]) {
        let mut bytes = bytes.iter();
        while let Some(&bucket) = bytes.next() {
            let (mut count, mut shift) = (0_u64, 0);
            for &byte in bytes.by_ref() {
                count |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
                shift += 7;
                if byte & 0x80 == 0 {
                    break;
                }
            }
            self.count(bucket, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_within_a_twentieth() {
        assert_eq!(Durations::default().percentile(0.5), None);
        for scale in [0.02, 0.3, 1.0, 47.0, 9_000.0] {
            let mut times = Durations::default();
            for number in 1..=1000 {
                times.add(f64::from(number) * scale);
            }
            for share in [0.05, 0.5, 0.95, 0.99] {
                let (found, exact) =
                    (times.percentile(share).expect("there are some"), share * 1000.0 * scale);
                assert!((found / exact - 1.0).abs() < 0.055, "{share} of {scale}: {found}, not {exact}");
            }
        }
        let mut one = Durations::default();
        one.add(250.0);
        assert!((one.percentile(0.5).expect("there is one") / 250.0 - 1.0).abs() < 0.055);
    }

    #[test]
    fn odd_times_do_no_harm() {
        let mut times = Durations::default();
        for odd in [0.0, -5.0, f64::NAN, f64::INFINITY, 1e300, f64::MIN_POSITIVE] {
            times.add(odd);
        }
        assert_eq!(times.0.iter().sum::<u64>(), 6);
    }

    #[test]
    fn bytes_and_back() {
        let mut times = Durations::default();
        for (time, count) in [(0.001, 1), (3.0, 127), (4.0, 128), (900.0, 20_000)] {
            for _ in 0..count {
                times.add(time);
            }
        }
        let mut again = Durations::default();
        again.merge_bytes(&times.to_bytes());
        assert_eq!(again, times);
        again.merge_bytes(&times.to_bytes());
        assert_eq!(again.buckets().map(|(_, count)| count).collect::<Vec<_>>(), [2, 254, 256, 40_000]);
        assert!(times.to_bytes().len() < 12);
        again.merge_bytes(&[255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255]);
    }
}
