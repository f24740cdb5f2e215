//! Downloads of ledger rows as CSV or JSON, made piece by piece as the client reads them.

use std::sync::Arc;
use std::time::Duration;

use super::page_request::PageRequest;
use super::usage_view::UsageView;
use super::{Console, PageError, PageResult, layout};
use crate::http::Response;
use crate::http::response::{Broken, Pieces};
use crate::store::{LEDGER_COLUMNS, LedgerRow, RowFilter, Store};
use crate::text::{cells, csv_line};
use crate::when;

/// The most rows of a piece.
const ROWS_PER_PIECE: usize = 500;

/// The most exports in progress: each holds a piece in memory.
const MAX_EXPORTS: usize = 4;

struct Export {
    store: Arc<Store>,
    which: RowFilter,
    is_json: bool,
    /// The last row that was sent.
    after: Option<String>,
    is_first: bool,
    is_done: bool,
    /// Counts this export among those in progress.
    _permit: Arc<()>,
}

fn columns() -> Vec<&'static str> {
    LEDGER_COLUMNS.split(',').map(str::trim).collect()
}

/// A line of the CSV: the columns of the ledger and, beside the Unix time, a time that a spreadsheet understands.
fn csv_line_with_time(mut cells: Vec<String>, time: String) -> String {
    let created = columns().iter().position(|name| *name == "created").expect("a row has its time");
    cells.insert(created + 1, time);
    csv_line(&cells)
}

/// A spreadsheet reads a CSV file as UTF-8 if it begins with this.
pub const BYTE_ORDER_MARK: &str = "\u{feff}";

pub fn rows(console: &Console, request: &PageRequest, is_json: bool) -> PageResult {
    let heading = csv_line_with_time(columns().into_iter().map(String::from).collect(), "created_utc".into());
    let (extension, opening) =
        if is_json { ("json", "[".into()) } else { ("csv", BYTE_ORDER_MARK.to_owned() + &heading) };
    let view = UsageView::read(&request.query, request.now);
    start(console, request, &view, &format!("usage.{extension}"), opening, |permit| Export {
        store: Arc::clone(&console.store),
        which: view.row_filter(),
        is_json,
        after: None,
        is_first: true,
        is_done: false,
        _permit: permit,
    })
}

/// Begins a download. `pieces` makes the rest of it and holds its permit until the end.
pub fn start<P: Pieces + 'static>(
    console: &Console,
    request: &PageRequest,
    view: &UsageView,
    file: &str,
    opening: String,
    pieces: impl FnOnce(Arc<()>) -> P,
) -> PageResult {
    if request.http.head.needs_keep_alive_header {
        // HTTP/1.0 has no chunked encoding.
        return Err(PageError::Method);
    }
    // Cloned before it is counted, so that two can't both be the last. The console has one of them itself.
    let permit = Arc::clone(&console.exports);
    if Arc::strong_count(&permit) > 1 + MAX_EXPORTS {
        return Err(PageError::Wait(Duration::from_secs(10)));
    }
    let (name, extension) = file.split_once('.').expect("a file's name with its extension");
    let content_type = if extension == "json" { "application/json" } else { "text/csv; charset=utf-8" };
    let [from, to] = view.dates().map(|time| time.replace(':', ""));
    let mut response = layout::headers(Response::new(200, content_type, opening.into_bytes())).with(
        "content-disposition",
        format!("attachment; filename=\"adriaticum-{name}-{from}-to-{to}.{extension}\""),
    );
    response.rest = Some(Box::new(pieces(permit)));
    Ok(response)
}

impl Pieces for Export {
    fn next(&mut self) -> Result<Option<Vec<u8>>, Broken> {
        if self.is_done {
            return Ok(None);
        }
        let listing =
            self.store.oldest(&self.which, self.after.as_deref(), ROWS_PER_PIECE).map_err(|error| {
                log::error!("console, export: {error}");
                Broken
            })?;
        let mut piece: String = listing.rows.iter().map(|row| self.text(row)).collect();
        self.is_done = listing.next.is_none();
        self.after = listing.next;
        if self.is_done && self.is_json {
            piece += "\n]\n";
        }
        // A search for rare rows has empty pieces, so that it does not hold a thread until it finds one.
        Ok(Some(piece.into_bytes()))
    }
}

impl Export {
    fn text(&mut self, row: &LedgerRow) -> String {
        if !self.is_json {
            return csv_line_with_time(cells(row, columns()), when::iso(row.created).unwrap_or_default());
        }
        let separator = if self.is_first { "" } else { "," };
        self.is_first = false;
        format!("{separator}\n{}", serde_json::to_string(row).expect("a row should have its JSON"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::Temporary;
    use crate::store::{Matching, Range, SEARCHED_ROWS};

    /// An export of few rows among many held one of the console's two threads until it found the first.
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
        let mut export = Export {
            store: Arc::new(temporary.open_again()),
            which: RowFilter {
                range: Range { since: 100, until: 200 },
                key_id: None,
                gateway: None,
                matching: Matching::Anything,
                cause: None,
                least_ms: Some(5000),
                most_ms: None,
            },
            is_json: false,
            after: None,
            is_first: true,
            is_done: false,
            _permit: Arc::default(),
        };
        let mut lines = Vec::new();
        while let Some(piece) = export.next().expect("a piece") {
            lines.push(piece.iter().filter(|byte| **byte == b'\n').count());
        }
        assert_eq!(lines, [0, 0, 1]);
    }
}
