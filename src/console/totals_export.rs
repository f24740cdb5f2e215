//! A download of the totals by key and day, for billing. It is made a day at a time, so that the memory does not grow with the
//! range.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::export::{BYTE_ORDER_MARK, start};
use super::page_request::PageRequest;
use super::usage_view::UsageView;
use super::{Console, PageResult};
use crate::http::response::{Broken, Pieces};
use crate::store::{Range, Span, Store, StoreError, Sums};
use crate::text::csv_line;
use crate::when;

const COLUMNS: [&str; 9] = [
    "day",
    "key_id",
    "key_name",
    "requests",
    "errors",
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "unmeasured",
];

struct Totals {
    store: Arc<Store>,
    view: UsageView,
    names: BTreeMap<String, String>,
    /// The start of the next day.
    next: i64,
    _permit: Arc<()>,
}

pub fn csv(console: &Console, request: &PageRequest) -> PageResult {
    let keys = console.store.list_keys()?;
    let view = UsageView::read(&request.query, request.now).with_key(&keys);
    let heading = BYTE_ORDER_MARK.to_owned() + &csv_line(&COLUMNS.map(String::from));
    start(console, request, &view, "totals.csv", heading, |permit| Totals {
        store: Arc::clone(&console.store),
        next: view.range.since,
        view: view.clone(),
        names: keys.into_iter().map(|key| (key.id, key.name)).collect(),
        _permit: permit,
    })
}

impl Pieces for Totals {
    fn next(&mut self) -> Result<Option<Vec<u8>>, Broken> {
        let since = self.next;
        if since >= self.view.range.until {
            return Ok(None);
        }
        let day = Span::Day.seconds();
        self.next = ((since.div_euclid(day) + 1) * day).min(self.view.range.until);
        self.day(Range { since, until: self.next }).map(|lines| Some(lines.into_bytes())).map_err(|error| {
            log::error!("console, totals: {error}");
            Broken
        })
    }
}

impl Totals {
    /// A line for each key that had requests.
    fn day(&self, range: Range) -> Result<String, StoreError> {
        let mut by_key: BTreeMap<String, Sums> = BTreeMap::new();
        self.store.figures(Span::Day, range, self.view.filter(), &self.view.matching(), |row| {
            by_key.entry(row.key_id).or_default().add(&row.sums);
        })?;
        let date = when::iso(range.since).unwrap_or_default()[..10].to_owned();
        let line = |(id, sums): (String, Sums)| {
            let name = self.names.get(&id).cloned().unwrap_or_default();
            let figures = [
                sums.requests,
                sums.errors,
                sums.prompt_tokens,
                sums.completion_tokens,
                sums.total_tokens,
                sums.unmeasured,
            ];
            let mut cells = vec![date.clone(), id, name];
            cells.extend(figures.map(|figure| figure.to_string()));
            csv_line(&cells)
        };
        Ok(by_key.into_iter().map(line).collect())
    }
}
