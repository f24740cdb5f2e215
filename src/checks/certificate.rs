//! The certificate and its key: whether they match, and when the certificate expires.

use super::Finding;
use crate::config::TlsFiles;
use crate::listener::{Certificate, TlsError};
use crate::text::count;
use crate::when;

/// A certificate should be renewed this many days before it expires: one that is valid for a month is renewed after 20 days.
const RENEWAL_DAYS: i64 = 10;

const RENEW: &str = "Renew it, then reload the service";

/// Returns true if a certificate should have been renewed by now.
pub fn is_expiring(expires: i64, now: i64) -> bool {
    (expires - now).div_euclid(86_400) < RENEWAL_DAYS
}

pub fn check(files: &TlsFiles) -> Finding {
    match read_certificate(files) {
        Err(message) => Finding::fail("tls", message),
        Ok(certificate) => match certificate.expires() {
            None => Finding::ok("tls", "the certificate and its key match"),
            Some(expires) => expiry(expires, when::now()),
        },
    }
}

fn expiry(expires: i64, now: i64) -> Finding {
    let (date, days) = (when::format_utc(expires), (expires - now).div_euclid(86_400));
    let left = format!("expires at {date}, in {}", count(days, "day"));
    match days {
        ..0 => Finding::fail("tls", format!("the certificate expired at {date}. {RENEW}")),
        0..RENEWAL_DAYS => Finding::warn("tls", format!("the certificate {left}. {RENEW}")),
        _ => Finding::ok("tls", format!("the certificate and its key match; it {left}")),
    }
}

pub fn read_certificate(files: &TlsFiles) -> Result<Certificate, String> {
    Certificate::read(&files.cert, &files.key).map_err(|error| {
        let (setting, path, cause) = match error {
            TlsError::Certificate(cause) => ("tls.cert", &files.cert, cause),
            TlsError::Key(cause) => ("tls.key", &files.key, cause),
        };
        format!("{setting} = {:?}: {cause}. Expected a PEM file.", path)
    })
}

/// The same for a reload, which keeps the present certificate if the new one has expired.
pub fn read_unexpired(files: &TlsFiles) -> Result<Certificate, String> {
    let certificate = read_certificate(files)?;
    match certificate.expires() {
        Some(expires) if expires <= when::now() => Err(format!(
            "tls.cert = {:?}: the certificate expired at {}. {RENEW}.",
            files.cert,
            when::format_utc(expires)
        )),
        _ => Ok(certificate),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::Verdict;

    #[test]
    fn a_certificate_is_to_be_renewed_in_time() {
        for (days, status, message) in [
            (-1, Verdict::Fail, "expired at 1970-04-10"),
            (0, Verdict::Warn, "in 0 days"),
            (9, Verdict::Warn, "in 9 days. Renew it"),
            (10, Verdict::Ok, "in 10 days"),
        ] {
            let finding = expiry((100 + days) * 86_400, 100 * 86_400);
            assert!(finding.status == status && finding.message.contains(message), "{}", finding.message);
        }
    }
}
