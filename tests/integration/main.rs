//! The real binary, started as an operator would, and the listener by itself where a test needs bounds that
//! no operator can set. What a client can see of the specification is checked by the conformance run.

mod support;

mod cli;
mod console;
mod crowd;
mod faults;
mod ledger;
mod lifecycle;
mod limits;
mod metrics;
mod packaging;
mod runtime;
mod supervisor;
mod tls;
mod wire;
