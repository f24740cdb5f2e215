"""The console's host: pages behind a password, probes and metrics."""

import json
import re
import urllib.parse

from harness import Server, chat, is_completion, is_error, request
from shared import KEY, RUNTIME, SERVER, UNREACHABLE

PASSWORD = "correct horse battery staple"


class _Browser:
    """Keeps cookies and the hidden fields of the last form."""

    def __init__(self, server):
        self.server, self.cookies, self.hidden = server, {}, {}

    def send(self, method, path, **fields):
        body = urllib.parse.urlencode(self.hidden | fields).encode() if fields else b""
        cookies = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        headers = [("Cookie", cookies), ("Sec-Fetch-Site", "same-origin")]
        reply = self.server.raw(request(
            body, None, host="console.test", path=path, method=method, headers=headers, content_type=None))
        for cookie in reply.headers.get("set-cookie", "").splitlines():
            name, _, value = cookie.partition(";")[0].partition("=")
            self.cookies[name] = value
        self.hidden |= dict(re.findall(r'type="hidden" name="(\w+)" value="([0-9a-f]+)"', reply.body.decode()))
        return reply


def pages_need_the_password():
    with Server(RUNTIME) as server:
        browser = _Browser(server)
        done = server.cli("console", "password", input=PASSWORD + "\n")
        assert PASSWORD not in done.stdout + done.stderr
        for path in ("/", "/keys", "/usage", "/status", "/audit"):
            reply = browser.send("GET", path)
            assert reply.status == 303 and reply.headers["location"].startswith("/sign-in"), (path, reply)
        browser.send("GET", "/sign-in")
        assert browser.send("POST", "/sign-in", password="not the password").status == 401
        assert browser.send("POST", "/sign-in", password=PASSWORD).status == 303
        for path in ("/keys", "/usage", "/status", "/audit"):
            assert browser.send("GET", path).status == 200, path
        server.cli("console", "password", input="another password of mine\n")
        assert browser.send("GET", "/keys").status == 303, "a new password ends the sessions"
        assert server.cli("console", "password", check=False, input="short\n").returncode != 0


def keys_are_created_changed_and_revoked():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME) as server:
        server.cli("console", "password", input=PASSWORD + "\n")
        browser = _Browser(server)
        browser.send("GET", "/sign-in")
        browser.send("POST", "/sign-in", password=PASSWORD)
        browser.send("GET", "/keys/new")
        created = browser.send("POST", "/keys", name="of the console", permission="completions", expires="")
        secret = re.search(rb"adr_[0-9a-f]{48}", created.body)[0].decode()
        is_completion(server.post(chat(), secret))
        key_id = server.keys()["of the console"]["id"]
        browser.send("GET", f"/keys/{key_id}")
        browser.send("POST", f"/keys/{key_id}", name="renamed", permission="metrics", expires="90d", concurrent="7")
        changed = server.keys()["renamed"]
        assert changed["id"] == key_id and changed["permissions"] == ["metrics"] and changed["concurrent"] == 7, changed
        is_error(server.post(chat(), secret), "insufficient_permission")
        browser.send("POST", f"/keys/{key_id}/revoke", confirm="yes")
        is_error(server.post(chat(), secret), "invalid_api_key")
        assert secret.encode() not in browser.send("GET", "/keys").body


def the_audit_tells_who_changed_what():
    with Server(RUNTIME) as server:
        server.cli("console", "password", input=PASSWORD + "\n")
        secret = server.create_key("audited")
        key_id = server.keys()["audited"]["id"]
        server.cli("keys", "set", key_id, "--concurrent", "3")
        browser = _Browser(server)
        browser.send("GET", "/sign-in")
        assert browser.send("POST", "/sign-in", password="not the password").status == 401
        browser.send("POST", "/sign-in", password=PASSWORD)
        browser.send("GET", "/keys")
        browser.send("POST", f"/keys/{key_id}/revoke", confirm="yes")
        rows = json.loads(server.cli("audit", "--json").stdout)
        found = {row["action"]: row for row in rows}
        assert set(found) == {"password_set", "key_created", "key_changed", "signed_in", "key_revoked"}, rows
        assert len(rows) == len(found), rows
        for action in ("key_created", "key_changed", "key_revoked"):
            assert found[action]["key_id"] == key_id and found[action]["key_name"] == "audited", found[action]
        ways = {action: row["via"] for action, row in found.items()}
        assert ways == {"password_set": "command", "key_created": "command", "key_changed": "command",
                        "signed_in": "console", "key_revoked": "console"}, ways
        assert all(row["actor"] and isinstance(row["created"], int) for row in rows), rows
        text = server.cli("audit", "--since", "1h").stdout
        assert secret not in text and PASSWORD not in text and key_id in text, text
        assert json.loads(server.cli("audit", "--json", "--since", "2100-01-01").stdout) == []
        assert server.cli("audit", "--since", "nonsense", check=False).returncode == 2


def the_api_is_not_served_on_the_consoles_host():
    is_error(SERVER.post(chat(), KEY, host="console.test"), "not_found")
    assert SERVER.get("/healthz").status == 200
    is_error(SERVER.get("/healthz", host="api.test"), "not_found")


def an_empty_console_host_disables_the_console():
    with Server(RUNTIME, console_host="") as server:
        for host in ("console.test", "console.localhost", ""):
            is_error(server.get("/healthz", host=host), "not_found")


def readiness_needs_a_configured_runtime():
    reply = SERVER.get("/readyz")
    assert (reply.status, reply.body) == (200, b"works\n"), reply
    with Server() as server:
        assert server.get("/healthz").status == 200
        reply = server.get("/readyz")
        assert (reply.status, reply.body) == (503, b"failing: runtime; the log says why\n"), reply
    with Server(runtime_url=f"{UNREACHABLE.url}/v1") as server:
        assert server.get("/healthz").status == 200
