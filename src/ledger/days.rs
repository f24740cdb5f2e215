//! The sums of each day: `usage_days` has a row for each key, calendar day, outcome and gateway.
//!
//! A day is stored as its date in the database's time zone, here and in the rows themselves, so a
//! later rule of that zone changes no sum.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{LedgerRow, Tokens};
use crate::database::{Row, Session, Statement, Value, to_value, values};
use crate::error::Result;
use crate::id::RequestId;
use crate::when::Range;

/// Selects the requests that are counted.
#[derive(Clone, Debug)]
pub struct Filter {
    /// The ids of keys; `None` for all.
    pub keys: Option<Vec<String>>,
    pub gateway: Option<String>,
}

impl Filter {
    pub const ALL: Self = Self {
        keys: None,
        gateway: None,
    };

    /// The requests of one key.
    pub fn of_key(id: &str) -> Self {
        Self {
            keys: Some(vec![id.into()]),
            ..Self::ALL
        }
    }

    /// The conditions for a row or a sum, whose values are added to the parameters.
    pub(super) fn conditions(&self, parameters: &mut Vec<Value>) -> String {
        let mut add = |value: &String| {
            parameters.push(to_value(value));
            format!("${}", parameters.len())
        };
        let mut conditions = String::new();
        if let Some(keys) = &self.keys {
            let keys: Vec<String> = keys.iter().map(&mut add).collect();
            conditions += &match keys.is_empty() {
                true => "AND 1 = 0".to_owned(),
                false => format!("AND key_id IN ({})", keys.join(", ")),
            };
        }
        if let Some(gateway) = &self.gateway {
            conditions += &format!(" AND gateway = {}", add(gateway));
        }
        conditions
    }
}

/// Figures over some requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sums {
    pub requests: i64,
    /// Requests that did not end in 200.
    pub errors: i64,
    pub prompt_tokens: i64,
    pub completion_tokens: i64,
    pub total_tokens: i64,
    /// Completions whose total the runtime did not measure: the sums are short by theirs.
    pub unmeasured: i64,
}

impl Sums {
    fn of(row: &LedgerRow) -> Self {
        let Tokens {
            prompt_tokens,
            completion_tokens,
            total_tokens,
        } = row.tokens;
        let is_completion = row.status == Some(200);
        Self {
            requests: 1,
            errors: (!is_completion).into(),
            prompt_tokens: prompt_tokens.unwrap_or(0),
            completion_tokens: completion_tokens.unwrap_or(0),
            total_tokens: total_tokens.unwrap_or(0),
            unmeasured: (is_completion && total_tokens.is_none()).into(),
        }
    }

    pub fn add(&mut self, other: &Self) {
        let sums = [
            &mut self.requests,
            &mut self.errors,
            &mut self.prompt_tokens,
            &mut self.completion_tokens,
            &mut self.total_tokens,
            &mut self.unmeasured,
        ];
        for (sum, (_, more)) in sums.into_iter().zip(other.figures()) {
            *sum = sum.saturating_add(more);
        }
    }

    /// Each figure with its name.
    pub(super) fn figures(&self) -> [(&'static str, i64); 6] {
        [
            ("requests", self.requests),
            ("errors", self.errors),
            ("prompt_tokens", self.prompt_tokens),
            ("completion_tokens", self.completion_tokens),
            ("total_tokens", self.total_tokens),
            ("unmeasured", self.unmeasured),
        ]
    }

    pub fn succeeded(&self) -> i64 {
        self.requests - self.errors
    }

    /// The total tokens; `None` if there were completions and none was measured.
    pub fn measured(&self) -> Option<i64> {
        (self.unmeasured == 0 || self.unmeasured < self.succeeded()).then_some(self.total_tokens)
    }
}

/// A length of time by which figures are added up. Only days have sums that stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Span {
    Minute,
    /// 3,600 seconds, counted from the start of the day.
    Hour,
    /// A calendar day of the database's time zone.
    Day,
}

/// Sums of one key and one outcome in one span, or in a part of it, of one gateway.
pub struct SpanSums {
    /// The beginning of the span.
    pub start: i64,
    /// The date of the day.
    pub day: String,
    pub key_id: String,
    pub status: Option<i64>,
    pub error_code: Option<String>,
    pub gateway: String,
    pub sums: Sums,
}

/// Where figures are.
pub(super) enum Source {
    /// In the sums of whole days, from one date to before another.
    Days([String; 2]),
    /// In the rows of a range.
    Rows(Range),
}

impl Source {
    /// Calls `take` with all figures in the order of time. In place of the start of a span they have
    /// that of the minute or, by hours, of the quarter of an hour: where an hour starts depends on the
    /// day.
    pub fn read(
        &self,
        session: &Session,
        span: Span,
        filter: &Filter,
        mut take: impl FnMut(SpanSums) -> Result<()>,
    ) -> Result<()> {
        let (statement, parameters) = self.select(span, filter);
        let mut read = |mut row: Row| {
            let (day, start, key_id) = (row.column()?, row.column()?, row.column()?);
            let status = Some(row.column()?).filter(|&status| status != 0);
            let error_code = Some(row.column()?).filter(|code: &String| !code.is_empty());
            let (gateway, requests) = (row.column()?, row.column()?);
            let sums = Sums {
                requests,
                errors: if status == Some(200) { 0 } else { requests },
                prompt_tokens: row.column()?,
                completion_tokens: row.column()?,
                total_tokens: row.column()?,
                unmeasured: row.column()?,
            };
            take(SpanSums {
                start,
                day,
                key_id,
                status,
                error_code,
                gateway,
                sums,
            })
        };
        session.query(&statement, &parameters, &mut read).map(drop)
    }

    pub fn select(&self, span: Span, filter: &Filter) -> (String, Vec<Value>) {
        let (select, mut parameters, order) = match self {
            Self::Days(dates) => (
                "SELECT day, CAST(0 AS BIGINT), key_id, status, error_code, gateway, requests, prompt_tokens,
                     completion_tokens, total_tokens, unmeasured
                 FROM usage_days WHERE day >= $1 AND day < $2"
                    .to_owned(),
                dates.each_ref().map(to_value).to_vec(),
                "ORDER BY 1",
            ),
            Self::Rows(range) => {
                // An offset from UTC is a multiple of a quarter of an hour.
                let time = match span {
                    Span::Minute => "created - created % 60",
                    Span::Hour => "created - created % 900",
                    Span::Day => "CAST(0 AS BIGINT)",
                };
                let select = format!(
                    "SELECT day, {time}, key_id, coalesce(status, 0), coalesce(error_code, ''), gateway, count(*),
                         CAST(coalesce(sum(prompt_tokens), 0) AS BIGINT),
                         CAST(coalesce(sum(completion_tokens), 0) AS BIGINT),
                         CAST(coalesce(sum(total_tokens), 0) AS BIGINT),
                         count(*) FILTER (WHERE status = 200 AND total_tokens IS NULL)
                     FROM usage WHERE request_id >= $1 AND request_id < $2"
                );
                let ids = [range.since, range.until].map(RequestId::from);
                (select, ids.map(|id| to_value(&id)).to_vec(), "GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2")
            }
        };
        let conditions = filter.conditions(&mut parameters);
        (format!("{select} {conditions} {order}"), parameters)
    }
}

/// Adds figures to those of a key, a day and an outcome. A runtime's figures are at most
/// 1,000,000,000, so sums do not overflow.
const UPSERT: &str = "INSERT INTO usage_days (key_id, day, status, error_code, gateway, requests, prompt_tokens,
         completion_tokens, total_tokens, unmeasured) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
     ON CONFLICT (key_id, day, status, error_code, gateway) DO UPDATE SET
         requests = usage_days.requests + excluded.requests,
         prompt_tokens = usage_days.prompt_tokens + excluded.prompt_tokens,
         completion_tokens = usage_days.completion_tokens + excluded.completion_tokens,
         total_tokens = usage_days.total_tokens + excluded.total_tokens,
         unmeasured = usage_days.unmeasured + excluded.unmeasured";

/// What the rows of one sum have in common: key, day, status, error code and gateway. A missing
/// status is 0, a missing code is empty.
type BatchKey<'a> = (&'a str, &'a str, i64, &'a str, &'a str);

/// Rows that are added to the sums together.
#[derive(Default)]
pub(super) struct Batch<'a>(BTreeMap<BatchKey<'a>, Sums>);

impl<'a> Batch<'a> {
    pub fn add(&mut self, row: &'a LedgerRow) {
        let key = (
            row.key_id.as_str(),
            row.day.as_str(),
            row.status.unwrap_or(0),
            row.error_code.as_deref().unwrap_or_default(),
            row.gateway.as_str(),
        );
        self.0.entry(key).or_default().add(&Sums::of(row));
    }

    /// One statement for each key, day and outcome of these rows.
    pub fn upserts(self) -> impl Iterator<Item = Statement> {
        self.0.into_iter().map(|(key, sums)| {
            let (key_id, day, status, error_code, gateway) = key;
            let parameters = values![
                key_id,
                day,
                status,
                error_code,
                gateway,
                sums.requests,
                sums.prompt_tokens,
                sums.completion_tokens,
                sums.total_tokens,
                sums.unmeasured
            ];
            Statement::new(UPSERT, parameters)
        })
    }
}
