"""Tests the console in Chromium: every flow, the size of every page, and accessibility with axe-core, in light and dark.

    python3 tests/browser/run.py [--only PATTERN] [FOLDER]

Writes screenshots of every page to FOLDER, if it is given, at the widths of a desktop, a tablet and two phones. With --only, it
runs the tests whose names match PATTERN. It needs Debian's chromium-headless-shell and nodejs, and the npm packages of this folder.
"""

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "outside"))
from fill import fill  # noqa: E402
from service import REPLY_SECONDS, Runtime, Service, ensure  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
PASSWORD = "correct horse battery staple"
# Requests, more keys than fill.py has anyway, and changes. "keys" has more than one page of both.
LEDGERS = {"empty": (0, 0, 0), "one": (1, 0, 0), "keys": (300, 57, 70), "many": (200_000, 0, 0)}
# Ends a browser that hangs.
RUN_SECONDS = 1800


class DirectedRuntime(Runtime):
    """Fails or waits if a message says so: from "Hold." on, until "Go on."."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def answer(self, body):
        content = body["messages"][-1]["content"]
        if content == "Fail.":
            return 500, {"error": {"message": "out of memory"}}
        if content == "Wait.":
            self.gate.wait(REPLY_SECONDS)
        elif content == "Hold.":
            self.gate.clear()
        elif content == "Go on.":
            self.gate.set()
        return self.good(body)


class WithConsole(Service):
    def __init__(self, folder, runtime, *contents):
        folder.mkdir()
        super().__init__(folder, runtime, log_level="warn")
        self.contents = contents

    def __enter__(self):
        done = self.run("console", "password", input=PASSWORD + "\n")
        ensure(done.returncode == 0, f"console password failed: {done.stderr}")
        if any(self.contents):
            fill(self.database, *self.contents)
        return super().__enter__()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    options = parser.parse_args()
    shots = options.folder and options.folder.resolve()
    if shots:
        shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="browser-") as name, DirectedRuntime() as runtime, contextlib.ExitStack() as running:
        services = {ledger: WithConsole(pathlib.Path(name) / ledger, runtime, *contents) for ledger, contents in LEDGERS.items()}
        plan = {
            "password": PASSWORD,
            "only": options.only,
            "runtime": runtime.url,
            "shots": shots and str(shots),
            "ports": {ledger: service.port for ledger, service in services.items()},
        }
        # It begins with the small ledgers, and waits for the large one, which takes half a minute to fill.
        *small, large = services.values()
        for service in small:
            running.enter_context(service)
        browser = running.enter_context(subprocess.Popen(["node", HERE / "console.mjs", json.dumps(plan)]))
        running.callback(browser.kill)
        running.enter_context(large)
        ensure(browser.wait(RUN_SECONDS) == 0, "the console's tests failed, see above")
        for service in services.values():
            service.ensure_it_ends_well()


if __name__ == "__main__":
    main()
