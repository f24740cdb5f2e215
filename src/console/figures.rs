//! What a view adds up to: its totals, its bars, its keys and its errors.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use super::view::View;
use crate::store::{Durations, Key, Store, StoreError, Sums};
use crate::text::count;

/// How many keys have a colour of their own in a chart; the others share one.
const KEYS_SHOWN: usize = 4;

/// What came of requests, as the charts tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Succeeded,
    /// The client's fault: 4xx.
    Refused,
    /// Ours or the runtime's: 5xx, or interrupted; or the client went away.
    Failed,
}

impl Kind {
    pub fn of(status: Option<i64>) -> Self {
        match status {
            Some(200) => Self::Succeeded,
            Some(400..=499) => Self::Refused,
            _ => Self::Failed,
        }
    }
}

#[derive(Default)]
pub struct Figures {
    pub all: Sums,
    pub runtime: Durations,
    pub own: Durations,
    pub bars: Vec<Bar>,
    /// By status and code, the most frequent first.
    pub errors: Vec<(Option<i64>, String, i64)>,
    /// Those with most tokens first.
    pub keys: Vec<KeyFigures>,
}

#[derive(Clone, Default)]
pub struct Bar {
    pub sums: Sums,
    /// The calls to the runtime.
    pub runtime: Durations,
    /// The rest of the requests' time.
    pub own: Durations,
    /// By kind, in their order.
    pub requests: [i64; 3],
}

/// What one key used.
#[derive(Default)]
pub struct KeyFigures {
    pub id: String,
    pub name: String,
    pub sums: Sums,
    pub runtime: Durations,
    /// Total tokens by bar.
    pub bars: Vec<i64>,
}

impl Figures {
    pub fn read(store: &Store, view: &View, keys: &[Key]) -> Result<Self, StoreError> {
        let bars = view.starts.len();
        let mut found = Self { bars: vec![Bar::default(); bars], ..Self::default() };
        let mut errors: BTreeMap<(Option<i64>, String), i64> = BTreeMap::new();
        let mut by_key: HashMap<String, KeyFigures> = HashMap::new();
        store.figures(view.span, view.range, view.filter(), &view.matching(), |row| {
            let Some(at) = view.bar(row.start) else {
                return;
            };
            let (bar, kind, sums) = (&mut found.bars[at], Kind::of(row.status), &row.sums);
            bar.sums.add(sums);
            bar.runtime.merge_bytes(&row.runtime);
            bar.own.merge_bytes(&row.own);
            bar.requests[kind as usize] += sums.requests;
            if kind != Kind::Succeeded {
                *errors.entry((row.status, row.error_code.unwrap_or_default())).or_default() += sums.requests;
            }
            let key = by_key
                .entry(row.key_id)
                .or_insert_with(|| KeyFigures { bars: vec![0; bars], ..KeyFigures::default() });
            key.sums.add(sums);
            key.runtime.merge_bytes(&row.runtime);
            key.bars[at] = key.bars[at].saturating_add(sums.total_tokens);
        })?;
        for bar in &found.bars {
            found.all.add(&bar.sums);
            found.runtime.merge(&bar.runtime);
            found.own.merge(&bar.own);
        }
        found.errors = errors.into_iter().map(|((status, code), count)| (status, code, count)).collect();
        found.errors.sort_by_key(|(_, _, count)| -count);
        let names: HashMap<&str, &str> =
            keys.iter().map(|key| (key.id.as_str(), key.name.as_str())).collect();
        let named = |(id, figures): (String, KeyFigures)| {
            let name = names.get(id.as_str()).map_or(id.clone(), |name| (*name).to_owned());
            KeyFigures { id, name, ..figures }
        };
        found.keys = by_key.into_iter().map(named).collect();
        found.keys.sort_by(|a, b| {
            let rank = |key: &KeyFigures| Reverse((key.sums.total_tokens, key.sums.requests));
            (rank(a), &a.name, &a.id).cmp(&(rank(b), &b.name, &b.id))
        });
        Ok(found)
    }

    /// The tokens by bar of the few keys that have most, and of all others together, with their names.
    pub fn tokens_by_key(&self) -> Vec<(String, Vec<i64>)> {
        let with_tokens: Vec<&KeyFigures> =
            self.keys.iter().filter(|key| key.sums.total_tokens > 0).collect();
        let (shown, others) = with_tokens.split_at(with_tokens.len().min(KEYS_SHOWN));
        let mut tokens: Vec<_> = shown.iter().map(|key| (key.name.clone(), key.bars.clone())).collect();
        if !others.is_empty() {
            let sum = |bar: usize| others.iter().map(|key| key.bars[bar]).fold(0, i64::saturating_add);
            tokens.push((count(others.len() as i64, "other"), (0..self.bars.len()).map(sum).collect()));
        }
        tokens
    }
}
