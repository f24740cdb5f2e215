"""The command line: what each command prints, changes and returns."""

import contextlib
import csv
import io
import json
import re
import sqlite3
import time

from harness import Server, chat, is_completion, is_error
from shared import KEY, RUNTIME, SERVER, UNREACHABLE, ok

COMMANDS = ("serve", "keys create", "keys list", "keys rename", "keys revoke", "keys set", "usage", "usage list", "usage show", "usage verify", "backup",
            "restore", "console password", "audit", "move", "check", "search query")


def every_command_has_help():
    for command in ("", *COMMANDS):
        done = SERVER.cli(*command.split(), "--help")
        assert "Usage: adriaticum" in done.stdout and not done.stderr, (command, done)
    assert re.fullmatch(r"adriaticum \d+\.\d+\.\d+\S*\n", SERVER.cli("--version").stdout)


def short_forms_and_corrections():
    assert SERVER.cli("help").stdout == SERVER.cli("-h").stdout == SERVER.cli("--help").stdout
    assert SERVER.cli("help", "keys").stdout == SERVER.cli("keys", "--help").stdout
    assert SERVER.cli("-V").stdout == SERVER.cli("--version").stdout
    for arguments, message in (("key list", "'keys'"), ("keys crate x", "'create'"), ("keys list --jsno", "'--json'"),
                               ("keys", "Usage: adriaticum keys"), ("keys list --json --json", "multiple times"),
                               ("keys create x --expires 2027-02-30", "no such date")):
        done = SERVER.cli(*arguments.split(), check=False)
        assert done.returncode == 2 and message in done.stderr, (arguments, done)


def a_missing_database_is_named_and_not_created():
    """Only serve, keys create, console password, restore and move create one."""
    server = Server(RUNTIME)
    path = server.folder / "missing.db"
    server.environment["ADRIATICUM_DATABASE"] = str(path)
    for command in ("keys list", "keys revoke key_0", "usage", "usage verify", "audit", f"backup {server.folder}/copy.db"):
        done = server.cli(*command.split(), check=False)
        assert done.returncode == 1 and str(path) in done.stderr and not done.stdout, (command, done)
    parts = json.loads(server.cli("check", "--json", check=False).stdout)
    assert [part["part"] for part in parts if part["status"] == "fail"] == ["database"], parts
    assert not path.exists() and not (server.folder / "copy.db").exists()
    for command, options in (("keys create x", {}), ("console password", {"input": "a-good-password\n"})):
        path.unlink(missing_ok=True)
        done = server.cli(*command.split(), **options)
        assert path.exists() and str(path) in done.stderr, (command, done)


def exit_codes():
    unknown = "key_" + "0" * 16
    for arguments, code in (("--help", 0), ("--version", 0), ("nonsense", 2), ("keys", 2), ("keys nonsense", 2),
                            ("keys create", 2), ("keys list --nonsense", 2), (f"keys revoke {unknown}", 1),
                            (f"keys rename {unknown} x", 1), ("usage --by nonsense", 2), ("usage --since nonsense", 2),
                            (f"usage --key {unknown}", 1), ("usage verify --through nonsense", 2), ("move", 2), ("restore", 2),
                            ("restore missing.db", 1),
                            ("usage show chatcmpl_" + "0" * 32, 1), ("search add x", 2), ("search query x", 2), ("--config", 2)):
        done = SERVER.cli(*arguments.split(), check=False)
        assert done.returncode == code, (arguments, done)
        assert done.stdout if code == 0 else done.stderr, (arguments, done)


def the_usage_command_sums_up():
    with Server(RUNTIME) as server:
        key = server.create_key()

        def sums(**figures):
            out = json.loads(server.cli("usage", "--json").stdout)
            assert {name: out[name] for name in figures} == figures, out

        sums(requests=0, errors=0, prompt_tokens=0, completion_tokens=0, total_tokens=0, unmeasured=0)
        RUNTIME.answer = RUNTIME.good
        for _ in range(2):
            is_completion(server.post(chat(), key))
        sums(requests=2, errors=0, prompt_tokens=22, completion_tokens=6, total_tokens=28, unmeasured=0)
        RUNTIME.answer = lambda body: (200, RUNTIME.completion(usage=None))
        is_completion(server.post(chat(), key), usage=(None, None, None))
        sums(requests=3, errors=0, prompt_tokens=22, completion_tokens=6, total_tokens=28, unmeasured=1)
        is_error(server.post(chat(n=1), key), "invalid_request")
        sums(requests=4, errors=1, prompt_tokens=22, completion_tokens=6, total_tokens=28, unmeasured=1)


def the_usage_command_selects_and_groups():
    ok(chat())
    tomorrow = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 86_400))
    (count,), = SERVER.rows("SELECT count(*) FROM usage")
    for options in ("", "--since 24h", "--since 7d", "--since 30d", "--since 2001-01-01", "--since 2001-01-01T13:00Z",
                    f"--until {tomorrow}", f"--until {tomorrow}T00:00Z"):
        assert json.loads(SERVER.cli("usage", "--json", *options.split()).stdout)["requests"] == count, options
    assert json.loads(SERVER.cli("usage", "--json", "--until", "2001-01-01").stdout)["requests"] == 0
    for options in (f"--since {tomorrow}", "--since 2001-01-02 --until 2001-01-01"):
        assert SERVER.cli("usage", *options.split(), check=False).returncode == 2, options
    for group in ("hour", "day", "month", "key", "status"):
        out = json.loads(SERVER.cli("usage", "--json", "--by", group).stdout)
        assert sum(row["requests"] for row in out["rows"]) == out["requests"] == count, (group, out)
        text = SERVER.cli("usage", "--csv", "--by", group).stdout
        assert sum(int(row["requests"]) for row in csv.DictReader(io.StringIO(text))) == count, (group, text)
    statuses = json.loads(SERVER.cli("usage", "--json", "--by", "status").stdout)["rows"]
    (successes,), = SERVER.rows("SELECT count(*) FROM usage WHERE status = 200")
    assert any(row["requests"] == successes for row in statuses), statuses


def the_usage_command_selects_a_key():
    with Server(RUNTIME) as server:
        keys = {name: server.create_key(name) for name in ("one", "other")}
        RUNTIME.answer = RUNTIME.good
        for name, count in (("one", 1), ("other", 2)):
            for _ in range(count):
                is_completion(server.post(chat(), keys[name]))
            key_id = server.keys()[name]["id"]
            out = json.loads(server.cli("usage", "--key", key_id, "--by", "key", "--json").stdout)
            assert out["requests"] == count and [row["key_id"] for row in out["rows"]] == [key_id], out


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
        for wrong in ("week", "99", "600", "timeout"):
            assert server.cli("usage", "list", "--status", wrong, check=False).returncode == 2, wrong
        failed = json.loads(server.cli("usage", "list", "--json", "--status", "502").stdout)[0]["request_id"]
        assert "answered with HTTP status 500" in server.cli("usage", "show", failed).stdout
        missing = server.cli("usage", "show", "chatcmpl_" + "0" * 32, check=False)
        assert "without a valid key" in missing.stderr and "log" in missing.stderr, missing


def usage_show_shows_one_request():
    done = ok(chat())
    shown = SERVER.cli("usage", "show", done["id"]).stdout
    assert done["id"] in shown and SERVER.keys()["conformance"]["id"] in shown and "200" in shown, shown


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
        for place, digest in noted:
            assert verified("--through", f"{place}:{digest}")["ok"]
            assert server.cli("usage", "verify", "--through", f"{place}:{digest}").stdout.startswith("2 rows")
        (first, digest), (second, other) = noted
        for head in (f"{first}:{other}", f"{second}:{digest}", f"{second}0:{other}"):
            assert not verified("--through", head, code=1)["ok"], head


def a_backup_is_a_consistent_copy_of_a_running_service():
    done = ok(chat())
    copy = SERVER.folder / "copy.db"
    SERVER.cli("backup", copy)
    with contextlib.closing(sqlite3.connect(f"file:{copy}?mode=ro", uri=True)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert database.execute("SELECT status FROM usage WHERE request_id = ?", [done["id"]]).fetchall() == [(200,)]
    restored = Server(RUNTIME, database=copy)
    with restored:
        is_completion(restored.post(chat(), KEY))
    before = copy.read_bytes()
    assert SERVER.cli("backup", copy, check=False).returncode == 1 and copy.read_bytes() == before, "it was overwritten"
    copy.unlink()



def a_restore_keeps_revocations_and_lists_what_it_undoes():
    with Server(RUNTIME) as server:
        kept, revoked = (server.create_key(name) for name in ("kept", "revoked"))
        RUNTIME.answer = RUNTIME.good
        is_completion(server.post(chat(), kept))
        copy = server.folder / "copy.db"
        server.cli("backup", copy)
        keys = server.keys()
        server.cli("keys", "revoke", keys["revoked"]["id"])
        created = server.create_key("created")
        is_completion(server.post(chat(), created))
        done = server.cli("restore", copy, check=False)
        assert done.returncode == 1 and "another adriaticum serve uses it" in done.stderr, done
        before = copy.read_bytes()
        server.stop()
        done = server.cli("restore", copy)
        for part in (keys["revoked"]["id"], "stay revoked", "key created", "(created)", "undone", "1 row", "1 request more", ".before-restore-"):
            assert part in done.stdout, (part, done)
        assert copy.read_bytes() == before, "it was changed"
        server.start()
        server.wait_until_it_listens()
        is_completion(server.post(chat(), kept))
        is_error(server.post(chat(), revoked), "invalid_api_key")
        is_error(server.post(chat(), created), "invalid_api_key")
        server.cli("usage", "verify")


def check_names_what_fails():
    with Server(RUNTIME) as server:
        # The service listens before it has created its tables.
        server.create_key()
        statuses = {part["part"]: part["status"] for part in json.loads(server.cli("check", "--json").stdout)}
        assert statuses["database"] == statuses["runtime"] == "ok" and "fail" not in statuses.values(), statuses
        assert server.cli("check").returncode == 0
        # Behind TLS the service can't be asked for its own verdict.
        assert statuses.get("service") == (None if Server.secured else "ok"), statuses
    for server in (Server(), Server(runtime_url=f"{UNREACHABLE.url}/v1")):
        server.create_key()
        done = server.cli("check", check=False)
        assert done.returncode == 1 and "runtime" in (done.stdout + done.stderr).lower(), done
        parts = json.loads(server.cli("check", "--json", check=False).stdout)
        assert [part["part"] for part in parts if part["status"] == "fail"] == ["runtime"], parts
