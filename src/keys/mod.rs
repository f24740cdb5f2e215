//! API keys: creates, finds, changes, rotates and revokes them, with their budgets.

mod key;

use std::sync::Arc;

use self::key::{BUDGET_COLUMNS, budget_parameters, read_key};
pub use self::key::{
    Budget, BudgetPeriod, CONCURRENT_TAKES, Key, KeyChanged, KeyName, KeyState, KeyTerms, Overlap,
    Permission, parse_concurrent, time_left,
};
use crate::audit::{Actor, NewAuditRow};
use crate::database::{Database, Row, Session, Value, values};
use crate::error::Result;
use crate::secret::{SecretDigest, secret_hex};
use crate::when::{self, DAY, Zone};

/// The longest time for which a replaced secret works, in seconds.
pub const LONGEST_OVERLAP: i64 = 30 * DAY;

pub struct Keys {
    database: Arc<Database>,
    zone: Zone,
    /// The query for the key of a request.
    pub(crate) look_up: String,
}

/// Makes the id of a new key.
pub fn new_id() -> String {
    format!("key_{}", secret_hex::<8>())
}

impl Keys {
    pub fn new(database: Arc<Database>, zone: Zone) -> Self {
        let look_up = format!(
            "SELECT keys.id, name, hint, permissions, keys.created, expires, NULL, NULL, revoked, concurrent, {BUDGET_COLUMNS},
                NULL, NULL, ends
             FROM key_secrets JOIN keys ON keys.id = key_id WHERE digest = $3"
        );
        Self {
            database,
            zone,
            look_up,
        }
    }

    /// Stores a new key. Returns false, and changes nothing, if there is a key with this id.
    pub fn add(
        &self,
        id: &str,
        secret: &str,
        name: &KeyName,
        terms: &KeyTerms,
        by: &Actor,
    ) -> Result<bool> {
        let properties = terms.properties(&self.zone).into_iter();
        let details: Vec<String> = properties
            .filter(|(_, value)| value != "none")
            .map(|(property, value)| format!("{property}: {value}"))
            .collect();
        let (id, name, created) = (id.to_owned(), name.as_str().to_owned(), when::now());
        let mut key = terms.values(&name);
        key.extend(values![&id, created]);
        let secret = values![SecretDigest::of(secret).0, &id, hint(secret), created];
        NewAuditRow::new("key_created", by).transaction(&self.database, move |session, audit| {
            let insert = "INSERT INTO keys (name, permissions, expires, concurrent, budget, budget_per, id, created)
                VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (id) DO NOTHING";
            if session.execute(insert, &key)? == 0 {
                return Ok(false);
            }
            session.execute(INSERT_SECRET, &secret)?;
            audit.insert(session, Some((&id, &name)), &details.join(", "))?;
            Ok(true)
        })
    }

    /// The key of a secret with this digest, as the last commit of any process left it, with its
    /// budget at a time and without its last use; and when the secret ends or ended.
    pub fn find(&self, digest: &SecretDigest, created: i64) -> Result<Option<(Key, Option<i64>)>> {
        let [day, month] = budget_parameters(created, &self.zone);
        let parameters = values![day, month, digest.0];
        self.database
            .look_up(&self.look_up, &parameters, |mut row| {
                Ok((read_key(&mut row, &self.zone)?, row.column()?))
            })
    }

    /// All keys, the oldest first.
    pub fn list(&self) -> Result<Vec<Key>> {
        self.select("", [])
    }

    /// The keys that have a budget, without revoked ones.
    pub fn with_budget(&self) -> Result<Vec<Key>> {
        self.select("WHERE budget IS NOT NULL AND revoked IS NULL", [])
    }

    pub fn get(&self, id: &str) -> Result<Option<Key>> {
        Ok(self.select("WHERE keys.id = $4", values![id])?.pop())
    }

    /// The keys that a text means to a report: the one with this id, or every key of this name,
    /// revoked ones too.
    pub fn named(&self, text: &str) -> Result<Vec<Key>> {
        match self.get(text)? {
            Some(key) => Ok(vec![key]),
            None => self.select("WHERE name = $4", values![text]),
        }
    }

    fn select<const N: usize>(&self, condition: &str, wanted: [Value; N]) -> Result<Vec<Key>> {
        let statement = format!(
            "{} {condition} ORDER BY keys.created, keys.id",
            self.query()
        );
        let parameters = self.parameters(when::now(), wanted);
        self.database.read(|session| {
            session.rows(&statement, &parameters, |mut row| {
                read_key(&mut row, &self.zone)
            })
        })
    }

    /// A query for keys with their last uses: that of the newest row or, if retention has removed
    /// all rows, the newest day that has sums. Its parameters are `parameters`.
    fn query(&self) -> String {
        format!(
            "SELECT keys.id, name, present.hint, permissions, keys.created, expires,
                (SELECT created FROM usage WHERE key_id = keys.id ORDER BY request_id DESC LIMIT 1),
                (SELECT max(day) FROM usage_days WHERE key_id = keys.id),
                revoked, concurrent, {BUDGET_COLUMNS}, old.hint, old.ends
             FROM keys JOIN key_secrets AS present ON present.key_id = keys.id AND present.ends IS NULL
             LEFT JOIN key_secrets AS old ON old.key_id = keys.id AND old.ends > $3"
        )
    }

    fn parameters<const N: usize>(&self, now: i64, wanted: [Value; N]) -> Vec<Value> {
        let mut parameters = Vec::from(budget_parameters(now, &self.zone));
        parameters.push(now.into());
        parameters.extend(wanted);
        parameters
    }

    /// Changes a key's name and terms with `edit`, all of it or nothing.
    pub fn change(
        &self,
        id: &str,
        edit: impl Fn(&mut Key) + Send + 'static,
        by: &Actor,
    ) -> Result<KeyChanged> {
        let zone = self.zone.clone();
        let change = move |session: &Session, before: &Key, note: Note| {
            let mut after = before.clone();
            edit(&mut after);
            let mut key = after.terms.values(&after.name);
            if key == before.terms.values(&before.name) {
                return Ok(KeyChanged::Done);
            }
            key.extend(values![&before.id]);
            session.execute(
                "UPDATE keys SET name = $1, permissions = $2, expires = $3, concurrent = $4, budget = $5, budget_per = $6
                 WHERE id = $7",
                &key,
            )?;
            note(&before.differences(&after, &zone))
        };
        self.change_locked("key_changed", id, when::now(), by, change)
    }

    /// Gives a key another secret. The present one works for `overlap` seconds more, and one that
    /// was replaced before it ends now. A revoked key keeps its secret; so does, with an overlap,
    /// one that has an overlap: a second attempt would end the secret that is in use.
    pub fn rotate(
        &self,
        id: &str,
        secret: &str,
        overlap: Option<i64>,
        now: i64,
        by: &Actor,
    ) -> Result<KeyChanged> {
        let (digest, hint) = (SecretDigest::of(secret).0, hint(secret));
        let ends = now + overlap.unwrap_or(0);
        let ends_at = self.zone.format_minute(Some(ends));
        let rotate = move |session: &Session, key: &Key, note: Note| {
            if key.revoked.is_some() || overlap.is_some() && key.overlap.is_some() {
                return Ok(KeyChanged::Meanwhile(Box::new(key.clone())));
            }
            session.execute(END_OVERLAP, &values![now, &key.id])?;
            let end = "UPDATE key_secrets SET ends = $1 WHERE key_id = $2 AND ends IS NULL";
            session.execute(end, &values![ends, &key.id])?;
            session.execute(INSERT_SECRET, &values![digest, &key.id, &hint, now])?;
            note(&format!(
                "secret: {} → {hint}, the former one ends at {ends_at}",
                key.hint
            ))
        };
        self.change_locked("key_rotated", id, now, by, rotate)
    }

    /// Revokes a key for good, from the next request on, and ends an overlap. One that is revoked
    /// already keeps its time.
    pub fn revoke(&self, id: &str, now: i64, by: &Actor) -> Result<KeyChanged> {
        let revoke = move |session: &Session, key: &Key, note: Note| {
            if key.revoked.is_some() {
                return Ok(KeyChanged::Done);
            }
            let revoke = "UPDATE keys SET revoked = $1 WHERE id = $2";
            session.execute(revoke, &values![now, &key.id])?;
            session.execute(END_OVERLAP, &values![now, &key.id])?;
            note("")
        };
        self.change_locked("key_revoked", id, now, by, revoke)
    }

    /// Changes a key that is locked until the end of the transaction. The change gets the key, and
    /// notes in the audit what it did.
    fn change_locked(
        &self,
        action: &'static str,
        id: &str,
        now: i64,
        by: &Actor,
        change: impl Fn(&Session, &Key, Note) -> Result<KeyChanged> + Send + 'static,
    ) -> Result<KeyChanged> {
        let lock = self.database.row_lock("FOR UPDATE OF keys");
        let find = format!("{} WHERE keys.id = $4 {lock}", self.query());
        let (parameters, zone) = (self.parameters(now, values![id]), self.zone.clone());
        NewAuditRow::new(action, by).transaction(&self.database, move |session, audit| {
            let read = |mut row: Row| read_key(&mut row, &zone);
            let Some(key) = session.first(&find, &parameters, read)? else {
                return Ok(KeyChanged::NoSuchKey);
            };
            change(session, &key, &|details| {
                audit.insert(session, Some((&key.id, &key.name)), details)?;
                Ok(KeyChanged::Done)
            })
        })
    }
}

/// Inserts the row of the audit about a change that was made.
type Note<'a> = &'a dyn Fn(&str) -> Result<KeyChanged>;

const END_OVERLAP: &str = "UPDATE key_secrets SET ends = $1 WHERE key_id = $2 AND ends > $1";

const INSERT_SECRET: &str =
    "INSERT INTO key_secrets (digest, key_id, hint, created) VALUES ($1, $2, $3, $4)";

/// Enough of a secret to recognize it, and far too little to use it: eight of its digits.
fn hint(secret: &str) -> String {
    match (
        secret.get(..8),
        secret.get(secret.len().saturating_sub(4)..),
    ) {
        (Some(begin), Some(end)) if secret.len() >= 36 => format!("{begin}…{end}"),
        _ => "unknown".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::append::tests::write;
    use crate::store::Store;
    use crate::store::tests::Temporary;
    use crate::when::DAY;

    fn name(text: &str) -> KeyName {
        KeyName::parse(text).expect("a good name")
    }

    #[track_caller]
    fn add(store: &Store, secret: &str, text: &str) -> String {
        let id = new_id();
        let added = store
            .keys
            .add(&id, secret, &name(text), &KeyTerms::example(), &by());
        assert!(added.expect("a new key"));
        id
    }

    /// The key of a secret, and when it ends.
    #[track_caller]
    fn found(store: &Store, secret: &str) -> (Key, Option<i64>) {
        let found = store.keys.find(&SecretDigest::of(secret), 5);
        found.expect("a look-up").expect("the key")
    }

    fn by() -> Actor {
        Actor::command("ana".into())
    }

    #[track_caller]
    fn change(store: &Store, id: &str, edit: impl Fn(&mut Key) + Send + 'static) {
        let changed = store.keys.change(id, edit, &by());
        assert!(matches!(changed, Ok(KeyChanged::Done)), "{changed:?}");
    }

    #[test]
    fn a_key_from_its_making_to_its_end() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let digest = SecretDigest::of("secret");
        assert!(store.keys.find(&digest, 5).expect("a look-up").is_none());
        let id = add(store, "secret", "first");
        let (key, ends) = found(store, "secret");
        assert_eq!((&key.id, key.revoked, ends), (&id, None, None));
        assert_eq!(key.terms, KeyTerms::example());
        change(store, &id, |key| key.name = "second".into());
        for now in [7, 8] {
            let revoked = store.keys.revoke(&id, now, &by());
            assert!(matches!(revoked, Ok(KeyChanged::Done)));
        }
        let (key, _) = found(store, "secret");
        assert_eq!((key.name.as_str(), key.revoked), ("second", Some(7)));
        let change_none = store.keys.change("key_none", |_| {}, &by());
        assert!(matches!(change_none, Ok(KeyChanged::NoSuchKey)));
        let revoke_none = store.keys.revoke("key_none", 1, &by());
        assert!(matches!(revoke_none, Ok(KeyChanged::NoSuchKey)));
        let add_again = |id: &str, secret: &str| {
            let terms = KeyTerms::example();
            store.keys.add(id, secret, &name("again"), &terms, &by())
        };
        assert!(
            add_again("key_x", "secret").is_err(),
            "a secret has one key"
        );
        assert!(store.keys.get("key_x").expect("a look-up").is_none());
        assert!(!add_again(&id, "other").expect("no change"), "so has an id");
        let other = store.keys.find(&SecretDigest::of("other"), 5);
        assert!(other.expect("a look-up").is_none());
    }

    #[test]
    fn a_keys_terms_are_changed_together() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let id = add(store, "secret", "x");
        let terms = KeyTerms {
            permissions: vec![Permission::Metrics],
            expires: Some(9),
            concurrent: Some(10_000),
            budget: Budget::parse("1000/day"),
        };
        let wanted = terms.clone();
        change(store, &id, move |key| key.terms = wanted.clone());
        assert_eq!(found(store, "secret").0.terms, terms);
        change(store, &id, |key| key.terms.expires = None);
        let (key, _) = found(store, "secret");
        let without_end = KeyTerms {
            expires: None,
            ..terms
        };
        assert_eq!(key.terms, without_end, "what is not named stays");
        let rows = "SELECT count(*) FROM audit WHERE action = 'key_changed'";
        for _ in 0..2 {
            change(store, &id, |key| {
                key.terms.budget = Budget::parse("1000/month");
            });
            let rows: i64 = store.value(rows);
            assert_eq!(rows, 3, "the budget alone is a change, and once");
        }
    }

    #[test]
    fn a_replaced_secret_ends_at_once_or_after_an_overlap() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let id = add(store, "a", "x");
        let rotate =
            |secret: &str, overlap, now| store.keys.rotate(&id, secret, overlap, now, &by());
        #[track_caller]
        fn check(store: &Store, ends: &[(&str, Option<i64>)]) {
            for (secret, wanted) in ends {
                let (key, end) = found(store, secret);
                assert_eq!((key.name.as_str(), end), ("x", *wanted), "{secret}");
            }
        }
        let now = when::now();
        assert!(matches!(rotate("b", None, now), Ok(KeyChanged::Done)));
        check(store, &[("a", Some(now)), ("b", None)]);
        assert!(matches!(
            rotate("c", Some(60), now + 1),
            Ok(KeyChanged::Done)
        ));
        let overlap = [("a", Some(now)), ("b", Some(now + 61)), ("c", None)];
        check(store, &overlap);
        let key = store.keys.get(&id).expect("a look-up").expect("the key");
        assert_eq!(key.overlap.expect("an overlap").ends, now + 61);
        let again = rotate("d", Some(60), now + 2);
        assert!(matches!(again, Ok(KeyChanged::Meanwhile(_))), "{again:?}");
        check(store, &overlap);
        // Without an overlap, both secrets end; with one after the end of the last, only that.
        assert!(matches!(rotate("d", None, now + 2), Ok(KeyChanged::Done)));
        check(
            store,
            &[("b", Some(now + 2)), ("c", Some(now + 2)), ("d", None)],
        );
        assert!(matches!(
            rotate("e", Some(60), now + 3),
            Ok(KeyChanged::Done)
        ));
        let later = rotate("f", Some(60), now + 63);
        assert!(matches!(later, Ok(KeyChanged::Done)), "{later:?}");
        check(
            store,
            &[("d", Some(now + 63)), ("e", Some(now + 123)), ("f", None)],
        );
        store.keys.revoke(&id, now + 70, &by()).expect("a change");
        check(
            store,
            &[("d", Some(now + 63)), ("e", Some(now + 70)), ("f", None)],
        );
        for overlap in [None, Some(60)] {
            let revoked = rotate("g", overlap, now + 71);
            assert!(
                matches!(revoked, Ok(KeyChanged::Meanwhile(_))),
                "{revoked:?}"
            );
        }
        let missing = store.keys.rotate("key_none", "g", None, now, &by());
        assert!(matches!(missing, Ok(KeyChanged::NoSuchKey)));
    }

    #[test]
    fn a_report_by_name_is_about_every_key_of_that_name() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let (first, second) = (add(store, "a", "twin"), add(store, "b", "twin"));
        store.keys.revoke(&first, 7, &by()).expect("a change");
        // A name in the form of an id, which none can be given.
        let third = add(store, "c", "x");
        store.tamper(&format!(
            "UPDATE keys SET name = '{first}' WHERE id = '{third}'"
        ));
        let named = |text: &str| {
            let keys = store.keys.named(text).expect("a look-up");
            let mut ids: Vec<String> = keys.into_iter().map(|key| key.id).collect();
            ids.sort();
            ids
        };
        let mut twins = [first.clone(), second];
        twins.sort();
        assert_eq!(named("twin"), twins, "a revoked one too");
        assert_eq!(named("Twin"), [""; 0], "a name is exact");
        assert_eq!(named(&first), [first.as_str()], "the id comes first");
    }

    /// A sum that no runtime can have made must not keep its key from being found.
    #[test]
    fn sums_that_were_tampered_with_use_up_a_budget() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let now = when::now();
        write(store, "a", "key_1", now, 200, Some(7));
        write(store, "b", "key_1", now, 400, Some(7));
        store.tamper("UPDATE usage_days SET total_tokens = 9223372036854775807");
        change(store, "key_1", |key| {
            key.terms.budget = Budget::parse("10/day")
        });
        let key = store.keys.find(&SecretDigest::of("key_1"), now);
        let (key, _) = key.expect("a look-up").expect("the key");
        assert!(key.terms.budget.expect("a budget").is_used_up());
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
        assert_eq!(hint(secret), "adr_3f9a…c41d");
        for short in ["", "adr_", "adr_1234567890", "secret"] {
            assert_eq!(hint(short), "unknown", "{short}");
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
        let id = add(&other, "secret", "x");
        assert_eq!(found(&temporary.store, "secret").0.revoked, None);
        other.keys.revoke(&id, 2, &by()).expect("a change");
        assert_eq!(found(&temporary.store, "secret").0.revoked, Some(2));
    }
}
