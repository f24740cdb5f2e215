//! The steps that a request goes through, a file each, in this order. They do not know each other: only the
//! pipeline knows the order.

pub mod host;
pub mod route;
pub mod size;

pub mod budget;
pub mod key;
pub mod permission;

pub mod validation;

pub mod grounding;
pub mod inference;
pub mod ledger;
pub mod refusals;
pub mod reply;

/// The one model.
pub const MODEL: &str = "adriaticum";
