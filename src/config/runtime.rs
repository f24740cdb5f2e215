//! The settings of the runtime.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use ureq::http::Uri;
use ureq::http::uri::Authority;

use super::raw_setting::{RawSetting, WrongSetting};
use super::settings::Settings;
use crate::certificates;
use crate::files;
use crate::http::split_authority;
use crate::secret::Secret;

/// A path and a query are added to an address, and the head of a call has to fit into the client's
/// buffer.
const MAX_ADDRESS: usize = 2_000;

/// The file with the key for the runtime, among the service's secrets.
const KEY_FILE: &str = "runtime-key";

#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    pub urls: Vec<String>,
    pub model: String,
    pub api_key: Option<Secret>,
    /// The CAs that are trusted for an `https://` runtime; `None` means those of the system.
    pub ca: Option<Vec<CertificateDer<'static>>>,
    /// For all runtime calls of one request together.
    pub timeout: Duration,
}

pub(super) fn read(settings: &mut Settings) -> RuntimeConfig {
    // Every call adds the rest of its path to `/v1`.
    let address = |url: &str| base_address(url).filter(|url| url.ends_with("/v1"));
    let mut config = RuntimeConfig {
        urls: settings.value("runtime.url", |written| written.parse_each(address)),
        model: settings.value("runtime.model", |written| {
            written.text_or_default().map(String::from)
        }),
        api_key: api_key(settings),
        ca: settings.value("runtime.ca", ca),
        timeout: Duration::from_secs(settings.value("runtime.timeout", RawSetting::number)),
    };
    // A request is sent to each at most once, and each has one series in the metrics.
    let mut known = HashSet::new();
    config.urls.retain(|url| known.insert(url.clone()));
    config
}

/// Reads the certificates of a PEM file. An empty name counts as not set.
fn ca(written: &RawSetting) -> Result<Option<Vec<CertificateDer<'static>>>, WrongSetting> {
    let path = match written.text()? {
        "" => return Ok(None),
        path => Path::new(path),
    };
    let certificates = files::read_certificates(path).and_then(|certificates| {
        certificates::make_store(&certificates)?;
        Ok(Some(certificates))
    });
    certificates.map_err(|error| written.refuse_because(error))
}

/// Returns a base address without a slash at its end; `None` if it is not one.
pub(super) fn base_address(url: &str) -> Option<String> {
    let rest = url
        .strip_prefix("http://")
        .or_else(|| url.strip_prefix("https://"))?;
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let authority = Authority::try_from(authority).ok()?;
    let (host, port) = split_authority(&authority)?;
    let port_is_good = port.is_empty() || port.parse::<u16>().is_ok();
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~%/".contains(&b);
    let is_uri = url.len() <= MAX_ADDRESS && url.parse::<Uri>().is_ok();
    let good = is_uri && !host.is_empty() && port_is_good && path.bytes().all(plain);
    good.then(|| url.trim_end_matches('/').to_owned())
}

fn api_key(settings: &mut Settings) -> Option<Secret> {
    let set = settings.take("runtime.api_key");
    let key = set.as_ref().and_then(|set| {
        let key = set.text().and_then(|text| secret(set, text));
        settings.accept(key)?
    });
    if key.is_some() {
        settings
            .secret_files
            .extend(set.and_then(|set| set.file().map(PathBuf::from)));
    }
    let Some(file) = settings.take_file("runtime.api_key_file", KEY_FILE, key.is_none()) else {
        return key;
    };
    settings.secret_files.extend(file.text().map(PathBuf::from));
    // The packaged service always has a file, which is empty if the runtime needs no key.
    let in_file = settings.accept(read_key_file(&file)).flatten();
    if key.is_some() && in_file.is_some() {
        settings
            .problems
            .push(file.refuse_for("no file, because runtime.api_key is set too"));
    }
    key.or(in_file)
}

fn read_key_file(file: &RawSetting) -> Result<Option<Secret>, WrongSetting> {
    let text =
        files::read_text(Path::new(file.text()?)).map_err(|error| file.refuse_because(error))?;
    secret(file, &text)
}

/// Returns a key without the white space around it; `None` if nothing is left.
fn secret(written: &RawSetting, text: &str) -> Result<Option<Secret>, WrongSetting> {
    let text = text.trim();
    if !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(written.refuse());
    }
    Ok((!text.is_empty()).then(|| Secret::new(text)))
}
