//! Splits a document into passages: the text under each heading, in pieces that fit into a prompt.

use std::path::Path;

use super::outline::{Outline, Section};
use super::{cleaning, html, markdown};

/// The most characters of a passage: some 200 tokens of English.
const MAX_PASSAGE: usize = 800;

/// Reads a file's content as HTML, Markdown or plain text, by the ending of its name.
pub fn read(path: &Path, content: &str) -> Outline {
    let ending = path
        .extension()
        .map(|ending| ending.to_string_lossy().to_ascii_lowercase());
    match ending.as_deref() {
        Some("html" | "htm" | "xhtml") => html::read(content),
        Some("md" | "markdown") => markdown::read(content),
        _ => {
            let mut outline = Outline::default();
            outline.push(String::new(), &cleaning::clean(content));
            outline
        }
    }
}

/// Splits the text under each heading of a document into passages.
pub fn split(outline: &Outline) -> Vec<Section> {
    let mut passages = Vec::new();
    // If a document has headings only, they are its text.
    let has_text = outline
        .sections
        .iter()
        .any(|section| !section.text.is_empty());
    for Section { heading, text } in &outline.sections {
        let mut rest = if has_text {
            text.as_str()
        } else {
            heading.as_str()
        };
        while !rest.is_empty() {
            let (passage, after) = rest.split_at(end_of_passage(rest));
            let passage = passage.trim();
            if !passage.is_empty() {
                let heading = cleaning::cut(heading, MAX_PASSAGE).to_owned();
                passages.push(Section {
                    heading,
                    text: passage.to_owned(),
                });
            }
            rest = after.trim_start();
        }
    }
    passages
}

/// Returns the end of the first passage of a text: the end of a paragraph, else of a line, a
/// sentence or a word, else the limit. An end in the first quarter is not used.
fn end_of_passage(text: &str) -> usize {
    let Some((most, _)) = text.char_indices().nth(MAX_PASSAGE) else {
        return text.len();
    };
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
    ends.iter().find_map(last).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(text: &str) -> Vec<String> {
        let sections = vec![Section {
            heading: "H".into(),
            text: text.into(),
        }];
        split(&Outline {
            title: String::new(),
            sections,
        })
        .into_iter()
        .map(|piece| piece.text)
        .collect()
    }

    #[test]
    fn a_text_is_parted_where_it_pauses() {
        let (long, short) = ("a".repeat(500), "b".repeat(400));
        for (separator, end) in [("\n\n", ""), ("\n", ""), (". ", "."), (" ", "")] {
            let found = pieces(&format!("{long}{separator}{short}"));
            assert_eq!(
                found,
                [format!("{long}{end}"), short.clone()],
                "{separator:?}"
            );
        }
        assert_eq!(
            pieces("one\n\ntwo"),
            ["one\n\ntwo"],
            "what fits stays together"
        );
        assert_eq!(pieces(""), ["H"], "a heading that is all there is");
        let endless = pieces(&"é".repeat(MAX_PASSAGE * 3 + 1));
        assert_eq!(
            endless
                .iter()
                .map(|piece| piece.chars().count())
                .collect::<Vec<_>>(),
            [800, 800, 800, 1]
        );
    }

    #[test]
    fn a_file_is_read_by_the_ending_of_its_name() {
        let sections = |name: &str| read(Path::new(name), "# A\n<b>x</b>").sections.len();
        let first = |name: &str| {
            read(Path::new(name), "# A\n<b>x</b>")
                .sections
                .swap_remove(0)
                .text
        };
        assert_eq!((sections("a.md"), first("a.md").as_str()), (1, "<b>x</b>"));
        assert_eq!((sections("a.HTML"), first("a.HTML").as_str()), (1, "# A x"));
        assert_eq!((sections("a"), first("a").as_str()), (1, "# A\n<b>x</b>"));
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
                let outline = read(Path::new(name), &content);
                assert!(!outline.title.contains('\n'), "{content:?}");
                for piece in split(&outline) {
                    assert!(!piece.text.trim().is_empty(), "{content:?}");
                    for text in [&piece.heading, &piece.text] {
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
