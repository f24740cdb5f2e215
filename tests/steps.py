#!/usr/bin/env python3
"""Runs the steps of `make test-all`, each a target of the Makefile, and prints a table of their times and results.

    STEPS="attacks console" make test-all

Without STEPS it runs all of them, and before them what they build and download. A step that fails does not stop the others.
The output of each step is also in target/steps/STEP.log, and the end of that of a failed one comes last. Before the first
step, the programs that all of them need are checked for, or installed.
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

# The steps of a line run beside each other, in lanes; a line begins when the one before has ended. What measures times runs
# alone, the cheapest and most telling first.
LINES = (
    # What the others build and download. What may install packages is in one lane.
    (("lint", "need-deb", "need-image", "static"), ("build", "test-builds"), ("downloads",)),
    *(((step,),) for step in ("test", "postgres", "attacks", "openapi", "crashes")),
    # These mostly wait.
    (("console",), ("clients", "tls", "full-disk", "search", "prometheus")),
    *(((step,),) for step in ("model", "test-install", "test-cluster")),
)
# Parts of other steps, which are no step by themselves.
PARTS = ("need-deb", "need-image", "static", "test-builds", "downloads")
AS_ROOT = ("need-deb", "need-image", "static", "test-install", "test-cluster")

# Ends a step that hangs, so that the others still run.
STEP_SECONDS = 1800
# The lines at the end of a failed step's log that are repeated below the table.
LAST_LINES = 40

printing = threading.Lock()
running, stopping = set(), threading.Event()


def main():
    all_of_them = [step for line in LINES for lane in line for step in lane]
    known = [step for step in all_of_them if step not in PARTS]
    chosen = os.environ.get("STEPS", "").split()
    if unknown := set(chosen) - {*known}:
        print(f"unknown: {', '.join(sorted(unknown))}. The steps are: {' '.join(known)}", file=sys.stderr)
        sys.exit(2)
    left_out = () if chosen or os.geteuid() == 0 else AS_ROOT
    chosen = chosen or [step for step in all_of_them if step not in left_out]
    if subprocess.run([ROOT / "tests" / "prerequisites", *(step for step in chosen if step not in PARTS)]).returncode != 0:
        sys.exit(1)
    LOGS.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, stop)
    began, rows = time.monotonic(), []
    for line in LINES:
        lanes = [steps for lane in line if (steps := [step for step in lane if step in chosen])]
        is_alone = len(lanes) == 1
        with concurrent.futures.ThreadPoolExecutor() as pool:
            rows += [row for its in pool.map(lambda steps: run_lane(steps, is_alone), lanes) for row in its]
    report(rows, [step for step in left_out if step in known], time.monotonic() - began)
    sys.exit(1 if any(failure for *_, failure in rows) else 0)


def stop(*_):
    """Ctrl-C reaches this process alone."""
    stopping.set()
    for process in tuple(running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
    raise KeyboardInterrupt


def run_lane(steps, is_alone):
    return [run(step, is_alone) for step in steps if not stopping.is_set()]


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
