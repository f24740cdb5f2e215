//! The rows of every list, for a terminal, a page and a spreadsheet, and the query of a page.

pub mod form;
pub mod format;
pub mod query;
pub mod rows;
pub mod table;
