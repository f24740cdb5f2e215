//! The audit log of changes. A row is inserted in the transaction of the change that it describes.
//! No statement changes or removes a row.

use std::collections::BTreeMap;
use std::mem;
use std::net::IpAddr;
use std::slice;
use std::sync::{Arc, Mutex};

use serde::Serialize;

use crate::database::{Database, Result, Row, SqlValue, Statement, TransactionMode, values};
use crate::id::audit_id;
use crate::mutex::lock;
use crate::network::ClientNetwork;
use crate::when;

/// The time during which failed sign-ins are summed, in seconds. A window has at most `ADDRESSES` +
/// 1 rows, so a stranger can't fill the table.
const WINDOW: i64 = 15 * 60;

/// The maximum number of addresses with a row of their own in a window. The others share one.
const ADDRESSES: usize = 8;
const OTHERS: &str = "other addresses";

/// In the order in which `NewAuditRow` has them.
const COLUMNS: &str = "id, created, action, via, actor, details, times, key_id, key_name";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Actor {
    via: &'static str,
    name: String,
}

impl Actor {
    /// A browser, by its address.
    pub fn console(address: String) -> Self {
        Self {
            via: "console",
            name: address,
        }
    }

    /// A user of the system that the command runs on.
    pub fn command(user: String) -> Self {
        Self {
            via: "command",
            name: user,
        }
    }

    /// The sender of a signal, who is not known.
    pub fn signal(signal: &str) -> Self {
        Self {
            via: "signal",
            name: signal.to_owned(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuditSubject {
    Keys,
    SignIns,
    Settings,
}

impl AuditSubject {
    pub const ALL: [Self; 3] = [Self::Keys, Self::SignIns, Self::Settings];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Keys => "keys",
            Self::SignIns => "sign-ins",
            Self::Settings => "settings",
        }
    }

    fn condition(self) -> &'static str {
        match self {
            Self::Keys => "AND key_id IS NOT NULL",
            Self::SignIns => "AND action IN ('signed_in', 'sign_ins_failed')",
            Self::Settings => {
                "AND key_id IS NULL AND action NOT IN ('signed_in', 'sign_ins_failed')"
            }
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AuditRow {
    pub id: String,
    pub created: i64,
    pub action: String,
    /// console, command or signal.
    pub via: String,
    /// The address, the system user or the signal's name.
    pub actor: String,
    pub key_id: Option<String>,
    /// The key's name at the time.
    pub key_name: Option<String>,
    pub details: String,
    /// More than 1 only for failed sign-ins.
    pub times: i64,
}

impl AuditRow {
    pub fn description(&self) -> String {
        match (self.action.as_str(), self.times) {
            ("sign_ins_failed", 1) => "1 failed sign-in".into(),
            ("sign_ins_failed", times) => format!("{times} failed sign-ins"),
            (action, _) => action.replace('_', " "),
        }
    }

    fn read(mut row: Row) -> Result<Self> {
        Ok(Self {
            id: row.column()?,
            created: row.column()?,
            action: row.column()?,
            via: row.column()?,
            actor: row.column()?,
            details: row.column()?,
            times: row.column()?,
            key_id: row.column()?,
            key_name: row.column()?,
        })
    }
}

/// A row before it is inserted: the columns from `id` to `times`.
pub(super) struct NewAuditRow(Vec<SqlValue>);

impl NewAuditRow {
    /// The action is one of the words that schema.sql lists.
    pub fn new(action: &'static str, by: &Actor, details: &str) -> Self {
        Self::summed(action, by, details, 1)
    }

    fn summed(action: &'static str, by: &Actor, details: &str, times: i64) -> Self {
        Self(
            values![
                audit_id(),
                when::now(),
                action,
                by.via,
                &by.name,
                details,
                times
            ]
            .into(),
        )
    }

    /// Inserts a row that is not about a key.
    pub fn insert(self) -> Statement {
        self.insert_with("NULL, NULL WHERE true", [])
    }

    /// Inserts the row with the `key_id` and the `key_name` that `key` selects, or not at all if it
    /// selects none. The parameters of `key` begin with $8. The statement can be repeated, and is
    /// settled by the row's id.
    pub fn insert_with<const N: usize>(self, key: &str, more: [SqlValue; N]) -> Statement {
        let id = self.0[0].clone();
        let mut parameters = self.0;
        parameters.extend(more);
        let insert = format!(
            "INSERT INTO audit ({COLUMNS}) SELECT $1, $2, $3, $4, $5, $6, $7, {key} ON CONFLICT (id) DO NOTHING"
        );
        Statement::new(insert, parameters).settled_by("SELECT 1 FROM audit WHERE id = $1", [id])
    }
}

/// Failed sign-ins by address, until they are written.
#[derive(Default)]
struct FailedSignIns {
    since: i64,
    times: BTreeMap<String, i64>,
}

impl FailedSignIns {
    fn add(&mut self, address: String, times: i64, now: i64) {
        if self.times.is_empty() {
            self.since = now;
        }
        let is_other = self.times.len() >= ADDRESSES && !self.times.contains_key(&address);
        *self
            .times
            .entry(if is_other { OTHERS.into() } else { address })
            .or_default() += times;
    }

    fn is_due(&self, now: i64) -> bool {
        !self.times.is_empty() && now >= self.since + WINDOW
    }

    fn inserts(&self) -> Vec<Statement> {
        let details = format!("since {}", when::format_minute(Some(self.since)));
        let insert = |(address, times): (&String, &i64)| {
            let by = Actor::console(address.clone());
            NewAuditRow::summed("sign_ins_failed", &by, &details, *times).insert()
        };
        self.times.iter().map(insert).collect()
    }
}

pub struct Audit {
    database: Arc<Database>,
    failed_sign_ins: Mutex<FailedSignIns>,
}

impl Audit {
    pub fn new(database: Arc<Database>) -> Self {
        Self {
            database,
            failed_sign_ins: Mutex::default(),
        }
    }

    /// Calls `take` with every row since a time, the oldest first.
    pub fn list(&self, since: i64, mut take: impl FnMut(AuditRow)) -> Result<()> {
        let statement = format!("SELECT {COLUMNS} FROM audit WHERE created >= $1 ORDER BY id");
        self.database.run(TransactionMode::Report, |session| {
            session
                .query(&statement, &values![since], &mut |row| {
                    AuditRow::read(row).map(&mut take)
                })
                .map(drop)
        })
    }

    /// The newest rows about a subject or any, or those before a row.
    pub fn newest(
        &self,
        subject: Option<AuditSubject>,
        before: Option<&str>,
        most: i64,
    ) -> Result<Vec<AuditRow>> {
        let condition = subject.map_or("", AuditSubject::condition);
        let statement = format!(
            "SELECT {COLUMNS} FROM audit WHERE id < $1 {condition} ORDER BY id DESC LIMIT $2"
        );
        // Every id is less than this.
        let before = before.unwrap_or("~");
        self.database
            .read(|session| session.rows(&statement, &values![before, most], AuditRow::read))
    }

    pub fn note_reload(&self, by: &Actor, details: &str) -> Result<()> {
        let insert = NewAuditRow::new("settings_reloaded", by, details).insert();
        // Not with `write`, which waits for a lost database: this thread also feeds the watchdog.
        self.database.transaction(|session| {
            session
                .run(slice::from_ref(&insert), &mut |_, _| Ok(()))
                .map(drop)
        })
    }

    /// Notes a failed sign-in, in memory: `write_failed_sign_ins` writes it.
    pub fn note_failed_sign_in(&self, address: Option<IpAddr>, now: i64) {
        let address = address.map_or_else(
            || "-".into(),
            |address| ClientNetwork::from(address).to_string(),
        );
        lock(&self.failed_sign_ins).add(address, 1, now);
    }

    /// Writes the failed sign-ins of a window that is over. At a stop, `now` is the end of time.
    /// Returns false if there are none.
    pub fn write_failed_sign_ins(&self, now: i64) -> Result<bool> {
        if !lock(&self.failed_sign_ins).is_due(now) {
            return Ok(false);
        }
        self.with_failed_sign_ins(|statements| self.database.write(&statements).map(|_| true))
    }

    /// Runs `write` with statements that insert the failed sign-ins of this window. If it fails,
    /// they are kept.
    pub fn with_failed_sign_ins<T>(
        &self,
        write: impl FnOnce(Vec<Statement>) -> Result<T>,
    ) -> Result<T> {
        let taken = mem::take(&mut *lock(&self.failed_sign_ins));
        write(taken.inserts()).inspect_err(|_| {
            let mut kept = lock(&self.failed_sign_ins);
            taken
                .times
                .into_iter()
                .for_each(|(address, times)| kept.add(address, times, taken.since));
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::session::credentials;
    use crate::console::session::credentials::{PasswordHash, TokenKind};
    use crate::keys::{KeyChange, KeyChanged, KeyName, NewKey, Permission};
    use crate::secret::SecretDigest;
    use crate::store::Store;
    use crate::store::tests::Temporary;

    fn rows(store: &Store) -> Vec<AuditRow> {
        let mut rows = Vec::new();
        store
            .audit
            .list(0, |row| rows.push(row))
            .expect("the audit");
        rows
    }

    /// The only row of an action: via, actor, details.
    #[track_caller]
    fn only(store: &Store, action: &str) -> (String, String, String) {
        let mut found: Vec<AuditRow> = rows(store)
            .into_iter()
            .filter(|row| row.action == action)
            .collect();
        let row = found.pop().expect("a row");
        assert!(found.is_empty(), "one row for one change: {found:?}");
        (row.via, row.actor, row.details)
    }

    #[test]
    fn every_change_of_a_key_has_one_row() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let (ana, web) = (
            Actor::command("ana".into()),
            Actor::console("192.0.2.1".into()),
        );
        let name = KeyName::parse("first").expect("a name");
        let permissions = &[Permission::Completions];
        let key = NewKey {
            name: &name,
            permissions,
            created: 5,
            expires: None,
            concurrent: None,
            budget: None,
        };
        assert!(
            store
                .keys
                .add_as("key_x", "secret", &key, &ana)
                .expect("a key")
        );
        assert!(
            !store
                .keys
                .add_as("key_x", "other", &key, &web)
                .expect("no key"),
            "the id is taken"
        );
        let created = only(store, "key_created");
        assert_eq!((created.0.as_str(), created.1.as_str()), ("command", "ana"));
        assert_eq!(created.2, "permissions: completions, expires: never");
        let changes = [
            KeyChange::Name(KeyName::parse("second").expect("a name")),
            KeyChange::Permissions(vec![Permission::Metrics]),
            KeyChange::Expires(Some(978_307_260)),
            KeyChange::Concurrent(Some(7)),
        ];
        for _ in 0..2 {
            assert!(matches!(
                store.keys.change("key_x", None, &changes, &web),
                Ok(KeyChanged::Done)
            ));
        }
        assert!(matches!(
            store.keys.change("key_none", None, &changes, &web),
            Ok(KeyChanged::NoSuchKey)
        ));
        let (via, actor, details) = only(store, "key_changed");
        assert_eq!((via.as_str(), actor.as_str()), ("console", "192.0.2.1"));
        assert_eq!(
            details,
            "name: \"first\" → \"second\", permissions: completions → metrics, expires: never → 2001-01-01 00:01Z, \
             concurrent: none → 7"
        );
        for now in 8..10 {
            assert!(store.keys.revoke("key_x", now, &ana).expect("a change"));
        }
        assert!(!store.keys.revoke("key_none", 8, &ana).expect("no change"));
        only(store, "key_revoked");
        let about: Vec<_> = rows(store)
            .into_iter()
            .map(|row| (row.key_id, row.key_name))
            .collect();
        assert!(
            about.iter().all(|(id, _)| id.as_deref() == Some("key_x")),
            "{about:?}"
        );
        assert!(
            about
                .iter()
                .any(|(_, name)| name.as_deref() == Some("second")),
            "the name at the time"
        );
        let all = format!("{:?}", rows(store));
        assert!(!all.contains("secret") && !all.contains("digest"), "{all}");
    }

    /// The row and its change are one transaction: without the table there is no change.
    #[test]
    fn what_can_not_be_noted_is_not_done() {
        let temporary = Temporary::sqlite();
        let store = &temporary.store;
        let by = Actor::command("ana".into());
        let password = PasswordHash {
            salt: vec![1],
            hash: vec![2],
            memory_kib: 8,
            passes: 1,
        };
        credentials::set_password(store, password.clone(), &by).expect("a password");
        store.tamper("ALTER TABLE audit RENAME TO elsewhere");
        let name = KeyName::parse("x").expect("a name");
        let key = NewKey {
            name: &name,
            permissions: &[],
            created: 5,
            expires: None,
            concurrent: None,
            budget: None,
        };
        assert!(store.keys.add("secret", &key, &by).is_err());
        assert!(
            store
                .keys
                .change("key_1", None, &[KeyChange::Expires(Some(9))], &by)
                .is_err()
        );
        assert!(store.keys.revoke("key_1", 9, &by).is_err());
        let tokens = [
            (SecretDigest::of("a"), TokenKind::Session, 9),
            (SecretDigest::of("b"), TokenKind::Browser, 9),
        ];
        assert!(credentials::sign_in(store, tokens, 1, &password, &by).is_err());
        let other = PasswordHash {
            hash: vec![3],
            ..password.clone()
        };
        assert!(credentials::set_password(store, other, &by).is_err());
        let keys = store.keys.list().expect("the keys");
        assert_eq!(keys.len(), 2);
        assert!(
            keys.iter()
                .all(|key| key.expires.is_none() && key.revoked.is_none())
        );
        assert!(!credentials::has_session(store, &tokens[0].0, 1).expect("a look-up"));
        assert_eq!(
            credentials::password(store).expect("a look-up"),
            Some(password)
        );
    }

    #[test]
    fn sign_ins_and_failed_ones_summed_by_address() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let web = Actor::console("192.0.2.1".into());
        let password = PasswordHash {
            salt: vec![1],
            hash: vec![2],
            memory_kib: 8,
            passes: 1,
        };
        credentials::set_password(store, password.clone(), &Actor::command("ana".into()))
            .expect("a password");
        assert_eq!(only(store, "password_set").1, "ana");
        let fail = |address: &str, now| {
            store
                .audit
                .note_failed_sign_in(Some(address.parse().expect("an address")), now);
        };
        for now in 100..103 {
            fail("192.0.2.7", now);
        }
        fail("2001:db8:1:2::1", 103);
        fail("2001:db8:1:2:ffff::9", 104);
        store
            .audit
            .write_failed_sign_ins(100 + WINDOW - 1)
            .expect("nothing to do");
        let failed = || -> Vec<_> {
            let failed = rows(store)
                .into_iter()
                .filter(|row| row.action == "sign_ins_failed");
            let mut failed: Vec<_> = failed.map(|row| (row.actor, row.times)).collect();
            failed.sort();
            failed
        };
        assert_eq!(failed(), [], "the window is not over");
        store
            .audit
            .write_failed_sign_ins(100 + WINDOW)
            .expect("rows");
        store
            .audit
            .write_failed_sign_ins(i64::MAX)
            .expect("nothing is left");
        assert_eq!(
            failed(),
            [("192.0.2.7".into(), 3), ("2001:db8:1::/56".into(), 2)]
        );
        let tokens = [
            (SecretDigest::of("a"), TokenKind::Session, 9),
            (SecretDigest::of("b"), TokenKind::Browser, 9),
        ];
        fail("192.0.2.8", 200);
        let wrong = PasswordHash {
            hash: vec![3],
            ..password.clone()
        };
        assert!(!credentials::sign_in(store, tokens, 1, &wrong, &web).expect("another password"));
        assert!(rows(store).iter().all(|row| row.action != "signed_in"));
        fail("192.0.2.8", 201);
        assert!(credentials::sign_in(store, tokens, 1, &password, &web).expect("a sign-in"));
        assert_eq!(only(store, "signed_in").1, "192.0.2.1");
        assert_eq!(
            failed().len(),
            4,
            "a sign-in writes the failed ones before it"
        );
        store
            .audit
            .note_reload(&Actor::signal("SIGHUP"), "")
            .expect("a row");
        assert_eq!(only(store, "settings_reloaded").0, "signal");
    }

    #[test]
    fn strangers_cannot_fill_the_table() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for number in 0..5000_u32 {
            store
                .audit
                .note_failed_sign_in(Some(IpAddr::from(number.to_be_bytes())), 7);
        }
        store.audit.write_failed_sign_ins(i64::MAX).expect("rows");
        let rows = rows(store);
        assert_eq!(rows.len(), ADDRESSES + 1);
        assert_eq!(
            rows.iter().map(|row| row.times).sum::<i64>(),
            5000,
            "and none is lost"
        );
        assert!(rows.iter().any(|row| row.actor == OTHERS));
    }

    #[test]
    fn failed_sign_ins_outlast_a_database_that_takes_no_write() {
        let temporary = Temporary::sqlite();
        let store = &temporary.store;
        store.audit.note_failed_sign_in(None, 7);
        store.tamper("ALTER TABLE audit RENAME TO elsewhere");
        assert!(store.audit.write_failed_sign_ins(i64::MAX).is_err());
        store.audit.note_failed_sign_in(None, 8);
        store.tamper("ALTER TABLE elsewhere RENAME TO audit");
        store.audit.write_failed_sign_ins(i64::MAX).expect("rows");
        assert_eq!(rows(store)[0].times, 2);
    }

    #[test]
    fn pages() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for number in 0..7 {
            store.tamper(&format!(
                "INSERT INTO audit VALUES ('audit_{number}', {number}, 'signed_in', 'console', 'x', '', 1, NULL, NULL)"
            ));
        }
        let ids = |before: Option<&str>| -> Vec<String> {
            let rows = store.audit.newest(None, before, 3).expect("a page");
            rows.into_iter()
                .map(|row| row.id.replace("audit_", ""))
                .collect()
        };
        assert_eq!(ids(None), ["6", "5", "4"]);
        assert_eq!(ids(Some("audit_4")), ["3", "2", "1"]);
        assert_eq!(ids(Some("audit_1")), ["0"]);
        let mut newer = 0;
        store.audit.list(5, |_| newer += 1).expect("the audit");
        assert_eq!(newer, 2);
    }
}
