//! Group commit under a scheduler that tries interleavings of its threads: the file of the program itself, with the
//! scheduler's locks and threads. A thread that nobody wakes is a deadlock here, because the scheduler knows no time.

#[path = "../src/ledger/group_commit.rs"]
#[expect(dead_code, reason = "the service also asks how long a row has waited")]
mod group_commit;

/// The threads and locks of group commit.
mod thread_primitives {
    pub use shuttle::sync::{Mutex, MutexGuard};
    pub use shuttle::thread;
}

use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use shuttle::sync::Mutex;
use shuttle::thread;

use group_commit::{GroupCommit, NotWritten};

/// The interleavings that each case tries.
const INTERLEAVINGS: usize = 5_000;

const LONG: Duration = Duration::from_secs(3600);

type Queue = GroupCommit<u32, Result<u32, &'static str>>;

/// What the threads have written, one group after the other.
#[derive(Default)]
struct Ledger {
    rows: Vec<u32>,
    is_writing: bool,
}

/// Tries a case with three writers, each of which has an item and a timeout. The check gets their results and the rows.
fn explore(
    timeouts: [Duration; 3],
    write: impl Fn(&[u32]) -> Vec<Result<u32, &'static str>> + Copy + Send + Sync + 'static,
    check: impl Fn(&[Result<Result<u32, &'static str>, NotWritten>], &[u32]) + Send + Sync + 'static,
) {
    let case = move || {
        let queue = Arc::new(Queue::default());
        let ledger = Arc::new(Mutex::new(Ledger::default()));
        let writers = timeouts.into_iter().zip(1..).map(|(timeout, item)| {
            let (queue, ledger) = (Arc::clone(&queue), Arc::clone(&ledger));
            thread::spawn(move || {
                let write_group = |group: &[&u32], _: Instant| {
                    let group: Vec<u32> = group.iter().map(|item| **item).collect();
                    assert!(
                        !mem::replace(&mut lock(&ledger).is_writing, true),
                        "one leader at a time"
                    );
                    thread::yield_now();
                    let _end = EndOfWrite(&ledger);
                    let results = write(&group);
                    lock(&ledger)
                        .rows
                        .extend(results.iter().filter_map(|result| result.ok()));
                    results
                };
                let submit = AssertUnwindSafe(|| queue.submit(item, timeout, write_group));
                panic::catch_unwind(submit).unwrap_or(Err(NotWritten::Panicked))
            })
        });
        let writers: Vec<_> = writers.collect();
        let results: Vec<_> = writers
            .into_iter()
            .map(|writer| writer.join().expect("no panic"))
            .collect();
        let mut rows = lock(&ledger).rows.clone();
        rows.sort_unstable();
        check(&results, &rows);
        assert_eq!(
            queue.submit(9, LONG, |group, _| vec![Ok(*group[0]); group.len()]),
            Ok(Ok(9)),
            "it goes on"
        );
    };
    shuttle::check_random(case, INTERLEAVINGS);
}

fn lock(ledger: &Mutex<Ledger>) -> shuttle::sync::MutexGuard<'_, Ledger> {
    ledger
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Ends a write, even after a panic.
struct EndOfWrite<'a>(&'a Mutex<Ledger>);

impl Drop for EndOfWrite<'_> {
    fn drop(&mut self) {
        lock(self.0).is_writing = false;
    }
}

#[test]
fn every_writer_has_the_result_of_its_own_item() {
    let write = |group: &[u32]| group.iter().map(|item| Ok(*item)).collect();
    explore([LONG; 3], write, |results, rows| {
        assert_eq!(
            (results, rows),
            (&[Ok(Ok(1)), Ok(Ok(2)), Ok(Ok(3))][..], &[1, 2, 3][..])
        );
    });
}

#[test]
fn a_group_that_fails_fails_all_of_its_members_and_no_others() {
    let write = |group: &[u32]| match group.contains(&2) {
        true => vec![Err("on purpose"); group.len()],
        false => group.iter().map(|item| Ok(*item)).collect(),
    };
    explore([LONG; 3], write, |results, rows| {
        assert_eq!(results[1], Ok(Err("on purpose")));
        let written: Vec<u32> = results
            .iter()
            .filter_map(|result| result.ok()?.ok())
            .collect();
        assert_eq!(written, rows);
    });
}

/// Some interleavings have groups of several, in which the panic of one thread is the result of the others.
#[test]
fn a_leader_that_panics_leaves_none_of_its_group_waiting() {
    static WITH_OTHERS: AtomicUsize = AtomicUsize::new(0);
    let write = |group: &[u32]| {
        let results = group.iter().map(|item| Ok(*item)).collect();
        if group.contains(&2) {
            WITH_OTHERS.fetch_add(usize::from(group.len() > 1), Ordering::Relaxed);
            // Without the panic hook, which would report it as a failure.
            panic::resume_unwind(Box::new("on purpose"));
        }
        results
    };
    explore([LONG; 3], write, |results, rows| {
        assert_eq!(results[1], Err(NotWritten::Panicked));
        let written: Vec<u32> = results
            .iter()
            .filter_map(|result| result.ok()?.ok())
            .collect();
        assert_eq!(written, rows);
    });
    assert!(
        WITH_OTHERS.load(Ordering::Relaxed) > 0,
        "no interleaving had a group"
    );
}

#[test]
fn an_item_whose_deadline_has_passed_is_written_with_its_group_or_not_at_all() {
    static LATE: AtomicUsize = AtomicUsize::new(0);
    let write = |group: &[u32]| group.iter().map(|item| Ok(*item)).collect();
    explore(
        [LONG, Duration::ZERO, LONG],
        write,
        |results, rows| match results[1] {
            Err(NotWritten::Late) => {
                LATE.fetch_add(1, Ordering::Relaxed);
                assert_eq!(rows, [1, 3]);
            }
            _ => assert_eq!(rows, [1, 2, 3]),
        },
    );
    assert!(
        LATE.load(Ordering::Relaxed) > 0,
        "no interleaving had a late one"
    );
}
