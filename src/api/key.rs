//! The key of the `Authorization` header.

use crate::error::{ApiError, Failure, FailureCause};
use crate::http::RequestHead;
use crate::id::has_shape;
use crate::secret::SecretDigest;
use crate::store::{KeyBudget, Permission, Store};
use crate::when;

/// The prefix of a secret, and the number of hexadecimal digits after it.
pub const SECRET_PREFIX: &str = "adr_";
pub const SECRET_DIGITS: usize = 48;

/// The precision of a key's last use, in seconds: a write for every request would cost more than it is worth.
const LAST_USE_PRECISION: i64 = 60;

/// The holder of a valid key.
#[derive(Debug)]
pub struct Caller {
    pub key_id: String,
    pub key_name: String,
    pub permissions: Vec<Permission>,
    /// The limit on concurrent requests of the key.
    pub concurrent: Option<u32>,
    pub budget: Option<KeyBudget>,
    /// `last_used` has to be written for this use.
    pub note_use: bool,
}

/// Looks up a key. Any process may change it at any time: whether a request is run is decided when the ledger inserts
/// its open row. The budget is that of a request that was created at this time.
pub fn authenticate(digest: &SecretDigest, store: &Store, created: i64) -> Result<Caller, Failure> {
    let now = when::now();
    let key = store.find_key(digest, created).map_err(|error| {
        let message = "The API keys can't be read at the moment. Try again later.";
        Failure::unavailable(error.cause(), message, error.details("keys"))
    })?;
    let key = key.ok_or_else(|| {
        refused(FailureCause::UnknownKey, "There is no such API key. Check that it was copied whole.")
    })?;
    if key.revoked.is_some() {
        let failure = refused(FailureCause::Revoked, "This API key was revoked. Ask for a new one.");
        return Err(Failure { key_id: Some(key.id), ..failure });
    }
    if key.expires.is_some_and(|expires| expires <= now) {
        let failure = refused(FailureCause::Expired, "This API key has expired. Ask for a new one.");
        return Err(Failure { key_id: Some(key.id), ..failure });
    }
    Ok(Caller {
        key_id: key.id,
        key_name: key.name,
        permissions: key.permissions,
        concurrent: key.concurrent,
        budget: key.budget,
        note_use: key.last_used.is_none_or(|last| (now - last).abs() >= LAST_USE_PRECISION),
    })
}

/// The failure of a request whose key was refused, and is valid when it is looked up.
pub fn changed() -> Failure {
    refused(FailureCause::KeyChanged, "This API key was changed a moment ago. Try again.")
}

/// The digest of the key that a request presents, which may not exist.
pub fn digest(head: &RequestHead) -> Result<SecretDigest, Failure> {
    bearer(head).map(SecretDigest::of)
}

/// The secret of the `Authorization` header. There has to be exactly one.
fn bearer(head: &RequestHead) -> Result<&str, Failure> {
    let mut values = head.header("authorization");
    let value = values.next().ok_or_else(|| {
        refused(
            FailureCause::NoKey,
            "There is no Authorization header. Send Authorization: Bearer <API_KEY>.",
        )
    })?;
    if values.next().is_some() {
        return Err(refused(FailureCause::NoKey, "There are two Authorization headers. Send one."));
    }
    str::from_utf8(value)
        .ok()
        .and_then(|text| text.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, secret)| secret.trim_start_matches(' '))
        .filter(|secret| has_shape(secret, SECRET_PREFIX, SECRET_DIGITS))
        .ok_or_else(|| {
            refused(
                FailureCause::NoKey,
                "The API key is malformed. Send Authorization: Bearer, a space, and the key as it was given.",
            )
        })
}

fn refused(cause: FailureCause, message: &'static str) -> Failure {
    Failure::new(ApiError::InvalidApiKey, cause, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "adr_0123456789abcdef0123456789abcdef0123456789abcdef";

    fn head(authorizations: &[&str]) -> RequestHead {
        let lines: String = authorizations.iter().map(|a| format!("Authorization: {a}\r\n")).collect();
        RequestHead::parse(format!("POST / HTTP/1.1\r\nHost: h\r\n{lines}\r\n").as_bytes())
            .expect("a good head")
    }

    #[test]
    fn authorization_headers() {
        for value in ["Bearer KEY", "bearer KEY", "BEARER  KEY", "Bearer KEY  "] {
            let head = head(&[&value.replace("KEY", SECRET)]);
            assert_eq!(bearer(&head).expect(value), SECRET);
        }
        let bad = ",Bearer,Bearer ,KEY,Basic KEY,BearerKEY,Bearer\tKEY,Bearer KEYx,Bearer KEY KEY,Bearer xKEY,Bearer adr_,Bearer \"KEY\"";
        for value in bad.split(',') {
            let head = head(&[&value.replace("KEY", SECRET)]);
            let failure = bearer(&head).expect_err(value);
            assert_eq!(failure.error, ApiError::InvalidApiKey);
            assert!(!failure.message.contains("0123456789"), "the key is repeated");
        }
        let authorization = format!("Bearer {SECRET}");
        assert!(bearer(&head(&[&authorization, &authorization])).is_err());
        assert!(bearer(&head(&[&authorization.replace("abc", "ABC")])).is_err());
        assert!(bearer(&head(&[])).is_err());
    }
}
