//! `usage show`: one request.

use crate::cli::shared::{open_store, print, print_json};
use crate::config::Config;
use crate::database::{Problem, Result};
use crate::report::rows;
use crate::report::table::facts_to_text;

pub fn run(id: &str, json: bool, config: &Config) -> Result<()> {
    let store = open_store(config)?;
    let row = store
        .ledger
        .find_row(id)?
        .ok_or_else(|| Problem::other(format!("there is no row for {id:?}. {}", rows::NO_ROW)))?;
    if json {
        return print_json(&row);
    }
    let key = store.keys.get(&row.key_id)?;
    let facts = rows::request(&row, key.as_ref(), !row.gateway.is_empty(), &store.zone);
    let meaning = rows::meaning(&row);
    print(&format!(
        "{}\n{meaning}\n{}",
        row.request_id,
        facts_to_text(facts)
    ))
}
