"""Finds the least memory in which the gateway serves all its workers: in cgroups without swap, on one core (as root).

    python3 bench/memory.py

For each number of workers, with short and with full bodies, the limit is lowered until the gateway is killed or answers
anything but 200 and 503. There are 16 more clients than workers, and the runtime echoes the whole conversation. The table is
printed and written to target/memory.json.
"""

import asyncio
import json
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "outside"))
import small_memory  # noqa: E402
from service import ROOT  # noqa: E402

import subjects  # noqa: E402

RESULT = ROOT / "target" / "memory.json"
WORKERS = (4, 16, 64)
BODIES = {"short": small_memory.SHORT, "full": small_memory.FULL}
SECONDS = float(os.environ.get("SECONDS", "4"))
MOST_MIB = 256


def attempt(mebibytes, workers, bodies):
    """Returns the outcomes, or None if the limit is too low."""
    try:
        tally, _, faults = asyncio.run(small_memory.load(mebibytes, workers + 16, bodies, SECONDS, workers=workers))
    # Killed at its start or in the middle of the load, or so short of memory that it reads its own code again and again.
    except (OSError, SystemExit, subprocess.TimeoutExpired):
        return None
    return None if faults else tally


def least(workers, bodies):
    """Returns the least limit in MiB that works twice, and the outcomes there."""
    low, high = 2, 32
    while attempt(high, workers, bodies) is None:
        low, high = high, high * 2
        if high > MOST_MIB:
            raise SystemExit(f"{workers} workers need more than {MOST_MIB} MiB")
    while high - low > 1:
        middle = (low + high) // 2
        if attempt(middle, workers, bodies) is None:
            low = middle
        else:
            high = middle
    while (tally := attempt(high, workers, bodies)) is None:
        high += 1
    return high, tally


def main():
    rows = []
    for workers in WORKERS:
        for kind, bodies in BODIES.items():
            mebibytes, tally = least(workers, bodies)
            rows.append({"workers": workers, "bodies": kind, "mib": mebibytes, "success": tally.success})
            print(f"{workers:3} workers, {kind:5} bodies: {mebibytes:3} MiB; there {tally}", flush=True)
    RESULT.write_text(json.dumps(subjects.conditions() | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
