"""Tests the console in Chromium: every flow, the size of every page, and accessibility with axe-core, in light and dark.

    python3 tests/browser/run.py [FOLDER]

Writes screenshots of every page to FOLDER, if it is given, at the widths of a desktop and a phone. It needs Debian's
chromium and nodejs, and the npm packages of this folder.
"""

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "outside"))
from fill import fill  # noqa: E402
from service import Runtime, Service, ensure  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
PASSWORD = "correct horse battery staple"
LEDGERS = {"empty": 0, "one": 1, "many": 200_000, "keys": 300}
# In the ledger "keys", which has more than one page of both.
MORE_KEYS = 57
AUDIT_ROWS = 70
# Ends a browser that hangs. The flows take 40 s on two idle cores.
RUN_SECONDS = 900


class WithConsole(Service):
    def __init__(self, folder, runtime, rows, more_keys, audit_rows):
        folder.mkdir()
        super().__init__(folder, runtime, log_level="warn")
        done = self.run("console", "password", input=PASSWORD + "\n")
        ensure(done.returncode == 0, f"console password failed: {done.stderr}")
        if rows:
            fill(self.database, rows, more_keys, audit_rows)


def main():
    shots = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
    if shots:
        shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="browser-") as name, Runtime() as runtime, contextlib.ExitStack() as running:
        services = {}
        for ledger, rows in LEDGERS.items():
            more = (MORE_KEYS, AUDIT_ROWS) if ledger == "keys" else (0, 0)
            services[ledger] = running.enter_context(WithConsole(pathlib.Path(name) / ledger, runtime, rows, *more))
        plan = {
            "password": PASSWORD,
            "shots": shots and str(shots),
            "ports": {ledger: service.port for ledger, service in services.items()},
        }
        done = subprocess.run(["node", HERE / "console.mjs", json.dumps(plan)], timeout=RUN_SECONDS)
        ensure(done.returncode == 0, "the console's tests failed, see above")
        for service in services.values():
            service.ensure_it_ends_well()


if __name__ == "__main__":
    main()
