//! Writes the stop words of six languages into one text, a line for each language. Linked in, the crate's own tables of
//! all languages would add 0.9 MB to the binary.

use std::path::Path;
use std::{env, fs};

/// The language that comes first wins if a query has as many stop words of another one.
const LANGUAGES: [&str; 6] = ["en", "de", "fr", "es", "it", "hr"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let lists = LANGUAGES.map(|language| stop_words::get(language).join(" "));
    let folder = env::var_os("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&folder).join("stop_words.txt"), lists.join("\n"))
        .expect("the folder should take a file");
}
