//! Asks each runtime for a completion, and finds others that listen on this host.

use std::borrow::Cow;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::finding::{Finding, Verdict, named};
use crate::config::{Config, RuntimeConfig};
use crate::listener::Address;
use crate::runtime::{Chat, ChatMessage, Role, RuntimeError, Runtimes, probe};
use crate::text::{escaped, shortened};

/// The ports that runtimes listen on by default.
const DEFAULT_PORTS: [(&str, u16); 4] = [
    ("llama-server", 8080),
    ("Ollama", 11434),
    ("vLLM", 8000),
    ("LM Studio", 1234),
];

/// The timeout for a runtime's lists of its models and properties.
const PROBE_TIME: Duration = Duration::from_secs(2);

/// The most characters of a model's name in a finding.
const MAX_NAME: usize = 128;

pub fn check(config: &Config) -> Vec<Finding> {
    let mut findings: Vec<Finding> = config
        .runtime
        .urls
        .iter()
        .map(|url| Finding {
            runtime: Some(url.clone()),
            ..try_runtime(url, config)
        })
        .collect();
    if findings.is_empty() {
        findings.push(not_configured());
    }
    if findings
        .iter()
        .any(|finding| finding.status == Verdict::Fail)
    {
        findings.extend(local_runtimes(config));
    }
    findings
}

pub fn not_configured() -> Finding {
    let message =
        "no runtime is configured. Set runtime.url (ADRIATICUM_RUNTIME_URL) to its base address";
    Finding::fail("runtime", message)
}

fn try_runtime(url: &str, config: &Config) -> Finding {
    let runtime = Runtimes::new(
        &RuntimeConfig {
            urls: vec![url.to_owned()],
            ..config.runtime.clone()
        },
        1,
        config.worker_share(),
    )
    .expect("it has an address");
    let about = probe(url, &config.runtime, PROBE_TIME).unwrap_or_default();
    let chat = Chat {
        messages: vec![ChatMessage {
            role: Role::User,
            content: Cow::Borrowed("Say yes."),
        }],
        temperature: 0.0,
        max_tokens: 1,
    };
    let asked = Instant::now();
    match runtime.check(&chat) {
        Ok(generated) => {
            let mut message = format!("{url}: answers in {} ms", asked.elapsed().as_millis());
            if let Some(context) = about.context {
                message += &format!(", has a context of {context} tokens");
            }
            match generated.tokens.total_tokens {
                Some(_) => Finding::ok("runtime", message + ", reports usage"),
                None => Finding::warn(
                    "runtime",
                    message + ", reports no usage: the token figures will be null",
                ),
            }
        }
        Err(error) => {
            let mut message = format!("{url}: {}", error.diagnosis());
            if matches!(error, RuntimeError::UnknownModel(_)) && !about.models.is_empty() {
                message += &format!(
                    ": {}",
                    named(&about.models, |name| shortened(&escaped(name), MAX_NAME))
                );
            }
            Finding::fail("runtime", message)
        }
    }
}

/// Runtimes that listen on this host's usual ports and are not used.
fn local_runtimes(config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    // The key is for the runtimes of the configuration only.
    let without_key = RuntimeConfig {
        api_key: None,
        ..config.runtime.clone()
    };
    for (name, port) in DEFAULT_PORTS {
        let url = format!("http://127.0.0.1:{port}/v1");
        if config.runtime.urls.contains(&url) || is_own(port, &config.listen) {
            continue;
        }
        if let Some(about) = probe(&url, &without_key, PROBE_TIME) {
            let model = match about.models.first() {
                Some(model) => format!(
                    " and runtime.model = \"{}\"",
                    shortened(&escaped(model), MAX_NAME)
                ),
                None => String::new(),
            };
            let message = format!(
                "a runtime answers at {url}, where {name} usually listens. To use it: runtime.url = \"{url}\"{model}"
            );
            findings.push(Finding::warn("runtime", message));
        }
    }
    findings
}

/// Returns true if this service itself listens on a port of this host: it would answer 404, and log
/// that.
fn is_own(port: u16, listen: &Address) -> bool {
    let is_here = |ip: IpAddr| ip.is_loopback() || ip.is_unspecified();
    let is_local = match listen {
        Address::Tcp(address) => is_here(address.ip()),
        Address::Localhost(_) => true,
        Address::Unix(_) => false,
    };
    is_local && listen.port() == Some(port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_does_not_take_itself_for_a_runtime() {
        for (listen, expected) in [
            ("127.0.0.1:8080", true),
            ("[::]:8080", true),
            ("127.0.0.1:8081", false),
            ("192.0.2.1:8080", false),
        ] {
            let address = Address::Tcp(listen.parse().expect("an address"));
            assert_eq!(is_own(8080, &address), expected, "{listen}");
        }
        assert!(is_own(8080, &Address::Localhost(8080)));
        assert!(!is_own(8080, &Address::Localhost(8081)));
        assert!(!is_own(8080, &Address::Unix("/run/x.sock".into())));
    }
}
