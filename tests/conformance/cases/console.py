"""The console: its host, its password, its cookies and its forms."""

import concurrent.futures
import contextlib
import csv
import io
import json
import re
import signal
import time
import urllib.parse

from browser import PASSWORD, Browser, field, set_password, with_console
from harness import Runtime, Server, chat, is_completion, is_error, request, until
from shared import KEY, METRICS_KEY, RUNTIME, SERVER, UNREACHABLE

PAGES = ("/", "/keys", "/usage", "/requests", "/status", "/audit")
FORWARDED = ("X-Forwarded-For", "203.0.113.7")


def each_host_serves_its_own():
    for host in ("console.test", "CONSOLE.test:99"):
        is_error(SERVER.post(chat(), KEY, host=host), "not_found")
    assert SERVER.get("/healthz").status == 200
    for host in ("api.test", "other.test"):
        for path in (*PAGES, "/sign-in", "/metrics", "/healthz", "/readyz"):
            is_error(SERVER.get(path, METRICS_KEY, host=host), "not_found")


def an_empty_console_host_disables_the_console():
    with Server(RUNTIME, console_host="") as server:
        for host in ("console.test", "console.localhost", ""):
            for path in ("/healthz", "/sign-in"):
                is_error(server.get(path, host=host), "not_found")


def the_default_host_is_not_reached_through_a_proxy():
    """Any client can send `Host: console.localhost`. If it is set, it is meant."""
    server = Server(trusted_proxies="127.0.0.1")
    server.environment.pop("ADRIATICUM_CONSOLE_HOST")
    with server:
        browser = Browser(server, host="console.localhost")
        for headers in ((), [FORWARDED], [("X-Forwarded-For", "127.0.0.1")]):
            for path in ("/", "/sign-in", "/metrics", "/assets/"):
                is_error(browser.get(path, headers), "not_found")
            assert [browser.get(path, headers).status for path in ("/healthz", "/readyz")] == [200, 503]
    with Server(trusted_proxies="127.0.0.1", console_host="console.localhost") as server:
        assert Browser(server, host="console.localhost").get("/").status == 200


def readiness_needs_a_configured_runtime():
    reply = SERVER.get("/readyz")
    assert (reply.status, reply.body) == (200, b"works\n"), reply
    with Server() as server:
        assert server.get("/healthz").status == 200
        reply = server.get("/readyz")
        assert (reply.status, reply.body) == (503, b"failing: runtime; the log says why\n"), reply
    with Server(runtime_url=f"{UNREACHABLE.url}/v1") as server:
        assert server.get("/healthz").status == 200


def without_a_password_it_only_says_how_to_set_one():
    with Server() as server:
        browser = Browser(server)
        for path in (*PAGES, "/sign-in", "/nonsense"):
            reply = browser.get(path)
            assert reply.status == 200 and "adriaticum console password" in reply.text, (path, reply)
        assert "console password" in browser.post("/keys", name="x").text
        for short in ("", "eleven char"):
            done = server.cli("console", "password", check=False, input=short + "\n")
            assert done.returncode == 1 and "12 characters" in done.stderr, done
        set_password(server)
        for path in PAGES:
            reply = browser.get(path)
            assert reply.status == 303 and reply.headers["location"].startswith("/sign-in"), (path, reply)
        assert "horse" not in server.logged()


def the_command_for_a_forgotten_password_names_the_database():
    """To a client on this host: a host of its own may be behind a proxy, whose clients all seem to be on this host."""
    server = Server()
    named = f"ADRIATICUM_DATABASE='{server.database}' adriaticum console password"
    if server.postgres:
        return
    for host in ("console.test", "console.localhost"):
        if host == "console.localhost":
            server.environment.pop("ADRIATICUM_CONSOLE_HOST")
        with server:
            page = Browser(server, host=host).get("/").text
            assert (named in page) == (host == "console.localhost") and "adriaticum console password" in page, page


def signing_in_and_out():
    with with_console() as server:
        browser = Browser(server)
        assert browser.get("/usage?range=7d").headers["location"] == "/sign-in?next=%2Fusage%3Frange%3D7d"
        assert browser.sign_in("not the password").status == 401
        reply = browser.sign_in(next="/usage?range=7d")
        assert (reply.status, reply.headers["location"]) == (303, "/usage?range=7d"), reply
        for part in ("[WARN] console: sign-in failed, client=127.0.0.1\n", "operator signed in, client=127.0.0.1"):
            assert until(lambda: part in server.logged()), server.logged()
        cookie, = browser.cookies.values()
        assert len(cookie) == 64 and not server.files_with(cookie), "only its hash is kept"
        for line in reply.headers["set-cookie"].splitlines():
            assert "; HttpOnly; SameSite=Lax" in line and "Path=/;" in line, line
        for path in PAGES[1:]:
            assert browser.get(path).status == 200, path
        old = browser.copy()
        assert browser.post("/sign-out").headers["location"] == "/sign-in"
        assert old.get("/keys").status == 303, "a copy of the cookie opens something"
        for elsewhere in ("https://evil.test/", "//evil.test", "/\\evil.test"):
            assert Browser(server).sign_in(next=elsewhere).headers["location"] == "/", elsewhere
        browser = Browser.signed_in(server)
        set_password(server, "another password than before")
        assert browser.get("/keys").status == 303, "a new password ends the sessions"
        assert browser.sign_in().status == 401


def a_session_of_thirteen_hours_is_over_and_does_not_revive():
    with with_console() as server:
        browser = Browser.signed_in(server)
        (lifetime, signed_in), = server.rows("SELECT session_ends - signed_in, signed_in FROM console_browsers")
        assert lifetime == 12 * 3600 and abs(signed_in - time.time()) < 60, (lifetime, signed_in)
        server.change("UPDATE console_browsers SET signed_in = signed_in - 46800, session_ends = session_ends - 46800")
        old = browser.copy()
        for path in PAGES:
            assert old.get(path).status == 303, path
        assert old.post("/keys", name="x").status == 303
        # Every sign-in of a browser has a cookie of its own, and ends the one before.
        for count in range(2):
            browser.sign_in()
            assert browser.cookies != old.cookies
            assert (browser.get("/keys").status, old.get("/keys").status) == (200, 303), count
            old = browser.copy()
        assert server.rows("SELECT count(*) FROM console_browsers") == [(1,)], "one browser, one row"


def https_has_cookies_of_its_own():
    with with_console(trusted_proxies="127.0.0.1") as server:
        https = [("X-Forwarded-Proto", "https"), FORWARDED]
        browser = Browser(server)
        assert "strict-transport-security" in browser.get("/sign-in", https).headers
        reply = browser.post("/sign-in", password=PASSWORD, headers=[*https, ("Origin", "http://console.test")])
        assert reply.status == 403, "plain HTTP is another site"
        reply = browser.post("/sign-in", password=PASSWORD, headers=[*https, ("Origin", "https://console.test")])
        assert reply.status == 303, reply
        assert until(lambda: "operator signed in, client=203.0.113.7" in server.logged()), server.logged()
        cookie = reply.headers["set-cookie"]
        assert cookie.startswith("__Host-adriaticum_browser=") and cookie.endswith("; Secure"), cookie
        assert browser.get("/keys", https).status == 200
        if server.secured:
            return
        assert "strict-transport-security" not in browser.get("/sign-in").headers
        assert browser.get("/keys").status == 303, "a cookie of HTTPS is none of plain HTTP"
        browser.cookies = {"adriaticum_browser": browser.cookies["__Host-adriaticum_browser"]}
        assert browser.get("/keys", https).status == 303, "nor the other way round"


def every_page_has_its_headers():
    with with_console() as server:
        browser = Browser.signed_in(server)
        for path in (*PAGES[1:], "/keys/new", "/requests/chatcmpl_0", "/nothing"):
            reply = browser.get(path)
            for name, value in (("x-content-type-options", "nosniff"), ("cache-control", "no-store"),
                                ("referrer-policy", "same-origin"), ("x-frame-options", "DENY")):
                assert reply.headers[name] == value, (path, name, reply.headers)
            policy = reply.headers["content-security-policy"]
            assert policy.startswith("default-src 'none';") and "frame-ancestors 'none'" in policy, policy
            # In a shared database the status page shows the address of this gateway.
            page = re.sub(r"https?://127\.0\.0\.1:\d+", "", reply.text)
            for forbidden in ("unsafe", " style=", "<style", " onclick=", "http://", "https://"):
                assert forbidden not in policy + page, (path, forbidden)
            assert page.count("<script") == 1, path
        page = browser.get("/keys").text
        for path, kind in (("/assets/style", "text/css"), ("/assets/script", "text/javascript")):
            path, = re.findall(f'"({path}[^"]*)"', page)
            reply = Browser(server).get(path)
            assert reply.status == 200 and reply.headers["content-type"].startswith(kind), (path, reply)
            assert "immutable" in reply.headers["cache-control"], reply.headers


def a_form_from_elsewhere_changes_nothing():
    with with_console() as server:
        scheme, other = ("https", "http") if server.secured else ("http", "https")
        browser = Browser.signed_in(server)
        form = {"name": "x", "permission": "completions", "once": "0" * 32}
        site = lambda value: ("Sec-Fetch-Site", value)  # noqa: E731
        origin = lambda value: ("Origin", value)  # noqa: E731
        ours = f"{scheme}://console.test"
        for headers in ([], [origin("null")], [origin(f"{scheme}://evil.test")], [origin(f"{other}://console.test")],
                        [origin(f"{ours}:9999")], [origin(f"{scheme}://api.test")], [origin("null"), site("cross-site")],
                        [origin(ours), site("same-site")], [origin(ours), site("none")],
                        [origin(ours), origin(f"{scheme}://evil.test")], [site("same-origin"), site("cross-site")]):
            # With a sign-in or sign-out, another site could sign its visitor in, or out.
            statuses = [browser.post("/keys", headers=headers, **form).status, browser.post("/sign-out", headers=headers).status,
                        Browser(server).post("/sign-in", headers=headers, password=PASSWORD).status]
            assert statuses == [403] * 3, (headers, statuses)
        assert server.keys() == {}
        # The second time the form has created its key already.
        for headers, status in (([origin(ours)], 200), ([site("same-origin")], 303)):
            assert browser.post("/keys", headers=headers, **form).status == status, headers
        assert browser.get("/usage", [site("cross-site")]).status == 200, "a link of another site opens the page"


def a_form_that_is_sent_twice_creates_one_key():
    with with_console() as server:
        browser = Browser.signed_in(server)
        # Two tabs, each of them sent four times at once.
        tabs = [field(browser.get("/keys/new").text, "once") for _ in range(2)]
        send = lambda once: browser.copy().post("/keys", name="x", permission="completions", once=once).status  # noqa: E731
        with concurrent.futures.ThreadPoolExecutor() as pool:
            statuses = list(pool.map(send, tabs * 4))
        created = lambda: server.rows("SELECT count(*) FROM keys") == [(2,)]  # noqa: E731
        assert sorted(statuses) == [200] * 2 + [303] * 6 and created(), statuses
        assert send("not one of ours") == 400
        server.stop()
        server.start()
        server.wait_until_it_listens()
        assert send(tabs[0]) == 303 and created(), "a restart forgets"


def what_a_person_typed_is_never_markup():
    hostile = "\"'><script>alert(1)</script><b>&{{7*7}}=HYPERLINK(1)"
    inject = urllib.parse.quote("\"><script>alert(2)</script>", safe="")
    runtime = Runtime()
    with with_console(runtime) as server:
        secret = server.create_key(hostile)
        is_completion(server.post(chat("x"), secret), "x")
        runtime.answer = lambda body: (500, {})
        request_id = is_error(server.post(chat(), secret), "inference_error")["request_id"]
        browser, key_id = Browser.signed_in(server), server.keys()[hostile]["id"]
        everything = lambda *names: "&".join(f"{name}={inject}" for name in names)  # noqa: E731
        shows_it = ["/keys", f"/keys/{key_id}", f"/keys/{key_id}/revoke", "/usage?range=1h", f"/requests/{request_id}", "/audit"]
        for path in (*shows_it, f"/keys?changed={key_id}", f"/usage?key={key_id}", "/status",
                     "/keys?" + everything("changed", "revoked", "q", "sort", "page", "state"),
                     "/usage?" + everything("range", "key", "outcome", "from", "to", "before", "least", "sort", "gateway"),
                     "/requests?" + everything("range", "key", "outcome", "from", "to", "before", "after", "least"),
                     f"/requests/find?id={inject}", f"/requests/{inject}", f"/sign-in?next={inject}", f"/audit?before={inject}"):
            page = browser.get(path).text
            assert "<script>" not in page and "<b>" not in page, (path, page)
            assert path not in shows_it or "&lt;script&gt;alert(1)&lt;/script&gt;&lt;b&gt;&amp;" in page, (path, page)
        form = browser.post("/keys", name="\"><script>alert(3)</script>", expires="\"><script>")
        assert form.status == 400 and "<script>" not in form.text, form
        assert "<script>" not in Browser(server).get(f"/sign-in?next={inject}").text
        rows = list(csv.DictReader(io.StringIO(browser.get("/requests/export.csv?range=1h").text.lstrip("\ufeff"))))
        assert len(rows) == 2 and all(row["key_name"] == hostile for row in rows), rows


def one_export_is_in_progress():
    """A second one gets 429 until the first has been read, or its connection has ended."""
    with with_console() as server:
        browser = Browser.signed_in(server)
        # More bytes than the system buffers for a connection.
        if server.postgres:
            request_id, name = "lpad(to_hex((1577836800 + i::bigint) * 1000), 12, '0') || lpad(to_hex(i), 20, '0')", "repeat('x', 3000)"
        else:
            request_id, name = "printf('%012x%020x', (1577836800 + i) * 1000, i)", "printf('%.3000c', 'x')"
        server.change(
            f"WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 4000)"
            f" INSERT INTO usage (request_id, key_id, key_name, created, status, day)"
            f" SELECT 'chatcmpl_' || {request_id}, 'key_1', {name}, 1577836800 + i, 200, '2020-01-01' FROM n")
        path = "/requests/export.csv?from=2020-01-01&to=2020-01-01"
        cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
        data = request(b"", host="console.test", path=path, method="GET", headers=[("Cookie", cookie)], version="HTTP/1.0")
        with server.connect() as slow:
            slow.sendall(data)
            text = slow.recv(12)
            assert text == b"HTTP/1.1 200", text
            refused = browser.get(path)
            assert (refused.status, refused.headers.get("retry-after")) == (429, "10"), refused
            while piece := slow.recv(65536):
                text += piece
        assert text.count(b"chatcmpl_") == 4001
        with contextlib.closing(server.connect()) as left:
            left.sendall(data)
            assert left.recv(1)
        assert until(lambda: browser.get(path).status == 200), "the next one may not begin"


def every_change_is_in_the_audit():
    """Who changed what: through the console, a command and a signal. A failed sign-in is in the log alone."""
    server = Server(Runtime())
    server.environment["SUDO_USER"] = "ana\u202e"
    with server:
        set_password(server)
        secret = server.create_key("first")
        server.environment["SUDO_USER"] = "ana"
        key_id = server.keys()["first"]["id"]
        server.cli("keys", "set", key_id, "--concurrent", "7")
        server.cli("keys", "rename", key_id, "second")
        browser = Browser(server)
        for _ in range(3):
            assert browser.sign_in("not the password").status == 401
        browser.sign_in()
        for _ in range(2):
            browser.post(f"/keys/{key_id}/revoke")
        rows = lambda: json.loads(server.cli("audit", "--json").stdout)  # noqa: E731
        found = [(row["action"], row["via"]) for row in rows()]
        assert found == [("password_set", "command"), ("key_created", "command"), ("key_changed", "command"), ("key_changed", "command"),
                         ("signed_in", "console"), ("key_revoked", "console")], found
        _, created, changed, renamed, signed_in, revoked = rows()
        user = created["actor"]
        assert user and "ana" not in user, f"a name that can't be one: {user}"
        assert changed["actor"] == renamed["actor"] == f"ana as {user}", renamed
        assert signed_in["actor"] == revoked["actor"] == "127.0.0.1", revoked
        assert (created["key_id"], created["key_name"], revoked["key_name"]) == (key_id, "first", "second"), revoked
        assert all(isinstance(row["created"], int) for row in rows()), rows()
        server.process.send_signal(signal.SIGHUP)
        reloaded = lambda: [row for row in rows() if (row["via"], row["actor"]) == ("signal", "SIGHUP")]  # noqa: E731
        assert until(reloaded) and reloaded()[0]["action"] == "settings_reloaded", rows()
        page, table = browser.get("/audit").text, server.cli("audit", "--since", "1h").stdout
        for part in ("key created", "concurrent: none → 7", "SIGHUP", "ana as", "second</a>"):
            assert part in page, (part, page)
        assert len(table.splitlines()) == 8 and key_id in table and "key revoked" in table, table
        for printed in (page, table, json.dumps(rows())):
            assert secret not in printed and PASSWORD not in printed, printed
        assert json.loads(server.cli("audit", "--json", "--since", "2100-01-01").stdout) == []
        failed = "[WARN] console: sign-in failed, client=127.0.0.1\n"
        assert server.logged().count(failed) == 3, server.logged()


def the_audit_has_pages():
    with with_console() as server:
        server.create_key("first")
        browser, now = Browser.signed_in(server), int(time.time())
        # Some of them are older than any range of another page.
        rows = ", ".join(f"('audit_{number:032x}', {now - (40 * 86_400 if number < 10 else 0)}, 'signed_in', 'console',"
                         f" 'row {number}', '', NULL, NULL)" for number in range(110))
        server.change(f"INSERT INTO audit VALUES {rows}")
        path, pages = "/audit", []
        while path:
            pages.append(browser.get(path).text)
            earlier = re.search(r'href="(/audit\?before=[^"]*)"', pages[-1])
            path = earlier and earlier[1]
        assert len(pages) == 3, len(pages)
        assert all("".join(pages).count(f">row {number}<") == 1 for number in range(110))
        for about, has_keys, has_sign_ins in (("keys", True, False), ("sign-ins", False, True), ("settings", False, False)):
            page = browser.get(f"/audit?about={about}").text
            assert ("key created" in page, "signed in" in page) == (has_keys, has_sign_ins), (about, page)
