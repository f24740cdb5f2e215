//! Parsers of the values of options.

use clap::builder::{PossibleValuesParser, TypedValueParser};

use crate::when::{self, When};

/// Makes the parser of an option that takes one of a few words.
pub fn one_of<T: Copy + Send + Sync + 'static, const N: usize>(
    values: [(&'static str, T); N],
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(values.map(|(word, _)| word)).map(move |found| {
        let value = values.iter().find(|(word, _)| *word == found);
        value.expect("it is one of the possible values").1
    })
}

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
