//! The intervals that the bars of a chart can stand for.

use time::{Date, Month, OffsetDateTime};

use crate::ledger::Span;
use crate::when::{self, DAY, HOUR, Range};

/// 1970-01-05, the first Monday.
const MONDAY: i64 = 4 * DAY;

/// The interval that a bar stands for. Weeks begin on Monday.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarInterval {
    Seconds(i64),
    Week,
    Month,
    Year,
}

impl BarInterval {
    /// Each interval with the most bars that a chart has of it: a phone has room for 31 that can be
    /// touched one by one, an hour has its minutes, two days have their hours, and six years by
    /// month can still be read.
    const ALL: [(Self, usize); 11] = [
        (Self::Seconds(60), 61),
        (Self::Seconds(120), 61),
        (Self::Seconds(HOUR), 49),
        (Self::Seconds(2 * HOUR), 31),
        (Self::Seconds(3 * HOUR), 31),
        (Self::Seconds(6 * HOUR), 31),
        (Self::Seconds(12 * HOUR), 31),
        (Self::DAY, 31),
        (Self::Week, 31),
        (Self::Month, 74),
        (Self::Year, usize::MAX),
    ];

    pub const DAY: Self = Self::Seconds(DAY);

    /// Returns the shortest interval that is no shorter than the span and needs few enough bars for
    /// the range, with what each bar covers. The range may cut the first and the last.
    pub fn fitting(range: Range, span: Span) -> (Self, Vec<Range>) {
        let divide = |(interval, most): (Self, usize)| match interval {
            Self::Seconds(seconds) if seconds < span.seconds() => None,
            _ => Some((interval, interval.divide(range, most)?)),
        };
        Self::ALL
            .into_iter()
            .find_map(divide)
            .expect("there may be any number of years")
    }

    /// The start of the next interval after a time.
    fn next(self, time: i64) -> i64 {
        let next_year = || {
            let year = OffsetDateTime::from_unix_timestamp(time).ok()?.year() + 1;
            let date = Date::from_calendar_date(year, Month::January, 1).ok()?;
            Some(date.midnight().assume_utc().unix_timestamp())
        };
        match self {
            Self::Seconds(seconds) => when::interval_end(time, seconds),
            Self::Week => when::interval_end(time - MONDAY, 7 * DAY) + MONDAY,
            Self::Month => when::month(time).map_or(i64::MAX, |month| month.until),
            Self::Year => next_year().unwrap_or(i64::MAX),
        }
    }

    /// Returns true if a bar covers its whole interval.
    pub fn is_whole(self, bar: Range) -> bool {
        [self.next(bar.since - 1), self.next(bar.since)] == [bar.since, bar.until]
    }

    /// Returns what the bars of a range cover, or `None` if they are too many.
    fn divide(self, range: Range, most: usize) -> Option<Vec<Range>> {
        let mut bars = Vec::new();
        let mut since = range.since;
        while since < range.until {
            let until = self.next(since).min(range.until);
            bars.push(Range { since, until });
            since = until;
            if bars.len() > most {
                return None;
            }
        }
        Some(bars)
    }
}
