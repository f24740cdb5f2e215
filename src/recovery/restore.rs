//! Restores a backup of a SQLite database, and finds what that undoes.
//!
//! A backup knows nothing of what came after it: keys that were revoked since would work again. So
//! revocations and the console's password are taken from the present database, and every other
//! difference is listed.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::audit::{Actor, NewAuditRow};
use crate::console::session::credentials::{self, PasswordHash, TokenKind, read_password};
use crate::database::sqlite::lock::FileLock;
use crate::database::sqlite::replacement::{PresentDatabase, Replacement, ReplacementError};
use crate::database::{
    Access, DatabaseError, DatabaseLocation, LockError, Result, Session, Statement, values,
};
use crate::keys::{Key, read_key};
use crate::ledger::{Fault, SCHEMA};
use crate::progress::Progress;
use crate::store::Store;
use crate::text::count;
use crate::when;

/// The result of a restore.
pub struct Restoration {
    /// The version that the backup had, if it was upgraded.
    pub upgraded_from: Option<i64>,
    pub restored: LedgerExtent,
    pub present: Comparison,
    /// The present password is kept: it differed from that of the backup.
    pub keeps_password: bool,
    /// The path of the database that was replaced; `None` if there was none.
    pub kept: Option<PathBuf>,
    /// The reason why a power failure may undo the restore.
    pub unsynced: Option<io::Error>,
}

/// The number of rows of a ledger, and the time when the newest was created.
pub struct LedgerExtent {
    pub rows: i64,
    pub newest: Option<i64>,
}

/// Compares the present database with the backup. An error says why a part is not known.
pub struct Comparison {
    pub keys: Result<KeyDifferences>,
    pub ledger: Result<LedgerExtent>,
    pub password: Result<Option<PasswordHash>>,
    /// The damage that a check of the file found, also if all of this could be read.
    pub damage: Option<DatabaseError>,
}

#[derive(Debug, Default)]
pub struct KeyDifferences {
    /// Only the present database has them: they stop working.
    pub created: Vec<Key>,
    /// They were revoked since the backup, and stay revoked.
    pub revoked: Vec<Key>,
    /// They were changed since: first as they are, then as they become.
    pub changed: Vec<(Key, Key)>,
    /// Only the backup has them: they work again unless they are revoked.
    pub only_in_backup: Vec<Key>,
}

/// The reason why nothing was restored. The present database is as it was.
#[derive(Debug)]
pub enum RestoreError {
    /// The service runs.
    Locked(LockError),
    /// The backup can't be used.
    Backup(DatabaseError),
    /// This WAL or journal lies beside the backup, which may lack what is in there.
    Incomplete(PathBuf),
    /// Its ledger does not verify.
    Faulty(Fault),
    /// The present database can't be replaced.
    Present(DatabaseError),
}

impl From<ReplacementError> for RestoreError {
    fn from(error: ReplacementError) -> Self {
        match error {
            ReplacementError::Backup(error) => Self::Backup(error),
            ReplacementError::Incomplete(log) => Self::Incomplete(log),
            ReplacementError::Present(error) => Self::Present(error),
        }
    }
}

impl fmt::Display for RestoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Locked(error) => error.fmt(f),
            Self::Backup(DatabaseError::Damaged(cause)) => {
                write!(
                    f,
                    "it is damaged or not a database ({cause}). Use another backup"
                )
            }
            Self::Backup(DatabaseError::Missing) => {
                f.write_str("it is an empty database. Use another backup")
            }
            Self::Backup(error) | Self::Present(error) => error.fmt(f),
            Self::Incomplete(log) => write!(
                f,
                "{} lies beside it, so the file may not be complete, and restore reads no other file. Make a backup with \
                 adriaticum backup FILE; or if you know that the file is complete, remove the other one",
                log.display()
            ),
            Self::Faulty(fault) => {
                write!(f, "its ledger does not verify: {fault}. Use another backup")
            }
        }
    }
}

/// Replaces a SQLite database with a backup. The caller sees to it that it is SQLite.
pub fn restore(
    database: &Path,
    backup: &Path,
    by: &Actor,
    progress: &Progress,
) -> Result<Restoration, RestoreError> {
    let _lock = FileLock::take(database).map_err(RestoreError::Locked)?;
    let replacement = Replacement::prepare(database, backup, progress)?;
    let copy = DatabaseLocation::Sqlite(replacement.copy.clone());
    let store = Store::open_with(&copy, Access::Upgrade, progress).map_err(RestoreError::Backup)?;
    if let Some(fault) = store
        .ledger
        .verify_with(progress)
        .map_err(RestoreError::Backup)?
        .fault
    {
        return Err(RestoreError::Faulty(fault));
    }
    let read = |session: &Session| Ok((read_extent(session)?, read_keys(session)?));
    let (restored, keys) = store.database.read(read).map_err(RestoreError::Backup)?;
    // From here on it can't be changed by others.
    let present = match PresentDatabase::lock(&replacement.database, progress) {
        Err(
            error @ (DatabaseError::Busy
            | DatabaseError::ReadOnly
            | DatabaseError::CannotOpen
            | DatabaseError::Io(_)),
        ) => {
            return Err(RestoreError::Present(error));
        }
        present => present,
    };
    // Each part by itself: a damaged page spoils only one of them.
    let comparison = Comparison {
        keys: read_part(&present, read_keys).map(|present| compare(present, &keys)),
        ledger: read_part(&present, read_extent),
        password: read_part(&present, read_password),
        damage: present
            .as_ref()
            .ok()
            .and_then(|present| present.damage.clone()),
    };
    let keeps_password =
        take_over(&store, &comparison, &restored, by).map_err(RestoreError::Present)?;
    drop(store);
    let upgraded_from = Some(replacement.version).filter(|version| *version != SCHEMA.version);
    let (kept, unsynced) = replacement.put_in_place().map_err(RestoreError::Present)?;
    drop(present);
    Ok(Restoration {
        upgraded_from,
        restored,
        present: comparison,
        keeps_password,
        kept,
        unsynced,
    })
}

fn read_part<T>(
    present: &Result<PresentDatabase>,
    read: impl FnOnce(&Session) -> Result<T>,
) -> Result<T> {
    present
        .as_ref()
        .map_err(DatabaseError::clone)
        .and_then(|present| read(&present.session()))
}

/// Gives a restored database the revocations and the password of the present one, and ends its
/// sessions. Returns whether the password is another one than before.
fn take_over(
    store: &Store,
    present: &Comparison,
    ledger: &LedgerExtent,
    by: &Actor,
) -> Result<bool> {
    let revoked = present.keys.as_ref().map_or(&[][..], |keys| &keys.revoked);
    for key in revoked {
        store
            .keys
            .revoke(&key.id, key.revoked.unwrap_or_else(when::now), by)?;
    }
    let own = credentials::password(store)?;
    let password = present
        .password
        .as_ref()
        .ok()
        .cloned()
        .flatten()
        .filter(|kept| own.as_ref() != Some(kept));
    let keeps_password = password.is_some();
    if let Some(password) = password {
        credentials::set_password(store, password, by)?;
    }
    let details = format!(
        "a backup with {}, the newest of {}; kept revoked: {}",
        count(ledger.rows, "row"),
        when::format_minute(ledger.newest),
        count(revoked.len() as i64, "key")
    );
    let sessions = values![TokenKind::Session.as_str()];
    let statements = [
        Statement::new("DELETE FROM console_tokens WHERE kind = $1", sessions),
        NewAuditRow::new("database_restored", by, &details).insert(),
    ];
    store.database.write(&statements)?;
    Ok(keeps_password)
}

/// All keys, the oldest first and without their last uses, of a database of any version that can be
/// upgraded.
fn read_keys(session: &Session) -> Result<Vec<Key>> {
    let keys = "SELECT id, name, hint, permissions, created, expires, NULL, revoked, concurrent, budget, budget_per, NULL
        FROM keys ORDER BY created, id";
    session.rows(keys, &[], read_key)
}

fn read_extent(session: &Session) -> Result<LedgerExtent> {
    let newest = "SELECT created FROM usage ORDER BY request_id DESC LIMIT 1";
    Ok(LedgerExtent {
        rows: session.value("SELECT count(*) FROM usage", &[])?,
        newest: session.first(newest, &[], |mut row| row.column())?,
    })
}

fn compare(present: Vec<Key>, restored: &[Key]) -> KeyDifferences {
    let mut restored_by_id: BTreeMap<&str, &Key> =
        restored.iter().map(|key| (key.id.as_str(), key)).collect();
    let mut found = KeyDifferences::default();
    for key in present {
        match restored_by_id.remove(key.id.as_str()) {
            None => found.created.push(key),
            Some(before) if key.revoked.is_some() && before.revoked.is_none() => {
                found.revoked.push(key)
            }
            Some(before) if key.revoked.is_none() && key.version() != before.version() => {
                found.changed.push((key, before.clone()));
            }
            Some(_) => {}
        }
    }
    found.only_in_backup = restored
        .iter()
        .filter(|key| restored_by_id.contains_key(key.id.as_str()))
        .cloned()
        .collect();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::database::sqlite::backup::backup;
    use crate::ledger::append::tests::write;
    use crate::mutex::lock;
    use crate::store::tests::Temporary;

    #[test]
    fn the_progress_of_a_backup_and_of_a_restore() {
        let temporary = Temporary::sqlite();
        write(&temporary.store, "x", "key_1", 0, 200, Some(1));
        temporary.store.tamper(
            "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 20000)
             INSERT INTO keys (id, digest, name, permissions, created)
             SELECT 'more_' || n, randomblob(32), hex(randomblob(400)), 'completions', 0 FROM numbers",
        );
        let [present, copy] = ["present.db", "copy.db"].map(|name| temporary.folder.join(name));
        let (progress, lines) = Progress::recorded();
        let database = temporary.folder.join("test.db");
        backup(&database, &copy, crate::ledger::ROWS, &progress).expect("a backup");
        let mut states: Vec<String> = std::mem::take(&mut lock(&lines));
        states
            .iter_mut()
            .for_each(|line| line.truncate(line.find('%').unwrap_or(0)));
        states.dedup();
        assert!(
            states.len() > 3 && states.iter().all(|line| line.starts_with("copying: ")),
            "{states:?}"
        );
        std::fs::copy(&copy, &present).expect("a present database");
        restore(&present, &copy, &Actor::command("test".into()), &progress).expect("a restore");
        let mut works: Vec<String> = lock(&lines)
            .iter()
            .map(|line| line.split(':').next().unwrap_or_default().to_owned())
            .collect();
        works.dedup();
        let expected = [
            "copying",
            "checking the copy",
            "verifying the rows",
            "verifying the sums",
        ];
        assert_eq!(
            works,
            [&expected[..], &["checking the present database"]].concat()
        );
    }
}
