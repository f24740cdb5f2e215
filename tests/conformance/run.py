#!/usr/bin/env python3
"""Checks the release binary against the API specification and the documented choices, from outside.

    python3 tests/conformance/run.py [--tls] [--postgres | --sqlite-only] [PART...]

Runs the cases whose name contains one of the PARTs, by default all. A PART with a leading minus leaves cases out:
run.py -- -search. With --tls every connection uses TLS. With --postgres the databases are on PostgreSQL, which the run
starts, and the cases about files, triggers and locks of SQLite are left out; --sqlite-only runs those of them alone in which
clients connect. ADRIATICUM names another binary than target/release/adriaticum.
"""

import argparse
import concurrent.futures
import contextlib
import importlib
import pathlib
import sys
import tempfile
import time
import traceback

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER / "cases")]
from harness import Secured, Server  # noqa: E402
from postgres import LEFT_OUT, OF_FILES, Postgres  # noqa: E402

MODULES = ("completions", "refusals", "wire", "runtimes", "grounding", "openai", "abandonment", "causes", "keys", "ledger", "figures",
           "console", "sign_in", "key_pages", "monitoring", "files", "commands", "check", "restore", "settings", "zone", "version",
           "lifecycle", "secrecy")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tls", action="store_true")
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument("--postgres", action="store_true")
    engine.add_argument("--sqlite-only", action="store_true")
    parser.add_argument("parts", nargs="*", metavar="PART")
    options = parser.parse_args()
    parts = LEFT_OUT if options.sqlite_only else options.parts + [f"-{case}" for case in LEFT_OUT + OF_FILES if options.postgres]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="adriaticum-conformance-"))
        if options.tls:
            Server.secured = Secured(pathlib.Path(folder))
        if options.postgres:
            Server.postgres = stack.enter_context(Postgres())
        passed, failed = run(list(chosen(parts)))
    if options.tls:
        versions = set(Server.tls_versions)
        print(f"{len(Server.tls_versions)} connections with {', '.join(sorted(versions))}")
        failed += versions != {"TLSv1.3"}
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed or not passed else 0)


def chosen(parts):
    """Yields the cases: every public function that a module of cases/ defines."""
    wanted = [part for part in parts if not part.startswith("-")]
    unwanted = [part[1:] for part in parts if part.startswith("-")]
    for name in MODULES:
        module = importlib.import_module(name)
        for function in vars(module).values():
            if getattr(function, "__module__", None) != name or function.__name__.startswith("_"):
                continue
            case = f"{name}.{function.__name__}"
            is_wanted = not wanted or any(part in case for part in wanted)
            if is_wanted and not any(part in case for part in unwanted):
                yield case, function


def run(cases):
    from shared import SERVER

    began = time.monotonic()
    waiting = [case for case in cases if hasattr(case[1], "runs_beside")]
    with SERVER, concurrent.futures.ThreadPoolExecutor(len(waiting) or 1) as beside:
        running = [beside.submit(passes, *case) for case in waiting]
        results = [passes(*case) for case in cases if case not in waiting]
        results += [case.result() for case in running]
    print(f"{len(results)} cases in {time.monotonic() - began:.0f} s")
    return results.count(True), results.count(False)


def passes(name, case):
    try:
        case()
        return True
    # A helper of tests/outside ends a test with SystemExit.
    except (Exception, SystemExit):
        trace = traceback.format_exc().strip().replace("\n", "\n  ")
        print(f"FAILED {name}\n  {trace}", flush=True)
        return False


if __name__ == "__main__":
    main()
