//! Writes the files that are made from the program's own definitions to a folder: `generate FOLDER`.

use std::path::PathBuf;
use std::{env, fs, io};

use adriaticum::config::reference;

fn main() -> io::Result<()> {
    let folder = PathBuf::from(env::args_os().nth(1).expect("the folder should be named"));
    let files =
        [("adriaticum.toml", reference::sample_file()), ("adriaticum.toml.5", reference::manual_page())];
    fs::create_dir_all(&folder)?;
    files.into_iter().try_for_each(|(name, content)| fs::write(folder.join(name), content))
}
