//! The version of a build.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::Folder;

/// Two builds of one version could not be printed apart.
#[test]
fn a_commit_that_is_not_a_release_is_in_the_version() {
    let folder = Folder::new();
    fs::create_dir(folder.path("packaging")).expect("a folder");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/version");
    fs::copy(script, folder.path("packaging/version")).expect("a copy");
    fs::write(
        folder.path("Cargo.toml"),
        "[package]\nversion = \"1.2.3\"\n",
    )
    .expect("a file");
    let run = |program: &str, arguments: &[&str], set: &str| {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .current_dir(folder.path(""))
            .env("ADRIATICUM_VERSION", set);
        command
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env_remove("GIT_DIR");
        let output = command
            .output()
            .ok()
            .filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let version =
        |set| run("sh", &["packaging/version"], set).expect("it should print the version");
    assert_eq!(
        (version(""), version("9")),
        ("1.2.3".into(), "9".into()),
        "without a repository"
    );
    // The tests may run on a copy of the sources, on a host without git.
    if run("git", &["init", "--quiet"], "").is_some() {
        let git = |arguments: &[&str]| {
            run("git", arguments, "").unwrap_or_else(|| panic!("git {arguments:?}"))
        };
        let commit = [
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "commit",
            "--allow-empty",
            "-qm",
            "x",
        ];
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
