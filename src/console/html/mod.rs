//! The building blocks of pages: forms, tables, formats, and the files that a browser loads.

pub mod assets;
pub mod form;
pub mod format;
pub mod table;
