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
mod mutex;
pub mod network;
pub mod progress;
mod rate_limiter;
mod report;
pub mod secret;
mod text;
mod time_zone;
mod when;
