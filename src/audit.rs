//! The audit log of changes. A row is inserted in the transaction of the change that it describes.
//! No statement changes or removes a row.

use std::sync::Arc;

use serde::Serialize;

use crate::database::{Database, Row, Session, Statement, values};
use crate::error::Result;
use crate::id::audit_id;
use crate::text::words;
use crate::when;

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

words! {
    pub enum AuditSubject {
        Keys = "keys",
        SignIns = "sign-ins",
        Settings = "settings",
    }
}

impl AuditSubject {
    fn condition(self) -> &'static str {
        match self {
            Self::Keys => "AND key_id IS NOT NULL",
            Self::SignIns => "AND action = 'signed_in'",
            Self::Settings => "AND key_id IS NULL AND action <> 'signed_in'",
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
}

impl AuditRow {
    pub fn description(&self) -> String {
        self.action.replace('_', " ")
    }

    /// Reads a row of [`SELECT_AUDIT`].
    pub fn read(mut row: Row) -> Result<Self> {
        Ok(Self {
            id: row.column()?,
            created: row.column()?,
            action: row.column()?,
            via: row.column()?,
            actor: row.column()?,
            details: row.column()?,
            key_id: row.column()?,
            key_name: row.column()?,
        })
    }
}

/// A row that a transaction inserts with the change that it describes.
pub struct NewAuditRow {
    id: String,
    created: i64,
    action: &'static str,
    by: Actor,
}

impl NewAuditRow {
    /// The action is one of the words that schema.sql lists.
    pub fn new(action: &'static str, by: &Actor) -> Self {
        Self {
            id: audit_id(),
            created: when::now(),
            action,
            by: by.clone(),
        }
    }

    /// Runs a change and this row, which `work` inserts, as one transaction. If the answer to its
    /// commit was lost, the row says whether it was done.
    pub fn transaction<T: Send + 'static>(
        self,
        database: &Database,
        work: impl Fn(&Session, &Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let find = Statement::new("SELECT 1 FROM audit WHERE id = $1", values![&self.id]);
        database.transaction(Some(find), move |session| work(session, &self))
    }

    /// Inserts the row. `key` is the id and the name of the key that it is about.
    pub fn insert(
        &self,
        session: &Session,
        key: Option<(&str, &str)>,
        details: &str,
    ) -> Result<()> {
        let (id, name) = key.unzip();
        let row = values![
            &self.id,
            self.created,
            self.action,
            self.by.via,
            &self.by.name,
            details,
            id,
            name
        ];
        let insert =
            "INSERT INTO audit (id, created, action, via, actor, details, key_id, key_name)
            VALUES ($1, $2, $3, $4, $5, $6, $7, $8)";
        session.execute(insert, &row).map(drop)
    }
}

/// A condition follows.
pub const SELECT_AUDIT: &str =
    "SELECT id, created, action, via, actor, details, key_id, key_name FROM audit";

pub struct Audit {
    database: Arc<Database>,
}

impl Audit {
    pub fn new(database: Arc<Database>) -> Self {
        Self { database }
    }

    /// Calls `take` with every row since a time, the oldest first.
    pub fn list(&self, since: i64, mut take: impl FnMut(AuditRow)) -> Result<()> {
        let statement = format!("{SELECT_AUDIT} WHERE created >= $1 ORDER BY id");
        self.database.report(|session| {
            let mut read = |row| AuditRow::read(row).map(&mut take);
            session
                .query(&statement, &values![since], &mut read)
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
        let statement =
            format!("{SELECT_AUDIT} WHERE id < $1 {condition} ORDER BY id DESC LIMIT $2");
        // Every id is less than this.
        let before = before.unwrap_or("~");
        self.database
            .read(|session| session.rows(&statement, &values![before, most], AuditRow::read))
    }

    pub fn note_reload(&self, by: &Actor, details: String) -> Result<()> {
        NewAuditRow::new("settings_reloaded", by)
            .transaction(&self.database, move |session, audit| {
                audit.insert(session, None, &details)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::password::{self, PasswordHash};
    use crate::console::session;
    use crate::keys::{Key, KeyChanged, KeyName, KeyTerms, Permission};
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
        let add = |secret: &str, by: &Actor| {
            let added = store
                .keys
                .add("key_x", secret, &name, &KeyTerms::example(), by);
            added.expect("an answer")
        };
        assert!(add("xyzzy", &ana));
        assert!(!add("other", &web), "the id is taken");
        let created = only(store, "key_created");
        assert_eq!((created.0.as_str(), created.1.as_str()), ("command", "ana"));
        assert_eq!(created.2, "permissions: completions, expires: never");
        let edit = |key: &mut Key| {
            key.name = "second".into();
            key.terms.permissions = vec![Permission::Metrics];
            key.terms.expires = Some(978_307_260);
            key.terms.concurrent = Some(7);
        };
        for _ in 0..2 {
            assert!(matches!(
                store.keys.change("key_x", edit, &web),
                Ok(KeyChanged::Done)
            ));
        }
        assert!(matches!(
            store.keys.change("key_none", edit, &web),
            Ok(KeyChanged::NoSuchKey)
        ));
        let (via, actor, details) = only(store, "key_changed");
        assert_eq!((via.as_str(), actor.as_str()), ("console", "192.0.2.1"));
        assert_eq!(
            details,
            "name: \"first\" → \"second\", permissions: completions → metrics, expires: never → 2001-01-01 00:01Z, \
             concurrent: none → 7"
        );
        let secret = format!("adr_3f9a{}c41d", "0".repeat(40));
        for (overlap, now) in [(Some(60), 978_307_200), (Some(60), 978_307_201)] {
            let rotated = store.keys.rotate("key_x", &secret, overlap, now, &ana);
            rotated.expect("an answer");
        }
        let rotated = only(store, "key_rotated").2;
        let expected = "secret: unknown → adr_3f9a…c41d, the former one ends at 2001-01-01 00:01Z";
        assert_eq!(rotated, expected);
        for now in 8..10 {
            store.keys.revoke("key_x", now, &ana).expect("a change");
        }
        let none = store.keys.revoke("key_none", 8, &ana);
        assert!(matches!(none, Ok(KeyChanged::NoSuchKey)));
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
        assert!(!all.contains("xyzzy") && !all.contains("digest"), "{all}");
    }

    /// The row and its change are one transaction: without the table there is no change.
    #[test]
    fn what_can_not_be_noted_is_not_done() {
        let temporary = Temporary::sqlite();
        let store = &temporary.store;
        let by = Actor::command("ana".into());
        let password = PasswordHash::example(1);
        password::set(store, password.clone(), &by).expect("a password");
        store.tamper("ALTER TABLE audit RENAME TO elsewhere");
        let name = KeyName::parse("x").expect("a name");
        let terms = KeyTerms::example();
        assert!(
            store
                .keys
                .add("key_x", "secret", &name, &terms, &by)
                .is_err()
        );
        let edit = |key: &mut Key| key.terms.expires = Some(9);
        assert!(store.keys.change("key_1", edit, &by).is_err());
        assert!(store.keys.rotate("key_1", "new", None, 9, &by).is_err());
        assert!(store.keys.revoke("key_1", 9, &by).is_err());
        let browser = SecretDigest::of("a");
        assert!(session::begin(store, browser, None, 1, &password, &by).is_err());
        let other = PasswordHash::example(2);
        assert!(password::set(store, other, &by).is_err());
        let keys = store.keys.list().expect("the keys");
        assert_eq!(keys.len(), 2);
        assert!(
            keys.iter()
                .all(|key| key.terms.expires.is_none() && key.revoked.is_none())
        );
        let (_, ends) = store
            .keys
            .find(&SecretDigest::of("key_1"), 9)
            .expect("a look-up")
            .expect("the key");
        assert_eq!(ends, None);
        assert!(!session::is_signed_in(store, &browser, 1).expect("a look-up"));
        assert_eq!(password::stored(store).expect("a look-up"), Some(password));
    }

    #[test]
    fn sign_ins_and_reloads_have_a_row() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let web = Actor::console("192.0.2.1".into());
        let password = PasswordHash::example(1);
        password::set(store, password.clone(), &Actor::command("ana".into())).expect("a password");
        assert_eq!(only(store, "password_set").1, "ana");
        let sign_in = |password: &PasswordHash| {
            let browser = SecretDigest::of("a");
            session::begin(store, browser, None, 1, password, &web).expect("an answer")
        };
        assert!(!sign_in(&PasswordHash::example(2)), "another password");
        assert!(rows(store).iter().all(|row| row.action != "signed_in"));
        assert!(sign_in(&password));
        assert_eq!(only(store, "signed_in").1, "192.0.2.1");
        store
            .audit
            .note_reload(&Actor::signal("SIGHUP"), String::new())
            .expect("a row");
        assert_eq!(only(store, "settings_reloaded").0, "signal");
    }

    #[test]
    fn pages() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for number in 0..7 {
            store.tamper(&format!(
                "INSERT INTO audit VALUES ('audit_{number}', {number}, 'signed_in', 'console', 'x', '', NULL, NULL)"
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

    /// In `serve` each of these is a job of the writer.
    #[test]
    #[cfg(feature = "test-postgres")]
    fn a_change_whose_answer_is_lost_is_made_once() {
        use std::sync::atomic::Ordering;

        use crate::database::postgres::tests::*;
        use crate::database::{Access, DatabaseLocation};
        use crate::ledger::Writer;
        use crate::ledger::append::tests::row;

        let (proxies, uri) = proxies(1);
        let store = Store::open(&DatabaseLocation::Postgres(uri), Access::Create);
        let (store, proxy) = (store.expect("a new database"), &proxies[0]);
        let _writer = Writer::start(&store.ledger, None, |_| ()).expect("a thread");
        let by = Actor::console("192.0.2.1".into());
        let name = KeyName::parse("x").expect("a name");
        let password = PasswordHash::example(1);
        let version = "SELECT CAST(CAST(xmin AS TEXT) AS BIGINT) FROM schema_version";
        let losses = [LOSE_REQUEST, LOSE_ANSWER, LOSE_COMMIT, LOSE_COMMIT_ANSWER];
        for (number, loss) in (1..).zip(losses) {
            let id = format!("key_{number}");
            let terms = KeyTerms::example();
            let browser = SecretDigest::of(&id);
            let changes: [(&str, &dyn Fn() -> Result<bool>); 6] = [
                ("key_created", &|| {
                    store.keys.add(&id, &id, &name, &terms, &by)
                }),
                ("key_changed", &|| {
                    let edit = |key: &mut Key| key.name = "y".into();
                    let changed = store.keys.change(&id, edit, &by)?;
                    Ok(matches!(changed, KeyChanged::Done))
                }),
                ("key_rotated", &|| {
                    let rotated = store.keys.rotate(&id, &format!("{id}'"), Some(9), 9, &by)?;
                    Ok(matches!(rotated, KeyChanged::Done))
                }),
                ("key_revoked", &|| {
                    let revoked = store.keys.revoke(&id, 9, &by)?;
                    Ok(matches!(revoked, KeyChanged::Done))
                }),
                ("password_set", &|| {
                    password::set(&store, password.clone(), &by).map(|()| true)
                }),
                ("signed_in", &|| {
                    session::begin(&store, browser, None, 9, &password, &by)
                }),
            ];
            for (action, change) in changes {
                // Its commit is a heartbeat, so that the loss does not meet one.
                let end = format!("{action} {number}");
                store
                    .ledger
                    .append(row(&end, "key_1", 1), None)
                    .expect("a row");
                let before: i64 = store.value(version);
                proxy.set(loss);
                assert_eq!(change(), Ok(true), "{action}, {loss}");
                let mode = proxy.mode.load(Ordering::SeqCst);
                assert_eq!(mode, PASS, "something was lost");
                let found = rows(&store);
                let found = found.iter().filter(|row| row.action == action).count();
                assert_eq!(found, number, "{action}, {loss}");
                let is_proven = store.value::<i64>(version) != before;
                assert_eq!(
                    is_proven,
                    loss == LOSE_COMMIT_ANSWER,
                    "by a commit: {action}"
                );
            }
        }
    }
}
