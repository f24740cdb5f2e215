//! `usage`: sums of the ledger, and single requests.

use clap::builder::{PossibleValuesParser, TypedValueParser};

use super::{CliError, open_to_read, parse_when, print, print_json, text_table, verify};
use crate::config::Config;
use crate::store::{Filter, Grouping, Matching, Range, Span, Store, Sums, UsageRow};
use crate::text::{cells, count, csv_line, grouped};
use crate::when::{self, When};

/// Show the requests and tokens of the ledger
///
/// The tokens are those that the runtime measured.
#[derive(clap::Args)]
pub(super) struct Options {
    #[command(flatten)]
    report: Option<Report>,
    #[command(subcommand)]
    command: Option<Command>,
}

/// `Some` if one of them is given.
#[derive(clap::Args, Default)]
struct Report {
    /// Only requests since then: 90m, 24h, 30d, a date (2026-11-16), a time (2026-11-16T13:00Z), or a time of today (13:00)
    ///
    /// All are in UTC. Days are calendar days, as on the console: 30d is today and the 29 days before it. A time inside an hour whose
    /// rows retention has removed is refused, because only its total is kept.
    #[arg(long, value_name = "WHEN", value_parser = parse_when)]
    since: Option<When>,
    /// Only requests before then
    #[arg(long, value_name = "WHEN", value_parser = parse_when)]
    until: Option<When>,
    /// Print one line for each hour, day, month (UTC), key (with its present name), status or gateway
    #[arg(long, value_name = "GROUP", value_parser = grouping())]
    by: Option<Grouping>,
    /// Only requests of this key
    #[arg(long, value_name = "ID")]
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
enum Command {
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
    /// verify reads the whole ledger and names the first row that was changed, deleted or inserted, and the first sum that does not
    /// match its rows. If retention has removed rows, it says which sums can't be proven any more. It also prints the head of each
    /// gateway's chain: keep it in another place, and check it later with --through.
    Verify(verify::Options),
}

impl Options {
    pub fn run(self, config: &Config) -> Result<(), CliError> {
        match (self.command, self.report) {
            (None, options) => report(&options.unwrap_or_default(), config),
            (Some(_), Some(_)) => Err(CliError::Usage(
                "options before show or verify are those of the report. Put them after it.".into(),
            )),
            (Some(Command::Show { request_id, json }), None) => show(&request_id, json, config),
            (Some(Command::Verify(options)), None) => verify::run(options, config),
        }
    }
}

fn grouping() -> impl TypedValueParser<Value = Grouping> {
    PossibleValuesParser::new(Grouping::ALL.map(|(name, _)| name)).map(|word| {
        let known = Grouping::ALL.into_iter().find(|(name, _)| *name == word);
        known.map(|(_, by)| by).expect("it is one of the possible values")
    })
}

fn report(options: &Report, config: &Config) -> Result<(), CliError> {
    let &Report { since, until, by, json, csv, .. } = options;
    let now = when::now();
    let ago = |when: Option<When>, otherwise: i64| when.map_or(otherwise, |when| when.ago(now));
    let range = Range { since: ago(since, i64::MIN), until: ago(until, i64::MAX) };
    let store = open_to_read(config)?;
    let filter = Filter { key_id: options.key.as_deref(), gateway: options.gateway.as_deref() };
    check_names(&store, filter)?;
    let (mut sums, mut rows) = (Sums::default(), Vec::new());
    let undivided_hour = match by {
        None => store.figures(Span::Day, range, filter, &Matching::Anything, |row| sums.add(&row.sums))?,
        Some(by) => store.grouped(range, filter, by, |row| {
            sums.add(&row.sums);
            rows.push(row);
        })?,
    };
    if let Some(hour) = undivided_hour {
        return Err(too_fine(hour));
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
        print(&lines.iter().map(|cells| csv_line(cells)).collect::<String>())?;
    } else {
        if let Some(by) = by {
            for figure in lines.iter_mut().skip(1).flat_map(|cells| &mut cells[by.labels().len()..]) {
                *figure = figure.parse().map_or_else(|_| figure.clone(), grouped);
            }
            print(&text_table::lay_out(&lines))?;
        }
        print(&summary(&sums))?;
    }
    Ok(())
}

/// Refuses a range that begins or ends inside an hour whose rows were removed: its figures would be wrong.
fn too_fine(hour: i64) -> CliError {
    let time = |time| when::iso(time).unwrap_or_default();
    CliError::Failed(format!(
        "the rows of the hour from {} to {} were removed (usage.retention_days), so --since and --until can't be inside it. \
         Begin or end with a full hour.",
        time(hour),
        time(hour + Span::Hour.seconds())
    ))
}

/// Refuses a misspelt name, which would have no requests. The chain of a moved ledger has an empty name.
fn check_names(store: &Store, Filter { key_id, gateway }: Filter) -> Result<(), CliError> {
    if let Some(id) = key_id
        && !store.list_keys()?.iter().any(|key| key.id == id)
    {
        return Err(super::keys::no_such_key(id));
    }
    match gateway.filter(|name| !name.is_empty()) {
        Some(name) if !store.gateways()?.iter().any(|gateway| gateway.name == name) => Err(CliError::Failed(
            format!("there is no gateway {name:?}. List the gateways: adriaticum usage --by gateway"),
        )),
        _ => Ok(()),
    }
}

/// Formats an object with one row per line and the members of the sums.
fn as_json(rows: &[UsageRow], sums: &Sums) -> String {
    let rows: Vec<String> = rows
        .iter()
        .map(|row| format!("\n  {}", serde_json::to_string(row).expect("a row should have its JSON")))
        .collect();
    let sums = serde_json::to_string(sums).expect("sums should have their JSON");
    format!("{{\"rows\": [{}],\n{}\n", rows.join(","), sums.trim_start_matches('{'))
}

fn show(id: &str, json: bool, config: &Config) -> Result<(), CliError> {
    let row = open_to_read(config)?.find_row(id)?.ok_or_else(|| {
        CliError::Failed(format!(
            "there is no row for {id:?}. A request without a valid key has none, and retention removes old rows."
        ))
    })?;
    if json {
        return print_json(&row);
    }
    let outcome = match (row.status, &row.error_code) {
        (Some(status), Some(code)) => format!("{status} {code}"),
        (Some(status), None) => status.to_string(),
        (None, Some(code)) if code == "abandoned" => format!("{code}: the client left before the answer"),
        // An earlier version wrote a row before the runtime was called.
        (None, Some(code)) => format!("{code}: the service ended before the answer"),
        (None, None) => "-".into(),
    };
    let figure = |figure: Option<i64>| figure.map_or("not measured".into(), |figure| figure.to_string());
    let time = |time: Option<f64>| match time {
        None => "-".into(),
        Some(time) if time < 1000.0 => format!("{time:.3} ms"),
        Some(time) => format!("{:.3} s", time / 1000.0),
    };
    let search = match (&row.search_reason, row.search_results) {
        (None, _) => "not asked".into(),
        (Some(reason), Some(count)) => format!("asked ({reason}), {count} found, {}", time(row.search_ms)),
        (Some(reason), None) => format!("asked ({reason}), unavailable, {}", time(row.search_ms)),
    };
    let mut lines = vec![
        ("request", row.request_id),
        ("key", format!("{} ({})", row.key_id, row.key_name)),
        ("created", when::iso(row.created).unwrap_or_else(|| row.created.to_string())),
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
    let lines: Vec<_> = lines.into_iter().map(|(name, value)| vec![name.into(), value]).collect();
    print(&text_table::lay_out(&lines))
}

/// Formats the sums as a sentence. Unmeasured completions are counted separately, never as zero tokens.
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

/// The columns of a report: the labels of a group, and the figures.
fn columns(by: Option<Grouping>) -> Vec<&'static str> {
    let figures = ["requests", "errors", "prompt_tokens", "completion_tokens", "total_tokens", "unmeasured"];
    by.map_or(&[][..], Grouping::labels).iter().copied().chain(figures).collect()
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
        let sums = Sums { requests: 1, unmeasured: 1, ..Sums::default() };
        assert_eq!(summary(&sums), "1 request, 0 errors, no tokens measured, 1 request unmeasured\n");
    }
}
