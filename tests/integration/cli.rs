//! The commands, as a person or a script uses them.

use serde_json::Value;

use crate::support::{Runtime, Server, chat};

#[track_caller]
fn refused(server: &Server, arguments: &[&str], code: i32, word: &str) {
    let output = server.run(arguments);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {told}");
    assert!(told.contains(word), "{arguments:?}: {word:?} expected in {told:?}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
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
        "2100-01-01",
    ]);
    let secret = String::from_utf8(made.stdout).expect("text");
    assert_eq!(secret.trim_end().len(), 52);
    assert_eq!(secret.matches('\n').count(), 1, "the secret alone is printed");
    assert!(String::from_utf8_lossy(&made.stderr).contains("key_"));
    let listed = server.told(&["keys", "list"]);
    assert!(listed.contains("for the tests") && listed.contains("2100-01-01 00:00Z"), "{listed}");
    let json: Value = serde_json::from_str(&server.told(&["keys", "list", "--json"])).expect("JSON");
    assert_eq!(json[0]["expires"], 4_102_444_800_i64);
    assert_eq!(json[0]["permissions"], serde_json::json!(["metrics"]));
    assert!(json[0].get("digest").is_none());
    let id = json[0]["id"].as_str().expect("an id");
    server.told(&["keys", "rename", id, "another"]);
    server.told(&["keys", "revoke", id]);
    let json: Value = serde_json::from_str(&server.told(&["keys", "list", "--json"])).expect("JSON");
    assert_eq!(json[0]["name"], "another");
    assert!(json[0]["revoked"].is_i64());
}

#[test]
fn wrong_use_is_told() {
    let server = Server::new(None);
    for (arguments, word) in [
        (&[][..], "command is missing"),
        (&["nonsense"], "nonsense"),
        (&["--nonsense"], "--nonsense"),
        (&["serve", "now"], "too many"),
        (&["serve", "--config"], "--config"),
        (&["keys"], "create"),
        (&["keys", "nonsense"], "nonsense"),
        (&["keys", "create"], "NAME"),
        (&["keys", "create", ""], "1 to 64"),
        (&["keys", "create", "a\nb"], "printable"),
        (&["keys", "create", "x", "--permission", "all"], "completions or metrics"),
        (&["keys", "create", "x", "--expires", "soon"], "YYYY-MM-DD"),
        (&["keys", "create", "x", "--expires", "2001-01-01"], "past"),
        (&["keys", "rename", "x"], "NAME"),
        (&["keys", "list", "--csv"], "--csv"),
        (&["usage", "--by", "hour"], "day or key"),
        (&["usage", "--json", "--csv"], "exclude"),
    ] {
        refused(&server, arguments, 2, word);
    }
    refused(&server, &["keys", "revoke", "key_none"], 1, "keys list");
    for help in [
        &["--help"][..],
        &["serve", "--help"],
        &["keys", "--help"],
        &["keys", "list", "-h"],
        &["usage", "--help"],
        &["check", "--help"],
    ] {
        assert!(server.told(help).contains("Usage: adriaticum"), "{help:?}");
    }
    assert_eq!(server.told(&["--version"]).trim(), format!("adriaticum {}", env!("CARGO_PKG_VERSION")));
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
        refused(&server, arguments, 1, &format!("workers in {path}"));
    }
    refused(&server, &["--config", "/nowhere.toml", "serve"], 1, "/nowhere.toml");
    refused(&server.set("ADRIATICUM_CONFIG", path), &["serve"], 1, "1 to 1024");
}

#[test]
fn usage_in_its_forms() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    server.post(&key, &chat("x")).is_completion();
    let table = server.told(&["usage"]);
    assert!(table.lines().count() == 2 && table.contains("14"), "{table}");
    let csv = server.told(&["usage", "--by", "key", "--csv"]);
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(
        lines[0],
        "key_id,name,requests,errors,prompt_tokens,completion_tokens,total_tokens,unmeasured"
    );
    assert!(lines[1].ends_with(",test,1,0,11,3,14,0"), "{csv}");
    let json: Value = serde_json::from_str(&server.told(&["usage", "--by", "day", "--json"])).expect("JSON");
    assert_eq!(json["rows"][0]["requests"], 1);
    assert!(json["rows"][0]["day"].as_str().is_some_and(|day| day.len() == 10));
    let json: Value =
        serde_json::from_str(&server.told(&["usage", "--since", "2100-01-01", "--json"])).expect("JSON");
    assert_eq!(json["requests"], 0);
}

#[test]
fn check_tells_what_works_and_what_does_not() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime));
    let told = server.told(&["check"]);
    assert!(told.contains("first start makes it") && told.contains("reports usage"), "{told}");
    assert!(!server.folder.path("adriaticum.db").exists(), "a check makes no database");
    server.key();
    let told = server.told(&["check"]);
    assert!(told.contains("takes a write"), "{told}");
    assert_eq!(server.query("SELECT count(*) FROM usage"), [[rusqlite::types::Value::Integer(0)]]);

    let both = format!("{},http://127.0.0.1:1/v1", runtime.url());
    let output = server.set("ADRIATICUM_RUNTIME_URL", both).run(&["check"]);
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(told.contains("FAIL  runtime        http://127.0.0.1:1/v1: no connection"), "{told}");
    assert_eq!(told.matches("ok  ").count(), 3, "{told}");

    let nowhere = Server::new(None).set("ADRIATICUM_DATABASE", "/nowhere/at/all.db");
    let told = String::from_utf8_lossy(&nowhere.run(&["check"]).stdout).into_owned();
    assert!(told.contains("folder does not exist") && told.contains("ADRIATICUM_RUNTIME_URL"), "{told}");
    let told =
        String::from_utf8_lossy(&nowhere.set("ADRIATICUM_QUEUE", "x").run(&["check"]).stdout).into_owned();
    assert!(told.starts_with("FAIL  configuration") && told.contains("ADRIATICUM_QUEUE"), "{told}");
}
