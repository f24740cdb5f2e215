"""Measures how the cost of a completion grows with idle connections, body size, keys, rows in the ledger and workers.

    python3 bench/scale.py [ROWS]

The ledger grows to a million rows, or to ROWS. All sizes of a kind take turns in every round. The table is printed and
written to target/scale.json.
"""

import contextlib
import json
import os
import pathlib
import resource
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time

import measure
import subjects
import years
from measure import summary
from subjects import ROOT, Ours

ROUNDS = int(os.environ.get("ROUNDS", "3"))
RESULT = ROOT / "target" / "scale.json"
CLIENTS = 32
LEDGER = ROOT / "target" / "release" / "examples" / "ledger"

CONNECTIONS = (0, 1, 64, 1024, 4096)
KIBIBYTES = (1, 4, 16, 64, 256)
KEYS = (1, 100, 10_000, 100_000)
ROWS = (0, 10_000, 1_000_000)
WORKERS = (1, 4, 16, 64)


def with_connections(subject, number):
    """Kept connections that have had an answer, like those in a client's pool between two requests."""
    subject.idle = number


def with_body(subject, kibibytes):
    """Returns a chat of the given size in bytes; an escaped character outside the basic plane takes twelve of them."""
    parts, around = 3, 60
    characters = (kibibytes * 1024 // parts - around) // 12
    body = json.dumps({"model": "adriaticum", "messages": [{"role": "user", "content": "😀" * characters}] * parts})
    subject.ask(body.ljust(kibibytes * 1024))


def with_keys(subject, number):
    """Adds other keys to the database."""
    with contextlib.closing(sqlite3.connect(subject.service.database)) as database, database:
        database.executemany(
            "INSERT INTO keys (id, name, permissions, created) VALUES (?, ?, 'completions', ?)",
            ((f"key_{other:016x}", f"key {other}", int(time.time())) for other in range(1, number)))
        database.executemany(
            "INSERT INTO key_secrets (digest, key_id, hint, created) VALUES (?, ?, '', ?)",
            ((os.urandom(32), f"key_{other:016x}", int(time.time())) for other in range(1, number)))


def with_rows(subject, number):
    if number:
        years.fill(subject.service.database, number)


KINDS = (
    ("idle connections", CONNECTIONS, with_connections),
    ("KiB of body", KIBIBYTES, with_body),
    ("keys", KEYS, with_keys),
    ("rows in the ledger", ROWS, with_rows),
    ("workers", WORKERS, None),
)


@contextlib.contextmanager
def idle_connections(subject, number):
    """Opens connections, gets one answer on each (404, which leaves no row), and keeps them open."""
    opened = []
    try:
        for _ in range(number):
            client = socket.create_connection(("127.0.0.1", subject.port))
            opened.append(client)
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            client.recv(65536)
        yield
    finally:
        for client in opened:
            client.close()


def one(subject, upstream, disturbances):
    with subject, idle_connections(subject, getattr(subject, "idle", 0)):
        upstream.ask(subject.body)
        direct = measure.load(upstream, upstream, 1, disturbances)
        alone = measure.load(subject, upstream, 1, disturbances)
        many = measure.load(subject, upstream, CLIENTS, disturbances)
        return {"added_us": alone.median - direct.median, "rate": many.rate, "processor_us": many.processor,
                "memory_mib": measure.memory(subject)}


def main():
    most = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS[-1]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # This process has one end of 4,096 connections open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192) if hard != resource.RLIM_INFINITY else 8192, hard))
    disturbances, kinds = measure.Disturbances(), {}
    with tempfile.TemporaryDirectory(prefix="scale-", dir=ROOT / "target") as name:
        folder = pathlib.Path(name)
        with subjects.upstream(folder) as upstream:
            for kind, sizes, prepare in KINDS:
                if kind == "rows in the ledger" and most > sizes[-1]:
                    sizes = (*sizes, most)
                kinds[kind] = measure_kind(kind, sizes, prepare, folder, upstream, disturbances)
        threads = subprocess.run([LEDGER, folder / "threads.db"], capture_output=True, text=True, check=True).stdout
    print(disturbances)
    print(f"\nthe ledger alone:\n{threads}", end="")
    RESULT.write_text(json.dumps(subjects.conditions() | {"rounds": ROUNDS, "kinds": kinds}, indent=1))


def measure_kind(kind, sizes, prepare, folder, upstream, disturbances):
    prepared = {}
    for size in sizes:
        settings = {"workers": size} if kind == "workers" else {"max_connections": 10_000}
        subject = prepared[size] = Ours(f"{size} {kind}", folder / f"{kind[:4].strip()}{size}", upstream, **settings)
        if prepare:
            prepare(subject, size)
    runs = {size: [] for size in sizes}
    for _ in range(ROUNDS):
        for size, subject in prepared.items():
            runs[size].append(one(subject, upstream, disturbances))
    print(f"{kind:<20}{'added µs':>16}{f'{CLIENTS}: req/s':>16}{'cpu µs/req':>16}{'memory MiB':>16}")
    figures = {size: {name: summary([run[name] for run in its]) for name in its[0]} for size, its in runs.items()}
    for size, its in figures.items():
        cells = (f"{figure['median']:,.{decimals}f} ±{figure['spread']:.0%}" for figure, decimals in zip(its.values(), (0, 0, 1, 1)))
        print(f"{size:<20,}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    return figures


if __name__ == "__main__":
    main()
