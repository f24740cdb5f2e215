//! Divides the range of a usage report into parts, each of which is read from the rollup or from
//! the rows.

use super::rollup::Span;
use crate::database::{DatabaseError, Result};
use crate::database::{Session, values};
use crate::id::RequestId;
use crate::when::Range;

/// Divides a range into parts, in the order of time, and finds where the figures of each can be
/// read.
pub(super) struct Division<'a> {
    pub session: &'a Session<'a>,
    /// The rollup's spans to read, or `None` for the rows; then the first second, and the one after
    /// the last.
    pub parts: Vec<(Option<Span>, i64, i64)>,
}

impl Division<'_> {
    /// Whole spans are in the rollup. The rest of a day is divided into hours, and the rest of an
    /// hour is counted. Fails if retention has removed the rows of that hour.
    pub fn divide(&mut self, Range { since, until }: Range, span: Span) -> Result<()> {
        if span == Span::Minute {
            self.add(None, since, until);
            return Ok(());
        }
        let (begin, end) = (end_of(span, since), span.start(until));
        if begin > end {
            // It is inside one span.
            return self.divide_span(since, until, span);
        }
        self.divide_span(since, begin, span)?;
        self.add(Some(span), begin, end);
        self.divide_span(end, until, span)
    }

    /// A part of one span.
    fn divide_span(&mut self, from: i64, to: i64, span: Span) -> Result<()> {
        if from >= to {
            return Ok(());
        }
        if span == Span::Day {
            return self.divide(
                Range {
                    since: from,
                    until: to,
                },
                Span::Hour,
            );
        }
        let start = span.start(from);
        let end = start.saturating_add(span.seconds());
        if !self.has_rows(start, end)? {
            return Err(DatabaseError::RowsRemoved(start));
        }
        self.add(None, from, to);
        Ok(())
    }

    /// Returns whether all rows of an hour are still there.
    fn has_rows(&self, start: i64, end: i64) -> Result<bool> {
        let sum = "SELECT CAST(coalesce(sum(requests), 0) AS BIGINT) FROM usage_rollup WHERE span = 3600 AND start = $1";
        let count = "SELECT count(*) FROM usage WHERE request_id >= $1 AND request_id < $2";
        let rows: i64 = self.session.value(
            count,
            &values![RequestId::from(start), RequestId::from(end)],
        )?;
        Ok(rows == self.session.value::<i64>(sum, &values![start])?)
    }

    fn add(&mut self, source: Option<Span>, from: i64, to: i64) {
        if from < to {
            self.parts.push((source, from, to));
        }
    }
}

/// The end of the last span that begins before this time.
fn end_of(span: Span, time: i64) -> i64 {
    if time == span.start(time) {
        time
    } else {
        span.start(time).saturating_add(span.seconds())
    }
}
