//! The intervals that the bars of a chart can stand for.

use crate::ledger::Span;
use crate::when::{HOUR, Range, Zone, interval_end};

/// The interval that a bar stands for; days and months are those of the calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarInterval {
    Minute,
    /// 3,600 seconds, counted from the start of the day.
    Hour,
    Day,
    Month,
}

impl BarInterval {
    /// Each interval with the most bars that a chart has of it: an hour has its minutes, two days
    /// have their hours even if the clock is set back, and a quarter has its days.
    const ALL: [(Self, usize); 4] = [
        (Self::Minute, 61),
        (Self::Hour, 51),
        (Self::Day, 100),
        (Self::Month, usize::MAX),
    ];

    pub fn span(self) -> Span {
        match self {
            Self::Minute => Span::Minute,
            Self::Hour => Span::Hour,
            Self::Day | Self::Month => Span::Day,
        }
    }

    /// Returns the shortest interval that is no shorter than the span and needs few enough bars for
    /// the range, with what each bar covers. The range may cut the first and the last.
    pub fn fitting(range: Range, shortest: Span, zone: &Zone) -> (Self, Vec<Range>) {
        let divide = |(interval, most): (Self, usize)| match interval.span() < shortest {
            true => None,
            false => Some((interval, interval.divide(range, most, zone)?)),
        };
        Self::ALL
            .into_iter()
            .find_map(divide)
            .expect("there may be any number of months")
    }

    /// The start of the next interval after a time.
    fn next(self, time: i64, zone: &Zone) -> i64 {
        match self {
            Self::Minute => interval_end(time, 60),
            Self::Hour => {
                let day = zone.day(time);
                let next = time - (time - day.since) % HOUR + HOUR;
                next.min(day.until)
            }
            Self::Day => zone.day(time).until,
            Self::Month => zone.month(time).until,
        }
    }

    /// Returns true if a bar covers its whole interval.
    pub fn is_whole(self, bar: Range, zone: &Zone) -> bool {
        [self.next(bar.since - 1, zone), self.next(bar.since, zone)] == [bar.since, bar.until]
    }

    /// Returns what the bars of a range cover, or `None` if they are too many.
    fn divide(self, range: Range, most: usize, zone: &Zone) -> Option<Vec<Range>> {
        let mut bars = Vec::new();
        let mut since = range.since;
        while since < range.until {
            let until = self.next(since, zone).min(range.until);
            bars.push(Range { since, until });
            since = until;
            if bars.len() > most {
                return None;
            }
        }
        Some(bars)
    }
}
