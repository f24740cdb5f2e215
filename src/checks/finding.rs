//! The result of a check.

use serde::Serialize;

/// The most keys or models that a finding names.
const MAX_NAMED: usize = 5;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Ok,
    /// It works, but the operator should know about something.
    Warn,
    Fail,
}

#[derive(Serialize)]
pub struct Finding {
    pub part: &'static str,
    pub status: Verdict,
    pub message: String,
    /// The address of the runtime, if the finding is about one.
    #[serde(skip)]
    pub runtime: Option<String>,
}

impl Finding {
    fn new(part: &'static str, status: Verdict, message: impl Into<String>) -> Self {
        Self {
            part,
            status,
            message: message.into(),
            runtime: None,
        }
    }

    pub fn ok(part: &'static str, message: impl Into<String>) -> Self {
        Self::new(part, Verdict::Ok, message)
    }

    pub fn warn(part: &'static str, message: impl Into<String>) -> Self {
        Self::new(part, Verdict::Warn, message)
    }

    pub fn fail(part: &'static str, message: impl Into<String>) -> Self {
        Self::new(part, Verdict::Fail, message)
    }
}

/// Joins the first names of a list.
pub fn named<T>(all: &[T], name: impl Fn(&T) -> String) -> String {
    let mut names: Vec<String> = all.iter().take(MAX_NAMED).map(name).collect();
    if all.len() > MAX_NAMED {
        names.push(format!("{} more", all.len() - MAX_NAMED));
    }
    names.join(", ")
}
