//! Every setting: its name, its default, the values that it accepts, and its description. The
//! program takes its defaults and the phrases of its messages from this table.
//! `packaging/settings.rs` makes the sample file, the manual page and the table of
//! docs/configuration.md from it.

use std::ops::RangeInclusive;

use Accepted::{AnyText, Lines, List, Members, Number, OneOf, Text};
use DefaultValue::{Computed, Implied, Value};

/// The name of every variable begins with it.
pub const PREFIX: &str = "ADRIATICUM_";

pub struct Setting {
    /// A setting of a table has the table's name before its own: `runtime.url`.
    pub name: &'static str,
    pub default: DefaultValue,
    pub accepted: Accepted,
    /// One sentence. Code is between backticks, here and in `details`.
    pub summary: &'static str,
    /// Further sentences for the sample file and the manual page.
    pub details: &'static str,
    /// A reload (SIGHUP) applies a change of its value.
    pub is_reloaded: bool,
    /// No message repeats its value.
    pub is_secret: bool,
}

pub enum DefaultValue {
    /// The text of a variable. An empty one means none.
    Value(&'static str),
    /// The same, but a setting with this text means more: the database or the client has to agree.
    Implied(&'static str),
    /// A description, and the value in the sample file.
    Computed(&'static str, &'static str),
}

/// The accepted values. The phrases complete "expected …".
pub enum Accepted {
    /// The unit may be empty.
    Number(RangeInclusive<u64>, &'static str),
    OneOf(&'static [&'static str]),
    /// An empty text means that it is not set.
    Text(&'static str),
    /// An empty text is a value as well.
    AnyText(&'static str),
    /// Several texts: an array in the file. In a variable they are separated by commas,
    List(&'static str),
    /// or by the ends of lines.
    Lines(&'static str),
    /// A table in the file, a JSON object in a variable.
    Members(&'static str),
}

const fn setting(
    name: &'static str,
    default: DefaultValue,
    accepted: Accepted,
    summary: &'static str,
    details: &'static str,
) -> Setting {
    Setting {
        name,
        default,
        accepted,
        summary,
        details,
        is_reloaded: false,
        is_secret: false,
    }
}

#[rustfmt::skip]
pub static SETTINGS: [Setting; 31] = [
    setting("database", Value("adriaticum.db"), Text("the path of a SQLite file, or a postgresql:// URI"),
        "Keys and ledger: one SQLite file, or a PostgreSQL database (tested with version 15).",
        "A relative path begins in the current folder. A URI may name several hosts: \
         postgresql://adriaticum@db1.example,db2.example/adriaticum?sslmode=verify-full").secret(),
    setting("database_password_file", Computed("`database-password` in `$CREDENTIALS_DIRECTORY`, else beside the configuration, if it exists", ""),
        Text("a file that can be read"),
        "File with the password of a PostgreSQL database.",
        "Only root needs to be able to read the default file: systemd passes it to the service, and only a command that needs it reads it."),
    setting("time_zone", Implied("UTC"), Text("UTC or the name of a zone, such as Europe/Zagreb"),
        "Time zone of days, months, budgets, and of all times but those of the log.",
        "A new database takes it, and keeps it: `serve` refuses another one once there are requests. If it is not set, the \
         database's own counts. The zone's rules come from the package tzdata when it is taken; `serve` stores newer ones."),
    setting("gateway", Computed("the host's name", ""),
        Text("a name of 1 to 64 printable characters without spaces, colons and commas"),
        "Name of this gateway among several that share a PostgreSQL database.",
        "A second `serve` with the same name is refused."),
    setting("listen", Value("localhost:8080"),
        AnyText("localhost or an address, with a port, such as localhost:8080 or [fd00::7]:8080, or unix: and a path"),
        "Address that clients connect to; sockets passed by systemd replace it.",
        "`localhost` is 127.0.0.1 and, if the host has it, [::1], both or none: no other user can listen where a client looks for it. With systemd, the socket unit sets the address: `systemctl edit adriaticum.socket`."),
    setting("socket_mode", Value("0660"), AnyText("permissions in octal from 0000 to 0777, such as 0660"),
        "Permissions of a Unix socket; sockets passed by systemd have their own.",
        "The default allows the service's user and group to connect. A socket of systemd has `SocketMode=`."),
    setting("api_hosts", Value("localhost,127.0.0.1,::1"), List("one or more host names or addresses, without ports"),
        "Hosts that serve the API; any other host gets 404.", ""),
    setting("console_host", Implied("console.localhost"),
        AnyText("a host name without a port that is not one of api_hosts, or empty to disable the console"),
        "Host that serves the console; if it is not set, only clients on this host are served.", ""),
    setting("trusted_proxies", Value(""),
        List("addresses such as 10.0.0.7 or fd00::7, networks such as 10.0.0.0/8, or unix"),
        "Proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are trusted; `unix` means every client of a Unix socket.",
        "The client's address is used in the log and to throttle failed sign-ins to the console."),
    setting("workers", Value("16"), Number(1..=1024, ""),
        "Requests processed at once: as many as the runtime has slots, or a few more.", ""),
    setting("queue", Value("64"), Number(0..=65_536, ""),
        "Complete requests that may wait for a worker; when it is full, further requests get 503.", ""),
    setting("max_connections", Value("4096"), Number(1..=1_000_000, ""),
        "Open connections; one address has at most half, unless it is a trusted proxy.",
        "If there is no room for a new one, a connection of the address with most of them is evicted: the longest idle one, \
         else the oldest unfinished request."),
    // At least a megabyte, so that a request of the largest size fits.
    setting("buffer_limit", Computed("a quarter of the memory limit, 4 to 64 MiB", "67108864"), Number(1 << 20..=1 << 40, "bytes"),
        "Bytes that are buffered for all requests together.",
        "The memory limit is the host's memory, or the limit of the service's control group if it is lower."),
    setting("compatibility", Value("strict"), OneOf(&["strict", "openai"]),
        "`openai` serves chat interfaces and agent libraries: streams, the list of models, parameters that do not change the result.",
        "`strict` refuses every parameter that the specification does not have. With `openai`, an answer that is to be streamed comes as a whole, once its row is written."),
    setting("log_level", Value("info"), OneOf(&["error", "warn", "info", "debug", "trace"]),
        "The least important messages that are logged.", "").reloaded(),
    setting("tls.cert", Value(""), Text("a PEM file"),
        "Certificate, with the intermediate ones that signed it: with it and `tls.key`, TLS 1.2 and 1.3 on the TCP sockets.",
        "The service's user must be able to read both files.").reloaded(),
    setting("tls.key", Value(""), Text("a PEM file"), "Private key of the certificate.", "").reloaded(),
    setting("runtime.url", Value(""),
        List("base addresses ending in /v1, such as http://127.0.0.1:8081/v1 or https://10.0.0.7/v1"),
        "OpenAI-compatible runtime, or several: the least busy one that works is used.",
        "Without a runtime, every completion gets 503."),
    setting("runtime.model", Value("adriaticum"), Text("a name"), "The runtime's name for the model.", ""),
    setting("runtime.api_key", Value(""), Text("a key of printable characters without white space"),
        "Sent to the runtime as a Bearer token.", "Better: put it into a file, `runtime.api_key_file`.").secret(),
    setting("runtime.api_key_file", Computed("`runtime-key` in `$CREDENTIALS_DIRECTORY`, else beside the configuration, if it exists", ""),
        Text("a file with a key of printable characters without white space"),
        "File with the key for the runtime.",
        "Only root needs to be able to read the default file: systemd passes it to the service, and only a command that needs it reads it."),
    setting("runtime.ca", Computed("the system's CAs", ""), Text("a PEM file with the certificate of a CA"),
        "CA of an `https://` runtime, used instead of the system's CAs.", "The service's user must be able to read it."),
    setting("runtime.timeout", Value("120"), Number(1..=86_400, "seconds"),
        "Seconds for all runtime calls of one request together.", "The unit's `TimeoutStopSec` must be longer."),
    setting("runtime.parameters", Value(""), Members("a table of members for every call, without model, messages, temperature, max_tokens and stream"),
        "Members that are added to every call to the runtime, such as `chat_template_kwargs = { enable_thinking = false }`.",
        "The variable has a JSON object."),
    setting("runtime.wait", Value("10"), Number(0..=600, "seconds"),
        "Seconds after the runtimes stopped answering in which requests wait for one, as while one restarts.",
        "The wait is part of `runtime.timeout`."),
    setting("search.url", Value(""), Text("folder:PATH, or the address of a SearXNG instance, such as http://127.0.0.1:8888"),
        "SearXNG instance, or a folder whose text, Markdown and HTML files are indexed at the start and at a reload.", ""),
    setting("search.grounding", Value("off"), OneOf(&["off", "always", "match"]),
        "Completions that need Search: with `match` those that `search.match` matches.", ""),
    setting("search.match", Value(""), Lines("regular expressions"),
        "Search is asked if the last user message matches one of them, with `match`.", ""),
    setting("search.timeout", Value("5"), Number(1..=600, "seconds"), "Seconds for a query.", ""),
    setting("search.results", Value("4"), Number(1..=20, ""), "The most passages that the model gets.", ""),
    setting("usage.retention_days", Value("0"), Number(0..=36_500, "days"),
        "Older rows of the ledger are removed, but the sums and the audit are kept; 0 keeps everything.", ""),
];

pub fn find(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}

/// Returns a setting by the name that the program knows it by.
pub fn known(name: &str) -> &'static Setting {
    find(name).unwrap_or_else(|| panic!("{name} should be in the table of settings"))
}

pub fn is_table(name: &str) -> bool {
    tables().any(|table| table == name)
}

pub fn tables() -> impl Iterator<Item = &'static str> {
    SETTINGS
        .iter()
        .map(Setting::table)
        .filter(|table| !table.is_empty())
}

impl Setting {
    const fn reloaded(self) -> Self {
        Self {
            is_reloaded: true,
            ..self
        }
    }

    const fn secret(self) -> Self {
        Self {
            is_secret: true,
            ..self
        }
    }

    /// Empty for a setting that is in no table.
    pub fn table(&self) -> &'static str {
        self.name.split_once('.').map_or("", |(table, _)| table)
    }

    pub fn variable(&self) -> String {
        format!("{PREFIX}{}", self.name.replace('.', "_").to_uppercase())
    }

    pub fn accepted(&self) -> String {
        match &self.accepted {
            Number(range, unit) => {
                let of = if unit.is_empty() { "" } else { " of " };
                format!(
                    "a whole number{of}{unit} from {} to {}",
                    range.start(),
                    range.end()
                )
            }
            OneOf(words) => format!("one of {}", words.join(", ")),
            Text(phrase) | AnyText(phrase) | List(phrase) | Lines(phrase) | Members(phrase) => {
                (*phrase).into()
            }
        }
    }

    /// The default as a variable would have it; empty if it is computed.
    pub fn default_text(&self) -> &'static str {
        match self.default {
            Value(text) | Implied(text) => text,
            Computed(..) => "",
        }
    }

    /// Returns the texts of a value: several for a list, else one.
    pub(super) fn split(&self, value: &str) -> Vec<String> {
        let separator = match self.accepted {
            List(_) => ',',
            Lines(_) => '\n',
            _ => return vec![value.into()],
        };
        texts_of(value.split(separator))
    }
}

/// Returns the texts of a list, without the white space around them, and without those that are
/// nothing else.
pub(super) fn texts_of<'a>(texts: impl Iterator<Item = &'a str>) -> Vec<String> {
    let texts = texts.map(str::trim).filter(|text| !text.is_empty());
    texts.map(String::from).collect()
}
