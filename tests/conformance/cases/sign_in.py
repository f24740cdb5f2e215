"""Signing in to the console while strangers guess the password or flood the sign-in page."""

import concurrent.futures
import re
import threading
import time

from browser import PASSWORD, Browser, set_password, with_console
from harness import REPLY_SECONDS, until

ANOTHER = "another password than before"
# Only 127.0.0.1 counts as this host: other addresses are strangers'.
ELSEWHERE = "127.0.0.3"


def _attempt(browser, password="a wrong password"):
    return browser.post("/sign-in", password=password).status


def _guess(browser):
    """Guesses until it has to wait, and returns how many guesses were answered."""
    browser.get("/sign-in")
    return next(count for count in range(100) if _attempt(browser) != 401)


def _whole_way(browser, password=PASSWORD):
    """From the sign-in page to the keys, without a session. Returns the statuses."""
    browser.post("/sign-out")
    return [browser.get("/sign-in").status, _attempt(browser, password), browser.get("/keys").status]


def wrong_passwords_are_slowed_down():
    with with_console() as server:
        guesser = Browser(server)
        assert _guess(guesser) == 5
        reply = guesser.post("/sign-in", password=PASSWORD)
        seconds = int(reply.headers["retry-after"])
        assert reply.status == 429 and 1 <= seconds <= 60 and f"{seconds} second" in reply.text, reply
        assert until(lambda: _attempt(guesser, PASSWORD) == 303), "the wait does not end"


def a_browser_is_known_after_a_change_of_the_password():
    with with_console() as server:
        own = Browser.signed_in(server, source=ELSEWHERE)
        set_password(server, ANOTHER)
        guesser = Browser(server, source=ELSEWHERE)
        assert _guess(guesser) == 5 and _attempt(guesser, ANOTHER) == 429, "the address has to wait"
        assert _whole_way(own) == [200, 401, 303], "a known browser needs the password too"
        assert _whole_way(own, ANOTHER) == [200, 303, 200]
        own.post("/sign-out")
        assert own.get("/keys").status == 303 and _guess(own) == 5, "that it is known gives no access"


def strangers_lock_out_neither_a_known_browser_nor_a_client_on_this_host():
    with with_console() as server:
        known = Browser.signed_in(server, source=ELSEWHERE)
        # Strangers have one budget, however many addresses they use.
        assert any(_attempt(Browser(server, source=f"127.0.1.{last}")) == 429 for last in range(1, 255))
        assert _whole_way(known) == [200, 303, 200]
        local = Browser.signed_in(server)
        assert _guess(Browser(server)) == 5, "a user of this host has to wait too"
        assert _whole_way(local) == [200, 303, 200], "it is known now"


def a_form_that_was_sent_after_the_end_of_the_session_leads_back_to_its_page():
    with with_console() as server:
        server.create_key("first")
        own, key = Browser.signed_in(server), f"/keys/{server.keys()['first']['id']}"
        end_session = lambda: server.change("UPDATE console_browsers SET session_ends = NULL")  # noqa: E731
        for path, back in (("/keys", "/keys/new"), (f"{key}?sort=name&page=2", f"{key}?sort=name&page=2"),
                           (f"{key}/revoke", f"{key}/revoke")):
            end_session()
            to = own.post(path, name="never saved", permission="metrics", once="0123456789abcdef" * 2).headers["location"]
            assert to.startswith("/sign-in?ended=form&next=") and "never" not in to, to
            page = own.get(to).text
            shown = re.search('name="next" value="([^"]*)"', page)[1].replace("&amp;", "&")
            assert "the change was not saved" in page and shown == back, page
            assert own.post("/sign-in", password=PASSWORD, next=back).headers["location"] == back
            reply = own.get(back)
            assert reply.status == 200 and "never saved" not in reply.text, reply
        assert server.rows("SELECT name, revoked FROM keys") == [("first", None)], "something was changed"
        # A page that was only looked at says no more than that.
        end_session()
        to = own.get("/usage?range=7d").headers["location"]
        assert to == "/sign-in?ended=page&next=%2Fusage%3Frange%3D7d", to
        page = own.get(to).text
        assert "Your session ended. Sign in again." in page and "saved" not in page, page
        assert own.post("/sign-out").headers["location"] == "/sign-in?ended=page", "nothing is lost"


def sign_ins_wait_for_each_other():
    """One password is verified at a time. An attempt meanwhile got 429."""
    with with_console() as server:
        browsers = [Browser.signed_in(server, source=ELSEWHERE) for _ in range(6)]
        with concurrent.futures.ThreadPoolExecutor(len(browsers)) as pool:
            statuses = list(pool.map(lambda browser: _attempt(browser, PASSWORD), browsers))
        assert statuses == [303] * 6, statuses


def twenty_connections_on_the_sign_in_page_do_not_keep_the_operator_out():
    """They took all places in the console's queue."""
    with with_console() as server:
        cookies = Browser.signed_in(server, source=ELSEWHERE).cookies
        server.stop()
        server.start()
        server.wait_until_it_listens()
        is_over, end = threading.Event(), time.monotonic() + REPLY_SECONDS

        def flood(guesses):
            stranger = Browser(server, source="127.0.0.2")
            while not is_over.is_set() and time.monotonic() < end:
                stranger.get("/sign-in")
                if guesses:
                    _attempt(stranger)

        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            flooding = [pool.submit(flood, number % 2 == 0) for number in range(20)]
            own = Browser(server, source=ELSEWHERE, cookies=cookies)
            found = [_whole_way(own) for _ in range(8)] + [_whole_way(Browser(server)) for _ in range(8)]
            is_over.set()
        assert found == [[200, 303, 200]] * 16, found
        for stranger in flooding:
            stranger.result()
