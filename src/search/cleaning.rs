//! Cleans text from outside for a query or a prompt: removes what nobody sees, and the markup of
//! HTML.

use html5gum::{DefaultEmitter, Token, Tokenizer};

/// Deletes invisible characters, which a model could still read, and replaces control characters
/// with spaces. Line ends stay.
pub fn clean(text: &str) -> String {
    let mut cleaned = String::with_capacity(text.len());
    for (index, c) in text.char_indices() {
        match c {
            '\n' => cleaned.push('\n'),
            '\r' if text[index + 1..].starts_with('\n') => {}
            '\r' => cleaned.push('\n'),
            c if c.is_control() => cleaned.push(' '),
            c if is_invisible(c) => {}
            c => cleaned.push(c),
        }
    }
    cleaned
}

/// Unicode's property Default_Ignorable_Code_Point (DerivedCoreProperties.txt, Unicode 16), and
/// after the empty line other characters that are drawn as nothing: the blank Braille pattern,
/// marks of annotations, a note without a head.
#[rustfmt::skip]
fn is_invisible(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
        | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fff8}' | '\u{1bca0}'..='\u{1bca3}'
        | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'

        | '\u{2800}' | '\u{fff9}'..='\u{fffb}' | '\u{1d159}')
}

/// Makes one line of a text, with single spaces.
pub fn one_line(text: &str) -> String {
    // A list of the words would take many times the memory of a hostile text.
    let mut line = String::new();
    for word in clean(text).split_whitespace() {
        line.extend([if line.is_empty() { "" } else { " " }, word]);
    }
    line
}

/// Cuts a text to at most so many characters, if possible at the end of a word.
pub fn cut(text: &str, most: usize) -> &str {
    let Some((end, next)) = text.char_indices().nth(most) else {
        return text;
    };
    let window = &text[..end];
    if next.is_whitespace() {
        return window.trim_end();
    }
    match window.rfind(char::is_whitespace) {
        Some(space) if !window[..space].trim().is_empty() => window[..space].trim_end(),
        _ => window,
    }
}

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
pub enum HtmlPart<'a> {
    Title(&'a str),
    Heading(&'a str),
    Text(&'a str),
}

/// The text of a fragment, its headings too.
pub fn plain_text(html: &str) -> String {
    let mut text = String::new();
    read_html(html, |part| match part {
        HtmlPart::Title(_) => {}
        HtmlPart::Heading(line) => text.extend(["\n", line, "\n"]),
        HtmlPart::Text(part) => text.push_str(part),
    });
    let lines: Vec<String> = text
        .lines()
        .map(one_line)
        .filter(|line| !line.is_empty())
        .collect();
    lines.join("\n")
}

/// Reads a page in one pass. Its memory is that of the longest text between two tags.
pub fn read_html(html: &str, mut each: impl FnMut(HtmlPart)) {
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
                    None if in_pre => each(HtmlPart::Text(&text)),
                    // A line end is a space here. The text may be as long as the page, so it is not
                    // copied.
                    None => {
                        for line in text.split_inclusive(['\n', '\r']) {
                            let end = line.trim_end_matches(['\n', '\r']);
                            each(HtmlPart::Text(end));
                            if end.len() < line.len() {
                                each(HtmlPart::Text(" "));
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
                .for_each(|text| each(HtmlPart::Title(&one_line(&text)))),
            b"h1" | b"h2" | b"h3" | b"h4" | b"h5" | b"h6" => {
                // Begins the next heading even if the end tag of the last one is missing.
                let ended = heading.take();
                ended
                    .into_iter()
                    .for_each(|text| each(HtmlPart::Heading(&one_line(&text))));
                heading = (!is_end).then(String::new);
            }
            b"td" | b"th" => each(HtmlPart::Text(" ")),
            name => {
                if name == b"pre" {
                    in_pre = !is_end;
                }
                let is_block = BLOCKS.split(' ').any(|block| block.as_bytes() == name);
                match &mut heading {
                    Some(line) if is_block => line.push(' '),
                    None if is_block => each(HtmlPart::Text("\n")),
                    _ if SKIPPED.contains(&name) && !is_end => skipped = Some(name.to_vec()),
                    _ => {}
                }
            }
        }
    }
    if let Some(text) = heading {
        each(HtmlPart::Heading(&one_line(&text)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_in_parts() {
        let mut parts = String::new();
        read_html(
            "<!DOCTYPE html><html><head><title>The &quot;port&quot; </title><style>p { color: red }</style>
             <script>if (a < b) { alert('<p>x</p>') }</script></head>
             <body><nav><ul><li><a href='/'>Home</a></ul></nav>Before.<h1 class='a > b'>First <b>one</b></h1><p>Some
             text<br>and&nbsp;more &amp; more.</p><!-- <p>unseen</p> -->
             <h2>Second</h2><ul><li>a<li>b</ul><pre>x\n  y</pre><TABLE><tr><td>1<td>2</table><h3>Last",
            |part| match part {
                HtmlPart::Title(text) => parts += &format!("title: {text}\n"),
                HtmlPart::Heading(text) => parts += &format!("\nheading: {text}\n"),
                HtmlPart::Text(text) => parts += text,
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
            assert_eq!(plain_text(html), text, "{html}");
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
            let text = plain_text(&piece.repeat(100_000));
            assert!(text.len() <= 100_000 * (piece.len() + 1), "{piece}");
        }
    }

    #[test]
    fn invisible_characters_are_removed() {
        assert_eq!(clean("a\tb\u{0}c\r\nd\re\u{1b}[1m"), "a b c\nd\ne [1m");
        let invisible = "\u{ad}\u{34f}\u{61c}\u{115f}\u{1160}\u{17b4}\u{180e}\u{200b}\u{200d}\u{202e}\u{2060}\u{2066}\u{2800}\u{3164}\
             \u{fe0f}\u{feff}\u{ffa0}\u{fff9}\u{1bca0}\u{1d173}\u{e0001}\u{e0041}\u{e0100}\u{e01ef}";
        for c in invisible.chars() {
            assert_eq!(clean(&format!("in{c}visible")), "invisible", "{c:?}");
        }
        assert_eq!(clean("한글 ไทย é 漢字 ☎"), "한글 ไทย é 漢字 ☎");
        assert_eq!(one_line(" a \n\n b\u{a0}c\t"), "a b c");
    }

    #[test]
    fn a_text_is_cut_at_the_end_of_a_word() {
        for (text, most, cut_text) in [
            ("one two", 7, "one two"),
            ("one two", 6, "one"),
            ("one two", 3, "one"),
            ("one two", 4, "one"),
            ("onetwo", 3, "one"),
            (" onetwo", 3, " on"),
            ("ééé ééé", 5, "ééé"),
            ("ééé", 0, ""),
            ("", 0, ""),
        ] {
            assert_eq!(cut(text, most), cut_text, "{text} {most}");
        }
    }
}
