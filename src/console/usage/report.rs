//! The figures of a range of time: totals, bars, and groups.

use std::collections::HashMap;

use super::axis::BarInterval;
use super::chart::Series;
use crate::console::filters::Asked;
use crate::database::{Problem, ProblemKind};
use crate::keys::Key;
use crate::ledger::{Groups, Span, SpanSums, Sums, UsageRow};
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
    fn from_status(status: Option<i64>) -> Self {
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
    /// What each bar covers.
    pub bars: Vec<Range>,
    /// The number of requests by `ResultKind`, of each bar.
    pub requests: Vec<[i64; 3]>,
    /// The sums of each key, of each bar.
    keys: HashMap<String, Vec<Sums>>,
    pub rows: Vec<UsageRow>,
    /// The milliseconds that the newest completions took, in ascending order, whatever the wanted
    /// outcome.
    pub durations: Vec<f64>,
}

impl UsageReport {
    /// Reads a range, by days if retention has removed the rows of shorter bars.
    pub fn read(store: &Store, asked: &Asked) -> Result<Self, Problem> {
        match Self::read_by(Span::Minute, store, asked) {
            Err(problem) if problem.kind == ProblemKind::RowsRemoved => {
                Self::read_by(Span::Day, store, asked)
            }
            report => report,
        }
    }

    fn read_by(shortest: Span, store: &Store, asked: &Asked) -> Result<Self, Problem> {
        let query = &asked.query;
        let (filter, by) = (query.row_filter(), [query.grouping()]);
        let (step, bars) = BarInterval::fitting(query.range, shortest, &query.zone);
        let [mut all, mut selected] = [Sums::default(), Sums::default()];
        let mut requests = vec![[0; 3]; bars.len()];
        let mut keys: HashMap<String, Vec<Sums>> = HashMap::new();
        let mut groups = Groups::new(&by, &query.zone);
        let take = |row: SpanSums| {
            let is_wanted = filter
                .matching
                .includes(row.status, row.error_code.as_deref());
            all.add(&row.sums);
            groups.add(&row, is_wanted);
            if is_wanted {
                // The range may begin inside a span.
                let start = row.start.max(query.range.since);
                let at = bars.partition_point(|bar| bar.until <= start);
                selected.add(&row.sums);
                requests[at][ResultKind::from_status(row.status) as usize] += row.sums.requests;
                let key = keys.entry(row.key_id);
                key.or_insert_with(|| vec![Sums::default(); bars.len()])[at].add(&row.sums);
            }
        };
        let requested = filter.requests.clone();
        store
            .ledger
            .figures(step.span(), query.range, requested, take)?;
        let names = asked
            .keys
            .iter()
            .map(|key| (key.id.clone(), key.name.clone()));
        Ok(Self {
            all,
            selected,
            step,
            requests,
            rows: groups.rows(&names.collect()),
            durations: store.ledger.newest_durations(&filter)?,
            bars,
            keys,
        })
    }

    /// The tokens by bar of the few keys that have most, and of all others together: their names
    /// and colours.
    pub fn tokens_by_key(&self, known: &[Key]) -> Vec<Series> {
        let places = known.iter().enumerate();
        let places: HashMap<&str, usize> = places
            .map(|(place, key)| (key.id.as_str(), place))
            .collect();
        let place = |id: &str| places.get(id).copied().unwrap_or(known.len());
        let tokens = |bars: &[Sums]| bars.iter().map(|sums| sums.total_tokens).sum::<i64>();
        let mut keys: Vec<(i64, usize, &String)> = self
            .keys
            .iter()
            .map(|(id, bars)| (-tokens(bars), place(id), id))
            .collect();
        keys.retain(|(tokens, ..)| *tokens < 0);
        keys.sort_unstable();
        let series = |name: String, class: String, ids: &[&String]| {
            let value = |bar: usize| {
                let mut sums = Sums::default();
                ids.iter().for_each(|id| sums.add(&self.keys[*id][bar]));
                sums.measured()
            };
            Series {
                name,
                class,
                values: (0..self.bars.len()).map(value).collect(),
            }
        };
        let (mut most, mut others) = (Vec::<Series>::new(), Vec::new());
        for (_, place, id) in keys {
            let class = colour(place);
            if most.len() < KEYS_IN_CHART && most.iter().all(|other| other.class != class) {
                let name = known.get(place).map_or(id, |key| &key.name);
                most.push(series(name.clone(), class, &[id]));
            } else {
                others.push(id);
            }
        }
        if !others.is_empty() {
            let name = count(others.len() as i64, "other");
            most.push(series(name, "others".into(), &others));
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
