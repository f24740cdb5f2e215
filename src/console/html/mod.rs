//! The files that a browser loads.

pub mod assets;
