//! The embedded index: documents in SQLite's full-text index, in a file of its own beside the ledger.
//!
//! Every query opens the file, which takes a fraction of a millisecond. So a query sees the changes of other processes,
//! and an index that was missing or damaged works again as soon as it is back.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, TransactionBehavior, params};
use serde::Serialize;

use super::documents::{Candidate, Text};
use super::{MAX_QUERY, Passage, Search, SearchError, text};
use crate::client::Cancellation;
use crate::config::SearchConfig;
use crate::files;

const SCHEMA: &str = include_str!("index.sql");

/// The version in the file: `user_version`.
const VERSION: i64 = 1;

/// What the word in a title, in a heading and in the text weigh.
const WEIGHTS: &str = "4.0, 2.0, 1.0";

/// A word that more than half of the passages have weighs next to nothing, and a passage that has only such
/// words was not found. Among fewer passages than these, that would say nothing.
const FEW_PASSAGES: usize = 10;
const WEIGHTLESS: f64 = -1e-3;

/// A passage that fits less than this part of how the best fits is left out: it would only be in the way of a
/// small model.
const LEAST_FIT: f64 = 0.25;

/// How long a change waits for another process's.
const WRITE_PATIENCE: Duration = Duration::from_secs(10);

/// What a connection keeps of the index in memory, in KiB.
const CACHE: i64 = 1024;

/// After how many of SQLite's steps it is looked whether the time is up.
const STEPS: i32 = 10_000;

pub struct Index {
    path: PathBuf,
    timeout: Duration,
    results: usize,
}

/// What adding a file came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    New,
    Replaced,
    Unchanged,
}

/// A document as it is listed.
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

impl Search for Index {
    /// It is short, so it is not cancelled.
    fn find(&self, words: &str, _: &Cancellation) -> Result<Vec<Passage>, SearchError> {
        let connection = self.open()?;
        let expression = expression(words);
        if expression.is_empty() {
            return Ok(Vec::new());
        }
        find(&connection, &expression, self.results).map_err(|error| self.told(&error))
    }
}

impl Index {
    pub fn new(config: &SearchConfig) -> Self {
        Self { path: config.index.clone(), timeout: config.timeout, results: config.results }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a file's text, or puts it in the place of what the file was before.
    pub fn add(&self, file: &Candidate, text: &Text, now: i64) -> Result<Added, SearchError> {
        self.change(|connection| add(connection, file, text, now))
    }

    /// Removes a document; whether there was one of this id.
    pub fn remove(&self, id: i64) -> Result<bool, SearchError> {
        // Where there is no index, none is to be made.
        self.open()?;
        self.change(|connection| {
            connection.execute("DELETE FROM passages WHERE document = ?", [id])?;
            Ok(connection.execute("DELETE FROM documents WHERE id = ?", [id])? == 1)
        })
    }

    pub fn list(&self) -> Result<Vec<Document>, SearchError> {
        let connection = self.open()?;
        let list = || {
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
                .collect::<rusqlite::Result<Vec<Document>>>()
        };
        list().map_err(|error| self.told(&error))
    }

    /// Opens the index to read it, within the time for a query. It may not change it, and makes none.
    fn open(&self) -> Result<Connection, SearchError> {
        if !self.path.exists() {
            return Err(SearchError::new(format!(
                "there is no index at {}: adriaticum search add PATH makes one",
                self.path.display()
            )));
        }
        let open = || {
            let mut connection = self.connect(OpenFlags::SQLITE_OPEN_READ_ONLY)?;
            let deadline = Instant::now() + self.timeout;
            connection.progress_handler(STEPS, Some(move || Instant::now() > deadline))?;
            connection.busy_timeout(self.timeout)?;
            Ok((version(&connection)?, connection))
        };
        match open().map_err(|error| self.told(&error))? {
            (VERSION, connection) => Ok(connection),
            _ => Err(self.damaged("it is no index of this version")),
        }
    }

    /// Does work in a transaction, in an index that is made where there is none.
    fn change<T>(&self, work: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, SearchError> {
        // Made here and not by SQLite, so that only the service's own user and group may read it.
        files::create(&self.path).map_err(|error| {
            SearchError::new(format!("the index {} can't be written: {error}", self.path.display()))
        })?;
        let change = || {
            let mut connection = self.connect(OpenFlags::SQLITE_OPEN_READ_WRITE)?;
            connection.busy_timeout(WRITE_PATIENCE)?;
            // Who reads sees the state before until the change is complete, and waits for nobody.
            connection.pragma_update(None, "journal_mode", "WAL")?;
            connection.pragma_update(None, "synchronous", "NORMAL")?;
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let tables: i64 =
                transaction.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
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
        match change().map_err(|error| self.told(&error))? {
            Some(value) => Ok(value),
            None => Err(self.damaged("it is no index of this version")),
        }
    }

    fn connect(&self, mode: OpenFlags) -> rusqlite::Result<Connection> {
        let connection = Connection::open_with_flags(&self.path, mode | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
        connection.pragma_update(None, "cache_size", -CACHE)?;
        Ok(connection)
    }

    fn told(&self, error: &rusqlite::Error) -> SearchError {
        match error.sqlite_error_code() {
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => self.damaged(&error.to_string()),
            Some(ErrorCode::OperationInterrupted | ErrorCode::DatabaseBusy) => {
                SearchError::new("the index did not answer in time")
            }
            _ => SearchError::new(format!(
                "the index {}: {error}. Check who owns the file and its folder",
                self.path.display()
            )),
        }
    }

    fn damaged(&self, how: &str) -> SearchError {
        SearchError::new(format!(
            "the index {} is damaged ({how}): move it away and add the documents again, or put a copy in its place",
            self.path.display()
        ))
    }
}

fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row("PRAGMA user_version", [], |row| row.get(0))
}

/// Any of the words, each in quotation marks, so that nothing that a person wrote is syntax.
fn expression(words: &str) -> String {
    let words = text::one_line(words);
    let words = text::cut(&words, MAX_QUERY).split(|c: char| !c.is_alphanumeric());
    let quoted: Vec<String> =
        words.filter(|word| !word.is_empty()).map(|word| format!("\"{word}\"")).collect();
    quoted.join(" OR ")
}

fn find(connection: &Connection, expression: &str, results: usize) -> rusqlite::Result<Vec<Passage>> {
    let is_large: bool = connection.query_row(
        &format!("SELECT EXISTS (SELECT 1 FROM passages LIMIT 1 OFFSET {FEW_PASSAGES})"),
        [],
        |row| row.get(0),
    )?;
    let least = if is_large { WEIGHTLESS } else { 0.0 };
    let mut statement = connection.prepare(&format!(
        "SELECT passages.title, heading, source, content, score
         FROM (SELECT rowid, bm25(words, {WEIGHTS}) AS score FROM words WHERE words MATCH ?1
               ORDER BY score LIMIT ?2) AS best
         JOIN passages ON passages.id = best.rowid JOIN documents ON documents.id = passages.document
         WHERE score < ?3 ORDER BY score, passages.id"
    ))?;
    let mut rows = statement.query(params![expression, results as i64, least])?;
    let (mut found, mut best) = (Vec::new(), 0.0);
    while let Some(row) = rows.next()? {
        // The better it fits, the lower the score.
        let score: f64 = row.get(4)?;
        if found.is_empty() {
            best = score;
        } else if score > best * LEAST_FIT {
            break;
        }
        let (title, heading): (String, String) = (row.get(0)?, row.get(1)?);
        let title =
            if heading.is_empty() || heading == title { title } else { format!("{title}: {heading}") };
        found.push(Passage { title, source: row.get(2)?, text: row.get(3)? });
    }
    Ok(found)
}

fn add(connection: &Connection, file: &Candidate, text: &Text, now: i64) -> rusqlite::Result<Added> {
    let path = file.path.to_string_lossy();
    let known: Option<(i64, [u8; 32], String)> = connection
        .query_row("SELECT id, digest, source FROM documents WHERE path = ?", [&path], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?))
        })
        .optional()?;
    if known.as_ref().is_some_and(|(_, digest, source)| *digest == text.digest && *source == file.source) {
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
    let mut insert =
        connection.prepare("INSERT INTO passages (document, title, heading, content) VALUES (?, ?, ?, ?)")?;
    for piece in &text.pieces {
        insert.execute(params![id, text.title, piece.heading, piece.text])?;
    }
    Ok(if known.is_some() { Added::Replaced } else { Added::New })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::passages::Section;

    fn index() -> Connection {
        let connection = Connection::open_in_memory().expect("memory should be there");
        connection.execute_batch(SCHEMA).expect("the schema should be good");
        connection
    }

    fn put(connection: &Connection, name: &str, title: &str, text: &str) -> Added {
        let file = Candidate { path: format!("/{name}").into(), source: name.into() };
        let pieces = vec![Section { heading: String::new(), text: text.into() }];
        let digest = std::array::from_fn(|place| text.as_bytes().get(place).copied().unwrap_or_default());
        let text = Text { title: title.into(), pieces, digest, size: text.len() as u64 };
        add(connection, &file, &text, 7).expect("it should be taken")
    }

    fn sources(connection: &Connection, words: &str) -> Vec<String> {
        let found = find(connection, &expression(words), 4).expect("it should be found or not");
        found.into_iter().map(|passage| passage.source).collect()
    }

    #[test]
    fn words_are_no_syntax() {
        assert_eq!(
            expression("AND \"x\" NEAR(a b) -c* ^d 'e' title:f"),
            r#""AND" OR "x" OR "NEAR" OR "a" OR "b" OR "c" OR "d" OR "e" OR "title" OR "f""#
        );
        assert_eq!(expression(" ?!\u{0} \n"), "");
        let connection = index();
        put(&connection, "a", "A", "x");
        for words in ["\"", "*", "x\0y", "a AND", "NOT", "(", "x:y", "{a b}: c", &"z ".repeat(10_000)] {
            let expression = expression(words);
            if !expression.is_empty() {
                find(&connection, &expression, 4).expect(words);
            }
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
        put(&connection, "title", "The Velna lighthouse", "It is 47 metres high.");
        put(&connection, "text", "Sights", "There is a lighthouse, and there is the mill.");
        let found = sources(&connection, "What is the height of the Velna lighthouse?");
        assert_eq!(found.first().map(String::as_str), Some("title"));
        assert!(found.iter().all(|source| !source.starts_with("other")), "{found:?}");
        assert_eq!(sources(&connection, "it is the day"), [""; 0], "words that nearly all have find nothing");
        assert_eq!(sources(&connection, "Lighthouses")[0], "title", "another form of the word");
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
        assert_eq!((sources(&connection, "one"), sources(&connection, "two")), (vec![], vec!["a".into()]));
    }
}
