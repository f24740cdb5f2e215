//! The owner and mode of the service's files. Root can open every file, so a check by root compares
//! them with the service's user: the owner of the database's folder.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::finding::Finding;
use crate::config::Config;
use crate::files;
use crate::text::shell_word;
use crate::users::{group_name, user_name};

/// The service's user and group.
struct ServiceUser {
    uid: u32,
    gid: u32,
}

impl ServiceUser {
    /// Returns `None` with PostgreSQL, where no folder shows the service's user, and if root is
    /// that user.
    fn find(config: &Config) -> Option<Self> {
        let folder = fs::metadata(files::folder(config.database.file()?)).ok()?;
        (folder.uid() != 0).then(|| Self {
            uid: folder.uid(),
            gid: folder.gid(),
        })
    }

    fn name(&self) -> String {
        user_name(self.uid)
    }

    /// Returns true if the file's mode has these bits for the user.
    fn may(&self, file: &Metadata, bits: u32) -> bool {
        let shift = if file.uid() == self.uid {
            6
        } else if file.gid() == self.gid {
            3
        } else {
            0
        };
        file.mode() >> shift & bits == bits
    }
}

/// Returns the service's user, in the form that `sudo -u` accepts, if this command is run by root
/// and that user is another one.
pub fn user_for_sudo(config: &Config) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let user = ServiceUser::find(config)?;
    let name = user.name();
    Some(if name == user.uid.to_string() {
        format!("'#{name}'")
    } else {
        name
    })
}

/// Finds files that the service's user can't read or write. For a user who is neither root nor that
/// user there are no findings: the check of the database shows whether it can be used.
pub(super) fn check(config: &Config) -> Vec<Finding> {
    let (Some(user), Some(database)) = (ServiceUser::find(config), config.database.file()) else {
        return Vec::new();
    };
    let euid = rustix::process::geteuid();
    if !euid.is_root() && euid.as_raw() != user.uid {
        return Vec::new();
    }
    let folder = [(files::folder(database).to_owned(), 0o7)];
    let beside = |path: &Path, endings: &[&str]| -> Vec<(PathBuf, u32)> {
        let path = files::resolve(path).unwrap_or_else(|_| path.to_owned());
        endings
            .iter()
            .map(|ending| (files::with_suffix(&path, ending), 0o6))
            .collect()
    };
    let files = beside(database, &["", "-wal", "-shm", ".lock"]);
    let index = beside(&config.search.index, &["", "-wal", "-shm"]);
    let all = folder.into_iter().chain(files).chain(index);
    // That user could put a link there, to have root give away the file that it leads to.
    let file = |path: &Path| {
        fs::symlink_metadata(path)
            .ok()
            .filter(|file| !file.is_symlink())
    };
    all.filter_map(|(path, bits)| wrong_owner(&user, &path, &file(&path)?, bits))
        .collect()
}

fn wrong_owner(user: &ServiceUser, path: &Path, file: &Metadata, bits: u32) -> Option<Finding> {
    if user.may(file, bits) {
        return None;
    }
    let (name, path) = (user.name(), path.to_string_lossy());
    let word = shell_word(&path);
    let command = if file.uid() == user.uid {
        format!("chmod u+{} {word}", if bits == 0o7 { "rwx" } else { "rw" })
    } else {
        format!("chown {name}:{} {word}", group_name(user.gid))
    };
    let (owner, group, mode) = (
        user_name(file.uid()),
        group_name(file.gid()),
        file.mode() & 0o7777,
    );
    Some(Finding::fail(
        "files",
        format!(
            "{path} belongs to {owner}:{group} with mode {mode:04o}, so {name}, the user of the service, can't read and write \
             it. Run: {command}"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_of_the_wrong_owner_or_mode_is_named_with_the_command() {
        let path =
            std::env::temp_dir().join(format!("adriaticum-{} x", crate::secret::secret_hex::<8>()));
        fs::write(&path, "").expect("a file");
        let own = fs::metadata(&path).expect("a file");
        let quoted = format!("'{}'", path.display());
        let check = |mode: u32, user: ServiceUser, expected: &[&str]| {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("it is ours");
            let finding = wrong_owner(&user, &path, &fs::metadata(&path).expect("a file"), 0o6);
            let message = finding.map(|finding| finding.message).unwrap_or_default();
            assert_eq!(message.is_empty(), expected.is_empty(), "{message}");
            assert!(
                expected.iter().all(|part| message.contains(part)),
                "{message}"
            );
        };
        let owner = |uid, gid| ServiceUser { uid, gid };
        let (uid, gid) = (own.uid(), own.gid());
        check(0o600, owner(uid, gid), &[]);
        check(0o660, owner(uid + 1, gid), &[]);
        check(0o666, owner(uid + 1, gid + 1), &[]);
        check(
            0o066,
            owner(uid, gid),
            &["with mode 0066", &format!("Run: chmod u+rw {quoted}")],
        );
        let who = format!(
            "belongs to {}:{} with mode 0640",
            user_name(uid),
            group_name(gid)
        );
        let command = format!("Run: chown 4000000000:4000000001 {quoted}");
        check(
            0o640,
            owner(4_000_000_000, 4_000_000_001),
            &[&who, &command],
        );
        fs::remove_file(&path).expect("it should go");
    }
}
