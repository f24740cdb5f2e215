//! The error of everything but a request: a sentence for people, worded where it is found.

use std::fmt;
use std::io;

use super::FailureCause;

/// What went wrong, and what to do about it. The text begins with a small letter and has no full
/// stop at its end, so that it can follow the name of a file or a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub kind: ProblemKind,
    pub text: String,
}

/// The kinds that code branches on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProblemKind {
    /// Others have used the database for too long; a later try may succeed.
    Busy,
    /// The disk is full.
    Full,
    /// The command line is wrong.
    Usage,
    /// A setting can't be used; a supervisor need not try again.
    Setting,
    /// There is no database, and none is to be created.
    Missing,
    /// The database is damaged, or not one of ours.
    Damaged,
    /// The database has a schema that this program does not know.
    Version,
    /// Everything was moved to another database.
    Moved,
    /// What was written last may be lost, so nothing more is written until a restart.
    Replaced,
    /// Another process serves in the place of this one, which has to stop.
    Fenced,
    /// Retention has removed rows that a report needs.
    RowsRemoved,
    /// The key was revoked before the request arrived.
    KeyRevoked,
    /// The secret was replaced before the request arrived.
    KeyReplaced,
    /// No host of the database can be used.
    Unavailable,
    /// No answer came to what was sent: it may have been done or not.
    Unknown,
    Panicked,
    Other,
}

impl Problem {
    pub fn new(kind: ProblemKind, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
        }
    }

    pub fn other(text: impl Into<String>) -> Self {
        Self::new(ProblemKind::Other, text)
    }

    pub fn usage(text: impl Into<String>) -> Self {
        Self::new(ProblemKind::Usage, text)
    }

    /// The same problem, with a text in front that says what it is about.
    pub fn of(self, part: impl fmt::Display) -> Self {
        Self {
            text: format!("{part}: {}", self.text),
            ..self
        }
    }

    /// The log line about a request that failed at a step; `None` if the log has a line about the
    /// database already.
    pub fn details(&self, step: &str) -> Option<String> {
        (self.kind != ProblemKind::Unavailable).then(|| format!("{step}: {self}"))
    }

    /// The word for a request that failed because of it.
    pub fn cause(&self) -> FailureCause {
        match self.kind {
            ProblemKind::Busy => FailureCause::DatabaseBusy,
            ProblemKind::Full => FailureCause::DiskFull,
            ProblemKind::Unavailable | ProblemKind::Unknown => FailureCause::DatabaseLost,
            ProblemKind::Panicked => FailureCause::Panic,
            _ => FailureCause::Database,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Problem {}

impl From<io::Error> for Problem {
    fn from(error: io::Error) -> Self {
        Self::other(error.to_string())
    }
}
