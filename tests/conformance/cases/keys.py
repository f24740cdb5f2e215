"""API keys: their form, their permissions, and how soon a change takes effect."""

import calendar
import hashlib
import json
import re
import time

from harness import Server, chat, is_completion, is_error, read_reply, request, until
from shared import KEY, METRICS_KEY, RUNTIME, SERVER, bad, ok


def keys_have_their_form():
    assert re.fullmatch(r"adr_[0-9a-f]{48}", KEY), "keys create prints the secret and nothing else"
    keys = SERVER.keys()
    for key in keys.values():
        members = {"id", "name", "hint", "permissions", "created", "expires", "last_used", "revoked", "concurrent", "budget", "overlap"}
        assert set(key) == members, key
        assert re.fullmatch(r"key_[0-9a-f]{16}", key["id"]), key
        assert isinstance(key["created"], int), key
    assert keys["conformance"]["permissions"] == ["completions"] and keys["conformance"]["revoked"] is None, keys
    assert keys["metrics only"]["permissions"] == ["metrics"], keys
    assert keys["conformance"]["hint"] == f"{KEY[:8]}…{KEY[-4:]}" and keys["conformance"]["budget"] is None, keys
    assert keys["conformance"]["overlap"] is None, keys


def the_terms_of_a_key_are_printed_in_words():
    options = ("--permission", "completions", "--permission", "metrics", "--expires", "2031-02-03", "--concurrent", "4")
    done = SERVER.cli("keys", "create", "both", *options, "--budget", "500000/day")
    key = SERVER.keys()["both"]
    assert sorted(key["permissions"]) == ["completions", "metrics"], key
    assert key["expires"] == calendar.timegm((2031, 2, 4, 0, 0, 0)), f"a date is the whole day: {key}"
    assert key["id"] in done.stderr, "the id goes to standard error"
    assert "\nIt may run completions and read the metrics, until 2031-02-03 24:00 UTC (" in done.stderr, done.stderr
    assert done.stderr.endswith("), at most 4 at a time, 500,000 tokens per day.\n"), done.stderr
    line, = (line for line in SERVER.cli("keys", "list").stdout.splitlines() if " both " in line)
    for part in ("2031-02-04 00:00Z", " 4 ", "0 of 500,000/day"):
        assert part in line, (part, line)


def a_key_is_changed():
    SERVER.cli("keys", "create", "changed", "--expires", "90d", "--concurrent", "2")
    key = SERVER.keys()["changed"]
    assert key["concurrent"] == 2 and SERVER.keys()["conformance"]["concurrent"] is None, key
    change = lambda *options: SERVER.cli("keys", "set", key["id"], *options, check=False)  # noqa: E731
    printed = change("--concurrent", "none").stderr
    assert printed.startswith(f"Changed {key['id']} in ") and ".\nIt may run completions, until " in printed, printed
    assert change("--permission", "metrics", "--expires", "never").stderr.endswith(".\nIt may read the metrics.\n")
    changed = SERVER.keys()["changed"]
    assert changed == key | {"concurrent": None, "expires": None, "permissions": ["metrics"]}, changed
    assert change("--concurrent", "10000", "--expires", "2031-02-03").returncode == 0
    changed = SERVER.keys()["changed"]
    assert changed["concurrent"] == 10000, changed
    assert changed["expires"] == calendar.timegm((2031, 2, 4, 0, 0, 0)), changed


def only_a_digest_is_stored_and_a_secret_is_shown_once():
    for secret in (KEY, METRICS_KEY):
        assert secret not in SERVER.cli("keys", "list").stdout + SERVER.cli("keys", "list", "--json").stdout
        digest = hashlib.sha256(secret.encode()).digest()
        assert SERVER.rows("SELECT count(*) FROM key_secrets WHERE digest = ?", digest) == [(1,)]


def a_revoked_key_is_refused_from_the_next_request_on():
    secret = SERVER.create_key("short lived")
    RUNTIME.answer = RUNTIME.good
    with SERVER.connect() as connection:
        connection.sendall(request(chat(), secret))
        is_completion(read_reply(connection))
        key = SERVER.keys()["short lived"]
        SERVER.cli("keys", "rename", key["id"], "renamed")
        is_completion(SERVER.post(chat(), secret))
        SERVER.cli("keys", "revoke", key["id"])
        connection.sendall(request(chat(), secret))
        is_error(read_reply(connection), "invalid_api_key")
    bad(chat(), "invalid_api_key", key=secret)
    # One that is revoked already stays revoked since then.
    SERVER.change(f"UPDATE keys SET revoked = 978307260 WHERE id = '{key['id']}'")
    renamed = SERVER.keys()["renamed"]
    assert renamed["id"] == key["id"] and renamed["revoked"] == 978307260, renamed
    since = "2001-01-01 00:01Z"
    assert f"since {since}" in SERVER.cli("keys", "revoke", key["id"]).stderr
    changed = SERVER.cli("keys", "set", key["id"], "--expires", "never", check=False)
    assert changed.returncode == 1 and since in changed.stderr, changed
    kept = SERVER.keys()["renamed"]
    assert kept == renamed, (kept, renamed)


def a_rotated_key_keeps_everything_but_its_secret():
    RUNTIME.answer = RUNTIME.good
    first = SERVER.create_key("rotated", "--budget", "1000/month", "--concurrent", "3")
    is_completion(SERVER.post(chat(), first))
    key = SERVER.keys()["rotated"]
    done = SERVER.cli("keys", "rotate", key["id"])
    second = done.stdout.strip()
    assert re.fullmatch(r"adr_[0-9a-f]{48}\n", done.stdout) and second != first, "it prints the new secret and nothing else"
    assert key["id"] in done.stderr and second not in done.stderr, done.stderr
    refused = is_error(SERVER.post(chat(), first), "invalid_api_key")
    lines = lambda: [line for line in SERVER.logged().splitlines() if refused["request_id"] in line]  # noqa: E731
    assert until(lines)
    line = lines()[0]
    assert "cause=replaced" in line and f"key={key['id']}" in line, line
    is_completion(SERVER.post(chat(), second))
    now = SERVER.keys()["rotated"]
    hint = f"{second[:8]}…{second[-4:]}"
    budget = key["budget"] | {"used": 2 * key["budget"]["used"]}
    assert now == key | {"hint": hint, "last_used": now["last_used"], "budget": budget}, (key, now)
    usage = json.loads(SERVER.cli("usage", "--key", "rotated", "--json").stdout)
    assert usage["requests"] == 2 and usage["rows"] == [], usage
    # The secret in use means its key, a replaced one is refused by the commands too.
    third = SERVER.cli("keys", "rotate", second).stdout.strip()
    again = SERVER.cli("keys", "rotate", second, check=False)
    assert again.returncode == 1 and "was replaced" in again.stderr and second not in again.stderr, again
    revoked = SERVER.cli("keys", "revoke", first, check=False)
    assert revoked.returncode == 1 and "was replaced" in revoked.stderr, revoked
    is_completion(SERVER.post(chat(), third))
    SERVER.cli("keys", "revoke", third)
    assert SERVER.cli("keys", "rotate", key["id"], check=False).returncode == 1, "a revoked key"
    actions = [row["action"] for row in json.loads(SERVER.cli("audit", "--json").stdout) if row["key_id"] == key["id"]]
    assert actions == ["key_created", "key_rotated", "key_rotated", "key_revoked"], actions


def a_replaced_secret_works_until_the_overlap_ends():
    RUNTIME.answer = RUNTIME.good
    accepted = lambda secret: SERVER.post(chat(), secret).status == 200  # noqa: E731
    first = SERVER.create_key("overlapping")
    key_id = SERVER.keys()["overlapping"]["id"]
    rotate = lambda *options, check=True: SERVER.cli("keys", "rotate", "overlapping", *options, check=check)  # noqa: E731
    before = int(time.time())
    done = rotate("--overlap", "24h")
    second = done.stdout.strip()
    overlap = SERVER.keys()["overlapping"]["overlap"]
    assert overlap["hint"] == f"{first[:8]}…{first[-4:]}" and 0 <= overlap["ends"] - before - 86_400 < 60, overlap
    assert overlap["hint"] in done.stderr and overlap["hint"] in SERVER.cli("keys", "list").stdout
    assert accepted(first) and accepted(second)
    # A repetition would end the secret that is in use.
    refused = rotate("--overlap", "24h", check=False)
    assert refused.returncode == 1 and refused.stdout == "" and overlap["hint"] in refused.stderr, refused
    assert accepted(first) and accepted(second)
    third = rotate().stdout.strip()
    assert not accepted(first) and not accepted(second) and accepted(third)
    assert SERVER.keys()["overlapping"]["overlap"] is None
    fourth = rotate("--overlap", "2s").stdout.strip()
    assert accepted(fourth)
    assert until(lambda: not accepted(third)), "the overlap does not end"
    assert accepted(fourth)
    rotated = [row["details"] for row in json.loads(SERVER.cli("audit", "--json").stdout)
               if row["key_id"] == key_id and row["action"] == "key_rotated"]
    assert len(rotated) == 3 and all(f"{old[:8]}…{old[-4:]} → {new[:8]}…{new[-4:]}" in details for details, old, new
                                     in zip(rotated, (first, second, third), (second, third, fourth))), rotated
    fifth = rotate("--overlap", "30d").stdout.strip()
    assert accepted(fourth) and accepted(fifth)
    SERVER.cli("keys", "revoke", fourth)
    assert not accepted(fourth) and not accepted(fifth), "a revocation ends an overlap"
    assert SERVER.keys()["overlapping"]["overlap"] is None
    for overlap in ("31d", "721h", "0s", "-1d", "2031-02-03", "12:00", "never", ""):
        assert rotate(f"--overlap={overlap}", check=False).returncode == 2, overlap


def a_report_by_name_counts_every_key_of_that_name():
    RUNTIME.answer = RUNTIME.good
    secrets = [SERVER.create_key("shared name")]
    is_completion(SERVER.post(chat(), secrets[0]))
    SERVER.cli("keys", "revoke", "shared name")
    secrets.append(SERVER.create_key("shared name"))
    is_completion(SERVER.post(chat(), secrets[1]))
    SERVER.cli("keys", "set", "shared name", "--concurrent", "2")
    usage = lambda *what: json.loads(SERVER.cli("usage", *what, "--key", "shared name", "--json").stdout)  # noqa: E731
    assert usage()["requests"] == 2 and usage()["total_tokens"] == 28, usage()
    assert len(usage("list")) == 2, usage("list")
    SERVER.create_key("shared name")
    assert SERVER.cli("keys", "rename", "shared name", "x", check=False).returncode == 1, "two keys of it can be used"
    # The other cases find keys by their names.
    for number, key in enumerate(json.loads(SERVER.cli("keys", "list", "--json").stdout)):
        if key["name"] == "shared name":
            SERVER.cli("keys", "rename", key["id"], f"shared {number}")


def an_expired_key_is_refused():
    RUNTIME.answer = RUNTIME.good
    is_completion(SERVER.post(chat(), SERVER.create_key("lasts", "--expires", "90d")))
    secret = SERVER.create_key("brief", "--expires", "1s")
    assert until(lambda: SERVER.post(chat(), secret).status == 401), "an expired key is accepted"


def keys_are_listed_by_state():
    for name, expires in (("ends", "1d"), ("ends soon", "9d"), ("ends later", "11d"), ("ended", "1d")):
        SERVER.create_key(name, "--expires", expires)
    SERVER.change("UPDATE keys SET expires = 978307260 WHERE name IN ('ends', 'ended')")
    SERVER.cli("keys", "revoke", "ended")
    listed = lambda *options: SERVER.cli("keys", "list", *options).stdout  # noqa: E731
    names = lambda state: {key["name"] for key in json.loads(listed("--state", state, "--json"))}  # noqa: E731
    states = {state: names(state) for state in ("active", "expiring", "expired", "revoked")}
    for name, state in (("ends", "expired"), ("ends soon", "expiring"), ("ends later", "active"), ("ended", "revoked")):
        assert name in states[state], (name, states)
        assert re.search(f" {name} .* {state} ", listed()), (name, listed())
    for state, keys in states.items():
        assert len(listed("--state", state).splitlines()) == len(keys) + 1, state
    assert sum(map(len, states.values())) == len(json.loads(listed("--json"))), states
    checked = json.loads(SERVER.cli("check", "--json", check=False).stdout)
    warning = "\n".join(finding["message"] for finding in checked if finding["part"] == "keys" and finding["status"] == "warn")
    warned = {name for name, key in SERVER.keys().items() if key["id"] in warning}
    assert warned == states["expired"] | states["expiring"], (warned, warning)
    server = Server()
    server.create_key()
    assert server.cli("keys", "list", "--state", "expired").stderr == "No key is expired.\n"


def a_leaked_secret_is_enough_to_revoke_its_key():
    """A secret was found in a public repository, and nobody knew whose it was. The list shows eight of its digits. No command repeats
    a secret."""
    unknown = "adr_" + "0123456789abcdef" * 3

    def run(secret, *words, typed=""):
        done = SERVER.cli(*words, check=False, input=typed)
        assert secret[4:20] not in done.stdout + done.stderr, (words, done)
        return done

    RUNTIME.answer = RUNTIME.good
    for name, arguments, typed in (("typed", [], "{}\n"), ("piped", ["-"], "  {} \r\nmore\n"), ("named", ["{}"], "")):
        secret = SERVER.create_key(name)
        key_id = SERVER.keys()[name]["id"]
        is_completion(SERVER.post(chat(), secret))
        revoke = lambda: run(  # noqa: E731
            secret, "keys", "revoke", *(word.format(secret) for word in arguments), typed=typed.format(secret))
        assert revoke().stderr.startswith(f"Revoked {key_id} ({name}) in ")
        bad(chat(), "invalid_api_key", key=secret)
        again = revoke()
        assert again.returncode == 0 and "is revoked already, since " in again.stderr, again
    message = "there is no key with that id, secret or name. List the keys: adriaticum keys list"
    # Also without its prefix, it is not repeated.
    for text in (unknown, unknown[:30], unknown[4:], unknown.upper()):
        for done in (run(unknown, "keys", "revoke", typed=text), run(unknown, "keys", "revoke", text)):
            assert done.returncode == 1 and message in done.stderr, done
    takes_none, not_a_name = "only keys revoke and keys rotate take a secret", "1 to 64 printable characters, and not the form of"
    for words, code, message in (
            (["keys", "revoke"], 2, "KEY or SECRET is missing"), (["keys", "rotate"], 2, "KEY or SECRET is missing"),
            (["keys", "set", unknown, "--expires", "1h"], 1, takes_none), (["keys", "rename", unknown, "x"], 1, takes_none),
            (["usage", "--key", unknown], 1, takes_none), (["keys", "rename", "conformance", unknown], 2, not_a_name),
            (["keys", "create", unknown], 2, not_a_name), (["keys", "create", "KEY_0123456789ABCDEF"], 2, not_a_name),
            (["keys", "revoke", "x", unknown], 2, "unexpected argument"), (["keys", unknown], 2, "subcommand")):
        done = run(unknown, *words)
        assert done.returncode == code and message in done.stderr, (words, done)


def a_name_means_one_key_or_is_refused():
    server = Server()
    first = server.create_key("billing")
    first_id = server.keys()["billing"]["id"]
    for command in ("keys set billing --concurrent 4", "keys rename billing invoices", "keys rename invoices billing",
                    "usage --key billing"):
        assert "Warning" not in server.cli(*command.split()).stderr, command
    warned = server.cli("keys", "create", "billing").stderr
    assert f"Warning: this is also the name of {first_id}. " in warned, warned
    second_id, = re.findall(r"Created (key_\w+)", warned)
    for command in ("keys set billing --concurrent 4", "keys rename billing x", "keys revoke billing", "keys rotate billing"):
        done = server.cli(*command.split(), check=False)
        assert done.returncode == 1 and "2 keys have that name. Use the id: " in done.stderr, done
        assert f"{first_id} ({first[:8]}…{first[-4:]})" in done.stderr and second_id in done.stderr, done
    assert server.cli("keys", "revoke", second_id).stderr.startswith(f"Revoked {second_id} ")
    assert server.cli("keys", "revoke", "billing").stderr.startswith(f"Revoked {first_id} ")
    assert "Warning" not in server.cli("keys", "create", "billing").stderr, "the others are revoked"


def a_used_budget_is_403_until_it_is_raised_or_renewed():
    RUNTIME.answer = RUNTIME.good
    secret = SERVER.create_key("thrifty", "--budget", "15/month")
    budget = lambda: SERVER.keys()["thrifty"]["budget"]  # noqa: E731
    assert budget() == {"tokens": 15, "per": "month", "used": 0}, budget()
    for _ in range(2):
        is_completion(SERVER.post(chat(), secret))
    assert budget() == {"tokens": 15, "per": "month", "used": 28}, budget()
    now = time.gmtime()
    renewed = f"{now.tm_year + now.tm_mon // 12}-{now.tm_mon % 12 + 1:02}-01 00:00Z"
    calls = len(RUNTIME.calls)
    # The 400 of a bad request comes after the 403.
    for body in (chat(), {}):
        reply = SERVER.post(body, secret)
        message = is_error(reply, "insufficient_permission")["message"]
        assert all(part in message for part in ("28", "15", "month", renewed)), message
        assert reply.headers.get("x-should-retry") == "false", reply.headers
        row = SERVER.rows("SELECT status, error_code, total_tokens FROM usage WHERE request_id = ?", reply.headers["x-request-id"])
        assert row == [(403, "insufficient_permission", None)], row
    assert len(RUNTIME.calls) == calls, "an inference was spent"
    key_id = SERVER.keys()["thrifty"]["id"]
    assert "28 of 15/month" in SERVER.cli("keys", "list").stdout
    labels = f'{{key="{key_id}",name="thrifty",per="month"}}'
    for line in (f"adriaticum_key_budget_tokens{labels} 15", f"adriaticum_key_budget_used_tokens{labels} 28"):
        assert line in SERVER.get("/metrics", METRICS_KEY).text, line
    for change, status in (("29/day", 200), ("42/day", 403), ("none", 200)):
        SERVER.cli("keys", "set", key_id, "--budget", change)
        assert SERVER.post(chat(), secret).status == status, change
    assert budget() is None
    details = [row["details"] for row in json.loads(SERVER.cli("audit", "--json").stdout) if row["key_id"] == key_id]
    assert details[1] == "budget: 15/month → 29/day", details


def a_budget_is_in_the_headers():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME) as server:
        key = server.create_key("small", "--budget", "20/day")
        names = [f"x-ratelimit-{name}-tokens" for name in ("limit", "remaining", "reset")]
        for left in ("6", "0"):
            reply = server.post(chat(), key)
            is_completion(reply)
            assert [reply.headers[name] for name in names[:2]] == ["20", left], reply.headers
            assert re.fullmatch(r"\d+h\d+m\d+s", reply.headers[names[2]]), reply.headers
        refused = server.post(chat(), key)
        is_error(refused, "insufficient_permission")
        assert [refused.headers[name] for name in names[:2]] == ["20", "0"], refused.headers
        plain = server.post(chat(), server.create_key("plain"))
        assert not any(name in plain.headers for name in names), plain.headers


def completions_without_a_total_use_no_budget_and_check_warns():
    secret = SERVER.create_key("unmeasured budget", "--budget", "1/day")
    RUNTIME.answer = lambda _: (200, RUNTIME.completion(usage=None))
    for _ in range(2):
        is_completion(SERVER.post(chat(), secret), usage=(None, None, None))
    key = SERVER.keys()["unmeasured budget"]
    assert key["budget"]["used"] == 0, key
    checked = json.loads(SERVER.cli("check", "--json", check=False).stdout)
    warning, = (finding["message"] for finding in checked if finding["part"] == "budgets")
    assert f"total_tokens do not count: {key['id']}" in warning and "2 completions this day" in warning, warning


def the_last_use_is_that_of_the_newest_request():
    done = ok(chat())
    assert SERVER.keys()["conformance"]["last_used"] == done["created"]
    secret = SERVER.create_key("last use", "--permission", "metrics")
    assert SERVER.get("/metrics", secret).status == 200
    assert SERVER.keys()["last use"]["last_used"] is None, "a scrape counts"
    error = bad(chat(), "insufficient_permission", key=secret)
    created = int(error["request_id"][9:21], 16) // 1000
    assert SERVER.keys()["last use"]["last_used"] == created, "a refused request does not count"


def a_key_created_while_the_service_runs_is_accepted_at_once():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME) as server:
        is_error(server.post(chat(), KEY), "invalid_api_key")
        is_completion(server.post(chat(), server.create_key()))


def the_metrics_permission_reads_the_metrics():
    reply = SERVER.get("/metrics", METRICS_KEY)
    assert reply.status == 200 and b"adriaticum_requests_total" in reply.body, reply
    is_error(SERVER.get("/metrics"), "invalid_api_key")
    is_error(SERVER.get("/metrics", KEY), "insufficient_permission")
    is_error(SERVER.get("/metrics", METRICS_KEY, host="api.test"), "not_found")
    key_id = SERVER.keys()["metrics only"]["id"]
    assert SERVER.rows("SELECT count(*) FROM usage WHERE status = 200 AND key_id = ?", key_id) == [(0,)]
