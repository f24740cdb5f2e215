"""Measures what the console costs: how long each page takes with a large ledger, and the API's requests per second with and
without constant use of the console.

    python3 bench/console.py [ROWS] [KEYS] [ROUNDS]

Constant use means that a visitor opens the next page as soon as the last one has arrived. The exit code is 1 if the median of a
page is above its bound. The times of the pages are written to target/console.json, beside those with other numbers of keys.
"""

import http.client
import json
import pathlib
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
from years import DAYS, KEYS, fill

PASSWORD = "correct horse battery staple"
CLIENTS = 8
SECONDS = 5
VISITS = 10
TODAY = time.strftime("%Y-%m-%d", time.gmtime())
EVERY_YEAR = f"/usage?from={time.gmtime().tm_year - 6}-01-01&to={TODAY}"
# It cuts a day at both ends.
CUT = f"/usage?from={time.strftime('%Y-%m-%d', time.gmtime(time.time() - 10 * 86400))}T13:30&to={TODAY}T00:15"
ONE_KEY = f"/usage?range=90d&key=key_{3:016x}"
# Each range and each filter: they are read from rows or from the sums of days, and by different indexes.
PAGES = ("/keys", "/keys?sort=-tokens&q=a", f"/keys/key_{3:016x}", "/audit", "/status",
         "/usage?range=1h", "/usage?range=24h", "/usage?range=7d", "/usage?range=30d", "/usage?range=90d", "/usage?range=last-month",
         EVERY_YEAR, ONE_KEY,
         "/usage?range=90d&outcome=ok", "/usage?range=90d&outcome=failed", "/usage?range=90d&outcome=abandoned",
         "/requests?range=90d", "/requests?range=90d&least=5000", "/requests?range=90d&least=5000&outcome=failed",
         f"/requests?range=90d&least=5000&key=key_{3:016x}", CUT, "/usage?range=all")
# A page that counts the rows of a day may take longer than one that adds up the sums of days.
COUNTS_ROWS = ("/usage?range=1h", "/usage?range=24h", CUT)
AT_MOST_MS, AT_MOST_WITH_ROWS_MS = 50, 120
LEAST_API_SHARE = 0.9
RESULT = ROOT / "target" / "console.json"
# The pages that docs/performance.md lists.
PUBLISHED = {
    "/keys": "list of keys", "/usage?range=24h": "usage, 24 hours", "/usage?range=7d": "7 days", "/usage?range=30d": "30 days",
    "/usage?range=90d": "90 days", EVERY_YEAR: "all years, by month", ONE_KEY: "90 days of one key",
    "/requests?range=90d": "the newest requests", "/requests?range=90d&least=5000": "requests of 90 days that took 5 s or more",
    "/status": "status", "/audit": "audit",
}


class Visitor:
    """A signed-in visitor."""

    def __init__(self, port):
        self.port = port
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.cookies = {}
        self.ask("POST", "/sign-in", urllib.parse.urlencode({"password": PASSWORD}))
        if not self.cookies:
            raise SystemExit("the console did not accept the password")

    def ask(self, method, path, body=None):
        cookie = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        headers = {"Host": "console.localhost", "Sec-Fetch-Site": "same-origin", "Cookie": cookie}
        self.connection.request(method, path, body, headers)
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


def page_times(port, pages=PAGES):
    """Prints how long each page takes, and returns the medians in milliseconds. The sign-in page, which reads nothing from the
    ledger, shows what the machine and the connection take."""
    visitor = Visitor(port)
    medians = {}
    print(f"{'page':<56} {'median':>9} {'longest':>9} {'size':>9}")
    for page in ("/sign-in", *pages):
        times = []
        for _ in range(VISITS):
            started = time.perf_counter()
            text = visitor.get(page)
            times.append((time.perf_counter() - started) * 1000)
        medians[page] = statistics.median(times)
        print(f"{page:<56} {medians[page]:>6.1f} ms {max(times):>6.1f} ms {len(text.encode()) / 1024:>5.1f} KiB", flush=True)
    return medians


def write_result(rows, keys, medians, share):
    result = subjects.conditions() | {"rows": rows, "pages": {}, "api_shares": {}}
    if RESULT.exists():
        before = json.loads(RESULT.read_text())
        if all(before[name] == result[name] for name in ("build", "rows")):
            result["pages"], result["api_shares"] = before["pages"], before["api_shares"]
    result["pages"][str(keys)], result["api_shares"][str(keys)] = medians, share
    RESULT.write_text(json.dumps(result, indent=1))


def main():
    rows, keys, rounds = map(int, sys.argv[1:] + ["10000000", str(KEYS), "3"][len(sys.argv) - 1:])
    with tempfile.TemporaryDirectory(prefix="console-", dir=ROOT / "target") as name:
        folder = pathlib.Path(name)
        with subjects.upstream(folder) as upstream:
            subject = Ours("full", folder / "full", upstream)
            subprocess.run([BINARY, "console", "password"], env=subject.environment, input=PASSWORD + "\n", text=True,
                           check=True, capture_output=True)
            seconds = fill(subject.service.database, rows, keys)
            print(f"{rows} rows of {keys} keys over {DAYS} days, made in {seconds:.0f} s")
            with subject:
                medians = page_times(subject.port)
                without, with_it, pages = [], [], 0
                for _ in range(rounds):
                    without.append(load_once(subject, upstream, CLIENTS, SECONDS).rate)
                    with Use(subject.port) as use:
                        with_it.append(load_once(subject, upstream, CLIENTS, SECONDS).rate)
                    pages += use.pages
                share = statistics.median(with_it) / statistics.median(without)
                print(f"{statistics.median(without):.0f} requests a second, {statistics.median(with_it):.0f} with the console under "
                      f"constant use ({pages / rounds / SECONDS:.0f} pages a second): {share:.0%} (at least {LEAST_API_SHARE:.0%})")
                write_result(rows, keys, medians, share)
    if slow := [page for page, median in medians.items()
                if median > (AT_MOST_WITH_ROWS_MS if page in COUNTS_ROWS else AT_MOST_MS)]:
        sys.exit(f"slower than {AT_MOST_MS} ms, or {AT_MOST_WITH_ROWS_MS} where rows are counted: {', '.join(slow)}")
    if share < LEAST_API_SHARE:
        sys.exit(f"the console costs the API more than {1 - LEAST_API_SHARE:.0%} of its rate")


if __name__ == "__main__":
    main()
