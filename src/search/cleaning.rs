//! Cleans text from outside for a query or a prompt.

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

#[cfg(test)]
mod tests {
    use super::*;

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
