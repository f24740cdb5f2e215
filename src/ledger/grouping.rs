//! The groups of a usage report.

use std::collections::HashMap;

use serde_json::Value;

use super::sums::RollupRow;
use crate::when;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    Hour,
    Day,
    Month,
    Key,
    Status,
    Gateway,
}

impl Grouping {
    pub const ALL: [(&str, Self); 6] = [
        ("hour", Self::Hour),
        ("day", Self::Day),
        ("month", Self::Month),
        ("key", Self::Key),
        ("status", Self::Status),
        ("gateway", Self::Gateway),
    ];

    /// The members that name a group.
    pub fn labels(self) -> &'static [&'static str] {
        match self {
            Self::Hour => &["hour"],
            Self::Day => &["day"],
            Self::Month => &["month"],
            Self::Key => &["key_id", "name"],
            Self::Status => &["status", "error_code"],
            Self::Gateway => &["gateway"],
        }
    }

    /// Returns false for more than two groupings, for the same one twice, and for two of time: a
    /// day has its month.
    pub fn fit_together(list: &[Self]) -> bool {
        let is_time = |by: Self| matches!(by, Self::Hour | Self::Day | Self::Month);
        match *list {
            [] | [_] => true,
            [one, other] => one != other && !(is_time(one) && is_time(other)),
            _ => false,
        }
    }

    pub(super) fn group(self, row: &RollupRow) -> Group {
        // The first characters of a time such as `2026-11-16T13:00:00Z`.
        let time = |length| Some(when::iso(row.start)?.get(..length)?.to_owned());
        match self {
            Self::Hour => (None, time(13).map(|hour| hour + ":00Z")),
            Self::Day => (None, time(10)),
            Self::Month => (None, time(7)),
            Self::Key => (None, Some(row.key_id.clone())),
            Self::Status => (row.status, row.error_code.clone()),
            Self::Gateway => (None, Some(row.gateway.clone())),
        }
    }

    /// The members that name a group, with their values. A key also has its present name: it may
    /// have changed within the range.
    pub(super) fn named(
        self,
        (status, text): Group,
        key_names: &HashMap<String, String>,
    ) -> impl Iterator<Item = (String, Value)> {
        let values: [Value; 2] = match self {
            Self::Status => [status.into(), text.into()],
            _ => {
                let name = text.as_ref().and_then(|id| key_names.get(id).cloned());
                [text.into(), name.into()]
            }
        };
        self.labels().iter().map(ToString::to_string).zip(values)
    }
}

/// The status and the text that name a group. Groups are in their order.
pub(super) type Group = (Option<i64>, Option<String>);
