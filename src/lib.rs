//! Adriaticum: a chat completions API in front of an inference runtime, in plain blocking code.
//!
//! The path of a request through the modules, top to bottom:
//!
//! - `cli` reads the command line, `config` the settings.
//! - `listener` reads requests from the sockets on one thread, the loop. From the head it chooses the
//!   API or the console, and its dispatcher gives the complete ones to a fixed pool of workers;
//!   `http` parses and encodes.
//! - `api` takes a request through its steps, in the order of error precedence, to its response.
//!   `console` serves the operator.
//! - `grounding` decides whether an answer needs facts and quotes the passages that `search` finds,
//!   `runtime` calls the inference runtime, both through `client`.
//! - `ledger` appends the row: its writer, one thread, owns what lasts, and whether it can be
//!   written. `keys` knows the keys and their budgets, `audit` who changed what; `store` opens the
//!   three, and `database` runs their SQL. `time_zone` and `when` know their days. `recovery`
//!   restores and moves a database.
//! - `health` knows what works: the log, health probes, gauges and the console say the same.
//!   `metrics` counts requests and their outcomes. `checks`, for the command, tests every part that a
//!   completion needs. `background` reloads the configuration on SIGHUP and probes failed runtimes.
//! - `report` has the rows of every list and the query of a page, for `cli` and `console`.
//!
//! Invariants:
//!
//! - A client costs a buffer, never a thread; every buffer, queue and timeout has a bound.
//! - A 200 is sent only after its row is durable, with its place in the chain and in the sums. A
//!   token figure is the runtime's or null.
//! - No prompt, completion or secret is logged or stored.
//!
//! Words:
//!
//! - *area*: threads that requests wait for: the API's workers, the look-up thread, the console's.
//! - *lane*: the requests of one key, or of one browser; the lanes of an area take turns.
//! - *shed*: answer a complete request 503, because there is no room for it.
//! - *evict*: close a connection, because there is no room for another one.
//! - *origin*: where connections come from: an IPv4 address, an IPv6 /56 network, a Unix socket.
//! - *abandoned*: a request whose client left before its answer.
//! - *head*: of a request, its line and headers; of a chain, the place and hash of its newest row.
//! - *chain*: the rows of one gateway, each with a hash over its predecessor's.
//! - *group*: the rows that share one transaction and one fsync.
//! - *sums*: the figures of a day by key, outcome and gateway; they stay when rows are removed.
//! - *day*: a calendar day of the database's time zone, which is its *place*.
//! - *gateway*: a process that serves, by its name in a shared database.
//! - *epoch*: the number of a gateway's start; with an earlier one, a process is *fenced*: it can't
//!   write rows any more.
//! - *cause*: why a request got no completion, as a word of a fixed list.
//! - *outage*: the reason why the ledger can't be written; no inference is spent on it.
//! - *failing*: a runtime whose last calls got no answer; *probes* find out when it is back.
//! - *passage*, *quotation*: what Search finds for a question, and how the model gets it.
//! - *digest*, *hint*: the SHA-256 of a secret, and how the secret begins and ends.
//! - *finding*, *verdict*: what is said about a part of the service, and about the whole of it.

#![forbid(unsafe_code)]

/// The version, with the commit if it is none of a release: the Makefile sets it.
pub const VERSION: &str = match option_env!("ADRIATICUM_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

pub mod cli;
pub mod config;
mod logging;

pub mod http;
pub mod listener;

pub mod api;
mod console;
mod grounding;

pub mod audit;
pub mod client;
pub mod database;
pub mod keys;
pub mod ledger;
mod recovery;
pub mod runtime;
pub mod search;
pub mod store;

mod background;
mod checks;
mod health;
mod metrics;

mod certificates;
pub mod error;
mod files;
pub mod id;
mod locks;
pub mod progress;
mod rate_limiter;
mod report;
pub mod secret;
mod text;
mod time_zone;
mod when;
