//! The user of a command: who runs it, and as whom it goes on.
//!
//! The folder of a SQLite database belongs to the service's user. Root becomes that user before it
//! opens anything there: what it creates then belongs to the service, and no link that the
//! service's user puts there leads root to another file.

use std::env;
use std::fs;
use std::io;
use std::iter;
use std::os::unix::fs::MetadataExt;
use std::panic::resume_unwind;
use std::thread;

use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::audit::Actor;
use crate::database::{DatabaseLocation, Problem, Result};
use crate::files;
use crate::keys::KeyName;

const DENIED: &str = "Run it as root, or as the user of the service.";

const DENIED_TO_OWNER: &str =
    "Root runs it as the owner of the database's folder: give that user the file (chown).";

/// Returns the user who runs this command, and with sudo also the user before: anyone could set
/// `SUDO_USER` alone. Call it before root becomes another user.
pub fn actor() -> Actor {
    let user = Account::of(geteuid().as_raw(), 0).name;
    let before = env::var("SUDO_USER")
        .ok()
        .filter(|name| *name != user && KeyName::parse(name).is_some());
    Actor::command(before.map_or(user.clone(), |before| format!("{before} as {user}")))
}

/// The advice for a message with the system's text of a denied file.
pub fn advice_if_denied(message: &str, is_root: bool) -> Option<&'static str> {
    let denied = io::Error::from(rustix::io::Errno::ACCESS).to_string();
    let advice = if is_root { DENIED_TO_OWNER } else { DENIED };
    message.contains(&denied).then_some(advice)
}

/// A user of the system.
pub struct Account {
    pub name: String,
    uid: u32,
    gid: u32,
    /// The other groups.
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
        let of_member = group.lines().map(fields).filter(is_member);
        Self {
            uid,
            gid: gid.unwrap_or(default_gid),
            groups: of_member
                .filter_map(|group| group[2].parse().ok())
                .collect(),
            name,
        }
    }

    /// Becomes this user, for good. In Linux this changes the calling thread alone, and those that
    /// it starts.
    pub fn enter(&self) -> Result<()> {
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        let groups = iter::once(&self.gid).chain(&self.groups);
        let groups: Vec<Gid> = groups.copied().map(Gid::from_raw).collect();
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

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/bash\n# a comment\n\nana:x:1000:100::/home/ana:/bin/sh\n";
    const GROUP: &str = "root:x:0:\nssl:x:7:eva,ana\nusers:x:100:\nothers:x:8:susana\n";

    #[test]
    fn users_have_names_and_groups() {
        for (uid, name, gid, groups) in [
            (0, "root", 0, &[][..]),
            (1000, "ana", 100, &[7]),
            (9, "9", 54, &[]),
        ] {
            let account = Account::find(uid, 54, PASSWD, GROUP);
            assert_eq!(
                (account.name.as_str(), account.gid, &account.groups[..]),
                (name, gid, groups)
            );
        }
        assert_eq!(Account::of(0, 0).name, "root");
        assert_eq!(Account::of(4_000_000_000, 0).name, "4000000000");
    }
}
