//! Restores a backup of a SQLite database, and finds what that undoes.
//!
//! A backup knows nothing of what came after it: keys that were revoked since would work again. So revocations and the
//! console's password are taken from the present database, and every other difference is listed.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use super::audit::{Action, NewAuditRow};
use super::engine::sqlite::{FileLock, LockError, PrepareError, PresentDatabase, Replacement};
use super::engine::{Access, Database, Row, SCHEMA_VERSION, SqlSession, Statement, Write, values};
use super::sessions::{PasswordHash, TokenKind, read_password};
use super::{Actor, Fault, Store, StoreError};
use crate::text::count;
use crate::when;

/// What a restore has done.
pub struct Restoration {
    /// The version that the backup had, if it was upgraded.
    pub upgraded_from: Option<i64>,
    pub restored: LedgerExtent,
    pub present: Comparison,
    /// Whether the present password is kept: it differed from that of the backup.
    pub keeps_password: bool,
    /// Where the database is that was replaced; `None` if there was none.
    pub kept: Option<PathBuf>,
}

/// How many rows a ledger has, and when the newest was created.
pub struct LedgerExtent {
    pub rows: i64,
    pub newest: Option<i64>,
}

/// What the present database has that the backup does not. An error says why that is not known.
pub struct Comparison {
    pub keys: Result<KeyDifferences, StoreError>,
    pub ledger: Result<LedgerExtent, StoreError>,
    pub password: Result<Option<PasswordHash>, StoreError>,
    /// What is wrong with the file, also if all of this could be read.
    pub damage: Option<StoreError>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct KeyDifferences {
    /// Only the present database has them: they stop working.
    pub created: Vec<ComparedKey>,
    /// They were revoked since the backup, and stay revoked.
    pub revoked: Vec<ComparedKey>,
    /// They were changed since: first as they are, then as they become.
    pub changed: Vec<(ComparedKey, ComparedKey)>,
    /// Only the backup has them: they work again unless they are revoked.
    pub unknown: Vec<ComparedKey>,
}

/// What a restore may change about a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComparedKey {
    pub id: String,
    pub name: String,
    permissions: String,
    expires: Option<i64>,
    concurrent: Option<i64>,
    /// Tokens, and the period in which they may be used.
    budget: Option<(i64, String)>,
    pub revoked: Option<i64>,
}

impl ComparedKey {
    fn read(mut row: Row) -> Result<Self, StoreError> {
        let (id, name, permissions) = (row.next()?, row.next()?, row.next()?);
        let (expires, revoked, concurrent) = (row.next()?, row.next()?, row.next()?);
        let budget: (Option<i64>, Option<String>) = (row.next()?, row.next()?);
        Ok(Self { id, name, permissions, expires, concurrent, budget: budget.0.zip(budget.1), revoked })
    }

    /// The properties that another state of the key has otherwise, in words.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let properties = |key: &Self| {
            let number = |number: Option<i64>| number.map_or("none".into(), |number| number.to_string());
            let time =
                |time: Option<i64>| time.map_or("never".into(), |time| when::format_minute(Some(time)));
            let budget = key.budget.as_ref().map(|(tokens, per)| format!("{tokens}/{per}"));
            [
                ("name", format!("{:?}", key.name)),
                ("permissions", key.permissions.clone()),
                ("expires", time(key.expires)),
                ("concurrent", number(key.concurrent)),
                ("budget", budget.unwrap_or_else(|| "none".into())),
                ("revoked", time(key.revoked)),
            ]
        };
        let pairs = properties(self).into_iter().zip(properties(other));
        let differing = pairs.filter(|(one, other)| one != other);
        differing.map(|((property, one), (_, other))| format!("{property}: {one} → {other}")).collect()
    }

    /// Whether it allows something that another state of the key does not.
    pub fn is_wider_than(&self, other: &Self) -> bool {
        let permissions = |key: &Self| key.permissions.split(',').map(str::to_owned).collect::<Vec<_>>();
        let exceeds = |one: Option<i64>, other: Option<i64>| {
            other.is_some_and(|other| one.is_none_or(|one| one > other))
        };
        let has_more_tokens = match (&self.budget, &other.budget) {
            (Some((tokens, per)), Some((other, of))) => per != of || tokens > other,
            (own, other) => own.is_none() && other.is_some(),
        };
        permissions(self).iter().any(|permission| !permissions(other).contains(permission))
            || exceeds(self.expires, other.expires)
            || exceeds(self.concurrent, other.concurrent)
            || has_more_tokens
    }
}

/// Why nothing was restored. The present database is as it was.
#[derive(Debug)]
pub enum RestoreError {
    /// The service runs.
    Held(LockError),
    /// The backup can't be used.
    Backup(StoreError),
    /// Its ledger does not verify.
    Faulty(Fault),
    /// The present database can't be replaced.
    Present(StoreError),
}

impl fmt::Display for RestoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Held(error) => error.fmt(f),
            Self::Backup(StoreError::Damaged(cause)) => {
                write!(f, "it is damaged or not a database ({cause}). Use another backup")
            }
            Self::Backup(StoreError::Missing) => f.write_str("it is an empty database. Use another backup"),
            Self::Backup(error) | Self::Present(error) => error.fmt(f),
            Self::Faulty(fault) => write!(f, "its ledger does not verify: {fault}. Use another backup"),
        }
    }
}

/// Replaces a SQLite database with a backup. The caller sees to it that it is SQLite.
pub fn restore(database: &Path, backup: &Path, by: &Actor) -> Result<Restoration, RestoreError> {
    let _lock = FileLock::take(database).map_err(RestoreError::Held)?;
    let replacement = Replacement::prepare(database, backup).map_err(|error| match error {
        PrepareError::Backup(error) => RestoreError::Backup(error),
        PrepareError::Target(error) => RestoreError::Present(error),
    })?;
    let copy = Database::Sqlite(replacement.copy.clone());
    let store = Store::open(&copy, Access::Upgrade).map_err(RestoreError::Backup)?;
    if let Some(fault) = store.verify().map_err(RestoreError::Backup)?.fault {
        return Err(RestoreError::Faulty(fault));
    }
    let restored = Content::of(|work| store.engine.read(work));
    let restored_ledger = restored.ledger.map_err(RestoreError::Backup)?;
    let restored_keys = restored.keys.map_err(RestoreError::Backup)?;
    // From here on it can't be changed by others.
    let present = match PresentDatabase::lock(&replacement.database) {
        Err(
            error @ (StoreError::Busy | StoreError::ReadOnly | StoreError::CannotOpen | StoreError::Io(_)),
        ) => {
            return Err(RestoreError::Present(error));
        }
        present => present,
    };
    let content = match &present {
        Ok(present) => Content { damage: present.damage.clone(), ..Content::of(|work| present.read(work)) },
        Err(error) => Content::unknown(error),
    };
    let comparison = Comparison {
        keys: content.keys.map(|keys| compare(keys, &restored_keys)),
        ledger: content.ledger,
        password: content.password,
        damage: content.damage,
    };
    let keeps_password = store.take_over(&comparison, &restored_ledger, by).map_err(RestoreError::Present)?;
    drop(store);
    let upgraded_from = Some(replacement.version).filter(|version| *version != SCHEMA_VERSION);
    let kept = replacement.put_in_place().map_err(RestoreError::Present)?;
    drop(present);
    Ok(Restoration { upgraded_from, restored: restored_ledger, present: comparison, keeps_password, kept })
}

impl Store {
    /// Gives a restored database the revocations and the password of the present one, and ends its sessions. Returns whether
    /// the password is another one than before.
    fn take_over(&self, present: &Comparison, ledger: &LedgerExtent, by: &Actor) -> Result<bool, StoreError> {
        let revoked = present.keys.as_ref().map_or(&[][..], |keys| &keys.revoked);
        for key in revoked {
            self.revoke_key(&key.id, key.revoked.unwrap_or_else(when::now), by)?;
        }
        let own = self.console_password()?;
        let password =
            present.password.as_ref().ok().cloned().flatten().filter(|kept| own.as_ref() != Some(kept));
        let keeps_password = password.is_some();
        if let Some(password) = password {
            self.set_console_password(password, by)?;
        }
        let details = format!(
            "a backup with {}, the newest of {}; kept revoked: {}",
            count(ledger.rows, "row"),
            when::format_minute(ledger.newest),
            count(revoked.len() as i64, "key")
        );
        let sessions = values![TokenKind::Session.as_str()];
        let statements = vec![
            Statement::new("DELETE FROM console_tokens WHERE kind = $1", sessions),
            NewAuditRow::new(Action::DatabaseRestored, by, &details).insert(),
        ];
        self.engine.write(Write { statements, durable: true })?;
        Ok(keeps_password)
    }
}

/// What is compared of a database.
struct Content {
    keys: Result<Vec<ComparedKey>, StoreError>,
    ledger: Result<LedgerExtent, StoreError>,
    password: Result<Option<PasswordHash>, StoreError>,
    damage: Option<StoreError>,
}

/// Work that reads from a database.
type Reading<'a> = &'a mut dyn FnMut(&dyn SqlSession) -> Result<(), StoreError>;

impl Content {
    /// Each part by itself: a damaged page spoils only one of them.
    fn of(read: impl Fn(Reading) -> Result<(), StoreError>) -> Self {
        fn part<T>(
            read: &impl Fn(Reading) -> Result<(), StoreError>,
            work: fn(&dyn SqlSession) -> Result<T, StoreError>,
        ) -> Result<T, StoreError> {
            let mut found = None;
            read(&mut |session| work(session).map(|value| found = Some(value)))?;
            found.ok_or(StoreError::NoRow)
        }
        Self {
            keys: part(&read, read_keys),
            ledger: part(&read, read_extent),
            password: part(&read, read_password),
            damage: None,
        }
    }

    fn unknown(error: &StoreError) -> Self {
        Self {
            keys: Err(error.clone()),
            ledger: Err(error.clone()),
            password: Err(error.clone()),
            damage: None,
        }
    }
}

/// All keys, the oldest first, of a database of version 8 or later.
fn read_keys(session: &dyn SqlSession) -> Result<Vec<ComparedKey>, StoreError> {
    let has_budgets = "SELECT count(*) FROM pragma_table_info('keys') WHERE name = 'budget'";
    let budget =
        if session.value::<i64>(has_budgets, &[])? > 0 { "budget, budget_per" } else { "NULL, NULL" };
    let keys = format!(
        "SELECT id, name, permissions, expires, revoked, concurrent, {budget} FROM keys ORDER BY created, id"
    );
    session.rows(&keys, &[], ComparedKey::read)
}

fn read_extent(session: &dyn SqlSession) -> Result<LedgerExtent, StoreError> {
    let newest = "SELECT created FROM usage ORDER BY request_id DESC LIMIT 1";
    Ok(LedgerExtent {
        rows: session.value("SELECT count(*) FROM usage", &[])?,
        newest: session.first(newest, &[], |mut row| row.next())?,
    })
}

fn compare(present: Vec<ComparedKey>, restored: &[ComparedKey]) -> KeyDifferences {
    let mut restored_by_id: BTreeMap<&str, &ComparedKey> =
        restored.iter().map(|key| (key.id.as_str(), key)).collect();
    let mut found = KeyDifferences::default();
    for key in present {
        match restored_by_id.remove(key.id.as_str()) {
            None => found.created.push(key),
            Some(before) if key.revoked.is_some() && before.revoked.is_none() => found.revoked.push(key),
            Some(before) if key.revoked.is_none() && key != *before => {
                found.changed.push((key, before.clone()));
            }
            Some(_) => {}
        }
    }
    found.unknown =
        restored.iter().filter(|key| restored_by_id.contains_key(key.id.as_str())).cloned().collect();
    found
}
