//! The console's password and sessions.

use super::engine::{Statement, Write, values};
use super::{Digest, Store, StoreError};

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
    /// The operator has signed in from this browser before.
    Browser,
}

impl TokenKind {
    fn as_str(self) -> &'static str {
        match self {
            Self::Session => "session",
            Self::Browser => "browser",
        }
    }
}

impl Store {
    pub fn console_password(&self) -> Result<Option<PasswordHash>, StoreError> {
        let statement = "SELECT salt, hash, memory_kib, passes FROM console_password";
        self.engine.read(|session| {
            session.first(statement, &[], |mut row| {
                Ok(PasswordHash {
                    salt: row.next()?,
                    hash: row.next()?,
                    memory_kib: row.next()?,
                    passes: row.next()?,
                })
            })
        })
    }

    /// Sets the password, and ends all sessions.
    pub fn set_console_password(&self, password: PasswordHash) -> Result<(), StoreError> {
        let PasswordHash { salt, hash, memory_kib, passes } = password;
        let statements = vec![
            Statement::new("DELETE FROM console_tokens", []),
            Statement::new(
                "INSERT INTO console_password VALUES (1, $1, $2, $3, $4) ON CONFLICT (id) DO UPDATE SET
                 salt = excluded.salt, hash = excluded.hash, memory_kib = excluded.memory_kib, passes = excluded.passes",
                values![salt, hash, memory_kib, passes],
            ),
        ];
        self.engine.write(Write { statements, durable: true }).map(drop)
    }

    /// Stores a token until it expires, and removes the expired ones. Returns false if the password is not the one that
    /// it was issued for any more.
    pub fn add_token(
        &self,
        digest: Digest,
        kind: TokenKind,
        expires: i64,
        now: i64,
        password: &PasswordHash,
    ) -> Result<bool, StoreError> {
        let statements = vec![
            Statement::new("DELETE FROM console_tokens WHERE expires <= $1", values![now]),
            Statement::new(
                "INSERT INTO console_tokens SELECT $1, $2, $3 FROM console_password WHERE hash = $4",
                values![digest.bytes(), kind.as_str(), expires, password.hash.as_slice()],
            )
            .settled_by("SELECT 1 FROM console_tokens WHERE digest = $1", values![digest.bytes()]),
        ];
        Ok(self.engine.write(Write { statements, durable: true })? == 1)
    }

    pub fn has_token(&self, digest: &Digest, kind: TokenKind, now: i64) -> Result<bool, StoreError> {
        let statement =
            "SELECT count(*) FROM console_tokens WHERE digest = $1 AND kind = $2 AND expires > $3";
        let count: i64 = self
            .engine
            .read(|session| session.value(statement, &values![digest.bytes(), kind.as_str(), now]))?;
        Ok(count > 0)
    }

    pub fn remove_token(&self, digest: Digest) -> Result<(), StoreError> {
        let remove = "DELETE FROM console_tokens WHERE digest = $1";
        self.write_durable(Statement::new(remove, values![digest.bytes()])).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Temporary;
    use super::*;

    #[test]
    fn a_token_from_its_making_to_its_end() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let password = PasswordHash { salt: vec![1; 16], hash: vec![2; 32], memory_kib: 8, passes: 1 };
        let (one, other) = (Digest::of("one"), Digest::of("other"));
        assert!(store.console_password().expect("a look-up").is_none());
        assert!(!store.add_token(one, TokenKind::Session, 10, 1, &password).expect("no password is set"));
        store.set_console_password(password.clone()).expect("a password");
        assert_eq!(store.console_password().expect("a look-up"), Some(password.clone()));
        assert!(store.add_token(one, TokenKind::Session, 10, 1, &password).expect("a token"));
        assert!(store.add_token(other, TokenKind::Browser, 99, 1, &password).expect("a token"));
        let has = |digest: &Digest, kind, now| store.has_token(digest, kind, now).expect("a look-up");
        assert!(has(&one, TokenKind::Session, 9) && !has(&one, TokenKind::Session, 10), "until it expires");
        assert!(!has(&other, TokenKind::Session, 9), "a browser that is known is not signed in");
        store.remove_token(one).expect("a sign-out");
        assert!(!has(&one, TokenKind::Session, 9));
        let changed = PasswordHash { hash: vec![3; 32], ..password.clone() };
        store.set_console_password(changed).expect("another password");
        assert!(!has(&other, TokenKind::Browser, 9), "another password ends them all");
        assert!(!store.add_token(one, TokenKind::Session, 10, 1, &password).expect("the old password"));
    }
}
