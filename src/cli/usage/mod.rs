//! `usage`: sums of the ledger, and single requests.

mod list;
mod report;
mod selection;
mod show;
mod verify;

use clap::ArgAction;

use self::selection::Requests;
use super::shared::{expecting, one_of};
use crate::config::Config;
use crate::database::{Problem, Result};
use crate::ledger::{Grouping, Matching};

/// Show the requests and tokens of the ledger
///
/// The tokens are those that the runtime measured.
#[derive(clap::Args)]
pub(super) struct UsageOptions {
    #[command(flatten)]
    requests: Option<Requests>,
    /// Print one line for each hour, day, month (of the database's time zone), key (with its present
    /// name), status or gateway, or for each pair of two of them: key,month
    #[arg(long, value_name = "GROUP[,GROUP]", value_parser = one_of(Grouping::ALL), value_delimiter = ',', action = ArgAction::Set)]
    by: Vec<Grouping>,
    #[command(subcommand)]
    command: Option<UsageCommand>,
}

#[derive(clap::Subcommand)]
enum UsageCommand {
    /// List single requests, the newest first
    List {
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
    pub fn run(self, config: &Config) -> Result<()> {
        let Self {
            requests,
            by,
            command,
        } = self;
        match command {
            None => report::run(requests.unwrap_or_default(), &by, config),
            Some(_) if requests.is_some() || !by.is_empty() => Err(Problem::usage(
                "options before list, show or verify are those of the report. Put them after it.",
            )),
            Some(UsageCommand::List {
                requests,
                status,
                cause,
                limit,
            }) => list::run(&requests, status, cause, limit, config),
            Some(UsageCommand::Show { request_id, json }) => show::run(&request_id, json, config),
            Some(UsageCommand::Verify(options)) => verify::run(options, config),
        }
    }
}

fn parse_status(text: &str) -> Option<Matching> {
    match text.parse() {
        Ok(status @ 200..=599) => Some(Matching::Status(status)),
        _ => Matching::parse(text),
    }
}

/// Bounded because all of the rows are in memory.
fn parse_limit(text: &str) -> Option<usize> {
    text.parse()
        .ok()
        .filter(|limit| (1..=100_000).contains(limit))
}
