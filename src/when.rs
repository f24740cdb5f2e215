//! Times as people write them on the command line, and as they read them.

use time::format_description::BorrowedFormatItem;
use time::macros::format_description;
use time::{Date, OffsetDateTime};

const DATE: &[BorrowedFormatItem<'_>] = format_description!("[year]-[month]-[day]");
const MINUTE: &[BorrowedFormatItem<'_>] = format_description!("[year]-[month]-[day] [hour]:[minute]Z");

/// A length of time, or a date.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Seconds(i64),
    /// The beginning of a day, UTC, in Unix time.
    Date(i64),
}

impl When {
    pub const TAKES: &str = "a number followed by s, m, h or d, or a date as YYYY-MM-DD";

    pub fn parse(text: &str) -> Option<Self> {
        if let Ok(date) = Date::parse(text, DATE) {
            return Some(Self::Date(date.midnight().assume_utc().unix_timestamp()));
        }
        let unit = text.chars().last()?;
        let seconds = match unit {
            's' => 1,
            'm' => 60,
            'h' => 3_600,
            'd' => 86_400,
            _ => return None,
        };
        let digits = &text[..text.len() - 1];
        if !digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        // A hundred years are as good as any more.
        let number =
            digits.parse::<i64>().ok().filter(|&number| number > 0 && number <= 3_200_000_000 / seconds)?;
        Some(Self::Seconds(number * seconds))
    }

    /// That long after now, or that date.
    pub fn ahead(self, now: i64) -> i64 {
        match self {
            Self::Seconds(seconds) => now + seconds,
            Self::Date(date) => date,
        }
    }

    /// That long before now, or that date.
    pub fn ago(self, now: i64) -> i64 {
        match self {
            Self::Seconds(seconds) => now - seconds,
            Self::Date(date) => date,
        }
    }
}

pub fn now() -> i64 {
    OffsetDateTime::now_utc().unix_timestamp()
}

/// A time to the minute, UTC; a dash where there is none.
pub fn shown(time: Option<i64>) -> String {
    time.and_then(|time| OffsetDateTime::from_unix_timestamp(time).ok())
        .and_then(|time| time.format(MINUTE).ok())
        .unwrap_or_else(|| "-".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        for (text, when) in [
            ("1s", Some(When::Seconds(1))),
            ("15m", Some(When::Seconds(900))),
            ("24h", Some(When::Seconds(86_400))),
            ("90d", Some(When::Seconds(7_776_000))),
            ("2001-01-01", Some(When::Date(978_307_200))),
            ("2024-02-29", Some(When::Date(1_709_164_800))),
            ("", None),
            ("d", None),
            ("0d", None),
            ("-1d", None),
            ("+1d", None),
            ("1.5d", None),
            ("1w", None),
            ("1é", None),
            ("99999999999999999999d", None),
            ("99999999d", None),
            ("2023-02-29", None),
            ("2023-2-9", None),
            ("nonsense", None),
        ] {
            assert_eq!(When::parse(text), when, "{text}");
        }
    }

    #[test]
    fn what_is_shown() {
        assert_eq!(shown(Some(978_307_260)), "2001-01-01 00:01Z");
        assert_eq!(shown(None), "-");
        assert_eq!(shown(Some(i64::MAX)), "-");
    }
}
