//! Ranks the passages of the embedded index for a query.

use std::collections::HashMap;

use rusqlite::{Connection, Row};

use super::query::{self, Word};
use super::results::Passage;

/// The weights of a match in the title, in the heading and in the text.
const WEIGHTS: &str = "4.0, 2.0, 1.0";

/// A passage whose score is less than this part of the best one's is left out: it would distract a
/// small model.
const LEAST_SCORE: f64 = 0.25;

/// Returns the passages that have enough of the words, the best first.
pub(super) fn best(
    connection: &Connection,
    words: &[Word],
    results: usize,
) -> rusqlite::Result<Vec<Passage>> {
    // In quotation marks, no word is syntax.
    let quoted: Vec<String> = words
        .iter()
        .map(|word| format!("\"{}\"", word.text))
        .collect();
    let mut words_in: HashMap<i64, usize> = HashMap::new();
    let mut unknown_names = 0;
    let mut with_word = connection.prepare("SELECT rowid FROM words WHERE words MATCH ?")?;
    for (word, quoted) in words.iter().zip(&quoted) {
        let mut rows = with_word.query([quoted])?;
        let mut is_known = false;
        while let Some(row) = rows.next()? {
            is_known = true;
            *words_in.entry(row.get(0)?).or_default() += 1;
        }
        unknown_names += usize::from(word.is_name && !is_known);
    }
    let least = query::least_words(words.len(), unknown_names);
    if !words_in.values().any(|&count| count >= least) {
        return Ok(Vec::new());
    }
    let mut ranked = connection.prepare(&format!(
        "SELECT rowid, bm25(words, {WEIGHTS}) AS score FROM words WHERE words MATCH ? ORDER BY score, rowid"
    ))?;
    let mut passage = connection.prepare(
        "SELECT passages.title, heading, source, content FROM passages
         JOIN documents ON documents.id = passages.document WHERE passages.id = ?",
    )?;
    let mut rows = ranked.query([quoted.join(" OR ")])?;
    let (mut found, mut best) = (Vec::new(), None);
    while let Some(row) = rows.next()? {
        let (id, score): (i64, f64) = (row.get(0)?, row.get(1)?);
        if words_in.get(&id).is_none_or(|&count| count < least) {
            continue;
        }
        // The better it fits, the lower the score.
        if score > *best.get_or_insert(score) * LEAST_SCORE || found.len() == results {
            break;
        }
        found.push(passage.query_row([id], read_passage)?);
    }
    Ok(found)
}

fn read_passage(row: &Row) -> rusqlite::Result<Passage> {
    let (title, heading): (String, String) = (row.get(0)?, row.get(1)?);
    let title = if heading.is_empty() || heading == title {
        title
    } else {
        format!("{title}: {heading}")
    };
    Ok(Passage {
        title,
        source: row.get(2)?,
        text: row.get(3)?,
    })
}
