//! Parsers of the values of options.

use crate::when::{self, When};

/// Makes the parser of an option's value, with a message that says what is accepted.
pub fn expecting<T>(
    accepted: &'static str,
    parse: impl Fn(&str) -> Option<T> + Clone,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| parse(text).ok_or_else(|| format!("expected {accepted}"))
}

pub fn parse_when(text: &str) -> Result<When, String> {
    When::parse(text).ok_or_else(|| wrong_when(text, ""))
}

pub fn wrong_when(text: &str, or: &str) -> String {
    match when::is_impossible_date(text) {
        true => "there is no such date".into(),
        false => format!("expected {}{or}", When::TAKES),
    }
}
