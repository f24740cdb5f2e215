//! Divides the range of a usage report into parts, each of which is read from the rollup or from
//! the rows.

use super::rollup::Span;
use crate::database::{DatabaseError, Result, Session, values};
use crate::id::RequestId;
use crate::when::Range;

/// The rollup's spans to read, or `None` for the rows; and the time to read them for.
type Part = (Option<Span>, Range);

/// Divides a range into parts, in the order of time. Whole spans are in the rollup. The rest of a
/// day is divided into hours, and the rest of an hour is counted. Fails if retention has removed
/// the rows of that hour.
pub(super) fn divide(session: &Session, range: Range, span: Span) -> Result<Vec<Part>> {
    if span == Span::Minute {
        return Ok(vec![(None, range)]);
    }
    let Range { since, until } = range;
    let (begin, end) = (first_start(span, since), span.start(until));
    if begin > end {
        // It is inside one span.
        return divide_span(session, range, span);
    }
    let mut parts = divide_span(
        session,
        Range {
            since,
            until: begin,
        },
        span,
    )?;
    if begin < end {
        let whole = Range {
            since: begin,
            until: end,
        };
        parts.push((Some(span), whole));
    }
    parts.extend(divide_span(session, Range { since: end, until }, span)?);
    Ok(parts)
}

/// Divides a part of one span.
fn divide_span(session: &Session, range: Range, span: Span) -> Result<Vec<Part>> {
    if range.since >= range.until {
        return Ok(Vec::new());
    }
    if span == Span::Day {
        return divide(session, range, Span::Hour);
    }
    let hour = span.start(range.since);
    let sum = "SELECT CAST(coalesce(sum(requests), 0) AS BIGINT) FROM usage_rollup WHERE span = 3600 AND start = $1";
    let count = "SELECT count(*) FROM usage WHERE request_id >= $1 AND request_id < $2";
    let ids = [hour, hour.saturating_add(span.seconds())].map(|time| RequestId::from(time).into());
    if session.value::<i64>(count, &ids)? != session.value::<i64>(sum, &values![hour])? {
        return Err(DatabaseError::RowsRemoved(hour));
    }
    Ok(vec![(None, range)])
}

/// The first start of a span at this time or later.
fn first_start(span: Span, time: i64) -> i64 {
    match span.start(time) {
        start if start == time => time,
        start => start.saturating_add(span.seconds()),
    }
}
