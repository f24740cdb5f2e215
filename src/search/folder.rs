//! The index of a folder of documents: built at the start and at a reload if a file has changed, on
//! a thread of its own, into a new file that replaces the old one when it is complete.

use std::fs::{self, File, Metadata, ReadDir};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags, params};
use sha2::{Digest, Sha256};

use super::documents::{self, Piece};
use super::index::{CACHE, Index, IndexError, SCHEMA, VERSION};
use super::{Passage, SearchError, cleaning};
use crate::config::SearchConfig;
use crate::database::sqlite::FLAGS;
use crate::error::FailureCause;
use crate::files::{self, with_suffix};
use crate::locks::Pool;
use crate::locks::lock;
use crate::text::{count, escaped};

/// The queries that run at once. Each uses a CPU all the time.
const MAX_QUERIES: usize = 2;

/// The most levels of folders inside of each other: each has a file descriptor.
const MAX_DEPTH: usize = 32;

/// The skipped files that the log names.
const MAX_NAMED: i64 = 10;

/// The space that a build leaves free, for the ledger.
const LEAST_FREE: u64 = 1024 * 1024 * 1024;

/// How much the building thread gives way to others, as nice(2) counts it.
const NICE: i32 = 10;

pub struct Folder {
    path: PathBuf,
    index: PathBuf,
    timeout: Duration,
    results: usize,
    /// The places of queries that run.
    queries: Pool<()>,
    builds: Mutex<Builds>,
    least_free: u64,
}

#[derive(Default)]
struct Builds {
    is_running: bool,
    /// A reload came meanwhile.
    is_wanted_again: bool,
    /// A query has found that the index is damaged.
    is_damaged: bool,
    /// The reason why the last build was given up.
    trouble: Option<String>,
}

impl Folder {
    pub fn new(path: &Path, config: &SearchConfig) -> Self {
        Self {
            path: path.to_owned(),
            index: config.index.clone(),
            timeout: config.timeout,
            results: config.results,
            queries: Pool::new([(); MAX_QUERIES]),
            builds: Mutex::default(),
            least_free: LEAST_FREE,
        }
    }

    pub fn find(&self, words: &str) -> Result<Vec<Passage>, SearchError> {
        let deadline = Instant::now() + self.timeout;
        let late = || SearchError::new(FailureCause::Timeout, "the index did not answer in time");
        let _place = self.queries.take(deadline, |()| true).ok_or_else(late)?;
        let found = Index::open(&self.index, &self.path, deadline)
            .and_then(|index| index.find(words, self.results));
        found.map_err(|error| {
            let name = self.index.display();
            let details = match error {
                IndexError::Late => return late(),
                IndexError::Missing => format!(
                    "there is no index of {} yet. adriaticum serve builds it at its start and at a reload; its log says how \
                     that went",
                    self.path.display()
                ),
                IndexError::Denied(error) => format!("the index {name} can't be opened: {error}"),
                IndexError::Damaged(how) => {
                    lock(&self.builds).is_damaged = true;
                    format!("the index {name} is damaged ({how}): reload the service, which builds it again")
                }
            };
            SearchError::new(FailureCause::Index, details)
        })
    }

    pub fn trouble(&self) -> Option<String> {
        lock(&self.builds).trouble.clone()
    }

    /// Builds the index on a thread of its own, if a file has changed. Nothing waits for it.
    pub fn refresh(self: &Arc<Self>) {
        let mut builds = lock(&self.builds);
        builds.is_wanted_again = builds.is_running;
        if builds.is_running {
            return;
        }
        let folder = Arc::clone(self);
        let started = thread::Builder::new().name("index".into()).spawn(move || {
            // If the system does not allow it, requests are slower meanwhile.
            let _ = rustix::process::nice(NICE);
            while folder.build_if_changed() {}
        });
        match started {
            Ok(_) => builds.is_running = true,
            Err(error) => builds.trouble = Some(format!("no thread for the index: {error}")),
        }
    }

    /// Returns whether it is wanted again.
    fn build_if_changed(&self) -> bool {
        let updated = panic::catch_unwind(AssertUnwindSafe(|| self.update()));
        let updated = updated.unwrap_or_else(|_| Err("indexing it panicked".into()));
        let trouble = updated.err().map(|reason| {
            let folder = self.path.display();
            let deadline = Instant::now() + self.timeout;
            match Index::open(&self.index, &self.path, deadline).is_ok() {
                true => format!("{folder}: {reason}. The previous index answers"),
                false => format!(
                    "{folder}: {reason}. There is no index, so completions that need Search get 503"
                ),
            }
        });
        let mut builds = lock(&self.builds);
        builds.trouble = trouble;
        builds.is_running = builds.is_wanted_again;
        std::mem::take(&mut builds.is_wanted_again)
    }

    fn update(&self) -> Result<(), String> {
        let temporary = with_suffix(&self.index, ".new");
        // A process that ended during a build has left one.
        let _ = fs::remove_file(&temporary);
        let known = Index::open(&self.index, &self.path, Instant::now() + self.timeout)
            .and_then(|index| index.fingerprint())
            .ok();
        let is_damaged = std::mem::take(&mut lock(&self.builds).is_damaged);
        if known.is_some() && !is_damaged {
            let mut fingerprint = Fingerprint::default();
            walk(&self.path, &mut |path, file| {
                if let Ok(file) = file {
                    fingerprint.add(path, file);
                }
                Ok(())
            })?;
            if known == Some(fingerprint.0) {
                return Ok(());
            }
        }
        log::info!("search: indexing {}", self.path.display());
        let began = Instant::now();
        let built = self.build(&temporary).and_then(|built| {
            let replaced = File::open(&temporary)
                .and_then(|file| file.sync_all())
                .and_then(|()| fs::rename(&temporary, &self.index));
            replaced.map_err(|error| error.to_string())?;
            Ok(built)
        });
        let Built {
            documents,
            passages,
            skipped,
        } = built.inspect_err(|_| _ = fs::remove_file(&temporary))?;
        log::info!(
            "search: {} with {} in {} are indexed, after {:.1} s; {} skipped",
            count(documents, "document"),
            count(passages, "passage"),
            self.path.display(),
            began.elapsed().as_secs_f64(),
            count(skipped, "file")
        );
        Ok(())
    }

    fn build(&self, temporary: &Path) -> Result<Built, String> {
        let path = files::create(temporary).and_then(|_| temporary.canonicalize());
        let path = path.map_err(|error| format!("{}: {error}", temporary.display()))?;
        let connection = begin(&path).map_err(|error| error.to_string())?;
        let (mut built, mut fingerprint) = (Built::default(), Fingerprint::default());
        walk(&self.path, &mut |path, file| {
            let passages = match file {
                Err(reason) => Err(reason),
                Ok(file) => {
                    fingerprint.add(path, file);
                    self.check_space()?;
                    add(&connection, path, &self.path)?
                }
            };
            match passages {
                Ok(passages) => {
                    built.documents += 1;
                    built.passages += passages;
                }
                Err(reason) => {
                    built.skipped += 1;
                    if built.skipped <= MAX_NAMED {
                        let path = escaped(&path.to_string_lossy());
                        log::warn!("search: {path} is skipped: {reason}");
                    }
                }
            }
            Ok(())
        })?;
        if built.documents == 0 {
            return Err("it has no documents".into());
        }
        let end = || {
            let row = (
                self.path.as_os_str().as_bytes(),
                fingerprint.0,
                built.passages,
            );
            connection.execute("INSERT INTO folder VALUES (?, ?, ?)", row)?;
            connection.execute_batch("COMMIT")
        };
        end().map_err(|error| error.to_string())?;
        Ok(built)
    }

    fn check_space(&self) -> Result<(), String> {
        let folder = files::folder(&self.index);
        let free = rustix::fs::statvfs(folder).map(|disk| disk.f_bavail * disk.f_frsize);
        match free {
            Ok(free) if free < self.least_free => Err(format!(
                "less than 1 GiB would stay free in {}. Free some space, then reload the service",
                folder.display()
            )),
            _ => Ok(()),
        }
    }
}

/// What an index was built from.
#[derive(Default)]
struct Built {
    documents: i64,
    passages: i64,
    skipped: i64,
}

/// A hash over the path, the size and the times of each file, in any order.
#[derive(Default)]
struct Fingerprint([u8; 32]);

impl Fingerprint {
    fn add(&mut self, path: &Path, file: &Metadata) {
        let mut hash = Sha256::new();
        hash.update(path.as_os_str().as_bytes());
        for number in [
            file.len() as i64,
            file.mtime(),
            file.mtime_nsec(),
            file.ctime(),
            file.ctime_nsec(),
        ] {
            hash.update(number.to_le_bytes());
        }
        for (sum, byte) in self.0.iter_mut().zip(hash.finalize()) {
            *sum ^= byte;
        }
    }
}

/// Creates the tables of a new file, and begins the one transaction in which it is filled. If that
/// ends early, the file is worth nothing, so nothing has to be undone or synced.
fn begin(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE | FLAGS)?;
    connection.pragma_update(None, "cache_size", -CACHE)?;
    connection.pragma_update(None, "journal_mode", "OFF")?;
    connection.pragma_update(None, "synchronous", "OFF")?;
    connection.pragma_update(None, "user_version", VERSION)?;
    connection.execute_batch(SCHEMA)?;
    connection.execute_batch("BEGIN")?;
    Ok(connection)
}

/// Adds a document. Returns the number of its passages, or the reason why it is skipped; fails if
/// nothing can be added.
fn add(connection: &Connection, path: &Path, root: &Path) -> Result<Result<i64, String>, String> {
    let read = files::open(path).map_err(|error| error.to_string());
    let content = match read.and_then(|file| documents::read(file, path)) {
        Ok(content) => content,
        Err(reason) => return Ok(Err(reason)),
    };
    let above = root.parent().unwrap_or(root);
    let source = path.strip_prefix(above).unwrap_or(path).to_string_lossy();
    let source = cleaning::one_line(&source);
    let fill = || -> rusqlite::Result<i64> {
        let mut insert = connection.prepare_cached(
            "INSERT INTO passages (title, heading, content, source) VALUES (?, ?, ?, ?)",
        )?;
        let mut passages = 0;
        documents::split(path, &content, |piece| {
            passages += 1;
            let Piece {
                title,
                heading,
                text,
            } = piece;
            insert
                .execute(params![title, heading, text, source])
                .map(drop)
        })?;
        Ok(passages)
    };
    match fill() {
        Ok(0) => Ok(Err("it is empty".into())),
        Ok(passages) => Ok(Ok(passages)),
        Err(error) => Err(error.to_string()),
    }
}

/// What is to be done with a file, or why it can't be a document.
type Each<'a> = dyn FnMut(&Path, Result<&Metadata, String>) -> Result<(), String> + 'a;

/// Goes through the files of a folder and its subfolders. Hidden ones are left out: programs keep
/// their own data there, as in .git. The memory is that of the open folders, whatever they hold.
fn walk(root: &Path, each: &mut Each) -> Result<(), String> {
    let unreadable = |error: io::Error| format!("it can't be read: {error}");
    let mut open: Vec<ReadDir> = vec![fs::read_dir(root).map_err(unreadable)?];
    while let Some(folder) = open.last_mut() {
        let Some(entry) = folder.next() else {
            open.pop();
            continue;
        };
        let entry = entry.map_err(unreadable)?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let path = entry.path();
        let found = match entry.metadata() {
            Ok(found) if found.is_dir() && open.len() == MAX_DEPTH => {
                Err(format!("it is in more than {MAX_DEPTH} levels of folders"))
            }
            Ok(found) if found.is_dir() => match fs::read_dir(&path) {
                Ok(folder) => {
                    open.push(folder);
                    continue;
                }
                Err(error) => Err(error.to_string()),
            },
            Ok(found) if found.is_symlink() => Err("it is a symbolic link".into()),
            Ok(found) if found.is_file() => Ok(found),
            Ok(_) => Err("it is not a regular file".into()),
            Err(error) => Err(error.to_string()),
        };
        each(&path, found.as_ref().map_err(String::clone))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, SecretsNeeded};
    use crate::files::tests::Folder as TestFolder;

    /// A folder with one document, and a place for its index.
    fn folder() -> (TestFolder, Folder) {
        let root = TestFolder::new();
        fs::create_dir(root.0.join("docs")).expect("a folder");
        fs::write(root.0.join("docs/a.txt"), "The first text.").expect("a file");
        let empty = root.0.join("empty.toml");
        fs::write(&empty, "").expect("a file");
        let config = Config::load(Some(&empty), SecretsNeeded::All).expect("the defaults");
        let folder = Folder {
            index: root.0.join("index.db"),
            least_free: 0,
            ..Folder::new(&root.0.join("docs"), &config.search)
        };
        (root, folder)
    }

    fn texts(folder: &Folder, words: &str) -> Vec<String> {
        let found = folder.find(words).unwrap_or_else(|error| panic!("{error}"));
        found.into_iter().map(|passage| passage.text).collect()
    }

    #[test]
    fn a_build_stops_before_the_disk_is_full_and_the_old_index_answers() {
        let (root, folder) = folder();
        folder.update().expect("an index");
        fs::write(root.0.join("docs/b.txt"), "The second text.").expect("a file");
        let full = Folder {
            least_free: u64::MAX,
            ..folder
        };
        assert!(!full.build_if_changed());
        let trouble = full.trouble().unwrap_or_default();
        assert!(
            trouble.contains("less than 1 GiB would stay free")
                && trouble.ends_with("The previous index answers"),
            "{trouble}"
        );
        assert_eq!(texts(&full, "text"), ["The first text."]);
        assert!(!root.0.join("index.db.new").exists(), "it takes no space");
        let free = Folder {
            least_free: 0,
            ..full
        };
        assert!(!free.build_if_changed());
        assert_eq!((free.trouble(), texts(&free, "text").len()), (None, 2));
    }

    #[test]
    fn the_index_is_built_again_only_if_a_file_has_changed() {
        let (root, folder) = folder();
        let built = || {
            folder.update().expect("an index");
            fs::metadata(root.0.join("index.db"))
                .expect("the index")
                .ino()
        };
        let first = built();
        assert_eq!(built(), first);
        fs::write(root.0.join("docs/.hidden"), "x").expect("a file");
        assert_eq!(built(), first, "hidden files do not count");
        // As long as before, and written within the same second.
        fs::write(root.0.join("docs/a.txt"), "The other text.").expect("a file");
        assert_ne!(built(), first);
        assert_eq!(texts(&folder, "text"), ["The other text."]);
        fs::rename(root.0.join("docs/a.txt"), root.0.join("docs/b.txt")).expect("it moves");
        let renamed = built();
        assert_eq!(
            folder.find("text").expect("a passage")[0].source,
            "docs/b.txt"
        );
        assert_eq!(built(), renamed);
    }

    #[test]
    fn the_index_of_another_folder_does_not_answer() {
        let (root, folder) = folder();
        folder.update().expect("an index");
        fs::create_dir(root.0.join("other")).expect("a folder");
        let other = Folder {
            path: root.0.join("other"),
            ..folder
        };
        assert!(!other.build_if_changed());
        assert_eq!(
            other.find("text").map_err(|error| error.cause),
            Err(FailureCause::Index)
        );
    }

    /// The part that says what it was built from is whole.
    #[test]
    fn a_damage_that_a_query_finds_is_repaired_by_the_next_build() {
        let (root, folder) = folder();
        fs::write(root.0.join("docs/b.txt"), "word ".repeat(20_000)).expect("a file");
        folder.update().expect("an index");
        let path = root.0.join("index.db");
        let mut bytes = fs::read(&path).expect("the index");
        let half = bytes.len() / 2;
        bytes[half..].fill(0);
        fs::write(&path, bytes).expect("a damaged index");
        let query = || folder.find("text word").map_err(|error| error.cause);
        assert_eq!(query().err(), Some(FailureCause::Index));
        folder.update().expect("an index");
        assert_eq!(query().map(|found| found.is_empty()), Ok(false));
    }

    #[test]
    fn a_file_that_changes_while_it_is_read_is_read_again_at_the_next_reload() {
        let (root, folder) = folder();
        let path = root.0.join("docs/a.txt");
        let file = files::open(&path).expect("the file");
        fs::write(&path, "Longer than it was when it was opened.").expect("a file");
        assert_eq!(
            documents::read(file, &path).as_deref(),
            Ok("Longer than it was when it was opened."),
            "whatever it has is read"
        );
        let mut before = Fingerprint::default();
        before.add(&path, &fs::metadata(&path).expect("the file"));
        fs::write(&path, "It has changed after that.").expect("a file");
        let mut after = Fingerprint::default();
        after.add(&path, &fs::metadata(&path).expect("the file"));
        assert_ne!(before.0, after.0, "so the next look finds a change");
        folder.update().expect("an index");
    }

    #[test]
    fn few_queries_run_at_once_and_the_others_wait_until_their_deadline() {
        let (_root, folder) = folder();
        let folder = Folder {
            timeout: Duration::from_millis(20),
            ..folder
        };
        let take = |_| folder.queries.take(Instant::now(), |()| true);
        let running: Vec<_> = (0..MAX_QUERIES).map(take).collect();
        let cause = || folder.find("x").expect_err("there is no index").cause;
        assert_eq!(cause(), FailureCause::Timeout);
        drop(running);
        assert_eq!(cause(), FailureCause::Index);
    }
}
