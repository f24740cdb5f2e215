//! The steps that a request goes through. They do not know each other: only the pipeline knows the order.

pub mod inference;
pub mod key;
pub mod refusals;
pub mod reply;
pub mod steps;
pub mod validation;

/// The one model.
pub const MODEL: &str = "adriaticum";
