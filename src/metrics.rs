//! Counters and histograms, and one table of all metrics, which a scrape writes in Prometheus's text
//! format.
//!
//! Counting takes no lock and no memory.

use std::array;
use std::cmp::Reverse;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::ApiError;
use crate::health::Health;
use crate::keys::{Budget, Key};
use crate::ledger::LedgerRow;
use crate::listener::LoadEvent;
use crate::runtime::RuntimeStatus;

/// The reasons for asking Search, in the ledger's terms.
const SEARCH_REASONS: [&str; 2] = ["always", "match"];

const SEARCH_OUTCOMES: [&str; 3] = ["found", "nothing", "unavailable"];

/// The most keys with series of their own: those that have used the largest share of their budget.
const MOST_BUDGETS: usize = 100;

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

    /// All metrics in Prometheus's text format, version 0.0.4.
    pub fn render(&self, health: &Health, keys: &[Key]) -> String {
        let families = self.families(health, keys);
        families.iter().map(Family::text).collect()
    }

    fn families(&self, health: &Health, keys: &[Key]) -> Vec<Family> {
        let load = &health.load;
        let of_runtimes = |value: &dyn Fn(&RuntimeStatus) -> u64| {
            let runtimes = health.runtimes.iter();
            by(
                "runtime",
                runtimes.map(|runtime| (&*runtime.url, value(runtime))),
            )
        };
        let events = |label, values: &[(&str, LoadEvent)]| {
            by(
                label,
                values
                    .iter()
                    .map(|(value, event)| (*value, load.count_of(*event))),
            )
        };
        let started = self
            .started
            .0
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let version = format!("version={:?}", crate::VERSION);
        vec![
            counter(
                "adriaticum_requests_total",
                "Requests answered, by HTTP status and error code.",
                self.requests(),
            ),
            counter(
                "adriaticum_tokens_total",
                "Tokens of completions, as the runtime measured them.",
                by(
                    "kind",
                    [
                        ("prompt", self.prompt_tokens.get()),
                        ("completion", self.completion_tokens.get()),
                    ],
                ),
            ),
            counter(
                "adriaticum_completions_unmeasured_total",
                "Completions for which the runtime reported no total_tokens.",
                one(self.unmeasured.get()),
            ),
            counter(
                "adriaticum_searches_total",
                "Requests for which Search was asked, by reason and outcome.",
                self.searches_by_reason(),
            ),
            counter(
                "adriaticum_ledger_errors_total",
                "Rows that could not be written to the ledger.",
                one(self.ledger_errors.get()),
            ),
            counter(
                "adriaticum_requests_head_refused_total",
                "Requests refused from their head: host, route, declared length or the form of the key.",
                one(self.head_refused.get()),
            ),
            counter(
                "adriaticum_refusals_unrecorded_total",
                "Requests without a measured token that left no row, because their key sends too many.",
                one(self.unrecorded.get()),
            ),
            histogram(
                "adriaticum_request_duration_seconds",
                "The time from the complete request to its answer, by outcome.",
                [
                    self.completed.samples("outcome=\"completion\","),
                    self.failed.samples("outcome=\"error\","),
                ]
                .concat(),
            ),
            histogram(
                "adriaticum_queue_duration_seconds",
                "The wait for a worker.",
                self.queue.samples(""),
            ),
            histogram(
                "adriaticum_runtime_duration_seconds",
                "The calls to the inference runtime.",
                self.runtime.samples(""),
            ),
            histogram(
                "adriaticum_search_duration_seconds",
                "The wait for Search.",
                self.search.samples(""),
            ),
            histogram(
                "adriaticum_ledger_duration_seconds",
                "The write to the ledger.",
                self.ledger.samples(""),
            ),
            gauge(
                "adriaticum_workers_busy",
                "Workers that process a request.",
                one(load.workers.now),
            ),
            gauge(
                "adriaticum_workers",
                "Workers in the pool.",
                one(load.workers.limit),
            ),
            gauge(
                "adriaticum_queue_length",
                "Complete requests that wait for a worker.",
                one(load.queue.now),
            ),
            gauge(
                "adriaticum_queue_limit",
                "Requests that may wait; one more is shed.",
                one(load.queue.limit),
            ),
            gauge(
                "adriaticum_connections_open",
                "Open connections, idle ones too.",
                one(load.connections.now),
            ),
            gauge(
                "adriaticum_connections_limit",
                "Connections that may be open.",
                one(load.connections.limit),
            ),
            gauge(
                "adriaticum_buffered_bytes",
                "Bytes buffered for clients.",
                one(load.buffered_bytes.now),
            ),
            gauge(
                "adriaticum_buffered_limit_bytes",
                "Bytes that may be buffered.",
                one(load.buffered_bytes.limit),
            ),
            counter(
                "adriaticum_connections_accepted_total",
                "Connections accepted.",
                one(load.accepted),
            ),
            counter(
                "adriaticum_connections_shed_total",
                "Connections closed because there was no room: new ones, and unfinished or idle ones that were evicted.",
                events(
                    "which",
                    &[
                        ("new", LoadEvent::Rejected),
                        ("unfinished", LoadEvent::UnfinishedEvicted),
                        ("idle", LoadEvent::IdleEvicted),
                    ],
                ),
            ),
            counter(
                "adriaticum_requests_shed_total",
                "Requests answered 503 because there was no room.",
                events(
                    "reason",
                    &[
                        ("queue", LoadEvent::QueueFull),
                        ("console", LoadEvent::ConsoleFull),
                        ("buffer", LoadEvent::BuffersFull),
                    ],
                ),
            ),
            counter(
                "adriaticum_requests_abandoned_total",
                "Requests whose client went away before their answer.",
                events(
                    "phase",
                    &[
                        ("waiting", LoadEvent::AbandonedWaiting),
                        ("running", LoadEvent::AbandonedRunning),
                    ],
                ),
            ),
            gauge(
                "adriaticum_ledger_available",
                "1 if the ledger accepts rows; 0: requests get 503.",
                one(u8::from(health.ledger.is_none())),
            ),
            gauge(
                "adriaticum_wal_bytes",
                "Bytes of the database's WAL that are in use.",
                one(health.wal.bytes),
            ),
            gauge(
                "adriaticum_runtime_up",
                "1 if the runtime works; 0: its last calls and probes failed, so others are called first.",
                of_runtimes(&|runtime| (!runtime.is_failing).into()),
            ),
            gauge(
                "adriaticum_runtime_running",
                "Calls that the runtime processes.",
                of_runtimes(&|runtime| runtime.running as u64),
            ),
            counter(
                "adriaticum_runtime_failures_total",
                "Calls and probes of the runtime that failed, also if another runtime then took the request.",
                of_runtimes(&|runtime| runtime.failures),
            ),
            gauge(
                "adriaticum_key_budget_tokens",
                "The tokens that a key may use in a calendar day or month of the database's time zone.",
                of_budgets(keys, |budget| budget.tokens),
            ),
            gauge(
                "adriaticum_key_budget_used_tokens",
                "The tokens that a key has used of its budget, at all gateways.",
                of_budgets(keys, |budget| budget.used),
            ),
            gauge(
                "adriaticum_tls_certificate_expiry_timestamp_seconds",
                "When the certificate of new connections expires, in Unix time; no sample without TLS.",
                health
                    .certificate
                    .map_or(Vec::new(), |[_, expires]| one(expires)),
            ),
            gauge(
                "adriaticum_build_info",
                "The version that runs; the value is always 1.",
                vec![sample("", &version, 1)],
            ),
            gauge(
                "process_start_time_seconds",
                "When the process started, in Unix time.",
                one(started.as_secs_f64()),
            ),
        ]
    }

    fn requests(&self) -> Vec<Sample> {
        let ok = sample("", "status=\"200\",code=\"ok\"", self.completions.get());
        let errors = ApiError::ALL
            .iter()
            .zip(&self.errors)
            .map(|(error, count)| {
                let labels = format!("status=\"{}\",code=\"{}\"", error.status(), error.code());
                sample("", &labels, count.get())
            });
        [ok].into_iter().chain(errors).collect()
    }

    fn searches_by_reason(&self) -> Vec<Sample> {
        let mut samples = Vec::new();
        for (reason, counts) in SEARCH_REASONS.iter().zip(&self.searches) {
            for (outcome, count) in SEARCH_OUTCOMES.iter().zip(counts) {
                let labels = format!("reason=\"{reason}\",outcome=\"{outcome}\"");
                samples.push(sample("", &labels, count.get()));
            }
        }
        samples
    }
}

fn measured(figure: Option<i64>) -> u64 {
    figure
        .and_then(|figure| u64::try_from(figure).ok())
        .unwrap_or(0)
}

/// The samples of the keys with the largest used share of a budget.
fn of_budgets(keys: &[Key], value: impl Fn(&Budget) -> i64) -> Vec<Sample> {
    let mut budgets: Vec<(&Key, &Budget)> = keys
        .iter()
        .filter_map(|key| Some((key, key.terms.budget.as_ref()?)))
        .collect();
    budgets.sort_by_key(|(_, budget)| Reverse(budget.percent()));
    budgets.truncate(MOST_BUDGETS);
    let write = |(key, budget): (&Key, &Budget)| {
        // Of all labels, only this one has characters that have to be escaped.
        let name = key.name.replace('\\', r"\\").replace('"', r#"\""#);
        let labels = format!(
            "key=\"{}\",name=\"{name}\",per=\"{}\"",
            key.id,
            budget.per.as_str()
        );
        sample("", &labels, value(budget))
    };
    budgets.into_iter().map(write).collect()
}

/// A metric: its kind, name and help, and the samples.
struct Family(&'static str, &'static str, &'static str, Vec<Sample>);

/// The end of a sample's name with its labels, and the value.
type Sample = (String, String);

impl Family {
    fn text(&self) -> String {
        let Self(kind, name, help, samples) = self;
        let lines = samples
            .iter()
            .map(|(labels, value)| format!("{name}{labels} {value}\n"));
        format!("# HELP {name} {help}\n# TYPE {name} {kind}\n") + &lines.collect::<String>()
    }
}

fn counter(name: &'static str, help: &'static str, samples: Vec<Sample>) -> Family {
    Family("counter", name, help, samples)
}

fn gauge(name: &'static str, help: &'static str, samples: Vec<Sample>) -> Family {
    Family("gauge", name, help, samples)
}

fn histogram(name: &'static str, help: &'static str, samples: Vec<Sample>) -> Family {
    Family("histogram", name, help, samples)
}

/// A sample with labels such as `kind="prompt"`.
fn sample(suffix: &str, labels: &str, value: impl Display) -> Sample {
    let labels = match labels.trim_end_matches(',') {
        "" => String::new(),
        labels => format!("{{{labels}}}"),
    };
    (format!("{suffix}{labels}"), value.to_string())
}

fn one(value: impl Display) -> Vec<Sample> {
    vec![sample("", "", value)]
}

/// A sample for each value of a label.
fn by<'t>(label: &str, values: impl IntoIterator<Item = (&'t str, u64)>) -> Vec<Sample> {
    let values = values.into_iter();
    values
        .map(|(value, number)| sample("", &format!("{label}=\"{value}\""), number))
        .collect()
}

/// The bounds in seconds: from the time of a refusal to that of a slow runtime, at most a factor of
/// 3 apart.
const BOUNDS: [f64; 18] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 120.0, 300.0,
];

#[derive(Default)]
struct Histogram {
    /// The number of times up to each bound and longer than the one before it; last, of those
    /// longer than every bound.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

impl Histogram {
    fn observe(&self, time: Duration) {
        let index = BOUNDS.partition_point(|bound| *bound < time.as_secs_f64());
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[index].fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    fn observe_milliseconds(&self, time: Option<f64>) {
        time.inspect(|time| self.observe(Duration::from_secs_f64(time / 1000.0)));
    }

    /// Returns the number of times up to each bound and, last, of all times; and their sum in
    /// seconds. The numbers all come from the buckets, so that they agree while other threads
    /// continue to count.
    fn read(&self) -> ([u64; BOUNDS.len() + 1], f64) {
        let mut count = 0;
        let counts = self.buckets.each_ref().map(|bucket| {
            count += bucket.load(Ordering::Relaxed);
            count
        });
        (
            counts,
            self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9,
        )
    }

    /// Its samples; `labels` ends with a comma.
    fn samples(&self, labels: &str) -> Vec<Sample> {
        let (counts, sum) = self.read();
        let bounds = BOUNDS
            .iter()
            .map(ToString::to_string)
            .chain(["+Inf".into()]);
        let bucket = |(bound, count)| sample("_bucket", &format!("{labels}le=\"{bound}\""), count);
        let [.., count] = counts;
        let ends = [sample("_sum", labels, sum), sample("_count", labels, count)];
        bounds.zip(counts).map(bucket).chain(ends).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KeyTerms;
    use crate::ledger::Tokens;
    use crate::listener::Gauge;

    fn render(metrics: &Metrics, runtimes: &[RuntimeStatus], keys: &[Key]) -> String {
        let mut health = Health::example();
        health.runtimes = runtimes.to_vec();
        health.wal.bytes = 4120;
        health.certificate = Some([0, 1_800_000_000]);
        health.load.workers = Gauge { now: 3, limit: 16 };
        health.load.buffered_bytes.limit = 65536;
        health.load.events = [4, 0, 5, 1, 3, 2, 7, 8];
        metrics.render(&health, keys)
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
            is_failing: true,
            running: 2,
            failures: 3,
            ..runtime("http://b/v1")
        };
        let text = render(&metrics, &[runtime("http://a/v1"), failed], &[]);
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
        let text = render(&Metrics::default(), &[], &[]);
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

    #[test]
    fn the_budgets_with_the_largest_used_share_have_series() {
        let key = |number: i64| Key {
            id: format!("key_{number}"),
            name: r#"a "b\"#.into(),
            terms: KeyTerms {
                budget: Budget::parse("1000/month").map(|budget| Budget {
                    used: 10 * number,
                    ..budget
                }),
                ..KeyTerms::example()
            },
            ..Key::example()
        };
        let numbers = 0..=MOST_BUDGETS as i64;
        let keys: Vec<Key> = numbers.map(key).chain([Key::example()]).collect();
        let text = render(&Metrics::default(), &[], &keys);
        let line = |line: &str| text.lines().any(|found| found == line);
        assert!(
            line(
                "adriaticum_key_budget_tokens{key=\"key_100\",name=\"a \\\"b\\\\\",per=\"month\"} 1000"
            ),
            "{}",
            text
        );
        assert!(line(
            "adriaticum_key_budget_used_tokens{key=\"key_1\",name=\"a \\\"b\\\\\",per=\"month\"} 10"
        ));
        assert!(
            !text.contains("\"key_0\"") && !text.contains("example"),
            "{}",
            text
        );
    }

    #[test]
    fn a_time_is_in_the_first_bucket_that_holds_it() {
        assert!(BOUNDS.is_sorted_by(|one, next| one < next && *next <= one * 3.0));
        for (time, bound) in [
            (Duration::ZERO, Some(0.0005)),
            (Duration::from_micros(500), Some(0.0005)),
            (Duration::from_nanos(500_001), Some(0.001)),
            (Duration::from_millis(25), Some(0.025)),
            (Duration::from_secs(299), Some(300.0)),
            (Duration::from_secs(300), Some(300.0)),
            (Duration::from_nanos(300_000_000_001), None),
            (Duration::MAX, None),
        ] {
            let histogram = Histogram::default();
            histogram.observe(time);
            let (counts, _) = histogram.read();
            let first = BOUNDS
                .iter()
                .zip(counts)
                .find(|(_, count)| *count > 0)
                .map(|(bound, _)| *bound);
            assert_eq!((first, counts[BOUNDS.len()]), (bound, 1), "{time:?}");
        }
    }
}
