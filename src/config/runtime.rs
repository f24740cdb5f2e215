//! The settings of the runtime.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustls::RootCertStore;
use ureq::http::Uri;

use super::ConfigError;
use super::settings::{Settings, Written};
use crate::client::roots;
use crate::http::head::split_authority;

/// A path and a query are added to an address, and the head of a call has to fit into the client's buffer.
const MAX_ADDRESS: usize = 2_000;

#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    pub urls: Vec<String>,
    pub model: String,
    pub api_key: Option<Secret>,
    /// The file that `ADRIATICUM_RUNTIME_API_KEY_FILE` names.
    pub api_key_file: Option<PathBuf>,
    /// The CAs that are trusted for an `https://` runtime; `None` means those of the system.
    pub ca: Option<RootCertStore>,
    /// For all runtime calls of one request together.
    pub timeout: Duration,
}

/// A secret that can be sent but not shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

pub(super) fn read(settings: &mut Settings) -> Result<RuntimeConfig, ConfigError> {
    let takes = "base addresses such as http://127.0.0.1:8081/v1 or https://10.0.0.7/v1";
    let (api_key, api_key_file) = api_key(settings)?;
    let config = RuntimeConfig {
        urls: settings.value("runtime.url", Vec::new(), |written| written.parse_each(takes, base_address))?,
        model: settings.name("runtime.model", "adriaticum")?,
        api_key,
        api_key_file,
        ca: settings.value("runtime.ca", None, ca)?,
        timeout: Duration::from_secs(settings.number("runtime.timeout", 1..=86_400, 120)?),
    };
    // Not shown by themselves: the key, and the content of the file.
    settings.note("runtime.api_key", &config.api_key.as_ref().map(Secret::expose));
    settings.note("runtime.ca", &config.ca.as_ref().map(|ca| &ca.roots));
    Ok(config)
}

/// The certificates of a PEM file; an empty name counts as not set.
fn ca(written: &Written) -> Result<Option<RootCertStore>, ConfigError> {
    match written.text()? {
        "" => Ok(None),
        path => roots::read(Path::new(path)).map(Some).map_err(|error| {
            written.refuse(&format!("the path of a PEM file with the certificate of a CA ({error})"))
        }),
    }
}

/// A base address without the slash at its end; `None` if it is not one.
pub(super) fn base_address(url: &str) -> Option<String> {
    let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"))?;
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (host, port) = split_authority(authority)?;
    let port_is_good = port.is_empty() || port.parse::<u16>().is_ok();
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~%/".contains(&b);
    let is_uri = url.len() <= MAX_ADDRESS && url.parse::<Uri>().is_ok();
    let good = is_uri && !host.is_empty() && port_is_good && path.bytes().all(plain);
    good.then(|| url.trim_end_matches('/').to_owned())
}

fn api_key(settings: &mut Settings) -> Result<(Option<Secret>, Option<PathBuf>), ConfigError> {
    let key = secret(settings.take("runtime.api_key"), |written| Ok(written.text()?.to_owned()))?;
    let file = settings.take_variable("runtime.api_key_file");
    let path = file.as_ref().and_then(|file| file.text().ok()).map(PathBuf::from);
    let place = file.as_ref().map(|file| file.refuse("nothing while runtime.api_key is set too"));
    let in_file = secret(file, |written| {
        fs::read_to_string(written.text()?)
            .map_err(|error| written.refuse(&format!("the path of a file that can be read ({error})")))
    })?;
    match (key, in_file, place) {
        (Some(_), Some(_), Some(twice)) => Err(twice),
        // The packaged service always names a file, which is empty if the runtime wants no key.
        (key, in_file, _) => Ok((key.or(in_file), path)),
    }
}

/// A key without the white space around it; `None` if nothing else is there.
fn secret(
    written: Option<Written>,
    read: impl FnOnce(&Written) -> Result<String, ConfigError>,
) -> Result<Option<Secret>, ConfigError> {
    let Some(written) = written else {
        return Ok(None);
    };
    let text = read(&written)?;
    let text = text.trim();
    if !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(written.refuse("a key of printable characters without white space"));
    }
    Ok((!text.is_empty()).then(|| Secret::new(text)))
}
