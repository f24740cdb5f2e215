//! The cookies of the console, and the token that protects its forms.

use crate::http::{ClientInfo, RequestHead};
use crate::secret::SecretDigest;

pub const SESSION: &str = "adriaticum_session";
pub const BROWSER: &str = "adriaticum_browser";
pub const VISITOR: &str = "adriaticum_visitor";

/// With this prefix, a browser accepts the cookie over HTTPS and from this host only: neither a
/// page of another host nor a forged response over plain HTTP can replace it.
const HOST_PREFIX: &str = "__Host-";

pub fn find<'a>(client: ClientInfo, head: &'a RequestHead, name: &str) -> Option<&'a str> {
    let name = full_name(client, name);
    head.header("cookie")
        .filter_map(|line| str::from_utf8(line).ok())
        .flat_map(|line| line.split(';'))
        .filter_map(|pair| pair.trim().split_once('='))
        .find(|(known, _)| **known == name)
        .map(|(_, value)| value)
}

/// The digest of the token in a cookie, which may be unknown.
pub fn digest(client: ClientInfo, head: &RequestHead, name: &str) -> Option<SecretDigest> {
    find(client, head, name).map(SecretDigest::of)
}

/// A `Set-Cookie` line. 0 seconds delete the cookie.
pub fn set_line(client: ClientInfo, name: &str, value: &str, seconds: i64) -> String {
    let name = full_name(client, name);
    // A cookie that was set over HTTPS is sent over HTTPS only.
    let secure = if client.secure { "; Secure" } else { "" };
    format!("{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}")
}

fn full_name(client: ClientInfo, name: &str) -> String {
    let prefix = if client.secure { HOST_PREFIX } else { "" };
    format!("{prefix}{name}")
}

/// The token of a form, derived from a cookie, so that no other site can know it. The cookie can't
/// be derived from it.
pub fn form_token(cookie: &str) -> String {
    hex::encode(SecretDigest::of(&format!("form {cookie}")).0)
}
