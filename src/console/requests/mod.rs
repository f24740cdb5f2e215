//! The pages about single requests, and their export.

pub mod details;
pub mod export;
pub mod list;
