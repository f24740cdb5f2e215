//! The usage report of a range of time: totals, bars, keys and errors.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use super::chart::Series;
use super::usage_view::UsageView;
use crate::store::{Key, Store, StoreError, Sums};
use crate::text::count;

/// The number of keys that have a colour of their own in a chart; the others share one.
const KEYS_IN_CHART: usize = 4;

/// The colours of keys in the style sheet.
const COLOURS: usize = 6;

/// The outcome of requests, as the charts distinguish it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResultKind {
    Succeeded,
    /// The client's fault: 4xx.
    Refused,
    /// The gateway's or the runtime's fault: 5xx; or the client went away.
    Failed,
}

impl ResultKind {
    pub fn of(status: Option<i64>) -> Self {
        match status {
            Some(200) => Self::Succeeded,
            Some(400..=499) => Self::Refused,
            _ => Self::Failed,
        }
    }
}

#[derive(Default)]
pub struct UsageReport {
    pub all: Sums,
    /// The milliseconds that the newest completions took, in ascending order.
    pub durations: Vec<f64>,
    pub bars: Vec<Bar>,
    /// Status, code and number of requests, the most frequent first.
    pub errors: Vec<(Option<i64>, String, i64)>,
    /// The keys with most tokens first.
    pub keys: Vec<KeyUsage>,
}

#[derive(Clone, Default)]
pub struct Bar {
    pub sums: Sums,
    /// The number of requests by `ResultKind`.
    pub requests: [i64; 3],
}

#[derive(Default)]
pub struct KeyUsage {
    pub id: String,
    pub name: String,
    /// Its position among all keys, the oldest first.
    pub place: usize,
    pub sums: Sums,
    /// Total tokens by bar.
    pub bars: Vec<i64>,
}

impl UsageReport {
    pub fn read(store: &Store, view: &UsageView, keys: &[Key]) -> Result<Self, StoreError> {
        let bars = view.starts.len();
        let places: HashMap<&str, usize> =
            keys.iter().enumerate().map(|(place, key)| (key.id.as_str(), place)).collect();
        let mut found = Self { bars: vec![Bar::default(); bars], ..Self::default() };
        let mut errors: BTreeMap<(Option<i64>, String), i64> = BTreeMap::new();
        let mut by_key: HashMap<String, KeyUsage> = HashMap::new();
        store.figures(view.span, view.covered, view.filter(), &view.matching(), |row| {
            let Some(at) = view.bar(row.start) else {
                return;
            };
            let (bar, kind, sums) = (&mut found.bars[at], ResultKind::of(row.status), &row.sums);
            bar.sums.add(sums);
            bar.requests[kind as usize] += sums.requests;
            if kind != ResultKind::Succeeded {
                *errors.entry((row.status, row.error_code.unwrap_or_default())).or_default() += sums.requests;
            }
            let key = by_key.entry(row.key_id).or_insert_with_key(|id| {
                let place = places.get(id.as_str()).copied().unwrap_or(keys.len());
                let name = keys.get(place).map_or(id, |key| &key.name).clone();
                KeyUsage { id: id.clone(), name, place, bars: vec![0; bars], ..KeyUsage::default() }
            });
            key.sums.add(sums);
            key.bars[at] = key.bars[at].saturating_add(sums.total_tokens);
        })?;
        found.bars.iter().for_each(|bar| found.all.add(&bar.sums));
        found.durations = store.newest_durations(&view.row_filter())?;
        found.errors = errors.into_iter().map(|((status, code), count)| (status, code, count)).collect();
        found.errors.sort_by_key(|(_, _, count)| -count);
        found.keys = by_key.into_values().collect();
        found.keys.sort_by(|a, b| {
            let rank = |key: &KeyUsage| Reverse((key.sums.total_tokens, key.sums.requests));
            (rank(a), &a.name, &a.id).cmp(&(rank(b), &b.name, &b.id))
        });
        Ok(found)
    }

    /// The time that a share of the newest completions, from 0 to 1, did not exceed; `None` if there are none.
    pub fn percentile(&self, share: f64) -> Option<f64> {
        let number = (self.durations.len() as f64 * share).ceil() as usize;
        self.durations.get(number.max(1) - 1).copied()
    }

    /// The tokens by bar of the few keys that have most, and of all others together: their names and colours.
    pub fn tokens_by_key(&self) -> Vec<Series> {
        let with_tokens: Vec<&KeyUsage> = self.keys.iter().filter(|key| key.sums.total_tokens > 0).collect();
        let (most, others) = with_tokens.split_at(with_tokens.len().min(KEYS_IN_CHART));
        let colours = colours(&most.iter().map(|key| key.place).collect::<Vec<_>>());
        let series = |name: String, class: String, keys: &[&KeyUsage]| {
            let sum = |bar: usize| keys.iter().map(|key| key.bars[bar]).fold(0, i64::saturating_add);
            Series { name, class, values: (0..self.bars.len()).map(sum).collect() }
        };
        let of = |(key, colour): (&&KeyUsage, usize)| series(key.name.clone(), format!("k{colour}"), &[key]);
        let mut all: Vec<Series> = most.iter().zip(colours).map(of).collect();
        if !others.is_empty() {
            all.push(series(count(others.len() as i64, "other"), "others".into(), others));
        }
        all
    }
}

/// Returns the colours of keys. A key's colour follows from its position among all keys, so that it stays the same when another
/// key has more tokens. If an older one of these keys has that colour, the next free one is used.
fn colours(places: &[usize]) -> Vec<usize> {
    let mut by_age: Vec<usize> = (0..places.len()).collect();
    by_age.sort_by_key(|&number| places[number]);
    let mut colours = vec![COLOURS; places.len()];
    for number in by_age {
        let wanted = (0..COLOURS).map(|step| (places[number] + step) % COLOURS);
        let free = wanted.clone().find(|colour| !colours.contains(colour));
        colours[number] = free.unwrap_or(places[number] % COLOURS);
    }
    colours
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_exact() {
        let report = |count: u32| UsageReport {
            durations: (1..=count).map(f64::from).collect(),
            ..UsageReport::default()
        };
        for (count, expected) in [
            (1, [1.0, 1.0, 1.0]),
            (2, [1.0, 2.0, 2.0]),
            (100, [50.0, 95.0, 99.0]),
            (500, [250.0, 475.0, 495.0]),
        ] {
            assert_eq!([0.5, 0.95, 0.99].map(|share| report(count).percentile(share)), expected.map(Some));
        }
        assert_eq!(report(0).percentile(0.5), None);
    }

    #[test]
    fn a_key_keeps_its_colour_whatever_its_rank() {
        assert_eq!(colours(&[0, 1, 2, 3]), [0, 1, 2, 3]);
        assert_eq!(colours(&[3, 2, 1, 0]), [3, 2, 1, 0]);
        assert_eq!(colours(&[6, 0, 7]), [1, 0, 2], "the older one has it");
        assert_eq!(colours(&[11, 5]), [0, 5]);
    }
}
