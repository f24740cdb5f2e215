//! The operator's password, of which only an Argon2id hash is stored.

use argon2::{Algorithm, Argon2, Block, Params, Version};
use rand::TryRng;

use crate::audit::{Actor, NewAuditRow};
use crate::database::{Result, values};
use crate::store::Store;

/// The fewest and the most characters.
const FEWEST: usize = 12;
const MOST: usize = 1024;

/// The cost of a guess. OWASP lists several pairs of equal strength; this one needs the least
/// memory.
const MEMORY_KIB: u32 = 9 * 1024;
const PASSES: u32 = 4;

/// The blocks of 1 KiB that are allocated, though far fewer are touched. The C library returns a
/// block above 32 MiB to the system at once. It keeps a smaller one, and from then on all blocks up
/// to that size, for the thread that freed it: after the sign-ins of an hour the service would use
/// 28 MiB instead of 20.
const ALLOCATED_BLOCKS: usize = 33 * 1024;

/// A password as it is stored: its hash and the parameters of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PasswordHash {
    pub salt: Vec<u8>,
    pub hash: Vec<u8>,
    pub memory_kib: u32,
    pub passes: u32,
}

/// Reads the stored password; `None` if none was set.
pub fn stored(store: &Store) -> Result<Option<PasswordHash>> {
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

/// Sets the password, and ends all sessions. Browsers stay known, which gives no access.
pub fn set(store: &Store, password: PasswordHash, by: &Actor) -> Result<()> {
    let PasswordHash {
        salt,
        hash,
        memory_kib,
        passes,
    } = password;
    let password = values![salt, hash, memory_kib, passes];
    NewAuditRow::new("password_set", by)
        .transaction(&store.database, move |session, audit| {
            session.execute("UPDATE console_browsers SET session_ends = NULL", &[])?;
            session.execute(
                "INSERT INTO console_password VALUES (1, $1, $2, $3, $4) ON CONFLICT (id) DO UPDATE SET
                 salt = excluded.salt, hash = excluded.hash, memory_kib = excluded.memory_kib, passes = excluded.passes",
                &password,
            )?;
            audit.insert(session, None, "")
        })
}

/// Checks the length and the characters of a new password. Returns the message for the operator if
/// it can't be used.
pub fn check(password: &str) -> std::result::Result<(), &'static str> {
    let length = password.chars().count();
    if length < FEWEST {
        return Err(
            "the password has fewer than 12 characters. Choose a longer one: four random words will do.",
        );
    }
    if length > MOST || password.chars().any(char::is_control) {
        return Err(
            "the password has more than 1024 characters, or some that can't be typed. Choose another.",
        );
    }
    Ok(())
}

pub fn hash(password: &str) -> PasswordHash {
    let mut salt = vec![0; 16];
    rand::rngs::SysRng
        .try_fill_bytes(&mut salt)
        .expect("the operating system should give random bytes");
    let hash = derive(password, &salt, MEMORY_KIB, PASSES).expect("the parameters should be good");
    PasswordHash {
        salt,
        hash,
        memory_kib: MEMORY_KIB,
        passes: PASSES,
    }
}

/// Compares a password with the stored hash, which takes some hundredths of a second and 9 MiB.
pub fn verify(password: &str, stored: &PasswordHash) -> bool {
    let Some(found) = derive(password, &stored.salt, stored.memory_kib, stored.passes) else {
        return false;
    };
    // Every byte is compared, so that the time does not depend on the number of wrong ones.
    let differences = found
        .iter()
        .zip(&stored.hash)
        .fold(0, |all, (a, b)| all | (a ^ b));
    found.len() == stored.hash.len() && differences == 0
}

fn derive(password: &str, salt: &[u8], memory_kib: u32, passes: u32) -> Option<Vec<u8>> {
    let mut out = vec![0; 32];
    let params = Params::new(memory_kib, passes, 1, Some(out.len())).ok()?;
    let mut memory = Vec::with_capacity(ALLOCATED_BLOCKS.max(params.block_count()));
    memory.resize(params.block_count(), Block::default());
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
        .hash_password_into_with_memory(password.as_bytes(), salt, &mut out, &mut memory)
        .ok()?;
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::Temporary;

    impl PasswordHash {
        /// A hash that no password has.
        pub fn example(byte: u8) -> Self {
            Self {
                salt: vec![byte],
                hash: vec![byte],
                memory_kib: 8,
                passes: 1,
            }
        }
    }

    #[test]
    fn the_password_that_was_set_last_is_stored() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let stored = || stored(store).expect("a look-up");
        assert_eq!(stored(), None);
        for password in [1, 2].map(PasswordHash::example) {
            set(store, password.clone(), &Actor::command("ana".into())).expect("a password");
            assert_eq!(stored(), Some(password));
        }
    }

    #[test]
    fn passwords_that_can_be_used() {
        for good in [
            "twelve chars",
            "ünïcödé wörd",
            "correct horse battery staple",
            &"x".repeat(1024),
        ] {
            assert!(check(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "eleven char",
            "ééééééééééé",
            "tab\tin the middle",
            &"x".repeat(1025),
        ] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn one_password_and_no_other() {
        let stored = hash("correct horse battery staple");
        assert!(verify("correct horse battery staple", &stored));
        for wrong in [
            "",
            "correct horse battery stapl",
            "Correct horse battery staple",
        ] {
            assert!(!verify(wrong, &stored), "{wrong}");
        }
        assert_ne!(
            hash("correct horse battery staple").hash,
            stored.hash,
            "every hash has its own salt"
        );
        assert!(!format!("{stored:?}").contains("horse"));
        assert!(!verify(
            "correct horse battery staple",
            &PasswordHash {
                hash: vec![],
                ..stored
            }
        ));
    }
}
