"""Gives rows that a test has made with SQL their places in the chain, and adds them to the sums.

The service does both when it appends a row. Only for the new database of a service that is not running. `created` has to be
the second in the request's id, or `usage verify` fails; `day` is its date in the zone of the database.
"""

import collections
import contextlib
import hashlib
import sqlite3
import struct
import sys

# As src/ledger/mod.rs has them.
COLUMNS = ("request_id", "key_id", "key_name", "created", "status", "error_code", "prompt_tokens", "completion_tokens",
           "total_tokens", "duration_ms", "queue_ms", "runtime_ms", "grounded", "search_reason", "search_results",
           "search_ms", "seq", "gateway", "cause", "day")

Row = collections.namedtuple("Row", COLUMNS)


def seal(connection):
    """Seals all rows in the order of their ids. Their gateway has to be empty."""
    seq, digest, links, sums = 0, bytes(32), [], collections.defaultdict(lambda: [0] * 5)
    for row in map(Row._make, connection.execute(f"SELECT {', '.join(COLUMNS)} FROM usage ORDER BY request_id")):
        seq += 1
        digest = hash_of(row._replace(seq=seq), digest)
        links.append((seq, digest, row.request_id))
        place = row.key_id, row.day, row.status or 0, row.error_code or ""
        sums[place] = [one + more for one, more in zip(sums[place], figures_of(row))]
    connection.executemany("UPDATE usage SET seq = ?, hash = ? WHERE request_id = ?", links)
    connection.executemany(
        "INSERT INTO usage_days (key_id, day, status, error_code, gateway, requests, prompt_tokens, completion_tokens,"
        " total_tokens, unmeasured) VALUES (?, ?, ?, ?, '', ?, ?, ?, ?, ?)",
        ((*place, *figures) for place, figures in sums.items()))
    connection.execute("UPDATE gateways SET head_seq = ?, head_hash = ? WHERE name = ''", (seq, digest))


def figures_of(row):
    """What a row adds to the sums."""
    tokens = (figure or 0 for figure in (row.prompt_tokens, row.completion_tokens, row.total_tokens))
    return 1, *tokens, int(row.status == 200 and row.total_tokens is None)


def hash_of(row, predecessor):
    """As src/ledger/mod.rs computes it."""
    return hashlib.sha256(predecessor + b"".join(map(with_length, row))).digest()


def with_length(value):
    match value:
        case None:
            return b"\xff" * 8
        case int():
            value = struct.pack("<q", value)
        case float():
            value = struct.pack("<d", value)
        case str():
            value = value.encode()
    return struct.pack("<Q", len(value)) + value


if __name__ == "__main__":
    with contextlib.closing(sqlite3.connect(sys.argv[1])) as database, database:
        seal(database)
