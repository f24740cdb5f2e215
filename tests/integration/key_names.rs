//! Commands that take a key by its id, its name or its secret.

use std::io::Write;
use std::process::{Output, Stdio};

use serde_json::Value;

use crate::console::{Browser, with_console};
use crate::support::{Runtime, Server, chat};

/// Returns the exit code and what a command prints on both outputs. No command repeats the secret.
fn printed(server: &Server, secret: &str, arguments: &[&str]) -> (Option<i32>, String) {
    with_input(server, secret, arguments, "")
}

fn with_input(
    server: &Server,
    secret: &str,
    arguments: &[&str],
    input: &str,
) -> (Option<i32>, String) {
    let mut command = server.command(arguments);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary should run");
    // A command that refuses its arguments does not read.
    let _ = child
        .stdin
        .take()
        .expect("its input")
        .write_all(input.as_bytes());
    let Output {
        status,
        stdout,
        stderr,
    } = child.wait_with_output().expect("its end");
    let text = String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned();
    assert!(
        !text.contains(&secret[4..20]),
        "{arguments:?} repeats the secret: {text}"
    );
    (status.code(), text)
}

fn create(server: &Server, name: &str) -> (String, String) {
    let secret = server
        .stdout_of(&["keys", "create", name])
        .trim()
        .to_owned();
    let keys: Value =
        serde_json::from_str(&server.stdout_of(&["keys", "list", "--json"])).expect("JSON");
    let hint = format!("{}…{}", &secret[..8], &secret[48..]);
    let key = keys
        .as_array()
        .expect("an array")
        .iter()
        .find(|key| key["hint"] == *hint)
        .expect("the key");
    (secret, key["id"].as_str().expect("an id").to_owned())
}

/// A secret was found in a public repository, and nobody knew whose it was. The list shows eight of its digits.
#[test]
fn a_leaked_secret_is_enough_to_revoke_its_key() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let (_, other) = create(&server, "other");
    for (arguments, input) in [
        (&["keys", "revoke"][..], "SECRET\n"),
        (&["keys", "revoke", "-"], "  SECRET \r\nmore\n"),
        (&["keys", "revoke", "SECRET"], ""),
    ] {
        let (secret, id) = create(&server, "leaked");
        server.post(&secret, &chat("x")).is_completion();
        let arguments: Vec<&str> = arguments
            .iter()
            .map(|word| if *word == "SECRET" { &secret } else { *word })
            .collect();
        let input = input.replace("SECRET", &secret);
        let (code, text) = with_input(&server, &secret, &arguments, &input);
        assert_eq!(code, Some(0), "{text}");
        assert!(
            text.starts_with(&format!("Revoked {id} (leaked) in ")),
            "{text}"
        );
        server
            .post(&secret, &chat("x"))
            .is_error(401, "invalid_api_key");
        let (code, text) = with_input(&server, &secret, &arguments, &input);
        assert!(
            code == Some(0) && text.contains("is revoked already, since "),
            "{text}"
        );
    }
    let unknown = format!("adr_{}", "0123456789abcdef".repeat(3));
    let wrong = "there is no key with that id, secret or name. List the keys: adriaticum keys list";
    // Also without its prefix, it is not repeated.
    for text in [
        &unknown,
        &unknown[..30],
        &unknown[4..],
        &unknown.to_uppercase(),
    ] {
        let (code, said) = with_input(&server, &unknown, &["keys", "revoke"], text);
        assert!(code == Some(1) && said.contains(wrong), "{said}");
        let (code, said) = printed(&server, &unknown, &["keys", "revoke", text]);
        assert!(code == Some(1) && said.contains(wrong), "{said}");
    }
    for (arguments, code, part) in [
        (&["keys", "revoke"][..], 2, "KEY or SECRET is missing"),
        (&["keys", "rotate"], 2, "KEY or SECRET is missing"),
        (
            &["keys", "set", &unknown, "--expires", "1h"],
            1,
            "only keys revoke and keys rotate take a secret",
        ),
        (
            &["keys", "rename", &unknown, "x"],
            1,
            "only keys revoke and keys rotate take a secret",
        ),
        (
            &["usage", "--key", &unknown],
            1,
            "only keys revoke and keys rotate take a secret",
        ),
        (
            &["keys", "rename", &other, &unknown],
            2,
            "1 to 64 printable characters, and not the form of",
        ),
        (
            &["keys", "create", &unknown],
            2,
            "1 to 64 printable characters, and not the form of",
        ),
        (&["keys", "revoke", "x", &unknown], 2, "unexpected argument"),
        (&["keys", &unknown], 2, "subcommand"),
    ] {
        let (found, said) = printed(&server, &unknown, arguments);
        assert!(
            found == Some(code) && said.contains(part),
            "{arguments:?}: {said}"
        );
    }
}

#[test]
fn a_name_means_one_key_or_is_refused() {
    let server = Server::new(None);
    let (secret, first) = create(&server, "billing");
    let run = |arguments: &[&str]| printed(&server, &secret, arguments);
    for arguments in [
        &["keys", "set", "billing", "--concurrent", "4"][..],
        &["keys", "rename", "billing", "invoices"],
        &["keys", "rename", "invoices", "billing"],
        &["usage", "--key", "billing"],
    ] {
        let (code, text) = run(arguments);
        assert!(code == Some(0) && !text.contains("Warning"), "{text}");
    }
    let (_, text) = run(&["keys", "create", "billing"]);
    assert!(
        text.contains(&format!("Warning: this is also the name of {first}. ")),
        "{text}"
    );
    let second = text
        .split("Created ")
        .nth(1)
        .expect("an id")
        .split(' ')
        .next()
        .expect("its end")
        .to_owned();
    for arguments in [
        &["keys", "set", "billing", "--concurrent", "4"][..],
        &["keys", "rename", "billing", "x"],
        &["keys", "revoke", "billing"],
        &["keys", "rotate", "billing"],
    ] {
        let (code, text) = run(arguments);
        assert!(
            code == Some(1) && text.contains("2 keys have that name. Use the id: "),
            "{text}"
        );
        let hint = format!("{first} ({}…{})", &secret[..8], &secret[48..]);
        assert!(text.contains(&hint) && text.contains(&second), "{text}");
    }
    let (_, text) = run(&["keys", "revoke", &second]);
    assert!(text.starts_with(&format!("Revoked {second}")), "{text}");
    let (code, text) = run(&["keys", "revoke", "billing"]);
    assert!(
        code == Some(0) && text.starts_with(&format!("Revoked {first} ")),
        "{text}"
    );
    let (code, text) = run(&["keys", "create", "billing"]);
    assert!(
        code == Some(0) && !text.contains("Warning"),
        "the others are revoked: {text}"
    );
    for name in ["key_0123456789abcdef", "KEY_0123456789ABCDEF"] {
        let (code, text) = run(&["keys", "create", name]);
        assert!(
            code == Some(2) && text.contains("not the form of a key's id or secret"),
            "{text}"
        );
    }
}

#[test]
fn the_terms_of_a_key_are_printed_in_words() {
    let server = Server::new(None);
    let output = server.run(&[
        "keys",
        "create",
        "x",
        "--expires",
        "2d",
        "--concurrent",
        "4",
        "--budget",
        "500000/day",
    ]);
    let (secret, text) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert_eq!(
        (secret.lines().count(), secret.len()),
        (1, 53),
        "only the secret"
    );
    assert!(
        text.contains("\nIt may run completions, until 20"),
        "{text}"
    );
    assert!(
        text.ends_with(" UTC (2 days), at most 4 at a time, 500,000 tokens per day.\n"),
        "{text}"
    );
    let arguments = [
        "keys",
        "set",
        "x",
        "--expires",
        "never",
        "--concurrent",
        "none",
        "--permission",
        "metrics",
    ];
    let (_, text) = printed(&server, &secret, &arguments);
    assert!(
        text.ends_with(".\nIt may read the metrics, 500,000 tokens per day.\n"),
        "{text}"
    );
}

#[test]
fn the_console_refuses_a_name_that_looks_like_an_id() {
    let server = with_console(None);
    let mut browser = Browser::signed_in(&server);
    let page = browser.get("/keys/new").text();
    let once = page
        .split("name=\"once\" value=\"")
        .nth(1)
        .expect("the field")
        .split('"')
        .next()
        .expect("its end");
    let fields = [
        ("name", "key_0123456789abcdef"),
        ("permission", "completions"),
        ("once", once),
    ];
    let reply = browser.post("/keys", &fields);
    assert_eq!(reply.status, 400);
    assert!(
        reply.text().contains("not the form of a key"),
        "{}",
        reply.text()
    );
}
