"""A person's browser at the console: it keeps cookies, and sends forms as the console's own pages do."""

import contextlib
import re
import urllib.parse

from harness import Server, request

PASSWORD = "correct horse battery staple"
OWN_FORM = (("Sec-Fetch-Site", "same-origin"),)


class Browser:
    def __init__(self, server, source=None, host="console.test", cookies=()):
        self.server, self.source, self.host, self.cookies = server, source, host, dict(cookies)

    @classmethod
    def signed_in(cls, server, **parts):
        browser = cls(server, **parts)
        reply = browser.sign_in()
        assert (reply.status, reply.headers.get("location")) == (303, "/"), reply
        return browser

    def copy(self):
        return Browser(self.server, self.source, self.host, self.cookies)

    def sign_in(self, password=PASSWORD, **fields):
        self.get("/sign-in")
        return self.post("/sign-in", password=password, **fields)

    def get(self, path, headers=()):
        return self.send("GET", path, headers)

    def post(self, path, *pairs, headers=OWN_FORM, **fields):
        return self.send("POST", path, headers, urllib.parse.urlencode([*pairs, *fields.items()]).encode())

    def send(self, method, path, headers=(), body=b""):
        cookie = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        data = request(body, host=self.host, path=path, method=method, headers=[("Cookie", cookie), *headers], content_type=None)
        reply = self.server.raw(data, source=self.source)
        for line in reply.headers.get("set-cookie", "").splitlines():
            name, _, value = line.partition(";")[0].partition("=")
            self.cookies[name] = value
        return reply


@contextlib.contextmanager
def with_console(runtime=None, **settings):
    """Yields a service whose console has its password."""
    server = Server(runtime, **settings)
    set_password(server)
    with server:
        yield server


def set_password(server, password=PASSWORD):
    done = server.cli("console", "password", input=password + "\n")
    assert password not in done.stdout + done.stderr, done
    return done.stderr


def field(page, name):
    """Returns the value of a form's field."""
    return re.search(f'name="{name}" value="([^"]*)"', page)[1]


def texts(element):
    """Returns the texts of an element, without markup."""
    return [text for text in re.findall(r">([^<]+)", element) if text.strip()]


def hint_of(secret):
    return f"{secret[:8]}…{secret[-4:]}"
