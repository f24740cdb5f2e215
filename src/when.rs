//! Parses and formats dates and times.

use std::time::Duration;

use time::format_description::BorrowedFormatItem;
use time::macros::format_description;
use time::{Date, OffsetDateTime, Time, UtcOffset};

const DATE: &[BorrowedFormatItem<'_>] = format_description!("[year]-[month]-[day]");
const MINUTE: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day] [hour]:[minute]");
const SECOND: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day]T[hour]:[minute]:[second]Z");

const OFFSET: &[BorrowedFormatItem<'_>] =
    format_description!("[offset_hour sign:mandatory]:[offset_minute]");

const CLOCK: &[BorrowedFormatItem<'_>] =
    format_description!(version = 2, "[hour]:[minute][optional [:[second]]]");

pub const HOUR: i64 = 3_600;
pub const DAY: i64 = 24 * HOUR;

/// No clock is further from UTC: that of Kiribati is 14 hours ahead.
const LARGEST_OFFSET: i64 = 14 * HOUR;

/// A length of time, a date, or a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Seconds(i64),
    Days(i64),
    /// The beginning of a day, UTC, in Unix time.
    Date(i64),
    /// Unix time.
    Time(i64),
    /// Seconds after the beginning of this day at an offset from UTC, which is in seconds too.
    Today(i64, i64),
}

impl When {
    pub const TAKES: &str = "a number followed by s, m, h or d, a date as YYYY-MM-DD, a time as YYYY-MM-DDTHH:MMZ or with \
                             an offset such as +01:00, or HH:MM today (UTC)";

    pub fn parse(text: &str) -> Option<Self> {
        if let Ok(date) = Date::parse(text, DATE) {
            return Some(Self::Date(start_of(date)));
        }
        // Times as the commands print them have a Z, and a T or a space.
        if let Some((date, time)) = text.split_once(['T', ' ']) {
            let (seconds, offset) = clock(time)?;
            return Some(Self::Time(
                start_of(Date::parse(date, DATE).ok()?) + seconds - offset,
            ));
        }
        if let Some((seconds, offset)) = clock(text) {
            return Some(Self::Today(seconds, offset));
        }
        let (digits, seconds) = [('s', 1), ('m', 60), ('h', HOUR), ('d', DAY)]
            .into_iter()
            .find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, seconds)))?;
        let is_number = digits.bytes().all(|b| b.is_ascii_digit());
        let number: i64 = digits.parse().ok().filter(|_| is_number)?;
        // At most about a hundred years.
        if !(1..=3_200_000_000 / seconds).contains(&number) {
            return None;
        }
        Some(if seconds == DAY {
            Self::Days(number)
        } else {
            Self::Seconds(number * seconds)
        })
    }

    /// The time as the beginning of a range. Days are calendar days in UTC and include today, as on
    /// the console: 30 days are today and the 29 days before it.
    pub fn begin(self, now: i64) -> i64 {
        match self {
            Self::Seconds(seconds) => now - seconds,
            Self::Days(days) => (now.div_euclid(DAY) - (days - 1)) * DAY,
            Self::Date(time) | Self::Time(time) => time,
            // The day is that of the clock which shows this time.
            Self::Today(seconds, offset) => (now + offset).div_euclid(DAY) * DAY + seconds - offset,
        }
    }

    /// The time as the end of a range, itself excluded: a date is a whole day.
    pub fn end(self, now: i64) -> i64 {
        match self {
            Self::Date(start) => start + DAY,
            _ => self.begin(now),
        }
    }

    /// The time at which something expires: that long after now, or at the end of a date.
    pub fn expiry(self, now: i64) -> i64 {
        match self {
            Self::Seconds(seconds) => now + seconds,
            Self::Days(days) => now + days * DAY,
            _ => self.end(now),
        }
    }
}

/// The end of the interval of so many seconds that a time is in.
pub fn interval_end(time: i64, seconds: i64) -> i64 {
    (time.div_euclid(seconds) + 1).saturating_mul(seconds)
}

/// A range of time: from the first second to before the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub since: i64,
    pub until: i64,
}

impl Range {
    pub const ALL: Self = Self {
        since: i64::MIN,
        until: i64::MAX,
    };

    /// The range between two times, of which one or both may be open.
    pub fn between(since: Option<When>, until: Option<When>, now: i64) -> Self {
        Self {
            since: since.map_or(i64::MIN, |since| since.begin(now)),
            until: until.map_or(i64::MAX, |until| until.end(now)),
        }
    }

    /// A calendar month, UTC, from a text such as `2026-10`, or `last` for the one before the
    /// present one.
    pub fn parse_month(text: &str, now: i64) -> Option<Self> {
        if text == "last" {
            return month(month(now)?.since - 1);
        }
        month(start_of(Date::parse(&format!("{text}-01"), DATE).ok()?))
    }

    /// Refuses a range that contains no second, and one that has not begun.
    pub fn checked(self, now: i64) -> Result<Self, String> {
        let time = |time| iso(time).unwrap_or_else(|| time.to_string());
        let Self { since, until } = self;
        if since >= until {
            let [first, last] = self.bounds();
            Err(format!(
                "the range from {first} to {last} ends before it begins."
            ))
        } else if since > now {
            Err(format!(
                "the range begins at {}, in the future: it is {} now.",
                time(since),
                time(now)
            ))
        } else {
            Ok(self)
        }
    }

    /// Formats both bounds as `When` parses them: whole days as dates, of which the last is
    /// included, or times in UTC.
    pub fn bounds(self) -> [String; 2] {
        let Self { since, until } = self;
        if since % DAY == 0 && until % DAY == 0 {
            return [since, until - 1].map(|time| format(time, DATE).unwrap_or_default());
        }
        [since, until].map(|time| iso(time).unwrap_or_default().replace(":00Z", "Z"))
    }
}

fn start_of(date: Date) -> i64 {
    date.midnight().assume_utc().unix_timestamp()
}

/// The seconds from midnight to a time such as 13:00 or 13:00:59, and its offset from UTC: `Z`,
/// `+01:00`, or none.
fn clock(text: &str) -> Option<(i64, i64)> {
    let text = text
        .strip_suffix('Z')
        .map_or(text.to_owned(), |time| format!("{time}+00:00"));
    let (time, offset) = match text.find(['+', '-']) {
        Some(at) => (&text[..at], UtcOffset::parse(&text[at..], OFFSET).ok()?),
        None => (text.as_str(), UtcOffset::UTC),
    };
    let time = Time::parse(time, CLOCK).ok()?;
    let offset = i64::from(offset.whole_seconds());
    (offset.abs() <= LARGEST_OFFSET).then(|| ((time - Time::MIDNIGHT).whole_seconds(), offset))
}

/// True if a text begins with the form of a date but not with a valid one, such as 2027-02-30.
pub fn is_impossible_date(text: &str) -> bool {
    let text = text.split(['T', ' ']).next().unwrap_or_default();
    let has_form = text.len() == 10
        && text.bytes().enumerate().all(|(at, b)| {
            if at == 4 || at == 7 {
                b == b'-'
            } else {
                b.is_ascii_digit()
            }
        });
    has_form && Date::parse(text, DATE).is_err()
}

/// The calendar month of a time, UTC.
pub fn month(time: i64) -> Option<Range> {
    let first = OffsetDateTime::from_unix_timestamp(time)
        .ok()?
        .date()
        .replace_day(1)
        .ok()?;
    let next = first
        .checked_add(time::Duration::days(31))?
        .replace_day(1)
        .ok()?;
    Some(Range {
        since: start_of(first),
        until: start_of(next),
    })
}

pub fn now() -> i64 {
    OffsetDateTime::now_utc().unix_timestamp()
}

/// Formats a time to the minute as the API and the commands print it, `2026-11-16 13:48Z`: the
/// commands also accept that form. Returns a dash if there is none.
pub fn format_minute(time: Option<i64>) -> String {
    time.and_then(minute)
        .map_or("-".into(), |minute| minute + "Z")
}

/// Formats a time to the minute for sentences: `2026-11-16 13:48 UTC`.
pub fn format_utc(time: i64) -> String {
    minute(time).map_or("-".into(), |minute| minute + " UTC")
}

/// The same for the end of a time: midnight belongs to the day that it ends, `2026-11-16 24:00
/// UTC`.
pub fn format_end(time: i64) -> String {
    match minute(time - 1) {
        Some(minute) if time.rem_euclid(DAY) == 0 => format!("{} 24:00 UTC", &minute[..10]),
        _ => format_utc(time),
    }
}

fn minute(time: i64) -> Option<String> {
    format(time, MINUTE)
}

/// Formats a time to the second, UTC, in ISO 8601.
pub fn iso(time: i64) -> Option<String> {
    format(time, SECOND)
}

fn format(time: i64, form: &[BorrowedFormatItem<'_>]) -> Option<String> {
    let time = OffsetDateTime::from_unix_timestamp(time).ok()?;
    time.format(form).ok()
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
            ("2001-01-01T13:00+01:00", Some(When::Time(978_350_400))),
            ("2001-01-01 13:00:59-05:30", Some(When::Time(978_373_859))),
            ("2001-01-01T00:30+14:00", Some(When::Time(978_258_600))),
            ("13:00", Some(When::Today(46_800, 0))),
            ("00:00:01Z", Some(When::Today(1, 0))),
            ("13:00+01:00", Some(When::Today(46_800, 3_600))),
            ("24:00", None),
            ("1:00", None),
            ("13", None),
            ("13:00+1", None),
            ("13:00+01", None),
            ("13:00+14:01", None),
            ("13:00+25:00", None),
            ("13:00+01:60", None),
            ("13:00+01:00Z", None),
            ("13:00 CET", None),
            ("2001-01-01+01:00", None),
            ("2001-01-01T13:00++01:00", None),
            ("2001-01-01T13:00é", None),
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
            assert_eq!(
                is_impossible_date(text),
                text.starts_with("2023-02-29"),
                "{text}"
            );
        }
    }

    #[test]
    fn days_ago_are_calendar_days_and_shorter_times_are_not() {
        let now = 20_000 * DAY + 40_000;
        assert_eq!(When::Days(1).begin(now), 20_000 * DAY, "today");
        assert_eq!(
            When::Days(30).begin(now),
            19_971 * DAY,
            "today and the 29 days before it"
        );
        assert_eq!(When::Seconds(24 * 3600).begin(now), now - DAY);
        assert_eq!(
            When::Days(90).expiry(now),
            now + 90 * DAY,
            "a key expires to the second"
        );
        assert_eq!(
            When::Today(60, 0).begin(now),
            20_000 * DAY + 60,
            "a time of today"
        );
    }

    #[test]
    fn a_date_is_a_whole_day_and_a_time_excludes_itself() {
        let (date, time) = (When::Date(500 * DAY), When::Time(500 * DAY));
        assert_eq!(
            [date.begin(0), date.end(0), date.expiry(0)],
            [500 * DAY, 501 * DAY, 501 * DAY]
        );
        assert_eq!([time.begin(0), time.end(0), time.expiry(0)], [500 * DAY; 3]);
    }

    /// At 23:30 UTC it is 00:30 of the next day in Zagreb: 00:15 there was a quarter of an hour
    /// ago, not a day.
    #[test]
    fn a_time_of_today_is_of_the_day_of_its_offset() {
        let now = 500 * DAY + 23 * 3600 + 1800;
        let minutes_ago = |text| (now - When::parse(text).expect("a time").begin(now)) / 60;
        assert_eq!(minutes_ago("00:15+01:00"), 15);
        assert_eq!(minutes_ago("23:15"), 15);
        assert_eq!(minutes_ago("18:15-05:00"), 15);
    }

    fn date(text: &str) -> i64 {
        When::parse(text).expect("a date").begin(0)
    }

    #[test]
    fn months() {
        for (time, first, next) in [
            ("2024-02-29", "2024-02-01", "2024-03-01"),
            ("2026-12-31", "2026-12-01", "2027-01-01"),
            ("2026-11-01", "2026-11-01", "2026-12-01"),
        ] {
            let expected = Some(Range {
                since: date(first),
                until: date(next),
            });
            for second in [0, DAY - 1] {
                assert_eq!(month(date(time) + second), expected, "{time}");
            }
            assert_eq!(Range::parse_month(&time[..7], 0), expected);
            assert_eq!(
                Range::parse_month("last", date(next)),
                expected,
                "the month before that of {next}"
            );
        }
        assert_eq!(month(i64::MAX), None);
        for text in [
            "2026-13",
            "2026-00",
            "2026-1",
            "2026",
            "2026-10-01",
            "10-2026",
            "next",
            "",
        ] {
            assert_eq!(Range::parse_month(text, 0), None, "{text}");
        }
    }

    #[test]
    fn ranges_that_are_wrong_usage() {
        let now = date("2026-11-18") + 60;
        let check = |since, until| {
            Range::between(When::parse(since), When::parse(until), now)
                .checked(now)
                .map(Range::bounds)
        };
        for (since, until, [first, last]) in [
            ("2026-11-16", "2026-11-16", ["2026-11-16", "2026-11-16"]),
            (
                "2026-11-16",
                "2026-11-17T00:00Z",
                ["2026-11-16", "2026-11-16"],
            ),
            ("2026-11-18", "2026-12-31", ["2026-11-18", "2026-12-31"]),
            (
                "2026-11-16T13:30+01:00",
                "2026-11-16T14:15Z",
                ["2026-11-16T12:30Z", "2026-11-16T14:15Z"],
            ),
            (
                "2026-11-16T13:30:07Z",
                "2026-11-16",
                ["2026-11-16T13:30:07Z", "2026-11-17T00:00Z"],
            ),
        ] {
            assert_eq!(check(since, until), Ok([first.into(), last.into()]));
        }
        for (since, until, times) in [
            (
                "2026-11-16",
                "2026-11-15",
                ["from 2026-11-16 ", "to 2026-11-15 "],
            ),
            (
                "2026-11-17",
                "2026-11-15",
                ["from 2026-11-17 ", "to 2026-11-15 "],
            ),
            (
                "2026-11-16T13:00Z",
                "2026-11-16T13:00Z",
                ["from 2026-11-16T13:00Z ", "to 2026-11-16T13:00Z "],
            ),
            (
                "2026-11-19",
                "2026-11-20",
                ["2026-11-19T00:00:00Z", "2026-11-18T00:01:00Z"],
            ),
            (
                "2026-11-19",
                "",
                ["2026-11-19T00:00:00Z", "2026-11-18T00:01:00Z"],
            ),
        ] {
            let message = check(since, until).expect_err("a wrong range");
            assert!(times.iter().all(|time| message.contains(time)), "{message}");
        }
    }

    #[test]
    fn formats() {
        assert_eq!(format_minute(Some(978_307_260)), "2001-01-01 00:01Z");
        assert_eq!(format_minute(None), "-");
        assert_eq!(format_utc(978_307_260), "2001-01-01 00:01 UTC");
        assert_eq!(format_end(978_307_260), "2001-01-01 00:01 UTC");
        assert_eq!(format_end(978_307_200), "2000-12-31 24:00 UTC");
        assert_eq!(
            (format_minute(Some(i64::MAX)), format_utc(i64::MAX)),
            ("-".into(), "-".into())
        );
        assert_eq!(iso(978_307_261).as_deref(), Some("2001-01-01T00:01:01Z"));
        assert_eq!(iso(i64::MAX), None);
    }
}
