//! Every setting: its name, its default, the values that it accepts, and its description. The program takes its defaults and
//! the phrases of its messages from this table. `packaging/generate.rs` makes the sample file and the manual page from it, and
//! docs/configuration.md has it between two marks.

use std::ops::RangeInclusive;

use Accepted::{Lines, List, Number, OneOf, Text};
use DefaultValue::{Computed, Value};

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
}

pub enum DefaultValue {
    /// The text of a variable. An empty one means none.
    Value(&'static str),
    /// A description, and the value in the sample file.
    Computed(&'static str, &'static str),
}

/// The accepted values. The phrases complete "expected …".
pub enum Accepted {
    /// The unit may be empty.
    Number(RangeInclusive<u64>, &'static str),
    OneOf(&'static [&'static str]),
    Text(&'static str),
    /// Several texts: an array in the file. In a variable they are separated by commas,
    List(&'static str),
    /// or by the ends of lines.
    Lines(&'static str),
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
    }
}

#[rustfmt::skip]
pub static SETTINGS: [Setting; 28] = [
    setting("database", Value("adriaticum.db"), Text("the path of a SQLite file, or a postgresql:// URI"),
        "Keys and ledger: one SQLite file, or a PostgreSQL database (tested with version 15).",
        "A relative path begins in the current folder. A URI may name several hosts: \
         postgresql://adriaticum@db1.example,db2.example/adriaticum?sslmode=verify-full"),
    setting("database_password_file", Computed("`database-password` beside the configuration, if it exists", ""),
        Text("a file that can be read"),
        "File with the password of a PostgreSQL database.",
        "Only root needs to be able to read the default file: systemd passes it to the service."),
    setting("gateway", Computed("the host's name", ""),
        Text("a name of 1 to 64 printable characters without spaces, colons and commas"),
        "Name of this gateway among several that share a PostgreSQL database.",
        "A second `serve` with the same name is refused."),
    setting("listen", Value("127.0.0.1:8080"),
        Text("an address and a port, such as 127.0.0.1:8080 or [::1]:8080, or unix: and a path"),
        "Address that clients connect to; sockets passed by systemd replace it.",
        "With systemd, the socket unit sets the address: `systemctl edit adriaticum.socket`."),
    setting("socket_mode", Value("0660"), Text("permissions in octal from 0000 to 0777, such as 0660"),
        "Permissions of a Unix socket; sockets passed by systemd have their own.",
        "The default allows the service's user and group to connect. A socket of systemd has `SocketMode=`."),
    setting("api_hosts", Value("localhost,127.0.0.1,::1"), List("one or more host names or addresses, without ports"),
        "Hosts that serve the API; any other host gets 404.", ""),
    setting("console_host", Value("console.localhost"),
        Text("a host name without a port that is not one of api_hosts, or empty to disable the console"),
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
        "`openai` also accepts parameters that do not change the result, such as `\"stream\": false`.",
        "`strict` refuses every parameter that the specification does not have."),
    setting("log_level", Value("info"), OneOf(&["error", "warn", "info", "debug", "trace"]),
        "The least important messages that are logged.", ""),
    setting("tls.cert", Value(""), Text("a PEM file"),
        "Certificate, with the intermediate ones that signed it: with it and `tls.key`, TLS 1.2 and 1.3 on the TCP sockets.",
        "The service's user must be able to read both files."),
    setting("tls.key", Value(""), Text("a PEM file"), "Private key of the certificate.", ""),
    setting("runtime.url", Value(""),
        List("base addresses ending in /v1, such as http://127.0.0.1:8081/v1 or https://10.0.0.7/v1"),
        "OpenAI-compatible runtime, or several: the least busy one that works is used.",
        "Without a runtime, every completion gets 503."),
    setting("runtime.model", Value("adriaticum"), Text("a name"), "The runtime's name for the model.", ""),
    setting("runtime.api_key", Value(""), Text("a key of printable characters without white space"),
        "Sent to the runtime as a Bearer token.", "Better: put it into a file, `runtime.api_key_file`."),
    setting("runtime.api_key_file", Computed("`runtime-key` beside the configuration, if it exists", ""),
        Text("a file with a key of printable characters without white space"),
        "File with the key for the runtime.",
        "Only root needs to be able to read the default file: systemd passes it to the service."),
    setting("runtime.ca", Computed("the system's CAs", ""), Text("a PEM file with the certificate of a CA"),
        "CA of an `https://` runtime, used instead of the system's CAs.", "The service's user must be able to read it."),
    setting("runtime.timeout", Value("120"), Number(1..=86_400, "seconds"),
        "Seconds for all runtime calls of one request together.", "The unit's `TimeoutStopSec` must be longer."),
    setting("search.url", Value(""), Text("index: or the address of a SearXNG instance, such as http://127.0.0.1:8888"),
        "SearXNG instance, or `index:` for the embedded index that `adriaticum search add` builds.", ""),
    setting("search.grounding", Value("off"), OneOf(&["off", "always", "match", "auto"]),
        "Completions that need Search: with `match` those that `search.match` matches, with `auto` also those that need facts.",
        "With `auto` the model says whether facts are needed."),
    setting("search.match", Value(""), Lines("regular expressions"),
        "Search is asked if the last user message matches one of them, with `match` and `auto`.", ""),
    setting("search.timeout", Value("5"), Number(1..=600, "seconds"), "Seconds for a query.", ""),
    setting("search.results", Value("4"), Number(1..=20, ""), "The most passages that the model gets.", ""),
    setting("usage.retention_days", Value("0"), Number(0..=36_500, "days"),
        "Older rows of the ledger are removed, but the sums and the audit are kept; 0 keeps everything.", ""),
];

pub fn find(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
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
            Text(phrase) | List(phrase) | Lines(phrase) => (*phrase).into(),
        }
    }

    /// The default as a variable would have it; empty if it is computed.
    pub fn default_text(&self) -> &'static str {
        match self.default {
            Value(text) => text,
            Computed(..) => "",
        }
    }

    fn default_markdown(&self) -> String {
        match self.default {
            Value("") => "none".into(),
            Value(text) => format!("`{}`", self.toml(text)),
            Computed(description, _) => description.into(),
        }
    }

    fn separator(&self) -> &'static str {
        match self.accepted {
            List(_) => ", comma separated",
            Lines(_) => ", one per line",
            _ => "",
        }
    }

    fn toml(&self, text: &str) -> String {
        match self.accepted {
            Number(..) => text.into(),
            OneOf(_) | Text(_) => format!("{text:?}"),
            List(_) | Lines(_) => {
                format!(
                    "{:?}",
                    text.split(',')
                        .filter(|text| !text.is_empty())
                        .collect::<Vec<_>>()
                )
            }
        }
    }
}

/// The configuration that the package installs: every setting, commented out except for the database.
pub fn sample_file() -> String {
    let mut file = String::from(
        "# The configuration of Adriaticum. See also adriaticum.toml(5). `adriaticum check` tests it.\n\
         #\n\
         # A commented-out setting shows its default. An environment variable overrides a setting: ADRIATICUM_WORKERS for\n\
         # workers, ADRIATICUM_RUNTIME_URL for runtime.url. Changes take effect after `systemctl restart adriaticum`, which\n\
         # refuses no connection; for log_level and the certificate, `systemctl reload adriaticum` is enough.\n",
    );
    let mut table = "";
    for setting in &SETTINGS {
        if setting.table() != table {
            table = setting.table();
            file += &format!("\n[{table}]");
        }
        let (value, default) = match setting.default {
            Value(value) => (value, String::new()),
            Computed(description, value) => (value, format!("Default: {description}.")),
        };
        // The path is absolute, so that commands use the service's database from any folder.
        let (mark, value) = match setting.name {
            "database" => ("", "/var/lib/adriaticum/adriaticum.db"),
            _ => ("#", value),
        };
        let name = setting.name.rsplit('.').next().unwrap_or_default();
        let description = commented(&format!(
            "{} {} {default}",
            setting.summary, setting.details
        ));
        let accepted = commented(&format!("Accepted: {}.", setting.accepted()));
        file += &format!(
            "\n{description}{accepted}{mark}{name} = {}\n",
            setting.toml(value)
        );
    }
    file
}

/// Breaks a text into lines of a comment.
fn commented(text: &str) -> String {
    let mut lines = String::new();
    let mut line = String::from("#");
    for word in text.split_whitespace() {
        if line.len() + word.len() >= 120 {
            lines += &format!("{line}\n");
            line = "#".into();
        }
        line += &format!(" {word}");
    }
    lines + &line + "\n"
}

/// The table of docs/configuration.md.
pub fn markdown_table() -> String {
    let mut table =
        String::from("| setting | environment | default | accepted | |\n|---|---|---|---|---|\n");
    for setting in &SETTINGS {
        table += &format!(
            "| `{}` | `{}`{} | {} | {} | {} |\n",
            setting.name,
            setting.variable(),
            setting.separator(),
            setting.default_markdown(),
            setting.accepted(),
            setting.summary,
        );
    }
    table
}

/// The manual page adriaticum.toml(5).
pub fn manual_page() -> String {
    let mut page = MANUAL_START.to_owned();
    for setting in &SETTINGS {
        page += &format!(
            ".TP\n{}\n{}\n",
            roff(&format!(
                "`{}` (`{}`{}), {}",
                setting.name,
                setting.variable(),
                setting.separator(),
                setting.default_markdown()
            )),
            roff(setting.summary),
        );
        if !setting.details.is_empty() {
            page += &format!("{}\n", roff(setting.details));
        }
        page += &format!("Accepted: {}.\n", roff(&setting.accepted()));
    }
    page + MANUAL_END
}

/// Escapes a line of text; code becomes bold.
fn roff(text: &str) -> String {
    let plain = text.replace('\\', "\\e").replace('-', "\\-");
    let fonts = ["", "\\fB", "\\fR"]
        .into_iter()
        .chain(["\\fB", "\\fR"].into_iter().cycle());
    let line: String = plain
        .split('`')
        .zip(fonts)
        .flat_map(|(part, font)| [font, part])
        .collect();
    // A dot or an apostrophe would begin a command.
    if line.starts_with(['.', '\'']) {
        format!("\\&{line}")
    } else {
        line
    }
}

const MANUAL_START: &str = r#".TH ADRIATICUM.TOML 5 "" "Adriaticum" "File Formats"
.ad l
.SH NAME
adriaticum.toml \- the configuration of adriaticum
.SH DESCRIPTION
The configuration is TOML.
It is read from the file given with \fB\-\-config\fR, else from the file named by \fBADRIATICUM_CONFIG\fR, else from
\fI/etc/adriaticum/adriaticum.toml\fR if it exists.
Without a file, all settings have their defaults.
An environment variable overrides the file.
Unknown names in the file, wrong types and values out of range stop the program with a message that lists every problem at
once: the file and line or the variable, the value found (unless it may be a secret) and what is accepted.
For a misspelt name it suggests the right one.
An unknown variable whose name begins with \fBADRIATICUM_\fR is only a warning.
.PP
A name with a dot is a setting in a table: \fBruntime.url\fR is \fBurl\fR under \fB[runtime]\fR.
.PP
Changes take effect after a restart. \fBsystemctl reload adriaticum\fR (SIGHUP) is enough for \fBlog_level\fR,
\fBtls.cert\fR and \fBtls.key\fR.
.SH SETTINGS
"#;

const MANUAL_END: &str = r#".SH POSTGRESQL
The URI of a database may name several hosts; the gateway uses the one that accepts writes.
Its parameters are \fBhost\fR, \fBport\fR, \fBuser\fR, \fBpassword\fR, \fBdbname\fR, \fBsslmode\fR
(\fBdisable\fR, \fBrequire\fR, \fBverify\-ca\fR, \fBverify\-full\fR), \fBsslrootcert\fR, \fBconnect_timeout\fR (seconds for
one host, 1) and \fBtarget_session_attrs\fR (\fBread\-write\fR).
Without \fBsslmode\fR it is \fBverify\-full\fR if there is an \fBsslrootcert\fR, else \fBrequire\fR, and for a host of the
same machine \fBdisable\fR.
\fBrequire\fR does not check the certificate; instead the server has to prove with SCRAM\-SHA\-256\-PLUS that it knows the
password.
.PP
Only one \fBserve\fR can use a SQLite file. Any number can use a PostgreSQL database, each under its own name
(\fBgateway\fR).
Transaction poolers such as PgBouncer are not supported.
.PP
The index of documents for Search is always a file on each gateway: beside the SQLite file, or with PostgreSQL
\fIadriaticum\-search.db\fR in the current folder, which is \fI/var/lib/adriaticum\fR for the systemd service.
.SH EXAMPLE
.nf
database = "/var/lib/adriaticum/adriaticum.db"
api_hosts = ["llm.example.org"]
workers = 4

[runtime]
url = "http://127.0.0.1:8081/v1"
.fi
.SH SEE ALSO
\fBadriaticum\fR(1)
"#;

#[cfg(test)]
mod tests {
    use std::{env, fs};

    use super::*;

    #[test]
    fn the_documentation_has_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/configuration.md");
        let page = fs::read_to_string(path).expect("the page should exist");
        let (begin, end) = (
            "<!-- begin of the settings -->\n",
            "<!-- end of the settings -->",
        );
        let (before, rest) = page
            .split_once(begin)
            .expect("the table should have a begin");
        let (_, after) = rest.split_once(end).expect("the table should have an end");
        let expected = format!("{before}{begin}{}{end}{after}", markdown_table());
        if env::var_os("UPDATE_DOCS").is_some() {
            fs::write(path, &expected).expect("the page should be written");
        } else {
            assert!(
                page == expected,
                "run `UPDATE_DOCS=1 cargo test --lib config::` to rewrite {path}"
            );
        }
    }

    #[test]
    fn the_manual_page_is_escaped() {
        assert_eq!(roff("`a-b` c\\d, `e`"), "\\fBa\\-b\\fR c\\ed, \\fBe\\fR");
        assert_eq!(roff("a `b`"), "a \\fBb\\fR");
        assert_eq!(roff(".a"), "\\&.a");
        let page = manual_page();
        let known = [".TH ", ".SH ", ".PP", ".TP", ".nf", ".fi", ".ad l"];
        let is_good = |line: &&str| {
            !line.starts_with('.') || known.iter().any(|macro_name| line.starts_with(macro_name))
        };
        assert_eq!(page.lines().find(|line| !is_good(line)), None);
        assert_eq!(
            page.lines().filter(|line| *line == ".TP").count(),
            SETTINGS.len()
        );
    }
}
