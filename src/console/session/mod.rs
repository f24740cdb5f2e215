//! Signing in: the password, the cookies, known browsers, and the throttle of failed attempts.

pub mod browsers;
pub mod cookies;
pub mod credentials;
pub mod password;
pub mod sign_in;
pub mod throttle;
