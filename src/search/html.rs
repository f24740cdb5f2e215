//! HTML in parts: its title, its headings, and its text without scripts, styles and navigation.

use html5gum::{DefaultEmitter, Token, Tokenizer};

use super::cleaning::one_line;

/// Elements whose content is not text for readers, or leads to other pages.
const SKIPPED: [&[u8]; 8] = [
    b"script",
    b"style",
    b"template",
    b"svg",
    b"iframe",
    b"object",
    b"canvas",
    b"nav",
];

/// Elements that begin and end a line.
const BLOCKS: &str = "address article aside blockquote body br dd details div dl dt fieldset figcaption figure footer \
    form header hr html li main ol option p pre section summary table tbody thead tr ul";

/// A part of a page, in the order of the page.
pub enum Part<'a> {
    Title(&'a str),
    Heading(&'a str),
    Text(&'a str),
}

/// The text of a fragment, its headings too.
pub fn plain(html: &str) -> String {
    let mut text = String::new();
    read(html, |part| match part {
        Part::Title(_) => {}
        Part::Heading(line) => text.extend(["\n", line, "\n"]),
        Part::Text(part) => text.push_str(part),
    });
    let lines: Vec<String> = text
        .lines()
        .map(one_line)
        .filter(|line| !line.is_empty())
        .collect();
    lines.join("\n")
}

/// Reads a page in one pass. Its memory is that of the longest text between two tags.
pub fn read(html: &str, mut each: impl FnMut(Part)) {
    let mut emitter = DefaultEmitter::default();
    // Otherwise the tokenizer looks for tags in scripts and titles.
    emitter.naively_switch_states(true);
    let mut skipped: Option<Vec<u8>> = None;
    let (mut title, mut heading): (Option<String>, Option<String>) = (None, None);
    let mut in_pre = false;
    for token in Tokenizer::new_with_emitter(html, emitter) {
        let Ok(token) = token;
        let (name, is_end) = match &token {
            Token::StartTag(tag) => (&tag.name.0, false),
            Token::EndTag(tag) => (&tag.name.0, true),
            Token::String(text) if skipped.is_none() => {
                let text = String::from_utf8_lossy(text);
                match title.as_mut().or(heading.as_mut()) {
                    Some(line) => line.push_str(&text),
                    None if in_pre => each(Part::Text(&text)),
                    // A line end is a space here. The text may be as long as the page, so it is not
                    // copied.
                    None => {
                        for line in text.split_inclusive(['\n', '\r']) {
                            let end = line.trim_end_matches(['\n', '\r']);
                            each(Part::Text(end));
                            if end.len() < line.len() {
                                each(Part::Text(" "));
                            }
                        }
                    }
                }
                continue;
            }
            _ => continue,
        };
        if let Some(element) = &skipped {
            if is_end && element == name {
                skipped = None;
            }
            continue;
        }
        match name.as_slice() {
            b"title" if !is_end => title = Some(String::new()),
            b"title" => title
                .take()
                .into_iter()
                .for_each(|text| each(Part::Title(&one_line(&text)))),
            b"h1" | b"h2" | b"h3" | b"h4" | b"h5" | b"h6" => {
                // Begins the next heading even if the end tag of the last one is missing.
                let ended = heading.take();
                ended
                    .into_iter()
                    .for_each(|text| each(Part::Heading(&one_line(&text))));
                heading = (!is_end).then(String::new);
            }
            b"td" | b"th" => each(Part::Text(" ")),
            name => {
                if name == b"pre" {
                    in_pre = !is_end;
                }
                let is_block = BLOCKS.split(' ').any(|block| block.as_bytes() == name);
                match &mut heading {
                    Some(line) if is_block => line.push(' '),
                    None if is_block => each(Part::Text("\n")),
                    _ if SKIPPED.contains(&name) && !is_end => skipped = Some(name.to_vec()),
                    _ => {}
                }
            }
        }
    }
    if let Some(text) = heading {
        each(Part::Heading(&one_line(&text)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_in_parts() {
        let mut parts = String::new();
        read(
            "<!DOCTYPE html><html><head><title>The &quot;port&quot; </title><style>p { color: red }</style>
             <script>if (a < b) { alert('<p>x</p>') }</script></head>
             <body><nav><ul><li><a href='/'>Home</a></ul></nav>Before.<h1 class='a > b'>First <b>one</b></h1><p>Some
             text<br>and&nbsp;more &amp; more.</p><!-- <p>unseen</p> -->
             <h2>Second</h2><ul><li>a<li>b</ul><pre>x\n  y</pre><TABLE><tr><td>1<td>2</table><h3>Last",
            |part| match part {
                Part::Title(text) => parts += &format!("title: {text}\n"),
                Part::Heading(text) => parts += &format!("\nheading: {text}\n"),
                Part::Text(text) => parts += text,
            },
        );
        let lines: Vec<String> = parts.lines().map(one_line).collect();
        let lines: Vec<&str> = lines
            .iter()
            .map(|line| &**line)
            .filter(|line| !line.is_empty())
            .collect();
        assert_eq!(
            lines,
            [
                "title: The \"port\"",
                "Before.",
                "heading: First one",
                "Some text",
                "and\u{a0}more & more.".replace('\u{a0}', " ").as_str(),
                "heading: Second",
                "a",
                "b",
                "x",
                "y",
                "1 2",
                "heading: Last"
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
