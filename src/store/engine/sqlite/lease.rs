//! The write connection while one thread has it, and how a leader writes its group.

use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::Connection;

use super::super::super::StoreError;
use super::super::Session;
use super::files::Files;
use super::group_commit::{Job, Writer};
use super::{Statements, checkpoint, lock};

/// There are locks for which SQLite does not wait by itself.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

pub(super) struct WriteConnection {
    pub connection: Connection,
    pub files: Files,
}

/// The connection, while one thread has it. Dropping it rolls back what is not committed, gives the connection back and
/// reports a failure to every member of the group that has no outcome: after an error and after a panic too.
pub(super) struct Lease<'a> {
    writer: &'a Writer,
    /// `None` only while it is dropped.
    connection: Option<WriteConnection>,
    group: Vec<Arc<Job>>,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let connection = self.connection.take();
        if let Some(WriteConnection { connection, .. }) = &connection
            && !connection.is_autocommit()
        {
            // It fails only if SQLite has rolled back already.
            let _ = connection.execute_batch("ROLLBACK");
        }
        let mut state = lock(&self.writer.state);
        state.connection = connection;
        for job in &self.group {
            let _ = job.outcome.set(Err(StoreError::Panicked));
        }
        drop(state);
        self.writer.changed.notify_all();
    }
}

impl<'a> Lease<'a> {
    pub fn new(writer: &'a Writer, connection: WriteConnection, group: Vec<Arc<Job>>) -> Self {
        Self { writer, connection: Some(connection), group }
    }

    pub fn connection(&self) -> &Connection {
        &self.lent().connection
    }

    fn lent(&self) -> &WriteConnection {
        self.connection.as_ref().expect("a lease should have its connection until it is dropped")
    }

    /// Writes the group and reports the outcomes.
    pub fn write_group(mut self) {
        self.restart_large_wal();
        let group = self.group.clone();
        let written = match self.write_together(&group) {
            Ok(changed) => group.into_iter().zip(changed.into_iter().map(Ok)).collect(),
            Err(StoreError::Busy) => self.retry_later(group),
            Err(error) if group.len() == 1 => {
                group.into_iter().map(|job| (job, Err(error.clone()))).collect()
            }
            // Retry each write alone to find the failing one.
            Err(_) => group
                .into_iter()
                .map(|job| {
                    let changed = self.write_together(slice::from_ref(&job));
                    (job, changed.map(|changed| changed.into_iter().sum()))
                })
                .collect(),
        };
        let (durable, others): (Vec<_>, Vec<_>) =
            written.into_iter().partition(|(job, outcome): &(Arc<Job>, Result<usize, StoreError>)| {
                job.is_durable() && outcome.is_ok()
            });
        // They need no fsync, so they do not wait for it.
        self.report(others);
        if !durable.is_empty() {
            let synced = self.writer.wal.sync();
            self.report(
                durable.into_iter().map(|(job, outcome)| (job, synced.clone().and(outcome))).collect(),
            );
        }
    }

    fn report(&self, outcomes: Vec<(Arc<Job>, Result<usize, StoreError>)>) {
        if outcomes.is_empty() {
            return;
        }
        // With the lock, so that no thread misses the signal between its look and its wait.
        let state = lock(&self.writer.state);
        for (job, outcome) in outcomes {
            let _ = job.outcome.set(outcome);
        }
        drop(state);
        self.writer.changed.notify_all();
    }

    /// After another process had the database locked: those that still have time go back to the head of the queue.
    fn retry_later(&mut self, group: Vec<Arc<Job>>) -> Vec<(Arc<Job>, Result<usize, StoreError>)> {
        thread::sleep(RETRY_PAUSE);
        let now = Instant::now();
        let (in_time, late): (Vec<_>, Vec<_>) = group.into_iter().partition(|job| now < job.deadline);
        self.group.retain(|job| now >= job.deadline);
        let mut state = lock(&self.writer.state);
        in_time.into_iter().rev().for_each(|job| state.waiting.push_front(job));
        late.into_iter().map(|job| (job, Err(StoreError::Busy))).collect()
    }

    /// Writes a group in one transaction: all of it, or nothing. Returns how many rows each member changed.
    fn write_together(&self, group: &[Arc<Job>]) -> Result<Vec<usize>, StoreError> {
        let deadline = group.iter().map(|job| job.deadline).min().unwrap_or_else(Instant::now);
        self.begin(deadline)?;
        let written = group.iter().map(|job| self.run(job)).collect();
        let committed = match &written {
            Ok(_) => self.commit(),
            Err(_) => Ok(()),
        };
        if !self.connection().is_autocommit() {
            let _ = self.connection().execute_batch("ROLLBACK");
        }
        committed.and(written)
    }

    fn run(&self, job: &Job) -> Result<usize, StoreError> {
        let statements = job.write.iter().flat_map(|write| &write.statements);
        statements.into_iter().try_fold(0, |_, statement| {
            Statements(self.connection()).execute(statement.text, &statement.parameters)
        })
    }

    /// Checks that writing makes sense, and sets how long SQLite waits for other processes.
    pub fn prepare(&self, deadline: Instant) -> Result<(), StoreError> {
        self.writer.wal.check()?;
        self.lent().files.check()?;
        Ok(self.connection().busy_timeout(deadline.saturating_duration_since(Instant::now()))?)
    }

    fn begin(&self, deadline: Instant) -> Result<(), StoreError> {
        self.prepare(deadline)?;
        self.connection().prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        Ok(())
    }

    pub fn begin_until(&self, deadline: Instant) -> Result<(), StoreError> {
        loop {
            match self.begin(deadline) {
                Err(StoreError::Busy) if Instant::now() < deadline => thread::sleep(RETRY_PAUSE),
                result => return result,
            }
        }
    }

    pub fn commit(&self) -> Result<(), StoreError> {
        self.connection().prepare_cached("COMMIT")?.execute([])?;
        Ok(())
    }

    fn restart_large_wal(&self) {
        let Writer { wal, restart_at, restarts, .. } = self.writer;
        let pages = wal.pages();
        if pages < restart_at.load(Ordering::Acquire) {
            return;
        }
        match checkpoint::restart(self.connection()) {
            Ok(true) => {
                wal.set_pages(0);
                restart_at.store(checkpoint::RESTART_PAGES, Ordering::Release);
                restarts.fetch_add(1, Ordering::Relaxed);
                log::debug!("the WAL had {pages} pages and was restarted");
            }
            // A long read holds it: the next attempt comes when it has doubled, so that requests do not wait each time.
            Ok(false) => restart_at.store(pages * 2, Ordering::Release),
            Err(error) => {
                restart_at.store(pages * 2, Ordering::Release);
                log::error!("the WAL could not be restarted: {error}");
            }
        }
    }
}
