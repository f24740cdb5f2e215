//! Text of strangers, made fit to be sent on: as a query, or as a line of a prompt.

/// Replaces what is not to be seen: control characters by spaces, and characters without a form, in which
/// something could be said to a model that no person would read, by nothing. Line ends stay.
pub fn clean(text: &str) -> String {
    let mut cleaned = String::with_capacity(text.len());
    for (index, c) in text.char_indices() {
        match c {
            '\n' => cleaned.push('\n'),
            '\r' if text[index + 1..].starts_with('\n') => {}
            '\r' => cleaned.push('\n'),
            c if c.is_control() => cleaned.push(' '),
            c if is_formless(c) => {}
            c => cleaned.push(c),
        }
    }
    cleaned
}

/// Soft hyphens, zero widths, directions, byte order marks and tags.
fn is_formless(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Makes one line of a text, with single spaces.
pub fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for word in clean(text).split_whitespace() {
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    line
}

/// At most so many characters of a text, up to the end of a word where there is one.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_to_be_seen_goes() {
        assert_eq!(clean("a\tb\u{0}c\r\nd\re\u{1b}[1m"), "a b c\nd\ne [1m");
        assert_eq!(clean("in\u{ad}vi\u{200b}si\u{202e}ble\u{e0041}"), "invisible");
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
