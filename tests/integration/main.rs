//! The real binary, started as an operator would; and the listener and the HTTP client by themselves, if a test needs
//! bounds that no operator can set. The conformance run checks what a client can see of the specification.
//!
//! Without the feature `test-postgres` every service is on SQLite, and tests that need PostgreSQL do not exist.

#[cfg(feature = "test-postgres")]
#[path = "../postgres.rs"]
mod postgres_server;
#[path = "../../packaging/settings.rs"]
mod settings;
mod support;

mod addresses;
mod budgets;
mod client;
mod console;
mod crowd;
mod eviction;
mod faults;
#[cfg(feature = "test-postgres")]
mod gateways;
mod limits;
mod metrics;
#[cfg(feature = "test-postgres")]
mod moving;
#[cfg(feature = "test-postgres")]
mod postgres;
mod root;
mod runtime;
mod states;
mod systemd;
mod tls;
