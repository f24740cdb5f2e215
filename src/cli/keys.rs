//! `keys`: creates, lists, changes, rotates and revokes API keys.

use clap::ArgGroup;

use super::console::read_secret;
use super::shared::{expecting, one_of, open_store, open_to_change, print, print_json, wrong_when};
use crate::audit::Actor;
use crate::config::Config;
use crate::database::{Access, Problem, Result};
use crate::keys::{
    self, Budget, CONCURRENT_TAKES, Key, KeyChanged, KeyName, KeyState, KeyTerms, LONGEST_OVERLAP,
    Permission, parse_concurrent,
};
use crate::ledger::Sums;
use crate::report::query::Query;
use crate::report::rows::{self, KeyRow};
use crate::secret::{SecretDigest, contains_secret, new_secret};
use crate::store::Store;
use crate::when::{self, DAY, When, Zone};

/// Create, list, change, rotate and revoke API keys
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
        /// The key's id, or its name if no other active key has it
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
        /// The key's id, its secret, or its name if no other active key has it
        #[arg(value_name = "KEY|SECRET")]
        key: Option<String>,
    },
    /// Replace a key's secret and print the new one, once
    ///
    /// Id, name, terms, used budget and usage stay. The former secret is refused from the next
    /// request on or, with --overlap, after that time; then a planned change needs no outage.
    /// Another rotation without --overlap ends an overlap at once, and so does a revocation; one
    /// with --overlap is refused until it has ended. The secret of a leaked key is read as for
    /// revoke.
    Rotate {
        /// The key's id, its secret, or its name if no other active key has it
        #[arg(value_name = "KEY|SECRET")]
        key: Option<String>,
        /// How long the former secret works, at most 30d: 90m, 24h, 7d
        #[arg(long, value_name = "DURATION", value_parser = expecting("a duration of at most 30 days, such as 24h or 7d", parse_overlap))]
        overlap: Option<i64>,
    },
    /// Change a key's permissions, expiry, concurrency or budget
    ///
    /// Only what the options name is changed. A revoked key can't be changed.
    #[command(override_usage = "adriaticum keys set [OPTIONS] <KEY>")]
    #[command(group = ArgGroup::new("changes").args(TERMS).required(true).multiple(true))]
    Set {
        /// The key's id, or its name if no other active key has it
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
    /// When the key expires: 12h, 90d, a date (YYYY-MM-DD), at the end of that day, or never
    #[arg(long, value_name = "WHEN", value_parser = parse_expiry)]
    expires: Option<OrNone<When>>,
    /// How many of the key's requests a gateway processes at once, 1 to 10000; the others wait.
    /// none, the default: any number
    #[arg(long, value_name = "N", value_parser = or_none(CONCURRENT_TAKES, parse_concurrent))]
    concurrent: Option<OrNone<u32>>,
    /// How many tokens the key may use in a calendar day or month, over all gateways:
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

fn parse_expiry(text: &str) -> Result<OrNone<When>, String> {
    if text == "never" {
        return Ok(None);
    }
    let when = When::parse(text).ok_or_else(|| wrong_when(text, ", or never"))?;
    Ok(Some(when))
}

fn parse_overlap(text: &str) -> Option<i64> {
    let seconds = match When::parse(text)? {
        When::Seconds(seconds) => seconds,
        When::Days(days) => days * DAY,
        _ => return None,
    };
    Some(seconds).filter(|seconds| *seconds <= LONGEST_OVERLAP)
}

impl Terms {
    /// Changes what the options name.
    fn apply(&self, terms: &mut KeyTerms, expires: Option<OrNone<i64>>) {
        if !self.permissions.is_empty() {
            // Each once.
            let all = Permission::ALL.into_iter();
            terms.permissions = all.filter(|one| self.permissions.contains(one)).collect();
        }
        terms.expires = expires.unwrap_or(terms.expires);
        terms.concurrent = self.concurrent.unwrap_or(terms.concurrent);
        terms.budget = self.budget.unwrap_or(terms.budget);
    }

    fn expiry(&self, zone: &Zone) -> Result<Option<OrNone<i64>>> {
        let Some(Some(when)) = self.expires else {
            return Ok(self.expires.map(|_| None));
        };
        let now = when::now();
        match when.expiry(now, zone) {
            Ok(expires) if expires > now => Ok(Some(Some(expires))),
            Ok(_) => Err(Problem::usage("--expires: it is in the past")),
            Err(message) => Err(Problem::usage(format!("--expires: {message}"))),
        }
    }
}

fn parse_name(text: &str) -> Result<KeyName, String> {
    KeyName::parse(text).ok_or_else(|| format!("a key's name has {}", KeyName::TAKES))
}

impl KeysCommand {
    pub fn run(self, config: &Config, by: &Actor) -> Result<()> {
        match self {
            Self::Create { name, terms } => create(&name, &terms, config, by),
            Self::List { state, json } => list(state, json, config),
            Self::Rename { key, name } => rename(&key, name, config, by),
            Self::Revoke { key } => revoke(key, config, by),
            Self::Rotate { key, overlap } => rotate(key, overlap, config, by),
            Self::Set { key, terms } => set(&key, terms, config, by),
        }
    }
}

fn create(name: &KeyName, given: &Terms, config: &Config, by: &Actor) -> Result<()> {
    let store = open_to_change(config, Access::Create, by)?;
    let mut terms = KeyTerms {
        permissions: vec![Permission::Completions],
        expires: None,
        concurrent: None,
        budget: None,
    };
    given.apply(&mut terms, given.expiry(&store.zone)?);
    let (id, secret) = (keys::new_id(), new_secret());
    if !store.keys.add(&id, &secret, name, &terms, by)? {
        return Err(Problem::other(format!("the id {id} is taken. Try again")));
    }
    print(&(secret + "\n"))?;
    eprintln!(
        "Created {id} in {}. The secret above is not stored: save it now.",
        config.database_name()
    );
    print_terms(&store, &id);
    warn_of_namesakes(&store, &id);
    Ok(())
}

fn list(state: Option<KeyState>, json: bool, config: &Config) -> Result<()> {
    let store = open_store(config)?;
    let mut keys = store.keys.list()?;
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
            let rows: Vec<KeyRow> = keys.into_iter().map(|key| (key, Sums::default())).collect();
            let query = Query::none(&store.zone);
            let columns =
                "id,name,secret,state,permissions,created,expires,last used,concurrent,budget";
            print(&rows::keys(&rows, now, &query).to_text(columns))?;
        }
    }
    Ok(())
}

fn rename(text: &str, name: KeyName, config: &Config, by: &Actor) -> Result<()> {
    let store = open_to_change(config, Access::Existing, by)?;
    let id = find(&store, text, false)?.id;
    change(
        &store,
        &id,
        move |key| key.name = name.as_str().to_owned(),
        by,
    )?;
    eprintln!("Renamed {id} in {}.", config.database_name());
    warn_of_namesakes(&store, &id);
    Ok(())
}

/// Reads a key or a secret from standard input if the command line has none.
fn key_or_secret(text: Option<String>) -> Result<String> {
    let text = match text.filter(|text| text != "-") {
        Some(text) => text,
        None => read_secret("The key's secret, id or name: ")?
            .trim()
            .to_owned(),
    };
    match text.as_str() {
        "" => Err(Problem::usage("KEY or SECRET is missing")),
        _ => Ok(text),
    }
}

fn revoke(text: Option<String>, config: &Config, by: &Actor) -> Result<()> {
    let text = key_or_secret(text)?;
    let (store, database) = (
        open_to_change(config, Access::Existing, by)?,
        config.database_name(),
    );
    let key = find(&store, &text, true)?;
    let Key { id, name, .. } = &key;
    if key.revoked.is_some() {
        eprintln!(
            "{id} ({name}) in {database} is revoked already, since {}.",
            store.zone.format_minute(key.revoked)
        );
        return Ok(());
    }
    store.keys.revoke(id, when::now(), by)?;
    eprintln!("Revoked {id} ({name}) in {database}.");
    Ok(())
}

fn rotate(text: Option<String>, overlap: Option<i64>, config: &Config, by: &Actor) -> Result<()> {
    let text = key_or_secret(text)?;
    let (store, database) = (
        open_to_change(config, Access::Existing, by)?,
        config.database_name(),
    );
    let Key { id, name, hint, .. } = find(&store, &text, true)?;
    let (secret, now) = (new_secret(), when::now());
    match store.keys.rotate(&id, &secret, overlap, now, by)? {
        KeyChanged::Done => {}
        KeyChanged::NoSuchKey => return Err(no_such_key(&id, true)),
        KeyChanged::Meanwhile(key) => return Err(not_rotated(&key, &store.zone)),
    }
    print(&(secret + "\n"))?;
    let former = overlap.map_or("is refused from now on".into(), |seconds| {
        format!(
            "works until {}",
            store.zone.format_minute(Some(now + seconds))
        )
    });
    eprintln!(
        "Rotated {id} ({name}) in {database}. The secret above is not stored: save it now. The former one, {hint}, {former}."
    );
    Ok(())
}

fn not_rotated(key: &Key, zone: &Zone) -> Problem {
    let Some(overlap) = key.overlap.as_ref().filter(|_| key.revoked.is_none()) else {
        return revoked_for_good(key, zone);
    };
    Problem::other(format!(
        "{} has an overlap already: {} works until {}. To end both secrets now, rotate it without --overlap",
        key.id,
        overlap.hint,
        zone.format_minute(Some(overlap.ends))
    ))
}

fn revoked_for_good(key: &Key, zone: &Zone) -> Problem {
    Problem::other(format!(
        "{} is revoked since {}, for good. Create another key: adriaticum keys create NAME",
        key.id,
        zone.format_minute(key.revoked)
    ))
}

fn set(text: &str, terms: Terms, config: &Config, by: &Actor) -> Result<()> {
    let store = open_to_change(config, Access::Existing, by)?;
    let expires = terms.expiry(&store.zone)?;
    let key = find(&store, text, false)?;
    if key.revoked.is_some() {
        return Err(revoked_for_good(&key, &store.zone));
    }
    change(
        &store,
        &key.id,
        move |key| terms.apply(&mut key.terms, expires),
        by,
    )?;
    eprintln!("Changed {} in {}.", key.id, config.database_name());
    print_terms(&store, &key.id);
    Ok(())
}

/// The ids of the keys that a text means to a report: of a name all, revoked ones too.
pub(super) fn ids(store: &Store, text: &str) -> Result<Vec<String>> {
    let keys = store.keys.named(text)?;
    if keys.is_empty() {
        return Err(no_such_key(text, false));
    }
    Ok(keys.into_iter().map(|key| key.id).collect())
}

/// Finds the one key that a text means to a command that changes it.
fn find(store: &Store, text: &str, takes_secret: bool) -> Result<Key> {
    let (mut keys, revoked): (Vec<Key>, Vec<Key>) = store
        .keys
        .named(text)?
        .into_iter()
        .partition(|key| key.revoked.is_none());
    if keys.is_empty() {
        keys = revoked;
    }
    if keys.len() > 1 {
        let hint = |key: &Key| format!("{} ({})", key.id, key.hint);
        let ids: Vec<String> = keys.iter().map(hint).collect();
        let count = ids.len();
        return Err(Problem::other(format!(
            "{count} keys have that name. Use the id: {}",
            ids.join(", ")
        )));
    }
    if let Some(key) = keys.pop() {
        return Ok(key);
    }
    let now = when::now();
    match store.keys.find(&SecretDigest::of(text), now)? {
        Some((key, Some(ends))) if takes_secret && ends <= now => Err(Problem::other(format!(
            "that secret of {} ({}) was replaced and is refused since {}. To change the key nevertheless, use its id",
            key.id,
            key.name,
            store.zone.format_minute(Some(ends))
        ))),
        Some((key, _)) if takes_secret => Ok(key),
        _ => Err(no_such_key(text, takes_secret)),
    }
}

fn change(
    store: &Store,
    id: &str,
    edit: impl Fn(&mut Key) + Send + 'static,
    by: &Actor,
) -> Result<()> {
    match store.keys.change(id, edit, by)? {
        KeyChanged::Done => Ok(()),
        KeyChanged::NoSuchKey | KeyChanged::Meanwhile(_) => Err(no_such_key(id, false)),
    }
}

/// Prints what a key may do. The command has done its work, so it does not fail if the key can't be
/// read again.
fn print_terms(store: &Store, id: &str) {
    if let Ok(Some(key)) = store.keys.get(id) {
        eprintln!("{}", key.in_words(when::now(), &store.zone));
    }
}

/// Warns if the name of a new or renamed key means other keys too.
fn warn_of_namesakes(store: &Store, id: &str) {
    let Ok(Some(key)) = store.keys.get(id) else {
        return;
    };
    let mut others = store.keys.named(&key.name).unwrap_or_default();
    others.retain(|other| other.id != id && other.revoked.is_none());
    if !others.is_empty() {
        let ids: Vec<String> = others.into_iter().map(|other| other.id).collect();
        eprintln!(
            "Warning: this is also the name of {}. Commands need the id then.",
            ids.join(", ")
        );
    }
}

/// A text that may be a secret, whole or in part, is not repeated.
fn no_such_key(text: &str, takes_secret: bool) -> Problem {
    let message = match takes_secret {
        true => "there is no key with that id, secret or name.".into(),
        false if contains_secret(text) => {
            "there is no key with that id or name; only keys revoke and keys rotate take a secret."
                .into()
        }
        false => format!("there is no key {text:?}."),
    };
    Problem::other(format!("{message} List the keys: adriaticum keys list"))
}
