//! The values of settings: from a text to a type, and the defaults that the host has.

use std::fs;
use std::net::Ipv6Addr;
use std::path::Path;

use regex_lite::Regex;
use rustix::system::{sysinfo, uname};
use rustls::pki_types::CertificateDer;
use serde_json::{Map, Value};
use ureq::http::Uri;
use ureq::http::uri::Authority;

use super::SearchBackend;
use super::sources::{RawSetting, WrongSetting};
use crate::certificates;
use crate::http::split_authority;
use crate::listener::Address;

/// A path and a query are added to an address, and the head of a call has to fit into the client's
/// buffer.
const MAX_ADDRESS: usize = 2_000;

const MIB: u64 = 1024 * 1024;

/// The members of a call to a runtime that the service sets itself.
const CALL_MEMBERS: [&str; 5] = ["model", "messages", "temperature", "max_tokens", "stream"];

pub fn listen(text: &str) -> Option<Address> {
    match text.split_once(':') {
        Some(("unix", path)) => (!path.is_empty()).then(|| Address::Unix(path.into())),
        Some(("localhost", port)) => port.parse().ok().map(Address::Localhost),
        _ => text.parse().ok().map(Address::Tcp),
    }
}

pub fn socket_mode(text: &str) -> Option<u32> {
    let is_octal = text.bytes().all(|b| (b'0'..=b'7').contains(&b));
    let mode = u32::from_str_radix(text, 8).ok()?;
    (is_octal && mode <= 0o777).then_some(mode)
}

/// Normalizes a host name or address as it is in requests: lower case, an IPv6 address without
/// brackets.
pub fn host(text: &str) -> Option<String> {
    let bare = text
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(text);
    let is_name = !bare.is_empty()
        && bare
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
    (is_name || bare.parse::<Ipv6Addr>().is_ok()).then(|| bare.to_ascii_lowercase())
}

/// Takes a name that can be parsed out of a list, and out of a chain head that `usage verify` prints.
pub fn gateway(name: &str) -> Option<String> {
    let is_good = |c: char| !c.is_control() && !c.is_whitespace() && c != ':' && c != ',';
    let is_name = (1..=64).contains(&name.chars().count()) && name.chars().all(is_good);
    is_name.then(|| name.to_owned())
}

pub fn host_name() -> String {
    uname().nodename().to_string_lossy().into_owned()
}

/// Takes the base address of a runtime. Every call adds the rest of its path to `/v1`.
pub fn runtime_url(url: &str) -> Option<String> {
    base_address(url).filter(|url| url.ends_with("/v1"))
}

/// Takes a JSON object without the members that the service sets itself.
pub fn parameters(text: &str) -> Option<Map<String, Value>> {
    let members: Map<String, Value> = serde_json::from_str(text).ok()?;
    let has_ours = CALL_MEMBERS.iter().any(|name| members.contains_key(*name));
    (!has_ours).then_some(members)
}

pub fn search_backend(text: &str) -> Option<SearchBackend> {
    match text.strip_prefix("folder:") {
        Some(path) => (!path.is_empty()).then(|| SearchBackend::Folder(path.into())),
        None => base_address(text).map(SearchBackend::SearXng),
    }
}

/// Returns a base address without a slash at its end; `None` if it is not one.
fn base_address(url: &str) -> Option<String> {
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

pub fn patterns(raw: &RawSetting) -> Result<Vec<Regex>, WrongSetting> {
    let pattern = |(number, text): (usize, &String)| {
        Regex::new(text).map_err(|error| raw.refuse_because(format!("number {number}: {error}")))
    };
    (1..).zip(&raw.texts).map(pattern).collect()
}

/// Reads the certificates of a PEM file.
pub fn certificates(raw: &RawSetting) -> Result<Vec<CertificateDer<'static>>, WrongSetting> {
    let certificates = certificates::read(Path::new(raw.text())).and_then(|certificates| {
        certificates::make_store(&certificates)?;
        Ok(certificates)
    });
    certificates.map_err(|error| raw.refuse_because(error))
}

/// A quarter of the memory limit, from 4 to 64 MiB.
pub fn buffer_limit() -> u64 {
    let system = sysinfo();
    let total = system.totalram.saturating_mul(system.mem_unit.into());
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limit = memory_limit(total, &groups, Path::new("/sys/fs/cgroup"));
    (limit / 4).clamp(4 * MIB, 64 * MIB)
}

/// The smallest of the host's memory and the limits of this process's control groups and all of
/// their parents. Each line of `groups` is an id, the controllers and the path of a group; version
/// 2 names no controllers.
fn memory_limit(total: u64, groups: &str, mounted: &Path) -> u64 {
    let group_limit = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let (folder, file) = match controllers {
            "" => (mounted.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (mounted.join("memory"), "memory.limit_in_bytes")
            }
            _ => return None,
        };
        // In a container the path may be the host's, and only the root is mounted: it is among the
        // parents.
        Path::new(path)
            .ancestors()
            .map(|group| {
                folder
                    .join(group.strip_prefix("/").unwrap_or(group))
                    .join(file)
            })
            .filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok())
            .min()
    };
    groups.lines().filter_map(group_limit).fold(total, u64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_gateways() {
        let long = "x".repeat(64);
        for name in ["a", "gateway-1.example", "vrata-\u{161}", &long] {
            assert_eq!(gateway(name).as_deref(), Some(name));
        }
        for name in [
            "",
            "a b",
            "a:1",
            "a,b",
            "a\n",
            "a\u{2003}b",
            &(long.clone() + "x"),
        ] {
            assert_eq!(gateway(name), None);
        }
    }

    #[test]
    fn the_smallest_limit_of_all_groups_counts() {
        let root =
            std::env::temp_dir().join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
        let write = |file: &str, text: &str| {
            let file = root.join(file);
            fs::create_dir_all(file.parent().expect("a folder"))
                .expect("the folder should be made");
            fs::write(file, text).expect("the file should be written");
        };
        write("memory.max", "900\n");
        write("a/memory.max", "500\n");
        write("a/b/memory.max", "max\n");
        write("a/c/memory.max", "400\n");
        write("memory/memory.limit_in_bytes", "800\n");
        write("memory/x/memory.limit_in_bytes", "9223372036854771712\n");
        write("memory/x/y/memory.limit_in_bytes", "300\n");
        for (groups, total, limit) in [
            ("", 1000, 1000),
            ("0::/\n", 1000, 900),
            ("0::/\n", 100, 100),
            ("0::/a/b\n", 1000, 500),
            ("0::/a/c\n", 1000, 400),
            ("0::/of/the/host\n", 1000, 900),
            (
                "5:cpu,cpuacct:/x/y\n4:memory:/x\n1:name=systemd:/\n",
                1000,
                800,
            ),
            ("4:hugetlb,memory:/x/y\n0::/a\n", 1000, 300),
            ("nonsense", 1000, 1000),
        ] {
            assert_eq!(memory_limit(total, groups, &root), limit, "{groups:?}");
        }
        fs::remove_dir_all(&root).expect("it should go");
        assert!((4 * MIB..=64 * MIB).contains(&buffer_limit()));
    }
}
