"""Measures what the console costs: the API's requests per second with and without constant use of the console, and how
long each page takes with a large ledger.

    python3 bench/console.py [ROWS] [ROUNDS]

Constant use means that a visitor opens the next page as soon as the last one has arrived.
"""

import http.client
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

import subjects
from measure import load_once
from subjects import BINARY, ROOT, Ours
from years import fill

PASSWORD = "correct horse battery staple"
CLIENTS = 8
SECONDS = 5
PAGES = ("/keys", "/keys?sort=-tokens&q=a", "/audit", "/usage?range=1h", "/usage?range=24h", "/usage?range=7d", "/usage?range=30d",
         "/usage?range=90d", "/usage?range=last-month",
         f"/usage?from={time.gmtime().tm_year - 6}-01-01&to={time.strftime('%Y-%m-%d', time.gmtime())}", "/usage/keys?range=90d",
         "/usage?range=90d&least=5000", "/usage?range=90d&least=5000&outcome=ok", f"/usage?range=90d&least=5000&key=key_{3:016x}",
         "/usage?range=90d&outcome=failed", "/usage?range=90d&outcome=interrupted", "/usage?range=90d&outcome=ok", "/status")
AT_MOST_MS = 50


class Visitor:
    """A signed-in visitor."""

    def __init__(self, port):
        self.port = port
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.cookies = {}
        form = self.get("/sign-in")
        token = re.search(r'name="token" value="([0-9a-f]+)"', form)[1]
        self.ask("POST", "/sign-in", urllib.parse.urlencode({"token": token, "password": PASSWORD}))
        if "adriaticum_session" not in self.cookies:
            raise SystemExit("the console did not accept the password")

    def ask(self, method, path, body=None):
        cookie = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        self.connection.request(method, path, body, {"Host": "console.localhost", "Cookie": cookie})
        response = self.connection.getresponse()
        for line in response.headers.get_all("set-cookie", []):
            name, value = line.split(";")[0].split("=", 1)
            self.cookies[name] = value
        return response.read().decode()

    def get(self, path):
        return self.ask("GET", path)


class Use:
    """Constant use of the console while the block runs."""

    def __init__(self, port):
        self.visitor = Visitor(port)
        self.ended = threading.Event()
        self.pages = 0
        self.thread = threading.Thread(target=self.browse)

    def browse(self):
        while not self.ended.is_set():
            self.visitor.get(PAGES[self.pages % len(PAGES)])
            self.pages += 1

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()


def main():
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with tempfile.TemporaryDirectory(prefix="console-", dir=ROOT / "target") as name:
        folder = pathlib.Path(name)
        with subjects.upstream(folder) as upstream:
            subject = Ours("full", folder / "full", upstream)
            database = subject.service.database
            subprocess.run([BINARY, "console", "password"], env=subject.environment, input=PASSWORD + "\n", text=True,
                           check=True, capture_output=True)
            fill(database, rows)
            with subject:
                first = Visitor(subject.port)
                for page in PAGES:
                    times = []
                    for _ in range(10):
                        started = time.perf_counter()
                        text = first.get(page)
                        times.append((time.perf_counter() - started) * 1000)
                    print(f"{page:<60} {statistics.median(times):7.1f} ms, at most {max(times):.1f} ({AT_MOST_MS}), {len(text)} bytes")
                without, with_it, pages = [], [], 0
                for _ in range(rounds):
                    without.append(load_once(subject, upstream, CLIENTS, SECONDS).rate)
                    with Use(subject.port) as use:
                        with_it.append(load_once(subject, upstream, CLIENTS, SECONDS).rate)
                    pages += use.pages
                ratio = statistics.median(with_it) / statistics.median(without)
                print(f"{statistics.median(without):.0f} requests a second, {statistics.median(with_it):.0f} with the console under "
                      f"constant use ({pages / rounds / SECONDS:.0f} pages a second): {ratio:.0%} (at least 90 %)")


if __name__ == "__main__":
    main()
