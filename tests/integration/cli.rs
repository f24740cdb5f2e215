//! The commands, as a person or a script uses them.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Runtime, Script, Server, chat, head_seq, until};

#[track_caller]
fn refused(server: &Server, arguments: &[&str], code: i32, word: &str) {
    let output = server.run(arguments);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {printed}");
    assert!(
        printed.contains(word),
        "{arguments:?}: {word:?} expected in {printed:?}"
    );
    assert!(output.stdout.is_empty(), "{arguments:?}");
}

/// Runs a command that changes something. Returns what it says about it, on standard error.
#[track_caller]
fn changed(server: &Server, arguments: &[&str]) -> String {
    let output = server.run(arguments);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {printed}");
    printed
}

#[test]
fn keys_from_their_making_to_their_end() {
    let server = Server::new(None);
    let made = server.run(&[
        "keys",
        "create",
        "for the tests",
        "--permission",
        "metrics",
        "--expires",
        "2099-12-31",
    ]);
    let secret = String::from_utf8(made.stdout).expect("text");
    assert_eq!(secret.trim_end().len(), 52);
    assert_eq!(
        secret.matches('\n').count(),
        1,
        "the secret alone is printed"
    );
    assert!(String::from_utf8_lossy(&made.stderr).contains("key_"));
    let listed = server.stdout_of(&["keys", "list"]);
    assert!(
        listed.contains("for the tests") && listed.contains("2100-01-01 00:00Z"),
        "{listed}"
    );
    let json: Value =
        serde_json::from_str(&server.stdout_of(&["keys", "list", "--json"])).expect("JSON");
    assert_eq!(json[0]["expires"], 4_102_444_800_i64);
    assert_eq!(json[0]["permissions"], serde_json::json!(["metrics"]));
    assert!(json[0].get("digest").is_none());
    let id = json[0]["id"].as_str().expect("an id");
    let hint = format!("{}…{}", &secret[..8], &secret[48..52]);
    assert!(
        listed.contains(&hint) && !listed.contains(secret.trim_end()),
        "{listed}"
    );
    server.stdout_of(&["keys", "rename", id, "another"]);
    server.stdout_of(&["keys", "revoke", id]);
    let json: Value =
        serde_json::from_str(&server.stdout_of(&["keys", "list", "--json"])).expect("JSON");
    assert_eq!(json[0]["name"], "another");
    assert!(json[0]["revoked"].is_i64());
    let members: Vec<&String> = json[0].as_object().expect("an object").keys().collect();
    let mut expected = [
        "id",
        "name",
        "hint",
        "permissions",
        "created",
        "expires",
        "last_used",
        "revoked",
        "concurrent",
        "budget",
        "overlap",
    ];
    expected.sort();
    assert_eq!(members, expected);
    assert_eq!(json[0]["hint"], hint);
    server.query("UPDATE keys SET revoked = 978307260");
    let printed = changed(&server, &["keys", "revoke", id]);
    assert!(
        printed.ends_with(" is revoked already, since 2001-01-01 00:01Z.\n"),
        "{printed}"
    );
    refused(
        &server,
        &["keys", "set", id, "--expires", "never"],
        1,
        "revoked since 2001-01-01 00:01Z",
    );
}

#[test]
fn keys_that_expire_are_marked() {
    let server = Server::new(None);
    for (name, expires) in [
        ("stays", "never"),
        ("later", "11d"),
        ("soon", "9d"),
        ("over", "1d"),
        ("gone", "1d"),
    ] {
        server.stdout_of(&["keys", "create", name, "--expires", expires]);
    }
    server.query("UPDATE keys SET expires = 978307260 WHERE name IN ('over', 'gone')");
    let id = |name: &str| match &server.query(&format!("SELECT id FROM keys WHERE name = '{name}'"))
        [0][0]
    {
        rusqlite::types::Value::Text(id) => id.clone(),
        other => panic!("{other:?}"),
    };
    server.stdout_of(&["keys", "revoke", &id("gone")]);
    let listed = server.stdout_of(&["keys", "list"]);
    for (state, expected) in [
        ("active", &["stays", "later"][..]),
        ("expiring", &["soon"]),
        ("expired", &["over"]),
        ("revoked", &["gone"]),
    ] {
        let text = server.stdout_of(&["keys", "list", "--state", state, "--json"]);
        let json: Vec<Value> = serde_json::from_str(&text).expect("JSON");
        let mut names: Vec<&str> = json.iter().filter_map(|key| key["name"].as_str()).collect();
        names.sort_by_key(|name| expected.iter().position(|expected| expected == name));
        assert_eq!(names, expected, "{state}");
        for name in names {
            let line = listed
                .lines()
                .find(|line| line.contains(&format!(" {name} ")))
                .expect("a line");
            assert!(line.contains(&format!(" {state} ")), "{line}");
        }
        assert_eq!(
            server
                .stdout_of(&["keys", "list", "--state", state])
                .lines()
                .count(),
            expected.len() + 1
        );
    }
    let printed = String::from_utf8_lossy(&server.run(&["check"]).stdout).into_owned();
    let warning: String = printed
        .lines()
        .filter(|line| line.starts_with("warn  keys "))
        .collect();
    for (name, number) in [
        ("over", "1 key expired: "),
        ("soon", "1 key will expire within ten days: "),
    ] {
        assert!(
            warning.contains(&format!("{number}{}", id(name))),
            "{warning}"
        );
    }
    assert!(
        !warning.contains(&id("gone")) && !warning.contains(&id("later")),
        "{warning}"
    );
    for name in ["over", "soon"] {
        server.stdout_of(&["keys", "revoke", &id(name)]);
    }
    let printed = server.run(&["keys", "list", "--state", "expired"]);
    assert_eq!(
        String::from_utf8_lossy(&printed.stderr),
        "No key is expired.\n"
    );
    assert!(!String::from_utf8_lossy(&server.run(&["check"]).stdout).contains("  keys "));
}

#[test]
fn keys_set_changes_what_its_options_name() {
    let server = Server::new(None);
    server.stdout_of(&["keys", "create", "x", "--concurrent", "3"]);
    let key = || {
        let json: Value =
            serde_json::from_str(&server.stdout_of(&["keys", "list", "--json"])).expect("JSON");
        json[0].clone()
    };
    let id = key()["id"].as_str().expect("an id").to_owned();
    assert_eq!(key()["concurrent"], 3);
    assert!(
        server
            .stdout_of(&["keys", "list"])
            .lines()
            .any(|line| line.contains(" 3 "))
    );
    let printed = changed(
        &server,
        &[
            "keys",
            "set",
            &id,
            "--expires",
            "2099-12-31",
            "--permission",
            "metrics",
        ],
    );
    assert!(
        printed.starts_with(&format!("Changed {id} in ")),
        "{printed}"
    );
    assert!(
        printed.contains(".\nIt may read the metrics, until "),
        "{printed}"
    );
    assert_eq!(
        (&key()["expires"], &key()["concurrent"]),
        (&json!(4_102_444_800_i64), &json!(3))
    );
    assert_eq!(key()["permissions"], json!(["metrics"]));
    let printed = changed(
        &server,
        &[
            "keys",
            "set",
            &id,
            "--expires",
            "never",
            "--concurrent",
            "10000",
        ],
    );
    assert!(
        printed.ends_with(".\nIt may read the metrics, at most 10,000 at a time.\n"),
        "{printed}"
    );
    assert_eq!(
        (&key()["expires"], &key()["concurrent"]),
        (&Value::Null, &json!(10_000))
    );
    assert_eq!(
        key()["permissions"],
        json!(["metrics"]),
        "what is not named stays"
    );
    let printed = changed(
        &server,
        &[
            "keys",
            "set",
            &id,
            "--concurrent",
            "none",
            "--budget",
            "1000000/month",
        ],
    );
    assert!(
        printed.ends_with(".\nIt may read the metrics, 1,000,000 tokens per month.\n"),
        "{printed}"
    );
    let budget = json!({"tokens": 1_000_000, "per": "month", "used": 0});
    assert_eq!(
        (&key()["concurrent"], &key()["budget"]),
        (&Value::Null, &budget)
    );
    server.stdout_of(&["keys", "set", &id, "--budget", "none"]);
    assert_eq!(key()["budget"], Value::Null);
    refused(
        &server,
        &["keys", "set", "key_none", "--concurrent", "1"],
        1,
        "keys list",
    );
}

#[test]
fn a_change_names_its_database() {
    let server = Server::new(None).set("ADRIATICUM_DATABASE", "here.db");
    let path = server.folder.path("here.db").canonicalize();
    assert!(path.is_err(), "there is none yet");
    let printed = changed(&server, &["keys", "create", "x"]);
    let path = server
        .folder
        .path("here.db")
        .canonicalize()
        .expect("it is there now");
    let created = format!("Created the database {}.\nCreated key_", path.display());
    assert!(printed.starts_with(&created), "{printed}");
    let id = printed
        .split(' ')
        .find(|word| word.starts_with("key_"))
        .expect("an id")
        .to_owned();
    let named = format!(" in {}", path.display());
    assert!(printed.contains(&format!("{id}{named}")), "{printed}");
    for command in [
        &["keys", "rename", &id, "y"][..],
        &["keys", "set", &id, "--concurrent", "1"],
        &["keys", "revoke", &id],
    ] {
        let printed = changed(&server, command);
        assert!(
            printed.contains(&named) && printed.contains(&id),
            "{printed}"
        );
    }
    let script = "echo a-good-password | exec \"$@\"";
    let set = server
        .prefixed(&["bash", "-c", script, "bash"], &["console", "password"])
        .output();
    let printed = String::from_utf8_lossy(&set.expect("bash should run").stderr).into_owned();
    assert!(
        printed.starts_with("The password is set") && printed.contains(&named),
        "{printed}"
    );
}

/// `backup` in the wrong folder wrote a valid copy of an empty database that it had just created.
#[test]
fn a_missing_database_is_not_created_by_a_command_that_needs_one() {
    let server = Server::new(None).set("ADRIATICUM_DATABASE", "missing.db");
    let path = server.folder.path("missing.db");
    let named = format!("there is no database at {}", path.display());
    let creators =
        "Create it with adriaticum serve, keys create, console password, restore or move.";
    refused(&server, &["usage"], 1, creators);
    let moved = [
        "move",
        "--from",
        "missing.db",
        "--to",
        "postgresql://a@127.0.0.1:1/a",
    ];
    refused(
        &server,
        &moved,
        1,
        "there is no database at missing.db. --from takes",
    );
    for command in [
        &["keys", "list"][..],
        &["keys", "rename", "key_1", "x"],
        &["keys", "revoke", "key_1"],
        &["keys", "set", "key_1", "--concurrent", "1"],
        &["usage"],
        &["usage", "show", "chatcmpl_1"],
        &["usage", "verify"],
        &["backup", "copy.db"],
    ] {
        refused(&server, command, 1, &named);
        refused(&server, command, 1, "--config FILE");
    }
    let (pairs, messages) = findings(&server, 1);
    assert_eq!(status_of(&pairs, "database"), ["fail"]);
    assert!(messages.contains(&named), "{messages}");
    let left = std::fs::read_dir(server.folder.path(""))
        .expect("a folder")
        .flatten();
    let left: Vec<_> = left.map(|file| file.file_name()).collect();
    assert_eq!(left, ["empty.toml"], "nothing was created");
}

#[test]
fn wrong_use_is_reported() {
    let server = Server::new(None);
    for (arguments, word) in [
        (&[][..], "Usage: adriaticum [OPTIONS] <COMMAND>"),
        (
            &["nonsense"],
            "error: unrecognized subcommand 'nonsense'\n\nUsage: adriaticum [OPTIONS] <COMMAND>\n",
        ),
        (&["key"], "a similar subcommand exists: 'keys'"),
        (&["--nonsense"], "unexpected argument '--nonsense' found"),
        (&["--versoin"], "a similar argument exists: '--version'"),
        (&["-x"], "unexpected argument '-x' found"),
        (&["help", "nonsense"], "unrecognized subcommand 'nonsense'"),
        (&["serve", "now"], "unexpected argument 'now' found"),
        (
            &["serve", "--config"],
            "a value is required for '--config <FILE>'",
        ),
        (
            &["--config", "a", "--config", "b", "serve"],
            "'--config <FILE>' cannot be used multiple times",
        ),
        (
            &["--config", "a", "serve", "--config=b"],
            "'--config <FILE>' cannot be used multiple times",
        ),
        (&["keys"], "Usage: adriaticum keys [OPTIONS] <COMMAND>"),
        (
            &["keys", "nonsense"],
            "unrecognized subcommand 'nonsense'\n\nUsage: adriaticum keys",
        ),
        (
            &["keys", "crate"],
            "similar subcommands exist: 'rename', 'rotate', 'create'",
        ),
        (
            &["console", "passwd"],
            "a similar subcommand exists: 'password'",
        ),
        (&["keys", "create"], "<NAME>"),
        (&["keys", "create", ""], "1 to 64"),
        (&["keys", "create", "a\nb"], "printable"),
        (
            &["keys", "create", "x", "--expire", "90d"],
            "a similar argument exists: '--expires'",
        ),
        (
            &["keys", "create", "x", "--expires", "2027-02-30"],
            "'--expires <WHEN>': there is no such date\n",
        ),
        (&["keys", "create", "x", "--expires", "soon"], "YYYY-MM-DD"),
        (&["keys", "create", "x", "--expires", "2001-01-01"], "past"),
        (
            &["keys", "create", "x", "--permission", "all"],
            "[possible values: completions, metrics]",
        ),
        (&["keys", "create", "x", "--concurrent", "0"], "1 to 10000"),
        (
            &["keys", "create", "x", "--budget", "1000"],
            "a slash, and day or month, or none",
        ),
        (
            &["keys", "create", "x", "--budget", "0/day"],
            "from 1 to 1000000000000",
        ),
        (
            &[
                "keys", "create", "x", "--budget", "5/day", "--budget", "9/month",
            ],
            "cannot be used multiple times",
        ),
        (&["keys", "rename", "x"], "<NAME>"),
        (
            &["keys", "list", "--state", "dead"],
            "[possible values: active, expiring, expired, revoked]",
        ),
        (
            &["keys", "list", "--csv"],
            "unexpected argument '--csv' found",
        ),
        (
            &["keys", "list", "--json", "--json"],
            "'--json' cannot be used multiple times",
        ),
        (&["keys", "set"], "--expires"),
        (&["keys", "set", "x"], "--budget"),
        (&["keys", "set", "x", "--concurrent", "10001"], "or none"),
        (&["keys", "set", "x", "--expires", "2001-01-01"], "past"),
        (&["keys", "set", "x", "--expires", "soon"], "or never"),
        (&["usage", "--since", "2027-02-30"], "there is no such date"),
        (
            &["usage", "--since", "2027-02-30T13:00Z"],
            "there is no such date",
        ),
        (
            &["usage", "--since", "1d", "show", "x"],
            "options before list, show or verify are those of the report",
        ),
        (&["usage", "--json", "verify"], "Put them after it."),
        (&["usage", "--until", "25:00"], "or HH:MM today"),
        (
            &["usage", "--by", "week"],
            "[possible values: hour, day, month, key, status, gateway]",
        ),
        (
            &["usage", "--key", "a", "--key", "b"],
            "cannot be used multiple times",
        ),
        (
            &["usage", "--json", "--csv"],
            "'--json' cannot be used with '--csv'",
        ),
        (&["usage", "nonsense"], "unrecognized subcommand 'nonsense'"),
        (&["usage", "show"], "<REQUEST_ID>"),
        (&["usage", "--by", "day,day"], "or two that differ"),
        (&["usage", "--by", "month,day"], "or two that differ"),
        (&["usage", "--by", "key,day,status"], "or two that differ"),
        (
            &["usage", "--since", "2026-01-02", "--until", "2026-01-01"],
            "the range from 2026-01-02 to 2026-01-01 ends before it begins",
        ),
        (
            &[
                "usage",
                "--since",
                "2026-01-02",
                "--until",
                "2026-01-02T00:00Z",
            ],
            "from 2026-01-02 to 2026-01-01 ends before",
        ),
        (
            &["usage", "--since", "2100-01-01"],
            "begins at 2100-01-01T00:00:00Z, in the future: it is 20",
        ),
        (
            &[
                "usage",
                "list",
                "--since",
                "2100-01-01",
                "--until",
                "2100-01-02",
            ],
            "in the future",
        ),
        (&["usage", "--month", "2100-01"], "in the future"),
        (
            &["usage", "--month", "2026-13"],
            "a month as YYYY-MM, or last",
        ),
        (
            &["usage", "--month", "last", "--since", "1d"],
            "cannot be used with",
        ),
        (
            &["usage", "--since", "2026-01-02T13:00+25:00"],
            "an offset such as +01:00",
        ),
        (
            &["usage", "--since", "2026-01-02T13:00 CET"],
            "an offset such as +01:00",
        ),
        (&["usage", "list", "--limit", "0"], "a number from 1"),
        (&["usage", "list", "--by", "day"], "--by"),
        (
            &["usage", "verify", "--through", "3:0f"],
            "[GATEWAY:]SEQ:HASH",
        ),
        (
            &["audit", "--since", "yesterday"],
            "expected a number followed by s, m, h or d",
        ),
        (&["search", "query", "--json"], "<WORDS>..."),
        (&["move"], "--from <DATABASE>\n  --to <DATABASE>"),
        (&["move", "--from", "a.db"], "--to <DATABASE>"),
        (
            &["move", "--from", "a.db", "--to", "b.db"],
            "--to takes the postgresql:// URI of an empty database",
        ),
        (&["backup"], "<FILE>"),
        (&["restore"], "<FILE>"),
    ] {
        refused(&server, arguments, 2, word);
    }
    server.key();
    refused(&server, &["keys", "revoke", "key_none"], 1, "keys list");
    for help in [
        &["--help"][..],
        &["serve", "--help"],
        &["keys", "--help"],
        &["keys", "list", "-h"],
        &["-h"],
        &["help"],
        &["help", "keys"],
        &["help", "keys", "create"],
        &["usage", "--help"],
        &["check", "--help"],
    ] {
        assert!(
            server.stdout_of(help).contains("Usage: adriaticum"),
            "{help:?}"
        );
    }
    assert_eq!(
        server.stdout_of(&["help", "keys"]),
        server.stdout_of(&["keys", "--help"])
    );
    for version in ["--version", "-V"] {
        assert_eq!(
            server.stdout_of(&[version]).trim(),
            format!("adriaticum {}", adriaticum::VERSION)
        );
    }
}

#[test]
fn the_configuration_file_is_found_and_named() {
    let server = Server::new(None);
    let path = server.folder.path("a.toml");
    std::fs::write(&path, "workers = 0\n").expect("a file");
    let path = path.to_str().expect("text");
    for arguments in [
        &["--config", path, "serve"][..],
        &["serve", "--config", path],
        &["serve", &format!("--config={path}")],
    ] {
        refused(
            &server,
            arguments,
            2,
            &format!("{path}:1: workers = 0: expected"),
        );
    }
    refused(
        &server,
        &["--config", "/nowhere.toml", "serve"],
        2,
        "/nowhere.toml",
    );
    let server = server
        .set("ADRIATICUM_CONFIG", path)
        .set("ADRIATICUM_QUEUE", "x");
    refused(&server, &["serve"], 2, "1 to 1024");
    for command in [&["keys", "list"][..], &["check"]] {
        refused(&server, command, 2, "has 2 problems:\n");
        refused(&server, command, 2, "\n  ADRIATICUM_QUEUE=\"x\": expected");
    }
    let checked = server.run(&["check", "--json"]);
    assert_eq!(checked.status.code(), Some(2));
    let json: Value =
        serde_json::from_slice(&checked.stdout).expect("JSON, for a script that reads it");
    assert_eq!(
        (&json[0]["part"], &json[0]["status"]),
        (&json!("configuration"), &json!("fail"))
    );
}

#[test]
fn usage_in_its_forms() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    server.post(&key, &chat("x")).is_completion();
    let printed = server.stdout_of(&["usage"]);
    let (period, sums) = printed.split_once('\n').expect("the period");
    assert!(
        period.starts_with("20") && period.contains("T00:00Z to 20"),
        "{printed}"
    );
    assert_eq!(
        sums,
        "1 request, 0 errors, 14 tokens (11 in, 3 out), 0 requests unmeasured\n"
    );
    for (by, label) in [
        ("hour", ":00Z"),
        ("day", "-"),
        ("month", "-"),
        ("key", "test"),
        ("status", "200"),
    ] {
        let table = server.stdout_of(&["usage", "--by", by]);
        assert!(
            table.lines().count() == 4 && table.contains(label),
            "{table}"
        );
        assert!(
            table
                .lines()
                .nth(1)
                .is_some_and(|heading| heading.starts_with(by)),
            "{table}"
        );
    }
    let csv = server.stdout_of(&["usage", "--by", "key", "--csv"]);
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(
        lines[0],
        "\"since\",\"until\",\"since_local\",\"until_local\",\"key_id\",\"name\",\"requests\",\"errors\",\"prompt_tokens\",\"completion_tokens\",\"total_tokens\",\"unmeasured\""
    );
    assert!(
        lines[1].ends_with(r#"","test","1","0","11","3","14","0""#),
        "{csv}"
    );
    let json: Value =
        serde_json::from_str(&server.stdout_of(&["usage", "--by", "day", "--json"])).expect("JSON");
    assert_eq!(json["rows"][0]["requests"], 1);
    assert!(
        json["rows"][0]["day"]
            .as_str()
            .is_some_and(|day| day.len() == 10)
    );
    assert!(
        json["since"]
            .as_i64()
            .is_some_and(|since| since % 86_400 == 0)
            && json["until"].is_i64(),
        "{json}"
    );
    let json: Value =
        serde_json::from_str(&server.stdout_of(&["usage", "--until", "1h", "--json"]))
            .expect("JSON");
    assert_eq!((&json["requests"], &json["rows"]), (&json!(0), &json!([])));
    assert_eq!(json["removed_before"], Value::Null);
}

#[test]
fn usage_of_one_key() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let keys = [server.key(), server.key()];
    for (key, count) in keys.iter().zip([1, 2]) {
        for _ in 0..count {
            server.post(key, &chat("x")).is_completion();
        }
    }
    let groups: Value =
        serde_json::from_str(&server.stdout_of(&["usage", "--by", "key", "--json"])).expect("JSON");
    let id = groups["rows"][0]["key_id"].as_str().expect("an id");
    assert!(
        server
            .stdout_of(&["usage", "--key", id])
            .contains("\n2 requests, 0 errors"),
        "{groups}"
    );
    assert!(
        server
            .stdout_of(&["usage", "--key", "test"])
            .contains("\n3 requests, 0 errors"),
        "every key of that name"
    );
    server.stdout_of(&["keys", "rename", id, "renamed"]);
    server.post(&keys[1], &chat("x")).is_completion();
    let one_key = server.stdout_of(&["usage", "--key", id, "--by", "key", "--csv"]);
    assert!(
        one_key.lines().count() == 2 && one_key.contains("\"renamed\",\"3\""),
        "one line: {one_key}"
    );
    refused(&server, &["usage", "--key", "key_none"], 1, "keys list");
    refused(&server, &["usage", "--gateway", "none"], 1, "--by gateway");
    let groups: Value =
        serde_json::from_str(&server.stdout_of(&["usage", "--by", "gateway", "--json"]))
            .expect("JSON");
    assert_eq!(groups["rows"].as_array().map(Vec::len), Some(1), "{groups}");
    let gateway = groups["rows"][0]["gateway"].as_str().expect("a name");
    assert!(
        server
            .stdout_of(&["usage", "--gateway", gateway])
            .contains("\n4 requests")
    );
    assert!(
        server
            .stdout_of(&["usage", "--key", "test"])
            .contains("\n1 request,"),
        "by its name"
    );
}

/// The figures of a part of a day would be those of the whole day.
#[test]
fn a_time_inside_a_day_whose_rows_were_removed_is_refused() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).sqlite().start();
    server.post(&server.key(), &chat("x")).is_completion();
    // As if it had been made at 13:20 on the second day of 1970.
    server.query(
        "UPDATE usage SET created = 134400, day = '1970-01-02',
         request_id = printf('chatcmpl_%012x%020x', 134400000, 0) RETURNING 1",
    );
    server.query("UPDATE usage_days SET day = '1970-01-02' RETURNING 1");
    let requests = |since: &str, until: &str| {
        let printed = server.stdout_of(&["usage", "--since", since, "--until", until, "--json"]);
        serde_json::from_str::<Value>(&printed).expect("JSON")["requests"].clone()
    };
    assert_eq!(requests("1970-01-02T13:10Z", "1970-01-02T13:20:01Z"), 1);
    assert_eq!(requests("1970-01-02T13:20:01Z", "1970-01-02T14:00Z"), 0);
    assert_eq!(requests("1970-01-01T00:30Z", "00:00"), 1);
    server.query("DELETE FROM usage RETURNING 1");
    server.query("UPDATE gateways SET anchor_seq = 1 RETURNING 1");
    assert_eq!(requests("1970-01-02", "1970-01-02"), 1);
    assert_eq!(
        requests("1970-01-01T00:30Z", "00:00"),
        1,
        "no day is cut that had requests"
    );
    for part in [
        &["usage", "--since", "1970-01-02T13:00Z"][..],
        &["usage", "--until", "1970-01-02T13:00Z"],
        &["usage", "--by", "hour"],
    ] {
        refused(&server, part, 1, "the rows of 1970-01-02 were removed");
    }
}

#[test]
fn one_requests_story() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let reply = server.post(&server.key(), &chat("x"));
    let id = reply.header("x-request-id").expect("an id");
    let printed = server.stdout_of(&["usage", "show", id]);
    assert!(
        printed.contains(id)
            && printed.contains("Answered in ")
            && printed.contains("total tokens  14")
            && printed.contains("test (key_"),
        "{printed}"
    );
    let created = printed
        .lines()
        .find_map(|line| line.strip_prefix("received"))
        .expect("a time")
        .trim();
    assert!(
        created.len() == 20 && created.ends_with('Z'),
        "with seconds: {printed}"
    );
    let json: Value =
        serde_json::from_str(&server.stdout_of(&["usage", "show", id, "--json"])).expect("JSON");
    assert_eq!(
        (&json["status"], &json["total_tokens"], &json["seq"]),
        (&json!(200), &json!(14), &json!(1))
    );
    // The log line is written after the answer is sent.
    let total = format!(" total_ms={} ", json["duration_ms"]);
    until("its line", || server.log().contains(&format!("id={id} ")));
    let log = server.log();
    let line = log
        .lines()
        .find(|line| line.contains(&format!("id={id} ")))
        .expect("its line");
    assert!(
        line.contains(&total) && !line.contains("ledger_ms=- "),
        "{total} in {line}"
    );
    refused(&server, &["usage", "show", "chatcmpl_0"], 1, "no row");
}

#[test]
fn a_ledger_that_was_touched_is_found_out() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    for _ in 0..3 {
        server.post(&key, &chat("x")).is_completion();
    }
    let printed = server.stdout_of(&["usage", "verify"]);
    assert!(
        printed.starts_with("3 rows, nothing wrong. The head is "),
        "{printed}"
    );
    assert_eq!(head_seq(&printed), "3");
    let json = || -> Value {
        serde_json::from_slice(&server.run(&["usage", "verify", "--json"]).stdout).expect("JSON")
    };
    let members = ["ok", "rows", "fault", "through"].map(|name| json()[name].clone());
    assert_eq!(members, [json!(true), json!(3), Value::Null, Value::Null]);
    assert_eq!(json()["heads"][0]["seq"], 3);
    server.query("UPDATE usage SET total_tokens = 1 WHERE seq = 2 RETURNING seq");
    refused(
        &server,
        &["usage", "verify"],
        1,
        "after 1 good row: the row of chatcmpl_",
    );
    assert_eq!((&json()["ok"], &json()["rows"]), (&json!(false), &json!(1)));
    assert!(
        json()["fault"]
            .as_str()
            .is_some_and(|fault| fault.contains("chatcmpl_"))
    );
}

#[test]
fn a_head_that_was_noted_is_checked() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).sqlite().start();
    let key = server.key();
    let head = || -> String {
        server.post(&key, &chat("x")).is_completion();
        let printed = server.stdout_of(&["usage", "verify"]);
        printed
            .trim_end()
            .rsplit_once(' ')
            .expect("a head")
            .1
            .to_owned()
    };
    let [first, second, third] = [head(), head(), head()];
    let through = |head: &str| {
        let output = server.run(&["usage", "verify", "--through", head, "--json"]);
        let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(json["ok"], output.status.success(), "{json}");
        (
            json["through"]["status"]
                .as_str()
                .expect("a status")
                .to_owned(),
            printed,
        )
    };
    for head in [&first, &second, &third] {
        assert_eq!(through(head), ("in_chain".into(), String::new()));
        let printed = server.stdout_of(&["usage", "verify", "--through", head]);
        assert!(
            printed.ends_with(&format!("{head} is part of the chain.\n")),
            "{printed}"
        );
    }
    // Another chain, a shorter one, and the chain of a gateway that does not exist.
    let other = format!("2:{}", &third[2..]);
    for head in [
        other.as_str(),
        &format!("4:{}", &third[2..]),
        &format!("other:{third}"),
    ] {
        let (status, printed) = through(head);
        assert!(
            status == "missing" && printed.contains("is not part of the chain"),
            "{head}: {printed}"
        );
        refused(
            &server,
            &["usage", "verify", "--through", head],
            1,
            "is not part of the chain",
        );
    }
    // Retention has removed the first two rows.
    server.query("UPDATE gateways SET (anchor_seq, anchor_hash) = (SELECT seq, hash FROM usage WHERE seq = 2) RETURNING 1");
    server.query("DELETE FROM usage WHERE seq <= 2 RETURNING 1");
    let (status, printed) = through(&first);
    assert!(
        status == "removed" && printed.contains("can't be checked: retention"),
        "{printed}"
    );
    assert_eq!(through(&second).0, "in_chain", "the anchor is known");
    assert_eq!(through(&third).0, "in_chain");
}

#[test]
fn a_backup_is_made_while_the_service_goes_on() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).sqlite().start();
    let key = server.key();
    server.post(&key, &chat("x")).is_completion();
    let copy = server.folder.path("copy.db");
    let path = copy.to_str().expect("text").to_owned();
    let printed = server.stdout_of(&["backup", &path]);
    let size = copy.metadata().expect("the copy").len().to_string();
    assert!(
        printed.starts_with(&format!("{path}: 1 row, ")) && printed.ends_with(" bytes\n"),
        "{printed}"
    );
    assert_eq!(
        printed
            .rsplit(", ")
            .next()
            .map(|it| it.replace([',', ' '], "")),
        Some(format!("{size}bytes\n"))
    );
    let files = std::fs::read_dir(server.folder.path(""))
        .expect("a folder")
        .flatten();
    let copies = files
        .filter(|file| file.file_name().to_string_lossy().starts_with("copy.db"))
        .count();
    assert_eq!(copies, 1, "nothing beside it");
    refused(&server, &["backup", &path], 1, "new file");
    std::os::unix::fs::symlink(".", server.folder.path("link")).expect("a link");
    server.stdout_of(&["backup", "link/other.db"]);
    server.post(&key, &chat("x")).is_completion();
    let restored = server.set("ADRIATICUM_DATABASE", &path);
    assert!(restored.stdout_of(&["usage"]).contains("\n1 request,"));
    assert!(
        restored
            .stdout_of(&["usage", "verify"])
            .contains(", nothing wrong")
    );
    assert!(restored.stdout_of(&["keys", "list"]).contains("test"));
}

#[test]
fn a_backup_that_fails_leaves_no_file() {
    let server = Server::new(None).sqlite().start();
    let copy = server.folder.path("copy.db");
    let path = copy.to_str().expect("text");
    // The copy may not grow to its size, as on a full disk.
    let limit = "trap '' XFSZ; ulimit -f 32; exec \"$@\"";
    let backup = || {
        server
            .prefixed(&["bash", "-c", limit, "bash"], &["backup", path])
            .output()
    };
    let output = backup().expect("bash should run");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        message.contains("copy.db: ") && !message.contains("a new file"),
        "{message}"
    );
    let left = || {
        std::fs::read_dir(server.folder.path(""))
            .expect("a folder")
            .flatten()
    };
    assert!(left().all(|file| !file.file_name().to_string_lossy().starts_with("copy.db")));
    // The command must not remove a file that it did not create.
    std::fs::write(&copy, "").expect("a file");
    assert_eq!(backup().expect("bash should run").status.code(), Some(1));
    assert!(copy.exists());
    std::fs::remove_file(&copy).expect("it should go");
    server.stdout_of(&["backup", path]);
    assert!(
        copy.metadata().expect("the copy").len() > 32 * 1024,
        "the limit should be less than the copy"
    );
}

/// What `check --json` finds, as pairs of a part and its status, and all of its messages.
fn findings(server: &Server, code: i32) -> (Vec<(String, String)>, String) {
    let output = server.run(&["check", "--json"]);
    assert_eq!(
        output.status.code(),
        Some(code),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let list = json.as_array().expect("an array");
    let text =
        |finding: &Value, member: &str| finding[member].as_str().unwrap_or_default().to_owned();
    let pairs = list
        .iter()
        .map(|finding| (text(finding, "part"), text(finding, "status")))
        .collect();
    (
        pairs,
        list.iter()
            .map(|finding| text(finding, "message") + "\n")
            .collect(),
    )
}

fn status_of(pairs: &[(String, String)], part: &str) -> Vec<String> {
    pairs
        .iter()
        .filter(|(name, _)| name == part)
        .map(|(_, status)| status.clone())
        .collect()
}

#[test]
fn check_reports_what_works() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).sqlite();
    server.key();
    let printed = server.stdout_of(&["check"]);
    assert!(
        printed.contains(": writable, ")
            && printed.contains("MiB free")
            && printed.contains("reports usage"),
        "{printed}"
    );
    let printed = server.stdout_of(&["check", "--database"]);
    assert!(printed.contains("sound and writable"), "{printed}");
    assert!(
        printed.lines().all(|line| line.starts_with("ok  ")),
        "{printed}"
    );
    let (pairs, messages) = findings(&server, 0);
    let parts: Vec<&str> = pairs.iter().map(|(part, _)| part.as_str()).collect();
    assert_eq!(
        parts,
        ["configuration", "clock", "database", "search", "runtime"]
    );
    assert!(
        pairs.iter().all(|(_, status)| status == "ok") && messages.contains("writable"),
        "{messages}"
    );
    assert_eq!(
        server.query("SELECT count(*) FROM usage"),
        [[rusqlite::types::Value::Integer(0)]]
    );
}

#[test]
fn check_reports_what_does_not_work_and_what_to_do() {
    let runtime = Runtime::start();
    let server = Server::new(None).set(
        "ADRIATICUM_RUNTIME_URL",
        format!("{},http://127.0.0.1:1/v1", runtime.url()),
    );
    let printed = String::from_utf8_lossy(&server.run(&["check"]).stdout).into_owned();
    assert!(
        printed.contains("FAIL  runtime        http://127.0.0.1:1/v1: no connection"),
        "{printed}"
    );
    let (pairs, messages) = findings(&server, 1);
    assert_eq!(status_of(&pairs, "runtime"), ["ok", "fail"], "{messages}");

    let nowhere = Server::new(None).set("ADRIATICUM_DATABASE", "/nowhere/at/all.db");
    let (pairs, messages) = findings(&nowhere, 1);
    assert_eq!(status_of(&pairs, "database"), ["fail"]);
    assert!(
        messages.contains("there is no database at /nowhere/at/all.db")
            && messages.contains("ADRIATICUM_RUNTIME_URL"),
        "{messages}"
    );
}

#[test]
fn check_warns_of_secrets_that_everybody_can_read() {
    let server = Server::new(None).sqlite();
    server.key();
    let (key_file, database) = (
        server.folder.path("runtime-key"),
        server.folder.path("adriaticum.db"),
    );
    std::fs::write(&key_file, "sesame").expect("a file");
    crate::tls::certify(&server.folder.path(""));
    let (certificate, tls_key) = (
        server.folder.path("cert.pem"),
        server.folder.path("key.pem"),
    );
    let server = server
        .set("ADRIATICUM_RUNTIME_API_KEY_FILE", key_file.display())
        .set("ADRIATICUM_TLS_CERT", certificate.display())
        .set("ADRIATICUM_TLS_KEY", tls_key.display());
    let change = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("it is ours");
    };
    for path in [&key_file, &database, &tls_key] {
        change(path, 0o640);
    }
    assert!(status_of(&findings(&server, 1).0, "secrets").is_empty());
    for path in [&key_file, &database, &tls_key] {
        change(path, 0o644);
        let (pairs, messages) = findings(&server, 1);
        assert_eq!(status_of(&pairs, "secrets"), ["warn"]);
        assert!(
            messages.contains(&format!("chmod o-rwx {}\n", path.display())),
            "{messages}"
        );
        change(path, 0o640);
    }
}

#[test]
fn check_warns_of_a_configuration_with_a_secret_that_everybody_can_read() {
    let server = Server::new(None);
    let (path, password) = (server.folder.path("a.toml"), server.folder.path("password"));
    let with_secret = "database = 'postgresql://user:sesame@127.0.0.1:1/db'\n";
    std::fs::write(&password, "sesame\n").expect("a file");
    let mut server = server.set("ADRIATICUM_CONFIG", path.display());
    server
        .environment
        .retain(|(name, _)| name != "ADRIATICUM_DATABASE");
    for (text, mode, warned) in [
        (with_secret, 0o644, Some("database_password_file")),
        (with_secret, 0o640, None),
        (
            "runtime.api_key = 'sesame'\n",
            0o644,
            Some("runtime.api_key_file"),
        ),
        ("runtime.api_key = ''\n", 0o644, None),
    ] {
        std::fs::write(&path, text).expect("a file");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("it is ours");
        let (pairs, messages) = findings(&server, 1);
        assert_eq!(
            status_of(&pairs, "secrets").len(),
            usize::from(warned.is_some()),
            "{text} {messages}"
        );
        assert!(
            warned.is_none_or(|word| messages.contains(word)),
            "{messages}"
        );
        assert!(!messages.contains("sesame"), "{messages}");
    }
    std::fs::write(&path, "database = 'postgresql://user@127.0.0.1:1/db'\n").expect("a file");
    std::fs::set_permissions(&password, std::fs::Permissions::from_mode(0o644))
        .expect("it is ours");
    let server = server.set("ADRIATICUM_DATABASE_PASSWORD_FILE", password.display());
    let (_, messages) = findings(&server, 1);
    assert!(
        messages.contains(&format!("chmod o-rwx {}\n", password.display())),
        "{messages}"
    );
}

/// Other hosts got 404 from a service that said nothing about it, or sent their keys in the clear.
#[test]
fn an_address_that_other_hosts_can_reach_is_warned_of() {
    let runtime = Runtime::start();
    for (listen, hosts, proxies, warned) in [
        (
            "0.0.0.0:0",
            "localhost,127.0.0.1,::1",
            "10.0.0.1",
            ["api_hosts", ""],
        ),
        (
            "0.0.0.0:0",
            "localhost,192.0.2.7",
            "unix",
            ["", "trusted_proxies"],
        ),
        (
            "0.0.0.0:0",
            "127.0.0.9",
            "",
            ["api_hosts", "trusted_proxies"],
        ),
        ("0.0.0.0:0", "192.0.2.7", "10.0.0.0/8", ["", ""]),
        ("127.0.0.1:0", "localhost", "", ["", ""]),
    ] {
        let server = Server::new(Some(&runtime))
            .sqlite()
            .set("ADRIATICUM_LISTEN", listen)
            .set("ADRIATICUM_API_HOSTS", hosts)
            .set("ADRIATICUM_TRUSTED_PROXIES", proxies);
        let is_warned = |text: &str| {
            let line = text
                .lines()
                .find(|line| line.contains("other hosts can reach"))
                .unwrap_or_default();
            ["api_hosts", "trusted_proxies"].map(|word| if line.contains(word) { word } else { "" })
        };
        server.key();
        let checked = String::from_utf8_lossy(&server.run(&["check"]).stdout).into_owned();
        assert_eq!(
            is_warned(&checked),
            warned,
            "{listen} {hosts} {proxies}: {checked}"
        );
        let server = server.start();
        until("the warning would be logged", || {
            server.log().contains("console at")
        });
        assert_eq!(is_warned(&server.log()), warned, "{}", server.log());
        // As if systemd had passed the socket: the setting says nothing about it then.
        let server = server.set("ADRIATICUM_LISTEN", "127.0.0.1:0");
        let checked = String::from_utf8_lossy(&server.run(&["check"]).stdout).into_owned();
        assert_eq!(
            is_warned(&checked),
            warned,
            "where it listened last: {checked}"
        );
    }
}

#[test]
fn an_address_that_cannot_be_used_has_its_reason() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let taken = taken.local_addr().expect("an address").to_string();
    for (listen, reason) in [
        (taken.as_str(), "another program uses"),
        ("192.0.2.1:0", "does not have this address"),
    ] {
        refused(
            &Server::new(None).set("ADRIATICUM_LISTEN", listen),
            &["serve"],
            1,
            reason,
        );
    }
}

/// A mistyped address was taken for the name of a file: its password was printed, and was in the name of a new file.
#[test]
fn a_mistyped_address_keeps_its_password() {
    const COMMANDS: [&[&str]; 12] = [
        &["serve"],
        &["check"],
        &["check", "--json"],
        &["keys", "create", "x"],
        &["keys", "list"],
        &["usage"],
        &["usage", "verify"],
        &["audit"],
        &["backup", "copy.db"],
        &["restore", "copy.db"],
        &["console", "password"],
        &["search", "query", "x"],
    ];
    let keeps = |server: &Server, arguments: &[&str]| {
        let output = server.run(arguments);
        let all = String::from_utf8([output.stdout, output.stderr].concat()).expect("text");
        assert!(!all.contains("sesame"), "{arguments:?}: {all}");
        let files = std::fs::read_dir(server.folder.path(""))
            .expect("a folder")
            .flatten();
        let names: Vec<_> = files.map(|file| file.file_name()).collect();
        assert!(
            names
                .iter()
                .all(|name| !name.to_string_lossy().contains("sesame")),
            "{names:?}"
        );
        (output.status.code(), all)
    };
    for (name, value) in [
        ("DATABASE", " postgresql://u:sesame@127.0.0.1:1/"),
        ("DATABASE", "mysql://u:sesame@127.0.0.1:1/"),
        ("DATABASE", "host=127.0.0.1 port=1 password=sesame"),
        ("DATABASE", "POSTGRESQL://u:sesame@127.0.0.1:1/?sesame=1"),
        ("RUNTIME_URL", "http://127.0.0.1:1/v1?key=sesame"),
        ("RUNTIME_URL", "http://u:sesame@127.0.0.1:1/v1"),
        ("SEARCH_URL", "http://127.0.0.1:1/?key=sesame"),
    ] {
        let server = Server::new(None).set(&format!("ADRIATICUM_{name}"), value);
        for command in COMMANDS {
            let (code, all) = keeps(&server, command);
            assert!(
                code == Some(2) && all.contains(": expected "),
                "{value}, {command:?}: {all}"
            );
        }
    }
    // The scheme of a URI may be in upper case.
    let server = Server::new(None).set("ADRIATICUM_DATABASE", "POSTGRESQL://u:sesame@127.0.0.1:1/");
    for command in COMMANDS {
        keeps(&server, command);
    }
    assert!(
        keeps(&server, &["usage"])
            .1
            .contains("postgresql://u@127.0.0.1:1/u")
    );
    let uri = "POSTGRES://u:sesame@127.0.0.1:1/";
    for words in [
        &["move", "--from", "mysql://u:sesame@a/", "--to", uri][..],
        &["move", "--from", "a.db", "--to", "host=a password=sesame"],
        &["move", "--from", uri, "--to", uri],
        &["move", "--from", "a.db", uri],
        &["move", "--from", "a.db", "--to", "b.db", uri],
        &["keys", "list", "--json=u:sesame@a"],
        &[uri],
    ] {
        assert_eq!(keeps(&server, words).0, Some(2), "{words:?}");
    }
    assert_eq!(
        keeps(&server, &["move", "--from", "a.db", "--to", uri]).0,
        Some(1),
        "there is no a.db"
    );

    let server = Server::new(None).start();
    // It listens before it takes signals.
    server
        .post("none", &serde_json::json!({}))
        .is_error(401, "invalid_api_key");
    let config = "[runtime]\nurl = 'http://127.0.0.1:1/v1?key=sesame'\n";
    std::fs::write(server.folder.path("empty.toml"), config).expect("a file");
    server.signal(rustix::process::Signal::HUP);
    until("it is printed", || {
        server.log().contains("configuration not reloaded: ")
    });
    assert!(!server.log().contains("sesame"), "{}", server.log());
}

#[test]
fn check_reports_what_a_runtime_says_of_itself() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime));
    server.key();
    let list = |models: serde_json::Value| {
        *runtime.probes.models.lock().expect("the list") = (200, models)
    };
    list(json!({"data": [{"id": "other.gguf"}]}));
    runtime.next(Script::Answer(
        200,
        json!({"default_generation_settings": {"n_ctx": 8192}}),
    ));
    runtime.next(Script::Answer(
        200,
        json!({"choices": [{"message": {"content": "x"}}]}),
    ));
    let (pairs, messages) = findings(&server, 0);
    assert_eq!(status_of(&pairs, "runtime"), ["warn"]);
    assert!(
        messages.contains("context of 8192 tokens; the largest requests may not fit")
            && messages.contains("reports no usage"),
        "{messages}"
    );
    list(json!({"data": [{"id": "other.gguf", "max_model_len": 4096}]}));
    let unknown_model = json!({"error": {"message": "model 'adriaticum' not found"}});
    for (status, answer, advice) in [
        (
            404,
            unknown_model,
            "Set runtime.model to a model that it has: other.gguf",
        ),
        (404, json!({"detail": "Not Found"}), "Check runtime.url"),
        (401, json!({}), "check runtime.api_key"),
        (403, json!({}), "check runtime.api_key"),
        (
            503,
            json!({"error": {"message": "Loading model"}}),
            "It is loading its model",
        ),
        (500, json!({}), "Read its log"),
    ] {
        runtime.next(Script::Answer(status, answer));
        // One that loads its model works soon.
        let (_, messages) = findings(&server, i32::from(status != 503));
        let message = messages
            .lines()
            .find(|line| line.contains(&runtime.url()))
            .expect("the runtime");
        assert!(
            message.contains(&format!("HTTP status {status}")) && message.contains(advice),
            "{message}"
        );
        assert_eq!(
            message.contains("runtime.model"),
            advice.contains("runtime.model"),
            "{message}"
        );
    }
    runtime.next(Script::Silent);
    let server = server.set("ADRIATICUM_RUNTIME_TIMEOUT", 1);
    let (_, messages) = findings(&server, 1);
    assert!(
        messages.contains("no complete answer in 1.0 s") && messages.contains("runtime.timeout"),
        "{messages}"
    );
}

/// A person waits for it, whatever `runtime.timeout` is.
#[test]
fn check_waits_fifteen_seconds_for_a_part_at_most() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).set("ADRIATICUM_RUNTIME_TIMEOUT", 600);
    server.key();
    runtime.next(Script::Silent);
    let (_, messages) = findings(&server, 1);
    assert!(messages.contains("no complete answer in 15."), "{messages}");
}

/// With this, a runtime set the title of the terminal, and could have written lines of its own.
#[test]
fn check_prints_nothing_that_a_terminal_executes() {
    let escape = "\u{1b}]0;x\u{7}\nok    runtime \u{9b}31m";
    let (runtime, search) = (Runtime::start(), Runtime::start());
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_SEARCH_URL", search.url())
        .set("ADRIATICUM_SEARCH_GROUNDING", "always");
    server.key();
    search.next(Script::Answer(
        200,
        json!({"results": [], "unresponsive_engines": [[escape, escape]]}),
    ));
    runtime.next(Script::Answer(
        404,
        json!({"error": {"message": format!("model not found {escape}")}}),
    ));
    let models = json!({"data": [{"id": escape, "max_model_len": 4096}]});
    *runtime.probes.models.lock().expect("the list") = (200, models);
    let is_harmless = |text: &str| text.chars().all(|c| c == '\n' || !c.is_control());
    let output = server.run(&["check"]);
    let printed = String::from_utf8(output.stdout).expect("text");
    assert!(
        is_harmless(&printed) && printed.contains(r"that it has: \u{1b}]0;x\u{7}\u{a}ok"),
        "{printed:?}"
    );
    assert!(
        !printed
            .lines()
            .any(|line| line.starts_with("ok    runtime")),
        "{printed}"
    );
}

#[test]
fn check_notices_a_clock_that_was_set_back() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    server.post(&server.key(), &chat("x")).is_completion();
    server.query("UPDATE usage SET created = created + 3600 RETURNING seq");
    let (pairs, messages) = findings(&server, 0);
    assert_eq!(status_of(&pairs, "clock"), ["warn"], "{messages}");
}
