//! What the service knows about itself: facts that are read from memory at one moment, what is wrong
//! with them, and a verdict.
//!
//! The gauges, `/readyz`, the log, and the console's dot and status page are renderings of it.
//! `check`, which is another process, words its findings in the same way.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::Level;
use serde::Serialize;

use crate::config::Config;
use crate::database::WalFigures;
use crate::error::Problem;
use crate::grounding::Grounding;
use crate::listener::{Acceptor, ListenerState, Snapshot};
use crate::runtime::{RuntimeStatus, Runtimes};
use crate::store::Store;
use crate::text::{count, escaped, grouped};
use crate::when;

/// A certificate should be renewed this many days before it expires: one that is valid for a month
/// is renewed after 20 days.
const RENEWAL_DAYS: i64 = 10;

/// The least time between two lines of the log that say that the same thing is wrong.
const LINE_INTERVAL: Duration = Duration::from_secs(60);

/// The least time before a line with another reason for the same.
const REASON_INTERVAL: Duration = Duration::from_secs(10);

/// The log repeats after this time what is still wrong.
const REMINDER_INTERVAL: Duration = Duration::from_secs(when::DAY as u64);

/// The parts of a running service.
pub struct ServiceParts {
    pub config: Arc<Config>,
    pub store: Arc<Store>,
    pub listener: Arc<ListenerState>,
    /// `None` without TLS.
    pub acceptor: Option<Arc<Acceptor>>,
    /// `None` if none is configured.
    pub runtimes: Option<Arc<Runtimes>>,
    /// `None` if no answer is grounded.
    pub grounding: Option<Arc<Grounding>>,
}

impl ServiceParts {
    /// Reads the facts, without waiting for anything.
    pub fn health(&self) -> Health {
        let (ledger, grounding) = (&self.store.ledger, self.grounding.as_ref());
        let runtimes = self.runtimes.as_ref();
        let certificate = self.acceptor.as_ref().map(|all| all.certificate());
        Health {
            database: self.config.database_name(),
            ledger: ledger.outage(),
            wal: self.store.wal_figures(),
            retention: ledger.retention_trouble(),
            runtimes: runtimes.map_or_else(Vec::new, |all| all.status()),
            search: grounding.and_then(|grounding| grounding.last_failure()),
            index: grounding.and_then(|grounding| grounding.index_trouble()),
            requests_wait: runtimes.is_some_and(|all| all.have_waiting()),
            load: self.listener.snapshot(),
            certificate: certificate.and_then(|certificate| certificate.validity()),
        }
    }
}

/// The facts of one moment.
#[derive(Clone, Debug)]
pub struct Health {
    /// The name of the database.
    pub database: String,
    /// The reason why no row can be written.
    pub ledger: Option<Problem>,
    pub wal: WalFigures,
    /// The reason why retention removes nothing, though it should.
    pub retention: Option<String>,
    pub runtimes: Vec<RuntimeStatus>,
    /// Requests wait for a runtime to answer again.
    pub requests_wait: bool,
    /// The reason why the last search failed.
    pub search: Option<String>,
    /// The reason why the index of a folder is not up to date.
    pub index: Option<String>,
    pub load: Snapshot,
    /// The first and the last second in which the certificate is valid; `None` if there is none.
    pub certificate: Option<[i64; 2]>,
}

/// What can be expected of the service as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Works,
    /// Completions can be run, and something is wrong.
    Degraded,
    /// No completion can be run.
    Failing,
}

impl Verdict {
    pub fn word(self) -> &'static str {
        match self {
            Self::Works => "works",
            Self::Degraded => "degraded",
            Self::Failing => "failing",
        }
    }
}

impl Health {
    pub fn verdict(&self) -> Verdict {
        let no_runtime_works = self.runtimes.iter().all(|runtime| runtime.is_failing);
        match self.ledger.is_some() || no_runtime_works {
            true => Verdict::Failing,
            false if self.findings().is_empty() => Verdict::Works,
            false => Verdict::Degraded,
        }
    }

    /// What is wrong, the worst first.
    pub fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        if let Some(problem) = &self.ledger {
            findings.push(ledger_finding(&self.database, problem));
        }
        if self.runtimes.is_empty() {
            findings.push(no_runtime());
        }
        let runtimes = self.runtimes.iter();
        findings
            .extend(runtimes.filter_map(|runtime| runtime_finding(runtime, self.requests_wait)));
        findings.extend(self.search.as_deref().map(search_finding));
        let certificate = self
            .certificate
            .map(|dates| certificate_finding(dates, when::now()));
        findings.extend(certificate.filter(|finding| finding.status != Status::Ok));
        findings.extend(self.no_room());
        let index = self.index.as_deref();
        findings.extend(index.map(|text| Finding::warn("index", text)));
        let retention = self.retention.as_deref();
        findings.extend(retention.map(|text| Finding::warn("retention", text)));
        // Others choose a part of the messages, which a terminal may show.
        for finding in &mut findings {
            finding.message = escaped(&finding.message);
        }
        findings.sort_by_key(|finding| Reverse(finding.status));
        findings
    }

    fn no_room(&self) -> impl Iterator<Item = Finding> {
        let (queue, connections) = (self.load.queue, self.load.connections);
        let waiting = count(queue.now as i64, "request");
        let queue = queue.is_full().then(|| {
            let message = format!(
                "the queue is full ({waiting}): further ones get 503. If the runtime can process more at once, raise workers; if \
                 clients can wait longer, raise queue"
            );
            Finding::warn("queue", message)
        });
        let open = grouped(connections.now as i64);
        let connections = connections.is_full().then(|| {
            let message = format!(
                "all {open} connections are open: a new one takes the place of another, or is refused. If that is not an \
                 attack, raise max_connections"
            );
            Finding::warn("connections", message)
        });
        queue.into_iter().chain(connections)
    }

    /// The verdict and the parts that it is about: as much as everyone may know.
    pub fn summary(&self) -> String {
        let mut parts: Vec<&str> = self.findings().iter().map(|finding| finding.part).collect();
        parts.dedup();
        match self.verdict() {
            Verdict::Works => Verdict::Works.word().into(),
            verdict => format!("{}: {}; the log says why", verdict.word(), parts.join(", ")),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    /// It works, but the operator should know about something.
    Warn,
    Fail,
}

/// What is to be said about a part.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    pub part: &'static str,
    pub status: Status,
    /// What happened, and what to do.
    pub message: String,
    /// The address of the runtime, if it is about one.
    #[serde(skip)]
    pub runtime: Option<String>,
}

impl Finding {
    fn new(part: &'static str, status: Status, message: impl Into<String>) -> Self {
        Self {
            part,
            status,
            message: message.into(),
            runtime: None,
        }
    }

    pub fn ok(part: &'static str, message: impl Into<String>) -> Self {
        Self::new(part, Status::Ok, message)
    }

    pub fn warn(part: &'static str, message: impl Into<String>) -> Self {
        Self::new(part, Status::Warn, message)
    }

    pub fn fail(part: &'static str, message: impl Into<String>) -> Self {
        Self::new(part, Status::Fail, message)
    }
}

pub fn ledger_finding(database: &str, problem: &Problem) -> Finding {
    let message = format!(
        "{database}: {problem}. Until a row can be written, requests get 503, and the runtime is not called"
    );
    Finding::fail("database", message)
}

pub fn no_runtime() -> Finding {
    let message =
        "no runtime is configured. Set runtime.url (ADRIATICUM_RUNTIME_URL) to its base address";
    Finding::fail("runtime", message)
}

/// While requests wait, none of the runtimes has run them.
fn runtime_finding(runtime: &RuntimeStatus, requests_wait: bool) -> Option<Finding> {
    let status = match runtime.is_failing {
        true => Status::Fail,
        false if requests_wait => Status::Warn,
        false => return None,
    };
    let (_, error) = runtime.last_error.as_ref()?;
    let wait = match requests_wait {
        true => ". Requests wait for it (runtime.wait)",
        false => "",
    };
    Some(Finding {
        runtime: Some(runtime.url.clone()),
        ..Finding::new("runtime", status, format!("{}: {error}{wait}", runtime.url))
    })
}

pub fn search_finding(error: &str) -> Finding {
    let message = format!(
        "{error}. Completions that need Search get 503 until it works. The setting is search.url"
    );
    Finding::fail("search", message)
}

/// Judges the dates of a certificate. A start, a reload and a running service accept one that
/// clients refuse all the same: without it no client could connect, and a client may be configured
/// to ignore it.
pub fn certificate_finding([begins, expires]: [i64; 2], now: i64) -> Finding {
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

/// What the log has said about findings.
#[derive(Default)]
pub struct HealthLog(Vec<Said>);

/// The last line about a part, or about a runtime.
struct Said {
    part: &'static str,
    runtime: Option<String>,
    reason: String,
    at: Instant,
    /// It has not worked since that line.
    is_open: bool,
}

impl HealthLog {
    /// Writes what has become wrong, and what works again.
    pub fn note(&mut self, findings: &[Finding]) {
        for (level, line) in self.lines(findings, Instant::now()) {
            log::log!(level, "{line}");
        }
    }

    /// What fails again and again is said once a minute, what stays wrong once a day.
    fn lines(&mut self, findings: &[Finding], now: Instant) -> Vec<(Level, String)> {
        let mut lines = Vec::new();
        for finding in findings {
            let level = match finding.status {
                Status::Ok => Level::Info,
                Status::Warn => Level::Warn,
                Status::Fail => Level::Error,
            };
            let known = self.0.iter_mut().find(|said| said.is_about(finding));
            // The figures of one reason may change all the time.
            let reason = finding.message.replace(|c: char| c.is_ascii_digit(), "");
            let pause = match &known {
                None => Duration::ZERO,
                Some(said) if !said.is_open => LINE_INTERVAL,
                Some(said) if said.reason != reason => REASON_INTERVAL,
                Some(_) => REMINDER_INTERVAL,
            };
            if known.as_ref().is_some_and(|said| now < said.at + pause) {
                continue;
            }
            lines.push((level, format!("{}: {}", finding.part, finding.message)));
            match known {
                Some(said) => (said.at, said.is_open, said.reason) = (now, true, reason),
                None => self.0.push(Said {
                    part: finding.part,
                    runtime: finding.runtime.clone(),
                    reason,
                    at: now,
                    is_open: true,
                }),
            }
        }
        for said in &mut self.0 {
            if said.is_open && !findings.iter().any(|finding| said.is_about(finding)) {
                said.is_open = false;
                let runtime = said.runtime.iter();
                let runtime: String = runtime.map(|url| format!(" {url}")).collect();
                lines.push((Level::Info, format!("{}{runtime} works again", said.part)));
            }
        }
        self.0
            .retain(|said| said.is_open || now < said.at + LINE_INTERVAL);
        lines
    }
}

impl Said {
    fn is_about(&self, finding: &Finding) -> bool {
        self.part == finding.part && self.runtime == finding.runtime
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::error::ProblemKind;
    use crate::listener::Gauge;

    impl Health {
        /// One runtime that works, and nothing else.
        pub fn example() -> Self {
            let free = Gauge { now: 0, limit: 8 };
            Self {
                database: "a.db".into(),
                ledger: None,
                wal: WalFigures::default(),
                retention: None,
                runtimes: vec![RuntimeStatus {
                    url: "http://a/v1".into(),
                    ..RuntimeStatus::default()
                }],
                requests_wait: false,
                search: None,
                index: None,
                load: Snapshot {
                    workers: free,
                    queue: free,
                    connections: free,
                    buffered_bytes: free,
                    accepted: 0,
                    events: Default::default(),
                },
                certificate: None,
            }
        }
    }

    fn failing(url: &str) -> RuntimeStatus {
        RuntimeStatus {
            url: url.into(),
            is_failing: true,
            last_error: Some((0, "it is \u{1b}red".into())),
            ..RuntimeStatus::default()
        }
    }

    #[test]
    fn the_verdict_on_each_fact() {
        #[track_caller]
        fn check(change: impl Fn(&mut Health), verdict: Verdict, summary: &str, parts: &[&str]) {
            let mut health = Health::example();
            change(&mut health);
            let findings = health.findings();
            assert_eq!(health.verdict(), verdict);
            let said = health.summary();
            assert_eq!(said.trim_end_matches("; the log says why"), summary);
            let messages: Vec<&str> = findings.iter().map(|it| &*it.message).collect();
            assert_eq!(messages.len(), parts.len(), "{messages:?}");
            for (message, part) in messages.iter().zip(parts) {
                assert!(message.starts_with(part), "{message}");
            }
        }
        let full = Gauge { now: 8, limit: 8 };
        let none = Gauge { now: 0, limit: 0 };
        check(|_| {}, Verdict::Works, "works", &[]);
        check(|it| it.load.queue = none, Verdict::Works, "works", &[]);
        check(
            |it| it.runtimes.clear(),
            Verdict::Failing,
            "failing: runtime",
            &["no runtime is configured. Set runtime.url"],
        );
        check(
            |it| it.runtimes = vec![failing("http://b/v1")],
            Verdict::Failing,
            "failing: runtime",
            &[r"http://b/v1: it is \u{1b}red"],
        );
        check(
            |it| {
                it.runtimes.push(failing("http://b/v1"));
                it.runtimes.push(failing("http://c/v1"));
            },
            Verdict::Degraded,
            "degraded: runtime",
            &["http://b/v1: ", "http://c/v1: "],
        );
        check(
            |it| {
                it.retention = Some("held".into());
                it.ledger = Some(Problem::new(ProblemKind::Busy, "locked"));
            },
            Verdict::Failing,
            "failing: database, retention",
            &["a.db: locked. Until a row can be written", "held"],
        );
        check(
            |it| it.search = Some("no answer".into()),
            Verdict::Degraded,
            "degraded: search",
            &["no answer. Completions that need Search get 503"],
        );
        check(
            |it| it.index = Some("/srv: it can't be read".into()),
            Verdict::Degraded,
            "degraded: index",
            &["/srv: it can't be read"],
        );
        check(
            |it| it.load.queue = full,
            Verdict::Degraded,
            "degraded: queue",
            &["the queue is full (8 requests): "],
        );
        check(
            |it| it.load.connections = full,
            Verdict::Degraded,
            "degraded: connections",
            &["all 8 connections are open"],
        );
        check(
            |it| it.certificate = Some([0, 1]),
            Verdict::Degraded,
            "degraded: tls",
            &["the certificate expired at 1970-01-01"],
        );
        check(
            |it| it.certificate = Some([0, i64::from(i32::MAX) * 9]),
            Verdict::Works,
            "works",
            &[],
        );
    }

    #[test]
    fn a_certificate_is_to_be_renewed_in_time() {
        for (begins, days, status, message) in [
            (0, -1, Status::Fail, "expired at 1970-04-10"),
            (0, 0, Status::Warn, "in 0 days"),
            (0, 9, Status::Warn, "in 9 days. Renew it"),
            (100, 10, Status::Ok, "in 10 days"),
            (101, 110, Status::Fail, "not valid before 1970-04-12"),
        ] {
            let finding =
                certificate_finding([begins * 86_400, (100 + days) * 86_400], 100 * 86_400);
            assert!(
                finding.status == status && finding.message.contains(message),
                "{}",
                finding.message
            );
        }
    }

    /// One that is not failing yet is named only while requests wait for it.
    #[test]
    fn a_runtime_that_requests_wait_for_is_named() {
        let mut runtime = RuntimeStatus {
            is_failing: false,
            ..failing("http://a/v1")
        };
        assert!(runtime_finding(&runtime, false).is_none());
        let message = "http://a/v1: it is \u{1b}red. Requests wait for it (runtime.wait)";
        for status in [Status::Warn, Status::Fail] {
            let finding = runtime_finding(&runtime, true).expect("it has failed");
            assert_eq!((finding.status, &*finding.message), (status, message));
            runtime.is_failing = true;
        }
        runtime.last_error = None;
        assert!(runtime_finding(&runtime, true).is_none());
    }

    #[test]
    fn the_log_says_a_change_once() {
        let (mut log, start) = (HealthLog::default(), Instant::now());
        let down = |url: &str| runtime_finding(&failing(url), false).expect("it fails");
        let (a, b) = (down("http://a/v1"), down("http://b/v1"));
        let mut lines = |seconds: u64, findings: &[&Finding]| -> Vec<String> {
            let findings: Vec<Finding> = findings.iter().map(|&it| it.clone()).collect();
            let lines = log.lines(&findings, start + Duration::from_secs(seconds));
            lines.into_iter().map(|(_, line)| line).collect()
        };
        let (fails, works) = (
            "runtime: http://a/v1: it is \u{1b}red",
            "runtime http://a/v1 works again",
        );
        assert_eq!(lines(0, &[&a]), [fails]);
        assert!(lines(1, &[&a]).is_empty());
        assert_eq!(lines(2, &[&a, &b]).len(), 1, "each has its own lines");
        assert_eq!(lines(3, &[&b]), [works]);
        // What fails again and again has two lines a minute.
        assert!(lines(4, &[&a, &b]).is_empty());
        assert!(lines(5, &[&b]).is_empty());
        assert!(lines(59, &[&a, &b]).is_empty());
        assert_eq!(lines(60, &[&a, &b]), [fails], "it still fails");
        assert_eq!(lines(3600, &[&b]), [works]);
        assert_eq!(lines(3601, &[&a, &b]), [fails]);
        let day = 24 * 3600;
        assert_eq!(lines(2 + day, &[&a, &b]).len(), 1, "a reminder");
        assert_eq!(lines(2 * day, &[]).len(), 2);
        assert!(log.0.is_empty(), "nothing is kept about what works");
    }

    /// The first reason may be that a write waits, and the next one why.
    #[test]
    fn another_reason_is_said_and_other_figures_are_not() {
        let (mut log, start) = (HealthLog::default(), Instant::now());
        let mut lines = |seconds: u64, reason: &str| {
            let findings = [Finding::fail("database", reason)];
            log.lines(&findings, start + Duration::from_secs(seconds))
                .len()
        };
        assert_eq!(lines(0, "waited for 5 s"), 1);
        assert_eq!(lines(20, "waited for 25 s"), 0);
        assert_eq!(lines(21, "no connection"), 1);
        assert_eq!(lines(22, "locked"), 0, "ten seconds later");
        assert_eq!(lines(31, "locked"), 1);
    }

    #[test]
    fn the_level_of_a_line_is_that_of_its_finding() {
        let findings = [
            Finding::warn("queue", "full"),
            Finding::fail("tls", "expired"),
        ];
        let lines = HealthLog::default().lines(&findings, Instant::now());
        let expected = [
            (Level::Warn, "queue: full".to_owned()),
            (Level::Error, "tls: expired".to_owned()),
        ];
        assert_eq!(lines, expected);
    }
}
