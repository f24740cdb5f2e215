//! Figures that are added up.

use serde::Serialize;

use super::rollup::Span;
use crate::database::{Result, Row};

/// Selects the requests that are counted; `None` for all.
#[derive(Clone, Copy, Debug)]
pub struct Filter<'a> {
    pub key_id: Option<&'a str>,
    pub gateway: Option<&'a str>,
}

impl Filter<'_> {
    pub const ALL: Self = Self {
        key_id: None,
        gateway: None,
    };
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
    fn all(&mut self) -> [&mut i64; 6] {
        let Self {
            requests,
            errors,
            prompt_tokens,
            completion_tokens,
            total_tokens,
            unmeasured,
        } = self;
        [
            requests,
            errors,
            prompt_tokens,
            completion_tokens,
            total_tokens,
            unmeasured,
        ]
    }

    pub fn add(&mut self, other: &Self) {
        for (sum, more) in self.all().into_iter().zip(other.clone().all()) {
            *sum = sum.saturating_add(*more);
        }
    }

    pub fn succeeded(&self) -> i64 {
        self.requests - self.errors
    }

    /// The total tokens; `None` if there were completions and none was measured.
    pub fn measured(&self) -> Option<i64> {
        (self.unmeasured == 0 || self.unmeasured < self.succeeded()).then_some(self.total_tokens)
    }
}

/// Sums of one key and one outcome in one span, or in a part of it, of one gateway.
pub struct RollupRow {
    /// The beginning of the span.
    pub start: i64,
    pub key_id: String,
    pub status: Option<i64>,
    pub error_code: Option<String>,
    pub gateway: String,
    pub sums: Sums,
}

impl RollupRow {
    /// Reads the columns of the rollup, of which it leaves out the span and the key's name.
    pub(super) fn read(mut row: Row, span: Span) -> Result<Self> {
        row.column::<i64>()?;
        // The rollup may have been read by shorter spans.
        let (start, key_id) = (span.start(row.column()?), row.column()?);
        row.column::<String>()?;
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
        Ok(Self {
            start,
            key_id,
            status,
            error_code,
            gateway,
            sums,
        })
    }
}
