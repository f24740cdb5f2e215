"""Compares the gateway with other programs, in front of the same upstream and under the same load.

    python3 bench/compare.py

The upstream is nginx with a fixed answer, the load is wrk, both from Debian's packages; the row `direct` shows what these
two can do. The subjects take turns in every round, so that other work on the machine affects all of them, and a disturbed
measurement is repeated. Variables: PEERS=1 also measures other gateways, BASELINE=PATH another build of the gateway; ROUNDS
and SECONDS change how often and how long. The result is printed and written to target/bench.json.
"""

import contextlib
import json
import os
import pathlib
import sqlite3
import statistics
import sys
import tempfile
import time

import measure
import peers
import subjects
from measure import Unfit, summary
from subjects import ROOT, Ours

ROUNDS = int(os.environ.get("ROUNDS", "5"))
RESULT = ROOT / "target" / "bench.json"
CLIENTS = (8, 32, 256)

SHIPPED, UNSYNCED, BASELINE = "Adriaticum, as shipped", "Adriaticum, syncing off", "Adriaticum, the baseline"

# What each stores of a request, and when; the others have it in peers.TABLE.
WRITTEN = {
    "nginx, plain proxy": "nothing",
    "HAProxy": "nothing",
    SHIPPED: "a row before the answer, synced to disk",
    UNSYNCED: "the same, not synced",
    BASELINE: "the same",
} | {peer.name: peer.written for peer in peers.TABLE}

# Heading, name in the JSON, decimals.
FIGURES = (
    ("added µs", "added_us", 0),
    ("p99", "added_p99_us", 0),
    *((f"{clients}: req/s", f"rate_{clients}", 0) for clients in CLIENTS),
    ("32: cpu µs", "processor_us", 1),
    ("256: cpu µs", "processor_256_us", 1),
    ("idle MiB", "idle_mib", 1),
    ("loaded", "loaded_mib", 1),
    ("first ms", "first_ms", 1),
    ("disk MiB", "disk_mib", 1),
)


def main():
    # In the build's folder, because a file system in memory has nothing to sync.
    with tempfile.TemporaryDirectory(prefix="bench-", dir=ROOT / "target") as name:
        result = compare(pathlib.Path(name))
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False))
    print_table(result)
    print_ledger(result)
    print_bounds(result)
    if BASELINE in result["subjects"]:
        print_change(result)


def compare(folder):
    upstream = subjects.upstream(folder)
    with upstream:
        chosen = [
            upstream,
            subjects.nginx_proxy(folder, upstream),
            subjects.haproxy(folder, upstream),
            Ours(SHIPPED, folder / "shipped", upstream),
            Ours(UNSYNCED, folder / "unsynced", upstream, environment=subjects.without_syncing(folder)),
        ]
        if baseline := os.environ.get("BASELINE"):
            chosen.append(Ours(BASELINE, folder / "baseline", upstream, pathlib.Path(baseline).resolve()))
        if os.environ.get("PEERS") == "1":
            chosen += peers.installed(folder, upstream)
        disturbances = measure.Disturbances()
        runs, commits, left_out = {subject.name: [] for subject in chosen}, [], {}
        for number in range(ROUNDS):
            print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            commits.append(commit_times(pathlib.Path(tempfile.mkdtemp(dir=folder))))
            for name, figures in one_round(chosen, upstream, disturbances, left_out).items():
                runs[name].append(figures)
            chosen = [subject for subject in chosen if subject.name not in left_out]
    for reason in left_out.values():
        print(f"left out: {reason}")
    if left_out.keys() & {"direct", SHIPPED, UNSYNCED}:
        raise SystemExit(1)
    return {
        **subjects.conditions(),
        "rounds": ROUNDS,
        "seconds": measure.SECONDS,
        "disturbances": str(disturbances),
        "commit_us": summary([synced for synced, _ in commits]),
        "sync_us": summary([synced - unsynced for synced, unsynced in commits]),
        "versions": {"wrk": subjects.version_of("wrk", "-v")} | {subject.name: subject.version for subject in chosen},
        "subjects": {
            subject.name: {name: summary([figures[name] for figures in runs[subject.name]]) for name in runs[subject.name][0]}
            for subject in chosen
        },
    }


def one_round(chosen, upstream, disturbances, left_out, numbers=CLIENTS):
    """Starts all subjects, loads each in turn with each number of clients, and returns the figures of each."""
    figures = {subject.name: {} for subject in chosen}

    @contextlib.contextmanager
    def unless_unfit(subject):
        try:
            yield figures[subject.name]
        except Unfit as reason:
            left_out[subject.name] = str(reason)

    def in_turn():
        return [subject for subject in chosen if subject.name not in left_out]

    try:
        for subject in in_turn():
            with unless_unfit(subject) as its:
                # The upstream already runs, because the others would not start without it.
                its["first_ms"] = 0.0 if subject is upstream else subject.start()
                its["idle_mib"], its["disk_mib"] = measure.memory(subject), subject.size
        for clients in (1, *numbers):
            for subject in in_turn():
                with unless_unfit(subject) as its:
                    load = measure.load(subject, upstream, clients, disturbances)
                    if clients == 1:
                        its["time_us"], its["p99_us"] = load.median, load.slow
                    else:
                        its[f"rate_{clients}"] = load.rate
                    if clients == 32:
                        its["processor_us"] = load.processor
                    if clients == 256:
                        its["processor_256_us"] = load.processor
        for subject in in_turn():
            its = figures[subject.name]
            its["loaded_mib"] = measure.memory(subject)
            its["added_us"] = its["time_us"] - figures[upstream.name]["time_us"]
            its["added_p99_us"] = its["p99_us"] - figures[upstream.name]["p99_us"]
    finally:
        for subject in chosen:
            if subject is not upstream and subject.session:
                subject.stop()
    return {name: its for name, its in figures.items() if name not in left_out}


def commit_times(folder):
    """Returns the medians of a synced and an unsynced commit of one row in WAL mode on this disk, in microseconds."""
    medians = []
    for mode in ("FULL", "NORMAL"):
        with contextlib.closing(sqlite3.connect(folder / f"{mode}.db", isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute(f"PRAGMA synchronous = {mode}")
            database.execute("CREATE TABLE t (x)")
            times = []
            for number in range(500):
                began = time.perf_counter()
                database.execute("INSERT INTO t VALUES (?)", (number,))
                times.append(time.perf_counter() - began)
            medians.append(statistics.median(times) * 1e6)
    return medians


def median(result, subject, figure):
    return result["subjects"][subject][figure]["median"]


def print_table(result):
    """Prints three lines for each subject: the medians, their ratio to ours as shipped, and their spread."""
    ours = result["subjects"][SHIPPED]
    print(f"{result['machine']}; rounds: {result['rounds']}, each of {result['seconds']} s for every number of clients")
    print("".join([f"{'':<40}", *(f"{heading:>12}" for heading, _, _ in FIGURES)]))
    for name, its in result["subjects"].items():
        lines = [[name], ["  times ours"], ["  spread"]]
        for _, figure, decimals in FIGURES:
            value, base = its[figure]["median"], ours[figure]["median"]
            printed = not (name == "direct" and figure in ("added_us", "added_p99_us", "first_ms"))
            lines[0].append(f"{value:,.{decimals}f}" if printed else "")
            lines[1].append(f"{value / base:.2f}" if printed and base and name != SHIPPED else "")
            lines[2].append(f"±{its[figure]['spread']:.0%}" if printed and figure != "disk_mib" and result["rounds"] > 1 else "")
        for line in lines:
            if any(line[1:]):
                print(f"{line[0]:<40}" + "".join(f"{cell:>12}" for cell in line[1:]))
    print(result["disturbances"])


def print_ledger(result):
    """Prints what syncing costs, next to the time of one sync on this disk."""
    sync, commit = result["sync_us"]["median"], result["commit_us"]["median"]
    print(f"\none synced commit on this disk: {commit:.0f} µs, {sync:.0f} of them the sync (±{result['sync_us']['spread']:.0%})")
    shares = (median(result, SHIPPED, f"rate_{clients}") / median(result, UNSYNCED, f"rate_{clients}") for clients in CLIENTS)
    listed = ", ".join(f"{share:.0%} at {clients}" for share, clients in zip(shares, CLIENTS))
    print(f"{SHIPPED}: share of the throughput without syncing: {listed} clients")
    added = median(result, SHIPPED, "time_us") - median(result, UNSYNCED, "time_us")
    print(f"added by syncing at one client: {added:.0f} µs; one sync of the disk: {sync:.0f} µs")


def print_bounds(result):
    """Prints our limits, and whether this run kept them."""
    bounds = [
        ("idle memory, MiB", "idle_mib", 8),
        ("memory after the load, MiB", "loaded_mib", 16),
        ("exec to the first 200, ms", "first_ms", 20),
        ("binary, MiB", "disk_mib", 6),
    ]
    print("\nat most:")
    for text, figure, most in bounds:
        value = median(result, SHIPPED, figure)
        print(f"  {'yes' if value <= most else 'NO ':<4} {text}: {value:,.1f} of {most:,.1f}")
    floors = [("requests/s of 256 clients: those of 32", "rate_256", median(result, SHIPPED, "rate_32"))]
    # Peers with a ledger: "its SQLite ledger" and "written after the answer".
    rivals = [peer.name for peer in peers.TABLE if peer.name in result["subjects"] and "no ledger" not in peer.name]
    if rivals:
        fastest = max(rivals, key=lambda name: median(result, name, "rate_32"))
        floors.append((f"requests/s of 32 clients: ten times {fastest}'s", "rate_32", 10 * median(result, fastest, "rate_32")))
    print("at least:")
    for text, figure, least in floors:
        value = median(result, SHIPPED, figure)
        print(f"  {'yes' if value >= least else 'NO ':<4} {text}: {value:,.0f} of {least:,.0f}")


def print_change(result):
    """Prints the figures of the baseline, ours as shipped, their ratio and their spread between rounds."""
    print(f"\n{'':<14}{'baseline':>12}{'as shipped':>12}{'ratio':>8}{'spread':>14}")
    for heading, figure, decimals in FIGURES:
        before, after = (result["subjects"][name][figure] for name in (BASELINE, SHIPPED))
        ratio = after["median"] / before["median"] if before["median"] else 0
        print(f"{heading:<14}{before['median']:>12,.{decimals}f}{after['median']:>12,.{decimals}f}{ratio:>8.2f}"
              f"{before['spread']:>+8.0%}{after['spread']:>+6.0%}".replace("+", "±"))


if __name__ == "__main__":
    main()
