//! The embedded index: documents in SQLite's full-text index, in a file of its own beside the
//! ledger.
//!
//! Every query opens the file, which takes a fraction of a millisecond. So a query sees the changes
//! of other processes, and an index that was missing or damaged works again as soon as it is back.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, TransactionBehavior, params};
use serde::Serialize;

use super::documents::{Candidate, DocumentText};
use super::results::{Passage, SearchError};
use super::{query, ranking};
use crate::config::SearchConfig;
use crate::database::Pool;
use crate::database::sqlite::read_only_file::{FLAGS, ReadOnlyFile};
use crate::error::FailureCause;
use crate::files;

const SCHEMA: &str = include_str!("index.sql");

/// The version in the file: `user_version`.
const VERSION: i64 = 1;

/// The longest time that a change waits for the change of another process.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection's cache, in KiB.
const CACHE: i64 = 1024;

/// The number of SQLite's steps between two checks of the deadline.
const STEPS: i32 = 10_000;

/// The queries that run at once. Each uses a CPU all the time, and some MiB if many passages have
/// its words.
const MAX_QUERIES: usize = 2;

pub struct Index {
    pub path: PathBuf,
    timeout: Duration,
    results: usize,
    /// The places of queries that run.
    queries: Pool<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    New,
    Replaced,
    Unchanged,
}

#[derive(Debug, Serialize)]
pub struct Document {
    pub id: i64,
    pub title: String,
    pub source: String,
    pub path: String,
    pub size: i64,
    pub passages: i64,
    pub added: i64,
}

impl Index {
    pub fn new(config: &SearchConfig) -> Self {
        Self {
            path: config.index.clone(),
            timeout: config.timeout,
            results: config.results,
            queries: Pool::new([(); MAX_QUERIES]),
        }
    }

    pub fn find(&self, words: &str) -> Result<Vec<Passage>, SearchError> {
        let deadline = Instant::now() + self.timeout;
        let _place = self.queries.take(deadline, |()| true).ok_or_else(late)?;
        self.read(deadline, |connection| {
            ranking::best(connection, &query::words(words), self.results)
        })
    }

    pub fn add(
        &self,
        file: &Candidate,
        text: &DocumentText,
        now: i64,
    ) -> Result<Added, SearchError> {
        self.change(|connection| add(connection, file, text, now))
    }

    pub fn remove(&self, id: i64) -> Result<(), SearchError> {
        self.change(|connection| {
            connection.execute("DELETE FROM passages WHERE document = ?", [id])?;
            connection.execute("DELETE FROM documents WHERE id = ?", [id])?;
            Ok(())
        })
    }

    pub fn list(&self) -> Result<Vec<Document>, SearchError> {
        self.read(Instant::now() + self.timeout, |connection| {
            connection
                .prepare(
                    "SELECT id, title, source, path, size, added,
                     (SELECT count(*) FROM passages WHERE document = documents.id) AS passages
                     FROM documents ORDER BY path",
                )?
                .query_map([], |row| {
                    Ok(Document {
                        id: row.get("id")?,
                        title: row.get("title")?,
                        source: row.get("source")?,
                        path: row.get("path")?,
                        size: row.get("size")?,
                        passages: row.get("passages")?,
                        added: row.get("added")?,
                    })
                })?
                .collect()
        })
    }

    /// Opens the index read-only and runs `work`. Creates nothing.
    fn read<T>(
        &self,
        deadline: Instant,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, SearchError> {
        if !self.path.exists() {
            return Err(failed(format!(
                "there is no index at {}. Create it: adriaticum search add PATH",
                self.path.display()
            )));
        }
        let path = self
            .path
            .canonicalize()
            .map_err(|error| self.not_opened(&error))?;
        let (connection, read_only) = match connect(&path, OpenFlags::SQLITE_OPEN_READ_ONLY) {
            Err(error)
                if matches!(
                    error.sqlite_error_code(),
                    Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly)
                ) =>
            {
                let read_only =
                    ReadOnlyFile::new(&path).map_err(|error| self.not_opened(&error))?;
                (set_up(read_only.connect()), Some(read_only))
            }
            connection => (connection, None),
        };
        let read = || {
            let mut connection = connection?;
            connection.progress_handler(STEPS, Some(move || Instant::now() > deadline))?;
            connection.busy_timeout(deadline.saturating_duration_since(Instant::now()))?;
            if version(&connection)? != VERSION {
                return Ok(None);
            }
            work(&connection).map(Some)
        };
        let found = self.finish(read());
        // What was read may be wrong if another process has changed the file meanwhile.
        read_only
            .map_or(Ok(()), |file| file.check())
            .map_err(|error| self.not_opened(&error))?;
        found
    }

    /// Runs `work` in a transaction. Creates the index if it is missing.
    fn change<T>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, SearchError> {
        // SQLite would create a file that every user may read.
        let path = files::create(&self.path).and_then(|_| self.path.canonicalize());
        let path = path.map_err(|error| self.not_opened(&error))?;
        let change = || {
            let mut connection = connect(&path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
            connection.busy_timeout(WRITE_TIMEOUT)?;
            // Readers see the old state until the change is committed, and wait for no writer.
            connection.pragma_update(None, "journal_mode", "WAL")?;
            connection.pragma_update(None, "synchronous", "NORMAL")?;
            let transaction =
                connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let tables: i64 =
                transaction
                    .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
            if tables == 0 {
                transaction.execute_batch(SCHEMA)?;
                transaction.pragma_update(None, "user_version", VERSION)?;
            } else if version(&transaction)? != VERSION {
                return Ok(None);
            }
            let value = work(&transaction)?;
            transaction.commit()?;
            Ok(Some(value))
        };
        self.finish(change())
    }

    /// Passes on the result of some work, which is `None` if the index has another version.
    fn finish<T>(&self, done: rusqlite::Result<Option<T>>) -> Result<T, SearchError> {
        done.map_err(|error| self.failure(&error))?
            .ok_or_else(|| self.damaged("it is not an index of this version"))
    }

    fn failure(&self, error: &rusqlite::Error) -> SearchError {
        match error.sqlite_error_code() {
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
                self.damaged(&error.to_string())
            }
            Some(ErrorCode::OperationInterrupted | ErrorCode::DatabaseBusy) => late(),
            _ => failed(format!(
                "the index {}: {error}. Check who owns the file and its folder",
                self.path.display()
            )),
        }
    }

    fn not_opened(&self, error: &io::Error) -> SearchError {
        failed(format!(
            "the index {} can't be opened: {error}",
            self.path.display()
        ))
    }

    fn damaged(&self, how: &str) -> SearchError {
        failed(format!(
            "the index {} is damaged ({how}): move it away and add the documents again, or put a copy in its place",
            self.path.display()
        ))
    }
}

fn connect(path: &Path, mode: OpenFlags) -> rusqlite::Result<Connection> {
    set_up(Connection::open_with_flags(path, mode | FLAGS))
}

fn set_up(connection: rusqlite::Result<Connection>) -> rusqlite::Result<Connection> {
    let connection = connection?;
    connection.pragma_update(None, "cache_size", -CACHE)?;
    Ok(connection)
}

fn late() -> SearchError {
    SearchError::new(FailureCause::Timeout, "the index did not answer in time")
}

fn failed(details: String) -> SearchError {
    SearchError::new(FailureCause::Index, details)
}

fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row("PRAGMA user_version", [], |row| row.get(0))
}

fn add(
    connection: &Connection,
    file: &Candidate,
    text: &DocumentText,
    now: i64,
) -> rusqlite::Result<Added> {
    let path = file.path.to_string_lossy();
    let known: Option<(i64, [u8; 32], String)> = connection
        .query_row(
            "SELECT id, digest, source FROM documents WHERE path = ?",
            [&path],
            |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
        )
        .optional()?;
    if known
        .as_ref()
        .is_some_and(|(_, digest, source)| *digest == text.digest && *source == file.source)
    {
        return Ok(Added::Unchanged);
    }
    if let Some((id, ..)) = &known {
        connection.execute("DELETE FROM passages WHERE document = ?", [id])?;
    }
    let id: i64 = connection.query_row(
        "INSERT INTO documents (path, source, title, digest, size, added) VALUES (?1, ?2, ?3, ?4, ?5, ?6)
         ON CONFLICT (path) DO UPDATE SET source = ?2, title = ?3, digest = ?4, size = ?5, added = ?6
         RETURNING id",
        params![path, file.source, text.title, text.digest, text.size as i64, now],
        |row| row.get(0),
    )?;
    let mut insert = connection
        .prepare("INSERT INTO passages (document, title, heading, content) VALUES (?, ?, ?, ?)")?;
    for passage in &text.passages {
        insert.execute(params![id, text.title, passage.heading, passage.text])?;
    }
    Ok(if known.is_some() {
        Added::Replaced
    } else {
        Added::New
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::outline::Section;

    fn index() -> Connection {
        let connection = Connection::open_in_memory().expect("memory should be there");
        connection
            .execute_batch(SCHEMA)
            .expect("the schema should be good");
        connection
    }

    fn put(connection: &Connection, name: &str, title: &str, text: &str) -> Added {
        let file = Candidate {
            path: format!("/{name}").into(),
            source: name.into(),
        };
        let passages = vec![Section {
            heading: String::new(),
            text: text.into(),
        }];
        let digest =
            std::array::from_fn(|place| text.as_bytes().get(place).copied().unwrap_or_default());
        let text = DocumentText {
            title: title.into(),
            passages,
            digest,
            size: text.len() as u64,
        };
        add(connection, &file, &text, 7).expect("it should be taken")
    }

    fn sources(connection: &Connection, words: &str) -> Vec<String> {
        let found =
            ranking::best(connection, &query::words(words), 4).expect("it should be found or not");
        found.into_iter().map(|passage| passage.source).collect()
    }

    #[test]
    fn few_queries_run_at_once_and_the_others_wait_until_their_deadline() {
        let index = Index {
            path: "/nowhere/index.db".into(),
            timeout: Duration::from_millis(20),
            results: 4,
            queries: Pool::new([(); MAX_QUERIES]),
        };
        let take = |_| index.queries.take(Instant::now(), |()| true);
        let running: Vec<_> = (0..MAX_QUERIES).map(take).collect();
        let cause = || index.find("x").expect_err("there is no index").cause;
        assert_eq!(cause(), FailureCause::Timeout);
        drop(running);
        assert_eq!(cause(), FailureCause::Index);
    }

    #[test]
    fn words_are_no_syntax() {
        let connection = index();
        put(&connection, "a", "A", "x");
        for words in [
            "\"",
            "*",
            "x\0y",
            "a AND",
            "NOT",
            "(",
            "x:y",
            "{a b}: c",
            "NEAR(a b) -c* ^d 'e'",
            &"z ".repeat(10_000),
            "",
        ] {
            sources(&connection, words);
        }
    }

    #[test]
    fn the_best_comes_first_and_what_hardly_fits_is_left_out() {
        let connection = index();
        for number in 0..12 {
            put(
                &connection,
                &format!("other{number}"),
                "Other",
                "It is the end of the day, and of the week.",
            );
        }
        put(
            &connection,
            "title",
            "The Velna lighthouse",
            "It is 47 metres high.",
        );
        put(
            &connection,
            "text",
            "Sights",
            "There is a lighthouse, and there is the mill.",
        );
        let found = sources(&connection, "What is the height of the Velna lighthouse?");
        assert_eq!(found.first().map(String::as_str), Some("title"));
        assert!(
            found.iter().all(|source| !source.starts_with("other")),
            "{found:?}"
        );
        assert_eq!(
            sources(&connection, "what is it, and what of the other"),
            [""; 0],
            "stop words find nothing"
        );
        assert_eq!(
            sources(&connection, "the day").len(),
            4,
            "a word that nearly all have"
        );
        assert_eq!(
            sources(&connection, "Lighthouses")[0],
            "title",
            "another form of the word"
        );
    }

    #[test]
    fn a_passage_has_enough_of_the_words() {
        let connection = index();
        put(
            &connection,
            "warranty",
            "Pump",
            "The warranty is three years.",
        );
        put(
            &connection,
            "form",
            "Form",
            "Write your name in capital letters.",
        );
        put(
            &connection,
            "lamp",
            "Pump",
            "If the red lamp of the X200 blinks, there is no water.",
        );
        for (words, found) in [
            ("How long is the warranty?", &["warranty"][..]),
            ("What is the capital of Peru?", &[]),
            ("capital", &["form"]),
            ("Capital letters", &["form"]),
            ("Where is Peru?", &[]),
            ("Which fish lives in the red river?", &[]),
            (
                "Hello, I bought an X200 from you last week. Since this morning a red lamp blinks. What can I do?",
                &["lamp"],
            ),
        ] {
            assert_eq!(sources(&connection, words), found, "{words}");
        }
    }

    #[test]
    fn a_single_document_is_found() {
        let connection = index();
        put(&connection, "a", "A", "The only text.");
        assert_eq!(sources(&connection, "text"), ["a"]);
        assert_eq!(sources(&connection, "other"), [""; 0]);
    }

    #[test]
    fn the_same_file_replaces_itself() {
        let connection = index();
        assert_eq!(put(&connection, "a", "A", "one"), Added::New);
        assert_eq!(put(&connection, "a", "A", "one"), Added::Unchanged);
        assert_eq!(put(&connection, "a", "A", "two"), Added::Replaced);
        assert_eq!(
            (sources(&connection, "one"), sources(&connection, "two")),
            (vec![], vec!["a".into()])
        );
    }
}
