//! What an open may do.

/// The changes that an open may make to the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Create it, or upgrade it: only for a process that holds the lock of `serve`.
    Serve,
    /// Create it.
    Create,
    /// Upgrade it: only for a copy that no other process uses.
    Upgrade,
    /// Neither.
    Existing,
    /// Nothing at all: also for a file that can't be written.
    Read,
}

impl Access {
    pub fn may_create(self) -> bool {
        matches!(self, Self::Serve | Self::Create)
    }
}
