//! Parses and formats dates and times.

use std::time::Duration;

use time::format_description::BorrowedFormatItem;
use time::macros::format_description;
use time::{Date, OffsetDateTime, Time};

const DATE: &[BorrowedFormatItem<'_>] = format_description!("[year]-[month]-[day]");
const MINUTE: &[BorrowedFormatItem<'_>] = format_description!("[year]-[month]-[day] [hour]:[minute]");
const SECOND: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day]T[hour]:[minute]:[second]Z");

/// Times of a day, with and without seconds.
const CLOCK: [&[BorrowedFormatItem<'_>]; 2] =
    [format_description!("[hour]:[minute]"), format_description!("[hour]:[minute]:[second]")];

const DAY: i64 = 86_400;

/// A length of time, a date, or a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Seconds(i64),
    Days(i64),
    /// The beginning of a day, UTC, in Unix time.
    Date(i64),
    /// Unix time.
    Time(i64),
    /// Seconds after the beginning of this day, UTC.
    Today(i64),
}

impl When {
    pub const TAKES: &str = "a number followed by s, m, h or d, a date as YYYY-MM-DD, a time as YYYY-MM-DDTHH:MMZ, \
                             or HH:MM today (UTC)";

    pub fn parse(text: &str) -> Option<Self> {
        if let Ok(date) = Date::parse(text, DATE) {
            return Some(Self::Date(start_of(date)));
        }
        // Times as the commands print them have a Z, and a T or a space.
        let time = text.strip_suffix('Z').unwrap_or(text);
        if let Some((date, time)) = time.split_once(['T', ' ']) {
            return Some(Self::Time(start_of(Date::parse(date, DATE).ok()?) + clock(time)?));
        }
        if let Some(seconds) = clock(time) {
            return Some(Self::Today(seconds));
        }
        let unit = text.chars().last()?;
        let seconds = match unit {
            's' => 1,
            'm' => 60,
            'h' => 3_600,
            'd' => DAY,
            _ => return None,
        };
        let digits = &text[..text.len() - 1];
        if !digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        // At most about a hundred years.
        let number =
            digits.parse::<i64>().ok().filter(|&number| number > 0 && number <= 3_200_000_000 / seconds)?;
        Some(if unit == 'd' { Self::Days(number) } else { Self::Seconds(number * seconds) })
    }

    /// The time that long after now, or the time itself.
    pub fn ahead(self, now: i64) -> i64 {
        match self {
            Self::Seconds(seconds) => now + seconds,
            Self::Days(days) => now + days * DAY,
            Self::Date(time) | Self::Time(time) => time,
            Self::Today(seconds) => now.div_euclid(DAY) * DAY + seconds,
        }
    }

    /// The time that long before now, or the time itself. Days are calendar days in UTC and include today, as on the console: 30 days
    /// are today and the 29 days before it.
    pub fn ago(self, now: i64) -> i64 {
        match self {
            Self::Seconds(seconds) => now - seconds,
            Self::Days(days) => (now.div_euclid(DAY) - (days - 1)) * DAY,
            Self::Date(_) | Self::Time(_) | Self::Today(_) => self.ahead(now),
        }
    }
}

fn start_of(date: Date) -> i64 {
    date.midnight().assume_utc().unix_timestamp()
}

/// The seconds from midnight to a time such as 13:00 or 13:00:59.
fn clock(text: &str) -> Option<i64> {
    let time = CLOCK.iter().find_map(|form| Time::parse(text, form).ok())?;
    Some((time - Time::MIDNIGHT).whole_seconds())
}

/// True if a text begins with the form of a date but not with a valid one, such as 2027-02-30.
pub fn is_impossible_date(text: &str) -> bool {
    let text = text.split(['T', ' ']).next().unwrap_or_default();
    let has_form = text.len() == 10
        && text
            .bytes()
            .enumerate()
            .all(|(at, b)| if at == 4 || at == 7 { b == b'-' } else { b.is_ascii_digit() });
    has_form && Date::parse(text, DATE).is_err()
}

/// The beginning and the end of the calendar month of a time, UTC.
pub fn month(time: i64) -> Option<(i64, i64)> {
    let first = OffsetDateTime::from_unix_timestamp(time).ok()?.date().replace_day(1).ok()?;
    let next = first.checked_add(time::Duration::days(31))?.replace_day(1).ok()?;
    Some((start_of(first), start_of(next)))
}

pub fn now() -> i64 {
    OffsetDateTime::now_utc().unix_timestamp()
}

/// Formats a time to the minute as the API and the commands print it, `2026-11-16 13:48Z`: the commands also accept that form.
/// Returns a dash if there is none.
pub fn format_minute(time: Option<i64>) -> String {
    time.and_then(minute).map_or("-".into(), |minute| minute + "Z")
}

/// Formats a time to the minute for sentences: `2026-11-16 13:48 UTC`.
pub fn format_utc(time: i64) -> String {
    minute(time).map_or("-".into(), |minute| minute + " UTC")
}

/// The same for the end of a time: midnight belongs to the day that it ends, `2026-11-16 24:00 UTC`.
pub fn format_end(time: i64) -> String {
    match minute(time - 1) {
        Some(minute) if time.rem_euclid(DAY) == 0 => format!("{} 24:00 UTC", &minute[..10]),
        _ => format_utc(time),
    }
}

fn minute(time: i64) -> Option<String> {
    OffsetDateTime::from_unix_timestamp(time).ok()?.format(MINUTE).ok()
}

/// Formats a time to the second, UTC, in ISO 8601.
pub fn iso(time: i64) -> Option<String> {
    OffsetDateTime::from_unix_timestamp(time).ok()?.format(SECOND).ok()
}

/// Converts a duration to milliseconds, to the microsecond: more is noise.
pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1000.0
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
            ("90d", Some(When::Days(90))),
            ("2001-01-01", Some(When::Date(978_307_200))),
            ("2024-02-29", Some(When::Date(1_709_164_800))),
            ("2001-01-01T13:00Z", Some(When::Time(978_354_000))),
            ("2001-01-01T13:00", Some(When::Time(978_354_000))),
            ("2001-01-01 13:00:59Z", Some(When::Time(978_354_059))),
            ("13:00", Some(When::Today(46_800))),
            ("00:00:01Z", Some(When::Today(1))),
            ("24:00", None),
            ("1:00", None),
            ("13", None),
            ("13:00+01:00", None),
            ("2001-01-01T", None),
            ("2001-01-01T25:00Z", None),
            ("2023-02-29T13:00Z", None),
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
            assert_eq!(is_impossible_date(text), text.starts_with("2023-02-29"), "{text}");
        }
    }

    #[test]
    fn days_ago_are_calendar_days_and_shorter_times_are_not() {
        let now = 20_000 * DAY + 40_000;
        assert_eq!(When::Days(1).ago(now), 20_000 * DAY, "today");
        assert_eq!(When::Days(30).ago(now), 19_971 * DAY, "today and the 29 days before it");
        assert_eq!(When::Seconds(24 * 3600).ago(now), now - DAY);
        assert_eq!(When::Days(90).ahead(now), now + 90 * DAY, "a key expires to the second");
        assert_eq!(When::Today(60).ago(now), 20_000 * DAY + 60, "a time of today");
    }

    #[test]
    fn months() {
        for (time, first, next) in [
            ("2024-02-29", "2024-02-01", "2024-03-01"),
            ("2026-12-31", "2026-12-01", "2027-01-01"),
            ("2026-11-01", "2026-11-01", "2026-12-01"),
        ] {
            let start = |text| When::parse(text).expect("a date").ahead(0);
            for second in [0, DAY - 1] {
                assert_eq!(month(start(time) + second), Some((start(first), start(next))), "{time}");
            }
        }
        assert_eq!(month(i64::MAX), None);
    }

    #[test]
    fn formats() {
        assert_eq!(format_minute(Some(978_307_260)), "2001-01-01 00:01Z");
        assert_eq!(format_minute(None), "-");
        assert_eq!(format_utc(978_307_260), "2001-01-01 00:01 UTC");
        assert_eq!(format_end(978_307_260), "2001-01-01 00:01 UTC");
        assert_eq!(format_end(978_307_200), "2000-12-31 24:00 UTC");
        assert_eq!((format_minute(Some(i64::MAX)), format_utc(i64::MAX)), ("-".into(), "-".into()));
        assert_eq!(iso(978_307_261).as_deref(), Some("2001-01-01T00:01:01Z"));
        assert_eq!(iso(i64::MAX), None);
    }
}
