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

mod abandonment;
mod addresses;
mod budgets;
mod client;
mod console;
mod crowd;
mod faults;
#[cfg(feature = "test-postgres")]
mod gateways;
mod lifecycle;
mod limits;
mod logging;
mod metrics;
#[cfg(feature = "test-postgres")]
mod moving;
mod packaging;
#[cfg(feature = "test-postgres")]
mod postgres;
mod readiness;
mod root;
mod runtime;
mod states;
mod systemd;
mod tls;
