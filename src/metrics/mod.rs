//! Counters and histograms, and their text for Prometheus.
//!
//! Counting takes no lock and no memory. A scrape also reads the listener's own counts and the
//! ledger's state.

mod exposition;
mod gauges;
mod histogram;

use std::array;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use self::exposition::MetricsText;
pub use self::gauges::LedgerGauges;
use self::gauges::{write_budgets, write_gauges, write_runtimes, write_shed};
use self::histogram::Histogram;
use crate::error::ApiError;
use crate::keys::Key;
use crate::ledger::LedgerRow;
use crate::listener::Snapshot;
use crate::runtime::RuntimeStatus;

/// The reasons for asking Search, in the ledger's terms.
const SEARCH_REASONS: [&str; 3] = ["always", "match", "model"];

const SEARCH_OUTCOMES: [&str; 3] = ["found", "nothing", "unavailable"];

#[derive(Default)]
pub struct Metrics {
    started: Started,
    completions: Counter,
    /// In the order of [`ApiError::ALL`].
    errors: [Counter; ApiError::ALL.len()],
    prompt_tokens: Counter,
    completion_tokens: Counter,
    unmeasured: Counter,
    completed: Histogram,
    failed: Histogram,
    queue: Histogram,
    runtime: Histogram,
    ledger: Histogram,
    search: Histogram,
    /// In the order of [`SEARCH_REASONS`], and within each of [`SEARCH_OUTCOMES`].
    searches: [[Counter; SEARCH_OUTCOMES.len()]; SEARCH_REASONS.len()],
    /// Rows that could not be written.
    pub ledger_errors: Counter,
    pub head_refused: Counter,
    /// Requests without a measured token that left no row, because their key sends too many.
    pub unrecorded: Counter,
}

#[derive(Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

struct Started(SystemTime);

impl Default for Started {
    fn default() -> Self {
        Self(SystemTime::now())
    }
}

impl Metrics {
    /// Counts a request that a worker has answered. `total` contains the write to the ledger.
    pub fn count_answer(
        &self,
        row: &LedgerRow,
        error: Option<ApiError>,
        total: Duration,
        ledger: Option<Duration>,
    ) {
        if let Some(error) = error {
            self.count_error(error);
            self.failed.observe(total);
        } else {
            self.completions.add(1);
            self.prompt_tokens.add(measured(row.tokens.prompt_tokens));
            self.completion_tokens
                .add(measured(row.tokens.completion_tokens));
            self.unmeasured
                .add(u64::from(row.tokens.total_tokens.is_none()));
            self.completed.observe(total);
        }
        self.queue.observe_milliseconds(row.queue_ms);
        self.runtime.observe_milliseconds(row.runtime_ms);
        ledger.inspect(|&time| self.ledger.observe(time));
    }

    /// Counts a search, if the request needed one.
    pub fn count_search(&self, row: &LedgerRow) {
        let outcome = match row.search_results {
            Some(1..) => 0,
            Some(_) => 1,
            None => 2,
        };
        let index = |asked| SEARCH_REASONS.iter().position(|reason| *reason == asked);
        if let Some(reason) = row.search_reason.as_deref().and_then(index) {
            self.searches[reason][outcome].add(1);
        }
        self.search.observe_milliseconds(row.search_ms);
    }

    /// The number of calls to Search by their outcome, in the order of `SEARCH_OUTCOMES`.
    pub fn searches(&self) -> [u64; SEARCH_OUTCOMES.len()] {
        array::from_fn(|outcome| {
            let counts = self.searches.iter().map(|reason| reason[outcome].get());
            counts.sum()
        })
    }

    /// Counts a request that got no worker and has no times.
    pub fn count_error(&self, error: ApiError) {
        self.errors[error as usize].add(1);
    }

    /// Writes all metrics in Prometheus's text format, version 0.0.4, with the budgets of these
    /// keys.
    pub fn render(
        &self,
        load: &Snapshot,
        ledger: LedgerGauges,
        runtimes: &[RuntimeStatus],
        keys: &[Key],
        certificate_expires: Option<i64>,
    ) -> String {
        let mut text = MetricsText::default();
        self.counts(&mut text);
        self.times(&mut text);
        write_gauges(&mut text, load, ledger);
        write_shed(&mut text, load);
        write_runtimes(&mut text, runtimes);
        write_budgets(&mut text, keys);
        let help =
            "When the certificate of new connections expires, in Unix time; no sample without TLS.";
        let family = text.family(
            "gauge",
            "adriaticum_tls_certificate_expiry_timestamp_seconds",
            help,
        );
        if let Some(expires) = certificate_expires {
            family.with("", expires);
        }
        text.family(
            "gauge",
            "adriaticum_build_info",
            "The version that runs; the value is always 1.",
        )
        .with(concat!("version=\"", env!("ADRIATICUM_VERSION"), "\""), 1);
        let started = self
            .started
            .0
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        text.family(
            "gauge",
            "process_start_time_seconds",
            "When the process started, in Unix time.",
        )
        .with("", started.as_secs_f64());
        text.text
    }

    fn counts(&self, text: &mut MetricsText) {
        let requests = text.counter(
            "adriaticum_requests_total",
            "Requests answered, by HTTP status and error code.",
        );
        requests.with("status=\"200\",code=\"ok\"", self.completions.get());
        for (error, count) in ApiError::ALL.iter().zip(&self.errors) {
            let labels = format!("status=\"{}\",code=\"{}\"", error.status(), error.code());
            requests.with(&labels, count.get());
        }
        text.counter(
            "adriaticum_tokens_total",
            "Tokens of completions, as the runtime measured them.",
        )
        .with("kind=\"prompt\"", self.prompt_tokens.get())
        .with("kind=\"completion\"", self.completion_tokens.get());
        let help = "Completions for which the runtime reported no total_tokens.";
        text.counter("adriaticum_completions_unmeasured_total", help)
            .with("", self.unmeasured.get());
        let help = "Requests for which Search was asked, by reason and outcome.";
        let searches = text.counter("adriaticum_searches_total", help);
        for (reason, counts) in SEARCH_REASONS.iter().zip(&self.searches) {
            for (outcome, count) in SEARCH_OUTCOMES.iter().zip(counts) {
                searches.with(
                    &format!("reason=\"{reason}\",outcome=\"{outcome}\""),
                    count.get(),
                );
            }
        }
        text.counter(
            "adriaticum_ledger_errors_total",
            "Rows that could not be written to the ledger.",
        )
        .with("", self.ledger_errors.get());
        let help = "Requests refused from their head: host, route, declared length or the form of the key.";
        text.counter("adriaticum_requests_head_refused_total", help)
            .with("", self.head_refused.get());
        let help =
            "Requests without a measured token that left no row, because their key sends too many.";
        text.counter("adriaticum_refusals_unrecorded_total", help)
            .with("", self.unrecorded.get());
    }

    fn times(&self, text: &mut MetricsText) {
        let help = "The time from the complete request to its answer, by outcome.";
        text.family("histogram", "adriaticum_request_duration_seconds", help)
            .observed("outcome=\"completion\"", &self.completed)
            .observed("outcome=\"error\"", &self.failed);
        for (part, help, histogram) in [
            ("queue", "The wait for a worker.", &self.queue),
            (
                "runtime",
                "The calls to the inference runtime.",
                &self.runtime,
            ),
            ("search", "The wait for Search.", &self.search),
            ("ledger", "The write to the ledger.", &self.ledger),
        ] {
            let name = format!("adriaticum_{part}_duration_seconds");
            text.family("histogram", &name, help)
                .observed("", histogram);
        }
    }
}

fn measured(figure: Option<i64>) -> u64 {
    figure
        .and_then(|figure| u64::try_from(figure).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Tokens;
    use crate::listener::Gauge;

    const LEDGER: LedgerGauges = LedgerGauges {
        is_available: true,
        wal_bytes: 4120,
    };

    fn load() -> Snapshot {
        Snapshot {
            workers: Gauge { now: 3, limit: 16 },
            queue: Gauge { now: 0, limit: 64 },
            connections: Gauge {
                now: 7,
                limit: 4096,
            },
            buffered_bytes: Gauge {
                now: 1024,
                limit: 65536,
            },
            accepted: 9,
            events: [4, 0, 5, 1, 3, 2, 7, 8],
        }
    }

    /// Counts an answer whose time was all the runtime's.
    fn answer(metrics: &Metrics, tokens: Tokens, error: Option<ApiError>, milliseconds: u64) {
        let row = LedgerRow {
            tokens,
            queue_ms: Some(0.0),
            runtime_ms: Some(milliseconds as f64),
            ..LedgerRow::default()
        };
        metrics.count_answer(&row, error, Duration::from_millis(milliseconds), None);
    }

    #[test]
    fn counts_are_exposed() {
        let metrics = Metrics::default();
        let tokens = Tokens {
            prompt_tokens: Some(11),
            completion_tokens: Some(3),
            total_tokens: Some(14),
        };
        answer(&metrics, tokens, None, 3);
        let unmeasured = Tokens {
            total_tokens: None,
            ..tokens
        };
        answer(&metrics, unmeasured, None, 40);
        answer(&metrics, tokens, Some(ApiError::InferenceError), 400_000);
        metrics.count_error(ApiError::ServiceUnavailable);
        metrics.ledger_errors.add(1);
        metrics.head_refused.add(6);
        metrics.unrecorded.add(1);
        let runtime = |url: &str| RuntimeStatus {
            url: url.into(),
            ..RuntimeStatus::default()
        };
        let failed = RuntimeStatus {
            failed_since: Some(1),
            running: 2,
            failures: 3,
            ..runtime("http://b/v1")
        };
        let text = metrics.render(
            &load(),
            LEDGER,
            &[runtime("http://a/v1"), failed],
            &[],
            Some(1_800_000_000),
        );
        for line in [
            "adriaticum_requests_total{status=\"200\",code=\"ok\"} 2",
            "adriaticum_requests_total{status=\"502\",code=\"inference_error\"} 1",
            "adriaticum_requests_total{status=\"503\",code=\"service_unavailable\"} 1",
            "adriaticum_tokens_total{kind=\"prompt\"} 22",
            "adriaticum_tokens_total{kind=\"completion\"} 6",
            "adriaticum_completions_unmeasured_total 1",
            "# TYPE adriaticum_request_duration_seconds histogram",
            "adriaticum_request_duration_seconds_bucket{outcome=\"completion\",le=\"0.0025\"} 0",
            "adriaticum_request_duration_seconds_bucket{outcome=\"completion\",le=\"0.005\"} 1",
            "adriaticum_request_duration_seconds_bucket{outcome=\"completion\",le=\"0.05\"} 2",
            "adriaticum_request_duration_seconds_bucket{outcome=\"error\",le=\"300\"} 0",
            "adriaticum_request_duration_seconds_bucket{outcome=\"error\",le=\"+Inf\"} 1",
            "adriaticum_request_duration_seconds_sum{outcome=\"completion\"} 0.043",
            "adriaticum_request_duration_seconds_count{outcome=\"error\"} 1",
            "adriaticum_queue_duration_seconds_bucket{le=\"0.0005\"} 3",
            "adriaticum_runtime_duration_seconds_count 3",
            "adriaticum_ledger_duration_seconds_count 0",
            "adriaticum_ledger_available 1",
            "adriaticum_wal_bytes 4120",
            "adriaticum_ledger_errors_total 1",
            "adriaticum_workers_busy 3",
            "adriaticum_workers 16",
            "adriaticum_connections_shed_total{which=\"new\"} 1",
            "adriaticum_connections_shed_total{which=\"unfinished\"} 3",
            "adriaticum_connections_shed_total{which=\"idle\"} 2",
            "adriaticum_requests_head_refused_total 6",
            "adriaticum_requests_shed_total{reason=\"buffer\"} 5",
            "adriaticum_buffered_limit_bytes 65536",
            "adriaticum_requests_abandoned_total{phase=\"waiting\"} 7",
            "adriaticum_requests_abandoned_total{phase=\"running\"} 8",
            "adriaticum_refusals_unrecorded_total 1",
            "adriaticum_tls_certificate_expiry_timestamp_seconds 1800000000",
            "adriaticum_runtime_up{runtime=\"http://a/v1\"} 1",
            "adriaticum_runtime_up{runtime=\"http://b/v1\"} 0",
            "adriaticum_runtime_running{runtime=\"http://b/v1\"} 2",
            "adriaticum_runtime_failures_total{runtime=\"http://a/v1\"} 0",
            "adriaticum_runtime_failures_total{runtime=\"http://b/v1\"} 3",
        ] {
            assert!(
                text.lines().any(|found| found == line),
                "{line} is not in\n{text}"
            );
        }
        for error in ApiError::ALL {
            assert!(text.contains(&format!(
                "status=\"{}\",code=\"{}\"}} ",
                error.status(),
                error.code()
            )));
        }
    }

    /// The rules of the format that concern more than one line.
    #[test]
    fn a_family_is_announced_once_and_before_its_samples() {
        let text = Metrics::default().render(&load(), LEDGER, &[], &[], None);
        assert!(text.ends_with('\n'));
        let mut families: Vec<&str> = Vec::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let name = rest.split(' ').next().expect("a name");
                assert!(!families.contains(&name), "{name} twice");
                families.push(name);
            } else if !line.starts_with("# TYPE ") {
                let family = families.last().expect("a family should come first");
                assert!(line.starts_with(family), "{line} under {family}");
            }
        }
        assert!(
            families
                .iter()
                .all(|name| name.starts_with("adriaticum_") || name.starts_with("process_"))
        );
    }
}
