//! Asks each runtime for a completion.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use serde_json::Value;
use ureq::http::Uri;

use super::{LONGEST, named};
use crate::client::{Call, Cancellation, HttpClient, host_and_port, look_up};
use crate::config::{Config, RuntimeConfig};
use crate::health::{self, Finding};
use crate::listener::Address;
use crate::runtime::{RuntimeError, Runtimes, authorization};
use crate::text::{escaped, shortened};

/// The tokens of a request with the most characters, and of its completion.
const LARGEST_REQUEST: u64 = 13_005;

/// The timeout for a runtime's lists of its models and properties.
const PROBE_TIME: Duration = Duration::from_secs(2);

/// The largest answer to that which is read.
const MAX_ANSWER: u64 = 1024 * 1024;

/// The most characters of a model's name in a finding.
const MAX_NAME: usize = 128;

pub fn check(config: &Config, each: &mut dyn FnMut(Finding)) {
    if config.runtime.urls.is_empty() {
        each(health::no_runtime());
    }
    for url in &config.runtime.urls {
        each(try_runtime(url, config));
    }
}

/// Says what to do if a call to the runtime at this address would reach this service itself, listening
/// on that address: it would hold a worker and wait for another one.
pub fn own_address(url: &str, listening: &Address) -> Option<String> {
    let listening: Vec<SocketAddr> = match listening {
        Address::Tcp(address) => vec![*address],
        Address::Localhost(port) => vec![
            (Ipv4Addr::LOCALHOST, *port).into(),
            (Ipv6Addr::LOCALHOST, *port).into(),
        ],
        Address::Unix(_) => Vec::new(),
    };
    let uri: Uri = url.parse().ok()?;
    let leads_here = listening.iter().any(|address| leads_to(&uri, *address));
    leads_here.then(|| {
        format!(
            "{url} leads to this service itself. Set runtime.url (ADRIATICUM_RUNTIME_URL) to the address of the runtime"
        )
    })
}

/// Returns true if a connection to this address reaches a socket of this host that listens on that
/// one. The host is looked up only if the ports are equal.
fn leads_to(url: &Uri, listening: SocketAddr) -> bool {
    let has_its_port = |name: &String| name.ends_with(&format!(":{}", listening.port()));
    let addresses = host_and_port(url)
        .filter(has_its_port)
        .and_then(|name| look_up(&name).ok());
    addresses.into_iter().flatten().any(|address| {
        let ip = match address.ip().to_canonical() {
            // The system connects to the host itself.
            ip if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
            ip => ip,
        };
        // A socket on `[::]` takes both kinds of addresses.
        let takes_all = listening.ip().is_unspecified() && (listening.is_ipv6() || ip.is_ipv4());
        ip == listening.ip().to_canonical() || (takes_all && UdpSocket::bind((ip, 0)).is_ok())
    })
}

fn try_runtime(url: &str, config: &Config) -> Finding {
    if let Some(message) = own_address(url, &config.listen) {
        return Finding::fail("runtime", message);
    }
    let runtime_config = RuntimeConfig {
        urls: vec![url.to_owned()],
        ..config.runtime.clone()
    };
    let runtime = Runtimes::new(&runtime_config, config.worker_share()).expect("it has an address");
    let about = probe(url, &config.runtime).unwrap_or_default();
    let asked = Instant::now();
    match runtime.generate_token(0, "Say yes.", config.runtime.timeout.min(LONGEST)) {
        Ok(generated) => {
            let mut message = format!("{url}: answers in {} ms", asked.elapsed().as_millis());
            let mut notes = Vec::new();
            if let Some(context) = about.context {
                message += &format!(", has a context of {context} tokens");
                if context < LARGEST_REQUEST {
                    notes.push(format!(
                        "the largest requests may not fit: 32,000 characters took 12,493 tokens. Start it with a context of at \
                         least {LARGEST_REQUEST}"
                    ));
                }
            }
            match generated.tokens.total_tokens {
                Some(_) => message += ", reports usage",
                None => notes.push("it reports no usage: the token figures will be null".into()),
            }
            match notes.is_empty() {
                true => Finding::ok("runtime", message),
                false => Finding::warn("runtime", format!("{message}; {}", notes.join("; "))),
            }
        }
        // It answers soon.
        Err(error @ RuntimeError::Status(503)) => {
            Finding::warn("runtime", format!("{url}: {}", error.diagnosis()))
        }
        Err(error) => {
            let mut message = format!("{url}: {}", error.diagnosis());
            if matches!(error, RuntimeError::UnknownModel(_)) && !about.models.is_empty() {
                let name = |name: &String| shortened(&escaped(name), MAX_NAME);
                message += &format!(": {}", named(&about.models, name));
            }
            Finding::fail("runtime", message)
        }
    }
}

/// The models of a runtime and its context size.
#[derive(Debug, Default, PartialEq, Eq)]
struct RuntimeInfo {
    /// The names it knows its models by.
    models: Vec<String>,
    /// The tokens that a prompt and its answer may have together.
    context: Option<u64>,
}

/// Asks the server at a base address for its models. Returns `None` if it is not a runtime.
fn probe(url: &str, config: &RuntimeConfig) -> Option<RuntimeInfo> {
    let client = HttpClient::new(url, config.ca.as_deref());
    let authorization = authorization(config);
    let get = |address: String| -> Option<Value> {
        let answer = client.call(&Call {
            uri: &address.parse().ok()?,
            authorization: authorization.as_deref(),
            body: None,
            deadline: Instant::now() + PROBE_TIME,
            limit: MAX_ANSWER,
            cancellation: &Cancellation::default(),
        });
        let answer = answer.ok().filter(|answer| answer.status() == 200)?;
        serde_json::from_slice(answer.body()).ok()
    };
    let mut about = read_models(&get(format!("{url}/models"))?)?;
    if about.context.is_none() {
        // llama.cpp reports the context size that it was started with, not the model's, at an
        // address outside the API.
        let root = url.strip_suffix("/v1").unwrap_or(url);
        about.context = get(format!("{root}/props"))
            .and_then(|props| props["default_generation_settings"]["n_ctx"].as_u64());
    }
    Some(about)
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
    use serde_json::json;

    use super::*;

    #[test]
    fn addresses_that_lead_to_the_service_itself() {
        #[track_caller]
        fn check(url: &str, listening: &str, expected: bool) {
            let uri = url.parse().expect("an address");
            let socket = listening.parse().expect("an address of a socket");
            assert_eq!(leads_to(&uri, socket), expected, "{url} {listening}");
        }
        check("http://127.0.0.1:8080/v1", "127.0.0.1:8080", true);
        check("http://localhost:8080/v1", "127.0.0.1:8080", true);
        check("http://127.1:8080/v1", "127.0.0.1:8080", true);
        check("http://0.0.0.0:8080/v1", "127.0.0.1:8080", true);
        check("http://[::ffff:127.0.0.1]:8080/v1", "127.0.0.1:8080", true);
        check("http://127.0.0.1/v1", "127.0.0.1:80", true);
        check("https://127.0.0.1/v1", "0.0.0.0:443", true);
        check("http://127.0.0.7:8080/v1", "0.0.0.0:8080", true);
        check("http://127.0.0.1:8080/v1", "[::]:8080", true);
        check("http://[::1]:8080/v1", "[::1]:8080", true);
        check("http://127.0.0.1:8081/v1", "127.0.0.1:8080", false);
        check("http://127.0.0.1:18080/v1", "127.0.0.1:8080", false);
        check("http://127.0.0.7:8080/v1", "127.0.0.1:8080", false);
        check("http://[::1]:8080/v1", "0.0.0.0:8080", false);
        check("http://192.0.2.1:8080/v1", "0.0.0.0:8080", false);
        check("http://no-such-host.invalid:8080/v1", "0.0.0.0:8080", false);
    }

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
