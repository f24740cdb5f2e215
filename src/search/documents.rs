//! The files that become documents of the index: which they are, and what is read of one.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::passages::{self, Section};
use super::text;

/// The largest file that is read: a thick book has less text.
pub const MAX_FILE: u64 = 8 * 1024 * 1024;

/// The most characters of a title.
const MAX_TITLE: usize = 200;

/// How much of a file is looked at to tell text from something else.
const SAMPLE: usize = 8 * 1024;

/// How deep folders are followed into each other.
const MAX_DEPTH: usize = 64;

/// A file that may be a document.
#[derive(Debug, PartialEq, Eq)]
pub struct Candidate {
    pub path: PathBuf,
    /// Its path below the folder that was given. Clients see it as the source.
    pub source: String,
}

/// A file's text, ready for the index.
pub struct Text {
    pub title: String,
    pub pieces: Vec<Section>,
    pub digest: [u8; 32],
    pub size: u64,
}

/// The files of a path, in the order of their names: the path's own where it is a file, else those in the
/// folder and in the folders in it. Skipped files are reported with the reason.
pub fn candidates(path: &Path, told: &mut dyn FnMut(&Path, &str)) -> std::io::Result<Vec<Candidate>> {
    let root = fs::canonicalize(path)?;
    let base = root.parent().unwrap_or(&root).to_owned();
    let mut files = Vec::new();
    let mut waiting = vec![(root.clone(), 0)];
    while let Some((path, depth)) = waiting.pop() {
        let kind = fs::symlink_metadata(&path)?.file_type();
        if kind.is_dir() {
            if depth > MAX_DEPTH {
                told(&path, "it is too deep in folders");
                continue;
            }
            match names(&path) {
                // The last in is the first out.
                Ok(names) => waiting.extend(names.into_iter().rev().map(|name| (name, depth + 1))),
                Err(error) if depth == 0 => return Err(error),
                Err(error) => told(&path, &error.to_string()),
            }
        } else if depth > 0 && is_hidden(&path) {
            told(&path, "it is hidden");
        } else if kind.is_symlink() {
            told(&path, "it is a link; what it leads to can be added by its own name");
        } else if kind.is_file() {
            let source = path.strip_prefix(&base).unwrap_or(&path).to_string_lossy();
            files.push(Candidate { source: text::one_line(&source), path });
        } else {
            told(&path, "it is no file");
        }
    }
    Ok(files)
}

fn names(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut names: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    // Hidden folders hold what programs keep for themselves, such as .git: nobody would want to read of it.
    names.retain(|path| !(is_hidden(path) && path.is_dir()));
    names.sort();
    Ok(names)
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// Reads a file, or says why it is none for the index.
pub fn read(path: &Path) -> Result<Text, String> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes));
    let size = read.map_err(|error| error.to_string())? as u64;
    if size > MAX_FILE {
        return Err(format!("it is larger than {} MiB", MAX_FILE / 1024 / 1024));
    }
    if !is_text(&bytes) {
        return Err("it is no text".into());
    }
    let outline = passages::read(path, &String::from_utf8_lossy(&bytes));
    let pieces = passages::split(&outline);
    if pieces.is_empty() {
        return Err("there is no text in it".into());
    }
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let title = text::one_line(if outline.title.is_empty() { &name } else { &outline.title });
    Ok(Text {
        title: text::cut(&title, MAX_TITLE).to_owned(),
        pieces,
        digest: Sha256::digest(&bytes).into(),
        size,
    })
}

/// Whether it looks like a text: no zeros at its beginning, and little that is not encoded in UTF-8.
fn is_text(bytes: &[u8]) -> bool {
    let sample = &bytes[..bytes.len().min(SAMPLE)];
    let broken = String::from_utf8_lossy(sample).matches('\u{fffd}').count();
    !sample.contains(&0) && broken <= sample.len() / 10 && !sample.starts_with(b"%PDF")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_told_from_something_else() {
        for (bytes, is) in [
            (&b"plain"[..], true),
            (b"", true),
            ("größer".as_bytes(), true),
            (b"gr\xf6\xdfer als das, was in einer anderen Kodierung steht", true),
            (b"a\0b", false),
            (b"%PDF-1.7\n", false),
            (&[0xff; 100], false),
        ] {
            assert_eq!(is_text(bytes), is, "{bytes:?}");
        }
    }
}
