//! Asks a runtime for its models and context size, or whether it is ready, without spending an
//! inference.

use std::time::{Duration, Instant};

use serde_json::Value;
use ureq::http::Response;

use crate::client::{Call, Cancellation, HttpClient};
use crate::config::RuntimeConfig;

/// The largest answer that is read: a list of models, or a description of one.
const MAX_ANSWER: u64 = 1024 * 1024;

/// The time in which a failed runtime has to answer that it is ready.
const READY_TIME: Duration = Duration::from_secs(2);

/// The models of a runtime and its context size.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RuntimeInfo {
    /// The names it knows its models by.
    pub models: Vec<String>,
    /// The tokens that a prompt and its answer may have together.
    pub context: Option<u64>,
}

/// Asks the server at a base address for its models. Returns `None` if it is not a runtime.
pub fn probe(url: &str, config: &RuntimeConfig, time: Duration) -> Option<RuntimeInfo> {
    let client = HttpClient::new(1, config.ca.clone());
    let authorization = authorization(config);
    let read = |address: String| -> Option<Value> {
        let answer = get(
            &client,
            authorization.as_deref(),
            &address,
            Instant::now() + time,
        )?;
        (answer.status() == 200).then(|| serde_json::from_slice(answer.body()).ok())?
    };
    let mut about = read_models(&read(format!("{url}/models"))?)?;
    if about.context.is_none() {
        // llama.cpp reports the context size that it was started with, not the model's, at an
        // address outside the API.
        about.context = read(format!("{}/props", root(url)))
            .and_then(|props| props["default_generation_settings"]["n_ctx"].as_u64());
    }
    Some(about)
}

/// Asks a runtime that has failed whether it can run completions again. llama.cpp lists its models
/// while it still loads them; its `/health`, outside the API, is 503 then. A runtime that has
/// neither address is ready if it says so.
pub(super) fn is_ready(client: &HttpClient, authorization: Option<&str>, url: &str) -> bool {
    let deadline = Instant::now() + READY_TIME;
    let status = |address: String| {
        Some(
            get(client, authorization, &address, deadline)?
                .status()
                .as_u16(),
        )
    };
    matches!(status(format!("{url}/models")), Some(200 | 404))
        && status(format!("{}/health", root(url))).is_some_and(|health| health != 503)
}

/// The `Authorization` header of every call to a runtime.
pub(super) fn authorization(config: &RuntimeConfig) -> Option<String> {
    let key = config.api_key.as_ref()?;
    Some(format!("Bearer {}", key.expose()))
}

fn get(
    client: &HttpClient,
    authorization: Option<&str>,
    address: &str,
    deadline: Instant,
) -> Option<Response<Vec<u8>>> {
    let call = Call {
        uri: &address.parse().ok()?,
        authorization,
        body: None,
        deadline,
        limit: MAX_ANSWER,
        cancellation: &Cancellation::default(),
    };
    client.call(&call).ok()
}

/// The address of the server outside the API.
fn root(url: &str) -> &str {
    url.strip_suffix("/v1").unwrap_or(url)
}

/// The list that every OpenAI-compatible runtime has; vLLM includes the context size.
fn read_models(list: &Value) -> Option<RuntimeInfo> {
    let models = list["data"].as_array()?;
    Some(RuntimeInfo {
        models: models
            .iter()
            .filter_map(|model| Some(model["id"].as_str()?.to_owned()))
            .collect(),
        context: models
            .iter()
            .find_map(|model| model["max_model_len"].as_u64()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lists_of_models() {
        for (list, about) in [
            (
                json!({"data": [{"id": "a", "max_model_len": 7}, {"id": "b"}]}),
                Some((vec!["a", "b"], Some(7))),
            ),
            (json!({"object": "list", "data": []}), Some((vec![], None))),
            (json!({"error": {"code": "not_found"}}), None),
            (json!([]), None),
        ] {
            let found = read_models(&list);
            let about = about.map(|(models, context)| RuntimeInfo {
                models: models.into_iter().map(String::from).collect(),
                context,
            });
            assert_eq!(found, about, "{list}");
        }
    }
}
