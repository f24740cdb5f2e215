//! Checkpoints: moving the WAL's pages into the database.
//!
//! A request never runs one. A task calls [`Sqlite::checkpoint`], which copies pages while others write. Under constant
//! load such a checkpoint never catches up with the writers, so the WAL is not reused and grows. At 64 MiB the next leader
//! of a group runs a checkpoint that lets the WAL start again, and the requests of that moment wait for it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use super::super::super::StoreError;
use super::{READER_CACHE, Sqlite, connect, lock};

/// How many pages that are not in the database yet make a checkpoint worth its two fsyncs.
const CHECKPOINT_PAGES: i64 = 1_000;

/// 64 MiB.
pub(super) const RESTART_PAGES: u64 = 16_384;

/// How long a restart waits for those that still read from the WAL.
const RESTART_PATIENCE: Duration = Duration::from_millis(200);

impl Sqlite {
    /// Runs a checkpoint if there is enough to move. Returns whether the WAL was written since the last call.
    pub fn checkpoint(&self) -> Result<bool, StoreError> {
        let mut kept = lock(&self.checkpointer);
        let connection = match kept.take() {
            Some(connection) => connection,
            None => connect(&self.path, OpenFlags::SQLITE_OPEN_READ_WRITE, READER_CACHE)?,
        };
        let mut progress = run(&connection, "PRAGMA wal_checkpoint(NOOP)")?;
        if progress.pages - progress.moved >= CHECKPOINT_PAGES {
            progress = run(&connection, "PRAGMA wal_checkpoint(PASSIVE)")?;
        }
        // After an error the connection is dropped, and the next call opens another one.
        *kept = Some(connection);
        let pages = u64::try_from(progress.pages).unwrap_or(0);
        let before = self.wal.pages();
        self.wal.set_pages(pages);
        Ok(pages != before)
    }

    /// The bytes of the WAL that are in use.
    pub fn wal_bytes(&self) -> u64 {
        self.wal.bytes()
    }

    /// How often the WAL reached 64 MiB and was restarted.
    pub fn wal_restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }
}

struct Progress {
    is_blocked: bool,
    pages: i64,
    /// Of these, the pages that are in the database.
    moved: i64,
}

fn run(connection: &Connection, checkpoint: &str) -> Result<Progress, StoreError> {
    Ok(connection.prepare_cached(checkpoint)?.query_row([], |row| {
        Ok(Progress { is_blocked: row.get(0)?, pages: row.get(1)?, moved: row.get(2)? })
    })?)
}

/// Moves all pages, so that the next write begins the WAL again. Returns whether nothing prevented it.
pub(super) fn restart(connection: &Connection) -> Result<bool, StoreError> {
    connection.busy_timeout(RESTART_PATIENCE)?;
    Ok(!run(connection, "PRAGMA wal_checkpoint(RESTART)")?.is_blocked)
}

#[cfg(test)]
mod tests {
    use super::super::super::super::tests::Temporary;
    use super::super::super::{Session, Statement, Write, values};
    use super::*;

    fn write_pages(engine: &Sqlite, pages: usize) {
        let fill = |session: &dyn Session| {
            (0..pages)
                .try_for_each(|_| session.execute("INSERT INTO t VALUES (zeroblob(4000))", &[]).map(drop))
        };
        engine.transaction(false, fill).expect("some pages");
    }

    fn engine() -> (Temporary, Sqlite) {
        let temporary = Temporary::new();
        let engine = Sqlite::open(&temporary.folder.join("wal.db")).expect("a database");
        engine
            .transaction(false, |session| session.execute("CREATE TABLE t (x BLOB)", &[]))
            .expect("a table");
        (temporary, engine)
    }

    fn small_write(engine: &Sqlite) {
        let statement = Statement::new("INSERT INTO t VALUES ($1)", values![vec![1_u8]]);
        engine.write(Write { statements: vec![statement], durable: true }).expect("a write");
    }

    #[test]
    fn a_checkpoint_runs_from_a_thousand_pages_on() {
        let (_temporary, engine) = engine();
        let moved = |engine: &Sqlite| {
            let connection =
                connect(&engine.path, OpenFlags::SQLITE_OPEN_READ_WRITE, READER_CACHE).expect("it");
            run(&connection, "PRAGMA wal_checkpoint(NOOP)").expect("a look").moved
        };
        write_pages(&engine, 500);
        assert!(engine.checkpoint().expect("a look"), "the WAL was written");
        assert_eq!(moved(&engine), 0, "too little to move");
        assert!(!engine.checkpoint().expect("a look"), "nothing was written since");
        assert!(engine.wal_bytes() > 500 * 4096);
        write_pages(&engine, 600);
        assert!(engine.checkpoint().expect("a checkpoint"));
        assert!(moved(&engine) > 1000, "all is in the database");
        small_write(&engine);
        engine.checkpoint().expect("a look");
        assert!(engine.wal_bytes() < 10 * 4120, "the WAL begins again: {}", engine.wal_bytes());
        assert_eq!(engine.wal_restarts(), 0);
    }

    #[test]
    fn a_leader_restarts_a_wal_that_has_grown_too_large() {
        let (_temporary, engine) = engine();
        let reader = connect(&engine.path, OpenFlags::SQLITE_OPEN_READ_ONLY, READER_CACHE).expect("a reader");
        let count = |reader: &Connection| -> i64 {
            reader.query_row("SELECT count(*) FROM t", [], |row| row.get(0)).expect("a count")
        };
        reader.execute_batch("BEGIN").expect("a long read");
        count(&reader);
        engine.restart_at.store(50, Ordering::Release);
        write_pages(&engine, 60);
        engine.checkpoint().expect("a look");
        small_write(&engine);
        assert_eq!(engine.wal_restarts(), 0, "the long read holds the WAL");
        assert!(engine.restart_at.load(Ordering::Acquire) > 100, "the next attempt comes later");
        reader.execute_batch("COMMIT").expect("its end");
        engine.restart_at.store(50, Ordering::Release);
        small_write(&engine);
        assert_eq!(engine.wal_restarts(), 1);
        engine.checkpoint().expect("a look");
        assert!(engine.wal_bytes() < 10 * 4120, "the WAL begins again: {}", engine.wal_bytes());
        assert_eq!(engine.restart_at.load(Ordering::Acquire), RESTART_PAGES);
    }

    #[test]
    fn no_connection_runs_a_checkpoint_by_itself() {
        let (_temporary, engine) = engine();
        for mode in [OpenFlags::SQLITE_OPEN_READ_ONLY, OpenFlags::SQLITE_OPEN_READ_WRITE] {
            let connection = connect(&engine.path, mode, READER_CACHE).expect("a connection");
            let pages: i64 = connection
                .pragma_query_value(None, "wal_autocheckpoint", |row| row.get(0))
                .expect("the setting");
            assert_eq!(pages, 0);
        }
    }
}
