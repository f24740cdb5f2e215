//! Downloads of ledger rows and of totals, made piece by piece as the client reads them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::console::{
    layout,
    page::{Operator, PageError, PageResult},
    usage::view::UsageView,
};
use crate::database::DatabaseError;
use crate::http::Response;
use crate::http::response::{BodyStream, BodyStreamError};
use crate::ledger::{LedgerRow, RowFilter, Span, Sums};
use crate::store::Store;
use crate::text::{cells, csv_line};
use crate::when::{self, Range};

const ROWS_PER_PIECE: usize = 500;

const TOTALS_COLUMNS: [&str; 9] = [
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

/// The most exports in progress: each holds a piece in memory.
const MAX_EXPORTS: usize = 4;

/// The next piece of a download, empty if nothing was found yet; `None` at the end.
type NextPiece = Result<Option<String>, DatabaseError>;

struct Download<F> {
    next_piece: F,
    /// The number of downloads in progress, this one included.
    running: Arc<AtomicUsize>,
}

impl<F> Drop for Download<F> {
    fn drop(&mut self) {
        self.running.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<F: FnMut() -> NextPiece + Send> BodyStream for Download<F> {
    fn next(&mut self) -> Result<Option<Vec<u8>>, BodyStreamError> {
        let piece = (self.next_piece)().map_err(|error| {
            log::error!("console, export: {error}");
            BodyStreamError
        })?;
        Ok(piece.map(String::into_bytes))
    }
}

/// A spreadsheet reads a CSV file as UTF-8 if it begins with this.
const BYTE_ORDER_MARK: &str = "\u{feff}";

pub fn rows(operator: &Operator, is_json: bool) -> PageResult {
    let (extension, opening) = if is_json {
        ("json", "[".into())
    } else {
        (
            "csv",
            BYTE_ORDER_MARK.to_owned() + &LedgerRow::csv_heading(),
        )
    };
    let store = &operator.console.store;
    let view = UsageView::from_request(operator, &store.keys.list()?)?;
    let pieces = row_pieces(Arc::clone(store), view.row_filter(), is_json);
    start(operator, &view, "usage", extension, opening, pieces)
}

/// Makes the pieces of the export, one at each call.
fn row_pieces(store: Arc<Store>, filter: RowFilter, is_json: bool) -> impl FnMut() -> NextPiece {
    let (mut after, mut is_done, mut separator) = (None, false, "");
    move || {
        if is_done {
            return Ok(None);
        }
        let listing = store
            .ledger
            .oldest(&filter, after.as_deref(), ROWS_PER_PIECE)?;
        let mut piece = String::new();
        for row in &listing.rows {
            if is_json {
                let row = serde_json::to_string(row).expect("a row should have its JSON");
                piece += &format!("{separator}\n{row}");
                separator = ",";
            } else {
                piece += &row.csv_line();
            }
        }
        is_done = listing.next.is_none();
        after = listing.next;
        if is_done && is_json {
            piece += "\n]\n";
        }
        // A search for rare rows has empty pieces, so that it does not hold a thread until it finds
        // one.
        Ok(Some(piece))
    }
}

/// The totals by key and day, for billing. A piece is a day, so that the memory does not grow with
/// the range.
pub fn totals(operator: &Operator) -> PageResult {
    let console = operator.console;
    let keys = console.store.keys.list()?;
    let view = UsageView::from_request(operator, &keys)?;
    // Before the first piece: a download that has begun can't be refused.
    console.store.ledger.check_rows_of(view.range)?;
    let heading = BYTE_ORDER_MARK.to_owned() + &csv_line(&TOTALS_COLUMNS.map(String::from));
    let names = keys.into_iter().map(|key| (key.id, key.name)).collect();
    let (store, asked) = (Arc::clone(&console.store), view.clone());
    let mut next = view.range.since;
    start(operator, &view, "totals", "csv", heading, move || {
        let (since, until) = (next, asked.range.until);
        if since >= until {
            return Ok(None);
        }
        next = when::interval_end(since, when::DAY).min(until);
        day_lines(&store, &asked, &names, Range { since, until: next }).map(Some)
    })
}

/// A line for each key that had requests on a day.
fn day_lines(
    store: &Store,
    view: &UsageView,
    names: &BTreeMap<String, String>,
    day: Range,
) -> Result<String, DatabaseError> {
    let matching = view.matching();
    let mut by_key: BTreeMap<String, Sums> = BTreeMap::new();
    store.ledger.figures(Span::Day, day, view.filter(), |row| {
        if matching.includes(row.status, row.error_code.as_deref()) {
            by_key.entry(row.key_id).or_default().add(&row.sums);
        }
    })?;
    let date = when::iso(day.since).unwrap_or_default()[..10].to_owned();
    let line = |(id, sums): (String, Sums)| {
        let name = names.get(&id).cloned().unwrap_or_default();
        let mut line = vec![date.clone(), id, name];
        line.extend(cells(&sums, TOTALS_COLUMNS.into_iter().skip(line.len())));
        csv_line(&line)
    };
    Ok(by_key.into_iter().map(line).collect())
}

/// Begins a download. `next_piece` makes the rest of it.
fn start(
    operator: &Operator,
    view: &UsageView,
    name: &str,
    extension: &str,
    opening: String,
    next_piece: impl FnMut() -> NextPiece + Send + 'static,
) -> PageResult {
    if !view.key_text.is_empty() {
        return Err(PageError::AmbiguousKey);
    }
    if operator.request.http.head.needs_keep_alive_header {
        // HTTP/1.0 has no chunked encoding.
        return Err(PageError::Method);
    }
    let running = Arc::clone(&operator.console.exports);
    let more = |count| (count < MAX_EXPORTS).then_some(count + 1);
    running
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
        .map_err(|_| PageError::TooManyExports)?;
    let rest = Download {
        next_piece,
        running,
    };
    let content_type = if extension == "json" {
        "application/json"
    } else {
        "text/csv; charset=utf-8"
    };
    let [from, to] = view.dates().map(|time| time.replace(':', ""));
    let mut response = layout::headers(Response::new(200, content_type, opening.into_bytes()))
        .with(
            "content-disposition",
            format!("attachment; filename=\"adriaticum-{name}-{from}-to-{to}.{extension}\""),
        );
    response.rest = Some(Box::new(rest));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Matching, SEARCHED_ROWS};
    use crate::store::tests::Temporary;

    /// An export of few rows among many held one of the console's two threads until it found the
    /// first.
    #[test]
    fn a_piece_takes_one_search() {
        let temporary = Temporary::sqlite();
        let rows = 2 * SEARCHED_ROWS + 1;
        temporary.store.tamper(&format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
             INSERT INTO usage (request_id, key_id, key_name, created, status, duration_ms)
             SELECT printf('chatcmpl_%012x%020x', 150000, i), 'key_1', 'x', 150, 200,
             CASE i WHEN {rows} THEN 9000 ELSE 1 END FROM n"
        ));
        let filter = RowFilter {
            range: Range {
                since: 100,
                until: 200,
            },
            key_id: None,
            gateway: None,
            matching: Matching::Anything,
            cause: None,
            least_ms: Some(5000),
            most_ms: None,
        };
        let mut next_piece = row_pieces(Arc::new(temporary.open_again()), filter, false);
        let mut lines = Vec::new();
        while let Some(piece) = next_piece().expect("a piece") {
            lines.push(piece.matches('\n').count());
        }
        assert_eq!(lines, [0, 0, 1]);
    }
}
