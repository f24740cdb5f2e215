//! A file as passages: the text under each heading, in pieces that fit into a prompt.
//!
//! A file is read as a whole, and its text once, from the beginning to the end: the memory for its
//! passages is that of one.

use std::fs::File;
use std::io::{self, Read};
use std::mem;
use std::path::Path;

use super::cleaning::{HtmlPart, clean, cut, one_line, read_html};

/// The largest file that is read: a thick book has less text.
const MAX_FILE: u64 = 8 * 1024 * 1024;

/// The most characters of a passage: some 200 tokens of English.
pub const MAX_PASSAGE: usize = 800;

/// The most characters of a title.
const MAX_TITLE: usize = 200;

/// The bytes of a text that are added at once.
const CHUNK: usize = 4 * MAX_PASSAGE;

/// The text of a file, or the reason why it can't be a document.
pub fn read(file: File, path: &Path) -> Result<String, String> {
    let size = file.metadata().map_err(|error| error.to_string())?.len();
    let too_large = format!("it is larger than {} MiB", MAX_FILE / 1024 / 1024);
    if size > MAX_FILE {
        return Err(too_large);
    }
    // It may grow meanwhile.
    let mut bytes = Vec::with_capacity(size as usize + 1);
    let read: io::Result<usize> = file.take(MAX_FILE + 1).read_to_end(&mut bytes);
    match read {
        Err(error) => Err(error.to_string()),
        Ok(size) if size as u64 > MAX_FILE => Err(too_large),
        Ok(_) => as_text(path, bytes),
    }
}

/// Returns a file's content if it is text in UTF-8, else an error that names a program which
/// converts it. Text in a wrong encoding would never be found.
fn as_text(path: &Path, bytes: Vec<u8>) -> Result<String, String> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let ending = ending(path);
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
    String::from_utf8(bytes).map_err(|_| {
        let encoding = if is_utf_16 { "UTF-16" } else { "ISO-8859-1" };
        format!(
            "it is not UTF-8. Convert it first: iconv -f {encoding} -t UTF-8 -o \"utf8-{name}\" \"{name}\""
        )
    })
}

fn ending(path: &Path) -> String {
    let ending = path.extension().unwrap_or_default().to_string_lossy();
    ending.to_ascii_lowercase()
}

/// A passage with the title of its document and the heading that it is under, which may be empty.
#[derive(Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    pub title: &'a str,
    pub heading: &'a str,
    pub text: &'a str,
}

/// Splits a file's content, read as HTML, Markdown or plain text by the ending of its name. Returns
/// an error of `each` at once.
pub fn split<E>(
    path: &Path,
    content: &str,
    each: impl FnMut(Piece) -> Result<(), E>,
) -> Result<(), E> {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let mut splitter = Splitter {
        title: cut(&one_line(&name), MAX_TITLE).to_owned(),
        has_title: false,
        heading: String::new(),
        headings: String::new(),
        text: String::new(),
        is_empty: true,
        each,
        result: Ok(()),
    };
    match &*ending(path) {
        "html" | "htm" | "xhtml" => read_html(content, |part| match part {
            HtmlPart::Title(title) => splitter.set_title(title),
            HtmlPart::Heading(heading) => splitter.begin(heading),
            HtmlPart::Text(text) => splitter.add(text),
        }),
        "md" | "markdown" => read_markdown(content, &mut splitter),
        _ => splitter.add(content),
    }
    splitter.end();
    splitter.result
}

/// Its markup stays in the text: models can read it.
fn read_markdown<E, F: FnMut(Piece) -> Result<(), E>>(
    content: &str,
    splitter: &mut Splitter<E, F>,
) {
    let mut fence = None;
    for line in without_front_matter(content).lines() {
        let marks = line.trim_start();
        if fence.is_some_and(|fence| marks.starts_with(fence)) {
            fence = None;
        } else if fence.is_none() {
            fence = ["```", "~~~"]
                .into_iter()
                .find(|fence| marks.starts_with(fence));
            if let Some(heading) = read_heading(line) {
                splitter.set_title(&heading);
                splitter.begin(&heading);
                continue;
            }
        }
        splitter.add(line);
        splitter.add("\n");
    }
}

/// Removes the front matter: settings that some programs keep at a document's beginning.
fn without_front_matter(text: &str) -> &str {
    let text = text.trim_start_matches('\u{feff}');
    let settings = text
        .strip_prefix("---\n")
        .and_then(|rest| rest.split_once("\n---\n"));
    settings.map_or(text, |(_, rest)| rest)
}

/// Returns the text of a heading: after one to six number signs and a space, without number signs
/// at its end.
fn read_heading(line: &str) -> Option<String> {
    let text = line.trim_start_matches('#');
    let level = line.len() - text.len();
    let is_heading = (1..=6).contains(&level) && text.starts_with(' ');
    let heading = one_line(text.trim().trim_end_matches('#'));
    (is_heading && !heading.is_empty()).then_some(heading)
}

/// Takes a document's text in any pieces, and gives its passages.
struct Splitter<E, F> {
    /// The first one that was set, else the file's name.
    title: String,
    has_title: bool,
    heading: String,
    /// The first headings, for a document that has no other text.
    headings: String,
    /// The text since the last passage.
    text: String,
    is_empty: bool,
    each: F,
    result: Result<(), E>,
}

impl<E, F: FnMut(Piece) -> Result<(), E>> Splitter<E, F> {
    fn set_title(&mut self, title: &str) {
        if !self.has_title && !title.is_empty() {
            self.has_title = true;
            self.title = cut(title, MAX_TITLE).to_owned();
        }
    }

    /// Begins the text under a heading.
    fn begin(&mut self, heading: &str) {
        self.flush();
        self.heading = cut(heading, MAX_PASSAGE).to_owned();
        if self.headings.len() < MAX_PASSAGE {
            self.headings.extend([&*self.heading, "\n"]);
        }
    }

    /// Adds text with single spaces, and at most one empty line between two others.
    fn add(&mut self, text: &str) {
        let mut rest = text;
        while !rest.is_empty() {
            let fits = |at: &usize| rest.is_char_boundary(*at);
            let end = (0..=CHUNK.min(rest.len())).rev().find(fits);
            let (chunk, after) = rest.split_at(end.unwrap_or(rest.len()));
            rest = after;
            for c in clean(chunk).chars() {
                match c {
                    '\n' => {
                        self.text.truncate(self.text.trim_end_matches(' ').len());
                        if !self.text.is_empty() && !self.text.ends_with("\n\n") {
                            self.text.push('\n');
                        }
                    }
                    c if c.is_whitespace() => {
                        if !self.text.is_empty() && !self.text.ends_with([' ', '\n']) {
                            self.text.push(' ');
                        }
                    }
                    c => self.text.push(c),
                }
            }
            while let Some(end) = end_of_passage(&self.text) {
                let rest = self.text.split_off(end);
                let passage = mem::replace(&mut self.text, rest.trim_start().to_owned());
                self.give(passage.trim());
            }
        }
    }

    fn flush(&mut self) {
        let text = mem::take(&mut self.text);
        self.give(text.trim());
    }

    fn end(&mut self) {
        self.flush();
        if self.is_empty {
            let headings = mem::take(&mut self.headings);
            self.heading.clear();
            self.give(cut(headings.trim(), MAX_PASSAGE));
        }
    }

    fn give(&mut self, text: &str) {
        if self.result.is_ok() && !text.is_empty() {
            self.is_empty = false;
            self.result = (self.each)(Piece {
                title: &self.title,
                heading: &self.heading,
                text,
            });
        }
    }
}

/// Returns the end of the first passage of a longer text: the end of a paragraph, else of a line, a
/// sentence or a word, else the limit. An end in the first quarter is not used.
fn end_of_passage(text: &str) -> Option<usize> {
    let (most, _) = text.char_indices().nth(MAX_PASSAGE)?;
    let window = &text[..most];
    let least = most / 4;
    let ends: [&[&str]; 4] = [&["\n\n"], &["\n"], &[". ", "! ", "? ", "。"], &[" "]];
    let last = |marks: &&[&str]| {
        let after = marks
            .iter()
            .filter_map(|mark| window.rfind(mark).map(|at| at + mark.len()))
            .max();
        after.filter(|&after| after > least)
    };
    Some(ends.iter().find_map(last).unwrap_or(most))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// The heading and the text of each passage.
    fn pieces(name: &str, content: &str) -> Vec<(String, String)> {
        let mut pieces = Vec::new();
        let split = split(Path::new(name), content, |piece| {
            pieces.push((piece.heading.to_owned(), piece.text.to_owned()));
            Ok::<_, Infallible>(())
        });
        let Ok(()) = split;
        pieces
    }

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
            match as_text(Path::new(name), bytes.to_vec()) {
                Ok(text) => assert_eq!((text.as_bytes(), reason), (bytes, "")),
                Err(error) => assert!(
                    !reason.is_empty() && error.contains(reason),
                    "{name}: {error}"
                ),
            }
        }
    }

    #[test]
    fn markdown_is_split_at_its_headings() {
        let text = "---\nauthor: x\n---\nBefore.\r\n# The port ##\n\nOne.\n\n* two\n```sh\n# no heading\n```\n####### nor this\n#nor this\n## Empty\n### Last\nEnd.";
        let port = "One.\n\n* two\n```sh\n# no heading\n```\n####### nor this\n#nor this";
        let expected = [("", "Before."), ("The port", port), ("Last", "End.")];
        assert_eq!(
            pieces("a.md", text),
            expected.map(|(heading, text)| (heading.to_owned(), text.to_owned()))
        );
    }

    #[test]
    fn a_text_is_parted_where_it_pauses() {
        let texts = |content: &str| -> Vec<String> {
            let pieces = pieces("a.txt", content).into_iter();
            pieces.map(|(_, text)| text).collect()
        };
        let (long, short) = ("a".repeat(500), "b".repeat(400));
        for (separator, end) in [("\n\n", ""), ("\n", ""), (". ", "."), (" ", "")] {
            let found = texts(&format!("{long}{separator}{short}"));
            assert_eq!(
                found,
                [format!("{long}{end}"), short.clone()],
                "{separator:?}"
            );
        }
        assert_eq!(
            texts("one\n\n\n  two"),
            ["one\n\ntwo"],
            "what fits stays together"
        );
        assert_eq!(
            pieces("a.md", "# H\n## I").pop().map(|it| it.1).as_deref(),
            Some("H\nI")
        );
        let endless = texts(&"é".repeat(MAX_PASSAGE * 3 + 1));
        let lengths: Vec<usize> = endless.iter().map(|it| it.chars().count()).collect();
        assert_eq!(lengths, [800, 800, 800, 1]);
    }

    #[test]
    fn a_file_is_read_by_the_ending_of_its_name_and_has_a_title() {
        let first = |name: &str, content: &str| {
            let mut first = None;
            let _ = split(Path::new(name), content, |piece| {
                first = Some([piece.title, piece.heading, piece.text].join("|"));
                Err(())
            });
            first.expect("a passage")
        };
        let content = "# A\n<b>x</b>";
        assert_eq!(first("a.md", content), "A|A|<b>x</b>");
        assert_eq!(first("b.HTML", content), "b||# A x");
        assert_eq!(first("c", content), "c||# A\n<b>x</b>");
        let page = "<title>T</title><h1>H</h1>x";
        assert_eq!(first("d.htm", page), "T|H|x");
    }

    #[test]
    fn whatever_is_in_a_file_its_passages_are_short_and_clean() {
        let markup = "< > </ <!-- --> <script> </script <h1> </h1> <pre> <a\u{a0}title=\" ' & &# ; &#0; ``` <title>";
        let text = [
            "# ", "## a", "---\n", "\n", "\r", "\t", "\u{0}", "\u{85}", "\u{2028}", "\u{202e}",
            "\u{fffd}",
        ];
        let parts: Vec<&str> = markup
            .split(' ')
            .chain(text)
            .chain(["é", "漢字", "word ", "long "])
            .collect();
        let mut state = 1_u64;
        let mut next = |most: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % most
        };
        for _ in 0..1_000 {
            let mut content = String::new();
            for _ in 0..next(60) {
                content.push_str(&parts[next(parts.len())].repeat(1 + next(4) * next(80)));
            }
            for name in ["a.html", "a.md", "a.txt"] {
                for (heading, text) in pieces(name, &content) {
                    assert!(
                        !text.trim().is_empty() && !heading.contains('\n'),
                        "{content:?}"
                    );
                    for text in [&heading, &text] {
                        assert!(text.chars().count() <= MAX_PASSAGE, "{content:?}");
                        assert!(
                            text.chars().all(|c| c == '\n' || !c.is_control()),
                            "{content:?}"
                        );
                    }
                }
            }
        }
    }
}
