//! `usage` and `audit`: sums of the ledger, single requests, and whether any of it was changed; and
//! who changed what.

use clap::ArgAction;
use serde_json::{Value, json};

use super::keys;
use super::shared::{expecting, note, open_store, print, print_json, time_or};
use crate::config::Config;
use crate::error::{Problem, ProblemKind, Result};
use crate::ledger::{
    ChainHead, Filter, Grouping, HeadStatus, Matching, RowFilter, Sums, Verification,
};
use crate::progress::Progress;
use crate::report::facts_to_text;
use crate::report::format::cells;
use crate::report::query::Query;
use crate::report::rows::{self, FIGURES, request_csv, requests_csv_heading};
use crate::store::Store;
use crate::text::{count, grouped};
use crate::when::{self, Range, When, Zone};

/// Show the requests and tokens of the ledger
///
/// The tokens are those that the runtime measured.
#[derive(clap::Args)]
pub(super) struct UsageOptions {
    #[command(flatten)]
    requests: Option<Requests>,
    /// Print one line for each hour, day, month (of the database's time zone), key (with its present
    /// name), status or gateway, or for each pair of two of them: key,month
    #[arg(long, value_name = "GROUP[,GROUP]", value_delimiter = ',', action = ArgAction::Set)]
    by: Vec<Grouping>,
    #[command(subcommand)]
    command: Option<UsageCommand>,
}

#[derive(clap::Subcommand)]
enum UsageCommand {
    /// List single requests, the newest first
    List(ListOptions),
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
    Verify {
        /// Check also that this head, `[GATEWAY:]SEQ:HASH` as verify printed it earlier, is still part
        /// of its chain
        ///
        /// If it is not, or if retention has removed its row so that it can't be checked, the exit
        /// status is 1.
        #[arg(long, value_name = "HEAD",
              value_parser = expecting("[GATEWAY:]SEQ:HASH, as usage verify prints it", ChainHead::parse))]
        through: Option<ChainHead>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(clap::Args)]
struct ListOptions {
    #[command(flatten)]
    requests: Requests,
    /// Only requests with this status or error code: 502, inference_error; ok, or failed for every
    /// request that did not end in 200
    #[arg(long, value_name = "N|CODE", value_parser = expecting("a status from 200 to 599, an error code, ok or failed", parse_status))]
    status: Option<Matching>,
    /// Only requests with this cause, as usage show and the log have it
    #[arg(long, value_name = "WORD")]
    cause: Option<String>,
    /// Print at most so many, up to 100000
    #[arg(long, value_name = "N", default_value = "100", value_parser = expecting("a number from 1 to 100000", parse_limit))]
    limit: usize,
}

/// The requests that a report or a list is about, and its format. `Some` if one of them is given.
#[derive(clap::Args, Default)]
struct Requests {
    /// Only requests since then: 90m, 24h, 30d, a date (2026-11-16), a time (2026-11-16T14:00,
    /// 2026-11-16T13:00Z, 2026-11-16T14:00+01:00), or a time of today (13:00)
    ///
    /// Days, and times without an offset, are those of the database's time zone. 30d is today and
    /// the 29 days before it, as on the console; 24h is elapsed time. A time that the clock shows
    /// twice, because it is set back, needs its offset. A time inside a day whose rows retention has removed is
    /// refused, because only its sums are kept.
    #[arg(long, value_name = "WHEN", value_parser = time_or(""))]
    since: Option<When>,
    /// Only requests before that time; a date includes the whole day
    #[arg(long, value_name = "WHEN", value_parser = time_or(""))]
    until: Option<When>,
    /// Only requests of a calendar month: 2026-10, or last for the one before this month
    #[arg(long, conflicts_with_all = ["since", "until"], value_parser = expecting("a month as YYYY-MM, or last", parse_month))]
    month: Option<String>,
    /// Only requests of this key: its id, or a name, which means every key that has it
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

fn parse_status(text: &str) -> Option<Matching> {
    match text.parse() {
        Ok(status @ 200..=599) => Some(Matching::Status(status)),
        _ => Matching::parse(text),
    }
}

/// Bounded because all of the rows are in memory.
fn parse_limit(text: &str) -> Option<usize> {
    let limit = text.parse().ok()?;
    (1..=100_000).contains(&limit).then_some(limit)
}

/// Which month it is depends on the zone of the database.
fn parse_month(text: &str) -> Option<String> {
    Range::parse_month(text, when::now(), &Zone::utc()).map(|_| text.to_owned())
}

impl UsageOptions {
    pub fn run(self, config: &Config) -> Result<()> {
        match self.command {
            None => report(&self.requests.unwrap_or_default(), &self.by, config),
            Some(_) if self.requests.is_some() || !self.by.is_empty() => Err(Problem::usage(
                "options before list, show or verify are those of the report. Put them after it.",
            )),
            Some(UsageCommand::List(options)) => list(options, config),
            Some(UsageCommand::Show { request_id, json }) => show(&request_id, json, config),
            Some(UsageCommand::Verify { through, json }) => verify(through, json, config),
        }
    }
}

impl Requests {
    /// Opens the database. One or both ends of the range may be open: the sums of whole days answer
    /// that, whatever retention has removed.
    fn open(&self, config: &Config) -> Result<(Store, RowFilter)> {
        let store = open_store(config)?;
        let (now, zone) = (when::now(), &store.zone);
        let month = self.month.as_deref();
        let range = match month.and_then(|month| Range::parse_month(month, now, zone)) {
            Some(month) => Ok(month),
            None => Range::between(self.since, self.until, now, zone),
        };
        let range = range.and_then(|range| range.checked(now, zone));
        let keys = self.key.as_ref().map(|text| keys::ids(&store, text));
        let requests = Filter {
            keys: keys.transpose()?,
            gateway: self.gateway.clone(),
        };
        // A misspelt name would have no requests. The chain of a moved ledger has an empty one.
        if let Some(name) = self.gateway.as_deref().filter(|name| !name.is_empty())
            && !store
                .ledger
                .gateways()?
                .iter()
                .any(|gateway| gateway.name == name)
        {
            return Err(Problem::other(format!(
                "there is no gateway {name:?}. List the gateways: adriaticum usage --by gateway"
            )));
        }
        let filter = RowFilter::of(range.map_err(Problem::usage)?, requests);
        Ok((store, filter))
    }
}

/// The range without open ends: read it after the figures, so that it covers all of them.
fn period(store: &Store, filter: &RowFilter) -> Result<Range> {
    store.ledger.bounded(filter.range, when::now())
}

/// The first line of a text. Times have their offset, dates need the zone.
fn heading(period: Range, zone: &Zone) -> String {
    let name = zone.name();
    match period.bounds(zone) {
        [first, last] if first == last => format!("{first} ({name})\n"),
        [first, last] if first.contains('T') => format!("{first} to {last}\n"),
        [first, last] => format!("{first} to {last} ({name})\n"),
    }
}

fn to_json(row: &impl serde::Serialize) -> String {
    serde_json::to_string(row).expect("a row should have its JSON")
}

/// Formats an array with one row per line.
fn json_lines(rows: &[impl serde::Serialize]) -> String {
    let rows: Vec<String> = rows
        .iter()
        .map(|row| format!("\n  {}", to_json(row)))
        .collect();
    format!("[{}]", rows.join(","))
}

fn report(requests: &Requests, by: &[Grouping], config: &Config) -> Result<()> {
    if !Grouping::fit_together(by) {
        return Err(Problem::usage(
            "--by takes one group, or two that differ, of which one may be hour, day or month.",
        ));
    }
    let (store, filter) = requests.open(config)?;
    let mut rows = store.ledger.grouped(&filter, by)?;
    let (period, zone) = (period(&store, &filter)?, &store.zone);
    let mut sums = Sums::default();
    rows.iter().for_each(|row| sums.add(&row.sums));
    if by.is_empty() {
        rows.clear();
    }
    let labels: Vec<&str> = by.iter().flat_map(|by| by.labels()).copied().collect();
    let columns = [&labels[..], &FIGURES].concat();
    let text = if requests.json {
        let Range { since, until } = period;
        let (sums, rows) = (to_json(&sums), json_lines(&rows));
        let sums = sums.trim_matches(['{', '}']);
        format!("{{\"since\":{since},\"until\":{until},{sums},\n\"rows\":{rows}}}\n")
    } else if requests.csv {
        let heading = ["since", "until", "since_local", "until_local"];
        let bounds = [period.since, period.until];
        let local = bounds.map(|time| zone.iso(time).unwrap_or_default());
        let bounds = [bounds.map(|time| time.to_string()), local].concat();
        let lines: Vec<Vec<String>> = if by.is_empty() {
            vec![cells(&sums, FIGURES)]
        } else {
            let line = |row| cells(row, columns.iter().copied());
            rows.iter().map(line).collect()
        };
        let lines = lines.iter().map(|line| [&bounds[..], line].concat());
        rows::csv(&[&heading[..], &columns].concat(), lines)
    } else {
        let mut text = heading(period, zone);
        if !by.is_empty() {
            let query = Query::none(zone);
            text += &rows::usage(&rows, by, &sums, &query).to_text(&columns.join(","));
        }
        text + &summary(&sums)
    };
    print(&text)
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

fn list(options: ListOptions, config: &Config) -> Result<()> {
    let (store, mut filter) = options.requests.open(config)?;
    filter.matching = options.status.unwrap_or(Matching::Anything);
    filter.cause = options.cause;
    let (rows, is_more, counted) = store.ledger.newest_and_count(&filter, options.limit)?;
    let zone = &store.zone;
    let text = if options.requests.json {
        json_lines(&rows) + "\n"
    } else if options.requests.csv {
        let lines = rows.iter().map(|row| request_csv(row, zone));
        requests_csv_heading() + &lines.collect::<String>()
    } else {
        let columns = "time,request,key,outcome,tokens in,tokens out,tokens,duration,gateway";
        let table = rows::requests(&rows, &Query::none(zone)).to_text(columns);
        heading(period(&store, &filter)?, zone) + &table
    };
    print(&text)?;
    let listed = rows.len() as i64;
    let removed = match counted {
        _ if is_more => {
            let listed = count(listed, "request");
            note(format!(
                "There are more than these {listed}: use --limit, or a shorter range."
            ));
            return Ok(());
        }
        Ok(counted) if counted <= listed => return Ok(()),
        Ok(counted) => format!("{} of this range", count(counted - listed, "other request")),
        Err(problem) if problem.kind == ProblemKind::RowsRemoved => {
            "Some requests of this range".into()
        }
        Err(problem) => return Err(problem),
    };
    note(format!(
        "{removed} have no row any more (usage.retention_days): adriaticum usage has their sums."
    ));
    Ok(())
}

fn show(id: &str, json: bool, config: &Config) -> Result<()> {
    let store = open_store(config)?;
    let row = store
        .ledger
        .find_row(id)?
        .ok_or_else(|| Problem::other(format!("there is no row for {id:?}. {}", rows::NO_ROW)))?;
    if json {
        return print_json(&row);
    }
    let key = store.keys.get(&row.key_id)?;
    let facts = rows::request(&row, key.as_ref(), !row.gateway.is_empty(), &store.zone);
    let (meaning, facts) = (rows::meaning(&row), facts_to_text(facts));
    print(&format!("{id}\n{meaning}\n{facts}"))
}

/// A head that was noted earlier, and its state now.
type NotedHead = (ChainHead, HeadStatus);

fn verify(through: Option<ChainHead>, json: bool, config: &Config) -> Result<()> {
    let store = open_store(config)?;
    let found = store.ledger.verify_with(&Progress::on_stderr())?;
    let find = |head| store.ledger.find_head(&head).map(|status| (head, status));
    let through = through.map(find).transpose()?;
    let failure = failure(&found, through.as_ref());
    if json {
        let mut report = json!(found);
        report["ok"] = failure.is_none().into();
        report["through"] = through.map_or(Value::Null, |(head, status)| {
            let mut through = json!(head);
            through["status"] = json!(status);
            through
        });
        print_json(&report)?;
    } else if failure.is_none() {
        print(&soundness(&found, through.as_ref()))?;
    }
    failure.map_or(Ok(()), |message| Err(Problem::other(message)))
}

/// Returns the reason why the ledger or the given head can't be trusted. A head that can't be
/// checked is a failure too, so that a script notices it.
fn failure(found: &Verification, through: Option<&NotedHead>) -> Option<String> {
    if let Some(fault) = &found.fault {
        return Some(format!("{fault}."));
    }
    let (head, status) = through?;
    let reason = match status {
        HeadStatus::InChain => return None,
        HeadStatus::Removed => {
            "can't be checked: retention has removed its row and later ones. Note a newer head."
        }
        HeadStatus::Missing => {
            "is not part of the chain: the chain was replaced by another one, or its newest rows were removed."
        }
    };
    Some(format!("{head} {reason}"))
}

fn soundness(found: &Verification, through: Option<&NotedHead>) -> String {
    let heads: Vec<String> = found.heads.iter().map(ToString::to_string).collect();
    let heads = match &heads[..] {
        [head] => format!("The head is {head}"),
        heads => format!("The heads are:\n{}", heads.join("\n")),
    };
    let mut text = format!(
        "{}, nothing wrong. {heads}\n",
        count(found.rows as i64, "row")
    );
    if let Some(days) = &found.unproven {
        text += &format!(
            "The sums of {} until {} can't be proven: retention has removed rows of theirs.\n",
            count(days.count as i64, "day"),
            days.until
        );
    }
    if let Some((head, _)) = through {
        text += &format!("{head} is part of the chain.\n");
    }
    text
}

/// Show who changed what: keys, password, settings, sign-ins
///
/// The oldest change is first: keys created, changed, rotated and revoked, passwords set, sign-ins to the
/// console, settings reloaded and backups restored, with the address of the browser or the user of
/// the system. If sudo ran the command, the user is SUDO_USER "as" the user that it ran as. Failed
/// sign-ins are in the log.
#[derive(clap::Args)]
pub(super) struct AuditOptions {
    /// Only changes since then: 24h, 7d, a date, a time, or a time of today, as for usage
    #[arg(long, value_name = "WHEN", value_parser = time_or(""))]
    since: Option<When>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn audit(options: &AuditOptions, config: &Config) -> Result<()> {
    let store = open_store(config)?;
    let Range { since, .. } =
        Range::between(options.since, None, when::now(), &store.zone).map_err(Problem::usage)?;
    let mut rows = Vec::new();
    store.audit.list(since, |row| rows.push(row))?;
    if options.json {
        return print_json(&rows);
    }
    print(&rows::audit(&rows, &store.zone).to_text("time,action,via,by,key,details"))
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
