//! A finished index: a SQLite file with the passages of a folder in a full-text index. Nothing
//! changes it; a newer one replaces the file.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Instant;

use rusqlite::{Connection, ErrorCode, Row};

use super::{MAX_QUERY, Passage, cleaning};
use crate::database::sqlite::ReadOnlyFile;

pub const SCHEMA: &str = include_str!("index.sql");

/// The version in the file: `user_version`.
pub const VERSION: i64 = 2;

/// A connection's cache, in KiB.
pub const CACHE: i64 = 1024;

/// The number of SQLite's steps between two checks of the deadline.
const STEPS: i32 = 10_000;

/// The weights of a match in the title, in the heading and in the text.
const COLUMN_WEIGHTS: &str = "4.0, 2.0, 1.0";

/// The passages with the best scores, of which those that are about the question are taken.
const CANDIDATES: usize = 30;

/// The part of the weight of all words that a passage has to have; and how much is enough of a long
/// question, in words that no passage has. Chosen by trial with tests/grounding: a story before the
/// question has many words that no document has.
const LEAST_SHARE: f64 = 0.4;
const ENOUGH: f64 = 2.5;

/// So many passages are needed to tell which words are common: fewer count as that many.
const FEWEST: i64 = 100;

/// A word that more than this part of a large folder has leads to no passage: to rank all that have
/// it would take a second. It has its weight all the same.
const COMMON: i64 = 10;

/// The letters of an ending, and the fewest that are left of a word.
const ENDING: usize = 3;
const SHORTEST_STEM: usize = 4;

/// The reason why there is no answer.
pub enum IndexError {
    Missing,
    /// It can't be opened.
    Denied(io::Error),
    Late,
    Damaged(String),
}

/// Opens the file for one query: that takes a fraction of a millisecond, and one that was replaced
/// or damaged counts from the next query on.
pub struct Index(Connection);

impl Index {
    /// One of another folder counts as missing.
    pub fn open(path: &Path, folder: &Path, deadline: Instant) -> Result<Self, IndexError> {
        let opened = path
            .canonicalize()
            .and_then(|path| ReadOnlyFile::new(&path));
        let connection = opened.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => IndexError::Missing,
            _ => IndexError::Denied(error),
        })?;
        let mut connection = connection.connect()?;
        connection.pragma_update(None, "cache_size", -CACHE)?;
        connection.progress_handler(STEPS, Some(move || Instant::now() > deadline))?;
        let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        if version != VERSION {
            return Err(IndexError::Damaged(
                "it is not an index of this version".into(),
            ));
        }
        let is_of_folder = connection
            .prepare("SELECT 1 FROM folder WHERE path = ?")?
            .exists([folder.as_os_str().as_bytes()])?;
        match is_of_folder {
            true => Ok(Self(connection)),
            false => Err(IndexError::Missing),
        }
    }

    /// The hash over the folder that it was built from.
    pub fn fingerprint(&self) -> Result<[u8; 32], IndexError> {
        let fingerprint = self
            .0
            .query_row("SELECT fingerprint FROM folder", [], |row| row.get(0));
        Ok(fingerprint?)
    }

    /// Returns the passages that are about the words, the best first: of what the words weigh
    /// together, a passage has to have a good part. A word weighs the more, the fewer passages have
    /// it, and most if none has: what does not mention Peru does not answer a question about it.
    pub fn find(&self, words: &str, results: usize) -> Result<Vec<Passage>, IndexError> {
        let all: i64 = self
            .0
            .query_row("SELECT passages FROM folder", [], |row| row.get(0))?;
        let all = all.max(FEWEST);
        let mut number = self
            .0
            .prepare("SELECT count(*) FROM passages WHERE passages MATCH ?")?;
        let (mut terms, mut rare) = (Vec::new(), Vec::new());
        for term in terms_of(words) {
            let passages: i64 = number.query_row([&term], |row| row.get(0))?;
            if passages <= all / COMMON + FEWEST {
                rare.push(term.clone());
            }
            terms.push((term, weight(passages, all)));
        }
        if terms.is_empty() {
            return Ok(Vec::new());
        }
        if rare.is_empty() {
            rare.extend(terms.iter().map(|(term, _)| term.clone()));
        }
        let total: f64 = terms.iter().map(|(_, weight)| weight).sum();
        let least = (LEAST_SHARE * total).min(ENOUGH * ((all + 1) as f64).ln());
        let mut best = self.0.prepare(&format!(
            "SELECT rowid, title, heading, content, source FROM passages WHERE passages MATCH ?
             ORDER BY bm25(passages, {COLUMN_WEIGHTS}), rowid LIMIT {CANDIDATES}"
        ))?;
        let mut has = self
            .0
            .prepare("SELECT 1 FROM passages WHERE passages MATCH ? AND rowid = ?")?;
        let mut rows = best.query([rare.join(" OR ")])?;
        let mut found = Vec::new();
        while let Some(row) = rows.next()?
            && found.len() < results
        {
            let mut sum = 0.0;
            for (term, weight) in &terms {
                if has.exists((term, row.get::<_, i64>(0)?))? {
                    sum += weight;
                }
            }
            if sum >= least {
                found.push(passage(row)?);
            }
        }
        Ok(found)
    }
}

/// What a word weighs that so many of all passages have.
fn weight(passages: i64, all: i64) -> f64 {
    ((all + 1) as f64 / (passages as f64 + 0.5)).ln()
}

impl From<rusqlite::Error> for IndexError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::OperationInterrupted) => Self::Late,
            _ => Self::Damaged(error.to_string()),
        }
    }
}

/// The distinct words of a query as terms of the index, without their endings: most languages inflect
/// words there. In quotation marks, no word is syntax.
fn terms_of(query: &str) -> Vec<String> {
    let line = cleaning::one_line(query);
    let mut terms: Vec<String> = Vec::new();
    for word in cleaning::cut(&line, MAX_QUERY).split(|c: char| !c.is_alphanumeric()) {
        let word = word.to_lowercase();
        let length = word.chars().count();
        let stem = length.saturating_sub(ENDING).max(SHORTEST_STEM);
        let term = if stem < length {
            format!("\"{}\"*", word.chars().take(stem).collect::<String>())
        } else {
            format!("\"{word}\"")
        };
        if length > 0 && !terms.contains(&term) {
            terms.push(term);
        }
    }
    terms
}

fn passage(row: &Row) -> rusqlite::Result<Passage> {
    let (title, heading): (String, String) = (row.get(1)?, row.get(2)?);
    let title = if heading.is_empty() || heading == title {
        title
    } else {
        format!("{title}: {heading}")
    };
    Ok(Passage {
        title,
        source: row.get(4)?,
        text: row.get(3)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(texts: &[(&str, &str)]) -> Index {
        let connection = Connection::open_in_memory().expect("memory should be there");
        connection
            .execute_batch(SCHEMA)
            .expect("the schema should be good");
        for (title, text) in texts {
            let insert =
                "INSERT INTO passages (title, heading, content, source) VALUES (?, '', ?, ?)";
            connection
                .execute(insert, (title, text, title))
                .expect("a passage");
        }
        let row = ([0_u8; 32], texts.len() as i64);
        connection
            .execute("INSERT INTO folder VALUES (x'', ?, ?)", row)
            .expect("a row");
        Index(connection)
    }

    fn sources(index: &Index, words: &str) -> Vec<String> {
        let Ok(found) = index.find(words, 4) else {
            panic!("{words:?} should be found or not")
        };
        found.into_iter().map(|passage| passage.source).collect()
    }

    #[test]
    fn words_are_no_syntax() {
        let index = index(&[("a", "x")]);
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
            sources(&index, words);
        }
    }

    #[test]
    fn the_best_comes_first_and_what_is_about_something_else_is_left_out() {
        let mut texts = vec![
            ("The Velna lighthouse", "It is 47 metres high."),
            ("Sights", "There is a lighthouse, and there is the mill."),
            ("Form", "Write your name in capital letters."),
            ("Pump", "The warranty is three years."),
        ];
        texts.extend([("Other", "It is the end of the day, and of the week."); 12]);
        let index = index(&texts);
        for (words, found) in [
            (
                "How high is the Velna lighthouse?",
                &["The Velna lighthouse"][..],
            ),
            ("Lighthouses", &["The Velna lighthouse", "Sights"]),
            ("What is the capital of Peru?", &[]),
            ("capital letter", &["Form"]),
            ("How long is the warranty?", &["Pump"]),
            ("Where is Peru?", &[]),
            ("the day", &["Other"; 4]),
        ] {
            assert_eq!(sources(&index, words), found, "{words}");
        }
    }

    #[test]
    fn terms_are_words_without_their_endings() {
        for (query, terms) in [
            ("The pumps' PUMPS", "\"the\" \"pump\"*"),
            ("svjetionika E42 größer", "\"svjetion\"* \"e42\" \"größ\"*"),
            ("灯台の高さは?", "\"灯台の高\"*"),
            (" ?! ", ""),
        ] {
            assert_eq!(terms_of(query).join(" "), terms, "{query}");
        }
        assert_eq!(terms_of(&"word ".repeat(10_000)).len(), 1);
    }
}
