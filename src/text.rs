//! Formats numbers and queries, escapes texts, and suggests corrections.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use strsim::osa_distance;

use crate::secret::contains_secret;

/// Defines values that people and the database write as one word each. Options of commands take them;
/// their comments are in the help.
macro_rules! words {
    (pub enum $name:ident { $($(#[$doc:meta])* $value:ident = $word:literal,)+ }) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
        pub enum $name { $($(#[$doc])* #[serde(rename = $word)] #[value(name = $word)] $value,)+ }

        impl $name {
            pub const ALL: [Self; [$($word),+].len()] = [$(Self::$value),+];

            pub fn parse(word: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|value| value.as_str() == word)
            }

            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$value => $word),+ }
            }
        }
    };
}
pub(crate) use words;

/// The characters that are escaped in a query: all but the unreserved characters of RFC 3986 and
/// the colon of times.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b':');

pub fn percent_encoded(text: &str) -> String {
    utf8_percent_encode(text, RESERVED).to_string()
}

/// Formats a number with a comma between thousands.
pub fn grouped(number: i64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a number of things: "1 request", "2,000 requests".
pub fn count(number: i64, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {what}{plural}", grouped(number))
}

/// Returns the candidate that a misspelt word probably means: a third of its letters may be wrong.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|candidate| (osa_distance(word, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= word.len().max(candidate.len()) / 3)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Returns the first characters of a text, in one line.
pub fn shortened(text: &str, most: usize) -> String {
    let line: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(most)
        .collect();
    if text.chars().nth(most).is_some() {
        line + "…"
    } else {
        line
    }
}

/// Control characters, and those that show as nothing or turn the text around them.
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Escapes what a terminal would execute or not show, in a text that another program sent:
/// `\u{1b}`.
pub fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unprintable(c) {
            escaped.extend(c.escape_unicode());
        } else {
            escaped.push(c);
        }
    }
    escaped
}

/// Quotes a word of a command for the shell, if it needs that.
pub fn shell_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// True if a value that an operator wrote may contain a password or a key, so that no message
/// repeats it: user information or a query of an address, whole or mistyped, `password=`, or an API
/// key.
pub fn may_hold_a_secret(text: &str) -> bool {
    let has_user = text.contains('@') || text.contains("%40");
    let has_query = text
        .split_once('?')
        .is_some_and(|(_, query)| query.contains('='));
    // Text after a host's colon that is no port is a password without its @.
    let is_odd = |address: &str| {
        let authority = address
            .split(['/', ',', '"', '\'', ' '])
            .next()
            .unwrap_or_default();
        let (_, port) = authority.split_once(':').unwrap_or_default();
        address.contains(['?', '#']) || !port.bytes().all(|b| b.is_ascii_digit())
    };
    has_user
        || has_query
        || has_password(text)
        || contains_secret(text)
        || text.split("://").skip(1).any(is_odd)
}

/// True if a text has a password in the form of libpq: `host=a password=b`, also with spaces.
pub fn has_password(text: &str) -> bool {
    text.to_ascii_lowercase()
        .split("password")
        .skip(1)
        .any(|rest| rest.trim_start().starts_with('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_word_has_its_correction() {
        for (word, meant) in [
            ("worker", Some("workers")),
            ("lsiten", Some("listen")),
            ("runtime.modelx", Some("runtime.model")),
            ("que", None),
            ("nonsense", None),
            ("", None),
        ] {
            assert_eq!(
                nearest(word, ["listen", "workers", "queue", "runtime.model"]),
                meant,
                "{word}"
            );
        }
        assert_eq!(
            (shortened("a\nbé", 4), shortened("a\nbé", 3)),
            ("a bé".into(), "a b…".into())
        );
    }

    #[test]
    fn nothing_in_an_escaped_text_acts_on_a_terminal() {
        let escapes = "a\u{1b}]0;x\u{7}\u{9b}31m\r\nž\u{202e}b";
        assert_eq!(
            escaped(escapes),
            r"a\u{1b}]0;x\u{7}\u{9b}31m\u{d}\u{a}ž\u{202e}b"
        );
        assert_eq!(escaped("plain: ü → \"x\""), "plain: ü → \"x\"");
    }

    #[test]
    fn values_that_may_hold_a_secret() {
        for secret in [
            "postgresql://u:sesame@a/b",
            " mysql://u:sesame@a",
            "http://u:sesame%40a/v1",
            "http://u:sesame/v1",
            "['http://a/v1', 'http://b:sesame/v1']",
            "http://a/v1?sesame",
            "http://a/v1#sesame",
            "a/v1?key=sesame",
            "u:sesame@a",
            "host=a Password = sesame",
            "adr_0123456789abcdef",
        ] {
            assert!(may_hold_a_secret(secret), "{secret}");
        }
        for plain in [
            "",
            "8080",
            "http://a",
            "http://a:99999/v1,http://b",
            "http://[a b]/v1",
            "[\"http://a:1/v1\", \"ftp://b\"]",
            "/etc/adriaticum/database-password",
            "10.0.0.0/33",
            "(?i)price|opening (hours",
        ] {
            assert!(!may_hold_a_secret(plain), "{plain}");
        }
    }

    #[test]
    fn thousands() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1_000, "1,000"),
            (1_234_567, "1,234,567"),
        ] {
            assert_eq!(grouped(number), text);
        }
        assert_eq!(
            (count(1, "row"), count(1_000, "row")),
            ("1 row".into(), "1,000 rows".into())
        );
    }
}
