//! The reasons why a page can't be displayed.

use std::time::Duration;

use crate::http::Response;
use crate::store::StoreError;

pub type PageResult = Result<Response, PageError>;

#[derive(Debug)]
pub enum PageError {
    NotFound,
    /// A filter by key that means none, or several.
    AmbiguousKey,
    /// A method that the address does not take.
    Method,
    TooLarge,
    /// A form of a session that has ended.
    Stale,
    /// A form that another site sent.
    Foreign,
    Store(StoreError),
    /// A range of time that can't be shown, and why.
    Range(String),
    Wait(Duration),
    /// There is no room for the request.
    Busy,
    Panic,
}

impl From<StoreError> for PageError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
