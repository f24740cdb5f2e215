//! The sample file, the manual page and the table of the documentation, made from the table of the
//! settings.

use adriaticum::config::table::Accepted::{AnyText, Lines, List, Members, Number, OneOf, Text};
use adriaticum::config::table::DefaultValue::{Computed, Implied, Value};
use adriaticum::config::table::{SETTINGS, Setting};

/// The configuration that the package installs: every setting, commented out except for the database.
pub fn sample_file() -> String {
    let mut file = String::from(
        "# The configuration of Adriaticum. See also adriaticum.toml(5). `adriaticum check` tests it.\n\
         #\n\
         # A commented-out setting shows its default. An environment variable overrides a setting: ADRIATICUM_WORKERS for\n\
         # workers, ADRIATICUM_RUNTIME_URL for runtime.url. Changes take effect after `systemctl restart adriaticum`, which\n\
         # refuses no connection; where a setting says so, `systemctl reload adriaticum` is enough.\n",
    );
    let mut table = "";
    for setting in &SETTINGS {
        if setting.table() != table {
            table = setting.table();
            file += &format!("\n[{table}]");
        }
        let (value, default) = match setting.default {
            Value(value) | Implied(value) => (value, String::new()),
            Computed(description, value) => (value, format!("Default: {description}.")),
        };
        // The path is absolute, so that commands use the service's database from any folder.
        let (mark, value) = match setting.name {
            "database" => ("", "/var/lib/adriaticum/adriaticum.db"),
            _ => ("#", value),
        };
        let name = setting.name.rsplit('.').next().unwrap_or_default();
        let description = commented(&format!(
            "{} {}{} {default}",
            setting.summary,
            setting.details,
            reload(setting)
        ));
        let accepted = commented(&format!("Accepted: {}.", setting.accepted()));
        file += &format!(
            "\n{description}{accepted}{mark}{name} = {}\n",
            toml(setting, value)
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
#[cfg(test)]
pub fn markdown_table() -> String {
    let mut table =
        String::from("| setting | environment | default | accepted | |\n|---|---|---|---|---|\n");
    for setting in &SETTINGS {
        table += &format!(
            "| `{}` | `{}`{} | {} | {} | {}{} |\n",
            setting.name,
            setting.variable(),
            separator(setting),
            default_markdown(setting),
            setting.accepted(),
            setting.summary,
            reload(setting),
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
                separator(setting),
                default_markdown(setting)
            )),
            roff(&format!("{}{}", setting.summary, reload(setting))),
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
Changes take effect after a restart. \fBsystemctl reload adriaticum\fR (SIGHUP) is enough for settings that say so, and logs
which others have changed.
.PP
The password of the database and the key for the runtime are better in files of their own.
Without a setting, they are \fIdatabase\-password\fR and \fIruntime\-key\fR in the folder that \fBCREDENTIALS_DIRECTORY\fR
names, as in the systemd service, else in the folder of the configuration.
If a setting and a file that another setting names both have one, it has to be the same.
Only a command that needs a secret reads it: it fails if the file is there and can't be read.
.SH SETTINGS
"#;

const MANUAL_END: &str = r#".SH POSTGRESQL
The URI of a database may name several hosts; the gateway uses the one that accepts writes.
Its parameters are \fBsslmode\fR and \fBsslrootcert\fR, a PEM file with the CAs that are trusted instead of the system's.
With \fBsslmode=verify\-full\fR, the default, the server's certificate has to be signed by one of them for the name of the host.
\fBdisable\fR, the default for a Unix socket and for loopback addresses without an \fBsslrootcert\fR, is plain text.
.PP
Only one \fBserve\fR can use a SQLite file. Any number can use a PostgreSQL database, each under its own name
(\fBgateway\fR).
Transaction poolers such as PgBouncer are not supported.
.PP
The index of a folder (\fBsearch.url\fR) is always a file on each gateway: beside the SQLite file, or with PostgreSQL
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

fn default_markdown(setting: &Setting) -> String {
    match setting.default {
        Value("") => "none".into(),
        Value(text) | Implied(text) => format!("`{}`", toml(setting, text)),
        Computed(description, _) => description.into(),
    }
}

fn reload(setting: &Setting) -> &'static str {
    match setting.is_reloaded {
        true => " A reload applies it.",
        false => "",
    }
}

fn separator(setting: &Setting) -> &'static str {
    match setting.accepted {
        List(_) => ", comma separated",
        Lines(_) => ", one per line",
        Members(_) => ", a JSON object",
        _ => "",
    }
}

fn toml(setting: &Setting, text: &str) -> String {
    match setting.accepted {
        Number(..) => text.into(),
        Members(_) => "{}".into(),
        OneOf(_) | Text(_) | AnyText(_) => format!("{text:?}"),
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

#[cfg(test)]
mod tests {
    use std::{env, fs};

    use adriaticum::config::{Config, SecretsNeeded};

    use super::*;
    use crate::support::Folder;

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
                "run `UPDATE_DOCS=1 cargo test --test integration settings::` to rewrite {path}"
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

    /// Every setting of the table is read, or `finish` panics.
    #[test]
    fn the_sample_file_has_every_setting_with_its_default() {
        let folder = Folder::new();
        let read = |text: &str| {
            let path = folder.path("a.toml");
            fs::write(&path, text).expect("a file");
            Config::load(Some(&path), SecretsNeeded::All).unwrap_or_else(|error| panic!("{error}"))
        };
        let sample = sample_file();
        let uncomment = |line: &str| match line.strip_prefix('#') {
            Some(setting) if setting.starts_with(|c: char| c.is_ascii_lowercase()) => {
                format!("{setting}\n")
            }
            _ => format!("{line}\n"),
        };
        let everything: String = sample.lines().map(uncomment).collect();
        assert_eq!(
            everything
                .lines()
                .filter(|line| !line.is_empty() && !line.starts_with(['#', '[']))
                .count(),
            SETTINGS.len()
        );
        let defaults = read("");
        assert_eq!(defaults.differences(&read(&sample)), ["database"]);
        // The default zone and host are set here, which is more than the same names by default; the
        // default limit depends on the host.
        assert_eq!(
            defaults.differences(&read(&everything)),
            [
                "database",
                "time_zone",
                "console_host",
                "buffer_limit",
                "runtime.parameters"
            ]
        );
    }
}
