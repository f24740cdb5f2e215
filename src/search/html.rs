//! HTML to text, without tags, scripts and styles.

use html5gum::{DefaultEmitter, Token, Tokenizer};

use super::cleaning::one_line;
use super::outline::Outline;

/// Elements whose content is not text for readers.
const SKIPPED: [&str; 7] = [
    "script", "style", "template", "svg", "iframe", "object", "canvas",
];

/// Elements that begin and end a line.
const BLOCKS: &str = "address article aside blockquote body br dd details div dl dt fieldset figcaption figure footer \
    form header hr html li main nav ol option p pre section summary table tbody thead tr ul";

pub fn plain(html: &str) -> String {
    let outline = read(html);
    let sections = outline
        .sections
        .into_iter()
        .flat_map(|section| [section.heading, section.text]);
    let parts: Vec<String> = sections.filter(|part| !part.is_empty()).collect();
    parts.join("\n")
}

/// Reads a page's title, its headings, and the text under each.
pub fn read(html: &str) -> Outline {
    let mut emitter = DefaultEmitter::default();
    // Otherwise the tokenizer looks for tags in scripts and titles.
    emitter.naively_switch_states(true);
    let mut page = Page::default();
    for token in Tokenizer::new_with_emitter(html, emitter) {
        let Ok(token) = token;
        match token {
            Token::String(text) => page.add(&String::from_utf8_lossy(&text)),
            Token::StartTag(tag) => page.take_tag(&String::from_utf8_lossy(&tag.name), false),
            Token::EndTag(tag) => page.take_tag(&String::from_utf8_lossy(&tag.name), true),
            Token::Comment(_) | Token::Doctype(_) | Token::Error(_) => {}
        }
    }
    page.end_section();
    page.outline
}

#[derive(Default)]
struct Page {
    outline: Outline,
    heading: String,
    text: String,
    in_title: bool,
    in_heading: bool,
    in_pre: bool,
    /// The element whose content is skipped.
    skipped: Option<String>,
}

impl Page {
    fn add(&mut self, text: &str) {
        if self.skipped.is_some() {
            return;
        }
        if self.in_title {
            if self.outline.title.is_empty() {
                self.outline.title = one_line(text);
            }
        } else if self.in_heading {
            self.heading.push_str(text);
        } else if self.in_pre {
            self.text.push_str(text);
        } else {
            // A line end is a space here. `end_section` merges several spaces.
            self.text.extend(
                text.chars()
                    .map(|c| if c.is_whitespace() { ' ' } else { c }),
            );
        }
    }

    fn take_tag(&mut self, name: &str, is_end: bool) {
        if let Some(skipped) = &self.skipped {
            if is_end && skipped == name {
                self.skipped = None;
            }
            return;
        }
        match name {
            "title" => self.in_title = !is_end,
            _ if SKIPPED.contains(&name) && !is_end => self.skipped = Some(name.to_owned()),
            "h1" | "h2" | "h3" | "h4" | "h5" | "h6" => {
                // Begins the next heading even if the end tag of the last one is missing.
                if !is_end {
                    self.end_section();
                }
                self.in_heading = !is_end;
            }
            "pre" => {
                self.in_pre = !is_end;
                self.end_line();
            }
            "td" | "th" => self.add(" "),
            _ if BLOCKS.split(' ').any(|block| block == name) => self.end_line(),
            _ => {}
        }
    }

    fn end_line(&mut self) {
        if self.in_heading {
            self.heading.push(' ');
        } else {
            self.text.push('\n');
        }
    }

    fn end_section(&mut self) {
        let heading = one_line(&std::mem::take(&mut self.heading));
        let raw = std::mem::take(&mut self.text);
        let lines: Vec<String> = raw
            .lines()
            .map(one_line)
            .filter(|line| !line.is_empty())
            .collect();
        self.outline.push(heading, &lines.join("\n"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_in_sections() {
        let page = read(
            "<!DOCTYPE html><html><head><title>The &quot;port&quot; </title><style>p { color: red }</style>
             <script>if (a < b) { alert('<p>x</p>') }</script></head>
             <body>Before.<h1 class='a > b'>First <b>one</b></h1><p>Some
             text<br>and&nbsp;more &amp; more.</p><!-- <p>unseen</p> -->
             <h2>Second</h2><ul><li>a<li>b</ul><pre>x\n  y</pre><TABLE><tr><td>1<td>2</table></body></html>",
        );
        assert_eq!(page.title, "The \"port\"");
        let sections: Vec<(&str, &str)> = page
            .sections
            .iter()
            .map(|section| (&*section.heading, &*section.text))
            .collect();
        assert_eq!(
            sections,
            [
                ("", "Before."),
                ("First one", "Some text\nand more & more."),
                ("Second", "a\nb\nx\ny\n1 2")
            ]
        );
    }

    #[test]
    fn text_that_is_not_markup_stays() {
        for (html, text) in [
            ("a < b and c > d", "a < b and c > d"),
            ("1<2", "1<2"),
            ("<3", "<3"),
            ("a <b", "a"),
            (
                "AT&T &nosuch; &#xZZ; &#55296; & &amp",
                "AT&T &nosuch; &#xZZ; \u{fffd} & &",
            ),
            ("&#72;&#x69;&Uuml;&euro;", "HiÜ€"),
            ("<b>bold</b> <i>text", "bold text"),
            ("<a title='it's>x</a> y", "x y"),
            ("x<script>never", "x"),
            ("x<!-- never", "x"),
            ("x<?php never ?>y", "xy"),
            ("", ""),
            ("<", "<"),
            ("</", "</"),
            ("<é>", "<é>"),
            ("&lt;script&gt;", "<script>"),
        ] {
            assert_eq!(plain(html), text, "{html}");
        }
    }

    #[test]
    fn hostile_markup_takes_one_pass() {
        for piece in [
            "<a",
            "<a '",
            "<!--",
            "<script>",
            "&",
            "</",
            "<h1>",
            "<a \"'>",
            "\u{0}<\u{fffd}>",
        ] {
            let text = plain(&piece.repeat(100_000));
            assert!(text.len() <= 100_000 * (piece.len() + 1), "{piece}");
        }
    }
}
