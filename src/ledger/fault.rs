//! What a verification finds wrong.

use std::fmt;

use crate::{text, when};

/// The first thing that is wrong.
#[derive(Debug, PartialEq, Eq)]
pub enum Fault {
    /// Something in the row was changed, or the row was put there.
    Changed { request_id: String },
    /// The row has no place in the chain, or that of a row that comes before it.
    Inserted { request_id: String },
    /// Rows are missing before this one.
    Removed { before: String, count: i64 },
    /// The newest rows of a gateway are missing.
    Cut { gateway: String, count: i64 },
    /// The chain of a gateway does not end where it says.
    End { gateway: String },
    /// The sums of a key in a span are not those of its rows.
    Sums {
        span: i64,
        start: i64,
        key_id: String,
        difference: String,
    },
    /// The sums of a gateway count more or fewer requests than its chain has had.
    Total {
        gateway: String,
        requests: i64,
        rows: i64,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = |count| text::count(count, "row");
        let was = |count| if count == 1 { "was" } else { "were" };
        let of = |gateway: &str| match gateway {
            "" => String::new(),
            name => format!(" of the gateway {name}"),
        };
        match self {
            Self::Changed { request_id } => {
                write!(f, "the row of {request_id} was changed or moved")
            }
            Self::Inserted { request_id } => {
                write!(
                    f,
                    "the row of {request_id} was inserted: it has no place of its own in the chain"
                )
            }
            Self::Removed { before, count } => {
                write!(
                    f,
                    "{} {} removed before that of {before}",
                    rows(*count),
                    was(*count)
                )
            }
            Self::Cut { gateway, count } => {
                write!(
                    f,
                    "the newest {}{} {} removed",
                    rows(*count),
                    of(gateway),
                    was(*count)
                )
            }
            Self::End { gateway } => write!(f, "the end of the chain{} was changed", of(gateway)),
            Self::Sums {
                span,
                start,
                key_id,
                difference,
            } => {
                let span = match *span {
                    when::HOUR => "hour".into(),
                    when::DAY => "day".into(),
                    span => format!("span of {span} s"),
                };
                let start = when::iso(*start).unwrap_or_else(|| start.to_string());
                write!(
                    f,
                    "the sums differ: {span} {start}, key {key_id}: {difference}"
                )
            }
            Self::Total {
                gateway,
                requests,
                rows,
            } => write!(
                f,
                "the sums{} count {}, but its chain has had {}",
                of(gateway),
                text::count(*requests, "request"),
                text::count(*rows, "row")
            ),
        }
    }
}
