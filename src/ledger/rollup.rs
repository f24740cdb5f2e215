//! The rollup: sums of the rows by hour and by day. report.rs reads it.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::row::{LedgerRow, Tokens};
use crate::database::{SqlValue, Statement, values};
use crate::when::{DAY, HOUR};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Span {
    /// There are no sums of minutes: they are counted from the rows.
    Minute,
    Hour,
    Day,
}

impl Span {
    pub fn seconds(self) -> i64 {
        match self {
            Self::Minute => 60,
            Self::Hour => HOUR,
            Self::Day => DAY,
        }
    }

    /// The start of the span that contains a time.
    pub(super) fn start(self, time: i64) -> i64 {
        time.div_euclid(self.seconds())
            .saturating_mul(self.seconds())
    }
}

/// The columns of the key of a rollup row, and of its figures.
pub(super) const KEY_COLUMNS: &str = "span, start, key_id, key_name, status, error_code, gateway";
pub(super) const FIGURES: [&str; 5] = [
    "requests",
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "unmeasured",
];

/// The columns of the rollup.
pub(super) fn columns() -> String {
    format!("{KEY_COLUMNS}, {}", FIGURES.join(", "))
}

/// A query for the sums of some rows, with the columns of the rollup.
pub(super) fn sums_of_rows(span: i64, condition: &str) -> String {
    format!(
        "SELECT {span}, created / {span} * {span}, key_id, key_name, coalesce(status, 0), coalesce(error_code, ''), gateway,
         count(*), CAST(coalesce(sum(prompt_tokens), 0) AS BIGINT),
         CAST(coalesce(sum(completion_tokens), 0) AS BIGINT), CAST(coalesce(sum(total_tokens), 0) AS BIGINT),
         count(*) FILTER (WHERE status = 200 AND total_tokens IS NULL)
         FROM usage WHERE {condition} GROUP BY 1, 2, 3, 4, 5, 6, 7"
    )
}

/// Adds figures to those of a key. A runtime's figures are at most 1,000,000,000, so sums do not
/// overflow.
static UPSERT: LazyLock<String> = LazyLock::new(|| {
    let add = |figure| format!("{figure} = usage_rollup.{figure} + excluded.{figure}");
    format!(
        "INSERT INTO usage_rollup ({}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
         ON CONFLICT ({KEY_COLUMNS}) DO UPDATE SET {}",
        columns(),
        FIGURES.map(add).join(", ")
    )
});

/// The key of a rollup row: the length and the start of its span, and what its rows have in common.
type RollupKey<'a> = (i64, i64, &'a str, &'a str, i64, &'a str, &'a str);

/// Rows that are added to the sums together.
#[derive(Default)]
pub(super) struct Batch<'a>(BTreeMap<RollupKey<'a>, [i64; 5]>);

impl<'a> Batch<'a> {
    pub fn add(&mut self, row: &'a LedgerRow) {
        let Tokens {
            prompt_tokens,
            completion_tokens,
            total_tokens,
        } = row.tokens;
        let is_unmeasured = row.status == Some(200) && total_tokens.is_none();
        let [prompt, completion, total] =
            [prompt_tokens, completion_tokens, total_tokens].map(Option::unwrap_or_default);
        let figures = [1, prompt, completion, total, is_unmeasured.into()];
        for span in [Span::Hour, Span::Day] {
            let key = (
                span.seconds(),
                span.start(row.created),
                row.key_id.as_str(),
                row.key_name.as_str(),
                row.status.unwrap_or(0),
                row.error_code.as_deref().unwrap_or_default(),
                row.gateway.as_str(),
            );
            let sums = self.0.entry(key).or_default();
            sums.iter_mut()
                .zip(figures)
                .for_each(|(sum, figure)| *sum += figure);
        }
    }

    pub fn upserts(self) -> impl Iterator<Item = Statement> {
        self.0.into_iter().map(|(key, figures)| {
            let (span, start, key_id, key_name, status, error_code, gateway) = key;
            let key = values![span, start, key_id, key_name, status, error_code, gateway];
            let parameters: Vec<SqlValue> =
                key.into_iter().chain(figures.map(SqlValue::from)).collect();
            Statement::new(UPSERT.as_str(), parameters)
        })
    }
}
