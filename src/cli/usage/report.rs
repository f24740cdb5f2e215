//! `usage`: the sums of a range, by groups.

use serde::Serialize;

use super::selection::{Requests, Selection, heading, json_lines};
use crate::cli::shared::print;
use crate::config::Config;
use crate::database::{Problem, Result};
use crate::ledger::{Grouping, Sums};
use crate::report::query::Query;
use crate::report::rows::{self, FIGURES};
use crate::text::{cells, count, grouped};
use crate::when::Range;

pub fn run(options: Requests, by: &[Grouping], config: &Config) -> Result<()> {
    if !Grouping::fit_together(by) {
        let message =
            "--by takes one group, or two that differ, of which one may be hour, day or month.";
        return Err(Problem::usage(message));
    }
    let selection = Selection::open(&options, config)?;
    let mut rows = selection.store.ledger.grouped(&selection.filter, by)?;
    let period @ Range { since, until } = selection.period()?;
    let mut sums = Sums::default();
    rows.iter().for_each(|row| sums.add(&row.sums));
    if by.is_empty() {
        rows.clear();
    }
    let labels: Vec<&str> = by.iter().flat_map(|by| by.labels()).copied().collect();
    let columns = [&labels[..], &FIGURES].concat();
    if options.json {
        let sums = &sums;
        let report = serde_json::to_string(&Report { since, until, sums })
            .expect("a report should have its JSON");
        let report = report.trim_end_matches('}');
        return print(&format!("{report},\n\"rows\":{}}}\n", json_lines(&rows)));
    }
    if options.csv {
        let figures = if by.is_empty() {
            vec![cells(&sums, FIGURES)]
        } else {
            let line = |row| cells(row, columns.iter().copied());
            rows.iter().map(line).collect()
        };
        let bounds = ["since", "until", "since_local", "until_local"];
        let columns = [&bounds, &columns[..]].concat();
        let local = |time| selection.store.zone.iso(time).unwrap_or_default();
        let bounds = [
            since.to_string(),
            until.to_string(),
            local(since),
            local(until),
        ];
        let lines = figures
            .into_iter()
            .map(|cells| [&bounds[..], &cells].concat());
        return print(&rows::csv(&columns, lines));
    }
    let query = Query::none(&selection.store.zone);
    print(&heading(period, &query.zone))?;
    if !by.is_empty() {
        print(&rows::usage(&rows, by, &sums, &query).to_text(&columns.join(",")))?;
    }
    print(&summary(&sums))
}

/// The members of a report before its rows.
#[derive(Serialize)]
struct Report<'a> {
    since: i64,
    until: i64,
    #[serde(flatten)]
    sums: &'a Sums,
}

/// Formats the sums as a sentence. Unmeasured completions are counted separately, never as zero
/// tokens.
fn summary(sums: &Sums) -> String {
    let measured = sums.succeeded() - sums.unmeasured;
    let tokens = if measured <= 0 && sums.total_tokens == 0 {
        "no tokens measured".into()
    } else {
        format!(
            "{} ({} in, {} out)",
            count(sums.total_tokens, "token"),
            grouped(sums.prompt_tokens),
            grouped(sums.completion_tokens)
        )
    };
    format!(
        "{}, {}, {tokens}, {} unmeasured\n",
        count(sums.requests, "request"),
        count(sums.errors, "error"),
        count(sums.unmeasured, "request")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmeasured_completions_are_not_zero_tokens() {
        let sums = Sums {
            requests: 15,
            unmeasured: 3,
            prompt_tokens: 12_000,
            completion_tokens: 480,
            total_tokens: 12_480,
            errors: 0,
        };
        assert_eq!(
            summary(&sums),
            "15 requests, 0 errors, 12,480 tokens (12,000 in, 480 out), 3 requests unmeasured\n"
        );
        let sums = Sums {
            requests: 1,
            unmeasured: 1,
            ..Sums::default()
        };
        assert_eq!(
            summary(&sums),
            "1 request, 0 errors, no tokens measured, 1 request unmeasured\n"
        );
    }
}
