//! HTML to text. It is no parser of HTML, but it takes any text in one pass, panics at none, and gives no tag,
//! no script and no style.

use super::passages::{Outline, Section};
use super::text::one_line;

/// Elements whose content is not for reading.
const UNREAD: [&str; 7] = ["script", "style", "template", "svg", "iframe", "object", "canvas"];

/// Elements that begin and end a line.
const BLOCKS: &str = "address article aside blockquote body br dd details div dl dt fieldset figcaption figure footer \
    form header hr html li main nav ol option p pre section summary table tbody thead tr ul";

/// The references to characters that are met outside of the specification, each before its character.
const NAMED: &str = "amp & lt < gt > quot \" apos ' nbsp \u{a0} ensp \u{2002} emsp \u{2003} thinsp \u{2009} \
    shy \u{ad} ndash – mdash — hellip … bull • middot · lsquo ‘ rsquo ’ sbquo ‚ ldquo “ rdquo ” bdquo „ laquo « \
    raquo » copy © reg ® trade ™ deg ° plusmn ± times × divide ÷ frac12 ½ sup2 ² sup3 ³ micro µ para ¶ sect § \
    euro € pound £ cent ¢ yen ¥ auml ä ouml ö uuml ü Auml Ä Ouml Ö Uuml Ü szlig ß agrave à aacute á acirc â \
    aring å aelig æ ccedil ç egrave è eacute é ecirc ê iacute í ntilde ñ oacute ó ocirc ô oslash ø uacute ú \
    scaron š Scaron Š rarr → larr ←";

/// The text of a piece of HTML, without its titles' ranks.
pub fn plain(html: &str) -> String {
    let outline = read(html);
    let sections = outline.sections.into_iter().flat_map(|section| [section.heading, section.text]);
    let parts: Vec<String> = sections.filter(|part| !part.is_empty()).collect();
    parts.join("\n")
}

/// A page's title, headings, and the text under each.
pub fn read(html: &str) -> Outline {
    let mut page = Page::default();
    let mut scanner = Scanner { quotes_hold: true, tags_end: true };
    let mut rest = html;
    while let Some(start) = rest.find('<') {
        page.add(&rest[..start]);
        rest = &rest[start..];
        rest = match scanner.markup(rest) {
            Markup::None => {
                page.add("<");
                &rest[1..]
            }
            Markup::Other(length) => &rest[length..],
            Markup::Tag { name, is_end, length } => page.take_tag(&name, is_end, &rest[length..]),
        };
    }
    page.add(rest);
    page.finish()
}

enum Markup {
    /// It is only a character.
    None,
    /// A comment or a declaration, so many bytes long.
    Other(usize),
    Tag {
        name: String,
        is_end: bool,
        length: usize,
    },
}

/// What was found out about the rest of the text, so that nothing is looked for twice in vain.
struct Scanner {
    /// There was no quotation mark without its partner so far.
    quotes_hold: bool,
    /// There may be another `>`.
    tags_end: bool,
}

impl Scanner {
    /// What begins with the `<` at the beginning of the text.
    fn markup(&mut self, text: &str) -> Markup {
        if let Some(comment) = text.strip_prefix("<!--") {
            return Markup::Other(comment.find("-->").map_or(text.len(), |end| 4 + end + 3));
        }
        let is_end = text.starts_with("</");
        let name_at = 1 + usize::from(is_end);
        let first = text.as_bytes().get(name_at).copied().unwrap_or_default();
        let is_tag = first.is_ascii_alphabetic();
        // An end tag without a name is a comment, as browsers have it.
        let is_other = matches!(first, b'!' | b'?') || (is_end && first != b' ');
        if !is_tag && !is_other {
            return Markup::None;
        }
        let Some(length) = self.length(text) else {
            return Markup::None;
        };
        if !is_tag {
            return Markup::Other(length);
        }
        let name = text[name_at..].split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
        Markup::Tag { name: name.to_ascii_lowercase(), is_end, length }
    }

    /// How many bytes a tag has: up to the first `>` outside of quotation marks.
    fn length(&mut self, text: &str) -> Option<usize> {
        if self.quotes_hold {
            let mut quote = None;
            for (index, &byte) in text.as_bytes().iter().enumerate() {
                match (quote, byte) {
                    (None, b'>') => return Some(index + 1),
                    (None, b'"' | b'\'') => quote = Some(byte),
                    (Some(open), close) if open == close => quote = None,
                    _ => {}
                }
            }
            self.quotes_hold = false;
        }
        let end = self.tags_end.then(|| text.find('>')).flatten();
        self.tags_end = end.is_some();
        end.map(|end| end + 1)
    }
}

/// A page as far as it was read.
#[derive(Default)]
struct Page {
    title: String,
    sections: Vec<Section>,
    heading: String,
    in_heading: bool,
    text: String,
    in_pre: bool,
}

impl Page {
    /// Adds text as it stands between tags.
    fn add(&mut self, raw: &str) {
        let decoded = decode(raw);
        if self.in_heading {
            self.heading.push_str(&decoded);
        } else if self.in_pre {
            self.text.push_str(&decoded);
        } else {
            // Line ends mean no more than spaces here; many of them become one at the end.
            self.text.extend(decoded.chars().map(|c| if c.is_whitespace() { ' ' } else { c }));
        }
    }

    /// Takes a tag, and gives what is to be read after it.
    fn take_tag<'a>(&mut self, name: &str, is_end: bool, after: &'a str) -> &'a str {
        match name {
            "title" if !is_end => {
                let end = end_of(name, after);
                if self.title.is_empty() {
                    self.title = one_line(&decode(&after[..end]));
                }
                return &after[end..];
            }
            _ if UNREAD.contains(&name) && !is_end => return &after[end_of(name, after)..],
            "h1" | "h2" | "h3" | "h4" | "h5" | "h6" => {
                // A heading inside of another, whose end is missing, is still the next heading.
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
        after
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
        let lines: Vec<String> = raw.lines().map(one_line).filter(|line| !line.is_empty()).collect();
        if !heading.is_empty() || !lines.is_empty() {
            self.sections.push(Section { heading, text: lines.join("\n") });
        }
    }

    fn finish(mut self) -> Outline {
        self.end_section();
        Outline { title: self.title, sections: self.sections }
    }
}

/// Where the end tag of an element begins, or the text ends.
fn end_of(name: &str, text: &str) -> usize {
    let is_end = |&(at, _): &(usize, &str)| {
        let found = text.as_bytes().get(at + 2..at + 2 + name.len());
        found.is_some_and(|found| found.eq_ignore_ascii_case(name.as_bytes()))
    };
    text.match_indices("</").find(is_end).map_or(text.len(), |(at, _)| at)
}

/// Puts characters in the place of their references; what is none stays as it is.
fn decode(text: &str) -> String {
    let mut decoded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find('&') {
        decoded.push_str(&rest[..start]);
        rest = &rest[start..];
        let name =
            rest[1..].split(|c: char| !c.is_ascii_alphanumeric() && c != '#').next().unwrap_or_default();
        match character(name) {
            Some(character) if rest[1 + name.len()..].starts_with(';') => {
                decoded.push_str(&character);
                rest = &rest[name.len() + 2..];
            }
            _ => {
                decoded.push('&');
                rest = &rest[1..];
            }
        }
    }
    decoded.push_str(rest);
    decoded
}

fn character(name: &str) -> Option<String> {
    let Some(number) = name.strip_prefix('#') else {
        let mut words = NAMED.split(' ');
        while let Some((known, character)) = words.next().zip(words.next()) {
            if known == name {
                return Some(character.to_owned());
            }
        }
        return None;
    };
    let code = match number.strip_prefix(['x', 'X']) {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => number.parse(),
    };
    char::from_u32(code.ok()?).map(String::from)
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
        let sections: Vec<(&str, &str)> =
            page.sections.iter().map(|section| (&*section.heading, &*section.text)).collect();
        assert_eq!(
            sections,
            [("", "Before."), ("First one", "Some text\nand more & more."), ("Second", "a\nb\nx\ny\n1 2")]
        );
    }

    #[test]
    fn what_is_no_markup_stays() {
        for (html, text) in [
            ("a < b and c > d", "a < b and c > d"),
            ("1<2", "1<2"),
            ("<3", "<3"),
            ("a <b", "a <b"),
            ("AT&T &nosuch; &#xZZ; &#55296; & &amp", "AT&T &nosuch; &#xZZ; &#55296; & &amp"),
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
        for piece in ["<a", "<a '", "<!--", "<script>", "&", "</", "<h1>", "<a \"'>", "\u{0}<\u{fffd}>"] {
            let text = plain(&piece.repeat(100_000));
            assert!(text.len() <= 100_000 * (piece.len() + 1), "{piece}");
        }
    }
}
