"""Gives rows that a test has made with SQL their places in the chain, and adds them to the sums.

The service does both when it appends a row. Only for the new database of a service that is not running. `created` has to be
the second in the request's id, or `usage verify` fails.
"""

import collections
import hashlib
import struct

DAY = 86_400
SPANS = (3600, DAY)
COLUMNS = ("request_id", "key_id", "key_name", "error_code", "created", "status", "prompt_tokens", "completion_tokens",
           "total_tokens", "duration_ms", "queue_ms", "runtime_ms")

Row = collections.namedtuple("Row", COLUMNS)


def seal(connection):
    """Seals all rows in the order of their ids. Their columns about Search, their gateway and their cause have to be empty."""
    seq, digest, links, sums = 0, bytes(32), [], collections.defaultdict(lambda: [0] * 5)
    for row in map(Row._make, connection.execute(f"SELECT {', '.join(COLUMNS)} FROM usage ORDER BY request_id")):
        seq += 1
        digest = hash_of(row, seq, digest)
        links.append((seq, digest, row.request_id))
        for span in SPANS:
            place = span, row.created // span * span, row.key_id, row.key_name, row.status or 0, row.error_code or ""
            sums[place] = [one + more for one, more in zip(sums[place], figures_of(row))]
    connection.executemany("UPDATE usage SET seq = ?, hash = ? WHERE request_id = ?", links)
    connection.executemany(
        "INSERT INTO usage_rollup (span, start, key_id, key_name, status, error_code, gateway, requests, prompt_tokens,"
        " completion_tokens, total_tokens, unmeasured) VALUES (?, ?, ?, ?, ?, ?, '', ?, ?, ?, ?, ?)",
        ((*place, *figures) for place, figures in sums.items()))
    connection.execute("UPDATE gateways SET head_seq = ?, head_hash = ? WHERE name = ''", (seq, digest))


def figures_of(row):
    """What a row adds to the sums."""
    tokens = (figure or 0 for figure in (row.prompt_tokens, row.completion_tokens, row.total_tokens))
    return 1, *tokens, int(row.status == 200 and row.total_tokens is None)


def hash_of(row, seq, predecessor):
    """As store/chain.rs computes it."""
    figures = (seq, row.created, row.status, row.prompt_tokens, row.completion_tokens, row.total_tokens)
    parts = [
        *(text and text.encode() for text in (row.request_id, row.key_id, row.key_name, row.error_code)),
        *(figure if figure is None else struct.pack("<q", figure) for figure in figures),
        *(time if time is None else struct.pack("<d", time) for time in (row.duration_ms, row.queue_ms, row.runtime_ms)),
        b"\0",
    ]
    return hashlib.sha256(predecessor + b"".join(map(with_length, parts))).digest()


def with_length(part):
    return b"\xff" * 4 if part is None else struct.pack("<I", len(part)) + part
