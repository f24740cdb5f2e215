//! `usage list`: single requests, the newest first.

use super::selection::{Requests, Selection, heading, json_lines};
use crate::cli::shared::print;
use crate::cli::text_table;
use crate::config::Config;
use crate::database::{ProblemKind, Result};
use crate::ledger::LedgerRow;
use crate::text::{count, grouped};
use crate::when::Zone;

pub fn run(options: Requests, limit: usize, config: &Config) -> Result<()> {
    let selection = Selection::open(&options, config)?;
    let (rows, is_more) = newest_rows(&selection, limit)?;
    let zone = &selection.store.zone;
    let text = if options.json {
        json_lines(&rows) + "\n"
    } else if options.csv {
        LedgerRow::csv_heading()
            + &rows
                .iter()
                .map(|row| row.csv_line(zone))
                .collect::<String>()
    } else {
        let columns = "time,request,key,outcome,tokens in,tokens out,total,ms,gateway";
        heading(selection.period()?, zone)
            + &text_table::with_heading(columns, rows.iter().map(|row| list_line(row, zone)))
    };
    print(&text)?;
    if is_more {
        eprintln!(
            "There are more than these {}: use --limit, or a shorter range.",
            count(rows.len() as i64, "request")
        );
        return Ok(());
    }
    note_removed_rows(&selection, rows.len() as i64)
}

/// The newest rows, and true if there are more.
fn newest_rows(
    Selection { store, filter }: &Selection,
    limit: usize,
) -> Result<(Vec<LedgerRow>, bool)> {
    let (mut rows, mut before) = (Vec::new(), None);
    // One more than the limit shows that there are more. A search for a gateway ends after some
    // rows, found or not.
    while rows.len() <= limit {
        let missing = limit + 1 - rows.len();
        let listing = store.ledger.newest(filter, before.as_deref(), missing)?;
        rows.extend(listing.rows);
        before = listing.next;
        if before.is_none() {
            break;
        }
    }
    let is_more = rows.len() > limit;
    rows.truncate(limit);
    Ok((rows, is_more))
}

fn list_line(row: &LedgerRow, zone: &Zone) -> Vec<String> {
    let number = |number: Option<i64>| number.map_or("-".into(), grouped);
    let outcome = [
        row.status.map(|status| status.to_string()),
        row.error_code.clone(),
        row.cause.clone(),
    ];
    vec![
        zone.iso(row.created).unwrap_or_default(),
        row.request_id.clone(),
        row.key_name.clone(),
        outcome.into_iter().flatten().collect::<Vec<_>>().join(" "),
        number(row.tokens.prompt_tokens),
        number(row.tokens.completion_tokens),
        number(row.tokens.total_tokens),
        row.duration_ms
            .map_or("-".into(), |time| format!("{time:.0}")),
        if row.gateway.is_empty() {
            "-".into()
        } else {
            row.gateway.clone()
        },
    ]
}

/// Says on standard error if retention has removed rows of a list.
fn note_removed_rows(selection: &Selection, listed: i64) -> Result<()> {
    let removed = match selection.grouped(&[]) {
        Ok(rows) => match rows.iter().map(|row| row.sums.requests).sum::<i64>() - listed {
            ..=0 => return Ok(()),
            others => format!("{} of this range", count(others, "other request")),
        },
        Err(problem) if problem.kind == ProblemKind::RowsRemoved => {
            "Some requests of this range".into()
        }
        Err(error) => return Err(error),
    };
    eprintln!(
        "{removed} have no row any more (usage.retention_days): adriaticum usage has their sums."
    );
    Ok(())
}
