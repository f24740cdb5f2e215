//! The key of the `Authorization` header.

use crate::error::{ApiError, Failure, FailureCause};
use crate::http::RequestHead;
use crate::id::has_shape;
use crate::keys::{Key, KeyState};
use crate::secret::{SECRET_DIGITS, SECRET_PREFIX, SecretDigest};
use crate::store::Store;
use crate::when;

/// Looks up a key, as the last commit of any process left it, and checks revocation and expiry. The
/// budget is that of a request that was created at this time.
pub fn authenticate(digest: &SecretDigest, store: &Store, created: i64) -> Result<Key, Failure> {
    let key = store.keys.find(digest, created).map_err(|error| {
        let message = "The API keys can't be read at the moment. Try again later.";
        Failure::unavailable(error.cause(), message, error.details("keys"))
    })?;
    let Some(key) = key else {
        let message = "There is no such API key. Check that it was copied whole.";
        return Err(refused(FailureCause::UnknownKey, message));
    };
    match key.state(when::now()) {
        KeyState::Active | KeyState::Expiring => Ok(key),
        KeyState::Revoked => Err(revoked_failure(key.id)),
        KeyState::Expired => Err(Failure {
            key_id: Some(key.id),
            ..refused(
                FailureCause::Expired,
                "This API key has expired. Ask for a new one.",
            )
        }),
    }
}

pub fn revoked_failure(key_id: String) -> Failure {
    let message = "This API key was revoked. Ask for a new one.";
    Failure {
        key_id: Some(key_id),
        ..refused(FailureCause::Revoked, message)
    }
}

/// The digest of the key in the `Authorization` header, of which there has to be exactly one. The
/// key may not exist.
pub fn digest(head: &RequestHead) -> Result<SecretDigest, Failure> {
    let refuse = |message| refused(FailureCause::NoKey, message);
    let mut values = head.header("authorization");
    let missing = "There is no Authorization header. Send Authorization: Bearer <API_KEY>.";
    let value = values.next().ok_or_else(|| refuse(missing))?;
    if values.next().is_some() {
        return Err(refuse("There are two Authorization headers. Send one."));
    }
    let malformed = "The API key is malformed. Send Authorization: Bearer, a space, and the key as it was given.";
    str::from_utf8(value)
        .ok()
        .and_then(|text| text.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, secret)| secret.trim_start_matches(' '))
        .filter(|secret| has_shape(secret, SECRET_PREFIX, SECRET_DIGITS))
        .map(SecretDigest::of)
        .ok_or_else(|| refuse(malformed))
}

fn refused(cause: FailureCause, message: &'static str) -> Failure {
    Failure::new(ApiError::InvalidApiKey, cause, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "adr_0123456789abcdef0123456789abcdef0123456789abcdef";

    fn head(authorizations: &[&str]) -> RequestHead {
        let lines: String = authorizations
            .iter()
            .map(|a| format!("Authorization: {a}\r\n"))
            .collect();
        RequestHead::parse(format!("POST / HTTP/1.1\r\nHost: h\r\n{lines}\r\n").as_bytes())
            .expect("a good head")
    }

    #[test]
    fn authorization_headers() {
        for value in ["Bearer KEY", "bearer KEY", "BEARER  KEY", "Bearer KEY  "] {
            let head = head(&[&value.replace("KEY", SECRET)]);
            assert_eq!(digest(&head).expect(value), SecretDigest::of(SECRET));
        }
        let bad = ",Bearer,Bearer ,KEY,Basic KEY,BearerKEY,Bearer\tKEY,Bearer KEYx,Bearer KEY KEY,Bearer xKEY,Bearer adr_,Bearer \"KEY\"";
        for value in bad.split(',') {
            let head = head(&[&value.replace("KEY", SECRET)]);
            let failure = digest(&head).expect_err(value);
            assert_eq!(failure.error, ApiError::InvalidApiKey);
            assert!(
                !failure.message.contains("0123456789"),
                "the key is repeated"
            );
        }
        let authorization = format!("Bearer {SECRET}");
        assert!(digest(&head(&[&authorization, &authorization])).is_err());
        assert!(digest(&head(&[&authorization.replace("abc", "ABC")])).is_err());
        assert!(digest(&head(&[])).is_err());
    }
}
