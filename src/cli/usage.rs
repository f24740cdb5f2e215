//! `usage`: sums of the ledger, and single requests.

use clap::ArgAction;
use serde::Serialize;

use super::error::CliError;
use super::open_store::open_store;
use super::output::{print, print_json};
use super::parsers::{expecting, one_of, parse_when};
use super::{keys, text_table, verify};
use crate::config::Config;
use crate::database::DatabaseError;
use crate::keys::SecretUse;
use crate::ledger::{Filter, Grouping, LedgerRow, Matching, RowFilter, Sums, UsageRow};
use crate::store::Store;
use crate::text::{cells, count, csv_line, grouped};
use crate::when::{self, Range, When};

/// Show the requests and tokens of the ledger
///
/// The tokens are those that the runtime measured.
#[derive(clap::Args)]
pub(super) struct UsageOptions {
    #[command(flatten)]
    requests: Option<Requests>,
    /// Print one line for each hour, day, month (UTC), key (with its present name), status or
    /// gateway, or for each pair of two of them: key,month
    #[arg(long, value_name = "GROUP[,GROUP]", value_parser = one_of(Grouping::ALL), value_delimiter = ',', action = ArgAction::Set)]
    by: Vec<Grouping>,
    #[command(subcommand)]
    command: Option<UsageCommand>,
}

/// The requests that a report or a list is about, and its format. `Some` if one of them is given.
#[derive(clap::Args, Default)]
struct Requests {
    /// Only requests since then: 90m, 24h, 30d, a date (2026-11-16), a time (2026-11-16T13:00Z,
    /// 2026-11-16T14:00+01:00), or a time of today (13:00)
    ///
    /// A time without an offset is in UTC. Days are calendar days in UTC, as on the console: 30d is
    /// today and the 29 days before it. A time inside an hour whose rows retention has removed is
    /// refused, because only its total is kept.
    #[arg(long, value_name = "WHEN", value_parser = parse_when)]
    since: Option<When>,
    /// Only requests before that time; a date includes the whole day
    #[arg(long, value_name = "WHEN", value_parser = parse_when)]
    until: Option<When>,
    /// Only requests of a calendar month, UTC: 2026-10, or last for the one before this month
    #[arg(long, conflicts_with_all = ["since", "until"],
        value_parser = expecting("a month as YYYY-MM, or last", |text| Range::parse_month(text, when::now())))]
    month: Option<Range>,
    /// Only requests of this key: its id, or its name if no other key has it
    #[arg(long)]
    key: Option<String>,
    /// Only requests of this gateway, in a shared database
    #[arg(long, value_name = "NAME")]
    gateway: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print comma-separated values, each in quotes
    ///
    /// A text that a spreadsheet would read as a formula gets an apostrophe in front.
    #[arg(long, conflicts_with = "json")]
    csv: bool,
}

#[derive(clap::Subcommand)]
enum UsageCommand {
    /// List single requests, the newest first
    List {
        #[command(flatten)]
        requests: Requests,
        /// Print at most so many, up to 100000
        #[arg(long, value_name = "N", default_value = "100", value_parser = expecting("a number from 1 to 100000", parse_limit))]
        limit: usize,
    },
    /// Show one request
    Show {
        /// The id of its answer or error
        request_id: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Find rows and sums that were changed, deleted or inserted
    ///
    /// verify reads the whole ledger and names the first row that was changed, deleted or inserted,
    /// and the first sum that does not match its rows. If retention has removed rows, it says which
    /// sums can't be proven any more. It also prints the head of each gateway's chain: keep it in
    /// another place, and check it later with --through.
    Verify(verify::VerifyOptions),
}

impl UsageOptions {
    pub fn run(self, config: &Config) -> Result<(), CliError> {
        let Self {
            requests,
            by,
            command,
        } = self;
        match command {
            None => report(requests.unwrap_or_default(), &by, config),
            Some(_) if requests.is_some() || !by.is_empty() => Err(CliError::usage(
                "options before list, show or verify are those of the report. Put them after it.",
            )),
            Some(UsageCommand::List { requests, limit }) => list(requests, limit, config),
            Some(UsageCommand::Show { request_id, json }) => show(&request_id, json, config),
            Some(UsageCommand::Verify(options)) => verify::run(options, config),
        }
    }
}

/// Bounded because all of the rows are in memory.
fn parse_limit(text: &str) -> Option<usize> {
    text.parse()
        .ok()
        .filter(|limit| (1..=100_000).contains(limit))
}

/// The database and its rows that are asked for.
struct Selection {
    store: Store,
    /// One or both ends of its range may be open. The sums of whole hours and days answer that,
    /// whatever retention has removed.
    filter: RowFilter,
}

impl Selection {
    fn open(requests: &Requests, config: &Config) -> Result<Self, CliError> {
        let now = when::now();
        let range = requests
            .month
            .unwrap_or(Range::between(requests.since, requests.until, now))
            .checked(now)
            .map_err(|message| CliError::usage(&message))?;
        let store = open_store(config)?;
        let key = requests
            .key
            .as_ref()
            .map(|text| keys::find(&store, text, SecretUse::Refused))
            .transpose()?;
        if let Some(name) = &requests.gateway {
            check_gateway(&store, name)?;
        }
        Ok(Self {
            store,
            filter: RowFilter {
                range,
                key_id: key.map(|key| key.id),
                gateway: requests.gateway.clone(),
                matching: Matching::Anything,
                cause: None,
                least_ms: None,
                most_ms: None,
            },
        })
    }

    fn grouped(&self, by: &[Grouping]) -> Result<Vec<UsageRow>, DatabaseError> {
        let filter = Filter {
            key_id: self.filter.key_id.as_deref(),
            gateway: self.filter.gateway.as_deref(),
        };
        self.store.ledger.grouped(self.filter.range, filter, by)
    }

    /// The range without open ends, to be called after the figures are read, so that it covers all
    /// of them.
    fn period(&self) -> Result<Range, DatabaseError> {
        self.store.ledger.bounded(self.filter.range, when::now())
    }
}

/// The first line of a text.
fn heading(period: Range) -> String {
    match period.bounds() {
        [first, last] if first == last => format!("{first} (UTC)\n"),
        [first, last] if first.ends_with('Z') => format!("{first} to {last}\n"),
        [first, last] => format!("{first} to {last} (UTC)\n"),
    }
}

fn report(options: Requests, by: &[Grouping], config: &Config) -> Result<(), CliError> {
    if !Grouping::fit_together(by) {
        let message =
            "--by takes one group, or two that differ, of which one may be hour, day or month.";
        return Err(CliError::usage(message));
    }
    let selection = Selection::open(&options, config)?;
    let mut rows = selection.grouped(by)?;
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
        let mut text = csv_line(&[&["since", "until"], &columns[..]].concat());
        for cells in figures {
            text += &csv_line(&[vec![since.to_string(), until.to_string()], cells].concat());
        }
        return print(&text);
    }
    print(&heading(period))?;
    if !by.is_empty() {
        let figure = |text: String| grouped(text.parse().expect("a figure should be a number"));
        let line = |row: &UsageRow| {
            let figures = cells(&row.sums, FIGURES).into_iter().map(figure);
            let labels = cells(row, labels.iter().copied()).into_iter();
            labels.chain(figures).collect()
        };
        print(&text_table::with_heading(
            &columns.join(","),
            rows.iter().map(line),
        ))?;
    }
    print(&summary(&sums))
}

const FIGURES: [&str; 6] = [
    "requests",
    "errors",
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "unmeasured",
];

/// The members of a report before its rows.
#[derive(Serialize)]
struct Report<'a> {
    since: i64,
    until: i64,
    #[serde(flatten)]
    sums: &'a Sums,
}

/// Formats an array with one row per line.
fn json_lines(rows: &[impl Serialize]) -> String {
    let row = |row| {
        let row = serde_json::to_string(row).expect("a row should have its JSON");
        format!("\n  {row}")
    };
    format!("[{}]", rows.iter().map(row).collect::<Vec<_>>().join(","))
}

fn list(options: Requests, limit: usize, config: &Config) -> Result<(), CliError> {
    let selection = Selection::open(&options, config)?;
    let (rows, is_more) = newest_rows(&selection, limit)?;
    let text = if options.json {
        json_lines(&rows) + "\n"
    } else if options.csv {
        LedgerRow::csv_heading() + &rows.iter().map(LedgerRow::csv_line).collect::<String>()
    } else {
        let columns = "time,request,key,outcome,tokens in,tokens out,total,ms,gateway";
        heading(selection.period()?)
            + &text_table::with_heading(columns, rows.iter().map(list_line))
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
) -> Result<(Vec<LedgerRow>, bool), CliError> {
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

fn list_line(row: &LedgerRow) -> Vec<String> {
    let number = |number: Option<i64>| number.map_or("-".into(), grouped);
    let outcome = [
        row.status.map(|status| status.to_string()),
        row.error_code.clone(),
        row.cause.clone(),
    ];
    vec![
        when::iso(row.created).unwrap_or_default(),
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
fn note_removed_rows(selection: &Selection, listed: i64) -> Result<(), CliError> {
    let removed = match selection.grouped(&[]) {
        Ok(rows) => match rows.iter().map(|row| row.sums.requests).sum::<i64>() - listed {
            ..=0 => return Ok(()),
            others => format!("{} of this range", count(others, "other request")),
        },
        Err(DatabaseError::RowsRemoved(_)) => "Some requests of this range".into(),
        Err(error) => return Err(error.into()),
    };
    eprintln!(
        "{removed} have no row any more (usage.retention_days): adriaticum usage has their sums."
    );
    Ok(())
}

/// Refuses a misspelt name, which would have no requests. The chain of a moved ledger has an empty
/// name.
fn check_gateway(store: &Store, name: &str) -> Result<(), CliError> {
    let gateways = store.ledger.gateways()?;
    if name.is_empty() || gateways.iter().any(|gateway| gateway.name == name) {
        return Ok(());
    }
    Err(CliError::failed(format!(
        "there is no gateway {name:?}. List the gateways: adriaticum usage --by gateway"
    )))
}

fn show(id: &str, json: bool, config: &Config) -> Result<(), CliError> {
    let row = open_store(config)?.ledger.find_row(id)?.ok_or_else(|| {
        CliError::failed(format!(
            "there is no row for {id:?}. A request without a valid key has none, and retention removes old rows."
        ))
    })?;
    if json {
        return print_json(&row);
    }
    let outcome = match (row.status, &row.error_code) {
        (Some(status), Some(code)) => format!("{status} {code}"),
        (Some(status), None) => status.to_string(),
        (None, Some(code)) if code == "abandoned" => {
            format!("{code}: the client left before the answer")
        }
        // An earlier version wrote a row before the runtime was called.
        (None, Some(code)) => format!("{code}: the service ended before the answer"),
        (None, None) => "-".into(),
    };
    let figure =
        |figure: Option<i64>| figure.map_or("not measured".into(), |figure| figure.to_string());
    let time = |time: Option<f64>| match time {
        None => "-".into(),
        Some(time) if time < 1000.0 => format!("{time:.3} ms"),
        Some(time) => format!("{:.3} s", time / 1000.0),
    };
    let search = match (&row.search_reason, row.search_results) {
        (None, _) => "not asked".into(),
        (Some(reason), Some(count)) => {
            format!("asked ({reason}), {count} found, {}", time(row.search_ms))
        }
        (Some(reason), None) => format!("asked ({reason}), unavailable, {}", time(row.search_ms)),
    };
    let mut lines = vec![
        ("request", row.request_id),
        ("key", format!("{} ({})", row.key_id, row.key_name)),
        (
            "created",
            when::iso(row.created).unwrap_or_else(|| row.created.to_string()),
        ),
        ("outcome", outcome),
        ("cause", row.cause.unwrap_or_else(|| "-".into())),
        ("prompt tokens", figure(row.tokens.prompt_tokens)),
        ("completion tokens", figure(row.tokens.completion_tokens)),
        ("total tokens", figure(row.tokens.total_tokens)),
        ("total time", time(row.duration_ms)),
        ("in the queue", time(row.queue_ms)),
        ("runtime", time(row.runtime_ms)),
        ("grounded", if row.grounded { "yes" } else { "no" }.into()),
        ("search", search),
    ];
    if !row.gateway.is_empty() {
        lines.push(("gateway", row.gateway));
    }
    let lines: Vec<_> = lines
        .into_iter()
        .map(|(name, value)| vec![name.into(), value])
        .collect();
    print(&text_table::lay_out(&lines))
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
