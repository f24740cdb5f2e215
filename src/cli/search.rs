//! `search`: adds, lists, removes and finds documents of the embedded index.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::shared::{about, note, print, print_json};
use crate::config::{Config, absolute};
use crate::database::{Problem, Result};
use crate::report::{Cell, Table};
use crate::search::documents::{self, Candidate};
use crate::search::{Added, Index, Passage};
use crate::text::count;
use crate::when;

/// Manage the embedded index of documents, which Search uses if search.url is "index:"
///
/// Changes take effect with the next request.
#[derive(clap::Subcommand)]
pub(super) enum SearchCommand {
    /// Add files and folders to the document index
    ///
    /// Documents are text, Markdown and HTML files in UTF-8. Convert others first: PDF with
    /// pdftotext, Word with pandoc, other encodings with iconv. A file that was added before is
    /// replaced. Links, files that are not text and files over 8 MiB are skipped with a message;
    /// hidden files and folders are skipped and counted.
    Add {
        /// Files, and folders with everything in them
        #[arg(required = true, value_name = "PATH")]
        paths: Vec<PathBuf>,
    },
    /// List the documents
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove documents, by their ID or their path
    Remove {
        /// The ID that list shows, or the path of a file or a folder
        #[arg(value_name = "ID|PATH")]
        named: String,
    },
    /// Show what the index finds
    Query {
        /// The words to look for
        #[arg(required = true)]
        words: Vec<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

impl SearchCommand {
    pub fn run(self, config: &Config) -> Result<()> {
        let index = Index::new(&config.search);
        match self {
            Self::Add { paths } => add(&index, &paths, config),
            Self::List { json } => list(&index, json),
            Self::Remove { named } => remove(&index, &named),
            Self::Query { words, json } => query(&index, &words.join(" "), json),
        }
    }
}

/// The words of the summary, and the number of files for each.
const SUMMARY: [&str; 5] = ["added", "replaced", "unchanged", "skipped", "hidden"];
type Tally = HashMap<&'static str, usize>;

fn add(index: &Index, paths: &[PathBuf], config: &Config) -> Result<()> {
    let mut tally = Tally::default();
    let mut failed = Vec::new();
    for path in paths {
        if let Err(reason) = add_path(index, path, &mut tally)? {
            failed.push(format!("\n  {}: {reason}.", path.display()));
        }
    }
    let summary = SUMMARY.map(|word| format!("{} {word}", tally.get(word).unwrap_or(&0)));
    note(format_args!("{}.", summary.join(", ")));
    print_index_path(index);
    if let Some(unused) = config.search.how_to_use_index() {
        note(format_args!(
            "No completion uses the index. {unused} Then restart the service."
        ));
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(Problem::other(format!(
        "{} could not be added:{}",
        count(failed.len() as i64, "path"),
        failed.concat()
    )))
}

/// Prints the whole path of the index: a relative one depends on the folder of the command.
fn print_index_path(index: &Index) {
    note(format_args!("Index: {}", absolute(&index.path)));
}

/// Adds the files at a path. An inner error is about this path alone.
fn add_path(index: &Index, path: &Path, tally: &mut Tally) -> Result<Result<(), String>> {
    let mut skipped = 0;
    let mut skip = |path: &Path, reason: &str| {
        skipped += 1;
        note(format_args!("skipped: {}: {reason}.", path.display()));
    };
    let (files, hidden) = match documents::candidates(path, &mut skip) {
        Ok(found) => found,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let is_alone = path.is_file();
    for file in &files {
        let text = match documents::read(&file.path) {
            Ok(text) => text,
            // A file that the operator names should be added; a folder may contain other things.
            Err(reason) if is_alone => return Ok(Err(reason)),
            Err(reason) => {
                skip(&file.path, &reason);
                continue;
            }
        };
        let word = match index.add(file, &text, when::now())? {
            Added::New => "added",
            Added::Replaced => "replaced",
            Added::Unchanged => "unchanged",
        };
        *tally.entry(word).or_default() += 1;
        let passages = count(text.passages.len() as i64, "passage");
        print(&format!("{word}: {} ({passages})\n", file.path.display()))?;
    }
    *tally.entry("skipped").or_default() += skipped;
    *tally.entry("hidden").or_default() += hidden;
    report_missing_files(index, path, &files)?;
    Ok(Ok(()))
}

/// Names the documents of a folder whose files no longer exist. They stay until they are removed:
/// the files may only be unavailable, as on a disk that is not mounted.
fn report_missing_files(index: &Index, folder: &Path, files: &[Candidate]) -> Result<()> {
    let Ok(folder) = folder.canonicalize() else {
        return Ok(());
    };
    if !folder.is_dir() || !index.path.exists() {
        return Ok(());
    }
    for document in index.list()? {
        let path = Path::new(&document.path);
        if path.starts_with(&folder)
            && !files.iter().any(|file| file.path == path)
            && !path.exists()
        {
            note(format_args!(
                "still in the index, but the file no longer exists: {}. To remove it: adriaticum search remove {}",
                document.path, document.id
            ));
        }
    }
    Ok(())
}

fn list(index: &Index, json: bool) -> Result<()> {
    // Without an index there are no documents, which is not an error here.
    let name = format!("the index {}", index.path.display());
    let exists = index.path.try_exists().map_err(about(name))?;
    let documents = if exists { index.list()? } else { Vec::new() };
    if json {
        return print_json(&documents);
    }
    if documents.is_empty() {
        eprintln!("There are no documents yet. Add some: adriaticum search add PATH");
        return Ok(());
    }
    let utc = when::Zone::utc();
    let table = Table::new(&documents)
        .number("id", "Id", |row| Cell::text(row.id.to_string()))
        .text("title", "Title", |row| Cell::text(&row.title))
        .number("passages", "Passages", |row| {
            Cell::text(row.passages.to_string())
        })
        .number("bytes", "Bytes", |row| Cell::text(row.size.to_string()))
        .text("added", "Added", |row| Cell::minute(Some(row.added), &utc))
        .text("path", "Path", |row| Cell::text(&row.path));
    print(&table.to_text("id,title,passages,bytes,added,path"))
}

fn remove(index: &Index, named: &str) -> Result<()> {
    let id: Option<i64> = named.parse().ok();
    // A file that no longer exists is still known by its path.
    let path = Path::new(named)
        .canonicalize()
        .or_else(|_| std::path::absolute(named))
        .unwrap_or_default();
    let mut documents = index.list()?;
    let is_id = documents.iter().any(|document| Some(document.id) == id);
    documents.retain(|document| match is_id {
        true => Some(document.id) == id,
        false => Path::new(&document.path).starts_with(&path),
    });
    if documents.is_empty() {
        return Err(Problem::other(format!(
            "the index {} has no document {named:?}. To see its documents: adriaticum search list",
            index.path.display()
        )));
    }
    for document in documents {
        index.remove(document.id)?;
        print(&format!("removed: {}\n", document.path))?;
    }
    print_index_path(index);
    Ok(())
}

fn query(index: &Index, words: &str, json: bool) -> Result<()> {
    let found = index.find(words)?;
    if json {
        return print_json(&found);
    }
    if found.is_empty() {
        eprintln!("Nothing found.");
    }
    let passages: Vec<String> = (1..)
        .zip(&found)
        .map(
            |(
                number,
                Passage {
                    title,
                    source,
                    text,
                },
            )| { format!("[{number}] {title} ({source})\n{text}\n") },
        )
        .collect();
    print(&passages.join("\n"))
}
