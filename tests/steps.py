#!/usr/bin/env python3
"""Runs the steps of `make test-all`, each a target of the Makefile, and prints a table of their times and results.

    STEPS="attacks console" make test-all

Without STEPS it runs all of them, and before them, in two lanes, what they build and download. A step that fails does not
stop the others. The output of each step is also in target/steps/STEP.log, and the end of that of a failed one comes last.
Before the first step, the programs that all of them need are checked for, or installed.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOGS = ROOT / "target" / "steps"

# Builds and downloads, which measure no time, so they may run beside each other. What may install packages is in one lane.
LANES = (("lint", "need-deb", "need-image", "static"), ("downloads", "build", "test-builds"))
# One after the other. The cheapest and most telling first.
STEPS = ("test", "postgres", "tls", "openapi", "attacks", "crashes", "full-disk", "search", "prometheus", "clients", "console",
         "model")
STEPS_AS_ROOT = ("test-install", "test-cluster")
# In the lanes: parts of other steps, and steps of their own.
PARTS, PARTS_AS_ROOT, OWN = {"test-builds", "downloads"}, {"need-deb", "need-image", "static"}, ("lint", "build")

# Ends a step that hangs, so that the others still run.
STEP_SECONDS = 1800
# The lines at the end of a failed step's log that are repeated below the table.
LAST_LINES = 40

printing = threading.Lock()
running, stopping = set(), threading.Event()


def main():
    is_root = os.geteuid() == 0
    chosen = os.environ.get("STEPS", "").split()
    known = (*OWN, *STEPS, *STEPS_AS_ROOT)
    if unknown := set(chosen) - {*known}:
        print(f"unknown: {', '.join(sorted(unknown))}. The steps are: {' '.join(known)}", file=sys.stderr)
        sys.exit(2)
    left_out = () if chosen or is_root else STEPS_AS_ROOT
    parts = () if chosen else PARTS | (PARTS_AS_ROOT if is_root else set())
    chosen = chosen or [step for step in known if step not in left_out]
    if subprocess.run([ROOT / "tests" / "prerequisites", *chosen]).returncode != 0:
        sys.exit(1)
    LOGS.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, stop)
    began = time.monotonic()
    lanes = [[step for step in lane if step in parts or step in chosen] for lane in LANES]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        rows = [row for lane in pool.map(run_lane, lanes) for row in lane]
    rows += [run(step, is_alone=True) for step in chosen if step not in OWN]
    report(rows, left_out, time.monotonic() - began)
    sys.exit(1 if any(failure for *_, failure in rows) else 0)


def stop(*_):
    """Ctrl-C reaches this process alone."""
    stopping.set()
    for process in tuple(running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
    raise KeyboardInterrupt


def run_lane(steps):
    return [run(step, is_alone=False) for step in steps if not stopping.is_set()]


def report(rows, left_out, seconds):
    print(f"\n{'step':14}{'time':>7}  result")
    for step, its_seconds, failure in rows:
        result = f"{failure}: see {log_of(step).relative_to(ROOT)}" if failure else "passed"
        print(f"{step:14}{minutes(its_seconds):>7}  {result}")
    for step in left_out:
        print(f"{step:14}{'':>7}  not run, because it needs root: sudo make {step}")
    print(f"{'together':14}{minutes(seconds):>7}")
    failed = [step for step, _, failure in rows if failure]
    print(f"{len(rows) - len(failed)} passed, {len(failed)} failed", flush=True)
    for step in failed:
        print(f"\n== the end of {log_of(step).relative_to(ROOT)}")
        sys.stdout.flush()
        sys.stdout.buffer.writelines(log_of(step).read_bytes().splitlines(keepends=True)[-LAST_LINES:])
        sys.stdout.flush()


def run(step, is_alone):
    """Runs a step, and prints its output: line by line if it runs alone, else at its end. Returns its name, how long it took
    and, unless it passed, how it ended."""
    say(f"\n== {step} ({time.strftime('%H:%M:%S')})")
    began = time.monotonic()
    with log_of(step).open("wb", buffering=0) as log:
        # A process group of its own, so that everything that the step started can be ended.
        process = subprocess.Popen(
            ["make", step], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True)
        limit = threading.Timer(STEP_SECONDS, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        running.add(process)
        try:
            for line in process.stdout:
                log.write(line)
                if is_alone:
                    sys.stdout.buffer.write(line)
                    sys.stdout.flush()
            code = process.wait()
        finally:
            process.wait()
            running.remove(process)
            limit.cancel()
    seconds = time.monotonic() - began
    failure = None if code == 0 else f"no end within {STEP_SECONDS // 60} minutes" if code < 0 else "FAILED"
    output = "" if is_alone else log_of(step).read_text(errors="replace")
    say(f"{output}== {step}: {failure or 'passed'} in {minutes(seconds)}")
    return step, seconds, failure


def log_of(step):
    return LOGS / f"{step}.log"


def say(text):
    with printing:
        print(text, flush=True)


def minutes(seconds):
    return "{}:{:02}".format(*divmod(round(seconds), 60))


if __name__ == "__main__":
    main()
