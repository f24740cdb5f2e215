"""The console's pages about keys: what they create, change and show."""

import json
import re
import time
import urllib.parse

from browser import Browser, field, hint_of, with_console
from harness import Runtime, chat, is_completion, is_error
from shared import RUNTIME

DAY = 86_400


def _names(reply):
    """Returns the names that a list shows, in its order."""
    return re.findall(r'<th role="rowheader".*?<a [^>]*>([^<]*)', reply.text)


def _key(server):
    key, = server.keys().values()
    return key


def a_key_is_created_used_and_revoked():
    RUNTIME.answer = RUNTIME.good
    with with_console(RUNTIME) as server:
        browser = Browser.signed_in(server)
        assert "Create the first key" in browser.get("/keys").text
        form = {"name": "first", "permission": "completions", "expires": "90d", "concurrent": "7",
                "once": field(browser.get("/keys/new").text, "once")}
        created = browser.post("/keys", **form).text
        secret = re.search('id="secret">(adr_[0-9a-f]{48})<', created)[1]
        assert re.search(r"curl https?://api\.test\S*/v1/chat/completions", created), created
        is_completion(server.post(chat(), secret))
        # A page that is loaded again creates no other key.
        again = browser.post("/keys", **form).headers["location"]
        assert again.startswith("/keys?made=key_"), again
        page, key = browser.get(again).text, _key(server)
        for part in ("This form has already created", "first</strong>", hint_of(secret), "7 concurrent"):
            assert part in page, (part, page)
        assert secret not in page and key["concurrent"] == 7 and 89 * DAY < key["expires"] - key["created"] <= 91 * DAY, key
        path = f"/keys/{key['id']}"
        asked = browser.get(f"{path}/revoke").text
        assert "first" in asked and "can’t be undone" in asked, asked
        is_completion(server.post(chat(), secret))
        browser.post(f"{path}/revoke")
        is_error(server.post(chat(), secret), "invalid_api_key")
        assert "Revoked (1)" in browser.get("/keys").text and "first</a>" in browser.get("/keys?state=revoked").text
        # Neither page of a revoked key changes it.
        for part in ("revoke", "rotate"):
            reply = browser.get(f"{path}/{part}")
            assert (reply.status, reply.headers["location"]) == (303, path), (part, reply)
        assert 'name="name"' not in browser.get(path).text
        late = browser.post(path, name="late", permission="completions")
        assert late.status == 400 and "The key is revoked" in late.text and "Nothing was changed." in late.text, late.text
        assert _key(server)["name"] == "first"


def what_a_form_of_a_key_refuses():
    with with_console() as server:
        server.create_key("first")
        browser, path = Browser.signed_in(server), f"/keys/{_key(server)['id']}"
        before = _key(server)
        for name, bad in (("name", "\u202e"), ("name", ""), ("name", "key_0123456789abcdef"), ("permission", "nonsense"),
                          ("expires", "soon"), ("concurrent", "0"), ("budget", "0")):
            fields = {"name": "x", "permission": "completions"} | {name: bad}
            reply = browser.post(path, **fields)
            assert reply.status == 400 and 'role="alert"' in reply.text, (name, reply)
            assert reply.text.count('aria-invalid="true"') == 1, reply.text
            focused, = (element for element in reply.text.split("<") if " autofocus" in element)
            assert f'name="{name}"' in focused, (name, focused)
            assert browser.post("/keys", once="0" * 32, **fields).status == 400, name
        typed = browser.post(path, name="x", permission="metrics", expires="2001-01-01", budget="1, x").text
        for part in ('value="2001-01-01"', 'value="1, x"', 'value="metrics" checked'):
            assert part in typed, (part, typed)
        for unknown in ("key_none", "..", "%2e%2e"):
            statuses = [browser.get(f"/keys/{unknown}").status, browser.get(f"/keys/{unknown}/revoke").status,
                        browser.post(f"/keys/{unknown}", name="x").status]
            assert statuses == [404] * 3, (unknown, statuses)
        assert browser.post("/keys", name="x" * 20_000).status == 413
        assert browser.send("DELETE", "/keys").status == 405
        assert _key(server) == before, "something was changed"


def everything_of_a_key_is_changed_in_one_place():
    RUNTIME.answer = RUNTIME.good
    with with_console(RUNTIME) as server:
        secret = server.create_key("first")
        browser, key = Browser.signed_in(server), _key(server)
        path = f"/keys/{key['id']}"
        page = browser.get(path).text
        assert key["id"] in page and secret not in page and "Requests, 30" in page, page
        # A term counts from when the form is sent, and a date is sent as it is.
        browser.post(path, name="first", permission="completions", expires="", term="90d")
        assert 0 <= _key(server)["expires"] - key["created"] - 90 * DAY < 600, _key(server)
        date = time.strftime("%Y-%m-%d", time.gmtime(key["created"] + 99 * DAY))
        saved = f"/keys?changed={key['id']}"
        for _ in range(2):
            reply = browser.post(path, ("permission", "completions"), ("permission", "metrics"), name="second", expires=date, term="",
                                 concurrent="7", budget="20,000", budget_per="day")
            assert reply.headers["location"] == saved, reply
        assert "Saved" in browser.get(saved).text
        expires = (key["created"] + 99 * DAY) // DAY * DAY + DAY
        key |= {"name": "second", "permissions": ["completions", "metrics"], "expires": expires, "concurrent": 7,
                "budget": {"tokens": 20_000, "per": "day", "used": 0}}
        assert _key(server) == key, (_key(server), key)
        assert server.rows("SELECT count(*) FROM audit WHERE action = 'key_changed'") == [(2,)], "one change, one row"
        page = browser.get(path).text
        assert 'value="20000"' in page and '<progress max="20000" value="0"' in page, page

        # An expiry that is not changed stays to the second. What a form leaves out is taken back.
        server.change(f"UPDATE keys SET expires = {expires - 3600}")
        assert field(browser.get(path).text, "expires")[:10] == date
        assert browser.post(path, name="second", permission="completions", expires=date).status == 303
        key |= {"permissions": ["completions"], "expires": expires - 3600, "concurrent": None, "budget": None}
        assert _key(server) == key, (_key(server), key)
        is_completion(server.post(chat(), secret))

        # Its page and the list show what was used of a budget, and how long it lasts.
        for budget, figures in (("15/day", "</progress>93% of 15 a day"), ("28/month", "</progress>50% of 28 a month"),
                                ("14/day", '% of 14 a day <span class="badge bad">used up</span>')):
            server.cli("keys", "set", key["id"], "--budget", budget, "--concurrent", "3")
            for shown in (browser.get(path).text, browser.get("/keys").text):
                assert shown.count(figures) == 1, (figures, shown)
        assert ">3 concurrent<" in browser.get("/keys").text
        for expires, left in (("5d", ["5 days"]), ("3h", ["3 hours"]), ("12d", [])):
            server.cli("keys", "set", key["id"], "--expires", expires)
            for shown in (browser.get(path).text, browser.get("/keys").text):
                assert re.findall(">expires in ([^<]*)", shown) == left, (expires, shown)


def an_expiry_of_today_is_the_end_of_today():
    """The console and the command meant different days by it."""
    with with_console() as server:
        browser = Browser.signed_in(server)
        page = browser.get("/keys/new").text
        # The first day that the field offers.
        today = re.search(' min="([^"]{10})', page)[1]
        assert browser.post("/keys", name="x", permission="completions", expires=today, once=field(page, "once")).status == 200
        server.create_key("y", "--expires", today)
        for key in server.keys().values():
            assert key["expires"] % DAY == 0 and 1 <= key["expires"] - key["created"] <= DAY, key


def the_last_change_of_two_operators_wins_and_the_audit_has_both():
    with with_console() as server:
        server.create_key("first")
        path = f"/keys/{_key(server)['id']}"
        one, other = Browser.signed_in(server), Browser.signed_in(server)
        for browser in (one, other):
            browser.get(path)
        for browser, name in ((other, "theirs"), (one, "mine")):
            assert browser.post(path, name=name, permission="completions").status == 303
        assert _key(server)["name"] == "mine"
        audit = server.cli("audit").stdout
        assert '"first" → "theirs"' in audit and '"theirs" → "mine"' in audit, audit


def a_key_is_rotated():
    """Both secrets work during the overlap, and the former one ends with the next rotation."""
    RUNTIME.answer = RUNTIME.good
    with with_console(RUNTIME) as server:
        first = server.create_key("first")
        browser, page = Browser.signed_in(server), f"/keys/{_key(server)['id']}"
        overlap = f"and <code>{hint_of(first)}</code> until <time"
        assert f'href="{page}/rotate"' in browser.get(page).text and overlap not in browser.get(page).text
        rotate = lambda hours: browser.post(f"{page}/rotate", ends=str(hours))  # noqa: E731
        secret_of = lambda reply: re.search("adr_[0-9a-f]{48}", reply.text)[0]  # noqa: E731
        second = secret_of(rotate(24))
        is_completion(server.post(chat(), first))
        is_completion(server.post(chat(), second))
        assert overlap in browser.get(page).text
        assert rotate(24).headers["location"] == f"{page}/rotate", "it has an overlap"
        asked = browser.get(f"{page}/rotate").text
        assert hint_of(first) in asked and "<select" not in asked, asked
        assert rotate(2).status == 400
        third = secret_of(rotate(0))
        is_completion(server.post(chat(), third))
        for secret in (first, second):
            is_error(server.post(chat(), secret), "invalid_api_key")
        assert overlap not in browser.get(page).text
        assert server.cli("audit", "--json").stdout.count("key_rotated") == 2
        browser.post(f"{page}/revoke")
        assert rotate(0).status == 303, "a revoked key"


def the_list_is_filtered_sorted_and_paged():
    RUNTIME.answer = RUNTIME.good
    with with_console(RUNTIME) as server:
        secret = server.create_key("busy")
        server.create_key("Ana", "--permission", "metrics", "--expires", "90d")
        server.create_key("crawler", "--expires", "7d")
        for body in (chat(), chat(), {}):
            server.post(body, secret)
        browser = Browser.signed_in(server)
        for query, names in (("sort=name", ["Ana", "busy", "crawler"]), ("sort=-name", ["crawler", "busy", "Ana"]),
                             ("sort=expires", ["crawler", "Ana", "busy"]), ("sort=-requests&q=busy", ["busy"]),
                             ("q=METRICS", ["Ana"]), ("q=nothing+of+that", [])):
            assert _names(browser.get(f"/keys?{query}")) == names, query
        page = browser.get("/keys?sort=-requests").text
        first = page.split('<th role="rowheader"')[1]
        for part in ("busy", ">3</a>", ">1</a>", ">28</td>"):
            assert part in first, (part, "requests, errors, tokens", first)
        assert 'aria-sort="descending"' in page and "Next" not in page, page
        for number in range(60):
            server.change("INSERT INTO keys (id, name, permissions, created)"
                          f" VALUES ('key_{number:016x}', 'many {number:02}', 'completions', 5)")
        digest = "sha256(convert_to(id, 'UTF8'))" if server.postgres else "randomblob(32)"
        server.change("INSERT INTO key_secrets (digest, key_id, hint, created)"
                      f" SELECT {digest}, id, 'adr_0123…4567', 5 FROM keys WHERE name LIKE 'many %'")
        reply = browser.get("/keys?sort=name&q=many")
        assert len(_names(reply)) == 50 and "Page 1 of 2, 60 keys" in reply.text and "page=2" in reply.text, reply.text
        assert len(reply.body) < 60 * 1024, len(reply.body)
        second = _names(browser.get("/keys?sort=name&q=many&page=2"))
        assert (len(second), second[0]) == (10, "many 50"), second
        assert _names(browser.get("/keys?sort=name&q=many&page=99")) == second, "the last page there is"


def a_filter_by_key_means_one_key_or_all_of_a_name():
    """A filter that meant no key showed the figures of all keys, and one by a name those of one key that has it."""
    RUNTIME.answer = RUNTIME.good
    with with_console(RUNTIME) as server:
        ids, hints = [], []
        for name, count in (("twin", 1), ("twin", 2), ("key_of_Ana", 3)):
            secret = server.create_key(name)
            hints.append(hint_of(secret))
            ids += [key["id"] for key in json.loads(server.cli("keys", "list", "--json").stdout) if key["hint"] == hints[-1]]
            for _ in range(count):
                is_completion(server.post(chat(), secret))
        browser = Browser.signed_in(server)

        def shown(text):
            """Returns how many requests all pages show; None if they have no figures."""
            get = lambda path: browser.get(f"{path}?range=24h&key={urllib.parse.quote_plus(text)}")  # noqa: E731
            usage, requests, exported = get("/usage").text, get("/requests").text, get("/requests/export.csv")
            listed = requests.count('href="/requests/chatcmpl_')
            if "cards-row" not in usage:
                assert (exported.status, get("/usage/totals.csv").status, listed) == (404, 404, 0), text
                assert "export.csv" not in requests, requests
                return None
            assert re.search(r"<strong>.*?>(\d+)</", usage)[1] == str(listed), (text, usage)
            assert exported.text.count("chatcmpl_") == listed, (text, exported.text)
            assert not text or 'value=""' not in re.search('<[^>]*name="key"[^>]*>', requests)[0], requests
            return listed

        for text, count in (("", 6), (ids[0], 1), (ids[1], 2), (f"twin {hints[0]}", 1), (f"renamed {hints[1]}", 2), ("key_of_Ana", 3),
                            ("KEY_OF", 3), ("twin", 3), ("nobody", None), ("key_0123456789abcdef", None)):
            assert shown(text) == count, (text, shown(text))
        server.cli("keys", "revoke", ids[0])
        assert shown("twin") == 3, "a revoked key counts"
        page = browser.get("/usage?range=7d&key=in").text
        for key_id, hint in zip(ids[:2], hints):
            assert f'href="/usage?range=7d&amp;key={key_id}">twin {hint}</a>' in page, page
        assert 'href="/usage?range=30d&amp;key=twin"' in browser.get("/usage?range=7d&key=twin").text, "a range keeps the filter"


def links_lead_to_a_key_and_back():
    runtime = Runtime()
    with with_console(runtime) as server:
        assert server.post(chat(), server.create_key("first")).status == 200
        browser, key_id = Browser.signed_in(server), _key(server)["id"]
        page = browser.get("/keys?sort=-tokens&q=f").text
        for path in ("/keys/new", f"/keys/{key_id}"):
            assert f'href="{path}?sort=-tokens&amp;q=f"' in page, page
            assert 'href="/keys?sort=-tokens&amp;q=f"' in browser.get(f"{path}?sort=-tokens&q=f").text, path
        page = browser.get("/requests?range=7d&outcome=ok").text
        assert f'href="/keys/{key_id}">first</a>' in page, page
        path = re.search('href="(/requests/chatcmpl_[^"]*)"', page)[1].replace("&amp;", "&")
        assert 'href="/requests?range=7d&amp;outcome=ok">Requests</a>' in browser.get(path).text
