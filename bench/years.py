"""Measures a ledger of ten million rows over a year: sums, look-ups, verification, writes, and retention under load.

    python3 bench/years.py [ROWS]
"""

import contextlib
import pathlib
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time

import subjects
from measure import load_once
from subjects import BINARY, ROOT, Ours

sys.path.insert(0, str(ROOT / "tests" / "outside"))

from seal import COLUMNS, hash_of  # noqa: E402

LEDGER = ROOT / "target" / "release" / "examples" / "ledger"
DAY = 86_400
DAYS = 365
KEYS = 10

# About one request in 50 fails at the runtime, one in 100 is invalid, one in 1,000 was abandoned, and one in 5,000 takes six
# seconds. Prime numbers spread them over all keys.
MAKE = f"""
    WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :rows),
    numbered AS (SELECT i, :start + CAST(i * :step AS INTEGER) AS ms, i * 7919 % 1000003 AS r FROM n),
    made AS (SELECT *, CASE WHEN r % 53 = 1 THEN 502 WHEN r % 101 = 2 THEN 400 WHEN r % 1009 <> 3 THEN 200 END AS status
        FROM numbered),
    rows AS (SELECT printf('chatcmpl_%012x%020x', ms, i) AS request_id, printf('key_%016x', r % :keys) AS key_id,
        printf('key %d', r % :keys) AS key_name,
        CASE coalesce(status, 0) WHEN 502 THEN 'inference_error' WHEN 400 THEN 'invalid_request' WHEN 0 THEN 'abandoned' END
            AS error_code,
        ms / 1000 AS created, status, iif(status = 200, 11, NULL) AS prompt_tokens,
        iif(status = 200, r % 300, NULL) AS completion_tokens, iif(status = 200, 11 + r % 300, NULL) AS total_tokens,
        iif(r % 5003 = 4, 6000.5, 900.5) AS duration_ms, 0.1 AS queue_ms, 899.5 AS runtime_ms,
        0 AS grounded, NULL AS search_reason, NULL AS search_results, NULL AS search_ms, i AS seq, '' AS gateway, NULL AS cause,
        date(ms / 1000, 'unixepoch') AS day FROM made)
    INSERT INTO usage ({", ".join(COLUMNS)}, hash)
    SELECT {", ".join(COLUMNS)}, link({", ".join(COLUMNS)}) FROM rows"""

ADD_UP = """
    INSERT INTO usage_days SELECT key_id, day, coalesce(status, 0), coalesce(error_code, ''), gateway,
        count(*), coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0), coalesce(sum(total_tokens), 0), 0
    FROM usage GROUP BY 1, 2, 3, 4, 5"""

ADD_KEYS = """
    WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :keys)
    INSERT INTO keys (id, name, permissions, created)
    SELECT printf('key_%016x', i), printf('key %d', i), 'completions', :start FROM n"""

ADD_SECRETS = """
    INSERT INTO key_secrets (digest, key_id, hint, created)
    SELECT randomblob(32), id, '', created FROM keys WHERE id NOT IN (SELECT key_id FROM key_secrets)"""


class Chain:
    """Computes the hash of each row, in the order of the rows."""

    def __init__(self):
        self.hash = bytes(32)

    def link(self, *row):
        self.hash = hash_of(row, self.hash)
        return self.hash


def fill(database, rows, keys=KEYS):
    """Makes the rows, their sums and their keys, and returns the seconds it took."""
    began = time.monotonic()
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA cache_size = -1000000")
        start = int(time.time()) - DAYS * DAY
        connection.create_function("link", len(COLUMNS), Chain().link)
        connection.execute("BEGIN")
        connection.execute(MAKE, {"rows": rows, "start": start * 1000, "step": DAYS * DAY * 1000 / (rows + 1), "keys": keys})
        connection.execute(ADD_UP)
        connection.execute("UPDATE gateways SET head_seq = :rows, head_hash = (SELECT hash FROM usage WHERE seq = :rows)", {"rows": rows})
        connection.execute(ADD_KEYS, {"keys": keys, "start": start})
        connection.execute(ADD_SECRETS)
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return time.monotonic() - began


def of_ten(work):
    """Returns the median of ten runs, in milliseconds."""
    times = []
    for _ in range(10):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


def verify(environment):
    """Runs `usage verify`, and returns what it printed, the seconds and the most memory in MiB."""
    began, most = time.monotonic(), 0
    with subprocess.Popen([BINARY, "usage", "verify"], env=environment, stdout=subprocess.PIPE, text=True) as process:
        # The system's figure for a child that has ended counts the memory of this program too.
        while process.poll() is None:
            status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            most = max([most, *map(int, re.findall(r"VmHWM:\s+(\d+) kB", status))])
            time.sleep(0.01)
        printed, seconds = process.stdout.read(), time.monotonic() - began
    if process.returncode != 0:
        sys.exit(printed)
    return printed.splitlines()[0], seconds, most / 1024


def write_times(database):
    """Returns the mean time to look up a key and to append a row, together, in microseconds."""
    output = subprocess.run([LEDGER, database, "2", "1"], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"(\d+) µs", output)))


def main():
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    with tempfile.TemporaryDirectory(prefix="years-", dir=ROOT / "target") as name:
        folder = pathlib.Path(name)
        with subjects.upstream(folder) as upstream:
            subject = Ours("full", folder / "full", upstream)
            database = subject.service.database
            seconds = fill(database, rows)
            print(f"{rows} rows over {DAYS} days made in {seconds:.0f} s, {database.stat().st_size / 2**30:.2f} GiB")

            def command(*arguments):
                return lambda: subprocess.run([BINARY, *arguments], env=subject.environment, capture_output=True, check=True)

            printed, seconds, memory = verify(subject.environment)
            print(f"usage verify: {seconds:.1f} s, {memory:.1f} MiB: {printed}")

            for by in ("day", "key"):
                milliseconds = of_ten(command("usage", "--since", "30d", "--by", by, "--json"))
                print(f"sums of a month by {by}: {milliseconds:.1f} ms, with the start of the command (at most 20)")
            with contextlib.closing(sqlite3.connect(database)) as connection:
                newest = "SELECT * FROM usage WHERE key_id = ? ORDER BY request_id DESC LIMIT 50"
                milliseconds = of_ten(lambda: connection.execute(newest, (f"key_{3:016x}",)).fetchall())
                print(f"the newest 50 requests of a key: {milliseconds:.2f} ms (at most 5)")

            full, empty = [], []
            for _ in range(5):
                full.append(write_times(database))
                empty.append(write_times(folder / "empty.db"))
            ratio = statistics.median(full) / statistics.median(empty)
            print(f"a row: {statistics.median(full)} µs, in an empty ledger {statistics.median(empty)}: {ratio:.2f} times (at most 1.10)")

            with subject:
                before = load_once(subject, upstream, 8, seconds=10).slow
            subject.environment["ADRIATICUM_USAGE_RETENTION_DAYS"] = str(DAYS // 2)
            with subject:
                during = load_once(subject, upstream, 8, seconds=10).slow
                with contextlib.closing(sqlite3.connect(database)) as connection:
                    removed = connection.execute("SELECT anchor_seq FROM gateways").fetchone()[0]
            print(f"99th percentile at 8 clients: {before:.0f} µs, while rows are removed {during:.0f}: "
                  f"{during / before:.2f} times (at most 2); {removed} rows were removed in 10 s")


if __name__ == "__main__":
    main()
