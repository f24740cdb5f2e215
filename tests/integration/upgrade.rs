//! A database of version 4 or 6 is brought to the present version: the figures, the chain and the open rows are the same
//! afterwards.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use adriaticum::store::{
    Database, Durations, Filter, Grouping, IfMissing, Matching, Range, RollupRow, Span, SpanSums, Store,
    UsageRow,
};
use rusqlite::{Connection, params};
use sha2::{Digest, Sha256};

use crate::support::Folder;

const VERSION_4: &str = include_str!("version_4.sql");

/// Brings a database of version 7 back to version 6.
const BACK_TO_6: &str = include_str!("back_to_6.sql");
const DAY: i64 = 86_400;

/// The newest rows are not in `usage_spans` yet: version 4 added them up in the background.
const NOT_FOLDED: i64 = 300;

/// A row as version 4 wrote it.
struct Row {
    id: String,
    key: String,
    name: &'static str,
    created: i64,
    status: Option<i64>,
    code: Option<&'static str>,
    tokens: Option<i64>,
    duration: Option<f64>,
    runtime: Option<f64>,
    search: Option<f64>,
}

/// Rows over 30 days, of three keys of which one is renamed again and again.
fn row(number: i64, rows: i64, now: i64) -> Row {
    let created = now - 30 * DAY + number * 30 * DAY / rows;
    let (status, code) = match number % 17 {
        3 => (Some(502), Some("inference_error")),
        5 => (Some(400), Some("invalid_request")),
        7 if number % 5 == 0 => (None, Some("interrupted")),
        _ => (Some(200), None),
    };
    Row {
        id: format!("chatcmpl_{:012x}{number:020x}", created * 1000),
        key: format!("key_{}", number % 3),
        name: if number % 3 == 1 && number % 2 == 0 { "renamed" } else { "name" },
        created,
        status,
        code,
        tokens: (status == Some(200) && number % 11 != 0).then_some(number),
        duration: status.map(|_| number as f64 / 7.0),
        runtime: (status != Some(400)).then_some(number as f64 / 9.0),
        search: (number % 4 == 0).then_some(0.5),
    }
}

/// The hash of version 4: over the predecessor's and every column, each with its length.
fn hash(row: &Row, seq: i64, before: &[u8]) -> Vec<u8> {
    let mut bytes = before.to_vec();
    let mut part = |part: Option<&[u8]>| match part {
        None => bytes.extend([0xff; 4]),
        Some(part) => {
            bytes.extend((part.len() as u32).to_le_bytes());
            bytes.extend(part);
        }
    };
    for text in [Some(row.id.as_str()), Some(&row.key), Some(row.name), row.code] {
        part(text.map(str::as_bytes));
    }
    for number in [Some(seq), Some(row.created), row.status, row.tokens, Some(2), row.tokens] {
        part(number.map(i64::to_le_bytes).as_ref().map(|bytes| bytes.as_slice()));
    }
    for time in [row.duration, Some(0.25), row.runtime] {
        part(time.map(f64::to_le_bytes).as_ref().map(|bytes| bytes.as_slice()));
    }
    part(Some(&[0]));
    if let Some(search) = row.search {
        part(Some(b"always"));
        part(Some(&3_i64.to_le_bytes()));
        part(Some(&search.to_le_bytes()));
    }
    Sha256::digest(&bytes).to_vec()
}

/// Counts of durations in classes, each a tenth wider than the one before.
#[derive(Clone, Default)]
struct Histogram(BTreeMap<u8, u64>);

impl Histogram {
    fn add(&mut self, milliseconds: f64) {
        let class = ((milliseconds / 0.01).ln() / 1.1_f64.ln()).ceil().max(0.0);
        *self.0.entry((class as u8).min(241)).or_default() += 1;
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (class, count) in &self.0 {
            bytes.push(*class);
            let mut left = *count;
            while left >= 0x80 {
                bytes.push(left as u8 | 0x80);
                left >>= 7;
            }
            bytes.push(left as u8);
        }
        bytes
    }

    fn is(&self, found: &Durations) -> bool {
        let all: u64 = self.0.values().sum();
        [0.1, 0.5, 0.9, 1.0].into_iter().all(|share| {
            let (wanted, mut passed) = (((all as f64 * share).ceil() as u64).max(1), 0);
            let class = self.0.iter().find(|(_, count)| {
                passed += *count;
                passed >= wanted
            });
            found.percentile(share) == class.map(|(class, _)| 0.01 * 1.1_f64.powf(f64::from(*class) - 0.5))
        })
    }
}

#[derive(Clone, Default)]
struct Sums {
    counts: [i64; 5],
    runtime: Histogram,
    own: Histogram,
}

/// By start, key, status and code.
type Figures = BTreeMap<(i64, String, i64, String), Sums>;

fn figures<'a>(rows: impl Iterator<Item = &'a Row>, span: i64, since: i64) -> Figures {
    let mut figures = Figures::new();
    for row in rows.filter(|row| row.created >= since) {
        let place = (
            row.created / span * span,
            row.key.clone(),
            row.status.unwrap_or(0),
            row.code.unwrap_or("").into(),
        );
        let sums = figures.entry(place).or_default();
        let tokens = row.tokens.unwrap_or(0);
        let unmeasured = i64::from(row.status == Some(200) && row.tokens.is_none());
        for (sum, more) in sums.counts.iter_mut().zip([1, tokens, 2, tokens, unmeasured]) {
            *sum += more;
        }
        row.runtime.inspect(|&time| sums.runtime.add(time));
        if let Some(duration) = row.duration {
            sums.own.add(duration - row.runtime.unwrap_or(0.0) - row.search.unwrap_or(0.0));
        }
    }
    figures
}

/// Makes the database of version 4. Retention has removed the oldest rows, as far as they were added up.
fn make(folder: &Folder, rows: &[Row], removed: i64, now: i64) -> (PathBuf, String) {
    let path = folder.path("old.db");
    let database = Connection::open(&path).expect("a file");
    database
        .execute_batch(&format!("PRAGMA journal_mode = WAL; {VERSION_4} PRAGMA user_version = 4; BEGIN;"))
        .expect("tables");
    let (mut last, mut anchor) = (vec![0; 32], (0, vec![0; 32], 0));
    for (seq, row) in (1..).zip(rows) {
        last = hash(row, seq, &last);
        database
            .prepare_cached(
                "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, 2, ?7, ?, 0.25, ?, 0, ?, ?, ?, ?, ?)",
            )
            .and_then(|mut insert| {
                let search = row.search.map(|_| "always");
                insert.execute(params![
                    row.id,
                    row.key,
                    row.name,
                    row.created,
                    row.status,
                    row.code,
                    row.tokens,
                    row.duration,
                    row.runtime,
                    seq,
                    last,
                    search,
                    search.map(|_| 3),
                    row.search
                ])
            })
            .expect("a row");
        if seq == removed {
            anchor = (seq, last.clone(), row.created + 1);
        }
    }
    let folded = rows.len() as i64 - NOT_FOLDED;
    for (span, since) in [(60, now - 7200), (3600, now - 10 * DAY), (DAY, 0)] {
        for (place, sums) in figures(rows[..folded as usize].iter(), span, since) {
            let ((start, key, status, code), [requests, prompt, completion, total, unmeasured]) =
                (place, sums.counts);
            let (runtime, own) = (sums.runtime.bytes(), sums.own.bytes());
            database
                .prepare_cached("INSERT INTO usage_spans VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)")
                .and_then(|mut insert| {
                    insert.execute(params![
                        span, start, key, status, code, requests, prompt, completion, total, unmeasured,
                        runtime, own
                    ])
                })
                .expect("a span");
        }
    }
    let set = "UPDATE chain SET anchor_seq = ?, anchor_hash = ?, kept_since = ?";
    database.execute(set, params![anchor.0, anchor.1, anchor.2]).expect("the anchor");
    database
        .execute_batch(&format!(
            "INSERT INTO usage_daily SELECT created / 86400, key_id, key_name, coalesce(status, 0), coalesce(error_code, ''),
                count(*), coalesce(sum(prompt_tokens), 0), sum(completion_tokens), coalesce(sum(total_tokens), 0),
                count(*) FILTER (WHERE status = 200 AND total_tokens IS NULL) FROM usage GROUP BY 1, 2, 3, 4, 5;
             INSERT INTO usage_failures SELECT request_id, key_id, error_code FROM usage
                WHERE error_code IS NOT NULL AND seq <= {folded};
             UPDATE usage_folded SET seq = {folded};
             INSERT INTO usage (request_id, key_id, key_name, created)
                SELECT request_id || 'x', key_id, key_name, created FROM usage ORDER BY seq DESC LIMIT 3;
             DELETE FROM usage WHERE seq <= {removed};
             COMMIT;"
        ))
        .expect("the rest");
    let head =
        format!("{}:{}", rows.len(), last.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    (path, head)
}

/// The group that a row belongs to.
type Label<'a> = &'a dyn Fn(&Row) -> String;

/// Requests, errors and tokens of each group.
type Groups = BTreeMap<String, [i64; 3]>;

fn groups(store: &Store, by: Grouping) -> Groups {
    let mut found = Groups::new();
    let take = |row: UsageRow| {
        let label = row.labels[by.labels()[0]].to_string().trim_matches('"').to_owned();
        let sums = found.entry(label).or_default();
        for (sum, more) in sums.iter_mut().zip([row.sums.requests, row.sums.errors, row.sums.total_tokens]) {
            *sum += more;
        }
    };
    store.grouped(Range::ALL, Filter::ALL, by, take).expect("groups");
    found
}

fn expected_groups(rows: &[Row], label: impl Fn(&Row) -> String) -> Groups {
    let mut expected = Groups::new();
    for row in rows {
        let sums = expected.entry(label(row)).or_default();
        let more = [1, i64::from(row.status != Some(200)), row.tokens.unwrap_or(0)];
        sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    }
    expected
}

fn check_figures(store: &Store, span: Span, since: i64, rows: &[Row]) {
    let mut found: BTreeMap<_, SpanSums> = BTreeMap::new();
    let take = |row: RollupRow| {
        let place = (row.start, row.key_id, row.status.unwrap_or(0), row.error_code.unwrap_or_default());
        found.entry(place).or_default().add_stored(&row.sums);
    };
    store
        .figures(span, Range { since, until: i64::MAX }, Filter::ALL, &Matching::Anything, take)
        .expect("figures");
    let expected = figures(rows.iter(), span.seconds(), since);
    assert!(!expected.is_empty() && found.keys().eq(expected.keys()), "{span:?}");
    for (place, sums) in expected {
        let SpanSums { requests, prompt_tokens, completion_tokens, total_tokens, unmeasured, runtime, own } =
            &found[&place];
        let counts = [*requests, *prompt_tokens, *completion_tokens, *total_tokens, *unmeasured];
        assert_eq!(counts, sums.counts, "{span:?} {place:?}");
        assert!(sums.runtime.is(runtime) && sums.own.is(own), "{span:?} {place:?}");
    }
}

fn check(count: i64, removed: i64) {
    let folder = Folder::new();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_secs() as i64;
    let rows: Vec<Row> = (1..=count).map(|number| row(number, count, now)).collect();
    let (path, head) = make(&folder, &rows, removed, now);
    let mut store = Store::open(&Database::Sqlite(path.clone()), 1, IfMissing::Fail).expect("an upgrade");
    let date = |row: &Row| {
        time::OffsetDateTime::from_unix_timestamp(row.created).expect("a time").date().to_string()
    };
    let with_open = |mut groups: Groups, label: Label| {
        rows.iter().rev().take(3).for_each(|row| groups.entry(label(row)).or_default()[0] += 1);
        groups
    };
    let labels: [(Grouping, Label); 3] = [
        (Grouping::Day, &date),
        (Grouping::Month, &|row| date(row)[..7].into()),
        (Grouping::Key, &|row| row.key.clone()),
    ];
    for (by, label) in labels {
        assert_eq!(groups(&store, by), with_open(expected_groups(&rows, label), label), "{by:?}");
    }
    let status = |row: &Row| row.status.map_or("null".into(), |status| status.to_string());
    let by_status = with_open(expected_groups(&rows, status), &|_| "null".into());
    assert_eq!(groups(&store, Grouping::Status), by_status);
    for (span, since) in [(Span::Day, 0), (Span::Hour, now - 9 * DAY), (Span::Minute, now - 3600)] {
        check_figures(&store, span, since / span.seconds() * span.seconds(), &rows);
    }
    let found = store.verify().expect("a walk");
    assert_eq!((found.rows as i64, found.fault), (count - removed, None));
    assert_eq!(found.heads.iter().map(ToString::to_string).collect::<Vec<_>>(), [head]);
    assert!(store.list_keys().expect("the keys").iter().all(|key| key.concurrent.is_none()));
    assert_eq!(store.join("", "").expect("a start"), 3, "the open rows are still open");
    while store.seal(500, now).expect("a batch") > 0 {}
    let found = store.verify().expect("a walk");
    assert_eq!((found.rows as i64, found.fault), (count - removed + 3, None), "the chain goes on");
}

#[test]
fn a_hundred_thousand_rows_have_the_same_figures_before_and_after() {
    check(100_000, 0);
}

#[test]
fn rows_that_retention_removed_stay_in_the_figures() {
    for removed in [1_234, 4_600, 5_000 - NOT_FOLDED] {
        check(5_000, removed);
    }
}

#[test]
fn from_version_6_on_rows_belong_to_the_gateway_without_a_name() {
    let folder = Folder::new();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_secs() as i64;
    let rows: Vec<Row> = (1..=3_000).map(|number| row(number, 3_000, now)).collect();
    let (path, head) = make(&folder, &rows, 1_000, now);
    let open = || Store::open(&Database::Sqlite(path.clone()), 1, IfMissing::Fail).expect("an upgrade");
    drop(open());
    let old = Connection::open(&path).expect("the database");
    old.execute_batch(BACK_TO_6).expect("version 6");
    drop(old);
    let mut store = open();
    for (span, since) in [(Span::Day, 0), (Span::Hour, now - 9 * DAY), (Span::Minute, now - 3600)] {
        check_figures(&store, span, since / span.seconds() * span.seconds(), &rows);
    }
    let found = store.verify().expect("a walk");
    assert_eq!((found.rows, found.fault), (2_000, None));
    assert_eq!(found.heads[0].to_string(), head);
    let all = groups(&store, Grouping::Gateway);
    assert_eq!(
        all.into_iter().map(|(name, [requests, ..])| (name, requests)).collect::<Vec<_>>(),
        [(String::new(), 3_003)]
    );
    assert_eq!(store.join("", "").expect("a start"), 3, "the open rows are still open");
    while store.seal(500, now).expect("a batch") > 0 {}
    assert_eq!(store.verify().expect("a walk").fault, None, "the chain goes on");
}

#[test]
fn an_upgrade_that_breaks_off_leaves_version_4() {
    let folder = Folder::new();
    let rows: Vec<Row> = (1..=1_000).map(|number| row(number, 1_000, 100 * DAY)).collect();
    let (path, _) = make(&folder, &rows, 0, 100 * DAY);
    let old = Connection::open(&path).expect("the old database");
    old.execute_batch("CREATE TABLE usage_failed (x)").expect("a table in the way of the last step");
    assert!(Store::open(&Database::Sqlite(path.clone()), 1, IfMissing::Fail).is_err());
    let number = |query: &str| old.query_row(query, [], |row| row.get::<_, i64>(0)).expect("a number");
    assert_eq!(number("PRAGMA user_version"), 4);
    assert_eq!(number("SELECT sum(requests) FROM usage_daily"), 1_000);
    assert!(number("SELECT count(*) FROM usage_spans") > 0);
    old.execute_batch("DROP TABLE usage_failed").expect("out of the way");
    Store::open(&Database::Sqlite(path.clone()), 1, IfMissing::Fail).expect("the next start upgrades it");
}
