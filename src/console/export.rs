//! Exports of the console: requests, and totals. What is too long for one response is a command's
//! work.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::filters::{self, Asked};
use super::page::{Operator, PageError, PageResult, with_headers};
use crate::database::Problem;
use crate::http::Response;
use crate::ledger::{Grouping, Groups, RowFilter, Span};
use crate::report::query::Query;
use crate::report::rows::{FIGURES, csv, request_csv, requests_csv_heading};
use crate::store::Store;
use crate::text::{cells, shell_word};

/// The most lines of an export, which is a response of some 4 MB.
const MAX_LINES: usize = 10_000;

/// A search for rare rows among many holds a thread of the console for this long.
const LONGEST_SEARCH: Duration = Duration::from_secs(5);

/// As many as the ledger searches at a time.
const ROWS_PER_READ: usize = 2_000;

/// A spreadsheet reads a CSV file as UTF-8 if it begins with this.
const BYTE_ORDER_MARK: &str = "\u{feff}";

pub fn requests(operator: &Operator) -> PageResult {
    let asked = filters::read(operator, "/requests")?;
    let store = &operator.console.store;
    // The command's own limit is 100 rows; this is its highest.
    let command = "usage list --limit 100000 --csv";
    export(operator, &asked, "usage", command, |deadline| {
        request_lines(store, &asked.query.row_filter(), deadline)
    })
}

/// The lines of an export; `None` if there are too many or the search takes too long.
fn request_lines(
    store: &Store,
    filter: &RowFilter,
    deadline: Instant,
) -> Result<Option<String>, Problem> {
    let (mut text, mut lines, mut after) = (requests_csv_heading(), 0, None);
    loop {
        let listing = store
            .ledger
            .oldest(filter, after.as_deref(), ROWS_PER_READ)?;
        for row in &listing.rows {
            text += &request_csv(row, &store.zone);
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
    let asked = filters::read(operator, "/usage")?;
    let store = &operator.console.store;
    let names = asked
        .keys
        .iter()
        .map(|key| (key.id.clone(), key.name.clone()));
    let names = names.collect();
    let filter = asked.query.row_filter();
    let (range, requests) = (filter.range, filter.requests);
    export(
        operator,
        &asked,
        "totals",
        "usage --by day,key --csv",
        |_| {
            let mut groups = Groups::new(&[Grouping::Day, Grouping::Key], &store.zone);
            store.ledger.figures(Span::Day, range, requests, |row| {
                if groups.count() <= MAX_LINES {
                    groups.add(
                        &row,
                        filter
                            .matching
                            .includes(row.status, row.error_code.as_deref()),
                    );
                }
            })?;
            if groups.count() > MAX_LINES {
                return Ok(None);
            }
            let columns = [&["day", "key_id", "key_name"], &FIGURES[..]].concat();
            let line = |row| cells(&row, ["day", "key_id", "name"].into_iter().chain(FIGURES));
            Ok(Some(csv(
                &columns,
                groups.rows(&names).into_iter().map(line),
            )))
        },
    )
}

/// Answers with the text that `write` makes before its deadline. Refuses another export meanwhile,
/// because each is in memory, and names the command for what `write` can't make.
fn export(
    operator: &Operator,
    asked: &Asked,
    name: &str,
    command: &str,
    write: impl FnOnce(Instant) -> Result<Option<String>, Problem>,
) -> PageResult {
    if asked.unclear.is_some() {
        let text = "None, or more than one, matches the filter. Give the key’s id.";
        return Err(PageError::new(404, "Which key?", text));
    }
    let exports = &operator.console.exports;
    let permit = Arc::clone(exports);
    // The console's own, and this one.
    if Arc::strong_count(exports) > 2 {
        let text = "One export at a time. Try again in a moment.";
        return Err(PageError::new(429, "Too many requests", text));
    }
    let Some(text) = write(Instant::now() + LONGEST_SEARCH)? else {
        let is_local = operator.request.http.client.is_local();
        let arguments = format!("{command}{}", options(&asked.query, name == "usage"));
        let command = operator.console.config.command(&arguments, is_local);
        let text = "The console exports at most 10,000 lines, and searches for them for 5 seconds at most. Choose a shorter \
             range, or run this command on the machine that the service runs on, as the user that it runs as.";
        return Err(PageError::new(400, "The export is too long", text).with_command(command));
    };
    let [from, to] = asked
        .query
        .range
        .bounds(&asked.query.zone)
        .map(|time| time.replace([':', 'Z'], ""));
    let body = [BYTE_ORDER_MARK, &text].concat().into_bytes();
    let response = Response::new(200, "text/csv; charset=utf-8", body);
    let mut response = with_headers(response).with(
        "content-disposition",
        format!("attachment; filename=\"adriaticum-{name}-{from}-to-{to}.csv\""),
    );
    response.permit = Some(permit);
    Ok(response)
}

/// The options of the commands for a query. They have none for durations, and sums have no outcome.
fn options(query: &Query, is_list: bool) -> String {
    let [since, until] = query.range.bounds(&query.zone);
    let mut options = format!(" --since {since} --until {until}");
    let outcome = if is_list { "outcome" } else { "" };
    for (option, field) in [
        ("key", "key"),
        ("gateway", "gateway"),
        ("status", outcome),
        ("cause", "cause"),
    ] {
        let value = query.get(field);
        if !value.is_empty() {
            options += &format!(" --{option} {}", shell_word(value));
        }
    }
    options
}
#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Filter;
    use crate::report::query::tests::query;
    use crate::store::tests::Temporary;
    use crate::when::{Range, Zone};

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
        let range = Range {
            since: 100,
            until: 200,
        };
        RowFilter {
            least_ms,
            ..RowFilter::of(range, Filter::ALL)
        }
    }

    #[test]
    fn an_export_has_a_bound() {
        let temporary = Temporary::sqlite();
        insert(&temporary, MAX_LINES);
        let lines = || {
            let deadline = Instant::now() + LONGEST_SEARCH;
            let lines = request_lines(&temporary.store, &filter(None), deadline);
            lines.expect("rows").map(|text| text.lines().count() - 1)
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
            let lines = request_lines(&temporary.store, &all, Instant::now() + time);
            let found = lines.expect("rows").map(|text| text.lines().count() - 1);
            assert_eq!(found, expected);
        }
        let slow = filter(Some(5000));
        let lines = request_lines(&temporary.store, &slow, Instant::now());
        assert_eq!(
            lines.expect("rows").map(|text| text.lines().count() - 1),
            Some(1)
        );
    }

    #[test]
    fn a_command_has_the_filters_that_it_knows() {
        let check = |text, expected| {
            let query = query("/requests", text, &Zone::utc());
            assert_eq!(
                options(&query.between(query.range), true),
                expected,
                "{text}"
            );
        };
        check(
            "range=7d&outcome=failed&cause=timeout&least=7",
            " --since 2026-01-09 --until 2026-01-15 --status failed --cause timeout",
        );
        check(
            "from=2026-01-14T13:00&to=2026-01-15T00:30&gateway=it's",
            " --since 2026-01-14T13:00Z --until 2026-01-15T00:30Z --gateway 'it'\\''s'",
        );
    }
}
