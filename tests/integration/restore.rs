//! `restore`: the drill of docs/guide.md, what it keeps, and what it refuses.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use rusqlite::types::Value::{Integer, Text};
use rustix::process::Signal;

use crate::support::{Folder, PATIENCE, Runtime, Server, chat, exists};

const SET_PASSWORD: &str = "echo a-good-password | exec \"$@\"";

/// The secret of a new key, and its id.
fn key(server: &Server, name: &str) -> (String, String) {
    let secret = server
        .stdout_of(&["keys", "create", name])
        .trim()
        .to_owned();
    let Text(id) = server
        .query("SELECT id FROM keys ORDER BY rowid DESC LIMIT 1")
        .remove(0)
        .remove(0)
    else {
        panic!("an id")
    };
    (secret, id)
}

fn set_password(server: &Server) {
    let set = server
        .prefixed(
            &["bash", "-c", SET_PASSWORD, "bash"],
            &["console", "password"],
        )
        .output();
    assert!(set.expect("bash should run").status.success());
}

fn stop(server: &mut Server) {
    server.signal(Signal::TERM);
    assert!(server.wait().success());
}

fn refused(server: &Server, file: &str, word: &str) {
    let output = server.run(&["restore", file]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains(word), "{word:?} expected in {message:?}");
    assert!(output.stdout.is_empty());
    assert!(
        !exists(&server.folder.path("adriaticum.db.restoring")),
        "the copy is left"
    );
}

/// The path after the last "adriaticum restore".
fn way_back(message: &str) -> String {
    message
        .trim_end()
        .rsplit_once("adriaticum restore ")
        .expect("a command")
        .1
        .to_owned()
}

fn has_no_logs(database: &Path) -> bool {
    ["-wal", "-shm", "-journal"]
        .iter()
        .all(|suffix| !exists(&PathBuf::from(format!("{}{suffix}", database.display()))))
}

#[test]
fn a_drill_with_keys_created_changed_rotated_and_revoked_since_the_backup() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).sqlite().start();
    let keys = [
        "stays",
        "revoked",
        "renamed",
        "narrowed",
        "rotated",
        "overlapping",
    ]
    .map(|name| key(&server, name));
    let [stays, revoked, renamed, narrowed, rotated, overlapping] = &keys;
    keys.iter()
        .for_each(|(secret, _)| _ = server.post(secret, &chat("x")).is_completion());
    server.query("INSERT INTO console_browsers VALUES (x'01', 1, 9999999999) RETURNING 1");
    server.stdout_of(&["backup", "copy.db"]);
    let backup = fs::read(server.folder.path("copy.db")).expect("the backup");
    server.stdout_of(&["keys", "revoke", &revoked.1]);
    server.stdout_of(&["keys", "rename", &renamed.1, "another"]);
    let set = ["keys", "set", &narrowed.1, "--permission", "metrics"];
    server.stdout_of(&[&set[..], &["--concurrent", "2"]].concat());
    let rotate = |id: &str, more: &[&str]| {
        let secret = server.stdout_of(&[&["keys", "rotate", id], more].concat());
        secret.trim().to_owned()
    };
    let new_secret = rotate(&rotated.1, &[]);
    let beside_old = rotate(&overlapping.1, &["--overlap", "30d"]);
    let created = key(&server, "created");
    server.post(&created.0, &chat("x")).is_completion();
    set_password(&server);
    let password = server.query("SELECT hash FROM console_password");
    refused(&server, "copy.db", &format!("(pid {})", server.pid()));
    stop(&mut server);
    let since = server.query("SELECT revoked FROM keys WHERE revoked IS NOT NULL");
    let kept_changes = "SELECT id FROM audit WHERE action IN ('key_revoked', 'key_rotated', 'password_set') ORDER BY id";
    let changes = server.query(kept_changes);
    assert_eq!(changes.len(), 4);

    let message = server.stdout_of(&["restore", "copy.db"]);
    let checked = server.stdout_of(&["check"]);
    assert!(checked.contains(": writable, "), "{checked}");
    for part in [
        "copy.db: 6 rows, the newest of ",
        "The former database has 1 request more, which the ledger and its sums lose.\n",
        "Changes since the backup, which are undone:\n",
        &format!(
            " key changed {} (renamed): name: \"renamed\" → \"another\"\n",
            renamed.1
        ),
        &format!(
            " key changed {} (narrowed): permissions: completions → metrics, concurrent: none → 2\n",
            narrowed.1
        ),
        &format!(
            " key created {} (created): permissions: completions",
            created.1
        ),
        &format!("these stay revoked:\n  {} (revoked)\n", revoked.1),
        "these keep their present secret:\n",
        &format!("  {} (rotated)\n", rotated.1),
        &format!("  {} (overlapping)\n", overlapping.1),
        "The console keeps its present password.\nAll console sessions have ended.\n",
    ] {
        assert!(message.contains(part), "{part:?} expected in {message}");
    }
    assert!(!message.contains(&stays.1), "{message}");
    assert_eq!(
        fs::read(server.folder.path("copy.db")).expect("the backup"),
        backup,
        "it is only read"
    );
    assert!(has_no_logs(&server.folder.path("adriaticum.db")));
    assert_eq!(server.query("SELECT hash FROM console_password"), password);
    let browsers = server.query("SELECT session_ends FROM console_browsers");
    assert_eq!(browsers, [[rusqlite::types::Value::Null]], "no session");
    assert_eq!(
        server.query("SELECT revoked FROM keys WHERE revoked IS NOT NULL"),
        since,
        "since when"
    );
    assert_eq!(server.query(kept_changes), changes, "who made what is kept");
    let audit = server.stdout_of(&["audit"]);
    // Rows of one millisecond have no order, so it need not be the last.
    let restored: Vec<&str> = audit
        .lines()
        .filter(|line| line.contains("database restored"))
        .collect();
    assert!(
        matches!(restored[..], [line] if line.contains("a backup with 6 rows")),
        "{audit}"
    );
    assert!(
        server
            .stdout_of(&["usage", "verify"])
            .starts_with("6 rows, nothing wrong")
    );

    let mut server = server.start();
    for secret in [
        &stays.0,
        &renamed.0,
        &narrowed.0,
        &new_secret,
        &overlapping.0,
        &beside_old,
    ] {
        server.post(secret, &chat("x")).is_completion();
    }
    for secret in [&revoked.0, &created.0, &rotated.0] {
        server
            .post(secret, &chat("x"))
            .is_error(401, "invalid_api_key");
    }
    assert!(server.log().contains("cause=replaced"), "{}", server.log());
    stop(&mut server);
    assert!(
        server
            .stdout_of(&["usage", "verify"])
            .starts_with("12 rows, nothing wrong")
    );

    // Back again.
    let back = server.stdout_of(&["restore", &way_back(&message)]);
    for part in [
        format!(
            "so these work again unless they have expired:\n  {} (created)\n",
            created.1
        ),
        ": 7 rows, the newest of ".into(),
        "The former database has 6 requests more".into(),
    ] {
        assert!(back.contains(&part), "{part:?} expected in {back}");
    }
    let server = server.start();
    for secret in [&created.0, &new_secret, &overlapping.0] {
        server.post(secret, &chat("x")).is_completion();
    }
    for secret in [&revoked.0, &rotated.0] {
        server
            .post(secret, &chat("x"))
            .is_error(401, "invalid_api_key");
    }
    assert!(
        server
            .stdout_of(&["usage", "verify"])
            .starts_with("10 rows, nothing wrong")
    );
}

/// A path need not be UTF-8. Neither a backup nor a restore leaves another file.
#[test]
fn paths_of_any_bytes() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let server = Server::new(None).sqlite();
    let (_, id) = key(&server, "first");
    let name = |bytes: &'static [u8]| OsStr::from_bytes(bytes);
    let run = |command: &str, file: &OsStr| {
        let output = server.command(&[command]).arg(file).output();
        let output = output.expect("it should run");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{text}");
    };
    let files = || {
        let files = fs::read_dir(server.folder.path("")).expect("the folder");
        files.count()
    };
    let before = files();
    run("backup", name(b"copy \xff%41?#.db"));
    assert_eq!(files(), before + 1);
    let mode = fs::metadata(server.folder.path("").join(name(b"copy \xff%41?#.db")));
    assert_eq!(mode.expect("the copy").mode() & 0o7777, 0o640);
    run("restore", name(b"copy \xff%41?#.db"));
    // The lock and the former database.
    assert_eq!(files(), before + 3);
    assert!(server.stdout_of(&["keys", "list"]).contains(&id));
}

#[test]
fn a_present_database_that_is_damaged_or_missing_is_replaced() {
    let server = Server::new(None).sqlite();
    let (_, id) = key(&server, "first");
    set_password(&server);
    server.stdout_of(&["backup", "copy.db"]);
    let database = server.folder.path("adriaticum.db");
    fs::remove_file(&database).expect("it should go");
    let message = server.stdout_of(&["restore", "copy.db"]);
    for part in ["There was no database before.", "is restored"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(!message.contains("kept as"), "{message}");
    assert!(server.stdout_of(&["keys", "list"]).contains(&id));
    // No database at all, with a WAL that belongs to it, and an empty file beside one.
    let garbage = "garbage ".repeat(2000);
    for content in [garbage.as_str(), ""] {
        let wal = server.folder.path("adriaticum.db-wal");
        fs::write(&database, content).expect("a file");
        fs::set_permissions(&database, fs::Permissions::from_mode(0o600)).expect("a mode");
        fs::write(&wal, &garbage).expect("a file");
        let message = server.stdout_of(&["restore", "copy.db"]);
        for part in [
            "The former database can't be read (it",
            "look through adriaticum keys list",
            "The console's password is that of the backup",
            "kept as",
        ] {
            assert!(message.contains(part), "{part:?} expected in {message}");
        }
        assert!(!message.contains("To go back"), "{message}");
        assert!(
            has_no_logs(&database),
            "its WAL would be applied to the new database"
        );
        let (_, kept) = message.split_once("kept as ").expect("a path");
        let kept = kept.lines().next().unwrap_or_default();
        assert_eq!(
            fs::read(format!("{kept}-wal")).expect("the WAL"),
            garbage.as_bytes()
        );
        let file = database.metadata().expect("the database");
        assert_eq!(file.mode() & 0o777, 0o600);
        assert!(server.stdout_of(&["keys", "list"]).contains(&id));
    }
}

#[test]
fn what_can_be_read_of_a_damaged_database_is_compared() {
    let server = Server::new(None).sqlite();
    let (_, id) = key(&server, "first");
    server.stdout_of(&["backup", "copy.db"]);
    server.stdout_of(&["keys", "revoke", &id]);
    let Integer(page) =
        server.query("SELECT rootpage FROM sqlite_schema WHERE name = 'audit'")[0][0]
    else {
        panic!("a page")
    };
    let database = server.folder.path("adriaticum.db");
    let mut bytes = fs::read(&database).expect("the database");
    bytes[(page as usize - 1) * 4096..page as usize * 4096].fill(0xff);
    fs::write(&database, &bytes).expect("the database");
    let message = server.stdout_of(&["restore", "copy.db"]);
    for part in [
        "The audit of the former database can't be read: it is damaged.\n",
        "these stay revoked:\n",
        "What can be read of it: sqlite3 ",
    ] {
        assert!(message.contains(part), "{message}");
    }
    let (_, kept) = message.split_once("kept as ").expect("a path");
    assert_eq!(
        fs::read(kept.lines().next().unwrap_or_default()).expect("the former one"),
        bytes
    );
    assert_eq!(
        server.query("SELECT id FROM keys WHERE revoked IS NOT NULL"),
        [[Text(id)]]
    );
}

#[test]
fn what_can_not_be_restored_changes_nothing() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).sqlite().start();
    let (secret, _) = key(&server, "first");
    (0..3).for_each(|_| _ = server.post(&secret, &chat("x")).is_completion());
    stop(&mut server);
    server.stdout_of(&["backup", "copy.db"]);
    let (copy, database) = (
        server.folder.path("copy.db"),
        server.folder.path("adriaticum.db"),
    );
    let (good, present) = (
        fs::read(&copy).expect("the backup"),
        fs::read(&database).expect("the database"),
    );
    let after = |statement: &str, word: &str| {
        fs::write(&copy, &good).expect("the backup again");
        let backup = Connection::open(&copy).expect("the backup");
        backup.execute_batch(statement).expect("a change");
        drop(backup);
        refused(&server, "copy.db", word);
    };
    after(
        "UPDATE usage SET total_tokens = 9 WHERE seq = 2",
        "does not verify: after 1 good row: the row of chatcmpl_",
    );
    after("UPDATE usage_days SET requests = 9", "does not verify: ");
    after("PRAGMA user_version = 99", "version 99");
    after("PRAGMA user_version = 3", "no release had it");
    let drop_all =
        "DROP TABLE usage; DROP TABLE keys; DROP TABLE key_secrets; DROP TABLE usage_days; DROP TABLE time_zone; DROP TABLE gateways; DROP TABLE audit; DROP TABLE moved;
        DROP TABLE console_browsers; DROP TABLE console_password; PRAGMA user_version = 0";
    after(drop_all, "empty database");
    after(
        &format!("{drop_all}; CREATE TABLE mine (x)"),
        "another program",
    );
    let mut damaged = good.clone();
    damaged
        .iter_mut()
        .skip(8192)
        .step_by(7)
        .for_each(|byte| *byte = !*byte);
    fs::write(&copy, damaged).expect("a damaged one");
    refused(&server, "copy.db", "damaged");
    fs::write(&copy, "").expect("an empty one");
    refused(&server, "copy.db", "empty");
    refused(&server, "missing.db", "missing.db: No such file");
    refused(&server, "adriaticum.db", "it is the database itself");
    refused(&server, ".", "not a regular file");
    assert_eq!(fs::read(&database).expect("the database"), present);
    // Another process has it open.
    fs::write(&copy, &good).expect("the backup again");
    let other = Connection::open(&database).expect("the database");
    other
        .execute_batch("PRAGMA journal_mode = WAL; BEGIN; SELECT * FROM keys")
        .expect("a read");
    refused(&server, "copy.db", "locked by another process");
    drop(other);
    server.stdout_of(&["restore", "copy.db"]);
    let shared = server.set("ADRIATICUM_DATABASE", "postgresql://a@127.0.0.1:1/a");
    refused(&shared, "copy.db", "pg_restore");
}

/// A server that is stopped, its backup `copy.db`, and the bytes of a WAL that replaces every page of it: the key has
/// another name.
fn with_planted_wal() -> (Server, Vec<u8>) {
    let server = Server::new(None).sqlite();
    key(&server, "genuine");
    server.stdout_of(&["backup", "copy.db"]);
    let (copy, forged) = (
        server.folder.path("copy.db"),
        server.folder.path("forged.db"),
    );
    fs::copy(&copy, &forged).expect("a copy");
    let database = Connection::open(&forged).expect("a database");
    let forge = "PRAGMA journal_mode = WAL; UPDATE keys SET name = 'planted'; VACUUM";
    database
        .execute_batch(forge)
        .expect("a WAL with every page");
    let wal = fs::read(server.folder.path("forged.db-wal")).expect("the WAL");
    // The attack works: SQLite itself applies it.
    let victim = Folder::new();
    fs::copy(&copy, victim.path("copy.db")).expect("a copy");
    fs::write(victim.path("copy.db-wal"), &wal).expect("a planted file");
    let victim = Connection::open(victim.path("copy.db")).expect("a database");
    let name: String = victim
        .query_row("SELECT name FROM keys", [], |row| row.get(0))
        .expect("a key");
    assert_eq!(name, "planted");
    (server, wal)
}

/// In a folder that others may write to, such as /tmp, a local user replaced every page of a backup like this.
#[test]
fn a_backup_with_a_wal_or_a_journal_beside_it_is_refused() {
    let (server, wal) = with_planted_wal();
    let present = fs::read(server.folder.path("adriaticum.db")).expect("the database");
    symlink("copy.db", server.folder.path("link.db")).expect("a link");
    for (name, content) in [
        ("copy.db-wal", &wal[..]),
        ("copy.db-journal", b"anything"),
        ("copy.db-wal", b""),
    ] {
        let planted = server.folder.path(name);
        fs::write(&planted, content).expect("a planted file");
        let real = fs::canonicalize(&planted).expect("it is there");
        for backup in ["copy.db", "link.db"] {
            refused(
                &server,
                backup,
                &format!("{backup}: {} lies beside it", real.display()),
            );
            refused(
                &server,
                backup,
                "Make a backup with adriaticum backup FILE; or if you know",
            );
        }
        assert_eq!(fs::read(&planted).expect("it is still there"), content);
        fs::remove_file(&planted).expect("it should go");
        symlink("/nowhere", &planted).expect("a link that leads nowhere");
        refused(&server, "copy.db", "lies beside it");
        fs::remove_file(&planted).expect("it should go");
    }
    assert_eq!(
        fs::read(server.folder.path("adriaticum.db")).expect("the database"),
        present
    );
    assert!(
        server
            .stdout_of(&["restore", "copy.db"])
            .contains("verified")
    );
    assert_eq!(
        server.query("SELECT name FROM keys"),
        [[Text("genuine".into())]]
    );
}

/// It comes and goes all the time, so that a check may miss it.
#[test]
fn a_wal_that_is_planted_after_the_check_has_no_effect() {
    let (server, wal) = with_planted_wal();
    let [planted, aside] = ["copy.db-wal", "aside"].map(|name| server.folder.path(name));
    fs::write(&aside, wal).expect("a file");
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                fs::rename(&aside, &planted)
                    .and_then(|()| fs::rename(&planted, &aside))
                    .expect("a rename");
            }
        });
        let (mut names, end) = (Vec::new(), Instant::now() + PATIENCE);
        while names.len() < 5 && Instant::now() < end {
            if server.run(&["restore", "copy.db"]).status.success() {
                names.extend(server.query("SELECT name FROM keys").concat());
            }
        }
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(names, vec![Text("genuine".into()); 5]);
    });
}

/// Killed at any moment, it leaves the present database in place, or the new one.
#[test]
fn a_restore_that_is_killed_leaves_one_of_the_two() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).sqlite().start();
    let (secret, id) = key(&server, "first");
    server.post(&secret, &chat("x")).is_completion();
    server.stdout_of(&["backup", "copy.db"]);
    server.post(&secret, &chat("x")).is_completion();
    server.stdout_of(&["keys", "revoke", &id]);
    stop(&mut server);
    server.stdout_of(&["backup", "later.db"]);
    let (mut pause, end) = (Duration::ZERO, Instant::now() + PATIENCE);
    loop {
        let mut command = server.command(&["restore", "copy.db"]);
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it should start");
        thread::sleep(pause);
        let ended = child.try_wait().expect("its state");
        let _ = child.kill();
        let status = child.wait().expect("its end");
        let found = server.stdout_of(&["usage", "verify"]);
        let rows = found.split(' ').next();
        assert!(
            matches!(rows, Some("1" | "2")) && found.contains("nothing wrong"),
            "{found}"
        );
        assert!(
            server
                .stdout_of(&["keys", "list", "--json"])
                .contains("\"revoked\": 1"),
            "revoked in either"
        );
        if ended.is_some() {
            assert!(status.success(), "{status}");
            assert_eq!(rows, Some("1"));
            break;
        }
        if rows == Some("1") {
            server.stdout_of(&["restore", "later.db"]);
        }
        assert!(Instant::now() < end, "it does not end");
        pause += Duration::from_millis(1).max(pause / 20);
    }
}
