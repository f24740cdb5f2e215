//! Adriaticum: a chat completions API in front of an inference runtime, in plain blocking code.
//!
//! A request's way through the files, top to bottom:
//!
//! - [`cli`] reads the command line, [`config`] the settings.
//! - [`listener`] reads requests off the sockets on one thread, in turns, and gives the complete ones to a fixed pool;
//!   [`http`] knows the bytes.
//! - [`dispatch`] decides from its head what happens to a request, and sends it to the API or to the console by its host;
//!   [`console`] answers the operator's.
//! - [`pipeline`] takes a request through the steps of [`api`], in the order in which their errors win.
//! - [`search`] finds the passages that ground an answer, [`runtime`] calls the inference runtime, both through
//!   [`client`]; [`store`] keeps the keys and the ledger.
//! - [`background`] does the housekeeping, runs checkpoints, makes test writes and removes old rows.
//! - [`metrics`] counts requests and their outcomes.
//! - [`supervisor`] talks to systemd: readiness, reloads, stops and the watchdog.
//!
//! What holds everywhere:
//!
//! - A client costs a buffer, never a thread; every buffer, queue and timeout has a bound.
//! - A 200 is sent only after its row is on the disk, synced, with its place in the chain and in the sums. A token figure is the runtime's or null.
//! - Nothing that a person wrote and no secret is logged or stored.

#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
mod logging;

pub mod http;
pub mod listener;

pub mod api;
mod console;
mod dispatch;
mod pipeline;

pub mod client;
pub mod runtime;
pub mod search;
pub mod store;

mod background;
mod checks;
mod metrics;
pub mod supervisor;

mod der;
pub mod error;
mod files;
pub mod id;
pub mod secret;
mod semaphore;
mod text;
mod timed_stream;
mod when;
