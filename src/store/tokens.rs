//! Who may see the console: the operator's password, and the tokens of those who knew it.

use rusqlite::OptionalExtension;

use super::{Digest, Store, StoreError};

/// A password as it is kept: what Argon2id made of it, and with what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PasswordHash {
    pub salt: Vec<u8>,
    pub hash: Vec<u8>,
    pub memory_kib: u32,
    pub passes: u32,
}

/// What a token is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Whoever has it is signed in.
    Session,
    /// The operator has signed in from there before.
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
        self.read(|connection| {
            connection
                .query_row("SELECT salt, hash, memory_kib, passes FROM console_password", [], |row| {
                    Ok(PasswordHash {
                        salt: row.get(0)?,
                        hash: row.get(1)?,
                        memory_kib: row.get(2)?,
                        passes: row.get(3)?,
                    })
                })
                .optional()
        })
    }

    /// Sets the password, and ends what was begun with another.
    pub fn set_console_password(&self, password: PasswordHash) -> Result<(), StoreError> {
        self.write_synced(move |connection| {
            connection.execute("DELETE FROM console_tokens", [])?;
            connection.execute(
                "REPLACE INTO console_password VALUES (1, ?, ?, ?, ?)",
                rusqlite::params![password.salt, password.hash, password.memory_kib, password.passes],
            )?;
            Ok(())
        })
    }

    /// Keeps a token until it expires, and forgets those that have, where the password is still the one that it
    /// was given for; whether it is.
    pub fn add_token(
        &self,
        digest: Digest,
        kind: TokenKind,
        expires: i64,
        now: i64,
        password: &PasswordHash,
    ) -> Result<bool, StoreError> {
        let hash = password.hash.clone();
        self.write_synced(move |connection| {
            connection.execute("DELETE FROM console_tokens WHERE expires <= ?", [now])?;
            let added = connection.execute(
                "INSERT INTO console_tokens SELECT ?, ?, ? FROM console_password WHERE hash = ?",
                rusqlite::params![digest.0, kind.as_str(), expires, hash],
            )?;
            Ok(added == 1)
        })
    }

    pub fn has_token(&self, digest: &Digest, kind: TokenKind, now: i64) -> Result<bool, StoreError> {
        self.read(|connection| {
            connection
                .prepare_cached(
                    "SELECT EXISTS (SELECT 1 FROM console_tokens WHERE digest = ? AND kind = ? AND expires > ?)",
                )?
                .query_row(rusqlite::params![digest.0, kind.as_str(), now], |row| row.get(0))
        })
    }

    pub fn remove_token(&self, digest: Digest) -> Result<(), StoreError> {
        self.write_synced(move |connection| {
            connection.execute("DELETE FROM console_tokens WHERE digest = ?", [digest.0])?;
            Ok(())
        })
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
