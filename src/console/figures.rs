//! What a view adds up to: its totals, its bars, its keys and its errors.

use std::collections::BTreeMap;

use super::view::View;
use crate::store::{Key, SpanSums, Store, StoreError};

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
    pub all: SpanSums,
    pub succeeded: i64,
    pub bars: Vec<Bar>,
    /// By status and code, the most frequent first.
    pub errors: Vec<(Option<i64>, String, i64)>,
    /// The keys with most tokens: their names, or one for all others.
    pub keys: Vec<String>,
    /// Rows that are not in it yet.
    pub missing: i64,
}

#[derive(Clone, Default)]
pub struct Bar {
    pub sums: SpanSums,
    /// By kind, in their order.
    pub requests: [i64; 3],
    /// Total tokens, in the order of `Figures::keys`.
    pub tokens: Vec<i64>,
}

impl Figures {
    pub fn read(store: &Store, view: &View, keys: &[Key]) -> Result<Self, StoreError> {
        let matching = view.matching();
        let mut found = Self { bars: vec![Bar::default(); view.bars()], ..Self::default() };
        let mut errors: BTreeMap<(Option<i64>, String), i64> = BTreeMap::new();
        let mut tokens: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        found.missing = store.figures(view.span, view.range, view.filter(), |figures| {
            if !matching.takes(figures.status, figures.error_code.as_deref()) {
                return;
            }
            let at = ((figures.start - view.range.since) / view.width) as usize;
            let Some(bar) = found.bars.get_mut(at) else {
                return;
            };
            let kind = Kind::of(figures.status);
            bar.requests[kind as usize] += figures.sums.requests;
            bar.sums.add(&figures.sums);
            found.all.add(&figures.sums);
            match kind {
                Kind::Succeeded => found.succeeded += figures.sums.requests,
                Kind::Refused | Kind::Failed => {
                    *errors.entry((figures.status, figures.error_code.unwrap_or_default())).or_default() +=
                        figures.sums.requests;
                }
            }
            if figures.sums.total_tokens > 0 {
                tokens.entry(figures.key_id).or_insert_with(|| vec![0; view.bars()])[at] +=
                    figures.sums.total_tokens;
            }
        })?;
        found.errors = errors.into_iter().map(|((status, code), count)| (status, code, count)).collect();
        found.errors.sort_by_key(|(_, _, count)| -count);
        found.share_out(tokens, keys);
        Ok(found)
    }

    /// Gives each bar its tokens by key: those of the few that have most, and those of all others.
    fn share_out(&mut self, tokens: BTreeMap<String, Vec<i64>>, keys: &[Key]) {
        let name =
            |id: &str| keys.iter().find(|key| key.id == id).map_or(id.to_owned(), |key| key.name.clone());
        let mut ranked: Vec<(String, Vec<i64>)> = tokens.into_iter().collect();
        ranked.sort_by_key(|(_, bars)| -bars.iter().sum::<i64>());
        let others = ranked.split_off(ranked.len().min(KEYS_SHOWN));
        self.keys = ranked.iter().map(|(id, _)| name(id)).collect();
        if !others.is_empty() {
            self.keys.push(format!("{} others", others.len()));
        }
        for (at, bar) in self.bars.iter_mut().enumerate() {
            bar.tokens = ranked.iter().map(|(_, bars)| bars[at]).collect();
            if !others.is_empty() {
                bar.tokens.push(others.iter().map(|(_, bars)| bars[at]).sum());
            }
        }
    }

    /// Completions whose tokens the runtime did measure.
    pub fn measured(&self) -> i64 {
        self.succeeded - self.all.unmeasured
    }
}
