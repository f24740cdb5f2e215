//! Measures the ledger alone: several threads look up a key and append rows to a database at the same time.
//!
//!     ledger DATABASE [SECONDS [THREADS]...]

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use adriaticum::audit::Actor;
use adriaticum::database::{Access, DatabaseLocation};
use adriaticum::id::RequestId;
use adriaticum::keys::{Key, KeyName, KeyTerms, Permission, new_id};
use adriaticum::ledger::{LedgerRow, Tokens, Writer};
use adriaticum::secret::SecretDigest;
use adriaticum::store::Store;

/// The digest of the benchmark's key. Its secret has not the form of one, so no request can use it.
fn key(store: &Store) -> SecretDigest {
    let secret = "benchmark";
    let digest = SecretDigest::of(secret);
    if store.keys.find(&digest, 0).expect("a look-up").is_some() {
        return digest;
    }
    let name = KeyName::parse("benchmark").expect("a good name");
    let terms = KeyTerms {
        permissions: vec![Permission::Completions],
        expires: None,
        concurrent: None,
        budget: None,
    };
    let by = Actor::command("benchmark".into());
    let added = store.keys.add(&new_id(), secret, &name, &terms, &by);
    assert!(added.expect("a new key"), "its id is new");
    digest
}

fn row(id: RequestId, key: Key) -> LedgerRow {
    LedgerRow {
        request_id: id.to_string(),
        key_id: key.id,
        key_name: key.name,
        created: id.created(),
        status: Some(200),
        tokens: Tokens {
            prompt_tokens: Some(11),
            completion_tokens: Some(3),
            total_tokens: Some(14),
        },
        duration_ms: Some(1.5),
        queue_ms: Some(0.1),
        runtime_ms: Some(1.0),
        ..LedgerRow::default()
    }
}

/// The rows of one thread: their number, and the times of the look-ups and the appends.
fn write(store: &Store, digest: &SecretDigest, end: Instant) -> (u64, Duration, Duration) {
    let (mut rows, mut looking_up, mut appending) = (0, Duration::ZERO, Duration::ZERO);
    while Instant::now() < end {
        let id = RequestId::now();
        let began = Instant::now();
        let found = store.keys.find(digest, id.created());
        let (key, _) = found.expect("a look-up").expect("the key");
        looking_up += began.elapsed();
        let began = Instant::now();
        let appended = store.ledger.append(row(id, key), Some(digest));
        appended.expect("a durable row");
        appending += began.elapsed();
        rows += 1;
    }
    (rows, looking_up, appending)
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let database =
        DatabaseLocation::parse(&arguments.next().expect("the database should be named"))
            .expect("a database");
    let seconds: u64 = arguments
        .next()
        .map_or(2, |text| text.parse().expect("a number of seconds"));
    let mut counts: Vec<usize> = arguments
        .map(|text| text.parse().expect("a number of threads"))
        .collect();
    if counts.is_empty() {
        counts = vec![1, 2, 4, 8, 16, 32];
    }
    let mut store = Store::open(&database, Access::Create).expect("a database");
    store.join("", "").expect("a start");
    let writer = Writer::start(&store.ledger, None, |_| ());
    let _writer = writer.expect("a thread");
    let (digest, store) = (key(&store), Arc::new(store));
    println!("threads     rows/s      look-up           append");
    for threads in counts {
        let end = Instant::now() + Duration::from_secs(seconds);
        let running: Vec<_> = (0..threads)
            .map(|_| {
                let store = Arc::clone(&store);
                thread::spawn(move || write(&store, &digest, end))
            })
            .collect();
        let done: Vec<_> = running
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .collect();
        let rows: u64 = done.iter().map(|(rows, ..)| rows).sum();
        let mean = |total: Duration| total.as_secs_f64() * 1e6 / rows as f64;
        println!(
            "{threads:>7} {:>10} {:>9.0} µs {:>13.0} µs",
            rows / seconds,
            mean(done.iter().map(|(_, looking_up, _)| *looking_up).sum()),
            mean(done.iter().map(|(.., appending)| *appending).sum()),
        );
    }
}
