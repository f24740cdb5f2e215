//! The console's password and sessions.

use crate::audit::{Actor, NewAuditRow};
use crate::database::{Result, values};
use crate::secret::SecretDigest;
use crate::store::Store;

/// The maximum number of known browsers.
const KNOWN_BROWSERS: i64 = 32;

/// A password as it is stored: its Argon2id hash and the parameters of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PasswordHash {
    pub salt: Vec<u8>,
    pub hash: Vec<u8>,
    pub memory_kib: u32,
    pub passes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Its holder is signed in.
    Session,
    /// The operator has signed in from this browser before. It gives no access.
    Browser,
}

impl TokenKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Session => "session",
            Self::Browser => "browser",
        }
    }
}

pub fn password(store: &Store) -> Result<Option<PasswordHash>> {
    let select = "SELECT salt, hash, memory_kib, passes FROM console_password";
    store.database.look_up(select, &[], |mut row| {
        Ok(PasswordHash {
            salt: row.column()?,
            hash: row.column()?,
            memory_kib: row.column()?,
            passes: row.column()?,
        })
    })
}

/// Sets the password, and ends all sessions. Browsers stay known: their tokens give no access, only
/// attempts of their own.
pub fn set_password(store: &Store, password: PasswordHash, by: &Actor) -> Result<()> {
    let PasswordHash {
        salt,
        hash,
        memory_kib,
        passes,
    } = password;
    let password = values![salt, hash, memory_kib, passes];
    NewAuditRow::new("password_set", by)
        .transaction(&store.database, move |session, audit| {
            session.execute("DELETE FROM console_tokens WHERE kind = 'session'", &[])?;
            session.execute(
                "INSERT INTO console_password VALUES (1, $1, $2, $3, $4) ON CONFLICT (id) DO UPDATE SET
                 salt = excluded.salt, hash = excluded.hash, memory_kib = excluded.memory_kib, passes = excluded.passes",
                &password,
            )?;
            audit.insert(session, None, "")
        })
}

/// Stores the tokens of a sign-in with the seconds that each is valid, the session's first, and
/// removes expired ones. The token of a known browser is valid for longer then. Returns false if
/// the password is not the one that was verified any more.
pub fn sign_in(
    store: &Store,
    tokens: [(SecretDigest, TokenKind, i64); 2],
    now: i64,
    password: &PasswordHash,
    by: &Actor,
) -> Result<bool> {
    let hash = password.hash.clone();
    NewAuditRow::new("signed_in", by).transaction(&store.database, move |session, audit| {
        let expired = "DELETE FROM console_tokens WHERE expires <= $1";
        session.execute(expired, &values![now])?;
        for (digest, kind, time) in tokens {
            let insert =
                "INSERT INTO console_tokens SELECT $1, $2, $3 FROM console_password WHERE hash = $4
                    ON CONFLICT (digest) DO UPDATE SET expires = excluded.expires";
            let token = values![digest.0, kind.as_str(), now + time, &hash];
            if session.execute(insert, &token)? == 0 {
                return Ok(false);
            }
        }
        audit.insert(session, None, "")?;
        Ok(true)
    })
}

pub fn has_session(store: &Store, digest: &SecretDigest, now: i64) -> Result<bool> {
    let statement =
        "SELECT count(*) FROM console_tokens WHERE digest = $1 AND kind = $2 AND expires > $3";
    let parameters = values![digest.0, TokenKind::Session.as_str(), now];
    let count: i64 = store
        .database
        .read(|session| session.value(statement, &parameters))?;
    Ok(count > 0)
}

/// The browsers that the operator signed in with last. Each has attempts of its own, so their
/// number is limited: a person who knew an old password may have signed in with any number of them.
pub fn known_browsers(store: &Store, now: i64) -> Result<Vec<SecretDigest>> {
    let statement = "SELECT digest FROM console_tokens WHERE kind = $1 AND expires > $2
                     ORDER BY expires DESC LIMIT $3";
    let parameters = values![TokenKind::Browser.as_str(), now, KNOWN_BROWSERS];
    store.database.read(|session| {
        session.rows(statement, &parameters, |mut row| {
            row.column().map(SecretDigest)
        })
    })
}

pub fn remove_token(store: &Store, digest: SecretDigest) -> Result<()> {
    store.database.transaction(None, move |session| {
        let remove = "DELETE FROM console_tokens WHERE digest = $1";
        session.execute(remove, &values![digest.0]).map(drop)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::Temporary;

    #[test]
    fn a_token_from_its_making_to_its_end() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let by = Actor::console("192.0.2.1".into());
        let password = PasswordHash {
            salt: vec![1; 16],
            hash: vec![2; 32],
            memory_kib: 8,
            passes: 1,
        };
        let (session, browser) = (SecretDigest::of("one"), SecretDigest::of("other"));
        let tokens = [
            (session, TokenKind::Session, 9),
            (browser, TokenKind::Browser, 98),
        ];
        assert!(super::password(store).expect("a look-up").is_none());
        assert!(!sign_in(store, tokens, 1, &password, &by).expect("no password is set"));
        set_password(store, password.clone(), &by).expect("a password");
        assert_eq!(
            super::password(store).expect("a look-up"),
            Some(password.clone())
        );
        assert!(sign_in(store, tokens, 1, &password, &by).expect("a sign-in"));
        let is_signed_in =
            |digest: &SecretDigest, now| has_session(store, digest, now).expect("a look-up");
        let is_known = |digest: &SecretDigest, now| {
            let browsers = known_browsers(store, now).expect("a look-up");
            browsers.contains(digest)
        };
        assert!(
            is_signed_in(&session, 9) && !is_signed_in(&session, 10),
            "until it expires"
        );
        assert!(is_known(&browser, 98));
        assert!(
            !is_signed_in(&browser, 9),
            "a browser that is known is not signed in"
        );
        remove_token(store, session).expect("a sign-out");
        assert!(!is_signed_in(&session, 9));
        let changed = PasswordHash {
            hash: vec![3; 32],
            ..password.clone()
        };
        assert!(sign_in(store, tokens, 1, &password, &by).expect("a second sign-in"));
        set_password(store, changed.clone(), &by).expect("another password");
        assert!(
            !is_signed_in(&session, 9),
            "another password ends the sessions"
        );
        assert!(is_known(&browser, 9), "the browser stays known");
        assert!(!sign_in(store, tokens, 1, &password, &by).expect("the old password"));
        assert!(sign_in(store, tokens, 11, &changed, &by).expect("the new password"));
        assert!(is_known(&browser, 108), "its time starts again");
    }

    #[test]
    fn the_browsers_that_signed_in_last_are_known() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let by = Actor::console("192.0.2.1".into());
        let password = PasswordHash {
            salt: vec![1; 16],
            hash: vec![2; 32],
            memory_kib: 8,
            passes: 1,
        };
        set_password(store, password.clone(), &by).expect("a password");
        let browser = |number: i64| SecretDigest::of(&format!("browser {number}"));
        let sign_in = |number: i64, now: i64| {
            let session = SecretDigest::of(&format!("session {now}"));
            let tokens = [
                (session, TokenKind::Session, 9),
                (browser(number), TokenKind::Browser, 1000),
            ];
            assert!(sign_in(store, tokens, now, &password, &by).expect("a sign-in"));
        };
        (0..=KNOWN_BROWSERS).for_each(|number| sign_in(number, number));
        let known = known_browsers(store, 100).expect("a look-up");
        assert_eq!(known.len() as i64, KNOWN_BROWSERS);
        assert!(!known.contains(&browser(0)) && known.contains(&browser(1)));
        sign_in(0, 200);
        let known = known_browsers(store, 200).expect("a look-up");
        assert!(known.contains(&browser(0)) && !known.contains(&browser(1)));
        assert_eq!(
            known_browsers(store, 1200).expect("a look-up"),
            [],
            "until they expire"
        );
    }
}
