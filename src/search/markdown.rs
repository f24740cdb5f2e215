//! Splits Markdown into sections. Its markup stays in the text: models can read it.

use std::mem;

use super::cleaning::{clean, one_line};
use super::outline::Outline;

pub fn read(text: &str) -> Outline {
    let text = clean(text);
    let mut outline = Outline::default();
    let (mut heading, mut content) = (String::new(), String::new());
    let mut fence = None;
    for line in without_front_matter(&text).lines() {
        let marks = line.trim_start();
        if fence.is_some_and(|fence| marks.starts_with(fence)) {
            fence = None;
        } else if fence.is_none() {
            fence = ["```", "~~~"]
                .into_iter()
                .find(|fence| marks.starts_with(fence));
            if let Some(next) = read_heading(line) {
                if outline.title.is_empty() {
                    outline.title.clone_from(&next);
                }
                outline.push(mem::replace(&mut heading, next), &mem::take(&mut content));
                continue;
            }
        }
        content.push_str(line.trim_end());
        content.push('\n');
    }
    outline.push(heading, &content);
    outline
}

/// Removes the front matter: settings that some programs keep at a document's beginning.
fn without_front_matter(text: &str) -> &str {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_by_heading() {
        let outline = read(
            "---\nauthor: x\n---\nBefore.\r\n# The port ##\n\nOne.\n\n* two\n```sh\n# no heading\n```\n####### nor this\n#nor this\n## Empty\n### Last\nEnd.",
        );
        assert_eq!(outline.title, "The port");
        let sections: Vec<(&str, &str)> = outline
            .sections
            .iter()
            .map(|section| (&*section.heading, &*section.text))
            .collect();
        assert_eq!(
            sections,
            [
                ("", "Before."),
                (
                    "The port",
                    "One.\n\n* two\n```sh\n# no heading\n```\n####### nor this\n#nor this"
                ),
                ("Empty", ""),
                ("Last", "End.")
            ]
        );
    }
}
