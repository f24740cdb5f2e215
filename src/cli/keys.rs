//! `keys`: creates, lists, changes and revokes API keys.

use clap::ArgGroup;

use super::audit::actor;
use super::console::read_secret;
use super::error::CliError;
use super::open_store::{open_store, open_with};
use super::output::{print, print_json};
use super::parsers::{one_of, wrong_when};
use super::text_table;
use crate::config::Config;
use crate::database::Access;
use crate::keys::{
    Budget, CONCURRENT_TAKES, Key, KeyBudget, KeyChange, KeyChanged, KeyName, KeyState, NewKey,
    Permission, SecretUse, parse_concurrent,
};
use crate::secret::{contains_secret, new_secret};
use crate::store::Store;
use crate::text::grouped;
use crate::when::{self, When};

/// Create, list, change and revoke API keys
///
/// A change takes effect with the next request.
#[derive(clap::Subcommand)]
pub(super) enum KeysCommand {
    /// Create an API key and print its secret, once
    ///
    /// Only the secret is printed on standard output. It is not stored and can't be printed again.
    Create {
        /// The new key's name
        #[arg(value_parser = parse_name)]
        name: KeyName,
        #[command(flatten)]
        terms: Terms,
    },
    /// List the keys
    List {
        /// Only keys in this state; those that expire within ten days are expiring
        #[arg(long, value_parser = one_of(KeyState::ALL.map(|state| (state.as_str(), state))))]
        state: Option<KeyState>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Rename a key
    Rename {
        /// The key's id, or its name if no other key has it
        key: String,
        /// Its new name
        #[arg(value_parser = parse_name)]
        name: KeyName,
    },
    /// Revoke a key permanently
    ///
    /// Standard input keeps a leaked secret out of the list of processes and the history of the
    /// shell: without an argument, or with -, its first line is read, or asked for on a terminal.
    Revoke {
        /// The key's id, its secret, or its name if no other key has it
        #[arg(value_name = "KEY|SECRET")]
        key: Option<String>,
    },
    /// Change a key's permissions, expiry, concurrency or budget
    ///
    /// Only what the options name is changed. A revoked key can't be changed.
    #[command(override_usage = "adriaticum keys set [OPTIONS] <KEY>")]
    #[command(group = ArgGroup::new("changes").args(TERMS).required(true).multiple(true))]
    Set {
        /// The key's id, or its name if no other key has it
        key: String,
        #[command(flatten)]
        terms: Terms,
    },
}

/// `keys set` needs one of them.
const TERMS: [&str; 4] = ["permissions", "expires", "concurrent", "budget"];

/// The options that create and set share.
#[derive(clap::Args)]
pub(super) struct Terms {
    /// What the key may do; repeat the option to give both permissions
    ///
    /// By default, a new key may run completions. With set, the permissions given replace those
    /// that the key has.
    #[arg(long = "permission", value_name = "PERMISSION", value_parser = one_of(Permission::ALL.map(|permission| (permission.as_str(), permission))))]
    permissions: Vec<Permission>,
    /// When the key expires: 12h, 90d, a date (YYYY-MM-DD, UTC), at the end of that day, or never
    #[arg(long, value_name = "WHEN", value_parser = parse_expiry)]
    expires: Option<OrNone<i64>>,
    /// How many of the key's requests a gateway processes at once, 1 to 10000; the others wait.
    /// none, the default: any number
    #[arg(long, value_name = "N", value_parser = or_none(CONCURRENT_TAKES, parse_concurrent))]
    concurrent: Option<OrNone<u32>>,
    /// How many tokens the key may use in a calendar day or month, UTC, over all gateways:
    /// 50000/day, 1000000/month, or none, the default
    ///
    /// A key that has used its budget gets 403 until the next one begins; requests that run at that
    /// moment are completed. Completions for which the runtime reports no total do not count.
    #[arg(long, value_name = "TOKENS/PERIOD", value_parser = or_none(Budget::TAKES, Budget::parse))]
    budget: Option<OrNone<Budget>>,
}

/// A value, or the word `none` or `never`. `clap` would read an `Option<Option<T>>` as an option
/// whose value may be left out.
type OrNone<T> = Option<T>;

fn or_none<T>(
    takes: &'static str,
    parse: impl Fn(&str) -> Option<T> + Clone,
) -> impl Fn(&str) -> Result<OrNone<T>, String> + Clone {
    move |text| match parse(text) {
        None if text != "none" => Err(format!("expected {takes}, or none")),
        value => Ok(value),
    }
}

fn parse_expiry(text: &str) -> Result<OrNone<i64>, String> {
    if text == "never" {
        return Ok(None);
    }
    let now = when::now();
    match When::parse(text)
        .ok_or_else(|| wrong_when(text, ", or never"))?
        .expiry(now)
    {
        expires if expires <= now => Err("it is in the past".into()),
        expires => Ok(Some(expires)),
    }
}

fn parse_name(text: &str) -> Result<KeyName, String> {
    KeyName::parse(text).ok_or_else(|| format!("a key's name has {}", KeyName::TAKES))
}

impl KeysCommand {
    pub fn run(self, config: &Config) -> Result<(), CliError> {
        match self {
            Self::Create { name, terms } => create(&name, terms, config),
            Self::List { state, json } => list(state, json, config),
            Self::Rename { key, name } => rename(&key, name, config),
            Self::Revoke { key } => revoke(key, config),
            Self::Set { key, terms } => set(&key, terms, config),
        }
    }
}

fn create(name: &KeyName, mut terms: Terms, config: &Config) -> Result<(), CliError> {
    if terms.permissions.is_empty() {
        terms.permissions.push(Permission::Completions);
    }
    let store = open_with(config, Access::Create)?;
    let secret = new_secret();
    let key = NewKey {
        name,
        permissions: &unique(&terms.permissions),
        created: when::now(),
        expires: terms.expires.flatten(),
        concurrent: terms.concurrent.flatten(),
        budget: terms.budget.flatten(),
    };
    let id = store.keys.add(&secret, &key, &actor())?;
    print(&(secret + "\n"))?;
    eprintln!(
        "Created {id} in {}. The secret above is not stored: save it now.",
        config.database_name()
    );
    print_terms(&store, &id);
    warn_of_namesakes(&store, &id);
    Ok(())
}

fn list(state: Option<KeyState>, json: bool, config: &Config) -> Result<(), CliError> {
    let mut keys = open_store(config)?.keys.list()?;
    let (is_empty, now) = (keys.is_empty(), when::now());
    keys.retain(|key| state.is_none_or(|state| key.state(now) == state));
    if json {
        return print_json(&keys);
    }
    match state {
        _ if is_empty => {
            eprintln!("There are no keys yet. Create one: adriaticum keys create NAME")
        }
        Some(state) if keys.is_empty() => eprintln!("No key is {}.", state.as_str()),
        _ => {
            let heading =
                "id,name,secret,state,permissions,created,expires,last used,concurrent,budget";
            print(&text_table::with_heading(
                heading,
                keys.iter().map(|key| row(key, now)),
            ))?;
        }
    }
    Ok(())
}

fn row(key: &Key, now: i64) -> Vec<String> {
    let state = key.state(now).as_str();
    let used = |KeyBudget { budget, used }| {
        format!(
            "{} of {}/{}",
            grouped(used),
            grouped(budget.tokens),
            budget.per.as_str()
        )
    };
    vec![
        key.id.clone(),
        key.name.clone(),
        key.hint.clone().unwrap_or_else(|| "-".into()),
        key.revoked.map_or(state.into(), |time| {
            format!("{state} {}", when::format_minute(Some(time)))
        }),
        Permission::join(&key.permissions),
        when::format_minute(Some(key.created)),
        when::format_minute(key.expires),
        when::format_minute(key.last_used),
        key.concurrent
            .map_or_else(|| "-".into(), |number| number.to_string()),
        key.budget.map_or_else(|| "-".into(), used),
    ]
}

fn rename(text: &str, name: KeyName, config: &Config) -> Result<(), CliError> {
    let store = open_with(config, Access::Existing)?;
    let id = find(&store, text, SecretUse::Refused)?.id;
    change(&store, &id, &[KeyChange::Name(name)])?;
    eprintln!("Renamed {id} in {}.", config.database_name());
    warn_of_namesakes(&store, &id);
    Ok(())
}

fn revoke(text: Option<String>, config: &Config) -> Result<(), CliError> {
    let text = match text.filter(|text| text != "-") {
        Some(text) => text,
        None => read_secret("The key's secret, id or name: ")?
            .trim()
            .to_owned(),
    };
    if text.is_empty() {
        return Err(CliError::usage("KEY or SECRET is missing."));
    }
    let (store, database) = (open_with(config, Access::Existing)?, config.database_name());
    let Key {
        id, name, revoked, ..
    } = find(&store, &text, SecretUse::Accepted)?;
    if let Some(since) = revoked {
        eprintln!(
            "{id} ({name}) in {database} is revoked already, since {}.",
            when::format_minute(Some(since))
        );
        return Ok(());
    }
    store.keys.revoke(&id, when::now(), &actor())?;
    eprintln!("Revoked {id} ({name}) in {database}.");
    Ok(())
}

fn set(text: &str, terms: Terms, config: &Config) -> Result<(), CliError> {
    let permissions =
        Some(unique(&terms.permissions)).filter(|permissions| !permissions.is_empty());
    let changes: Vec<KeyChange> = [
        permissions.map(KeyChange::Permissions),
        terms.expires.map(KeyChange::Expires),
        terms.concurrent.map(KeyChange::Concurrent),
        terms.budget.map(KeyChange::Budget),
    ]
    .into_iter()
    .flatten()
    .collect();
    let store = open_with(config, Access::Existing)?;
    let Key { id, revoked, .. } = find(&store, text, SecretUse::Refused)?;
    if let Some(since) = revoked {
        let since = when::format_minute(Some(since));
        return Err(CliError::failed(format!(
            "{id} is revoked since {since}, for good. Create another key: adriaticum keys create NAME"
        )));
    }
    change(&store, &id, &changes)?;
    eprintln!("Changed {id} in {}.", config.database_name());
    print_terms(&store, &id);
    Ok(())
}

/// Finds the one key that a text means.
pub(super) fn find(store: &Store, text: &str, secret: SecretUse) -> Result<Key, CliError> {
    let mut keys = store.keys.resolve(text, secret)?;
    if keys.len() > 1 {
        let hint = |key: &Key| {
            format!(
                "{} ({})",
                key.id,
                key.hint.as_deref().unwrap_or("secret unknown")
            )
        };
        let ids: Vec<String> = keys.iter().map(hint).collect();
        let count = ids.len();
        return Err(CliError::failed(format!(
            "{count} keys have that name. Use the id: {}.",
            ids.join(", ")
        )));
    }
    keys.pop().ok_or_else(|| no_such_key(text, secret))
}

fn change(store: &Store, id: &str, changes: &[KeyChange]) -> Result<(), CliError> {
    match store.keys.change(id, None, changes, &actor())? {
        KeyChanged::Done => Ok(()),
        KeyChanged::NoSuchKey | KeyChanged::Meanwhile(_) => {
            Err(no_such_key(id, SecretUse::Refused))
        }
    }
}

/// Prints what a key may do. The command has done its work, so it does not fail if the key can't be
/// read again.
fn print_terms(store: &Store, id: &str) {
    if let Ok(Some(key)) = store.keys.get(id) {
        eprintln!("{}", key.in_words(when::now()));
    }
}

/// Warns if the name of a new or renamed key means other keys too.
fn warn_of_namesakes(store: &Store, id: &str) {
    let Ok(Some(key)) = store.keys.get(id) else {
        return;
    };
    let mut others = store
        .keys
        .resolve(&key.name, SecretUse::Refused)
        .unwrap_or_default();
    others.retain(|other| other.id != id && other.revoked.is_none());
    if !others.is_empty() {
        let ids: Vec<String> = others.into_iter().map(|other| other.id).collect();
        eprintln!(
            "Warning: this is also the name of {}. Commands need the id then.",
            ids.join(", ")
        );
    }
}

/// Each permission once.
fn unique(given: &[Permission]) -> Vec<Permission> {
    let all = Permission::ALL.into_iter();
    all.filter(|permission| given.contains(permission))
        .collect()
}

/// A text that may be a secret, whole or in part, is not repeated.
fn no_such_key(text: &str, secret: SecretUse) -> CliError {
    let message = match secret {
        SecretUse::Accepted => "there is no key with that id, secret or name.".into(),
        SecretUse::Refused if contains_secret(text) => {
            "there is no key with that id or name; only keys revoke takes a secret.".into()
        }
        SecretUse::Refused => format!("there is no key {text:?}."),
    };
    CliError::failed(format!("{message} List the keys: adriaticum keys list"))
}
