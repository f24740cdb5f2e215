//! Files that can't be read, written or created: what still works, and which file a message names.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Output;

use rustix::process::Signal;

use crate::support::{Folder, Server};
use crate::tls::certify;

/// Runs a command as a user who is held to the modes of files: root only without its capability to ignore them.
fn run(server: &Server, arguments: &[&str]) -> Output {
    let held = [
        "setpriv",
        "--bounding-set",
        "-dac_override,-dac_read_search",
    ];
    let prefix = if rustix::process::geteuid().is_root() {
        &held[..]
    } else {
        &[]
    };
    server
        .prefixed(prefix, arguments)
        .output()
        .expect("the binary should run")
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
    let files = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("a file"));
    let mut files: Vec<_> = files
        .map(|file| {
            (
                file.file_name().into_string().expect("text"),
                fs::read(file.path()).expect("a file"),
            )
        })
        .collect();
    files.sort();
    files
}

#[track_caller]
fn stdout_of(server: &Server, arguments: &[&str]) -> String {
    let output = run(server, arguments);
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("text")
}

#[track_caller]
fn stderr_of_failed(server: &Server, arguments: &[&str]) -> String {
    let output = run(server, arguments);
    assert_eq!(
        output.status.code(),
        Some(1),
        "{arguments:?}: {}",
        String::from_utf8_lossy(&output.stdout)
    );
    String::from_utf8(output.stderr).expect("text")
}

/// tests/outside/full_disk.py does the same on a file system that is mounted read-only.
#[test]
fn a_database_in_a_folder_that_can_not_be_written_is_read_and_nothing_is_created() {
    let mut server = Server::new(None).sqlite();
    let (folder, elsewhere) = (server.folder.path(""), Folder::new());
    let created = server.run(&["keys", "create", "one"]);
    let said = String::from_utf8(created.stderr).expect("text");
    assert!(
        said.starts_with(&format!(
            "Created the database {}",
            folder.join("adriaticum.db").display()
        )),
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
            (&["backup", &copy], "0 rows"),
        ] {
            let printed = stdout_of(server, arguments);
            assert!(printed.contains(expected), "{arguments:?}: {printed}");
        }
        let checked = String::from_utf8(run(server, &["check"]).stdout).expect("text");
        assert!(
            checked.contains("adriaticum.db: the database can't be written"),
            "{checked}"
        );
        assert!(content(&folder) == before, "a file was changed or created");
        let copied = server
            .command(&["keys", "list"])
            .env("ADRIATICUM_DATABASE", &copy)
            .output();
        let copied =
            String::from_utf8(copied.expect("the binary should run").stdout).expect("text");
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
    for arguments in [
        &["usage"][..],
        &["keys", "list"],
        &["backup", &elsewhere.path("x").display().to_string()],
    ] {
        let said = stderr_of_failed(&server, arguments);
        assert!(
            said.contains(&format!("{wal} has changes")) && said.contains("Copy both files"),
            "{said}"
        );
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
    for arguments in [
        &["usage"][..],
        &["usage", "verify"],
        &["keys", "list"],
        &["audit"],
    ] {
        copied.stdout_of(arguments);
    }
    assert!(content(&copies.path("")) == before);
    server.stdout_of(&["restore", &copy]);
}

/// Something that is wrong with a file.
#[derive(Clone, Copy)]
enum Fault {
    /// There is no such file.
    Gone,
    /// It may not be read or written.
    Denied,
    /// A folder is in its place.
    Folder,
    /// A folder of files that may not be changed.
    Closed,
}

impl Fault {
    fn make(self, path: &Path) {
        let _ = fs::remove_file(path);
        match self {
            Self::Gone => {}
            Self::Denied => {
                fs::write(path, "x").expect("a file");
                fs::set_permissions(path, fs::Permissions::from_mode(0o000)).expect("it is ours");
            }
            Self::Folder => fs::create_dir(path).expect("a folder"),
            Self::Closed => {
                fs::set_permissions(path, fs::Permissions::from_mode(0o555)).expect("it is ours")
            }
        }
    }
}

/// A message that blames another file sends the operator to the wrong place.
#[test]
fn a_message_names_the_file_that_failed() {
    use Fault::{Closed, Denied, Folder as AFolder, Gone};
    const SERVE: &[&str] = &["serve"];
    const LIST: &[&str] = &["keys", "list"];
    const CREATE: &[&str] = &["keys", "create", "new"];
    const REVOKE: &[&str] = &["keys", "revoke", "key_0"];
    const BACKUP: &[&str] = &["backup", "out/copy.db"];
    const SEARCH: &[&str] = &["search", "query", "x"];
    let denied = "Permission denied (os error 13)";
    for (fault, file, command, expected) in [
        (
            Gone,
            "set.toml",
            SERVE,
            "set.toml: it can't be read: No such file",
        ),
        (
            Denied,
            "set.toml",
            LIST,
            "set.toml: it can't be read: Permission denied",
        ),
        (
            AFolder,
            "set.toml",
            LIST,
            "set.toml: it can't be read: Is a directory",
        ),
        (
            Denied,
            "db/a.db",
            SERVE,
            "the database {}/db/a.db: Permission denied",
        ),
        (
            Denied,
            "db/a.db",
            LIST,
            "the database {}/db/a.db: Permission denied",
        ),
        (
            Denied,
            "db/a.db",
            CREATE,
            "the database {}/db/a.db: Permission denied",
        ),
        (
            Denied,
            "db/a.db",
            BACKUP,
            "the database {}/db/a.db: Permission denied",
        ),
        (
            AFolder,
            "db/a.db",
            LIST,
            "the database {}/db/a.db: is a directory",
        ),
        (
            AFolder,
            "db/a.db",
            BACKUP,
            "the database {}/db/a.db: is a directory",
        ),
        (
            AFolder,
            "db/a.db",
            CREATE,
            "the database {}/db/a.db: Is a directory",
        ),
        (
            Gone,
            "db/a.db",
            BACKUP,
            "there is no database at {}/db/a.db",
        ),
        (Closed, "db", SERVE, "{}/db/a.db.lock: Permission denied"),
        (Closed, "db", CREATE, "{}/db: Permission denied"),
        (Closed, "db", REVOKE, "{}/db: Permission denied"),
        (
            Denied,
            "db/a.db-wal",
            SERVE,
            "{}/db/a.db-wal: Permission denied",
        ),
        (
            Denied,
            "db/a.db-wal",
            CREATE,
            "{}/db/a.db-wal: Permission denied",
        ),
        (
            Denied,
            "db/a.db-wal",
            LIST,
            "{}/db/a.db-wal: Permission denied",
        ),
        (
            Denied,
            "db/a.db-wal",
            BACKUP,
            "the database {}/db/a.db: {}/db/a.db-wal: Permission denied",
        ),
        (
            AFolder,
            "db/a.db-wal",
            SERVE,
            "{}/db/a.db-wal: it is not a regular file",
        ),
        (
            AFolder,
            "db/a.db-wal",
            LIST,
            "{}/db/a.db-wal: it is not a regular file",
        ),
        (
            Denied,
            "db/a.db-shm",
            CREATE,
            "{}/db/a.db-shm: Permission denied",
        ),
        (
            Denied,
            "db/a.db.lock",
            SERVE,
            "{}/db/a.db.lock: Permission denied",
        ),
        (
            AFolder,
            "db/a.db.lock",
            SERVE,
            "{}/db/a.db.lock: Is a directory",
        ),
        (
            Denied,
            "db/a-search.db",
            SEARCH,
            "the index {}/db/a-search.db can't be opened: Permission denied",
        ),
        (Gone, "out", BACKUP, "out/copy.db: there is no folder out"),
        (Closed, "out", BACKUP, "out/copy.db: Permission denied"),
        (
            AFolder,
            "out/copy.db",
            BACKUP,
            "out/copy.db: Is a directory",
        ),
        (
            AFolder,
            "socket",
            SERVE,
            "unix:{}/socket: a file that is not a socket is there",
        ),
        (
            Gone,
            "cert.pem",
            SERVE,
            "tls.cert = \"{}/cert.pem\": No such file",
        ),
        (
            Denied,
            "cert.pem",
            SERVE,
            "tls.cert = \"{}/cert.pem\": Permission denied",
        ),
        (
            AFolder,
            "cert.pem",
            SERVE,
            "tls.cert = \"{}/cert.pem\": it is not a regular file",
        ),
        (
            Gone,
            "key.pem",
            SERVE,
            "tls.key = \"{}/key.pem\": No such file",
        ),
        (
            Denied,
            "key.pem",
            SERVE,
            "tls.key = \"{}/key.pem\": Permission denied",
        ),
        (
            AFolder,
            "key.pem",
            SERVE,
            "tls.key = \"{}/key.pem\": it is not a regular file",
        ),
        (
            Gone,
            "ca.pem",
            SERVE,
            "ADRIATICUM_RUNTIME_CA=\"{}/ca.pem\": expected a PEM file",
        ),
        (
            Denied,
            "ca.pem",
            SERVE,
            "ADRIATICUM_RUNTIME_CA=\"{}/ca.pem\": expected a PEM file",
        ),
        (
            AFolder,
            "ca.pem",
            SERVE,
            "ADRIATICUM_RUNTIME_CA=\"{}/ca.pem\": expected a PEM file",
        ),
        (
            Gone,
            "runtime-key",
            SERVE,
            "ADRIATICUM_RUNTIME_API_KEY_FILE=\"{}/runtime-key\": expected a file",
        ),
        (
            Denied,
            "runtime-key",
            SERVE,
            "ADRIATICUM_RUNTIME_API_KEY_FILE=\"{}/runtime-key\": expected a file",
        ),
        (
            AFolder,
            "runtime-key",
            SERVE,
            "ADRIATICUM_RUNTIME_API_KEY_FILE=\"{}/runtime-key\": expected a file",
        ),
    ] {
        let mut server = Server::new(None);
        let path = |name: &str| server.folder.path(name);
        for folder in ["db", "out"] {
            fs::create_dir(path(folder)).expect("a folder");
        }
        certify(&path(""));
        fs::write(path("set.toml"), "").expect("a file");
        fs::write(path("runtime-key"), "secret").expect("a file");
        fs::copy(path("cert.pem"), path("ca.pem")).expect("a file");
        let settings = [
            ("CONFIG", "set.toml"),
            ("DATABASE", "db/a.db"),
            ("TLS_CERT", "cert.pem"),
            ("TLS_KEY", "key.pem"),
            ("RUNTIME_CA", "ca.pem"),
            ("RUNTIME_API_KEY_FILE", "runtime-key"),
        ];
        let listen = format!("unix:{}", path("socket").display());
        let mut environment = vec![
            ("ADRIATICUM_LISTEN".to_owned(), listen),
            (
                "ADRIATICUM_RUNTIME_URL".to_owned(),
                "https://127.0.0.1:1/v1".to_owned(),
            ),
            ("ADRIATICUM_SEARCH_URL".to_owned(), "folder:x".to_owned()),
        ];
        environment.extend(settings.map(|(name, file)| {
            (
                format!("ADRIATICUM_{name}"),
                path(file).display().to_string(),
            )
        }));
        server.environment = environment;
        server.key();
        let path = server.folder.path(file);
        if file == "out" && matches!(fault, Gone) {
            fs::remove_dir(&path).expect("an empty folder");
        }
        fault.make(&path);
        let output = run(&server, command);
        let printed = String::from_utf8(output.stderr).expect("text");
        let folder = server.folder.path("").display().to_string();
        let expected = expected.replace("{}", folder.trim_end_matches('/'));
        assert!(
            printed.contains(&expected),
            "{command:?}: {expected:?} expected in {printed:?}"
        );
        assert!(
            !expected.ends_with("Permission denied") || printed.contains(denied),
            "{printed}"
        );
        assert!(!output.status.success());
        if matches!(fault, Closed) {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it is ours");
        }
    }
    let nowhere = Server::new(None).sqlite();
    let folder = nowhere.folder.path("none");
    let nowhere = nowhere.set("ADRIATICUM_DATABASE", folder.join("a.db").display());
    for command in [SERVE, CREATE] {
        let said = stderr_of_failed(&nowhere, command);
        assert!(
            said.contains(&format!("there is no folder {}", folder.display())),
            "{said}"
        );
    }
}

/// `serve` ran without the key for its runtime, and only warned.
#[test]
fn a_secret_that_can_not_be_read_fails_the_commands_that_need_it() {
    let server = Server::new(None).sqlite();
    let config = server.folder.path("a.toml");
    fs::write(&config, "").expect("a file");
    for name in ["runtime-key", "database-password"] {
        let path = server.folder.path(name);
        fs::write(&path, "sesame").expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).expect("it is ours");
    }
    let server = server.set("ADRIATICUM_CONFIG", config.display());
    for command in [&["keys", "create", "a"][..], &["keys", "list"], &["usage"]] {
        let output = run(&server, command);
        assert!(output.status.success(), "{command:?}: {output:?}");
    }
    let fails = |server: &Server, command: &[&str], named: &str| {
        let output = run(server, command);
        let printed = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(2), "{command:?}: {printed}");
        assert!(
            printed.contains(named)
                && printed.contains("Permission denied")
                && !printed.contains("problems"),
            "{command:?}: {printed}"
        );
    };
    fails(&server, &["serve"], "runtime.api_key_file = \"");
    fails(&server, &["check"], "runtime.api_key_file = \"");
    let server = server.set("ADRIATICUM_DATABASE", "postgresql://user@127.0.0.1:1/db");
    fails(&server, &["keys", "list"], "database_password_file = \"");
}
