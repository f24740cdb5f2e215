//! API keys: creates, finds, changes and revokes them, with their budgets.

mod budget;
mod key;

use std::sync::Arc;

pub use self::budget::{Budget, BudgetPeriod, KeyBudget};
use self::budget::{budget_columns, budget_parameters};
use self::key::terms;
pub use self::key::{
    CONCURRENT_TAKES, Key, KeyChange, KeyChanged, KeyName, KeyState, NewKey, Permission,
    parse_concurrent, read_key, time_left,
};
use crate::audit::{Actor, NewAuditRow};
use crate::database::{Database, Result, SqlValue, Statement, values};
use crate::secret::{SecretDigest, secret_hex};
use crate::when;

const BY_ID: &str = "WHERE id = $3";
const BY_DIGEST: &str = "WHERE digest = $3";
const BY_NAME: &str = "WHERE name = $3 ORDER BY created, id";

/// Whether the text that names a key may be its secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecretUse {
    Accepted,
    Refused,
}

pub struct Keys {
    database: Arc<Database>,
    /// The query for the key of a request.
    pub(crate) look_up: String,
}

impl Keys {
    pub fn new(database: Arc<Database>) -> Self {
        Self {
            look_up: select(&database, "NULL", BY_DIGEST),
            database,
        }
    }

    /// Stores a new key, and returns its id.
    pub fn add(&self, secret: &str, key: &NewKey, by: &Actor) -> Result<String> {
        loop {
            let id = format!("key_{}", secret_hex::<8>());
            if self.add_as(&id, secret, key, by)? {
                return Ok(id);
            }
        }
    }

    /// Stores a new key with this id. Returns false, and changes nothing, if there is a key with
    /// this id.
    pub fn add_as(&self, id: &str, secret: &str, key: &NewKey, by: &Actor) -> Result<bool> {
        let digest = SecretDigest::of(secret).0;
        let insert = Statement::new(
            "INSERT INTO keys (id, digest, name, permissions, created, expires, hint, concurrent, budget, budget_per)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) ON CONFLICT (id) DO NOTHING",
            values![
                id,
                digest,
                &key.name.0,
                Permission::join(key.permissions),
                key.created,
                key.expires,
                hint(secret),
                key.concurrent,
                key.budget.map(|budget| budget.tokens),
                key.budget.map(|budget| budget.per.as_str()),
            ],
        );
        let terms = terms(key.permissions, key.expires, key.concurrent, key.budget);
        let details = terms.into_iter().filter(|(_, value)| value != "none");
        let details: Vec<String> = details
            .map(|(property, value)| format!("{property}: {value}"))
            .collect();
        let if_created = "id, name FROM keys WHERE id = $8 AND digest = $9";
        let audit = NewAuditRow::new("key_created", by, &details.join(", "))
            .insert_with(if_created, values![id, digest]);
        Ok(self.database.write(&[insert, audit])? == 1)
    }

    /// The key whose secret has this digest, as the last commit of any process left it, with its
    /// budget at a time and without its last use.
    pub fn find(&self, digest: &SecretDigest, created: i64) -> Result<Option<Key>> {
        self.database.look_up(
            &self.look_up,
            &parameters(created, digest.0.into()),
            read_key,
        )
    }

    /// All keys, the oldest first.
    pub fn list(&self) -> Result<Vec<Key>> {
        self.select_keys("")
    }

    /// The keys that have a budget, without revoked ones.
    pub fn with_budget(&self) -> Result<Vec<Key>> {
        self.select_keys("WHERE budget IS NOT NULL AND revoked IS NULL")
    }

    fn select_keys(&self, condition: &str) -> Result<Vec<Key>> {
        let statement = self.select(&format!("{condition} ORDER BY created, id"));
        self.database
            .read(|session| session.rows(&statement, &budget_parameters(when::now()), read_key))
    }

    /// A query for keys with their last uses: that of the newest row or, if retention has removed
    /// all rows, the newest day that has sums.
    fn select(&self, condition: &str) -> String {
        let last_used = format!(
            "coalesce((SELECT created FROM usage WHERE key_id = keys.id ORDER BY request_id DESC LIMIT 1),
             (SELECT max(start) FROM usage_rollup {} WHERE span = 86400 AND key_id = keys.id))",
            days_hint(&self.database)
        );
        select(&self.database, &last_used, condition)
    }

    pub fn get(&self, id: &str) -> Result<Option<Key>> {
        self.database.look_up(
            &self.select(BY_ID),
            &parameters(when::now(), id.into()),
            read_key,
        )
    }

    /// Returns the keys that a text means, if more than one then because of their name: first by
    /// the id, then by the secret if that is accepted, then by the name. Revoked keys are among
    /// them only if all of that name are.
    pub fn resolve(&self, text: &str, secret: SecretUse) -> Result<Vec<Key>> {
        let by_digest =
            (secret == SecretUse::Accepted).then(|| (BY_DIGEST, SecretDigest::of(text).0.into()));
        let ways = [
            Some((BY_ID, text.into())),
            by_digest,
            Some((BY_NAME, text.into())),
        ];
        for (condition, wanted) in ways.into_iter().flatten() {
            let (statement, parameters) = (self.select(condition), parameters(when::now(), wanted));
            let found = self
                .database
                .read(|session| session.rows(&statement, &parameters, read_key))?;
            let (active, revoked): (Vec<Key>, Vec<Key>) =
                found.into_iter().partition(|key| key.revoked.is_none());
            let keys = if active.is_empty() { revoked } else { active };
            if !keys.is_empty() {
                return Ok(keys);
            }
        }
        Ok(Vec::new())
    }

    /// Makes all of these changes, or none. If a version is given, only if the key still has that
    /// version.
    pub fn change(
        &self,
        id: &str,
        seen: Option<&str>,
        changes: &[KeyChange],
        by: &Actor,
    ) -> Result<KeyChanged> {
        let find = format!(
            "{} {}",
            self.select(BY_ID),
            self.database.row_lock("FOR UPDATE")
        );
        let parameters = parameters(when::now(), id.into());
        self.database.transaction(|session| {
            let Some(before) = session.first(&find, &parameters, read_key)? else {
                return Ok(KeyChanged::NoSuchKey);
            };
            let mut after = before.clone();
            changes.iter().for_each(|change| change.apply(&mut after));
            if after.version() == before.version() {
                return Ok(KeyChanged::Done);
            }
            if seen.is_some_and(|seen| seen != before.version()) {
                return Ok(KeyChanged::Meanwhile(Box::new(before)));
            }
            session.execute(
                "UPDATE keys SET name = $1, permissions = $2, expires = $3, concurrent = $4, budget = $5, budget_per = $6
                 WHERE id = $7",
                &values![
                    &after.name,
                    Permission::join(&after.permissions),
                    after.expires,
                    after.concurrent,
                    after.budget().map(|budget| budget.tokens),
                    after.budget().map(|budget| budget.per.as_str()),
                    id
                ],
            )?;
            let audit = NewAuditRow::new("key_changed", by, &before.differences(&after).join(", "));
            session.run(&[audit.insert_with("$8, $9 WHERE true", values![id, &before.name])], &mut |_, _| Ok(()))?;
            Ok(KeyChanged::Done)
        })
    }

    /// Revokes a key for good, from the next request on. Returns false if there is no such key; one
    /// that is revoked already keeps its time.
    pub fn revoke(&self, id: &str, now: i64, by: &Actor) -> Result<bool> {
        let if_not_revoked = "id, name FROM keys WHERE id = $8 AND revoked IS NULL";
        let audit =
            NewAuditRow::new("key_revoked", by, "").insert_with(if_not_revoked, values![id]);
        let revoke = Statement::new(
            "UPDATE keys SET revoked = coalesce(revoked, $1) WHERE id = $2",
            values![now, id],
        );
        Ok(self.database.write(&[audit, revoke])? > 0)
    }
}

/// A query for keys with their budgets. $1 and $2 are [`budget_parameters`].
fn select(database: &Database, last_used: &str, condition: &str) -> String {
    let budget = budget_columns(days_hint(database));
    format!(
        "SELECT id, name, hint, permissions, created, expires, {last_used}, revoked, concurrent, {budget} FROM keys {condition}"
    )
}

/// A hint for reading the days of one key from `usage_rollup`. Without statistics, which PostgreSQL
/// has, SQLite would read the days of all keys by the primary key.
fn days_hint(database: &Database) -> &'static str {
    match database {
        Database::Sqlite(_) => "INDEXED BY rollup_days",
        Database::Postgres(_) => "",
    }
}

/// The parameters of a query for one key.
fn parameters(created: i64, wanted: SqlValue) -> Vec<SqlValue> {
    let [day, month] = budget_parameters(created);
    vec![day, month, wanted]
}

/// Enough of a secret to recognize it, and far too little to use it: eight of its digits.
fn hint(secret: &str) -> Option<String> {
    let (prefix, digits) = secret.split_once('_')?;
    let (begin, end) = (
        digits.get(..4)?,
        digits.get(digits.len().checked_sub(4)?..)?,
    );
    (digits.len() >= 32).then(|| format!("{prefix}_{begin}…{end}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{Budget, KeyName};
    use crate::ledger::append::tests::write;
    use crate::store::Store;
    use crate::store::tests::Temporary;
    use crate::when::DAY;

    fn name(text: &str) -> KeyName {
        KeyName::parse(text).expect("a good name")
    }

    fn new<'a>(
        name: &'a KeyName,
        permissions: &'a [Permission],
        expires: Option<i64>,
    ) -> NewKey<'a> {
        NewKey {
            name,
            permissions,
            created: 5,
            expires,
            concurrent: None,
            budget: None,
        }
    }

    fn by() -> Actor {
        Actor::command("ana".into())
    }

    #[track_caller]
    fn change(store: &Store, id: &str, changes: &[KeyChange]) {
        assert!(matches!(
            store.keys.change(id, None, changes, &by()),
            Ok(KeyChanged::Done)
        ));
    }

    #[test]
    fn a_key_from_its_making_to_its_end() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let digest = SecretDigest::of("secret");
        assert!(store.keys.find(&digest, 5).expect("a look-up").is_none());
        let id = store
            .keys
            .add(
                "secret",
                &new(&name("first"), &Permission::ALL, Some(9)),
                &by(),
            )
            .expect("a new key");
        let key = store
            .keys
            .find(&digest, 5)
            .expect("a look-up")
            .expect("the key");
        assert_eq!(
            (key.id.as_str(), key.created, key.expires, key.revoked),
            (id.as_str(), 5, Some(9), None)
        );
        assert_eq!(key.permissions, Permission::ALL);
        change(store, &id, &[KeyChange::Name(name("second"))]);
        assert!(store.keys.revoke(&id, 7, &by()).expect("a change"));
        assert!(store.keys.revoke(&id, 8, &by()).expect("a change"));
        let key = store
            .keys
            .find(&digest, 5)
            .expect("a look-up")
            .expect("the key");
        assert_eq!((key.name.as_str(), key.revoked), ("second", Some(7)));
        let change_none = store
            .keys
            .change("key_none", None, &[KeyChange::Expires(None)], &by());
        assert!(matches!(change_none, Ok(KeyChanged::NoSuchKey)));
        assert!(!store.keys.revoke("key_none", 1, &by()).expect("no change"));
        assert!(
            store
                .keys
                .add("secret", &new(&name("again"), &[], None), &by())
                .is_err(),
            "a secret has one key"
        );
        assert!(
            !store
                .keys
                .add_as(&id, "other", &new(&name("again"), &[], None), &by())
                .expect("no change"),
            "so has an id"
        );
        assert!(
            store
                .keys
                .find(&SecretDigest::of("other"), 5)
                .expect("a look-up")
                .is_none()
        );
    }

    #[test]
    fn a_keys_terms_are_changed_together() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let name = name("x");
        let limited = NewKey {
            concurrent: Some(3),
            ..new(&name, &[Permission::Completions], None)
        };
        let id = store
            .keys
            .add("secret", &limited, &by())
            .expect("a new key");
        let found = || {
            store
                .keys
                .find(&SecretDigest::of("secret"), 5)
                .expect("a look-up")
                .expect("the key")
        };
        assert_eq!((found().concurrent, found().expires), (Some(3), None));
        let changes = [
            KeyChange::Permissions(vec![Permission::Metrics]),
            KeyChange::Expires(Some(9)),
            KeyChange::Concurrent(Some(10_000)),
        ];
        change(store, &id, &changes);
        assert_eq!(
            (found().concurrent, found().expires),
            (Some(10_000), Some(9))
        );
        assert_eq!(found().permissions, [Permission::Metrics]);
        let budget = Budget::parse("1000/day");
        change(store, &id, &[KeyChange::Budget(budget)]);
        let changes = [KeyChange::Concurrent(None), KeyChange::Expires(None)];
        change(store, &id, &changes);
        assert_eq!(
            (found().concurrent, found().expires, found().budget()),
            (None, None, budget)
        );
        assert_eq!(
            found().permissions,
            [Permission::Metrics],
            "what is not named stays"
        );
        let seen = found().version();
        change(
            store,
            &id,
            &[KeyChange::Budget(Budget::parse("1000/month"))],
        );
        let stale = store.keys.change(
            &id,
            Some(&seen),
            &[KeyChange::Name(KeyName::parse("y").expect("a good name"))],
            &by(),
        );
        assert!(
            matches!(stale, Ok(KeyChanged::Meanwhile(_))),
            "the budget is part of the version"
        );
    }

    #[test]
    fn a_key_is_found_by_its_id_its_secret_and_its_name() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let add = |secret: &str, text: &str| {
            store
                .keys
                .add(secret, &new(&name(text), &[], None), &by())
                .expect("a new key")
        };
        let found = |text: &str, secret| {
            let keys = store.keys.resolve(text, secret).expect("a look-up");
            keys.into_iter().map(|key| key.id).collect::<Vec<String>>()
        };
        let (first, second) = (add("adr_1", "twin"), add("adr_2", "twin"));
        // A name that was given before names had to differ from ids, and one that is the secret of
        // another key.
        let (by_id, by_secret) = (add("adr_3", "x"), add("adr_4", "y"));
        store.tamper(&format!(
            "UPDATE keys SET name = '{first}' WHERE id = '{by_id}'; UPDATE keys SET name = 'adr_1' WHERE id = '{by_secret}'"
        ));
        let mut twins = [first.clone(), second.clone()];
        twins.sort();
        for secret in [SecretUse::Accepted, SecretUse::Refused] {
            assert_eq!(
                found(&first, secret),
                [first.as_str()],
                "the id comes first"
            );
            assert_eq!(found("twin", secret), twins, "several of one name");
            assert_eq!(found("Twin", secret), [""; 0], "a name is exact");
        }
        assert_eq!(
            found("adr_1", SecretUse::Accepted),
            [first.as_str()],
            "the secret comes before the name"
        );
        assert_eq!(found("adr_1", SecretUse::Refused), [by_secret]);
        assert_eq!(found("adr_2", SecretUse::Refused), [""; 0]);
        store.keys.revoke(&first, 7, &by()).expect("a change");
        assert_eq!(
            found("twin", SecretUse::Refused),
            [second.as_str()],
            "the one that is not revoked"
        );
        store.keys.revoke(&second, 7, &by()).expect("a change");
        assert_eq!(found("twin", SecretUse::Refused), twins);
        assert_eq!(
            found("adr_2", SecretUse::Accepted),
            [second],
            "also a revoked one"
        );
    }

    #[test]
    fn a_digest_is_sha_256_and_is_not_printed() {
        assert_eq!(format!("{:?}", SecretDigest::of("abc")), "SecretDigest(…)");
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex::encode(SecretDigest::of("abc").0), known);
    }

    #[test]
    fn a_hint_gives_little_away() {
        let secret = "adr_3f9a56789abcdef0123456789abcdef0123456789abcc41d";
        assert_eq!(hint(secret).as_deref(), Some("adr_3f9a…c41d"));
        for short in ["", "adr_", "adr_1234567890", "secret"] {
            assert_eq!(hint(short), None, "{short}");
        }
    }

    #[test]
    fn the_last_use_is_that_of_the_newest_row_or_day() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let last_used = |id: &str| {
            let listed = store
                .keys
                .list()
                .expect("the keys")
                .into_iter()
                .find(|key| key.id == id);
            let found = store
                .keys
                .get(id)
                .expect("a look-up")
                .expect("the key")
                .last_used;
            assert_eq!(listed.expect("the key").last_used, found);
            found
        };
        assert_eq!(last_used("key_1"), None);
        for (end, key, created, status) in [
            ("a", "key_1", DAY + 50, 200),
            ("b", "key_1", DAY + 70, 400),
            ("c", "key_1", DAY + 60, 200),
        ] {
            write(store, end, key, created, status, None);
        }
        write(store, "d", "key_2", 9 * DAY, 200, None);
        assert_eq!(
            (last_used("key_1"), last_used("key_2")),
            (Some(DAY + 70), Some(9 * DAY))
        );
        while store
            .ledger
            .remove_before(5 * DAY, 9 * DAY, 100)
            .expect("a step")
            > 0
        {}
        assert_eq!(
            (last_used("key_1"), last_used("key_2")),
            (Some(DAY), Some(9 * DAY))
        );
    }

    #[test]
    fn a_change_by_another_process_is_seen_at_once() {
        let temporary = Temporary::new();
        let other = temporary.open_again();
        let digest = SecretDigest::of("secret");
        let id = other
            .keys
            .add("secret", &new(&name("x"), &[], None), &by())
            .expect("a new key");
        assert!(
            temporary
                .store
                .keys
                .find(&digest, 5)
                .expect("a look-up")
                .is_some()
        );
        other.keys.revoke(&id, 2, &by()).expect("a change");
        let key = temporary
            .store
            .keys
            .find(&digest, 5)
            .expect("a look-up")
            .expect("the key");
        assert_eq!(key.revoked, Some(2));
    }
}
