//! Commands of root become the owner of the database's folder, the user of the service. As another user, these tests show
//! that the commands work without that.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Output;

use crate::console::{PASSWORD, set_password};
use crate::support::{Folder, Runtime, Server};

/// A user and a group without names.
const OWNER: (u32, u32) = (12_345, 54_321);

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A server with a database in a folder of another user, if root runs the tests.
fn in_foreign_folder(runtime: Option<&Runtime>) -> Server {
    let server = Server::new(runtime).sqlite();
    let folder = server.folder.path("service");
    fs::create_dir(&folder).expect("a folder");
    give(&folder);
    server.set("ADRIATICUM_DATABASE", folder.join("a.db").display())
}

fn give(path: &Path) {
    if is_root() {
        chown(path, Some(OWNER.0), Some(OWNER.1)).expect("root may");
    }
}

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

/// Every file in the folder of the service belongs to its owner, and is not for others.
#[track_caller]
fn all_is_the_owner_s(server: &Server) {
    let folder = server.folder.path("service");
    let owner = fs::metadata(&folder).expect("a folder");
    let files = fs::read_dir(&folder).expect("a folder").flatten();
    let mut count = 0;
    for file in files {
        let state = file.metadata().expect("a file");
        assert_eq!(
            (state.uid(), state.gid()),
            (owner.uid(), owner.gid()),
            "{file:?}"
        );
        assert_eq!(state.mode() & 0o007, 0, "{file:?}");
        count += 1;
    }
    assert!(count > 0);
}

#[test]
fn what_commands_of_root_create_belongs_to_the_service() {
    let server = in_foreign_folder(None);
    let own = Folder::new();
    fs::set_permissions(own.path(""), fs::Permissions::from_mode(0o700)).expect("it is ours");
    let copy = own.path("copy.db").display().to_string();
    server.stdout_of(&["keys", "create", "first"]);
    all_is_the_owner_s(&server);
    assert!(set_password(&server, PASSWORD).status.success());
    // The folder of the copy is for root alone.
    server.stdout_of(&["backup", &copy]);
    assert_eq!(
        fs::metadata(&copy).expect("the copy").uid(),
        rustix::process::geteuid().as_raw()
    );
    server.stdout_of(&["keys", "create", "second"]);
    let restored = server.stdout_of(&["restore", &copy]);
    assert!(restored.contains("is restored"), "{restored}");
    all_is_the_owner_s(&server);
    let keys = server.stdout_of(&["keys", "list"]);
    assert!(keys.contains("first") && !keys.contains("second"), "{keys}");
    let audit = server.stdout_of(&["audit"]);
    assert!(!is_root() || audit.contains("  root  "), "{audit}");
}

/// Only root can read the configuration and the runtime's key, as below /etc.
#[test]
fn check_tests_as_the_owner_with_the_secrets_of_root() {
    let runtime = Runtime::start();
    let server = in_foreign_folder(Some(&runtime));
    server.key();
    let [config, key] = ["a.toml", "runtime-key"].map(|name| server.folder.path(name));
    fs::write(&config, "").expect("a file");
    fs::write(&key, "of-the-runtime\n").expect("a file");
    for path in [&config, &key] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("it is ours");
    }
    let server = server.set("ADRIATICUM_CONFIG", config.display());
    let output = server.run(&["check"]);
    let text = printed(&output);
    assert!(
        output.status.success() && !text.contains("can't be read"),
        "{text}"
    );
    assert_eq!(
        text.contains("Testing as 12345, the owner of the database's folder."),
        is_root(),
        "{text}"
    );
    let calls = runtime.calls.lock().expect("the calls");
    let is_authorized = calls
        .iter()
        .filter(|call| call.url.ends_with("/chat/completions"))
        .all(|call| {
            call.headers
                .iter()
                .any(|(name, value)| name == "authorization" && value == "Bearer of-the-runtime")
        });
    assert!(is_authorized, "{text}");
}

/// The service could not use these files either.
#[test]
fn a_file_that_the_owner_can_not_use_is_named_with_advice() {
    let server = in_foreign_folder(None);
    server.key();
    if !is_root() {
        return;
    }
    let database = server.folder.path("service/a.db");
    chown(&database, Some(0), Some(0)).expect("root may");
    for command in [&["keys", "list"][..], &["keys", "create", "x"], &["check"]] {
        let output = server.run(command);
        let text = printed(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        let denied = format!("{}: Permission denied", database.display());
        assert!(
            text.contains(&denied) && text.contains("give that user the file (chown)"),
            "{command:?}: {text}"
        );
    }
}

/// In its folder, the service's user could put a link to a file of root in the place of the database.
#[test]
fn root_follows_no_link_in_a_folder_of_another_user() {
    let server = in_foreign_folder(None);
    let own = Folder::new();
    let (link, target) = (server.folder.path("service/a.db"), own.path("a.db"));
    symlink(&target, &link).expect("a link");
    let create = &["keys", "create", "x"];
    assert_eq!(server.run(create).status.code(), Some(1));
    assert!(!target.exists(), "nothing is created through a link");
    if !is_root() {
        return;
    }
    fs::write(&target, "").expect("a file");
    fs::set_permissions(&target, fs::Permissions::from_mode(0o600)).expect("it is ours");
    for command in [create, &["backup", "copy.db"][..]] {
        let text = printed(&server.run(command));
        assert!(!text.contains("Created"), "{text}");
        assert_eq!(fs::metadata(&target).expect("a file").len(), 0);
    }
    assert_eq!(fs::read_dir(own.path("")).expect("a folder").count(), 1);
    // Root's own link is followed, as the owner of the database's folder.
    fs::remove_file(&link).expect("a link");
    server.stdout_of(create);
    let outside = server.folder.path("link.db");
    symlink(&link, &outside).expect("a link");
    let server = server.set("ADRIATICUM_DATABASE", outside.display());
    server.stdout_of(create);
    all_is_the_owner_s(&server);
}

#[test]
fn root_does_not_serve_a_database_of_another_user() {
    let server = in_foreign_folder(None);
    if !is_root() {
        return;
    }
    let output = server.run(&["serve"]);
    let text = printed(&output);
    assert!(
        output.status.code() == Some(2) && text.contains("start the service as 12345"),
        "{text}"
    );
    let files = fs::read_dir(server.folder.path("service")).expect("a folder");
    assert_eq!(files.count(), 0, "nothing is created");
}

#[test]
fn what_is_denied_has_advice() {
    let server = Server::new(None);
    let path = server.folder.path("a.toml");
    fs::write(&path, "").expect("a file");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).expect("it is ours");
    let output = server.run(&["--config", "a.toml", "keys", "list"]);
    let advice = "(os error 13).\nRun it as root, or as the user of the service. If root is denied, give that user the file (chown).\n";
    let text = printed(&output);
    assert_eq!(text.ends_with(advice), !is_root(), "{text}");
}
