//! Names the version, and writes the stop words of six languages into one text, a line for each language. Linked in, the
//! crate's own tables of all languages would add 0.9 MB to the binary.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// The earlier language takes precedence if a query has as many stop words of another one.
const LANGUAGES: [&str; 6] = ["en", "de", "fr", "es", "it", "hr"];

/// Files that every commit, checkout and tag changes. Then only this package is built again, not its libraries.
const GIT_FILES: [&str; 2] = ["logs/HEAD", "refs/tags"];

fn main() {
    for path in ["build.rs", "packaging/version"] {
        println!("cargo::rerun-if-changed={path}");
    }
    println!("cargo::rerun-if-env-changed=ADRIATICUM_VERSION");
    if Path::new(".git").exists() {
        let paths = GIT_FILES.map(|file| {
            output(
                "git",
                &["-c", "safe.directory=*", "rev-parse", "--git-path", file],
            )
        });
        // For Cargo, a missing file has changed.
        for path in paths
            .into_iter()
            .flatten()
            .filter(|path| Path::new(path).exists())
        {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    let version =
        output("sh", &["packaging/version"]).expect("packaging/version should print the version");
    println!("cargo::rustc-env=ADRIATICUM_VERSION={version}");
    let lists = LANGUAGES.map(|language| stop_words::get(language).join(" "));
    let folder = env::var_os("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&folder).join("stop_words.txt"), lists.join("\n"))
        .expect("the folder should take a file");
}

/// Runs a program and returns its output without the end of the line; `None` if it fails.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
