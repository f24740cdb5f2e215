//! `usage list`: single requests, the newest first.

use super::selection::{Requests, Selection, heading, json_lines};
use crate::cli::shared::print;
use crate::config::Config;
use crate::database::{ProblemKind, Result};
use crate::ledger::Matching;
use crate::report::query::Query;
use crate::report::rows::{self, request_csv, requests_csv_heading};
use crate::text::count;

const COLUMNS: &str = "time,request,key,outcome,tokens in,tokens out,tokens,duration,gateway";

pub fn run(
    options: &Requests,
    status: Option<Matching>,
    cause: Option<String>,
    limit: usize,
    config: &Config,
) -> Result<()> {
    let mut selection = Selection::open(options, config)?;
    selection.filter.matching = status.unwrap_or(Matching::Anything);
    selection.filter.cause = cause;
    let Selection { store, filter } = &selection;
    let (rows, is_more, counted) = store.ledger.newest_and_count(filter, limit)?;
    let text = if options.json {
        json_lines(&rows) + "\n"
    } else if options.csv {
        let lines = rows.iter().map(|row| request_csv(row, &store.zone));
        requests_csv_heading() + &lines.collect::<String>()
    } else {
        let query = Query::none(&store.zone);
        heading(selection.period()?, &store.zone) + &rows::requests(&rows, &query).to_text(COLUMNS)
    };
    print(&text)?;
    let listed = rows.len() as i64;
    let removed = match counted {
        _ if is_more => {
            let listed = count(listed, "request");
            eprintln!("There are more than these {listed}: use --limit, or a shorter range.");
            return Ok(());
        }
        Ok(counted) if counted <= listed => return Ok(()),
        Ok(counted) => format!("{} of this range", count(counted - listed, "other request")),
        Err(problem) if problem.kind == ProblemKind::RowsRemoved => {
            "Some requests of this range".into()
        }
        Err(problem) => return Err(problem),
    };
    eprintln!(
        "{removed} have no row any more (usage.retention_days): adriaticum usage has their sums."
    );
    Ok(())
}
