//! The manual pages, the completions, the example configuration and docs/configuration.md match the program.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use adriaticum::config::{Config, SearchConfig};

use crate::support::{Folder, Server};

type Words = BTreeSet<String>;

fn packaged(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging").join(name)
}

fn text(name: &str) -> String {
    fs::read_to_string(packaged(name)).expect("what is packaged should be there")
}

fn words<'a>(words: impl IntoIterator<Item = &'a str>) -> Words {
    words.into_iter().map(str::to_owned).collect()
}

/// A manual page without the marks of its fonts.
fn page(name: &str) -> String {
    ["\\fB", "\\fI", "\\fR"].iter().fold(text(name).replace("\\-", "-"), |page, mark| page.replace(mark, ""))
}

/// From a heading to the next.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let (_, rest) =
        page.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("{heading} is missing"));
    rest.split("\n.S").next().unwrap_or_default()
}

/// Two builds of one version could not be printed apart.
#[test]
fn a_commit_that_is_not_a_release_is_in_the_version() {
    let folder = Folder::new();
    fs::create_dir(folder.path("packaging")).expect("a folder");
    fs::copy(packaged("version"), folder.path("packaging/version")).expect("a copy");
    fs::write(folder.path("Cargo.toml"), "[package]\nversion = \"1.2.3\"\n").expect("a file");
    let run = |program: &str, arguments: &[&str], set: &str| {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(folder.path("")).env("ADRIATICUM_VERSION", set);
        command.env("GIT_CONFIG_GLOBAL", "/dev/null").env_remove("GIT_DIR");
        let output = command.output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let version = |set| run("sh", &["packaging/version"], set).expect("it should print the version");
    assert_eq!((version(""), version("9")), ("1.2.3".into(), "9".into()), "without a repository");
    // The tests may run on a copy of the sources, on a host without git.
    if run("git", &["init", "--quiet"], "").is_some() {
        let git =
            |arguments: &[&str]| run("git", arguments, "").unwrap_or_else(|| panic!("git {arguments:?}"));
        let commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-qm", "x"];
        git(&commit);
        let expected = format!("1.2.3+git.{}", git(&["rev-parse", "--short=12", "HEAD"]));
        assert_eq!(version(""), expected);
        git(&["tag", "v1.2.2"]);
        assert_eq!(version(""), expected, "the tag of another version");
        git(&["tag", "v1.2.3"]);
        assert_eq!(version(""), "1.2.3");
        git(&commit);
        assert_ne!(version(""), "1.2.3", "after the release");
    }
}

/// The settings that the program takes.
fn settings() -> Words {
    let folder = Folder::new();
    let nothing = folder.path("nothing.toml");
    fs::write(&nothing, "").expect("a file");
    let config = Config::load(Some(&nothing)).expect("the defaults should be good");
    config.digests.into_keys().map(String::from).collect()
}

/// The names and values of the example configuration, those that are commented out too.
fn example() -> Vec<(String, String)> {
    let mut table = String::new();
    let mut found = Vec::new();
    for line in text("adriaticum.toml").lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            table = format!("{name}.");
        }
        let line = line.strip_prefix('#').unwrap_or(line);
        if let Some((name, value)) = line.split_once(" = ").filter(|(name, _)| !name.contains(' ')) {
            found.push((format!("{table}{name}"), value.to_owned()));
        }
    }
    found
}

/// Compares what a page says about a setting with the program and the example.
#[track_caller]
fn check_setting(page: &str, name: &str, variable: &str, default: &str) {
    assert_eq!(variable, format!("ADRIATICUM_{}", name.replace('.', "_").to_uppercase()), "{page}");
    let example = example();
    let (_, value) = example.iter().find(|(known, _)| known == name).expect("the example should have it");
    let same = default == value || default == "none" && (value == "\"\"" || value == "[]");
    // These defaults depend on the host, or the example has another value.
    let of_host = ["database", "database_password_file", "buffer_limit", "gateway", "runtime.api_key_file"];
    assert!(same || of_host.contains(&name), "{name}: {default} in {page}, {value} in the example");
}

#[test]
fn the_manual_and_the_example_have_every_setting() {
    let settings = settings();
    assert_eq!(words(example().iter().map(|(name, _)| name.as_str())), settings);
    let page = page("adriaticum.toml.5");
    let mut described = Words::new();
    for line in section(&page, ".SH SETTINGS").lines().filter(|line| line.contains("(ADRIATICUM_")) {
        let (name, rest) = line.split_once(" (").expect("the variable should be in parentheses");
        let (variable, default) = rest.split_once("), ").expect("the default should follow");
        check_setting("adriaticum.toml.5", name, variable.split(',').next().unwrap_or_default(), default);
        described.insert(name.to_owned());
    }
    assert_eq!(described, settings);
}

#[test]
fn the_documentation_has_every_setting() {
    let page = fs::read_to_string(packaged("../docs/configuration.md")).expect("the page should exist");
    let mut described = Words::new();
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, name, variable, default, ..] = cells[..] else { panic!("a row without its columns: {line}") };
        let (name, variable) = (name.trim_matches('`'), variable.split(',').next().unwrap_or_default());
        check_setting("docs/configuration.md", name, variable.trim_matches('`'), default.trim_matches('`'));
        assert!(described.insert(name.to_owned()), "{name} is there twice");
    }
    assert_eq!(described, settings());
}

#[test]
fn the_example_shows_the_defaults() {
    let folder = Folder::new();
    let nothing = folder.path("nothing.toml");
    fs::write(&nothing, "").expect("a file");
    let defaults = Config::load(Some(&nothing)).expect("the defaults should be good");
    let everything = folder.path("everything.toml");
    let uncommented: String = text("adriaticum.toml")
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(setting) if setting.starts_with(|c: char| c.is_ascii_lowercase()) => format!("{setting}\n"),
            _ => format!("{line}\n"),
        })
        .collect();
    fs::write(&everything, uncommented).expect("a file");
    for path in [packaged("adriaticum.toml"), everything] {
        let config = Config::load(Some(&path)).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(config.database.file(), Some(Path::new("/var/lib/adriaticum/adriaticum.db")));
        let search = SearchConfig { index: defaults.search.index.clone(), ..config.search };
        let Config { file, database, buffer_limit, digests, .. } = defaults.clone();
        // The default host is set here, which is more than the same name by default.
        let config =
            Config { console_is_local: true, file, database, buffer_limit, search, digests, ..config };
        assert_eq!(format!("{config:?}"), format!("{defaults:?}"));
    }
    Server::new(None).set("ADRIATICUM_CONFIG", packaged("adriaticum.toml").display()).start();
}
