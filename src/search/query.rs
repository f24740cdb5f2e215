//! The words of a query for the embedded index, without stop words.

use std::cmp::Reverse;

use super::cleaning;

/// The most characters of a query.
pub const MAX_QUERY: usize = 256;

/// A line for each language: English, German, French, Spanish, Italian, Croatian. build.rs writes
/// them.
const STOP_WORDS: &str = include_str!(concat!(env!("OUT_DIR"), "/stop_words.txt"));

/// The most words of a short query. A passage needs half of the words of a short query and a third
/// of those of a long one: a story before the question has many words that no document has.
const SHORT: usize = 6;

/// The line of German in `STOP_WORDS`: it capitalizes every noun like a name.
const GERMAN: usize = 1;

#[derive(Debug)]
pub struct Word {
    /// Letters and digits only, in the case of the query.
    pub text: String,
    /// True for a capitalized word inside of the query.
    pub is_name: bool,
}

/// Returns the distinct words of a query, without the stop words of its language. A word that is
/// the whole query is kept: "it", "sea" and "war" are stop words in some language and mean
/// something in another.
pub fn words(query: &str) -> Vec<Word> {
    let line = cleaning::one_line(query);
    let all = cleaning::cut(&line, MAX_QUERY)
        .split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty());
    let lower_case: Vec<String> = all.clone().map(str::to_lowercase).collect();
    let (language, stop_words) = stop_words(&lower_case);
    let mut words = Vec::new();
    for (index, (word, lower)) in all.zip(&lower_case).enumerate() {
        let is_stop_word = lower_case.len() > 1 && has(stop_words, lower);
        if !is_stop_word && !lower_case[..index].contains(lower) {
            let is_name = index > 0 && language != GERMAN && is_capitalized(word);
            words.push(Word {
                text: word.to_owned(),
                is_name,
            });
        }
    }
    words
}

fn is_capitalized(word: &str) -> bool {
    let mut letters = word.chars();
    letters.next().is_some_and(char::is_uppercase) && letters.next().is_some_and(char::is_lowercase)
}

/// Returns the list that has most of the words, and its number: that of the query's language. With
/// all lists at once, an English query would lose "sea" (Spanish), "war" (German) and "son"
/// (French).
fn stop_words(words: &[String]) -> (usize, &'static str) {
    let count = |(_, list): &(usize, &str)| words.iter().filter(|word| has(list, word)).count();
    // Ties: the first language, which `min_by_key` returns.
    STOP_WORDS
        .lines()
        .enumerate()
        .min_by_key(|list| Reverse(count(list)))
        .unwrap_or_default()
}

fn has(list: &str, word: &str) -> bool {
    list.split(' ').any(|stop_word| stop_word == word)
}

/// Returns the number of words that a passage has to contain. Names that no passage contains count
/// twice: documents that do not mention Peru do not answer a question about it, even if they
/// mention a capital.
pub fn least_words(words: usize, unknown_names: usize) -> usize {
    let half = (words + unknown_names).div_ceil(2);
    half.min(SHORT / 2).max(words.div_ceil(3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_words_of_the_query_s_language_are_ignored() {
        for (query, left) in [
            ("What is the capital of Peru?", "capital *Peru"),
            ("What's the war's END, the end?", "war END"),
            ("How deep is the sea?", "deep sea"),
            ("Wie hoch sind die Türme von Velna?", "hoch Türme Velna"),
            ("War die Pumpe schon im Einsatz?", "Pumpe schon Einsatz"),
            ("Quelle est la durée de la visite ?", "Quelle durée visite"),
            ("¿Dónde está el faro de la isla?", "Dónde faro isla"),
            ("Dove si trova il faro dell'isola?", "trova faro isola"),
            (
                "Kako se zove trajekt koji ide na Orsk?",
                "zove trajekt ide *Orsk",
            ),
            ("Error E42 / 404: pump-house", "Error E42 404 pump house"),
            ("Какова высота маяка Вельна?", "Какова высота маяка *Вельна"),
            ("灯台の高さは?", "灯台の高さは"),
            ("What is it, and why?", ""),
            ("IT", "IT"),
            ("sea", "sea"),
            (" ?! ", ""),
        ] {
            let marked =
                |word: &Word| format!("{}{}", if word.is_name { "*" } else { "" }, word.text);
            assert_eq!(
                words(query)
                    .iter()
                    .map(marked)
                    .collect::<Vec<_>>()
                    .join(" "),
                left,
                "{query}"
            );
        }
        assert_eq!(words(&"word ".repeat(10_000)).len(), 1);
        assert_eq!(
            words(&"é".repeat(10_000))[0].text.chars().count(),
            MAX_QUERY
        );
    }

    #[test]
    fn a_passage_needs_half_of_a_short_query_and_a_third_of_a_long_one() {
        let least: Vec<usize> = (1..=12).map(|words| least_words(words, 0)).collect();
        assert_eq!(least, [1, 1, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4]);
        assert_eq!(
            (least_words(2, 1), least_words(3, 1), least_words(3, 2)),
            (2, 2, 3)
        );
        assert_eq!(least_words(12, 8), 4, "in a long query, they count once");
    }
}
