//! Exports of ledger rows and of totals. What is too long for one response is a command's work.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::console::{
    layout,
    page::{Operator, PageError, PageResult},
    usage::view::UsageView,
};
use crate::database::Problem;
use crate::http::Response;
use crate::ledger::{LedgerRow, RowFilter, Span, Sums};
use crate::store::Store;
use crate::text::{cells, csv_line};

/// The most lines of an export, which is a response of some 4 MB.
const MAX_LINES: usize = 10_000;

/// A search for rare rows among many holds a thread of the console for this long.
const LONGEST_SEARCH: Duration = Duration::from_secs(5);

/// As many as the ledger searches at a time.
const ROWS_PER_READ: usize = 2_000;

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

/// A spreadsheet reads a CSV file as UTF-8 if it begins with this.
const BYTE_ORDER_MARK: &str = "\u{feff}";

pub fn rows(operator: &Operator, is_json: bool) -> PageResult {
    let store = &operator.console.store;
    let view = UsageView::from_request(operator, &store.keys.list()?)?;
    // The command's own limit is 100 rows; this is its highest.
    let (format, command) = if is_json {
        ("json", "usage list --limit 100000 --json")
    } else {
        ("csv", "usage list --limit 100000 --csv")
    };
    export(operator, &view, "usage", format, command, |deadline| {
        let lines = row_lines(store, &view.row_filter(), is_json, deadline)?;
        Ok(lines.map(|lines| match is_json {
            true => format!("[{lines}\n]\n"),
            false => LedgerRow::csv_heading() + &lines,
        }))
    })
}

/// The lines of an export of rows; `None` if there are too many or the search takes too long.
fn row_lines(
    store: &Store,
    filter: &RowFilter,
    is_json: bool,
    deadline: Instant,
) -> Result<Option<String>, Problem> {
    let (mut text, mut lines, mut after) = (String::new(), 0, None);
    loop {
        let listing = store
            .ledger
            .oldest(filter, after.as_deref(), ROWS_PER_READ)?;
        for row in &listing.rows {
            if is_json {
                let separator = if text.is_empty() { "\n" } else { ",\n" };
                let row = serde_json::to_string(row).expect("a row should have its JSON");
                text.extend([separator, &row]);
            } else {
                text += &row.csv_line(&store.zone);
            }
        }
        lines += listing.rows.len();
        after = listing.next;
        if lines > MAX_LINES || (after.is_some() && Instant::now() >= deadline) {
            return Ok(None);
        }
        if after.is_none() {
            return Ok(Some(text));
        }
    }
}

/// The totals by key and day, for billing.
pub fn totals(operator: &Operator) -> PageResult {
    let store = &operator.console.store;
    let keys = store.keys.list()?;
    let view = UsageView::from_request(operator, &keys)?;
    let names: BTreeMap<String, String> = keys.into_iter().map(|key| (key.id, key.name)).collect();
    let command = "usage --by day,key --csv";
    export(operator, &view, "totals", "csv", command, |_| {
        let matching = view.matching();
        let mut by_day: BTreeMap<(String, String), Sums> = BTreeMap::new();
        store
            .ledger
            .figures(Span::Day, view.range, view.filter(), |row| {
                let is_wanted = matching.includes(row.status, row.error_code.as_deref());
                if is_wanted && by_day.len() <= MAX_LINES {
                    by_day
                        .entry((row.day, row.key_id))
                        .or_default()
                        .add(&row.sums);
                }
            })?;
        if by_day.len() > MAX_LINES {
            return Ok(None);
        }
        let mut text = csv_line(&TOTALS_COLUMNS.map(String::from));
        for ((day, id), sums) in by_day {
            let name = names.get(&id).cloned().unwrap_or_default();
            let mut line = vec![day, id, name];
            line.extend(cells(&sums, TOTALS_COLUMNS.into_iter().skip(line.len())));
            text += &csv_line(&line);
        }
        Ok(Some(text))
    })
}

/// Answers with the text that `write` makes before its deadline. Refuses another export meanwhile,
/// because each is in memory, and names the command for what `write` can't make.
fn export(
    operator: &Operator,
    view: &UsageView,
    name: &str,
    format: &str,
    command: &str,
    write: impl FnOnce(Instant) -> Result<Option<String>, Problem>,
) -> PageResult {
    if !view.key_text.is_empty() {
        return Err(PageError::AmbiguousKey);
    }
    let exports = &operator.console.exports;
    let permit = Arc::clone(exports);
    // The console's own, and this one.
    if Arc::strong_count(exports) > 2 {
        return Err(PageError::TooManyExports);
    }
    let Some(text) = write(Instant::now() + LONGEST_SEARCH)? else {
        let is_local = operator.request.http.client.is_local();
        let arguments = format!("{command}{}", options(view));
        let command = operator.console.config.command(&arguments, is_local);
        return Err(PageError::LargeExport(command));
    };
    let (content_type, mark) = match format {
        "json" => ("application/json", ""),
        _ => ("text/csv; charset=utf-8", BYTE_ORDER_MARK),
    };
    let [from, to] = view.dates().map(|time| time.replace(':', ""));
    let body = [mark, &text].concat().into_bytes();
    let mut response = layout::headers(Response::new(200, content_type, body)).with(
        "content-disposition",
        format!("attachment; filename=\"adriaticum-{name}-{from}-to-{to}.{format}\""),
    );
    response.permit = Some(permit);
    Ok(response)
}

/// The options of the commands for a view. They have none for its outcome, cause and durations.
fn options(view: &UsageView) -> String {
    let [since, until] = view.range.bounds(&view.zone);
    let mut options = format!(" --since {since} --until {until}");
    let quoted = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
    let gateway = view.gateway.as_deref().unwrap_or_default();
    for (option, value) in [("key", view.key_word()), ("gateway", gateway)] {
        if !value.is_empty() {
            options += &format!(" --{option} {}", quoted(value));
        }
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::usage::view::tests::view;
    use crate::ledger::{Filter, Matching};
    use crate::store::tests::Temporary;
    use crate::when::Range;

    /// Inserts rows of a second, of which the last is slow.
    fn insert(temporary: &Temporary, rows: usize) {
        temporary.store.tamper(&format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
             INSERT INTO usage (request_id, key_id, key_name, created, status, duration_ms, day)
             SELECT printf('chatcmpl_%012x%020x', 150000, i), 'key_1', 'x', 150, 200,
             CASE i WHEN {rows} THEN 9000 ELSE 1 END, '1970-01-01' FROM n"
        ));
    }

    fn filter(least_ms: Option<u32>) -> RowFilter {
        RowFilter {
            range: Range {
                since: 100,
                until: 200,
            },
            requests: Filter::ALL,
            matching: Matching::Anything,
            cause: None,
            least_ms,
            most_ms: None,
        }
    }

    #[test]
    fn an_export_has_a_bound() {
        let temporary = Temporary::sqlite();
        insert(&temporary, MAX_LINES);
        let lines = || {
            let deadline = Instant::now() + LONGEST_SEARCH;
            let lines = row_lines(&temporary.store, &filter(None), false, deadline);
            lines.expect("rows").map(|text| text.lines().count())
        };
        assert_eq!(lines(), Some(MAX_LINES));
        temporary.store.tamper(
            "INSERT INTO usage (request_id, key_id, key_name, created, status, day)
             VALUES ('chatcmpl_000000024abc', 'key_1', 'x', 150, 200, '1970-01-01')",
        );
        assert_eq!(lines(), None);
    }

    /// An export of few rows among many held one of the console's two threads until it found the
    /// first.
    #[test]
    fn an_export_ends_in_time() {
        let temporary = Temporary::sqlite();
        insert(&temporary, 2 * ROWS_PER_READ + 1);
        for (time, expected) in [
            (LONGEST_SEARCH, Some(2 * ROWS_PER_READ + 1)),
            (Duration::ZERO, None),
        ] {
            let all = filter(None);
            let lines = row_lines(&temporary.store, &all, false, Instant::now() + time);
            let found = lines.expect("rows").map(|text| text.lines().count());
            assert_eq!(found, expected);
        }
        let slow = filter(Some(5000));
        let lines = row_lines(&temporary.store, &slow, false, Instant::now());
        assert_eq!(
            lines.expect("rows").map(|text| text.lines().count()),
            Some(1)
        );
    }

    #[test]
    fn a_command_has_the_filters_that_it_knows() {
        let check = |query, expected| assert_eq!(options(&view(query)), expected, "{query}");
        check(
            "range=7d&outcome=failed",
            " --since 2026-01-09 --until 2026-01-15",
        );
        check(
            "from=2026-01-14T13:00&to=2026-01-15T00:30&gateway=it's",
            " --since 2026-01-14T13:00Z --until 2026-01-15T00:30Z --gateway 'it'\\''s'",
        );
    }
}
