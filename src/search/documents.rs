//! Files that become documents of the index: finding and reading them.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::outline::Section;
use super::{cleaning, passages};

/// The largest file that is read: a thick book has less text.
const MAX_FILE: u64 = 8 * 1024 * 1024;

/// The most characters of a title.
const MAX_TITLE: usize = 200;

/// The most levels of folders inside of each other.
const MAX_DEPTH: usize = 64;

/// A file that could become a document.
#[derive(Debug, PartialEq, Eq)]
pub struct Candidate {
    pub path: PathBuf,
    /// The path below the folder that was given. Clients see it as the source.
    pub source: String,
}

/// A file's text, ready for the index.
pub struct DocumentText {
    pub title: String,
    pub passages: Vec<Section>,
    pub digest: [u8; 32],
    pub size: u64,
}

/// Lists the files at a path: the file itself, or those in the folder and its subfolders, ordered
/// by name. `skip` gets each file that can't be a document, and the reason. Also returns the number
/// of hidden files and folders, which are skipped: programs keep their own data there, as in .git.
pub fn candidates(
    path: &Path,
    skip: &mut dyn FnMut(&Path, &str),
) -> std::io::Result<(Vec<Candidate>, usize)> {
    let root = fs::canonicalize(path)?;
    let base = root.parent().unwrap_or(&root).to_owned();
    let (mut files, mut hidden) = (Vec::new(), 0);
    let mut waiting = vec![(root.clone(), 0)];
    while let Some((path, depth)) = waiting.pop() {
        let kind = fs::symlink_metadata(&path)?.file_type();
        if depth > 0
            && path
                .file_name()
                .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
        {
            hidden += 1;
        } else if kind.is_dir() {
            if depth > MAX_DEPTH {
                skip(&path, "it is in more than 64 levels of folders");
                continue;
            }
            match names(&path) {
                // The last in is the first out.
                Ok(names) => waiting.extend(names.into_iter().rev().map(|name| (name, depth + 1))),
                Err(error) if depth == 0 => return Err(error),
                Err(error) => skip(&path, &error.to_string()),
            }
        } else if kind.is_symlink() {
            skip(&path, "it is a symbolic link: add its target instead");
        } else if kind.is_file() {
            let source = path.strip_prefix(&base).unwrap_or(&path).to_string_lossy();
            files.push(Candidate {
                source: cleaning::one_line(&source),
                path,
            });
        } else {
            skip(&path, "it is not a regular file");
        }
    }
    Ok((files, hidden))
}

fn names(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut names: Vec<PathBuf> = fs::read_dir(folder)?
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<_>>()?;
    names.sort();
    Ok(names)
}

/// Reads a file, or says why it can't be a document.
pub fn read(path: &Path) -> Result<DocumentText, String> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes));
    let size = read.map_err(|error| error.to_string())? as u64;
    if size > MAX_FILE {
        return Err(format!("it is larger than {} MiB", MAX_FILE / 1024 / 1024));
    }
    let content = as_text(path, &bytes)?;
    let outline = passages::read(path, content);
    let passages = passages::split(&outline);
    if passages.is_empty() {
        return Err("it is empty".into());
    }
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let title = cleaning::one_line(if outline.title.is_empty() {
        &name
    } else {
        &outline.title
    });
    Ok(DocumentText {
        title: cleaning::cut(&title, MAX_TITLE).to_owned(),
        passages,
        digest: Sha256::digest(&bytes).into(),
        size,
    })
}

/// Returns a file's content if it is text in UTF-8, else an error that names a program which
/// converts it. Text in a wrong encoding would never be found.
fn as_text<'a>(path: &Path, bytes: &'a [u8]) -> Result<&'a str, String> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let ending = path
        .extension()
        .unwrap_or_default()
        .to_string_lossy()
        .to_ascii_lowercase();
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    if ending == "pdf" || bytes.starts_with(b"%PDF") {
        return Err(format!(
            "it is a PDF. Convert it to text first: pdftotext \"{name}\""
        ));
    }
    if ["docx", "odt", "epub", "rtf"].contains(&&*ending) {
        return Err(format!(
            "convert it to Markdown first: pandoc -o \"{stem}.md\" \"{name}\""
        ));
    }
    let is_utf_16 = bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff");
    if bytes.contains(&0) && !is_utf_16 {
        return Err("it is not text".into());
    }
    std::str::from_utf8(bytes).map_err(|_| {
        let encoding = if is_utf_16 { "UTF-16" } else { "ISO-8859-1" };
        format!(
            "it is not UTF-8. Convert it first: iconv -f {encoding} -t UTF-8 -o \"utf8-{name}\" \"{name}\""
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_utf_8_text_is_refused_with_a_command_that_converts_it() {
        for (name, bytes, reason) in [
            ("a.txt", &b"plain"[..], ""),
            ("a", b"", ""),
            ("a.md", "größer".as_bytes(), ""),
            (
                "a.txt",
                b"gr\xf6\xdfer als das",
                "iconv -f ISO-8859-1 -t UTF-8 -o \"utf8-a.txt\" \"a.txt\"",
            ),
            ("a.txt", b"\xff\xfeg\0r\0", "iconv -f UTF-16"),
            ("a.png", b"\x89PNG\0\0", "it is not text"),
            ("a", b"%PDF-1.7\n", "pdftotext \"a\""),
            ("My file.PDF", b"", "pdftotext \"My file.PDF\""),
            ("a.docx", b"PK\x03\x04\0", "pandoc -o \"a.md\" \"a.docx\""),
        ] {
            match as_text(Path::new(name), bytes) {
                Ok(text) => assert_eq!((text.as_bytes(), reason), (bytes, "")),
                Err(error) => assert!(
                    !reason.is_empty() && error.contains(reason),
                    "{name}: {error}"
                ),
            }
        }
    }
}
