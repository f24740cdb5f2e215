//! The lock that keeps a second `serve` off a file, or off the name of a gateway.

use crate::database::postgres::session_lock::SessionLock;
use crate::database::sqlite::lock::FileLock;
use crate::database::{DatabaseLocation, LockError};

/// The address of the process that has a name, if it has written it.
pub(super) const HOLDER: &str = "SELECT address FROM gateways WHERE name = $1 AND address <> ''";

pub enum ServeLock {
    File(FileLock),
    Session(Box<SessionLock>),
}

impl ServeLock {
    pub fn take(database: &DatabaseLocation, gateway: &str) -> Result<Self, LockError> {
        match database {
            DatabaseLocation::Sqlite(path) => FileLock::take(path).map(Self::File),
            DatabaseLocation::Postgres(uri) => SessionLock::take(uri, gateway, HOLDER)
                .map(Box::new)
                .map(Self::Session),
        }
    }
}
