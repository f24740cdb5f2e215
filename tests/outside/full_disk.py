"""Tests the smallest disk, a full one and a read-only one: requests are refused before inference is spent, and succeed when
there is room.

    python3 tests/outside/full_disk.py

The disk is a small one in memory, mounted so that only this program and its children see it. That needs root or user
namespaces. Prints how many inferences a disk costs that fills while all workers wait for the runtime.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

from acknowledged import send
from service import ROOT, Runtime, Service, ensure, until

# The smallest disk that docs/deploy.md promises to be enough.
SIZE = 8 * 1024 * 1024
# Enough to fill the WAL several times.
REQUESTS = 3000
WORKERS = 16
# Requests that wait for a worker when the disk fills.
WAITING = 8
# Long enough for several test writes, a second apart.
OUTAGE_SECONDS = 5
# A test write comes every second; the rest is for a slow machine.
RECOVERY_SECONDS = 1 + 9


class OnDisk(Service):
    """Has its database on the disk and its log elsewhere."""

    def __init__(self, disk, runtime):
        super().__init__(disk, runtime, workers=WORKERS)
        self.log = disk.parent / "log"


def main():
    if "--inside" not in sys.argv:
        namespaces = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
        sys.exit(subprocess.run(["unshare", *namespaces, sys.executable, __file__, "--inside"]).returncode)
    with tempfile.TemporaryDirectory(prefix="adriaticum-disk-") as name, Runtime() as runtime:
        disk = pathlib.Path(name) / "disk"
        disk.mkdir()
        mount("-t", "tmpfs", "-o", f"size={SIZE}", "none", disk)
        try:
            live_on_it(disk, runtime)
            fill_the_disk(disk, runtime)
            fill_the_disk_during_inferences(disk, runtime)
            make_it_read_only(disk, runtime)
        finally:
            subprocess.run(["umount", "--lazy", disk], check=True)
    print("a full disk and a read-only one: refused, and accepted again")


def live_on_it(disk, runtime):
    ensure(f"**{SIZE >> 20} MiB**" in (ROOT / "docs" / "deploy.md").read_text(), "docs/deploy.md has another smallest disk")
    with OnDisk(disk, runtime) as service, concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        service.create_key()
        refused = [status for status, _ in pool.map(lambda _: ask(service), range(REQUESTS)) if status != 200]
        ensure(not refused, f"{len(refused)} of {REQUESTS} requests were refused: {set(refused)}\n{service.last_logged()}")
        service.ensure_it_verifies()
        checked = service.run("check")
        ensure(checked.returncode == 0, f"check fails: {checked.stdout}{checked.stderr}")
        sizes = {path.name: path.stat().st_size for path in disk.glob("adriaticum.db*")}
        service.ensure_it_ends_well()
    print(f"{REQUESTS} requests on a disk of {SIZE >> 20} MiB: {sizes}", flush=True)


def fill_the_disk(disk, runtime):
    with OnDisk(disk, runtime) as service:
        service.ensure_it_still_answers()
        ensure(service.fetch("/readyz").status == 200, "it is not ready")
        ballast = fill(disk)
        # Writes that fit into the allocated part of the WAL still succeed.
        given, calls = 0, len(runtime.calls)
        while (answer := service.complete())[0] == 200:
            given += 1
            ensure(given < 100_000, "completions still succeed on a full disk")
        ensure("service_unavailable" in answer[1], f"not the error of a full disk: {answer}")
        for _ in range(20):
            status, text = service.complete()
            ensure(status == 503, f"a request succeeded after a refusal: {status} {text}")
        # The row of the first one failed. The later ones were refused before the call.
        spent = len(runtime.calls) - calls - given
        ensure(spent == 1, f"{spent} inferences were spent on requests that were refused")
        ensure("disk is full" in service.logged(), "the log does not say why")
        ensure(until(lambda: service.fetch("/readyz").status == 503), "it says that it is ready")
        # Room for one page of the WAL, but not for those that a request writes. It is tried again every second.
        os.truncate(ballast, ballast.stat().st_size - 2 * 4096)
        for _ in range(3):
            time.sleep(1)
            ensure(service.fetch("/readyz").status == 503, "it says that it is ready again")
            ensure(service.complete()[0] == 503, "a request succeeds while it is not ready")
        ensure(len(runtime.calls) - calls - given == 1, "an inference was spent while it was not ready")
        ballast.unlink()
        ensure(until(lambda: service.fetch("/readyz").status == 200), "it does not get ready again")
        service.ensure_it_still_answers()
        service.ensure_it_verifies()
        service.ensure_it_ends_well()


def fill_the_disk_during_inferences(disk, runtime):
    """Every worker waits for the runtime when the disk fills: these inferences are lost, and no other. Nothing asks for the
    readiness."""
    gate = threading.Event()
    with OnDisk(disk, runtime) as service, concurrent.futures.ThreadPoolExecutor(WORKERS + WAITING) as pool:
        service.ensure_it_still_answers()
        before, calls = sums(service), len(runtime.calls)
        runtime.answer = runtime.held(gate)
        requests = [pool.submit(ask, service) for _ in range(WORKERS + WAITING)]
        are_running = until(lambda: len(runtime.calls) - calls == WORKERS)
        ballast = fill(disk)
        gate.set()
        lost, refused = count([request.result() for request in requests])
        ensure(are_running, "not every worker called the runtime")
        ensure(lost == WORKERS, f"{lost} answers to {WORKERS} inferences were 503 and not to be retried")
        ensure(refused == WAITING, f"{refused} of {WAITING} waiting requests were refused")
        end = time.monotonic() + OUTAGE_SECONDS
        while time.monotonic() < end:
            lost_meanwhile, refused_meanwhile = count(pool.map(lambda _: ask(service), range(WORKERS)))
            ensure(not lost_meanwhile, f"{lost_meanwhile} inferences were lost during the outage")
            refused += refused_meanwhile
        # A waiting request may be answered without a look at what it says.
        ensure(until(lambda: ask(service, "nobody")[0] == 400), "an invalid request does not get its own error")
        spent = len(runtime.calls) - calls
        ensure(spent == WORKERS, f"the runtime was called {spent} times in all, and {WORKERS} were running when the disk filled")
        ballast.unlink()
        freed = time.monotonic()
        ensure(until(lambda: ask(service)[0] == 200, RECOVERY_SECONDS), f"no completion within {RECOVERY_SECONDS} s of free space")
        seconds = time.monotonic() - freed
        ensure(len(runtime.calls) - calls == WORKERS + 1, "more than the one completion after it was run")
        more = {name: figure - before[name] for name, figure in sums(service).items()}
        ensure(more == {"requests": 1, "errors": 0, "total_tokens": 14}, f"failed rows are in the sums: {more}")
        service.ensure_it_verifies()
        service.ensure_it_ends_well()
    del runtime.answer
    print(f"the disk filled during {WORKERS} inferences: {lost} were lost, {refused} requests were refused without a call, and "
          f"completions succeeded {seconds:.1f} s after there was space", flush=True)


def make_it_read_only(disk, runtime):
    """Commands that only read work, and create or change no file. tests/conformance/cases/files.py tests more of them in a folder
    that can't be written."""
    with OnDisk(disk, runtime) as service:
        service.ensure_it_still_answers()
    # The end of the block killed it: the last rows are in the WAL only.
    mount("-o", "remount,ro", disk)
    started = service.run("serve")
    ensure(started.returncode == 1 and "read-only" in started.stderr.lower(), f"it starts on a read-only disk: {started}")
    before = {file.name: file.read_bytes() for file in disk.iterdir()}
    ensure(sums(service)["requests"] > 0, "there are no rows")
    for command in (["usage", "verify"], ["keys", "list"], ["audit"], ["backup", disk.parent / "copy.db"]):
        done = service.run(*command)
        ensure(done.returncode == 0, f"{command} fails on a read-only disk: {done.stderr}")
    checked = service.run("check").stdout
    ensure("the database can't be written" in checked, f"check does not say that the database can't be written: {checked}")
    ensure({file.name: file.read_bytes() for file in disk.iterdir()} == before, "a file was changed or created")
    mount("-o", "remount,rw", disk)
    service.ensure_it_verifies()


def fill(disk):
    """Fills the disk to its last page; returns the file that does."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


def ask(service, role="user"):
    """Sends a request; returns the status, and whether a client may retry by itself. An unknown role is refused."""
    with contextlib.closing(service.connection()) as connection:
        response = send(connection, service, role)
        return response.status, response.headers["x-should-retry"] != "false"


def count(answers):
    """Returns how many completions were lost after their inference, and how many were refused before it. None may succeed."""
    answers = list(answers)
    ensure({status for status, _ in answers} == {503}, f"not only 503 on a full disk: {answers}")
    lost = sum(not may_retry for _, may_retry in answers)
    return lost, len(answers) - lost


def sums(service):
    usage = service.run("usage", "--json")
    ensure(usage.returncode == 0, f"usage fails: {usage.stderr}")
    return {name: json.loads(usage.stdout)[name] for name in ("requests", "errors", "total_tokens")}


def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
