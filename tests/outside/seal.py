"""Gives rows that a test has made with SQL their places in the chain, and adds them to the sums.

The service does both when it writes the outcome of a request. Only for the new database of a service that is not running.
"""

import collections
import hashlib
import math
import struct

DAY = 86_400
# The length of a span, and how long its sums are kept.
SPANS = ((60, 7200), (3600, 400 * DAY), (DAY, math.inf))
COLUMNS = ("request_id", "key_id", "key_name", "error_code", "created", "status", "prompt_tokens", "completion_tokens",
           "total_tokens", "duration_ms", "queue_ms", "runtime_ms")

Row = collections.namedtuple("Row", COLUMNS)


class Sums:
    def __init__(self):
        self.counts = [0] * 5
        self.runtime, self.own = collections.Counter(), collections.Counter()

    def add(self, row):
        tokens = [figure or 0 for figure in (row.prompt_tokens, row.completion_tokens, row.total_tokens)]
        unmeasured = row.status == 200 and row.total_tokens is None
        self.counts = [one + more for one, more in zip(self.counts, (1, *tokens, unmeasured))]
        if row.runtime_ms is not None:
            self.runtime[bucket(row.runtime_ms)] += 1
        if row.duration_ms is not None:
            self.own[bucket(row.duration_ms - (row.runtime_ms or 0))] += 1


def seal(connection, now):
    """Seals all rows in the order of their ids. Their columns about Search have to be null."""
    seq, digest, links, sums = 0, bytes(32), [], collections.defaultdict(Sums)
    for row in map(Row._make, connection.execute(f"SELECT {', '.join(COLUMNS)} FROM usage ORDER BY request_id")):
        seq += 1
        digest = hash_of(row, seq, digest)
        links.append((seq, digest, row.request_id))
        for span, kept in SPANS:
            if row.created >= now - kept:
                sums[span, row.created // span * span, row.key_id, row.key_name, row.status or 0, row.error_code or ""].add(row)
    connection.executemany("UPDATE usage SET seq = ?, hash = ? WHERE request_id = ?", links)
    connection.executemany(
        "INSERT INTO usage_rollup VALUES (?, ?, ?, ?, ?, ?, '', ?, ?, ?, ?, ?, ?, ?)",
        ((*place, *found.counts, packed(found.runtime), packed(found.own)) for place, found in sums.items()))
    connection.execute("UPDATE gateways SET head_seq = ?, head_hash = ? WHERE name = ''", (seq, digest))


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


def bucket(milliseconds):
    """As store/durations.rs counts it."""
    return min(max(math.ceil(math.log(milliseconds / 0.01) / math.log(1.1)), 0), 241) if milliseconds > 0 else 0


def packed(counts):
    """A histogram as store/durations.rs stores it: each bucket, and its count in groups of seven bits."""
    data = bytearray()
    for number, count in sorted(counts.items()):
        data.append(number)
        while count >= 0x80:
            data.append(count & 0x7f | 0x80)
            count >>= 7
        data.append(count)
    return bytes(data)
