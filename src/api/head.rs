//! What the head of a request decides: its host, its route, its declared size and the form of its
//! key.

use crate::error::{ApiError, Failure, FailureCause};
use crate::http::{Framing, MAX_BODY, Request, RequestHead};
use crate::id::has_shape;
use crate::secret::{SECRET_DIGITS, SECRET_PREFIX, SecretDigest};

/// The one model.
pub const MODEL: &str = "adriaticum";

const MODELS: &str = "/v1/models";
pub const MODEL_PATH: &str = "/v1/models/adriaticum";

/// Runs the steps that need only the head, before any of the body is read. Returns the digest of the
/// key, which may not exist.
/// With `lenient`, the models are served as well.
pub fn check(
    head: &RequestHead,
    api_hosts: &[String],
    lenient: bool,
) -> Result<SecretDigest, Failure> {
    let is_ours = |host: &String| host.eq_ignore_ascii_case(head.host());
    if !api_hosts.iter().any(is_ours) {
        let message =
            "The API is not served on this host. Check the base address that you were given.";
        let details = format!(
            "the client used a name or address that is not one of api_hosts ({}). If the API is to be served there, add it",
            api_hosts.join(", ")
        );
        return Err(Failure {
            details: Some(details),
            ..not_found(FailureCause::Host, message)
        });
    }
    let is_completion = (head.method(), head.path()) == ("POST", "/v1/chat/completions");
    let is_known = is_completion || lenient && asks_for_models(head);
    if !is_known {
        let message = "Not found. The API has one operation: POST /v1/chat/completions.";
        return Err(not_found(FailureCause::Route, message));
    }
    match head.framing {
        Framing::Length(length) if length > MAX_BODY as u64 => Err(too_large()),
        _ => digest(head),
    }
}

/// Returns whether a request is for the list of models, or for the one model.
pub fn asks_for_models(head: &RequestHead) -> bool {
    let path = head.path();
    head.method() == "GET" && (path == MODELS || path == MODEL_PATH)
}

/// Returns the body, if it is not too large.
pub fn body(request: &Request) -> Result<&[u8], Failure> {
    request.body.as_deref().ok_or_else(too_large)
}

/// The digest of the key in the `Authorization` header, of which there has to be exactly one.
pub fn digest(head: &RequestHead) -> Result<SecretDigest, Failure> {
    let refuse =
        |message: &'static str| Failure::new(ApiError::InvalidApiKey, FailureCause::NoKey, message);
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

fn not_found(cause: FailureCause, message: &'static str) -> Failure {
    Failure::new(ApiError::NotFound, cause, message)
}

fn too_large() -> Failure {
    let message = format!(
        "The request body is larger than {MAX_BODY} bytes. Send fewer or shorter messages."
    );
    Failure::new(ApiError::PayloadTooLarge, FailureCause::TooLarge, message)
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
