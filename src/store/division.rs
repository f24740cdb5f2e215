//! Divides the range of a usage report into parts, each of which is read from the rollup or from the rows.

use super::engine::{SqlSession, values};
use super::{Range, Result, Span, UndividedSpan};
use crate::id::RequestId;

/// Divides a range into parts, in the order of time, and finds where the figures of each can be read.
pub(super) struct Division<'a> {
    pub session: &'a dyn SqlSession,
    /// Rows created before this may have been removed.
    pub kept_since: i64,
    /// The rollup's spans to read, or `None` for the rows; then the first second, and the one after the last.
    pub parts: Vec<(Option<Span>, i64, i64)>,
    pub undivided: Option<UndividedSpan>,
}

impl Division<'_> {
    /// Whole spans are in the rollup, which begins with `first`; earlier ones may still have their rows.
    pub fn divide(&mut self, Range { since, until }: Range, span: Span, first: i64) -> Result<()> {
        let (begin, end) = (end_of(span, since), span.start(until));
        if begin > end {
            // It is inside one span.
            return self.divide_span(since, until, span);
        }
        self.divide_span(since, begin, span)?;
        self.add(None, begin, first.min(end));
        self.add(Some(span), begin.max(first), end);
        self.divide_span(end, until, span)
    }

    /// A part of one span, from its rows or from shorter spans. If neither has all of its requests, it counts completely.
    fn divide_span(&mut self, from: i64, to: i64, span: Span) -> Result<()> {
        if from >= self.kept_since || from >= to {
            self.add(None, from, to);
            return Ok(());
        }
        let start = span.start(from);
        let end = start.saturating_add(span.seconds());
        // None in a span before the first request: then there is nothing to divide.
        let requests = self.requests(span, start, end)?;
        if span == Span::Day && self.requests(Span::Hour, start, end)? == requests {
            return self.divide(Range { since: from, until: to }, Span::Hour, i64::MIN);
        }
        if self.rows(start, end)? == requests {
            self.add(None, from, to);
        } else {
            self.add(Some(span), start, end);
            self.undivided = Some(UndividedSpan { span, start, kept_since: self.kept_since });
        }
        Ok(())
    }

    fn requests(&self, span: Span, from: i64, to: i64) -> Result<i64> {
        let sum = "SELECT CAST(coalesce(sum(requests), 0) AS BIGINT) FROM usage_rollup
            WHERE span = $1 AND start >= $2 AND start < $3";
        self.session.value(sum, &values![span.seconds(), from, to])
    }

    fn rows(&self, from: i64, to: i64) -> Result<i64> {
        let count =
            "SELECT count(*) FROM usage WHERE seq IS NOT NULL AND request_id >= $1 AND request_id < $2";
        self.session.value(count, &values![RequestId::from(from), RequestId::from(to)])
    }

    fn add(&mut self, source: Option<Span>, from: i64, to: i64) {
        if from < to {
            self.parts.push((source, from, to));
        }
    }
}

/// The end of the last span that begins before this time.
fn end_of(span: Span, time: i64) -> i64 {
    if time == span.start(time) { time } else { span.start(time).saturating_add(span.seconds()) }
}
