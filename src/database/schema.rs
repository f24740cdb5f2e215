//! The tables of a program, as it hands them to an open.

use super::access::Access;
use super::error::{DatabaseError, Result};
use super::session::Session;

pub struct Schema {
    /// The script that creates the tables and their first rows.
    pub tables: &'static str,
    pub version: i64,
    /// The oldest version that a program has to know to use the tables.
    pub oldest_known: i64,
    /// The versions in their order, and the step that leads to each from the one before.
    pub upgrades: &'static [(i64, UpgradeStep)],
    /// A query for the number of rows that an upgrade reads, for the display of its progress.
    pub rows: &'static str,
    /// The tables in the order in which a running program locks them, comma separated.
    pub lock_order: &'static str,
}

pub type UpgradeStep = fn(&Session) -> Result<()>;

impl Schema {
    /// Returns whether a database of this version can be used as it is: by programs that know
    /// `oldest_known`. Fails if it can't and may not be upgraded. A running service of that version
    /// would fail from then on.
    pub fn is_current(&self, access: Access, found: i64, oldest_known: i64) -> Result<bool> {
        let known = self.version;
        match access {
            _ if oldest_known > known => Err(DatabaseError::Newer { found, known }),
            _ if found >= known => Ok(true),
            _ if found < self.upgrades[0].0 - 1 => Err(DatabaseError::Unreleased(found)),
            Access::Serve | Access::Upgrade => Ok(false),
            Access::Create | Access::Existing | Access::Read => {
                Err(DatabaseError::Older { found, known })
            }
        }
    }

    /// Runs every step that a database of this version lacks.
    pub fn upgrade(&self, session: &Session, found: i64) -> Result<()> {
        for (version, step) in self.upgrades.iter().filter(|(version, _)| *version > found) {
            log::info!("upgrading the database to version {version}");
            step(session)?;
        }
        Ok(())
    }
}
