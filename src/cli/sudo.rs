//! Advice to run the command as another user.

use std::env;
use std::ffi::OsString;

use crate::text::{may_hold_a_secret, shell_word};

/// Returns this command line with sudo and its options.
pub fn with_sudo(options: &str) -> String {
    let word = |word: OsString| match word.to_string_lossy() {
        text if may_hold_a_secret(&text) => "'…'".into(),
        text => shell_word(&text),
    };
    let line: Vec<String> = env::args_os().map(word).collect();
    // sudo removes variables that are not named.
    let variables: Vec<String> = env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| name.starts_with("ADRIATICUM_"))
        .collect();
    let keep = if variables.is_empty() {
        String::new()
    } else {
        format!("--preserve-env={} ", variables.join(","))
    };
    format!("sudo {options}{keep}{}", line.join(" "))
}
