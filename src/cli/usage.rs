//! `usage`: what the ledger holds.

use serde::Serialize;

use super::when::{self, When};
use super::{Args, CliError, Opt, open_store, print, print_json, table};
use crate::store::{Grouping, Sums, UsageRow};

const HELP: &str = "\
Tells how many requests there were and how many tokens the runtime measured for them.

Usage: adriaticum usage [--since 24h|7d|30d|DATE] [--by day|key] [--json|--csv]

Options:
  --since WHEN   Only what came since then: 24h, 7d, or a date (YYYY-MM-DD, UTC)
  --by GROUP     A row for each day (UTC) or each key
  --json         Print JSON
  --csv          Print comma-separated values
";

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    sums: Sums,
    rows: Vec<UsageRow>,
}

pub fn run(mut args: Args) -> Result<(), CliError> {
    let (mut json, mut csv) = (false, false);
    let mut since = None;
    let mut by = None;
    let mut set_since = |text: &str| {
        since = Some(When::parse(text).ok_or(When::TAKES)?);
        Ok(())
    };
    let mut set_by = |word: &str| {
        by = Some(match word {
            "day" => Grouping::Day,
            "key" => Grouping::Key,
            _ => return Err("day or key".into()),
        });
        Ok(())
    };
    let mut options = [
        Opt::Flag("json", &mut json),
        Opt::Flag("csv", &mut csv),
        Opt::Value("since", &mut set_since),
        Opt::Value("by", &mut set_by),
    ];
    if args.words(HELP, [], &mut options)?.is_none() {
        return Ok(());
    }
    if json && csv {
        return Err(CliError::Usage("--json and --csv exclude each other.".into()));
    }
    let since = since.map_or(i64::MIN, |when: When| when.ago(when::now()));
    let (sums, rows) = open_store(&args.config()?)?.usage(since, by)?;
    if json {
        return print_json(&Report { sums, rows });
    }
    let lines = lines(by, &sums, &rows);
    if csv {
        let text: String = lines.iter().map(|line| csv_line(line)).collect();
        return print(&text);
    }
    print(&table::lay_out(&lines))
}

/// The heading and the rows: a row for each group, or the sums alone.
fn lines(by: Option<Grouping>, sums: &Sums, rows: &[UsageRow]) -> Vec<Vec<String>> {
    let group: &[&str] = match by {
        None => &[],
        Some(Grouping::Day) => &["day"],
        Some(Grouping::Key) => &["key_id", "name"],
    };
    let figures = ["requests", "errors", "prompt_tokens", "completion_tokens", "total_tokens", "unmeasured"];
    let mut lines = vec![group.iter().chain(&figures).map(ToString::to_string).collect()];
    if by.is_none() {
        lines.push(cells(sums));
    }
    for row in rows {
        // A key that is gone from the table of keys has no name any more.
        let mut line: Vec<String> = match by {
            Some(Grouping::Key) => {
                [&row.key_id, &row.name].map(|cell| cell.clone().unwrap_or_default()).into()
            }
            _ => vec![row.day.clone().unwrap_or_default()],
        };
        line.extend(cells(&row.sums));
        lines.push(line);
    }
    lines
}

fn cells(sums: &Sums) -> Vec<String> {
    [
        sums.requests,
        sums.errors,
        sums.prompt_tokens,
        sums.completion_tokens,
        sums.total_tokens,
        sums.unmeasured,
    ]
    .map(|figure| figure.to_string())
    .to_vec()
}

/// A line as RFC 4180 has it. A cell that a spreadsheet would take for a formula is told not to be one.
fn csv_line(cells: &[String]) -> String {
    let quoted: Vec<String> = cells
        .iter()
        .map(|cell| {
            let formula = cell.starts_with(['=', '+', '-', '@']);
            let cell = if formula { format!("'{cell}") } else { cell.clone() };
            if cell.contains(['"', ',', '\n', '\r']) {
                format!("\"{}\"", cell.replace('"', "\"\""))
            } else {
                cell
            }
        })
        .collect();
    quoted.join(",") + "\r\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comma_separated_values() {
        let cells = ["plain", "a,b", "say \"x\"", "=1+1", ""].map(String::from);
        assert_eq!(csv_line(&cells), "plain,\"a,b\",\"say \"\"x\"\"\",'=1+1,\r\n");
    }
}
