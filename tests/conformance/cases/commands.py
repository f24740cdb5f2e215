"""The command line: what each command prints, changes and returns."""

import csv
import io
import json
import re
import signal
import subprocess
import time

from browser import set_password
from harness import Server, chat, is_completion, is_error, until
from shared import RUNTIME, SERVER, ok

COMMANDS = ("serve", "keys create", "keys list", "keys rename", "keys revoke", "keys rotate", "keys set", "usage", "usage list",
            "usage show", "usage verify", "backup", "restore", "console password", "audit", "move", "check", "search query")

# Wrong use of the command line, and a part of the message.
WRONG_USE = (
    ("", "Usage: adriaticum [OPTIONS] <COMMAND>"),
    ("nonsense", "error: unrecognized subcommand 'nonsense'\n\nUsage: adriaticum [OPTIONS] <COMMAND>\n"),
    ("help nonsense", "unrecognized subcommand 'nonsense'"),
    ("key list", "a similar subcommand exists: 'keys'"),
    ("--versoin", "a similar argument exists: '--version'"),
    ("-x", "unexpected argument '-x' found"),
    ("serve now", "unexpected argument 'now' found"),
    ("serve --config", "a value is required for '--config <FILE>'"),
    ("--config a --config b serve", "'--config <FILE>' cannot be used multiple times"),
    ("--config a serve --config=b", "'--config <FILE>' cannot be used multiple times"),
    ("keys", "Usage: adriaticum keys [OPTIONS] <COMMAND>"),
    ("keys crate x", "similar subcommands exist: 'rename', 'rotate', 'create'"),
    ("keys create", "<NAME>"),
    (["keys", "create", ""], "1 to 64"),
    (["keys", "create", "a\nb"], "printable"),
    ("keys create x --expire 90d", "a similar argument exists: '--expires'"),
    ("keys create x --expires 2027-02-30", "'--expires <WHEN>': there is no such date\n"),
    ("keys create x --expires soon", "YYYY-MM-DD"),
    ("keys create x --expires 2001-01-01", "past"),
    ("keys create x --permission all", "[possible values: completions, metrics]"),
    ("keys create x --concurrent 0", "1 to 10000"),
    ("keys create x --budget 1000", "a slash, and day or month, or none"),
    ("keys create x --budget 0/day", "from 1 to 1000000000000"),
    ("keys create x --budget 5/day --budget 9/month", "cannot be used multiple times"),
    ("keys rename x", "<NAME>"),
    ("keys list --state dead", "[possible values: active, expiring, expired, revoked]"),
    ("keys list --csv", "unexpected argument '--csv' found"),
    ("keys list --json --json", "'--json' cannot be used multiple times"),
    ("keys list --jsno", "'--json'"),
    ("keys set x", "--budget"),
    ("keys set x --concurrent 10001", "or none"),
    ("keys set x --expires soon", "or never"),
    ("console passwd", "a similar subcommand exists: 'password'"),
    ("usage nonsense", "unrecognized subcommand 'nonsense'"),
    ("usage --since nonsense", "expected"),
    ("usage --since 2027-02-30", "there is no such date"),
    ("usage --until 25:00", "or HH:MM today"),
    ("usage --since 2026-01-02T13:00+25:00", "an offset such as +01:00"),
    ("usage --since 2026-01-02 --until 2026-01-01", "the range from 2026-01-02 to 2026-01-01 ends before it begins"),
    ("usage --since 2026-01-02 --until 2026-01-02T00:00Z", "from 2026-01-02 to 2026-01-01 ends before"),
    ("usage --since 2100-01-01", "begins at 2100-01-01T00:00:00Z, in the future: it is 20"),
    ("usage list --since 2100-01-01 --until 2100-01-02", "in the future"),
    ("usage --month 2100-01", "in the future"),
    ("usage --month 2026-13", "a month as YYYY-MM, or last"),
    ("usage --month last --since 1d", "cannot be used with"),
    ("usage --since 1d show x", "options before list, show or verify are those of the report"),
    ("usage --json verify", "Put them after it."),
    ("usage --by week", "[possible values: hour, day, month, key, status, gateway]"),
    ("usage --by day,day", "or two that differ"),
    ("usage --by month,day", "or two that differ"),
    ("usage --by key,day,status", "or two that differ"),
    ("usage --key a --key b", "cannot be used multiple times"),
    ("usage --json --csv", "'--json' cannot be used with '--csv'"),
    ("usage list --limit 0", "a number from 1"),
    ("usage list --by day", "--by"),
    ("usage list --status week", "week"),
    ("usage list --status 99", "99"),
    ("usage list --status timeout", "timeout"),
    ("usage show", "<REQUEST_ID>"),
    ("usage verify --through 3:0f", "[GATEWAY:]SEQ:HASH"),
    ("audit --since yesterday", "expected a number followed by s, m, h or d"),
    ("search query --json", "<WORDS>..."),
    ("move", "--from <DATABASE>\n  --to <DATABASE>"),
    ("move --from a.db --to b.db", "--to takes the postgresql:// URI of an empty database"),
    ("backup", "<FILE>"),
    ("restore", "<FILE>"),
)


def every_command_has_help():
    for command in ("", *COMMANDS):
        done = SERVER.cli(*command.split(), "--help")
        assert "Usage: adriaticum" in done.stdout and not done.stderr, (command, done)
    assert re.fullmatch(r"adriaticum \d+\.\d+\.\d+\S*\n", SERVER.cli("--version").stdout)
    assert SERVER.cli("-V").stdout == SERVER.cli("--version").stdout
    assert SERVER.cli("help").stdout == SERVER.cli("-h").stdout == SERVER.cli("--help").stdout
    assert SERVER.cli("help", "keys", "create").stdout == SERVER.cli("keys", "create", "--help").stdout


def wrong_use_has_a_message_and_exit_code_2():
    for arguments, message in WRONG_USE:
        done = SERVER.cli(*(arguments.split() if isinstance(arguments, str) else arguments), check=False)
        assert done.returncode == 2 and message in done.stderr and not done.stdout, (arguments, done)


def what_does_not_exist_has_exit_code_1():
    for arguments, message in (
            ("keys revoke key_none", "keys list"), ("keys rename key_none x", "keys list"),
            ("keys set key_none --concurrent 1", "keys list"), ("usage --key key_none", "keys list"), ("usage --gateway none", "--by gateway"),
            ("usage show chatcmpl_" + "0" * 32, "no row")):
        done = SERVER.cli(*arguments.split(), check=False)
        assert done.returncode == 1 and message in done.stderr and not done.stdout, (arguments, done)


def the_configuration_file_is_found_and_named():
    server = Server()
    path = server.folder / "a.toml"
    path.write_text("workers = 0\n")
    refused = lambda *arguments: server.cli(*arguments, check=False)  # noqa: E731
    for arguments in (["--config", path, "serve"], ["serve", "--config", path], ["serve", f"--config={path}"]):
        done = refused(*arguments)
        assert done.returncode == 2 and f"{path}:1: workers = 0: expected" in done.stderr, done
    server.environment |= {"ADRIATICUM_CONFIG": str(path), "ADRIATICUM_QUEUE": "x"}
    for arguments in (["serve"], ["keys", "list"], ["check"]):
        done = refused(*arguments)
        assert done.returncode == 2 and "has 2 problems:\n" in done.stderr and '\n  ADRIATICUM_QUEUE="x": expected' in done.stderr, done
    # For a script that reads it, the check's JSON has it as a finding.
    done = refused("check", "--json")
    finding, = json.loads(done.stdout)
    assert (done.returncode, finding["part"], finding["status"]) == (2, "configuration", "fail"), done


def a_missing_database_is_named_and_not_created():
    """Only serve, keys create, console password, restore and move create one. A backup of an empty one was made in the wrong folder."""
    server = Server()
    path = server.folder / "missing.db"
    server.environment["ADRIATICUM_DATABASE"] = "missing.db"
    for command in ("keys list", "keys rename key_1 x", "keys revoke key_1", "keys rotate key_1", "keys set key_1 --concurrent 1", "usage",
                    "usage list", "usage show chatcmpl_1", "usage verify", "audit", "backup copy.db"):
        done = server.cli(*command.split(), check=False)
        assert done.returncode == 1 and not done.stdout, (command, done)
        for part in (f"there is no database at {path}", "--config FILE",
                     "Create it with adriaticum serve, keys create, console password, restore or move."):
            assert part in done.stderr, (command, done)
    done = server.cli("move", "--from", "missing.db", "--to", "postgresql://a@127.0.0.1:1/a", check=False)
    assert done.returncode == 1 and "there is no database at missing.db. --from takes" in done.stderr, done
    parts = json.loads(server.cli("check", "--json", check=False).stdout)
    failed, = (part for part in parts if part["part"] == "database")
    assert failed["status"] == "fail" and str(path) in failed["message"], parts
    assert [file.name for file in server.folder.iterdir()] == ["empty.toml"], "something was created"


def a_change_names_its_database():
    server = Server()
    path = server.folder / "here.db"
    server.environment["ADRIATICUM_DATABASE"] = "here.db"
    created = server.cli("keys", "create", "x").stderr
    assert created.startswith(f"Created the database {path}.\nCreated key_"), created
    key_id = server.keys()["x"]["id"]
    for command in (f"keys rename {key_id} y", f"keys set {key_id} --concurrent 1", f"keys revoke {key_id}"):
        changed = server.cli(*command.split()).stderr
        assert f" in {path}" in changed and key_id in changed, changed
    changed = set_password(server)
    assert changed.startswith("The password is set") and f" in {path}" in changed, changed


def a_mistyped_address_keeps_its_password():
    """It was taken for the name of a file: its password was printed, and was in the name of a new file."""
    commands = ("serve", "check", "check --json", "keys create x", "keys list", "usage", "usage verify", "audit", "backup copy.db",
                "restore copy.db", "console password", "search query x")
    server = Server()

    def run(*words):
        done = server.cli(*words, check=False, stdin=subprocess.DEVNULL)
        assert "sesame" not in done.stdout + done.stderr, (words, done)
        assert not [file for file in server.folder.iterdir() if "sesame" in file.name], words
        return done

    for name, value in (
            ("database", " postgresql://u:sesame@127.0.0.1:1/"), ("database", "mysql://u:sesame@127.0.0.1:1/"),
            ("database", "host=127.0.0.1 port=1 password=sesame"), ("database", "POSTGRESQL://u:sesame@127.0.0.1:1/?sesame=1"),
            ("runtime_url", "http://127.0.0.1:1/v1?key=sesame"), ("runtime_url", "http://u:sesame@127.0.0.1:1/v1"),
            ("search_url", "http://127.0.0.1:1/?key=sesame")):
        server = Server(**{name: value})
        for command in commands:
            done = run(*command.split())
            assert done.returncode == 2 and ": expected " in done.stdout + done.stderr, (value, command, done)
    # The scheme of a URI may be in upper case.
    uri = "POSTGRESQL://u:sesame@127.0.0.1:1/"
    server = Server(database=uri)
    assert "postgresql://u@127.0.0.1:1/u" in run("usage").stderr
    for words in (["move", "--from", "mysql://u:sesame@a/", "--to", uri], ["move", "--from", "a.db", "--to", "host=a password=sesame"],
                  ["move", "--from", uri, "--to", uri], ["move", "--from", "a.db", uri], ["move", "--from", "a.db", "--to", "b.db", uri],
                  ["keys", "list", "--json=u:sesame@a"], [uri]):
        assert run(*words).returncode == 2, words
    assert run("move", "--from", "a.db", "--to", uri).returncode == 1, "there is no a.db"
    with Server() as server:
        assert server.get("/healthz").status == 200, "it listens before it takes signals"
        (server.folder / "empty.toml").write_text("[runtime]\nurl = 'http://127.0.0.1:1/v1?key=sesame'\n")
        server.process.send_signal(signal.SIGHUP)
        assert until(lambda: "configuration not reloaded: " in server.logged()) and "sesame" not in server.logged(), server.logged()


def the_usage_command_sums_up():
    with Server(RUNTIME) as server:
        key = server.create_key()

        def sums(**figures):
            out = json.loads(server.cli("usage", "--json").stdout)
            assert {name: out[name] for name in figures} == figures, out

        sums(requests=0, errors=0, prompt_tokens=0, completion_tokens=0, total_tokens=0, unmeasured=0, rows=[])
        RUNTIME.answer = RUNTIME.good
        for _ in range(2):
            is_completion(server.post(chat(), key))
        sums(requests=2, errors=0, prompt_tokens=22, completion_tokens=6, total_tokens=28, unmeasured=0)
        RUNTIME.answer = lambda body: (200, RUNTIME.completion(usage=None))
        is_completion(server.post(chat(), key), usage=(None, None, None))
        sums(requests=3, errors=0, prompt_tokens=22, completion_tokens=6, total_tokens=28, unmeasured=1)
        is_error(server.post(chat(n=1), key), "invalid_request")
        sums(requests=4, errors=1, prompt_tokens=22, completion_tokens=6, total_tokens=28, unmeasured=1)
        period, text = server.cli("usage").stdout.split("\n", 1)
        assert re.match(r"20\d\d-\d\d-\d\dT00:00Z to 20", period), period
        assert text == "4 requests, 1 error, 28 tokens (22 in, 6 out), 1 request unmeasured\n", text
        for by in ("hour", "day", "month", "key", "status"):
            table = server.cli("usage", "--by", by).stdout.splitlines()
            assert table[1].startswith(by), table
        text = server.cli("usage", "--by", "key", "--csv").stdout
        columns = "since until since_local until_local key_id name requests errors prompt_tokens completion_tokens total_tokens unmeasured"
        heading, row = text.splitlines()
        assert heading == ",".join(f'"{column}"' for column in columns.split()), heading
        assert row.endswith('"test","4","1","22","6","28","1"'), row


def the_usage_command_selects_and_groups():
    ok(chat())
    tomorrow = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 86_400))
    (count,), = SERVER.rows("SELECT count(*) FROM usage")
    for options in ("", "--since 24h", "--since 7d", "--since 30d", "--since 2001-01-01", "--since 2001-01-01T13:00Z",
                    f"--until {tomorrow}", f"--until {tomorrow}T00:00Z"):
        assert json.loads(SERVER.cli("usage", "--json", *options.split()).stdout)["requests"] == count, options
    assert json.loads(SERVER.cli("usage", "--json", "--until", "2001-01-01").stdout)["requests"] == 0
    for group in ("hour", "day", "month", "key", "status", "gateway"):
        out = json.loads(SERVER.cli("usage", "--json", "--by", group).stdout)
        assert sum(row["requests"] for row in out["rows"]) == out["requests"] == count, (group, out)
        text = SERVER.cli("usage", "--csv", "--by", group).stdout
        assert sum(int(row["requests"]) for row in csv.DictReader(io.StringIO(text))) == count, (group, text)
    gateway, = out["rows"]
    assert json.loads(SERVER.cli("usage", "--json", "--gateway", gateway["gateway"]).stdout)["requests"] == count, gateway
    statuses = json.loads(SERVER.cli("usage", "--json", "--by", "status").stdout)["rows"]
    (successes,), = SERVER.rows("SELECT count(*) FROM usage WHERE status = 200")
    assert any(row["requests"] == successes for row in statuses), statuses


def the_usage_command_selects_a_key():
    """By its id or by its name, which means every key that has it; a renamed one has one line."""
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME) as server:
        requests = lambda *options: json.loads(server.cli("usage", *options, "--json").stdout)["requests"]  # noqa: E731
        one, other = server.create_key("one"), server.create_key("other")
        for secret in (one, other, other):
            is_completion(server.post(chat(), secret))
        ids = {name: key["id"] for name, key in server.keys().items()}
        for name, count in (("one", 1), ("other", 2)):
            assert requests("--key", ids[name]) == requests("--key", name) == count, name
        server.cli("keys", "rename", ids["other"], "one")
        is_completion(server.post(chat(), other))
        assert requests("--key", "one") == 4
        row, = csv.DictReader(io.StringIO(server.cli("usage", "--key", ids["other"], "--by", "key", "--csv").stdout))
        assert (row["key_id"], row["name"], row["requests"]) == (ids["other"], "one", "3"), row


def usage_list_is_filtered_by_status_and_cause():
    with Server(RUNTIME) as server:
        key = server.create_key()
        RUNTIME.answer = RUNTIME.good
        is_completion(server.post(chat(), key))
        is_error(server.post(chat(n=2), key), "invalid_request")
        RUNTIME.answer = lambda body: (500, {})
        is_error(server.post(chat(), key), "inference_error")
        for options, statuses in (("", [502, 400, 200]), ("--status 200", [200]), ("--status ok", [200]), ("--status failed", [502, 400]),
                                  ("--status 502", [502]), ("--status inference_error", [502]), ("--status 403", []),
                                  ("--cause n", [400]), ("--cause status_500", [502]), ("--cause n --status 502", [])):
            rows = json.loads(server.cli("usage", "list", "--json", *options.split()).stdout)
            assert [row["status"] for row in rows] == statuses, (options, rows)
        failed = json.loads(server.cli("usage", "list", "--json", "--status", "502").stdout)[0]["request_id"]
        assert "answered with HTTP status 500" in server.cli("usage", "show", failed).stdout
        missing = server.cli("usage", "show", "chatcmpl_" + "0" * 32, check=False)
        assert "without a valid key" in missing.stderr and "log" in missing.stderr, missing


def usage_show_shows_one_request():
    done = ok(chat())
    shown = SERVER.cli("usage", "show", done["id"]).stdout
    for part in (done["id"], f"conformance ({SERVER.keys()['conformance']['id']})", "Answered in ", "total tokens  14"):
        assert part in shown, (part, shown)
    assert re.search(r"^received +\S{19}Z$", shown, re.MULTILINE), shown
    row = json.loads(SERVER.cli("usage", "show", done["id"], "--json").stdout)
    assert (row["status"], row["total_tokens"]) == (200, 14) and row["seq"] > 0, row
    # The log line is written after the answer is sent, and has the same time.
    lines = lambda: [line for line in SERVER.logged().splitlines() if f"id={done['id']} " in line]  # noqa: E731
    assert until(lines)
    line, = lines()
    assert f" total_ms={row['duration_ms']} " in line and "ledger_ms=- " not in line, (row, line)


def usage_verify_finds_changed_deleted_and_inserted_rows():
    RUNTIME.answer = RUNTIME.good
    changes = (
        "UPDATE usage SET total_tokens = 1 WHERE request_id = (SELECT min(request_id) FROM usage)",
        "DELETE FROM usage WHERE request_id = (SELECT min(request_id) FROM usage)",
        "INSERT INTO usage (request_id, key_id, key_name, created, status, seq, hash, day)"
        " SELECT 'chatcmpl_ffffffffffffffffffffffffffffffff', key_id, key_name, created, 200, seq + 1, hash, day"
        " FROM usage WHERE seq = (SELECT max(seq) FROM usage)",
        "UPDATE usage SET seq = NULL WHERE request_id = (SELECT max(request_id) FROM usage)",
        "UPDATE usage SET day = '1999-12-31' WHERE request_id = (SELECT min(request_id) FROM usage)",
        "UPDATE usage_days SET requests = requests + 1000",
        "UPDATE usage_days SET total_tokens = total_tokens - 1",
        "UPDATE usage_days SET day = '1999-12-31'",
        "DELETE FROM usage_days",
        "INSERT INTO usage_days SELECT key_id, '1999-12-31', status, error_code, gateway, 1, 0, 0, 0, 0 FROM usage_days",
    )
    for change in changes:
        with Server(RUNTIME) as server:
            key = server.create_key()
            for _ in range(3):
                is_completion(server.post(chat(), key))
            server.stop()
            assert server.cli("usage", "verify").stdout.startswith("3 rows"), change
            server.change(change)
            done = server.cli("usage", "verify", check=False)
            assert done.returncode == 1, (change, done)
            assert ("the sums differ" in done.stderr) == ("usage_days" in change), (change, done)
            if change == changes[0]:
                assert "after 0 good rows: the row of chatcmpl_" in done.stderr, done
            done = server.cli("usage", "verify", "--json", check=False)
            found = json.loads(done.stdout)
            assert done.returncode == 1 and not found["ok"] and found["fault"], (change, done)


def usage_verify_checks_a_head_that_was_noted():
    with Server(RUNTIME) as server:
        key = server.create_key()
        RUNTIME.answer = RUNTIME.good

        def verified(*options, code=0):
            done = server.cli("usage", "verify", "--json", *options, check=False)
            assert done.returncode == code, done
            return json.loads(done.stdout)

        noted = []
        for count in (1, 2):
            is_completion(server.post(chat(), key))
            found = verified()
            assert found["ok"] and found["rows"] == count and found["fault"] is None, found
            head, = found["heads"]
            name = f"{head['gateway']}:" if head["gateway"] else ""
            noted.append((f"{name}{head['seq']}", head["hash"]))
        through = lambda head, code=0: verified("--through", head, code=code)["through"]["status"]  # noqa: E731
        heads = [f"{place}:{digest}" for place, digest in noted]
        for head in heads:
            assert through(head) == "in_chain"
            printed = server.cli("usage", "verify", "--through", head).stdout
            assert printed.startswith("2 rows, nothing wrong. The head is "), printed
            assert printed.endswith(f"{head} is part of the chain.\n"), printed
        # Another chain, a longer one, and the chain of a gateway that does not exist.
        (first, digest), (second, other) = noted
        for head in (f"{first}:{other}", f"{second}:{digest}", f"{second}0:{other}", f"nowhere:2:{other}"):
            assert through(head, 1) == "missing", head
            done = server.cli("usage", "verify", "--through", head, check=False)
            assert done.returncode == 1 and "is not part of the chain" in done.stderr, done
        # Retention has removed both rows: the newest of them can still be checked.
        server.stop()
        server.change("UPDATE gateways SET (anchor_seq, anchor_hash) = (SELECT seq, hash FROM usage WHERE seq = 2) WHERE head_seq = 2")
        server.change("DELETE FROM usage")
        assert (through(heads[0], 1), through(heads[1])) == ("removed", "in_chain")
        done = server.cli("usage", "verify", "--through", heads[0], check=False)
        assert "can't be checked: retention" in done.stderr, done
