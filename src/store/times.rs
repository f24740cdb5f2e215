//! How long things took, many of them in a few bytes: counts in classes, each a tenth wider than the one before.
//! A percentile read from it is within a twentieth of the true one.

/// How many classes there are: from 10 µs to a day and beyond.
const CLASSES: usize = 242;

/// Where the first class ends, in milliseconds.
const FIRST: f64 = 0.01;

/// How much wider each class is than the one before.
const WIDER: f64 = 1.1;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Times {
    counts: [u64; CLASSES],
}

impl Default for Times {
    fn default() -> Self {
        Self { counts: [0; CLASSES] }
    }
}

impl Times {
    pub fn add(&mut self, milliseconds: f64) {
        let class = ((milliseconds / FIRST).ln() / WIDER.ln()).ceil();
        // What is not a number counts as nothing took: the conversion says so too.
        self.counts[(class.max(0.0) as usize).min(CLASSES - 1)] += 1;
    }

    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
    }

    /// The time in milliseconds that a share of them, from 0 to 1, did not exceed; None of none.
    pub fn percentile(&self, share: f64) -> Option<f64> {
        let all: u64 = self.counts.iter().sum();
        let wanted = ((all as f64 * share).ceil() as u64).max(1);
        let mut passed = 0;
        let class = self.counts.iter().position(|count| {
            passed += count;
            passed >= wanted
        })?;
        // The middle of the class, as far from one end as from the other.
        Some(FIRST * WIDER.powf(class as f64 - 0.5))
    }

    /// The classes that are not empty: each its number, and its count in groups of seven bits.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (class, &count) in self.counts.iter().enumerate().filter(|&(_, &count)| count > 0) {
            bytes.push(class as u8);
            let mut left = count;
            while left >= 0x80 {
                bytes.push(left as u8 | 0x80);
                left >>= 7;
            }
            bytes.push(left as u8);
        }
        bytes
    }

    /// Adds what `to_bytes` gave. What is no such thing adds nothing wrong that could harm: a wrong count.
    pub(super) fn merge_bytes(&mut self, bytes: &[u8]) {
        let mut bytes = bytes.iter();
        while let Some(&class) = bytes.next() {
            let (mut count, mut shift) = (0_u64, 0);
            for &byte in bytes.by_ref() {
                count |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
                shift += 7;
                if byte & 0x80 == 0 {
                    break;
                }
            }
            if let Some(known) = self.counts.get_mut(usize::from(class)) {
                *known = known.saturating_add(count);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_within_a_twentieth() {
        assert_eq!(Times::default().percentile(0.5), None);
        for scale in [0.02, 0.3, 1.0, 47.0, 9_000.0] {
            let mut times = Times::default();
            for number in 1..=1000 {
                times.add(f64::from(number) * scale);
            }
            for share in [0.05, 0.5, 0.95, 0.99] {
                let (found, exact) =
                    (times.percentile(share).expect("there are some"), share * 1000.0 * scale);
                assert!((found / exact - 1.0).abs() < 0.055, "{share} of {scale}: {found}, not {exact}");
            }
        }
        let mut one = Times::default();
        one.add(250.0);
        assert!((one.percentile(0.5).expect("there is one") / 250.0 - 1.0).abs() < 0.055);
    }

    #[test]
    fn odd_times_do_no_harm() {
        let mut times = Times::default();
        for odd in [0.0, -5.0, f64::NAN, f64::INFINITY, 1e300, f64::MIN_POSITIVE] {
            times.add(odd);
        }
        assert_eq!(times.counts.iter().sum::<u64>(), 6);
    }

    #[test]
    fn bytes_and_back() {
        let mut times = Times::default();
        for (time, count) in [(0.001, 1), (3.0, 127), (4.0, 128), (900.0, 20_000)] {
            for _ in 0..count {
                times.add(time);
            }
        }
        let mut again = Times::default();
        again.merge_bytes(&times.to_bytes());
        assert_eq!(again, times);
        again.merge_bytes(&times.to_bytes());
        let mut twice = times.clone();
        twice.merge(&times);
        assert_eq!(again, twice);
        assert!(times.to_bytes().len() < 12);
        again.merge_bytes(&[255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255]);
    }
}
