//! Checkpoints: moving the pages of the WAL into the database.
//!
//! SQLite's automatic checkpoints ignore a failed fsync, after which acknowledged rows can be lost,
//! so they are off. Instead, the thread whose write has made the WAL large runs one: nothing else
//! is written meanwhile, so all of the WAL is moved and the next write begins it again. Only a long
//! read can hold a part of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use rusqlite::Connection;

use crate::database::error::{DatabaseError, Result};
use crate::when;

/// The number of pages that make a checkpoint worth its fsync.
const CHECKPOINT_PAGES: u64 = 1_000;

/// The number of pages after which a checkpoint is tried again that a read held up. Most reads take
/// a millisecond, and the smallest disk has no space for twice the pages of a checkpoint. While a
/// long read goes on, an attempt finds nothing to move, and has no fsync.
const RETRY_PAGES: u64 = 100;

/// The bytes that the WAL's file keeps once it begins again: twice the pages of a checkpoint.
const FILE_LIMIT: i64 = 8 * 1024 * 1024;

/// The bytes of a page in the WAL: 4,096 and the header of its frame.
const FRAME: u64 = 4096 + 24;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalFigures {
    /// The bytes of the WAL that are in use.
    pub bytes: u64,
    /// The time of the last checkpoint; `None`: none since the start.
    pub last_checkpoint: Option<i64>,
}

pub struct WalState {
    /// The pages of the WAL after the last commit of this process.
    pages: Arc<AtomicU64>,
    /// The number of pages at which the next checkpoint runs.
    due_at: AtomicU64,
    /// The time of the last checkpoint; 0: none since the start.
    last_checkpoint: AtomicI64,
}

impl WalState {
    /// Counts the pages from now on, after each commit of the connection that writes.
    pub fn watch(connection: &mut Connection) -> Result<Self> {
        connection.pragma_update(None, "journal_size_limit", FILE_LIMIT)?;
        let bytes = match in_use(connection) {
            // SQLite does not say it for a WAL that can't be written, and only a writer needs it.
            Err(DatabaseError::ReadOnly) => 0,
            bytes => bytes?,
        };
        let pages = Arc::new(AtomicU64::new(bytes / FRAME));
        let counted = Arc::clone(&pages);
        connection.wal_hook(Some(move |_: &mut rusqlite::hooks::Wal, pages| {
            counted.store(u64::try_from(pages).unwrap_or(0), Ordering::Relaxed);
            Ok(())
        }))?;
        Ok(Self {
            pages,
            due_at: AtomicU64::new(CHECKPOINT_PAGES),
            last_checkpoint: AtomicI64::new(0),
        })
    }

    /// Calls `checkpoint` if the WAL has become large.
    pub fn checkpoint_if_due(&self, checkpoint: impl FnOnce() -> Result<CheckpointProgress>) {
        // One thread of several takes it upon itself.
        let due = self.due_at.load(Ordering::Relaxed);
        if self.pages.load(Ordering::Relaxed) < due
            || self
                .due_at
                .compare_exchange(due, u64::MAX, Ordering::Relaxed, Ordering::Relaxed)
                .is_err()
        {
            return;
        }
        let next = match checkpoint() {
            Ok(CheckpointProgress { pages, moved }) => {
                self.last_checkpoint.store(when::now(), Ordering::Relaxed);
                if moved < pages {
                    pages + RETRY_PAGES
                } else {
                    CHECKPOINT_PAGES
                }
            }
            // Another thread writes, and will find that it is due.
            Err(DatabaseError::Busy) => CHECKPOINT_PAGES,
            Err(error) => {
                log::error!("the checkpoint failed: {error}");
                self.pages.load(Ordering::Relaxed) + CHECKPOINT_PAGES
            }
        };
        self.due_at.store(next, Ordering::Relaxed);
    }

    pub fn figures(&self) -> WalFigures {
        WalFigures {
            bytes: self.pages.load(Ordering::Relaxed) * FRAME,
            last_checkpoint: Some(self.last_checkpoint.load(Ordering::Relaxed))
                .filter(|&time| time != 0),
        }
    }
}

/// The bytes of the WAL that are in use now.
pub fn in_use(connection: &Connection) -> Result<u64> {
    Ok(run(connection, "PRAGMA wal_checkpoint(NOOP)")?.pages * FRAME)
}

/// The progress of a checkpoint.
pub struct CheckpointProgress {
    pages: u64,
    /// The pages of these that are in the database.
    moved: u64,
}

pub fn run(connection: &Connection, checkpoint: &str) -> Result<CheckpointProgress> {
    let number = |number: i64| u64::try_from(number).unwrap_or(0);
    Ok(connection.query_row(checkpoint, [], |row| {
        Ok(CheckpointProgress {
            pages: number(row.get(1)?),
            moved: number(row.get(2)?),
        })
    })?)
}

#[cfg(test)]
mod tests {
    use rusqlite::OpenFlags;

    use super::super::connect;
    use super::*;
    use crate::database::Database;
    use crate::database::Session;
    use crate::database::tests::open;
    use crate::store::tests::Temporary;

    fn write_pages(engine: &Database, pages: usize) {
        let fill = |session: &Session| {
            (0..pages).try_for_each(|_| {
                session
                    .execute("INSERT INTO t VALUES (zeroblob(4000))", &[])
                    .map(drop)
            })
        };
        engine.transaction(fill).expect("some pages");
    }

    fn engine() -> (Temporary, Database) {
        let temporary = Temporary::sqlite();
        let engine = open(&temporary.folder.join("wal.db")).expect("a database");
        engine
            .transaction(|session| session.execute("CREATE TABLE t (x BLOB)", &[]))
            .expect("a table");
        (temporary, engine)
    }

    fn moved(engine: &Database) -> u64 {
        let connection = connect(
            &engine.sqlite().expect("a file").path,
            OpenFlags::SQLITE_OPEN_READ_WRITE,
        )
        .expect("it");
        run(&connection, "PRAGMA wal_checkpoint(NOOP)")
            .expect("a look")
            .moved
    }

    #[test]
    fn a_checkpoint_runs_from_a_thousand_pages_on() {
        let (temporary, engine) = engine();
        write_pages(&engine, 500);
        assert_eq!(
            (moved(&engine), engine.wal_figures().last_checkpoint),
            (0, None),
            "too little to move"
        );
        let file = || {
            temporary
                .folder
                .join("wal.db-wal")
                .metadata()
                .expect("the WAL")
                .len()
        };
        assert_eq!(
            engine.wal_figures().bytes + 32,
            file(),
            "all of it but its header"
        );
        write_pages(&engine, 600);
        assert!(moved(&engine) > 1000, "all is in the database");
        assert!(
            engine
                .wal_figures()
                .last_checkpoint
                .is_some_and(|time| time > when::now() - 600)
        );
        write_pages(&engine, 1);
        assert!(
            engine.wal_figures().bytes < 10 * FRAME,
            "the WAL begins again"
        );
        for _ in 0..5 {
            write_pages(&engine, 2000);
        }
        write_pages(&engine, 1);
        assert!(
            file() <= FILE_LIMIT as u64 + 32,
            "its file is cut: {} bytes",
            file()
        );
    }

    #[test]
    fn a_read_holds_the_wal_and_the_next_attempt_follows_soon() {
        let (_temporary, engine) = engine();
        let reader = connect(
            &engine.sqlite().expect("a file").path,
            OpenFlags::SQLITE_OPEN_READ_ONLY,
        )
        .expect("a reader");
        reader
            .execute_batch("BEGIN; SELECT count(*) FROM t")
            .expect("a long read");
        write_pages(&engine, 1100);
        let due = engine
            .sqlite()
            .expect("a file")
            .wal
            .due_at
            .load(Ordering::Relaxed);
        assert!(
            (1200..1400).contains(&due),
            "the next attempt is not at the next write: {due}"
        );
        write_pages(&engine, 1);
        assert_eq!(
            engine
                .sqlite()
                .expect("a file")
                .wal
                .due_at
                .load(Ordering::Relaxed),
            due
        );
        assert!(engine.wal_figures().bytes > 1100 * 4096, "it grows");
        reader.execute_batch("COMMIT").expect("its end");
        write_pages(&engine, 200);
        write_pages(&engine, 1);
        assert!(
            engine.wal_figures().bytes < 10 * FRAME,
            "the WAL begins again"
        );
        assert_eq!(
            engine
                .sqlite()
                .expect("a file")
                .wal
                .due_at
                .load(Ordering::Relaxed),
            CHECKPOINT_PAGES
        );
    }

    #[test]
    fn no_connection_runs_a_checkpoint_by_itself() {
        let (_temporary, engine) = engine();
        for mode in [
            OpenFlags::SQLITE_OPEN_READ_ONLY,
            OpenFlags::SQLITE_OPEN_READ_WRITE,
        ] {
            let connection =
                connect(&engine.sqlite().expect("a file").path, mode).expect("a connection");
            let pages: i64 = connection
                .pragma_query_value(None, "wal_autocheckpoint", |row| row.get(0))
                .expect("the setting");
            assert_eq!(pages, 0);
        }
    }
}
