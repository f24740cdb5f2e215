//! `usage`: what the ledger holds.

use std::io::{self, Write};

use serde_json::Value;

use super::{Args, CliError, Opt, open_store, print, print_json, table};
use crate::store::{Grouping, Range, Store, Sums, UsageRow};
use crate::text::{csv_line, grouped};
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

/// How the figures are printed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Table,
    Json,
    Csv,
}

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
        None if args.done => return Ok(()),
        None => {}
        Some("show") => return show(args),
        Some("verify") => return verify(args),
        Some(word) => return Err(CliError::Usage(format!("there is no command usage {word:?}."))),
    }
    let form = match (json, csv) {
        (true, true) => return Err(CliError::Usage("--json and --csv exclude each other.".into())),
        (true, false) => Form::Json,
        (false, true) => Form::Csv,
        (false, false) => Form::Table,
    };
    let now = when::now();
    let ago = |when: Option<When>, otherwise: i64| when.map_or(otherwise, |when| when.ago(now));
    let range = Range { since: ago(since, i64::MIN), until: ago(until, i64::MAX) };
    let store = open_store(&args.config()?)?;
    match form {
        Form::Table => print_table(&store, range, by),
        Form::Json => stream(&store, range, by, Json::default()),
        Form::Csv => stream(&store, range, by, Csv),
    }
}

fn show(mut args: Args) -> Result<(), CliError> {
    let mut json = false;
    let Some([id]) = args.words(HELP, ["the REQUEST_ID"], &mut [Opt::Flag("json", &mut json)])? else {
        return Ok(());
    };
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
    if args.words(HELP, [], &mut [])?.is_none() {
        return Ok(());
    }
    let found = open_store(&args.config()?)?.verify()?;
    match found.fault {
        None => {
            let unsealed = match found.unsealed {
                0 => String::new(),
                count => format!("; {count} newer rows have no seal yet"),
            };
            print(&format!("{} rows, nothing wrong{unsealed}. The head is {}\n", found.rows, found.head))
        }
        Some(fault) => Err(CliError::Failed(format!("after {} good rows: {fault}.", found.rows))),
    }
}

fn print_table(store: &Store, range: Range, by: Option<Grouping>) -> Result<(), CliError> {
    let mut sums = Sums::default();
    if let Some(by) = by {
        let mut lines = vec![heading(Some(by))];
        store.grouped(range, by, |row| {
            sums.add(&row.sums);
            lines.push(cells(by, &row));
        })?;
        print(&table::lay_out(&lines))?;
    } else {
        sums = store.sums(range)?;
    }
    print(&summary(&sums))
}

/// What there is, in a sentence: what was not measured is told beside what was, never as a zero.
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

/// A form in which groups are printed as they come, and what they add up to at the end.
trait Printer {
    fn start(&mut self, out: &mut dyn Write, by: Option<Grouping>) -> io::Result<()>;
    fn row(&mut self, out: &mut dyn Write, by: Grouping, row: &UsageRow) -> io::Result<()>;
    fn end(&mut self, out: &mut dyn Write, by: Option<Grouping>, sums: &Sums) -> io::Result<()>;
}

/// Prints groups as they come, so that as many as there are need no more memory than one.
fn stream(
    store: &Store,
    range: Range,
    by: Option<Grouping>,
    mut printer: impl Printer,
) -> Result<(), CliError> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let mut sums = Sums::default();
    let mut result = printer.start(&mut out, by);
    match by {
        None => sums = store.sums(range)?,
        Some(by) => store.grouped(range, by, |row| {
            sums.add(&row.sums);
            if result.is_ok() {
                result = printer.row(&mut out, by, &row);
            }
        })?,
    }
    match result.and_then(|()| printer.end(&mut out, by, &sums)).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(CliError::Failed(format!("standard output: {error}.")))
        }
        _ => Ok(()),
    }
}

/// An object with the rows and what they add up to.
#[derive(Default)]
struct Json {
    rows: u64,
}

impl Printer for Json {
    fn start(&mut self, out: &mut dyn Write, _: Option<Grouping>) -> io::Result<()> {
        write!(out, "{{\"rows\": [")
    }

    fn row(&mut self, out: &mut dyn Write, _: Grouping, row: &UsageRow) -> io::Result<()> {
        let row = serde_json::to_string(row).expect("a row should have its JSON");
        self.rows += 1;
        write!(out, "{}\n  {row}", if self.rows == 1 { "" } else { "," })
    }

    fn end(&mut self, out: &mut dyn Write, _: Option<Grouping>, sums: &Sums) -> io::Result<()> {
        // The sums' own members follow the rows in the same object.
        let sums = serde_json::to_string(sums).expect("sums should have their JSON");
        writeln!(out, "],\n{}", sums.trim_start_matches('{'))
    }
}

/// A line for each group, or one with the sums where there are no groups.
struct Csv;

impl Printer for Csv {
    fn start(&mut self, out: &mut dyn Write, by: Option<Grouping>) -> io::Result<()> {
        out.write_all(csv_line(&heading(by)).as_bytes())
    }

    fn row(&mut self, out: &mut dyn Write, by: Grouping, row: &UsageRow) -> io::Result<()> {
        out.write_all(csv_line(&cells(by, row)).as_bytes())
    }

    fn end(&mut self, out: &mut dyn Write, by: Option<Grouping>, sums: &Sums) -> io::Result<()> {
        match by {
            Some(_) => Ok(()),
            None => out.write_all(csv_line(&figures(sums)).as_bytes()),
        }
    }
}

fn heading(by: Option<Grouping>) -> Vec<String> {
    let labels = by.map_or(&[][..], Grouping::labels);
    let figures = ["requests", "errors", "prompt_tokens", "completion_tokens", "total_tokens", "unmeasured"];
    labels.iter().chain(&figures).map(ToString::to_string).collect()
}

fn cells(by: Grouping, row: &UsageRow) -> Vec<String> {
    let text = |name: &&str| match &row.labels[*name] {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    };
    by.labels().iter().map(text).chain(figures(&row.sums)).collect()
}

fn figures(sums: &Sums) -> Vec<String> {
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
