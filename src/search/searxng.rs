//! Queries to a SearXNG instance.
//!
//! The status of a response does not always reveal a failure: an instance may send a page if JSON is not enabled, and an
//! empty list if its engines failed.

use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::{MAX_QUERY, Passage, Search, SearchError, cleaning, html};
use crate::client::{Call, CallError, Cancellation, HttpClient};
use crate::config::SearchConfig;
use crate::error::FailureCause;
use crate::text::percent_encoded;

/// The least and the greatest size limit of an answer. Every worker may hold one, so the limit is a worker's share of
/// `buffer_limit`. The least is several times the answer of an instance with many engines.
const ANSWER_LIMITS: (usize, usize) = (256 * 1024, 1024 * 1024);

/// The characters of a result that are read, with markup: more than a prompt has room for.
const MAX_RESULT: usize = 16 * 1024;

/// The part of an instance's report on its engines that is logged.
const MAX_ENGINES: usize = 8;
const MAX_REASON: usize = 60;

pub struct SearXng {
    client: HttpClient,
    url: String,
    timeout: Duration,
    results: usize,
    answer_limit: u64,
}

impl SearXng {
    pub fn new(url: &str, config: &SearchConfig, workers: usize, worker_share: usize) -> Self {
        Self {
            client: HttpClient::new(workers, None),
            url: url.to_owned(),
            timeout: config.timeout,
            results: config.results,
            answer_limit: worker_share.clamp(ANSWER_LIMITS.0, ANSWER_LIMITS.1) as u64,
        }
    }

    fn ask(&self, query: &str, cancellation: &Cancellation) -> Result<Vec<Passage>, SearchError> {
        let address = format!("{}/search?q={}&format=json", self.url, percent_encoded(query));
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
            let hint = if matches!(error, CallError::Unreachable(_)) { ". Is it running?" } else { "" };
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

impl Search for SearXng {
    fn find(&self, words: &str, cancellation: &Cancellation) -> Result<Vec<Passage>, SearchError> {
        let query = query(words);
        if query.is_empty() {
            return Ok(Vec::new());
        }
        self.ask(&query, cancellation)
            .map_err(|error| SearchError::new(error.cause, format!("{}: {error}", self.url)))
    }
}

/// Makes a query without commands of the words: `!!` or `:de` at the beginning of a word loses its mark.
fn query(words: &str) -> String {
    let plain: Vec<String> = cleaning::one_line(words)
        .split(' ')
        .map(|word| word.trim_start_matches(['!', '?', ':', '<']).to_owned())
        .filter(|word| !word.is_empty())
        .collect();
    cleaning::cut(&plain.join(" "), MAX_QUERY).to_owned()
}

/// The members of an answer that are used. The results are parsed one by one: as values they take several times the memory.
#[derive(Deserialize)]
struct SearxngAnswer<'a> {
    #[serde(borrow)]
    results: Vec<&'a RawValue>,
    #[serde(default)]
    unresponsive_engines: Vec<Value>,
}

fn read_answer(bytes: &[u8], most: usize) -> Result<Vec<Passage>, SearchError> {
    // A result with broken text does not affect the others.
    let text = String::from_utf8_lossy(bytes);
    let answer: SearxngAnswer = serde_json::from_str(&text).map_err(|_| {
        SearchError::new(
            FailureCause::NotJson,
            "its answer is not JSON of the expected form. Is this the address of a SearXNG instance, and is JSON in its \
             search.formats?",
        )
    })?;
    if answer.results.is_empty() && !answer.unresponsive_engines.is_empty() {
        let engines: Vec<String> = answer.unresponsive_engines.iter().take(MAX_ENGINES).map(engine).collect();
        let engines = engines.join(", ");
        return Err(SearchError::new(
            FailureCause::Engines,
            format!("it found nothing, and engines did not respond: {engines}"),
        ));
    }
    let mut passages = Vec::new();
    let mut has_unreadable = false;
    for result in answer.results {
        if passages.len() == most {
            break;
        }
        match serde_json::from_str::<Value>(result.get()) {
            Ok(result) if has_form(&result) => passages.extend(read_result(&result)),
            _ => has_unreadable = true,
        }
    }
    if passages.is_empty() && has_unreadable {
        return Err(SearchError::new(FailureCause::NotJson, "none of its results can be read"));
    }
    Ok(passages)
}

/// Returns true for an object whose content, if any, is a text.
fn has_form(result: &Value) -> bool {
    result.is_object() && matches!(result["content"], Value::Null | Value::String(_))
}

/// Formats an engine that did not respond, and the reason that the instance gives: `["name", "timeout"]`.
fn engine(reported: &Value) -> String {
    let part = |index: usize| {
        cleaning::cut(&cleaning::one_line(reported[index].as_str().unwrap_or("?")), MAX_REASON).to_owned()
    };
    format!("{} ({})", part(0), part(1))
}

/// Returns `None` if the result has no text.
fn read_result(result: &Value) -> Option<Passage> {
    let plain =
        |member: &str| html::plain(cleaning::cut(result[member].as_str().unwrap_or_default(), MAX_RESULT));
    let text = plain("content");
    (!text.trim().is_empty()).then(|| Passage { title: plain("title"), source: plain("url"), text })
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
        assert_eq!(query(&"word ".repeat(10_000)).len(), MAX_QUERY - 2, "up to the end of a word");
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
        for result in
            [r#"{"content": "\ud800"}"#, r#"{"score": 1e999}"#, "7", "null", r#"{"content": ["x"]}"#]
        {
            let answer = |rest: &str| format!(r#"{{"results": [{result}{rest}]}}"#);
            let found = read_answer(answer(r#", {"content": "good"}"#).as_bytes(), 2);
            assert_eq!(found, Ok(vec![passage("", "", "good")]), "{result}");
            for rest in ["", r#", {"content": ""}"#] {
                assert!(read_answer(answer(rest).as_bytes(), 2).is_err(), "{result} is no answer");
            }
        }
        assert_eq!(read_answer(br#"{"results": [{"content": ""}, {"title": "x"}]}"#, 2), Ok(vec![]));
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
        let answer =
            r#"{"results": [], "unresponsive_engines": [["bing", "Suspended:\n CAPTCHA"], ["ddg"], 7]}"#;
        let error = read_answer(answer.as_bytes(), 2).expect_err("no engine responded").to_string();
        assert!(error.ends_with("did not respond: bing (Suspended: CAPTCHA), ddg (?), ? (?)"), "{error}");
    }
}
