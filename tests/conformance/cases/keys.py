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
        members = {"id", "name", "hint", "permissions", "created", "expires", "last_used", "revoked", "concurrent", "budget"}
        assert set(key) == members, key
        assert re.fullmatch(r"key_[0-9a-f]{16}", key["id"]), key
        assert isinstance(key["created"], int), key
    assert keys["conformance"]["permissions"] == ["completions"] and keys["conformance"]["revoked"] is None, keys
    assert keys["metrics only"]["permissions"] == ["metrics"], keys
    assert keys["conformance"]["hint"] == f"{KEY[:8]}…{KEY[-4:]}" and keys["conformance"]["budget"] is None, keys
    for option in ("--permission", "--expires", "--concurrent", "--budget"):
        assert SERVER.cli("keys", "create", "x", option, "nonsense", check=False).returncode == 2, option


def several_permissions_and_a_date():
    options = ("--permission", "completions", "--permission", "metrics", "--expires", "2031-02-03")
    done = SERVER.cli("keys", "create", "both", *options)
    key = SERVER.keys()["both"]
    assert sorted(key["permissions"]) == ["completions", "metrics"], key
    assert key["expires"] == calendar.timegm((2031, 2, 4, 0, 0, 0)), f"a date is the whole day: {key}"
    assert key["id"] in done.stderr, "the id goes to standard error"


def a_key_is_changed():
    SERVER.cli("keys", "create", "changed", "--expires", "90d", "--concurrent", "2")
    key = SERVER.keys()["changed"]
    assert key["concurrent"] == 2 and SERVER.keys()["conformance"]["concurrent"] is None, key
    change = lambda *options: SERVER.cli("keys", "set", key["id"], *options, check=False)  # noqa: E731
    assert key["id"] in change("--concurrent", "none").stderr
    assert change("--permission", "metrics", "--expires", "never").returncode == 0
    changed = SERVER.keys()["changed"]
    assert changed == key | {"concurrent": None, "expires": None, "permissions": ["metrics"]}, changed
    assert change("--concurrent", "10000", "--expires", "2031-02-03").returncode == 0
    changed = SERVER.keys()["changed"]
    assert changed["concurrent"] == 10000, changed
    assert changed["expires"] == calendar.timegm((2031, 2, 4, 0, 0, 0)), changed
    for options in ((), ("--concurrent", "0"), ("--expires", "yesterday"), ("--permission", "all")):
        assert change(*options).returncode == 2, options
    assert SERVER.cli("keys", "set", "key_0", "--concurrent", "1", check=False).returncode == 1


def only_a_digest_is_stored_and_a_secret_is_shown_once():
    for secret in (KEY, METRICS_KEY):
        assert secret not in SERVER.cli("keys", "list").stdout + SERVER.cli("keys", "list", "--json").stdout
        digest = hashlib.sha256(secret.encode()).digest()
        assert SERVER.rows("SELECT count(*) FROM keys WHERE digest = ?", digest) == [(1,)]


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
    renamed = SERVER.keys()["renamed"]
    assert renamed["id"] == key["id"] and isinstance(renamed["revoked"], int), renamed
    since = time.strftime("%Y-%m-%d %H:%MZ", time.gmtime(renamed["revoked"]))
    assert f"since {since}" in SERVER.cli("keys", "revoke", key["id"]).stderr
    changed = SERVER.cli("keys", "set", key["id"], "--expires", "never", check=False)
    assert changed.returncode == 1 and since in changed.stderr, changed
    kept = SERVER.keys()["renamed"]
    assert kept == renamed, (kept, renamed)


def an_expired_key_is_refused():
    RUNTIME.answer = RUNTIME.good
    is_completion(SERVER.post(chat(), SERVER.create_key("lasts", "--expires", "90d")))
    secret = SERVER.create_key("brief", "--expires", "1s")
    assert until(lambda: SERVER.post(chat(), secret).status == 401), "an expired key is accepted"


def keys_are_listed_by_state():
    secret = SERVER.create_key("ends", "--expires", "1s")
    SERVER.create_key("ends soon", "--expires", "9d")
    SERVER.create_key("ends later", "--expires", "11d")
    assert until(lambda: SERVER.post(chat(), secret).status == 401)
    names = lambda state: {key["name"] for key in json.loads(SERVER.cli(  # noqa: E731
        "keys", "list", "--state", state, "--json").stdout)}
    states = {state: names(state) for state in ("active", "expiring", "expired", "revoked")}
    assert "ends" in states["expired"] and "ends soon" in states["expiring"] and "ends later" in states["active"], states
    assert sum(map(len, states.values())) == len(json.loads(SERVER.cli("keys", "list", "--json").stdout)), states
    assert SERVER.cli("keys", "list", "--state", "dead", check=False).returncode == 2
    for word in ("expired", "expiring"):
        assert word in SERVER.cli("keys", "list").stdout
    checked = json.loads(SERVER.cli("check", "--json", check=False).stdout)
    warnings = [finding["message"] for finding in checked if finding["part"] == "keys" and finding["status"] == "warn"]
    for name in ("ends", "ends soon"):
        assert SERVER.keys()[name]["id"] in "".join(warnings), warnings


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
    for change, status in (("29/day", 200), ("42/day", 403), ("none", 200)):
        SERVER.cli("keys", "set", key_id, "--budget", change)
        assert SERVER.post(chat(), secret).status == status, change
    assert budget() is None
    for change in ("15", "0/day", "-1/day", "15/year", "1.5/day", "day"):
        assert SERVER.cli("keys", "set", key_id, "--budget", change, check=False).returncode == 2, change


def completions_without_a_total_use_no_budget_and_check_warns():
    secret = SERVER.create_key("unmeasured budget", "--budget", "1/day")
    RUNTIME.answer = lambda _: (200, RUNTIME.completion(usage=None))
    for _ in range(2):
        is_completion(SERVER.post(chat(), secret), usage=(None, None, None))
    RUNTIME.answer = RUNTIME.good
    key = SERVER.keys()["unmeasured budget"]
    assert key["budget"]["used"] == 0, key
    checked = json.loads(SERVER.cli("check", "--json", check=False).stdout)
    assert any(finding["status"] == "warn" and key["id"] in finding["message"] for finding in checked), checked


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
