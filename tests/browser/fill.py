"""Fills a ledger with the requests of a company over the last 90 days, to look at in the console.

    python3 tests/browser/fill.py DATABASE [ROWS]

The database has to be new, and no service may use it.
"""

import math
import pathlib
import random
import sqlite3
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "outside"))
from seal import seal  # noqa: E402

DAYS = 90
DAY = 86_400
NAMES = ["billing service", "support chat", "Ana’s laptop", "nightly reports", "search assistant", "intern project", "old prototype"]
SHARES = [30, 26, 6, 14, 18, 4, 2]
# Of keys by their place in NAMES: hardly used, and in the middle of a month used for the most part or used up.
BUDGETS = {0: (50_000_000, "month"), 4: (4_000_000, "month"), 5: (1_000_000, "month")}
ERRORS = [("invalid_request", 400, 6), ("inference_error", 502, 3), ("service_unavailable", 503, 1), ("abandoned", None, 0.2)]


def moments(rows, now, chance):
    """Returns sorted times: more on weekdays and during the day, and more from week to week. It is always Tuesday, eight o'clock,
    so that pages do not depend on when they are tested."""
    found = []
    while len(found) < rows:
        moment = now - chance.random() * DAYS * DAY
        local = 5 * DAY + 8 * 3600 + moment - now
        weekday, hour = int(local // DAY + 3) % 7, local % DAY / 3600
        busy = 0.12 + 0.88 * max(0.0, math.sin((hour - 5) / 15 * math.pi)) if 5 < hour < 20 else 0.12
        growth = 0.5 + 0.5 * (1 - (now - moment) / (DAYS * DAY))
        if chance.random() < busy * growth * (0.3 if weekday > 4 else 1):
            found.append(moment)
    return sorted(found)


def add_secret(connection, chance, key, created):
    hint = f"adr_{chance.getrandbits(16):04x}…{chance.getrandbits(16):04x}"
    connection.execute("INSERT INTO key_secrets (digest, key_id, hint, created) VALUES (randomblob(32), ?, ?, ?)", (key, hint, created))


def fill(database, rows, more_keys=0, audit_rows=0):
    now = time.time()
    chance = random.Random(7)
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN")
    keys = []
    for number, name in enumerate(NAMES):
        key = f"key_{chance.getrandbits(64):016x}"
        keys.append((key, name))
        created = int(now - (DAYS - number) * DAY)
        connection.execute(
            "INSERT INTO keys (id, name, permissions, created, expires, revoked, budget, budget_per)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (key, name, "completions,metrics" if number == 3 else "completions", created,
             int(now + 20 * DAY) if number == 2 else int(now + 6 * DAY) if number == 4 else int(now - DAY) if number == 5 else None,
             int(now - 3 * DAY) if number == 6 else None, *BUDGETS.get(number, (None, None))))
        add_secret(connection, chance, key, created)
    for number in range(more_keys):
        key, created = f"key_{chance.getrandbits(64):016x}", int(now - 99 * DAY + number)
        connection.execute(
            "INSERT INTO keys (id, name, permissions, created, expires, concurrent) VALUES (?, ?, 'completions', ?, ?, ?)",
            (key, f"workstation {number + 1:02}", created, int(now + 99 * DAY), number % 9 or None))
        add_secret(connection, chance, key, created)
    for number in range(audit_rows):
        moment = now - 5 * DAY + number * 900
        key, name = chance.choice(keys)
        action, details = chance.choice([
            ("key_changed", "expires: never → 2027-02-13 00:00Z, concurrent: none → 8"), ("signed_in", "")])
        about = (key, name) if action == "key_changed" else (None, None)
        connection.execute(
            "INSERT INTO audit (id, created, action, via, actor, details, key_id, key_name)"
            " VALUES (?, ?, ?, 'console', ?, ?, ?, ?)",
            (f"audit_{int(moment * 1000):012x}{chance.getrandbits(80):020x}", int(moment), action,
             chance.choice(["192.0.2.17", "2001:db8:12::/56"]), details, *about))
    made = []
    for moment in moments(rows, now, chance):
        key, name = chance.choices(keys, SHARES)[0]
        code, status = None, 200
        storm = 20 * DAY < now - moment < 20.3 * DAY
        if chance.random() < (0.4 if storm else 0.018):
            code, status, _ = chance.choices(ERRORS, [0.1, 9, 1, 0] if storm else [e[2] for e in ERRORS])[0]
        runtime = chance.lognormvariate(6.9, 0.6) if code != "invalid_request" else None
        queue, own = chance.lognormvariate(-2.5, 1), chance.lognormvariate(0.6, 0.4)
        tokens = (None, None, None)
        if status == 200 and chance.random() > 0.004:
            prompt, completion = int(chance.lognormvariate(5.5, 0.9)), int(chance.lognormvariate(4.8, 0.8))
            tokens = (prompt, completion, prompt + completion)
        milliseconds = int(moment * 1000)
        made.append((f"chatcmpl_{milliseconds:012x}{chance.getrandbits(80):020x}", key, name, milliseconds // 1000, status, code,
                     *tokens, queue + own + (runtime or 0), queue, runtime,
                     time.strftime("%Y-%m-%d", time.gmtime(milliseconds // 1000))))
    connection.executemany(
        "INSERT INTO usage (request_id, key_id, key_name, created, status, error_code, prompt_tokens, completion_tokens,"
        " total_tokens, duration_ms, queue_ms, runtime_ms, day) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", made)
    seal(connection)
    connection.execute("COMMIT")
    connection.close()


if __name__ == "__main__":
    fill(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200_000)
