//! The steps that a request goes through. They do not know each other: only the pipeline knows the
//! order.

pub mod route;
pub mod size;

pub mod key;
pub mod permission;
pub mod validation;

pub mod inference;
pub mod ledger;
pub mod record;
pub mod reply;

/// The one model.
pub const MODEL: &str = "adriaticum";
