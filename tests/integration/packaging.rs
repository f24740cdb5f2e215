//! The manual page and the completions match the program.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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

/// The text of --help.
struct Help {
    /// Such as `serve` and `keys create`.
    commands: Words,
    server: Server,
}

impl Help {
    fn read() -> Self {
        let server = Server::new(None);
        let help = server.stdout_of(&["--help"]);
        let (_, commands) = help.split_once("Commands:\n").expect("the help should list the commands");
        let commands = commands.lines().take_while(|line| !line.is_empty()).map(command_of).collect();
        Self { commands, server }
    }

    /// The first words of the commands.
    fn groups(&self) -> Words {
        words(self.commands.iter().filter_map(|command| command.split(' ').next()))
    }

    /// The second words of a group's commands.
    fn members(&self, group: &str) -> Words {
        words(self.commands.iter().filter_map(|command| command.strip_prefix(group)?.strip_prefix(' ')))
    }

    /// The options that the help of a group explains, or of the whole program, with what they take.
    fn lines(&self, group: &[&str]) -> Vec<String> {
        let help = self.server.stdout_of(&[group, &["--help"]].concat());
        help.lines().filter_map(|line| Some(line.strip_prefix("  --")?.to_owned())).collect()
    }

    fn options(&self, group: &[&str]) -> Words {
        self.lines(group).iter().map(|line| format!("--{}", line.split(' ').next().unwrap_or(""))).collect()
    }
}

/// The words of a line up to the first placeholder.
fn command_of(line: &str) -> String {
    let plain = |word: &&str| word.bytes().all(|b| b.is_ascii_lowercase());
    // What follows two spaces is the explanation.
    let words = line.trim_start().split("  ").next().unwrap_or_default().split(' ');
    words.take_while(plain).collect::<Vec<_>>().join(" ")
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

fn options_in(text: &str) -> Words {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-')
        .filter(|word| word.len() > 2 && word.starts_with("--"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_manual_has_every_command_and_option() {
    let help = Help::read();
    let page = page("adriaticum.1");
    let printed: Words = section(&page, ".SH SYNOPSIS")
        .lines()
        .filter_map(|line| line.strip_prefix("adriaticum "))
        .map(command_of)
        .collect();
    assert_eq!(printed, help.commands);
    assert_eq!(options_in(section(&page, ".SH OPTIONS")), help.options(&[]));
    for group in help.groups() {
        assert_eq!(options_in(section(&page, &format!(".SS {group}"))), help.options(&[&group]), "{group}");
    }
}

/// What bash would offer after a line.
fn offered(line: &str) -> Words {
    let script = "source \"$1\"; COMP_WORDS=($2 ''); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _adriaticum; \
                  printf '%s\\n' \"${COMPREPLY[@]}\"";
    let output = Command::new("bash")
        .args(["-c", script, "bash"])
        .arg(packaged("adriaticum.bash"))
        .arg(line)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("bash should run");
    assert!(output.status.success() && output.stderr.is_empty(), "{line}: {output:?}");
    String::from_utf8_lossy(&output.stdout).split_whitespace().map(str::to_owned).collect()
}

#[test]
fn bash_completes_every_command_and_option() {
    let help = Help::read();
    let everywhere = help.options(&[]);
    assert_eq!(offered("adriaticum"), &help.groups() | &everywhere);
    for group in help.groups() {
        let members = help.members(&group);
        let mut found = offered(&format!("adriaticum {group}"));
        for member in &members {
            found.extend(offered(&format!("adriaticum {group} {member}")));
        }
        found.retain(|word| word.starts_with("--") || members.contains(word));
        assert_eq!(found, &(&members | &help.options(&[&group])) | &everywhere, "{group}");
        for line in help.lines(&[&group]).iter().chain(&help.lines(&[])) {
            let mut parts = line.split(' ');
            let (option, takes) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
            if takes.bytes().next().is_some_and(|b| b.is_ascii_uppercase()) {
                let after = offered(&format!("adriaticum --{option} x keys"));
                assert!(after.contains("create"), "the value of --{option} is taken for a command");
            }
        }
    }
    assert_eq!(offered("adriaticum usage --by"), words(["hour", "day", "month", "key", "status", "gateway"]));
    assert_eq!(offered("adriaticum keys create x --permission"), words(["completions", "metrics"]));
    for command in ["backup", "restore"] {
        assert!(offered(&format!("adriaticum {command}")).contains("Cargo.toml"), "{command}");
    }
}

#[test]
fn fish_completes_every_command_and_option() {
    let help = Help::read();
    let script = text("adriaticum.fish");
    let mut expected: BTreeSet<(String, String)> =
        help.options(&[]).into_iter().map(|option| (String::new(), option)).collect();
    for group in help.groups() {
        let members = help.members(&group).into_iter();
        expected.extend(members.chain(help.options(&[&group])).map(|word| (group.clone(), word)));
        expected.insert((String::new(), group));
    }
    let mut found = BTreeSet::new();
    for line in script.lines().filter(|line| line.starts_with("complete ")) {
        let (_, place) = line.split_once("__adriaticum_at").unwrap_or((line, "'"));
        let (place, _) = place.split_once('\'').expect("the condition should end");
        let group = place.trim().split(' ').next().unwrap_or_default().to_owned();
        let parts: Vec<&str> = line.split(' ').collect();
        let after = |flag: &str| parts.iter().position(|part| *part == flag).map(|at| parts[at + 1]);
        if let Some(option) = after("-l") {
            found.insert((group, format!("--{option}")));
        } else if let Some(word) = after("-a") {
            found.insert((group, word.to_owned()));
        }
    }
    assert_eq!(found, expected);
}

#[test]
fn zsh_completes_every_command_and_option() {
    let help = Help::read();
    let script = text("adriaticum.zsh");
    let (_, commands) = script.split_once("commands=(\n").expect("the commands should be listed");
    let commands = commands.lines().take_while(|line| line.trim() != ")");
    let names = commands.filter_map(|line| line.trim().strip_prefix('\'')?.split(':').next());
    assert_eq!(words(names), help.groups());
    let mut expected = help.options(&[]);
    for group in help.groups() {
        let members = help.members(&group).into_iter().collect::<Vec<_>>();
        let offers = |line: &str| {
            let list = line.split_once("1:command:(").and_then(|(_, rest)| rest.split_once(')'));
            list.is_some_and(|(list, _)| words(list.split(' ')) == words(members.iter().map(String::as_str)))
        };
        assert!(members.is_empty() || script.lines().any(offers), "{group} {members:?}");
        expected.extend(help.options(&[&group]));
    }
    assert_eq!(options_in(&script), expected);
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
