//! Reads the certificate and its key, and judges the certificate's validity.

use super::finding::{Finding, Verdict};
use crate::config::TlsFiles;
use crate::database::{Problem, ProblemKind, Result};
use crate::listener::{Certificate, TlsError};
use crate::text::count;
use crate::when;

/// A certificate should be renewed this many days before it expires: one that is valid for a month
/// is renewed after 20 days.
const RENEWAL_DAYS: i64 = 10;

pub fn check(files: &TlsFiles) -> Finding {
    match read_certificate(files) {
        Err(problem) => Finding::fail("tls", problem.text),
        Ok(certificate) => judge_certificate(&certificate, when::now())
            .unwrap_or_else(|| Finding::ok("tls", "the certificate and its key match")),
    }
}

/// Warns about a certificate that clients refuse, or will soon. A start, a reload and a running
/// service accept it all the same: without it no client could connect, and a client may be
/// configured to ignore it.
pub fn certificate_warning(certificate: &Certificate) -> Option<String> {
    let finding = judge_certificate(certificate, when::now())?;
    (finding.status != Verdict::Ok)
        .then(|| format!("tls.cert = {:?}: {}", certificate.path, finding.message))
}

/// Returns `None` if its validity can't be read.
pub fn judge_certificate(certificate: &Certificate, now: i64) -> Option<Finding> {
    Some(judge(certificate.validity()?, now))
}

fn judge([begins, expires]: [i64; 2], now: i64) -> Finding {
    let (date, days) = (
        when::Zone::utc().format_local(expires),
        (expires - now).div_euclid(when::DAY),
    );
    let left = format!("expires at {date}, in {}", count(days, "day"));
    let renew = "Renew it, then reload the service";
    match days {
        _ if now < begins => Finding::fail(
            "tls",
            format!(
                "the certificate is not valid before {}. Set the clock, or use another one",
                when::Zone::utc().format_local(begins)
            ),
        ),
        ..0 => Finding::fail("tls", format!("the certificate expired at {date}. {renew}")),
        0..RENEWAL_DAYS => Finding::warn("tls", format!("the certificate {left}. {renew}")),
        _ => Finding::ok(
            "tls",
            format!("the certificate and its key match; it {left}"),
        ),
    }
}

pub fn read_certificate(files: &TlsFiles) -> Result<Certificate> {
    Certificate::read(&files.cert, &files.key).map_err(|error| {
        let (setting, path, cause) = match error {
            TlsError::Certificate(cause) => ("tls.cert", &files.cert, cause),
            TlsError::Key(cause) => ("tls.key", &files.key, cause),
        };
        let text = format!("{setting} = {path:?}: {cause}. Expected a PEM file");
        Problem::new(ProblemKind::Setting, text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_to_be_renewed_in_time() {
        for (begins, days, status, message) in [
            (0, -1, Verdict::Fail, "expired at 1970-04-10"),
            (0, 0, Verdict::Warn, "in 0 days"),
            (0, 9, Verdict::Warn, "in 9 days. Renew it"),
            (100, 10, Verdict::Ok, "in 10 days"),
            (101, 110, Verdict::Fail, "not valid before 1970-04-12"),
        ] {
            let finding = judge([begins * 86_400, (100 + days) * 86_400], 100 * 86_400);
            assert!(
                finding.status == status && finding.message.contains(message),
                "{}",
                finding.message
            );
        }
    }
}
