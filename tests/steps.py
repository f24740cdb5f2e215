#!/usr/bin/env python3
"""Runs the steps of `make test-all`, each a target of the Makefile, and prints a table of their times and results.

    STEPS="attacks console" make test-all

Without STEPS it runs all of them. A step that fails does not stop the others. The output of each step is also in
target/steps/STEP.log. Before the first step, the programs that all of them need are checked for, or installed.
"""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOGS = ROOT / "target" / "steps"

# The cheapest and most telling first.
STEPS = ("test", "lint", "build", "postgres", "tls", "openapi", "attacks", "crashes", "full-disk", "search", "prometheus",
         "clients", "console", "model")
STEPS_AS_ROOT = ("test-install", "test-cluster")

# Ends a step that hangs, so that the others still run.
STEP_SECONDS = 1800


def main():
    is_root = os.geteuid() == 0
    chosen = os.environ.get("STEPS", "").split()
    if unknown := set(chosen) - {*STEPS, *STEPS_AS_ROOT}:
        print(f"unknown: {', '.join(sorted(unknown))}. The steps are: {' '.join(STEPS + STEPS_AS_ROOT)}", file=sys.stderr)
        sys.exit(2)
    left_out = () if chosen or is_root else STEPS_AS_ROOT
    chosen = chosen or [*STEPS, *(STEPS_AS_ROOT if is_root else ())]
    if subprocess.run([ROOT / "tests" / "prerequisites", *chosen]).returncode != 0:
        sys.exit(1)
    LOGS.mkdir(parents=True, exist_ok=True)
    rows = [(step, *run(step)) for step in chosen]
    print(f"\n{'step':14}{'time':>7}  result")
    for step, seconds, failure in rows:
        result = f"{failure}: see {(LOGS / step).relative_to(ROOT)}.log" if failure else "passed"
        print(f"{step:14}{minutes(seconds):>7}  {result}")
    for step in left_out:
        print(f"{step:14}{'':>7}  not run, because it needs root: sudo make {step}")
    print(f"{'together':14}{minutes(sum(row[1] for row in rows)):>7}")
    failed = sum(row[2] is not None for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


def run(step):
    """Runs a step; returns how long it took and, unless it passed, how it ended."""
    print(f"\n== {step} ({time.strftime('%H:%M:%S')})", flush=True)
    began = time.monotonic()
    with (LOGS / f"{step}.log").open("wb") as log:
        # A process group of its own, so that everything that the step started can be ended.
        process = subprocess.Popen(
            ["make", step], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True)
        limit = threading.Timer(STEP_SECONDS, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        try:
            for line in process.stdout:
                log.write(line)
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
            code = process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGINT)
            process.wait()
            raise
        finally:
            limit.cancel()
    seconds = time.monotonic() - began
    failure = None if code == 0 else f"no end within {STEP_SECONDS // 60} minutes" if code < 0 else "FAILED"
    print(f"== {step}: {failure or 'passed'} in {minutes(seconds)}", flush=True)
    return seconds, failure


def minutes(seconds):
    return "{}:{:02}".format(*divmod(round(seconds), 60))


if __name__ == "__main__":
    main()
