//! Problems that both engines have.

pub use crate::error::{Problem, ProblemKind};

/// As `io::Result` is for `io::Error`.
pub type Result<T, E = Problem> = std::result::Result<T, E>;

impl Problem {
    pub fn damaged(cause: impl Into<String>) -> Self {
        Self::new(
            ProblemKind::Damaged,
            format!(
                "the file is damaged or not a database ({}): stop the service and restore a backup (adriaticum restore FILE), \
                 or save what can be read of it: sqlite3 DAMAGED .recover | sqlite3 NEW",
                cause.into()
            ),
        )
    }

    /// What was written may be lost, so nothing more is written.
    pub(super) fn replaced() -> Self {
        Self::new(
            ProblemKind::Replaced,
            "the database's file, its -wal or its -shm was removed, replaced or changed by another program under the \
             running service, so nothing more is written: put it back or restore a backup, then restart",
        )
    }

    pub(super) fn read_only() -> Self {
        Self::other(
            "the database can't be written: check who owns the file and its folder, and whether the file system is read-only",
        )
    }

    /// A read that was ended at its deadline.
    pub(super) fn late() -> Self {
        Self::new(
            ProblemKind::Busy,
            "the database took too long to answer: try again, or ask for less",
        )
    }

    pub(super) fn no_connection() -> Self {
        Self::new(
            ProblemKind::Busy,
            "all of this process's connections to the database are in use: try again when its long reads are done",
        )
    }

    pub(super) fn missing() -> Self {
        Self::new(
            ProblemKind::Missing,
            "it does not exist: create it with adriaticum serve, keys create, console password, restore or move",
        )
    }

    pub(super) fn unknown(cause: impl std::fmt::Display) -> Self {
        Self::new(
            ProblemKind::Unknown,
            format!("the database did not confirm the write: {cause}"),
        )
    }

    pub(super) fn unavailable(cause: impl std::fmt::Display) -> Self {
        Self::new(
            ProblemKind::Unavailable,
            format!("the database can't be used: {cause}"),
        )
    }
}
