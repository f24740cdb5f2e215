//! The requests that a report or a list is about.

use serde::Serialize;

use crate::cli::keys;
use crate::cli::shared::{expecting, open_store, parse_when};
use crate::config::Config;
use crate::database::{Problem, Result};
use crate::ledger::{Filter, RowFilter};
use crate::store::Store;
use crate::when::{self, Range, When, Zone};

/// The requests that a report or a list is about, and its format. `Some` if one of them is given.
#[derive(clap::Args, Default)]
pub struct Requests {
    /// Only requests since then: 90m, 24h, 30d, a date (2026-11-16), a time (2026-11-16T14:00,
    /// 2026-11-16T13:00Z, 2026-11-16T14:00+01:00), or a time of today (13:00)
    ///
    /// Days, and times without an offset, are those of the database's time zone. 30d is today and
    /// the 29 days before it, as on the console; 24h is elapsed time. A time that the clock shows
    /// twice, because it is set back, needs its offset. A time inside a day whose rows retention has removed is
    /// refused, because only its sums are kept.
    #[arg(long, value_name = "WHEN", value_parser = parse_when)]
    since: Option<When>,
    /// Only requests before that time; a date includes the whole day
    #[arg(long, value_name = "WHEN", value_parser = parse_when)]
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
    pub json: bool,
    /// Print comma-separated values, each in quotes
    ///
    /// A text that a spreadsheet would read as a formula gets an apostrophe in front.
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,
}

/// The database and its rows that are asked for.
pub struct Selection {
    pub store: Store,
    /// One or both ends of its range may be open. The sums of whole days answer that, whatever
    /// retention has removed.
    pub filter: RowFilter,
}

impl Selection {
    pub fn open(requests: &Requests, config: &Config) -> Result<Self> {
        let store = open_store(config)?;
        let (now, zone) = (when::now(), &store.zone);
        let month = requests.month.as_deref();
        let range = month
            .and_then(|month| Range::parse_month(month, now, zone))
            .map_or_else(
                || Range::between(requests.since, requests.until, now, zone),
                Ok,
            )
            .and_then(|range| range.checked(now, zone))
            .map_err(Problem::usage)?;
        let keys = requests.key.as_ref().map(|text| keys::ids(&store, text));
        let keys = keys.transpose()?;
        if let Some(name) = &requests.gateway {
            check_gateway(&store, name)?;
        }
        Ok(Self {
            store,
            filter: RowFilter::of(
                range,
                Filter {
                    keys,
                    gateway: requests.gateway.clone(),
                },
            ),
        })
    }

    /// The range without open ends, to be called after the figures are read, so that it covers all
    /// of them.
    pub fn period(&self) -> Result<Range, Problem> {
        self.store.ledger.bounded(self.filter.range, when::now())
    }
}

/// Which month it is depends on the zone of the database.
fn parse_month(text: &str) -> Option<String> {
    Range::parse_month(text, when::now(), &Zone::utc()).map(|_| text.to_owned())
}

/// The first line of a text. Times have their offset, dates need the zone.
pub fn heading(period: Range, zone: &Zone) -> String {
    let name = zone.name();
    match period.bounds(zone) {
        [first, last] if first == last => format!("{first} ({name})\n"),
        [first, last] if first.contains('T') => format!("{first} to {last}\n"),
        [first, last] => format!("{first} to {last} ({name})\n"),
    }
}

/// Refuses a misspelt name, which would have no requests. The chain of a moved ledger has an empty
/// name.
fn check_gateway(store: &Store, name: &str) -> Result<()> {
    let gateways = store.ledger.gateways()?;
    if name.is_empty() || gateways.iter().any(|gateway| gateway.name == name) {
        return Ok(());
    }
    Err(Problem::other(format!(
        "there is no gateway {name:?}. List the gateways: adriaticum usage --by gateway"
    )))
}

/// Formats an array with one row per line.
pub fn json_lines(rows: &[impl Serialize]) -> String {
    let row = |row| {
        let row = serde_json::to_string(row).expect("a row should have its JSON");
        format!("\n  {row}")
    };
    format!("[{}]", rows.iter().map(row).collect::<Vec<_>>().join(","))
}
