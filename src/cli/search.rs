//! `search`: the documents that answers can rest on, where Search is the embedded index.

use std::path::Path;

use super::{Args, CliError, Opt, no_command, print, print_json, table};
use crate::client::Cancellation;
use crate::config::SearchPlace;
use crate::search::documents::{self, Candidate};
use crate::search::{Added, Document, Index, Passage, Search, SearchError};
use crate::when;

const HELP: &str = "\
Keeps the index of documents that Search can use: search.url = \"index:\". A change holds from the next request on.

Usage: adriaticum search add PATH...
       adriaticum search list [--json]
       adriaticum search remove ID
       adriaticum search query WORDS

add takes text, Markdown and HTML files, and folders with all that is in them. A file that was added before is
replaced. Hidden files, links, what is no text and files over 8 MiB are passed over, and told.

Options:
  --json   Print JSON
";

pub fn run(mut args: Args) -> Result<(), CliError> {
    match args.command(HELP, "add, list, remove or query")?.as_str() {
        "add" => add(args),
        "list" => list(args),
        "remove" => remove(args),
        "query" => query(args),
        command => Err(no_command("search ", command)),
    }
}

/// How many files came to what.
#[derive(Default)]
struct Tally {
    added: usize,
    replaced: usize,
    unchanged: usize,
    skipped: usize,
}

fn add(mut args: Args) -> Result<(), CliError> {
    let paths = args.all_words(HELP, "the PATH of a file or folder is missing.")?;
    let config = args.config()?;
    let index = Index::new(&config.search);
    let mut tally = Tally::default();
    let mut failed = Vec::new();
    for path in paths {
        if let Err(reason) = add_path(&index, Path::new(&path), &mut tally)? {
            eprintln!("adriaticum: {path}: {reason}.");
            failed.push(path);
        }
    }
    let Tally { added, replaced, unchanged, skipped } = tally;
    eprintln!("{added} added, {replaced} replaced, {unchanged} unchanged, {skipped} passed over.");
    if config.search.place != Some(SearchPlace::Index) {
        eprintln!("The service does not use the index: for that, set search.url to index:");
    }
    match failed.len() {
        0 => Ok(()),
        1 => Err(CliError::Failed("one path could not be added.".into())),
        count => Err(CliError::Failed(format!("{count} paths could not be added."))),
    }
}

/// Adds what is at a path; an inner error is about this path alone.
fn add_path(index: &Index, path: &Path, tally: &mut Tally) -> Result<Result<(), String>, CliError> {
    let mut skipped = 0;
    let mut pass_over = |path: &Path, reason: &str| {
        skipped += 1;
        eprintln!("passed over: {}: {reason}.", path.display());
    };
    let files = match documents::candidates(path, &mut pass_over) {
        Ok(files) => files,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let is_alone = path.is_file();
    for file in &files {
        let text = match documents::read(&file.path) {
            Ok(text) => text,
            // Who names a file wants it; in a folder there may be other things.
            Err(reason) if is_alone => return Ok(Err(reason)),
            Err(reason) => {
                pass_over(&file.path, &reason);
                continue;
            }
        };
        let (count, word) = match index.add(file, &text, when::now())? {
            Added::New => (&mut tally.added, "added"),
            Added::Replaced => (&mut tally.replaced, "replaced"),
            Added::Unchanged => (&mut tally.unchanged, "unchanged"),
        };
        *count += 1;
        print(&format!("{word}: {} ({} passages)\n", file.path.display(), text.pieces.len()))?;
    }
    tally.skipped += skipped;
    tell_of_gone(index, path, &files)?;
    Ok(Ok(()))
}

/// Names the documents of a folder whose files are no longer there. They stay until they are removed: perhaps
/// the files are only out of reach.
fn tell_of_gone(index: &Index, folder: &Path, files: &[Candidate]) -> Result<(), CliError> {
    let Ok(folder) = folder.canonicalize() else {
        return Ok(());
    };
    if !folder.is_dir() || !index.path().exists() {
        return Ok(());
    }
    for document in index.list()? {
        let path = Path::new(&document.path);
        if path.starts_with(&folder) && !files.iter().any(|file| file.path == path) && !path.exists() {
            eprintln!(
                "still in the index, but no longer there: {}. To remove it: adriaticum search remove {}",
                document.path, document.id
            );
        }
    }
    Ok(())
}

fn list(mut args: Args) -> Result<(), CliError> {
    let mut json = false;
    let [] = args.words(HELP, [], &mut [Opt::Flag("json", &mut json)])?;
    let index = Index::new(&args.config()?.search);
    // Without an index there are no documents, which is no error here.
    let documents = if index.path().exists() { index.list()? } else { Vec::new() };
    if json {
        return print_json(&documents);
    }
    if documents.is_empty() {
        eprintln!("There are no documents yet. Add some: adriaticum search add PATH");
        return Ok(());
    }
    let mut rows = vec![["id", "title", "passages", "bytes", "added", "path"].map(String::from).to_vec()];
    rows.extend(documents.iter().map(row));
    print(&table::lay_out(&rows))
}

fn row(document: &Document) -> Vec<String> {
    vec![
        document.id.to_string(),
        document.title.clone(),
        document.passages.to_string(),
        document.size.to_string(),
        when::shown(Some(document.added)),
        document.path.clone(),
    ]
}

fn remove(mut args: Args) -> Result<(), CliError> {
    let [id] = args.words(HELP, ["the document's ID"], &mut [])?;
    let index = Index::new(&args.config()?.search);
    match id.parse().map_or(Ok(false), |id| index.remove(id))? {
        true => Ok(()),
        false => Err(CliError::Failed(format!(
            "there is no document {id:?}. adriaticum search list shows those that there are."
        ))),
    }
}

fn query(mut args: Args) -> Result<(), CliError> {
    let words = args.all_words(HELP, "the WORDS to look for are missing.")?;
    let found = Index::new(&args.config()?.search).find(&words.join(" "), &Cancellation::default())?;
    if found.is_empty() {
        eprintln!("Nothing was found.");
    }
    let shown: Vec<String> = (1..)
        .zip(&found)
        .map(|(number, Passage { title, source, text })| format!("[{number}] {title} ({source})\n{text}\n"))
        .collect();
    print(&shown.join("\n"))
}

impl From<SearchError> for CliError {
    fn from(error: SearchError) -> Self {
        Self::Failed(format!("{error}."))
    }
}
