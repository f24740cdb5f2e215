//! The usage report of a range of time: totals, bars, keys and errors.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use super::bar_interval::BarInterval;
use super::chart::Series;
use super::view::UsageView;
use crate::database::{Problem, ProblemKind};
use crate::keys::Key;
use crate::ledger::{Span, SpanSums, Sums};
use crate::store::Store;
use crate::text::count;
use crate::when::Range;

/// The number of keys that have a colour of their own in a chart; the others share one.
const KEYS_IN_CHART: usize = 4;

/// The colours of keys in the style sheet, and the shades of each.
const COLOURS: usize = 6;
const SHADES: usize = 3;

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
    pub fn from_status(status: Option<i64>) -> Self {
        match status {
            Some(200) => Self::Succeeded,
            Some(400..=499) => Self::Refused,
            _ => Self::Failed,
        }
    }
}

pub struct UsageReport {
    /// All requests of the range, the key and the gateway: the base of rates and shares.
    pub all: Sums,
    /// The requests with the wanted outcome, which also all figures below count.
    pub selected: Sums,
    pub step: BarInterval,
    pub bars: Vec<Bar>,
    /// Status, code and number of requests, the most frequent first.
    pub errors: Vec<((Option<i64>, String), i64)>,
    /// The keys with most tokens first.
    pub keys: Vec<KeyUsage>,
    /// The milliseconds that the newest completions took, in ascending order, whatever the wanted
    /// outcome.
    pub durations: Vec<f64>,
}

pub struct Bar {
    pub range: Range,
    /// The number of requests by `ResultKind`.
    pub requests: [i64; 3],
}

#[derive(Default)]
pub struct KeyUsage {
    pub id: String,
    pub name: String,
    /// The position among all keys, the oldest first.
    pub place: usize,
    /// All requests of the key, and those with the wanted outcome.
    pub all: Sums,
    pub selected: Sums,
    /// The latter by bar.
    pub bars: Vec<Sums>,
}

impl UsageReport {
    /// Reads a range, by days if retention has removed the rows of shorter bars.
    pub fn read(store: &Store, view: &UsageView, keys: &[Key]) -> Result<Self, Problem> {
        match Self::read_by(Span::Minute, store, view, keys) {
            Err(problem) if problem.kind == ProblemKind::RowsRemoved => {
                Self::read_by(Span::Day, store, view, keys)
            }
            report => report,
        }
    }

    fn read_by(
        shortest: Span,
        store: &Store,
        view: &UsageView,
        keys: &[Key],
    ) -> Result<Self, Problem> {
        let (step, ranges) = BarInterval::fitting(view.range, shortest, &view.zone);
        let places: HashMap<&str, usize> = keys
            .iter()
            .enumerate()
            .map(|(place, key)| (key.id.as_str(), place))
            .collect();
        let [mut all, mut selected] = [Sums::default(), Sums::default()];
        let mut bars: Vec<Bar> = ranges
            .into_iter()
            .map(|range| Bar {
                range,
                requests: [0; 3],
            })
            .collect();
        let mut errors: BTreeMap<(Option<i64>, String), i64> = BTreeMap::new();
        let mut by_key: HashMap<String, KeyUsage> = HashMap::new();
        let matching = view.matching();
        let take = |row: SpanSums| {
            let key = by_key.entry(row.key_id).or_insert_with_key(|id| {
                let place = places.get(id.as_str()).copied().unwrap_or(keys.len());
                let name = keys.get(place).map_or(id, |key| &key.name).clone();
                let bars = vec![Sums::default(); bars.len()];
                KeyUsage {
                    id: id.clone(),
                    name,
                    place,
                    bars,
                    ..KeyUsage::default()
                }
            });
            all.add(&row.sums);
            key.all.add(&row.sums);
            if !matching.includes(row.status, row.error_code.as_deref()) {
                return;
            }
            // The range may begin inside a span.
            let start = row.start.max(view.range.since);
            let at = bars.partition_point(|bar| bar.range.until <= start);
            let kind = ResultKind::from_status(row.status);
            bars[at].requests[kind as usize] += row.sums.requests;
            if kind != ResultKind::Succeeded {
                *errors
                    .entry((row.status, row.error_code.unwrap_or_default()))
                    .or_default() += row.sums.requests;
            }
            selected.add(&row.sums);
            key.selected.add(&row.sums);
            key.bars[at].add(&row.sums);
        };
        store
            .ledger
            .figures(step.span(), view.range, view.filter(), take)?;
        let mut errors: Vec<_> = errors.into_iter().collect();
        errors.sort_by_key(|(_, count)| -count);
        let mut keys: Vec<_> = by_key
            .into_values()
            .filter(|key| key.selected.requests > 0)
            .collect();
        keys.sort_by(|a, b| {
            let rank = |key: &KeyUsage| Reverse((key.selected.total_tokens, key.selected.requests));
            (rank(a), &a.name, &a.id).cmp(&(rank(b), &b.name, &b.id))
        });
        let durations = store.ledger.newest_durations(&view.row_filter())?;
        Ok(Self {
            all,
            selected,
            step,
            bars,
            errors,
            keys,
            durations,
        })
    }

    /// The tokens by bar of the few keys that have most, and of all others together: their names
    /// and colours.
    pub fn tokens_by_key(&self) -> Vec<Series> {
        let series = |name: String, class: String, keys: &[&KeyUsage]| {
            let value = |bar: usize| {
                let mut sums = Sums::default();
                keys.iter().for_each(|key| sums.add(&key.bars[bar]));
                sums.measured()
            };
            Series {
                name,
                class,
                values: (0..self.bars.len()).map(value).collect(),
            }
        };
        let (mut most, mut others) = (Vec::<Series>::new(), Vec::new());
        for key in self.keys.iter().filter(|key| key.selected.total_tokens > 0) {
            let class = colour(key.place);
            if most.len() < KEYS_IN_CHART && most.iter().all(|other| other.class != class) {
                most.push(series(key.name.clone(), class, &[key]));
            } else {
                others.push(key);
            }
        }
        if !others.is_empty() {
            most.push(series(
                count(others.len() as i64, "other"),
                "others".into(),
                &others,
            ));
        }
        most
    }
}

/// The style sheet's classes for the colour of a key. It follows from the key's position among all
/// keys alone, so that it is the same on every page. Of two keys with the same colour, a chart has
/// the one with more tokens.
fn colour(place: usize) -> String {
    format!("k{} s{}", place % COLOURS, place / COLOURS % SHADES)
}

/// The tokens in, out and in all. A sum is unknown, not zero, if no completion was measured; every
/// prompt has tokens.
pub fn tokens(sums: &Sums) -> [Option<i64>; 3] {
    let total = sums.measured().filter(|_| sums.succeeded() > 0);
    let prompt = total
        .and(Some(sums.prompt_tokens))
        .filter(|tokens| *tokens > 0);
    [prompt, total.and(Some(sums.completion_tokens)), total]
}

/// The time that a share of durations in ascending order, from 0 to 1, did not exceed; `None` if
/// there are none.
pub fn percentile(durations: &[f64], share: f64) -> Option<f64> {
    let number = (durations.len() as f64 * share).ceil() as usize;
    durations.get(number.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_exact() {
        let durations: Vec<f64> = (1..=500).map(f64::from).collect();
        for (count, expected) in [
            (1, [1.0, 1.0, 1.0]),
            (2, [1.0, 2.0, 2.0]),
            (100, [50.0, 95.0, 99.0]),
            (500, [250.0, 475.0, 495.0]),
        ] {
            assert_eq!(
                [0.5, 0.95, 0.99].map(|share| percentile(&durations[..count], share)),
                expected.map(Some)
            );
        }
        assert_eq!(percentile(&[], 0.5), None);
    }

    #[test]
    fn a_key_keeps_its_colour_whatever_its_rank() {
        let looks: Vec<String> = (0..20).map(colour).collect();
        assert_eq!(
            looks.iter().collect::<std::collections::HashSet<_>>().len(),
            COLOURS * SHADES
        );
        assert_eq!(
            [0, 5, 6, 17, 18].map(colour),
            ["k0 s0", "k5 s0", "k0 s1", "k5 s2", "k0 s0"]
        );
    }
}
