//! Files that can't be read, written or created: what still works, and which file a message names.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Output;

use rustix::process::Signal;

use crate::support::{Folder, Server};

/// Runs a command as a user who is held to the modes of files: root only without its capability to ignore them.
fn run(server: &Server, arguments: &[&str]) -> Output {
    let held = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"];
    let prefix = if rustix::process::geteuid().is_root() { &held[..] } else { &[] };
    server.prefixed(prefix, arguments).output().expect("the binary should run")
}

/// Sets the mode of a folder, and that of every file in it.
fn set_modes(folder: &Path, [mode, of_files]: [u32; 2]) {
    let set = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
    };
    set(folder, 0o755);
    for (name, _) in content(folder) {
        set(&folder.join(name), of_files);
    }
    set(folder, mode);
}

/// Every file of a folder with its content.
fn content(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let files = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file"));
    let mut files: Vec<_> = files
        .map(|file| (file.file_name().into_string().expect("text"), fs::read(file.path()).expect("a file")))
        .collect();
    files.sort();
    files
}

#[track_caller]
fn stdout_of(server: &Server, arguments: &[&str]) -> String {
    let output = run(server, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[track_caller]
fn stderr_of_failed(server: &Server, arguments: &[&str]) -> String {
    let output = run(server, arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).expect("text")
}

/// tests/outside/full_disk.py does the same on a file system that is mounted read-only.
#[test]
fn a_database_in_a_folder_that_can_not_be_written_is_read_and_nothing_is_created() {
    let mut server = Server::new(None).sqlite();
    let (folder, elsewhere) = (server.folder.path(""), Folder::new());
    let document = elsewhere.path("note.txt");
    fs::write(&document, "The Adriatic Sea is deep.").expect("a file");
    server.stdout_of(&["search", "add", document.to_str().expect("text")]);
    let created = server.run(&["keys", "create", "one"]);
    let said = String::from_utf8(created.stderr).expect("text");
    assert!(
        said.starts_with(&format!("Created the database {}", folder.join("adriaticum.db").display())),
        "{said}"
    );
    let read_all = |server: &Server, name: &str, key: &str| {
        set_modes(&folder, [0o555, 0o440]);
        let before = content(&folder);
        let copy = elsewhere.path(name).display().to_string();
        for (arguments, expected) in [
            (&["usage"][..], "0 requests"),
            (&["usage", "verify"], "nothing wrong"),
            (&["keys", "list"], key),
            (&["audit"], key),
            (&["search", "list"], "note.txt"),
            (&["search", "query", "sea"], "Adriatic"),
            (&["backup", &copy], "0 rows"),
        ] {
            let printed = stdout_of(server, arguments);
            assert!(printed.contains(expected), "{arguments:?}: {printed}");
        }
        let checked = String::from_utf8(run(server, &["check"]).stdout).expect("text");
        assert!(checked.contains("adriaticum.db: the database can't be written"), "{checked}");
        assert!(content(&folder) == before, "a file was changed or created");
        let copied = server.command(&["keys", "list"]).env("ADRIATICUM_DATABASE", &copy).output();
        let copied = String::from_utf8(copied.expect("the binary should run").stdout).expect("text");
        assert!(copied.contains(key), "the copy has all of it: {copied}");
        set_modes(&folder, [0o755, 0o640]);
    };
    read_all(&server, "closed.db", "one");
    // A service that was killed leaves its WAL, and the key in it.
    server = server.start();
    server.stdout_of(&["keys", "create", "two"]);
    server.signal(Signal::KILL);
    server.wait();
    read_all(&server, "killed.db", "two");
    fs::remove_file(folder.join("adriaticum.db-shm")).expect("a file of SQLite");
    set_modes(&folder, [0o555, 0o440]);
    let wal = folder.join("adriaticum.db-wal").display().to_string();
    for arguments in
        [&["usage"][..], &["keys", "list"], &["backup", &elsewhere.path("x").display().to_string()]]
    {
        let said = stderr_of_failed(&server, arguments);
        assert!(said.contains(&format!("{wal} has changes")) && said.contains("Copy both files"), "{said}");
    }
    set_modes(&folder, [0o755, 0o640]);
    assert!(!elsewhere.path("x").exists(), "no half of a copy");
}

/// A copy is not changed by a look at it: its journal stays, and `restore` refuses one with a WAL.
#[test]
fn a_backup_that_is_read_stays_as_it_is() {
    let server = Server::new(None).sqlite();
    server.key();
    let copies = Folder::new();
    let copy = copies.path("copy.db").display().to_string();
    server.stdout_of(&["backup", &copy]);
    let before = content(&copies.path(""));
    let copied = Server::new(None).set("ADRIATICUM_DATABASE", &copy);
    for arguments in [&["usage"][..], &["usage", "verify"], &["keys", "list"], &["audit"]] {
        copied.stdout_of(arguments);
    }
    assert!(content(&copies.path("")) == before);
    server.stdout_of(&["restore", &copy]);
}
