//! Checkpoints: moving the WAL's pages into the database.
//!
//! A request never runs one. A task calls [`Sqlite::checkpoint`], which copies pages while others write. Under constant
//! load such a checkpoint never catches up with the writers, so the WAL is not reused and grows. At 64 MiB the next
//! write runs a checkpoint that lets the WAL start again, and the requests of that moment wait for it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use super::{Sqlite, connect};
use crate::store::{LedgerState, Result};
use crate::when;

/// The number of pages, not in the database yet, that make a checkpoint worth its two fsyncs.
const CHECKPOINT_PAGES: i64 = 1_000;

/// 64 MiB.
pub(super) const RESTART_PAGES: u64 = 16_384;

/// The time that a restart waits for readers of the WAL.
const RESTART_TIMEOUT: Duration = Duration::from_millis(200);

/// The bytes of a page in the WAL: 4,096 and the header of its frame.
const FRAME: u64 = 4096 + 24;

impl Sqlite {
    /// Runs a checkpoint if there is enough to move.
    pub fn checkpoint(&self) -> Result<()> {
        let connection = connect(&self.path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        let mut progress = run(&connection, "PRAGMA wal_checkpoint(NOOP)")?;
        if progress.pages - progress.moved >= CHECKPOINT_PAGES {
            progress = self.files.keep_failed_sync(run(&connection, "PRAGMA wal_checkpoint(PASSIVE)"))?;
            self.last_checkpoint.store(when::now(), Ordering::Relaxed);
        }
        self.wal_pages.store(u64::try_from(progress.pages).unwrap_or(0), Ordering::Relaxed);
        Ok(())
    }

    pub fn state(&self) -> LedgerState {
        LedgerState {
            wal_bytes: self.wal_pages.load(Ordering::Relaxed) * FRAME,
            last_checkpoint: Some(self.last_checkpoint.load(Ordering::Relaxed)).filter(|&time| time != 0),
            wal_restarts: self.wal_restarts.load(Ordering::Relaxed),
        }
    }

    /// Moves all pages of a large WAL, so that the next write begins it again.
    pub(super) fn restart_large_wal(&self, connection: &Connection) {
        let pages = self.wal_pages.load(Ordering::Relaxed);
        if pages < self.restart_at.load(Ordering::Relaxed) {
            return;
        }
        let restart = || {
            connection.busy_timeout(RESTART_TIMEOUT)?;
            run(connection, "PRAGMA wal_checkpoint(RESTART)")
        };
        // If a long read holds it, the next attempt comes when it has doubled, so that requests do not wait each time.
        let mut next = pages * 2;
        match self.files.keep_failed_sync(restart()) {
            Ok(progress) if progress.is_blocked => {}
            Ok(_) => {
                next = RESTART_PAGES;
                self.wal_pages.store(0, Ordering::Relaxed);
                self.wal_restarts.fetch_add(1, Ordering::Relaxed);
                self.last_checkpoint.store(when::now(), Ordering::Relaxed);
                log::debug!("the WAL had {pages} pages and was restarted");
            }
            Err(error) => log::error!("the WAL could not be restarted: {error}"),
        }
        self.restart_at.store(next, Ordering::Relaxed);
    }
}

/// The bytes of the WAL that are in use now.
pub(super) fn wal_in_use(connection: &Connection) -> Result<u64> {
    let progress = run(connection, "PRAGMA wal_checkpoint(NOOP)")?;
    Ok(u64::try_from(progress.pages).unwrap_or(0) * FRAME)
}

struct CheckpointProgress {
    is_blocked: bool,
    pages: i64,
    /// The pages of these that are in the database.
    moved: i64,
}

fn run(connection: &Connection, checkpoint: &str) -> Result<CheckpointProgress> {
    Ok(connection.query_row(checkpoint, [], |row| {
        Ok(CheckpointProgress { is_blocked: row.get(0)?, pages: row.get(1)?, moved: row.get(2)? })
    })?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::engine::{Access, SqlSession};
    use crate::store::tests::Temporary;

    fn write_pages(engine: &Sqlite, pages: usize) {
        let fill = |session: &dyn SqlSession| {
            (0..pages)
                .try_for_each(|_| session.execute("INSERT INTO t VALUES (zeroblob(4000))", &[]).map(drop))
        };
        engine.as_dyn().transaction(false, fill).expect("some pages");
    }

    fn engine() -> (Temporary, Sqlite) {
        let temporary = Temporary::sqlite();
        let engine = Sqlite::open(&temporary.folder.join("wal.db"), Access::Create).expect("a database");
        engine
            .as_dyn()
            .transaction(false, |session| session.execute("CREATE TABLE t (x BLOB)", &[]))
            .expect("a table");
        (temporary, engine)
    }

    fn small_write(engine: &Sqlite) {
        let insert = |session: &dyn SqlSession| session.execute("INSERT INTO t VALUES (x'01')", &[]);
        engine.as_dyn().transaction(true, insert).expect("a write");
    }

    #[test]
    fn a_checkpoint_runs_from_a_thousand_pages_on() {
        let (temporary, engine) = engine();
        let moved = |engine: &Sqlite| {
            let connection = connect(&engine.path, OpenFlags::SQLITE_OPEN_READ_WRITE).expect("it");
            run(&connection, "PRAGMA wal_checkpoint(NOOP)").expect("a look").moved
        };
        write_pages(&engine, 500);
        engine.checkpoint().expect("a look");
        assert_eq!(moved(&engine), 0, "too little to move");
        assert_eq!(engine.state().last_checkpoint, None);
        let file = temporary.folder.join("wal.db-wal").metadata().expect("the WAL");
        assert_eq!(engine.state().wal_bytes + 32, file.len(), "all of it but its header");
        write_pages(&engine, 600);
        engine.checkpoint().expect("a checkpoint");
        assert!(moved(&engine) > 1000, "all is in the database");
        assert!(engine.state().last_checkpoint.is_some_and(|time| time > when::now() - 600));
        small_write(&engine);
        engine.checkpoint().expect("a look");
        assert!(engine.state().wal_bytes < 10 * 4120, "the WAL begins again: {}", engine.state().wal_bytes);
        assert_eq!(engine.state().wal_restarts, 0);
    }

    #[test]
    fn a_wal_that_has_grown_too_large_is_restarted() {
        let (_temporary, engine) = engine();
        let reader = connect(&engine.path, OpenFlags::SQLITE_OPEN_READ_ONLY).expect("a reader");
        let count = |reader: &Connection| -> i64 {
            reader.query_row("SELECT count(*) FROM t", [], |row| row.get(0)).expect("a count")
        };
        reader.execute_batch("BEGIN").expect("a long read");
        count(&reader);
        engine.restart_at.store(50, Ordering::Relaxed);
        write_pages(&engine, 60);
        engine.checkpoint().expect("a look");
        small_write(&engine);
        assert_eq!(engine.state().wal_restarts, 0, "the long read holds the WAL");
        assert!(engine.restart_at.load(Ordering::Relaxed) > 100, "the next attempt comes later");
        reader.execute_batch("COMMIT").expect("its end");
        engine.restart_at.store(engine.wal_pages.load(Ordering::Relaxed), Ordering::Relaxed);
        small_write(&engine);
        assert_eq!(engine.state().wal_restarts, 1);
        engine.checkpoint().expect("a look");
        assert!(engine.state().wal_bytes < 10 * 4120, "the WAL begins again: {}", engine.state().wal_bytes);
        assert_eq!(engine.restart_at.load(Ordering::Relaxed), RESTART_PAGES);
    }

    #[test]
    fn no_connection_runs_a_checkpoint_by_itself() {
        let (_temporary, engine) = engine();
        for mode in [OpenFlags::SQLITE_OPEN_READ_ONLY, OpenFlags::SQLITE_OPEN_READ_WRITE] {
            let connection = connect(&engine.path, mode).expect("a connection");
            let pages: i64 = connection
                .pragma_query_value(None, "wal_autocheckpoint", |row| row.get(0))
                .expect("the setting");
            assert_eq!(pages, 0);
        }
    }
}
