//! Queries to a SearXNG instance.
//!
//! The status of a response does not always reveal a failure: an instance may send a page if JSON
//! is not enabled, and an empty list if its engines failed.

use std::time::{Duration, Instant};

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::{MAX_QUERY, Passage, SearchError, cleaning};
use crate::client::{Call, CallError, Cancellation, HttpClient};
use crate::config::SearchConfig;
use crate::error::FailureCause;
use crate::text::percent_encoded;

/// The least and the greatest size limit of an answer. Every worker may hold one, so the limit is a
/// worker's share of `buffer_limit`. The least is several times the answer of an instance with many
/// engines.
const ANSWER_LIMITS: (usize, usize) = (256 * 1024, 1024 * 1024);

/// The characters of a result that are read, with markup: more than a prompt has room for.
const MAX_RESULT: usize = 16 * 1024;

/// The beginnings of the reasons that SearXNG and searx give for an engine that did not respond, in
/// English, and the words that are printed for them. Any other reason is printed as `OTHER_REASON`:
/// an instance may repeat the query in it.
const REASONS: [(&str, &str); 15] = [
    ("timeout", "timeout"),
    ("HTTP timeout", "timeout"),
    ("CAPTCHA", "CAPTCHA"),
    ("access denied", "access denied"),
    ("blocked", "access denied"),
    ("too many requests", "too many requests"),
    ("HTTP connection error", "network error"),
    ("HTTP protocol error", "network error"),
    ("network error", "network error"),
    ("proxy error", "network error"),
    ("SSL error", "SSL error"),
    ("HTTP error", "engine error"),
    ("server API error", "engine error"),
    ("parsing error", "unreadable answer"),
    ("unexpected crash", "crash"),
];
const OTHER_REASON: &str = "other";

pub struct SearXng {
    client: HttpClient,
    url: String,
    timeout: Duration,
    results: usize,
    answer_limit: u64,
}

impl SearXng {
    pub fn new(url: &str, config: &SearchConfig, worker_share: usize) -> Self {
        Self {
            client: HttpClient::new(url, None),
            url: url.to_owned(),
            timeout: config.timeout,
            results: config.results,
            answer_limit: worker_share.clamp(ANSWER_LIMITS.0, ANSWER_LIMITS.1) as u64,
        }
    }

    pub fn find(
        &self,
        words: &str,
        cancellation: &Cancellation,
    ) -> Result<Vec<Passage>, SearchError> {
        let query = query(words);
        if query.is_empty() {
            return Ok(Vec::new());
        }
        self.ask(&query, cancellation)
            .map_err(|error| SearchError::new(error.cause, format!("{}: {error}", self.url)))
    }

    fn ask(&self, query: &str, cancellation: &Cancellation) -> Result<Vec<Passage>, SearchError> {
        let address = format!(
            "{}/search?q={}&format=json",
            self.url,
            percent_encoded(query)
        );
        let too_long = |_| SearchError::new(FailureCause::Unreachable, "its address is too long");
        let uri = address.parse().map_err(too_long)?;
        let call = Call {
            uri: &uri,
            authorization: None,
            body: None,
            deadline: Instant::now() + self.timeout,
            limit: self.answer_limit,
            cancellation,
        };
        let answer = self.client.call(&call).map_err(|error| {
            let hint = if matches!(error, CallError::Unreachable(_)) {
                ". Is it running?"
            } else {
                ""
            };
            SearchError::new(error.cause(), format!("{error}{hint}"))
        })?;
        let status = answer.status().as_u16();
        let hint = match status {
            200 => return read_answer(answer.body(), self.results),
            403 => ". Enable JSON in its settings: search.formats: [html, json]",
            429 => {
                ": its limiter blocks this service as a robot. Allow its address, or set server.limiter: false"
            }
            _ => "",
        };
        let details = format!("it answered with HTTP status {status}{hint}");
        Err(SearchError::new(FailureCause::Status(status), details))
    }
}

/// Makes a query without commands of the words: `!!` or `:de` at the beginning of a word loses its
/// mark.
fn query(words: &str) -> String {
    let mut plain = String::new();
    for word in cleaning::clean(words).split_whitespace() {
        let word = word.trim_start_matches(['!', '?', ':', '<']);
        if !word.is_empty() {
            plain.extend([if plain.is_empty() { "" } else { " " }, word]);
        }
        // A prompt may have a hundred thousand words. These are as many characters as the query
        // has, at least.
        if plain.len() > 4 * MAX_QUERY {
            break;
        }
    }
    cleaning::cut(&plain, MAX_QUERY).to_owned()
}

/// The members of an answer that are used. Each result and each engine is read by itself: one that
/// can't be read does not affect the others.
#[derive(Deserialize)]
struct SearxngAnswer<'a> {
    #[serde(borrow)]
    results: Vec<&'a RawValue>,
    #[serde(borrow, default)]
    unresponsive_engines: Vec<&'a RawValue>,
}

/// The members of a result that are used.
#[derive(Deserialize)]
struct SearxngResult<'a> {
    #[serde(borrow, default)]
    title: Option<&'a RawValue>,
    #[serde(borrow, default)]
    url: Option<&'a RawValue>,
    #[serde(default)]
    content: Option<String>,
}

fn read_answer(bytes: &[u8], most: usize) -> Result<Vec<Passage>, SearchError> {
    let text = String::from_utf8_lossy(bytes);
    let answer: SearxngAnswer = serde_json::from_str(&text).map_err(|_| {
        SearchError::new(
            FailureCause::NotJson,
            "its answer is not JSON of the expected form. Is this the address of a SearXNG instance, and is JSON in its \
             search.formats?",
        )
    })?;
    let (mut passages, mut has_unreadable) = (Vec::new(), false);
    for result in &answer.results {
        match read_result(result) {
            _ if passages.len() == most => break,
            Some(result) => passages.extend(passage(&result)),
            None => has_unreadable = true,
        }
    }
    // The number of engines that did not respond, by the word for their reason. Their names come
    // from outside, and are not kept.
    let mut engines: Vec<(&str, usize)> = Vec::new();
    for engine in &answer.unresponsive_engines {
        let reason = reason(engine);
        match engines.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, count)) => *count += 1,
            None => engines.push((reason, 1)),
        }
    }
    if answer.results.is_empty() && !engines.is_empty() {
        let engines: Vec<String> = engines
            .iter()
            .map(|(reason, count)| format!("{count} {reason}"))
            .collect();
        return Err(SearchError::new(
            FailureCause::Engines,
            format!(
                "it found nothing, and engines did not respond: {}",
                engines.join(", ")
            ),
        ));
    }
    if passages.is_empty() && has_unreadable {
        return Err(SearchError::new(
            FailureCause::NotJson,
            "none of its results can be read",
        ));
    }
    Ok(passages)
}

/// Returns `None` unless it is an object whose content, if any, is a text.
fn read_result(raw: &RawValue) -> Option<SearxngResult<'_>> {
    // A list could be read into the structure too.
    raw.get()
        .starts_with('{')
        .then(|| serde_json::from_str(raw.get()).ok())?
}

/// Returns `None` if the result has no text.
fn passage(result: &SearxngResult) -> Option<Passage> {
    let plain = |text: &str| cleaning::plain_text(cleaning::cut(text, MAX_RESULT));
    let member = |raw: Option<&RawValue>| {
        let text: Option<String> = raw.and_then(|raw| serde_json::from_str(raw.get()).ok());
        plain(&text.unwrap_or_default())
    };
    let text = plain(result.content.as_deref()?);
    (!text.trim().is_empty()).then(|| Passage {
        title: member(result.title),
        source: member(result.url),
        text,
    })
}

/// The word for the reason of an engine: `["name", "timeout"]`, or `["name", "Suspended:
/// timeout"]`.
fn reason(engine: &RawValue) -> &'static str {
    let Ok((_, reason)) = serde_json::from_str::<(IgnoredAny, &RawValue)>(engine.get()) else {
        return OTHER_REASON;
    };
    let reason = reason.get().trim_start_matches('"');
    let reason = reason.strip_prefix("Suspended: ").unwrap_or(reason);
    REASONS
        .iter()
        .find(|(begin, _)| reason.starts_with(begin))
        .map_or(OTHER_REASON, |(_, word)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_nothing_but_words() {
        for (words, plain) in [
            ("How high is the lighthouse?", "How high is the lighthouse?"),
            ("!!g secret", "g secret"),
            ("!images :de <3 a", "images de 3 a"),
            ("a !wp b", "a wp b"),
            (" !:!<? x\n\ty\u{0}z ", "x y z"),
            ("!!! ???", ""),
            ("", ""),
            ("a != b: c<d", "a = b: c<d"),
        ] {
            assert_eq!(query(words), plain, "{words}");
        }
        assert_eq!(query(&"é".repeat(10_000)).chars().count(), MAX_QUERY);
        assert_eq!(
            query(&"word ".repeat(10_000)).len(),
            MAX_QUERY - 2,
            "up to the end of a word"
        );
    }

    #[test]
    fn answers_of_an_instance() {
        let passage = |title: &str, source: &str, text: &str| Passage {
            title: title.into(),
            source: source.into(),
            text: text.into(),
        };
        for (answer, found) in [
            (r#"{"results": []}"#, vec![]),
            (r#"{"results": [], "unresponsive_engines": []}"#, vec![]),
            (
                r#"{"results": [{"title": "<b>A</b>", "url": "http://a/", "content": "x &amp; <i>y</i>"}],
                    "unresponsive_engines": [["b", "timeout"]]}"#,
                vec![passage("A", "http://a/", "x & y")],
            ),
            (
                r#"{"results": [{"title": "no text"}, 7, {"content": ""}, {"content": null},
                    {"content": "one"}, {"content": "two"}, {"content": "three"}]}"#,
                vec![passage("", "", "one"), passage("", "", "two")],
            ),
        ] {
            assert_eq!(read_answer(answer.as_bytes(), 2), Ok(found), "{answer}");
        }
        // None of these can be read by itself, and each is skipped.
        for result in [
            r#"{"content": "\ud800"}"#,
            "7",
            "null",
            r#"{"content": ["x"]}"#,
            "[]",
            r#"["title", "url", "content"]"#,
        ] {
            let answer = |rest: &str| format!(r#"{{"results": [{result}{rest}]}}"#);
            let found = read_answer(answer(r#", {"content": "good"}"#).as_bytes(), 2);
            assert_eq!(found, Ok(vec![passage("", "", "good")]), "{result}");
            for rest in ["", r#", {"content": ""}"#] {
                assert!(
                    read_answer(answer(rest).as_bytes(), 2).is_err(),
                    "{result} is no answer"
                );
            }
        }
        assert_eq!(
            read_answer(br#"{"results": [{"content": ""}, {"title": "x"}]}"#, 2),
            Ok(vec![])
        );
        let broken = b"{\"results\": [{\"content\": \"br\xf6ken\"}, {\"content\": \"good\"}]}";
        let texts = vec![passage("", "", "br\u{fffd}ken"), passage("", "", "good")];
        assert_eq!(read_answer(broken, 2), Ok(texts));
        for answer in [
            "",
            "<!DOCTYPE html>",
            "{}",
            "[]",
            r#"{"results": null}"#,
            r#"{"results": {}}"#,
            r#"{"results": [], "unresponsive_engines": [["a", "timeout"]]}"#,
        ] {
            assert!(read_answer(answer.as_bytes(), 2).is_err(), "{answer}");
        }
    }

    #[test]
    fn only_what_is_used_of_an_answer_has_to_be_readable() {
        let answer = r#"{"results": [{"content": "a", "title": 7, "url": [[]], "score": 1e999},
                         {"content": "b"}, {"content": 7}, 7, []], "answers": [1e999]}"#;
        let found = read_answer(answer.as_bytes(), 2).expect("two results");
        let texts: Vec<_> = found
            .iter()
            .map(|passage| (&*passage.title, &*passage.text))
            .collect();
        assert_eq!(texts, [("", "a"), ("", "b")]);
        let cut = answer.replace("7, []]", "7, [}");
        assert!(
            read_answer(cut.as_bytes(), 2).is_err(),
            "the rest is JSON, even if it is not used"
        );
    }

    #[test]
    fn engines_are_counted_by_reasons_of_our_own() {
        let details = |engines: &str| {
            let answer = format!(r#"{{"results": [], "unresponsive_engines": {engines}}}"#);
            read_answer(answer.as_bytes(), 2)
                .expect_err("no engine responded")
                .to_string()
        };
        for (engines, counts) in [
            (
                r#"[["a", "timeout"], ["b", "access denied"], ["c", "HTTP timeout"]]"#,
                "2 timeout, 1 access denied",
            ),
            (
                r#"[["a", "Suspended: CAPTCHA"], ["b", "CAPTCHA required"]]"#,
                "2 CAPTCHA",
            ),
            (
                r#"[["a", "Suspended: too many requests"], ["b", "parsing error"]]"#,
                "1 too many requests, 1 unreadable answer",
            ),
            (
                r#"[["a", "SSL error: certificate validation has failed"], ["b", "unexpected crash"]]"#,
                "1 SSL error, 1 crash",
            ),
            (
                r#"[["xyzzy", "xyzzy"], ["b", "Suspended: xyzzy"], ["ddg"], 7, {"a": "timeout"}, ["a", 7, "x"]]"#,
                "6 other",
            ),
        ] {
            let expected = format!("it found nothing, and engines did not respond: {counts}");
            assert_eq!(details(engines), expected, "{engines}");
        }
        assert!(details("null").contains("not JSON of the expected form"));
    }
}
