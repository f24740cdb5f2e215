//! `usage`: what the ledger holds.

use super::{Args, CliError, Opt, no_command, open_store, print, print_json, table};
use crate::store::{Filter, Grouping, Range, Sums, UsageRow};
use crate::text::{cells, csv_line, grouped};
use crate::when::{self, When};

const HELP: &str = "\
Tells how many requests there were and how many tokens the runtime measured for them.

Usage: adriaticum usage [--since WHEN] [--until WHEN] [--by GROUP] [--json|--csv]
       adriaticum usage show REQUEST_ID [--json]
       adriaticum usage verify

show tells what is known of one request. verify walks the whole ledger and names the first row that was altered,
removed or put in between, and the first day whose sums are not those of its rows; what it prints as the head can
be noted elsewhere and held against a later run.

Options:
  --since WHEN   Only what came since then: 24h, 7d, or a date (YYYY-MM-DD, UTC)
  --until WHEN   Only what came before then
  --by GROUP     A row for each hour, day, month (UTC), key or status
  --json         Print JSON
  --csv          Print comma-separated values
";

pub fn run(mut args: Args) -> Result<(), CliError> {
    let (mut json, mut csv) = (false, false);
    let (mut since, mut until, mut by) = (None, None, None);
    let mut set_since = |text: &str| {
        since = Some(When::parse(text).ok_or(When::TAKES)?);
        Ok(())
    };
    let mut set_until = |text: &str| {
        until = Some(When::parse(text).ok_or(When::TAKES)?);
        Ok(())
    };
    let mut set_by = |word: &str| {
        let known = Grouping::ALL.into_iter().find(|(name, _)| *name == word);
        by = Some(known.ok_or("hour, day, month, key or status")?.1);
        Ok(())
    };
    let mut options = [
        Opt::Flag("json", &mut json),
        Opt::Flag("csv", &mut csv),
        Opt::Value("since", &mut set_since),
        Opt::Value("until", &mut set_until),
        Opt::Value("by", &mut set_by),
    ];
    match args.next_word(HELP, &mut options)?.as_deref() {
        None => {}
        Some("show") => return show(args),
        Some("verify") => return verify(args),
        Some(word) => return Err(no_command("usage ", word)),
    }
    if json && csv {
        return Err(CliError::Usage("--json and --csv exclude each other.".into()));
    }
    let now = when::now();
    let ago = |when: Option<When>, otherwise: i64| when.map_or(otherwise, |when| when.ago(now));
    let range = Range { since: ago(since, i64::MIN), until: ago(until, i64::MAX) };
    let store = open_store(&args.config()?)?;
    let (mut sums, mut rows) = (Sums::default(), Vec::new());
    match by {
        None => sums = store.sums(range, Filter::ALL)?,
        Some(by) => store.grouped(range, Filter::ALL, by, |row| {
            sums.add(&row.sums);
            rows.push(row);
        })?,
    }
    if json {
        return print(&as_json(&rows, &sums));
    }
    let columns = columns(by);
    let mut lines: Vec<Vec<String>> = vec![columns.iter().map(ToString::to_string).collect()];
    lines.extend(rows.iter().map(|row| cells(row, columns.iter().copied())));
    if csv {
        // Without groups, one line with the sums.
        lines.extend(by.is_none().then(|| cells(&sums, columns.iter().copied())));
        return print(&lines.iter().map(|cells| csv_line(cells)).collect::<String>());
    }
    if by.is_some() {
        print(&table::lay_out(&lines))?;
    }
    print(&summary(&sums))
}

/// An object with a row a line, and with the members of the sums.
fn as_json(rows: &[UsageRow], sums: &Sums) -> String {
    let rows: Vec<String> = rows
        .iter()
        .map(|row| format!("\n  {}", serde_json::to_string(row).expect("a row should have its JSON")))
        .collect();
    let sums = serde_json::to_string(sums).expect("sums should have their JSON");
    format!("{{\"rows\": [{}],\n{}\n", rows.join(","), sums.trim_start_matches('{'))
}

fn show(mut args: Args) -> Result<(), CliError> {
    let mut json = false;
    let [id] = args.words(HELP, ["the REQUEST_ID"], &mut [Opt::Flag("json", &mut json)])?;
    let row = open_store(&args.config()?)?.find_row(&id)?.ok_or_else(|| {
        CliError::Failed(format!(
            "there is no row for {id:?}. A request without a valid key has none, and old ones may have been removed."
        ))
    })?;
    if json {
        return print_json(&row);
    }
    let outcome = match (row.status, &row.error_code) {
        (Some(status), Some(code)) => format!("{status} {code}"),
        (Some(status), None) => status.to_string(),
        (None, Some(code)) => format!("{code}: the service ended before it was answered"),
        (None, None) => "under way".into(),
    };
    let figure = |figure: Option<i64>| figure.map_or("not measured".into(), |figure| figure.to_string());
    let time = |time: Option<f64>| time.map_or("-".into(), |time| format!("{time:.3} ms"));
    let search = match (&row.search_reason, row.search_results) {
        (None, _) => "not asked".into(),
        (Some(reason), Some(count)) => format!("asked ({reason}), {count} found, {}", time(row.search_ms)),
        (Some(reason), None) => format!("asked ({reason}), unavailable, {}", time(row.search_ms)),
    };
    let lines = [
        ("request", row.request_id),
        ("key", format!("{} ({})", row.key_id, row.key_name)),
        ("created", when::shown(Some(row.created))),
        ("outcome", outcome),
        ("prompt tokens", figure(row.tokens.prompt_tokens)),
        ("completion tokens", figure(row.tokens.completion_tokens)),
        ("total tokens", figure(row.tokens.total_tokens)),
        ("whole time", time(row.duration_ms)),
        ("waited", time(row.queue_ms)),
        ("runtime", time(row.runtime_ms)),
        ("grounded", if row.grounded { "yes" } else { "no" }.into()),
        ("search", search),
    ];
    print(&table::lay_out(&lines.map(|(name, value)| vec![name.into(), value])))
}

fn verify(mut args: Args) -> Result<(), CliError> {
    let [] = args.words(HELP, [], &mut [])?;
    let found = open_store(&args.config()?)?.verify()?;
    match found.fault {
        None => {
            let unsealed = match found.unsealed {
                0 => String::new(),
                count => format!("; {count} newer rows have no seal yet"),
            };
            let heads: Vec<String> = found.heads.iter().map(ToString::to_string).collect();
            print(&format!(
                "{} rows, nothing wrong{unsealed}. The head is {}\n",
                found.rows,
                heads.join(", ")
            ))
        }
        Some(fault) => Err(CliError::Failed(format!("after {} good rows: {fault}.", found.rows))),
    }
}

/// The sums in a sentence. Unmeasured completions are counted separately, never as zero tokens.
fn summary(sums: &Sums) -> String {
    let measured = sums.requests - sums.errors - sums.unmeasured;
    let tokens = if measured <= 0 && sums.total_tokens == 0 {
        "no tokens measured".into()
    } else {
        format!(
            "{} tokens ({} in, {} out)",
            grouped(sums.total_tokens),
            grouped(sums.prompt_tokens),
            grouped(sums.completion_tokens)
        )
    };
    format!(
        "{} requests, {} errors, {tokens}, {} requests unmeasured\n",
        grouped(sums.requests),
        grouped(sums.errors),
        grouped(sums.unmeasured)
    )
}

/// What names a group, if there are any, and the figures.
fn columns(by: Option<Grouping>) -> Vec<&'static str> {
    let figures = ["requests", "errors", "prompt_tokens", "completion_tokens", "total_tokens", "unmeasured"];
    by.map_or(&[][..], Grouping::labels).iter().copied().chain(figures).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_is_no_zero() {
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
        let sums = Sums { requests: 3, unmeasured: 3, ..Sums::default() };
        assert_eq!(summary(&sums), "3 requests, 0 errors, no tokens measured, 3 requests unmeasured\n");
    }
}
