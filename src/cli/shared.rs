//! What the commands share: the user who runs them, the database, the values of options, and the
//! terminal.
//!
//! The folder of a SQLite database belongs to the service's user. Root becomes that user before it
//! opens anything there: what it creates then belongs to the service, and no link that the
//! service's user puts there leads root to another file.

use std::env;
use std::fmt::Display;
use std::fs;
use std::io::{self, Write};
use std::iter;
use std::os::unix::fs::MetadataExt;
use std::panic::resume_unwind;
use std::path::Path;
use std::thread;

use rustix::process::{Gid, Uid, geteuid};
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::audit::Actor;
use crate::checks;
use crate::config::Config;
use crate::database::{Access, DatabaseLocation};
use crate::error::{Problem, Result};
use crate::files;
use crate::keys::KeyName;
use crate::store::Store;
use crate::time_zone::{self, Rules, ZONEINFO};
use crate::when::{self, When};

/// The advice for a message with the system's text of a denied file.
const DENIED: &str = "Run it as root, or as the user of the service. If root is denied, give that user the file (chown).";

/// Returns the user who runs this command, and with sudo also the user before: anyone could set
/// `SUDO_USER` alone. Call it before root becomes another user.
pub fn actor() -> Actor {
    let user = Account::of(geteuid().as_raw(), 0).name;
    let before = env::var("SUDO_USER")
        .ok()
        .filter(|name| *name != user && KeyName::parse(name).is_some());
    Actor::command(before.map_or(user.clone(), |before| format!("{before} as {user}")))
}

pub fn advice_if_denied(message: &str) -> Option<&'static str> {
    let denied = io::Error::from(rustix::io::Errno::ACCESS).to_string();
    message.contains(&denied).then_some(DENIED)
}

/// A user of the system.
pub struct Account {
    pub name: String,
    uid: u32,
    /// Its own group first.
    groups: Vec<u32>,
}

impl Account {
    /// Returns the owner of a database's folder, if this process is root and that is another user.
    pub fn of_database(location: &DatabaseLocation) -> Option<Self> {
        let path = location.file().filter(|_| geteuid().is_root())?;
        // The owner of a folder with a link follows it; root follows only its own.
        let linked = fs::canonicalize(path).ok();
        [Some(path), linked.as_deref()]
            .into_iter()
            .flatten()
            .filter_map(|path| fs::metadata(files::folder(path)).ok())
            .find(|folder| folder.uid() != 0)
            .map(|folder| Self::of(folder.uid(), folder.gid()))
    }

    /// A user that /etc/passwd does not have is named by its number, and has the group `gid`.
    fn of(uid: u32, gid: u32) -> Self {
        let read = |file| fs::read_to_string(file).unwrap_or_default();
        Self::find(uid, gid, &read("/etc/passwd"), &read("/etc/group"))
    }

    fn find(uid: u32, default_gid: u32, passwd: &str, group: &str) -> Self {
        let number = uid.to_string();
        // name:password:uid:gid:…
        let mut users = passwd.lines().map(fields);
        let user = users.find(|user| user.get(2) == Some(&number.as_str()));
        let name = user.as_ref().map_or(number.clone(), |user| user[0].into());
        let gid = user.and_then(|user| user.get(3)?.parse().ok());
        // name:password:gid:members
        let is_member = |group: &Vec<&str>| {
            let members = group.get(3).map(|members| members.split(','));
            members.is_some_and(|mut members| members.any(|member| member == name))
        };
        let others = group.lines().map(fields).filter(is_member);
        let others = others.filter_map(|group| group[2].parse().ok());
        Self {
            uid,
            groups: iter::once(gid.unwrap_or(default_gid))
                .chain(others)
                .collect(),
            name,
        }
    }

    /// Becomes this user, for good. In Linux this changes the calling thread alone, and those that
    /// it starts.
    fn enter(&self) -> Result<()> {
        let groups: Vec<Gid> = self.groups.iter().copied().map(Gid::from_raw).collect();
        let (uid, gid) = (Uid::from_raw(self.uid), groups[0]);
        set_thread_groups(&groups)
            .and_then(|()| set_thread_res_gid(gid, gid, gid))
            .and_then(|()| set_thread_res_uid(uid, uid, uid))
            .map_err(|error| {
                Problem::other(format!(
                    "root can't become {}, the owner of the database's folder ({}): run the command as that user",
                    self.name,
                    io::Error::from(error)
                ))
            })
    }
}

fn fields(line: &str) -> Vec<&str> {
    line.split(':').collect()
}

/// Becomes the owner of the database's folder if root runs the command. Returns the owner's name.
pub fn become_owner(database: &DatabaseLocation) -> Result<Option<String>> {
    let Some(owner) = Account::of_database(database) else {
        return Ok(None);
    };
    owner.enter().map(|()| Some(owner.name))
}

/// Opens something as the owner of the database's folder, and stays root.
pub fn open_as_owner<T: Send>(
    database: &DatabaseLocation,
    open: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let open = || become_owner(database).and_then(|_| open());
    thread::scope(|scope| scope.spawn(open).join()).unwrap_or_else(|panic| resume_unwind(panic))
}

/// Prints a line to standard error. If it is closed, the work still continues.
pub fn note(text: impl Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Prints to standard output. A reader that stops early, such as `head`, is not an error.
pub fn print(text: &str) -> Result<()> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(about("standard output")(error))
        }
        _ => Ok(()),
    }
}

pub fn print_json(value: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).expect("the value should have a JSON form");
    print(&(text + "\n"))
}

/// Puts the name of a part in front of its error.
pub fn about<E: Into<Problem>>(part: impl Display) -> impl Fn(E) -> Problem {
    move |error| error.into().of(&part)
}

/// Reads a line of standard input: on a terminal after a question, without echo.
pub fn read_secret(question: &str) -> Result<String> {
    let input = io::stdin();
    let Ok(visible) = tcgetattr(&input) else {
        return read_line().map_err(about("standard input"));
    };
    let mut hidden = visible.clone();
    hidden.local_modes.remove(LocalModes::ECHO);
    hidden.local_modes.insert(LocalModes::ECHONL);
    eprint!("{question}");
    let _ = io::stderr().flush();
    let set = |modes| tcsetattr(&input, OptionalActions::Flush, modes).map_err(io::Error::from);
    let line = set(&hidden).and_then(|()| {
        let line = read_line();
        set(&visible).and(line)
    });
    line.map_err(about("the terminal"))
}

/// The first line of standard input, without its line end.
fn read_line() -> io::Result<String> {
    let mut line = String::new();
    io::stdin().read_line(&mut line)?;
    Ok(line.trim_end_matches(['\r', '\n']).to_owned())
}

/// Makes the parser of an option's value, with a message that says what is accepted.
pub fn expecting<T>(
    accepted: &'static str,
    parse: impl Fn(&str) -> Option<T> + Clone,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| parse(text).ok_or_else(|| format!("expected {accepted}"))
}

/// Makes the parser of a time. `or` names what else the option takes.
pub fn time_or(or: &'static str) -> impl Fn(&str) -> Result<When, String> + Clone {
    move |text| match When::parse(text) {
        Some(time) => Ok(time),
        None if when::is_impossible_date(text) => Err("there is no such date".into()),
        None => Err(format!("expected {}{or}", When::TAKES)),
    }
}

/// Opens the database for a command that only reads: the file or its folder may be read-only.
pub fn open_store(config: &Config) -> Result<Store> {
    open(config, Access::Read)
}

fn open(config: &Config, access: Access) -> Result<Store> {
    Store::open(&config.database, access).map_err(|problem| checks::store_failed(config, problem))
}

/// Opens the database for `serve`, or for a command that changes something.
pub fn open_to_change(config: &Config, access: Access, by: &Actor) -> Result<Store> {
    if access.may_create() {
        check_time_zone(config)?;
    }
    let store = open(config, access)?;
    if access != Access::Serve {
        if !store.database.is_new {
            return Ok(store);
        }
        note(format!("Created the database {}.", config.database_name()));
    }
    let setting = config.time_zone.as_deref();
    time_zone::settle(&store.database, setting, Path::new(ZONEINFO), by)
        .map(|zone| store.in_zone(zone))
        .map_err(|problem| checks::database_failed(config, problem))
}

/// Refuses a time zone that is not installed, before a file is made that should be of it.
pub fn check_time_zone(config: &Config) -> Result<()> {
    let is_missing = config.database.file().is_some_and(|file| !file.exists());
    match config.time_zone.as_deref().filter(|_| is_missing) {
        Some(name) => Rules::installed(Path::new(ZONEINFO), name).map(drop),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/bash\n# a comment\n\nana:x:1000:100::/home/ana:/bin/sh\n";
    const GROUP: &str = "root:x:0:\nssl:x:7:eva,ana\nusers:x:100:\nothers:x:8:susana\n";

    #[test]
    fn users_have_names_and_groups() {
        for (uid, name, groups) in [
            (0, "root", &[0][..]),
            (1000, "ana", &[100, 7]),
            (9, "9", &[54]),
        ] {
            let account = Account::find(uid, 54, PASSWD, GROUP);
            assert_eq!((account.name.as_str(), &account.groups[..]), (name, groups));
        }
        assert_eq!(Account::of(0, 0).name, "root");
        assert_eq!(Account::of(4_000_000_000, 0).name, "4000000000");
    }
}
