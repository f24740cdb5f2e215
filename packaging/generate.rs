//! Writes the files of the package that come from the program's own definitions into a folder: manual pages,
//! completions and the sample configuration.

mod settings;

use std::path::PathBuf;
use std::{env, fs, io};

use adriaticum::cli::definition;
use clap_complete::Shell;

fn main() -> io::Result<()> {
    let folder = PathBuf::from(env::args_os().nth(1).expect("the folder should be named"));
    // Pages of commands that are gone would stay.
    fs::remove_dir_all(&folder).or_else(|error| match error.kind() {
        io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    })?;
    fs::create_dir_all(folder.join("man1"))?;
    // Without pages for `help`.
    clap_mangen::generate_to(
        definition().disable_help_subcommand(true),
        folder.join("man1"),
    )?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut definition(), "adriaticum", &folder)?;
    }
    fs::write(folder.join("adriaticum.toml"), settings::sample_file())?;
    fs::write(folder.join("adriaticum.toml.5"), settings::manual_page())
}
