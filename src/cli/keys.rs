//! `keys` and `console password`: creates, lists, changes, rotates and revokes API keys, and sets the
//! operator's password.

use std::io::{self, IsTerminal};

use clap::ArgGroup;

use super::shared::{
    expecting, note, open_store, open_to_change, print, print_json, read_secret, time_or,
};
use crate::audit::Actor;
use crate::config::Config;
use crate::console::password;
use crate::database::Access;
use crate::error::{Problem, Result};
use crate::keys::{
    self, Budget, CONCURRENT_TAKES, Key, KeyChanged, KeyName, KeyState, KeyTerms, LONGEST_OVERLAP,
    Overlap, Permission, parse_concurrent,
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
        #[arg(value_parser = expecting(KeyName::TAKES, KeyName::parse))]
        name: KeyName,
        #[command(flatten)]
        terms: Terms,
    },
    /// List the keys
    List {
        /// Only keys in this state
        #[arg(long)]
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
        #[arg(value_parser = expecting(KeyName::TAKES, KeyName::parse))]
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
    #[arg(long = "permission", value_name = "PERMISSION")]
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
    match text {
        "never" => Ok(None),
        _ => time_or(", or never")(text).map(Some),
    }
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
    /// Returns the change of what the options name.
    fn change(self, zone: &Zone) -> Result<impl Fn(&mut KeyTerms) + Send + use<>> {
        let now = when::now();
        let expires = self.expires.flatten().map(|when| when.expiry(now, zone));
        let expires = match expires.transpose() {
            Ok(Some(expires)) if expires <= now => Err("it is in the past".into()),
            expires => expires,
        };
        let expires = expires.map_err(|reason| Problem::usage(format!("--expires: {reason}")))?;
        let expires = self.expires.map(|_| expires);
        // Each once.
        let mut permissions = Permission::ALL.to_vec();
        permissions.retain(|permission| self.permissions.contains(permission));
        Ok(move |terms: &mut KeyTerms| {
            if !permissions.is_empty() {
                terms.permissions.clone_from(&permissions);
            }
            terms.expires = expires.unwrap_or(terms.expires);
            terms.concurrent = self.concurrent.unwrap_or(terms.concurrent);
            terms.budget = self.budget.unwrap_or(terms.budget);
        })
    }
}

impl KeysCommand {
    pub fn run(self, config: &Config, by: &Actor) -> Result<()> {
        let open = |access| -> Result<KeyEditor> {
            let (store, database) = (open_to_change(config, access, by)?, config.database_name());
            Ok(KeyEditor {
                store,
                database,
                by,
            })
        };
        match self {
            Self::List { state, json } => list(state, json, config),
            Self::Create { name, terms } => open(Access::Create)?.create(&name, terms),
            Self::Rename { key, name } => open(Access::Existing)?.rename(&key, name),
            Self::Revoke { key } => open(Access::Existing)?.revoke(key),
            Self::Rotate { key, overlap } => open(Access::Existing)?.rotate(key, overlap),
            Self::Set { key, terms } => open(Access::Existing)?.set(&key, terms),
        }
    }
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
        _ if is_empty => note("There are no keys yet. Create one: adriaticum keys create NAME"),
        Some(state) if keys.is_empty() => note(format!("No key is {}.", state.as_str())),
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

/// Changes keys, and says what was done and in which database.
struct KeyEditor<'a> {
    store: Store,
    database: String,
    by: &'a Actor,
}

impl KeyEditor<'_> {
    fn create(&self, name: &KeyName, given: Terms) -> Result<()> {
        let mut terms = KeyTerms {
            permissions: vec![Permission::Completions],
            expires: None,
            concurrent: None,
            budget: None,
        };
        given.change(&self.store.zone)?(&mut terms);
        let (id, secret) = (keys::new_id(), new_secret());
        if !self.store.keys.add(&id, &secret, name, &terms, self.by)? {
            return Err(Problem::other(format!("the id {id} is taken. Try again")));
        }
        print(&(secret + "\n"))?;
        note(format!("Created {id} in {}. {SAVE_SECRET}", self.database));
        self.describe(&id);
        Ok(())
    }

    fn rename(&self, text: &str, name: KeyName) -> Result<()> {
        let rename = move |key: &mut Key| key.name = name.as_str().to_owned();
        self.change(self.find(text, false)?, "Renamed", rename)
    }

    fn set(&self, text: &str, terms: Terms) -> Result<()> {
        let set = terms.change(&self.store.zone)?;
        let key = self.find(text, false)?;
        if key.revoked.is_some() {
            return Err(self.cannot_change(&key));
        }
        self.change(key, "Changed", move |key| set(&mut key.terms))
    }

    fn change(
        &self,
        Key { id, .. }: Key,
        done: &str,
        edit: impl Fn(&mut Key) + Send + 'static,
    ) -> Result<()> {
        self.expect_done(self.store.keys.change(&id, edit, self.by)?)?;
        note(format!("{done} {id} in {}.", self.database));
        self.describe(&id);
        Ok(())
    }

    fn revoke(&self, text: Option<String>) -> Result<()> {
        let Key {
            id, name, revoked, ..
        } = self.find(&key_or_secret(text)?, true)?;
        let key = format!("{id} ({name}) in {}", self.database);
        if revoked.is_some() {
            let since = self.store.zone.format_minute(revoked);
            note(format!("{key} is revoked already, since {since}."));
            return Ok(());
        }
        self.expect_done(self.store.keys.revoke(&id, when::now(), self.by)?)?;
        note(format!("Revoked {key}."));
        Ok(())
    }

    fn rotate(&self, text: Option<String>, overlap: Option<i64>) -> Result<()> {
        let Key { id, name, hint, .. } = self.find(&key_or_secret(text)?, true)?;
        let (secret, now) = (new_secret(), when::now());
        self.expect_done(
            self.store
                .keys
                .rotate(&id, &secret, overlap, now, self.by)?,
        )?;
        print(&(secret + "\n"))?;
        let ends = overlap.map(|seconds| self.store.zone.format_minute(Some(now + seconds)));
        let former = ends.map_or("is refused from now on".into(), |ends| {
            format!("works until {ends}")
        });
        note(format!(
            "Rotated {id} ({name}) in {}. {SAVE_SECRET} The former one, {hint}, {former}.",
            self.database
        ));
        Ok(())
    }

    /// Finds the one key that a text means.
    fn find(&self, text: &str, takes_secret: bool) -> Result<Key> {
        let mut keys = self.store.keys.named(text)?;
        if keys.iter().any(|key| key.revoked.is_none()) {
            keys.retain(|key| key.revoked.is_none());
        }
        if let [_, _, ..] = keys[..] {
            let ids: Vec<String> = keys
                .iter()
                .map(|key| format!("{} ({})", key.id, key.hint))
                .collect();
            return Err(Problem::other(format!(
                "{} keys have that name. Use the id: {}",
                ids.len(),
                ids.join(", ")
            )));
        }
        if let Some(key) = keys.pop() {
            return Ok(key);
        }
        let now = when::now();
        match self.store.keys.find(&SecretDigest::of(text), now)? {
            Some((key, Some(ends))) if takes_secret && ends <= now => Err(Problem::other(format!(
                "that secret of {} ({}) was replaced and is refused since {}. To change the key nevertheless, use its id",
                key.id,
                key.name,
                self.store.zone.format_minute(Some(ends))
            ))),
            Some((key, _)) if takes_secret => Ok(key),
            _ => Err(no_such_key(text, takes_secret)),
        }
    }

    fn expect_done(&self, changed: KeyChanged) -> Result<()> {
        match changed {
            KeyChanged::Done => Ok(()),
            KeyChanged::NoSuchKey => Err(Problem::other(
                "the key does not exist any more. List the keys: adriaticum keys list",
            )),
            KeyChanged::Meanwhile(key) => Err(self.cannot_change(&key)),
        }
    }

    fn cannot_change(
        &self,
        Key {
            id,
            revoked,
            overlap,
            ..
        }: &Key,
    ) -> Problem {
        let minute = |time| self.store.zone.format_minute(time);
        Problem::other(match (revoked, overlap) {
            (None, Some(Overlap { hint, ends })) => format!(
                "{id} has an overlap already: {hint} works until {}. To end both secrets now, rotate it without --overlap",
                minute(Some(*ends))
            ),
            _ => format!(
                "{id} is revoked since {}, for good. Create another key: adriaticum keys create NAME",
                minute(*revoked)
            ),
        })
    }

    /// Says what a key may do, and warns if its name means other keys too. The change is done, so
    /// this does not fail if the key can't be read again.
    fn describe(&self, id: &str) {
        let keys = &self.store.keys;
        let Ok(Some(key)) = keys.get(id) else {
            return;
        };
        note(key.in_words(when::now(), &self.store.zone));
        let mut others = keys.named(&key.name).unwrap_or_default();
        others.retain(|other| other.id != id && other.revoked.is_none());
        let others: Vec<String> = others.into_iter().map(|other| other.id).collect();
        if !others.is_empty() {
            note(format!(
                "Warning: this is also the name of {}. Commands need the id then.",
                others.join(", ")
            ));
        }
    }
}

const SAVE_SECRET: &str = "The secret above is not stored: save it now.";

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

/// The ids of the keys that a text means to a report: of a name all, revoked ones too.
pub(super) fn ids(store: &Store, text: &str) -> Result<Vec<String>> {
    let keys = store.keys.named(text)?;
    if keys.is_empty() {
        return Err(no_such_key(text, false));
    }
    Ok(keys.into_iter().map(|key| key.id).collect())
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

/// Set the console's password
#[derive(clap::Subcommand)]
pub(super) enum ConsoleCommand {
    /// Set the console's password, and end all of its sessions
    ///
    /// The password is asked for twice on the terminal, without an echo. If standard input is not a
    /// terminal, its first line is the password. It has at least 12 characters.
    Password,
}

pub(super) fn set_password(config: &Config, by: &Actor) -> Result<()> {
    let store = open_to_change(config, Access::Create, by)?;
    let text = read_secret("New password for the console: ")?;
    password::check(&text).map_err(Problem::other)?;
    if io::stdin().is_terminal() && read_secret("Repeat it: ")? != text {
        return Err(Problem::other(
            "the two passwords differ. Nothing was changed",
        ));
    }
    password::set(&store, password::hash(&text), by)?;
    let database = config.database_name();
    note(format!(
        "The password is set in {database}. All console sessions have ended: sign in again."
    ));
    Ok(())
}
