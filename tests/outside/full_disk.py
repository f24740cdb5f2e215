"""Tests a full disk and a read-only one: requests are refused before inference is spent, and succeed when there is room.

    python3 tests/outside/full_disk.py

The disk is a small one in memory, mounted so that only this program and its children see it. That needs root or user
namespaces.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from service import Runtime, Service, ensure, until

SIZE = 4 * 1024 * 1024


def main():
    if "--inside" not in sys.argv:
        namespaces = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
        sys.exit(subprocess.run(["unshare", *namespaces, sys.executable, __file__, "--inside"]).returncode)
    with tempfile.TemporaryDirectory(prefix="adriaticum-disk-") as name, Runtime() as runtime:
        folder = pathlib.Path(name)
        mount("-t", "tmpfs", "-o", f"size={SIZE}", "none", folder)
        try:
            fill_the_disk(folder, runtime)
            make_it_read_only(folder, runtime)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
    print("a full disk and a read-only one: refused, and accepted again")


def fill_the_disk(folder, runtime):
    with Service(folder, runtime) as service:
        service.ensure_it_still_answers()
        ensure(readiness(service) == 200, "it is not ready")
        ballast = folder / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        # Writes that fit into the allocated part of the WAL still succeed.
        given, calls = 0, len(runtime.calls)
        while (answer := service.complete())[0] == 200:
            given += 1
            ensure(given < 100_000, "completions still succeed on a full disk")
        ensure("service_unavailable" in answer[1], f"not the error of a full disk: {answer}")
        for _ in range(20):
            status, text = service.complete()
            ensure(status == 503, f"a request succeeded after a refusal: {status} {text}")
        spent = len(runtime.calls) - calls - given
        # The first refused request may have a row without an outcome; later ones have no row.
        ensure(spent <= 1, f"{spent} inferences were spent on requests that were refused")
        ensure("disk is full" in service.logged(), "the log does not say why")
        ensure(until(lambda: readiness(service) == 503), "it says that it is ready")
        # Room for one page of the WAL, but not for the three that a request writes. It is tried again every second.
        os.truncate(ballast, ballast.stat().st_size - 2 * 4096)
        for _ in range(3):
            time.sleep(1)
            ensure(readiness(service) == 503, "it says that it is ready again")
            ensure(service.complete()[0] == 503, "a request succeeds while it is not ready")
        ballast.unlink()
        ensure(until(lambda: readiness(service) == 200), "it does not get ready again")
        service.ensure_it_still_answers()
        verify(service)
        service.ensure_it_ends_well()


def make_it_read_only(folder, runtime):
    service = Service(folder, runtime)
    mount("-o", "remount,ro", folder)
    started = service.run("serve")
    ensure(started.returncode == 1, f"it starts on a read-only disk: {started}")
    ensure("read-only" in started.stderr.lower(), f"it does not say that the disk is read-only: {started.stderr}")
    mount("-o", "remount,rw", folder)
    with service:
        service.ensure_it_still_answers()
        verify(service)


def readiness(service):
    with contextlib.closing(service.connection()) as connection:
        connection.request("GET", "/readyz", headers={"Host": "console.localhost"})
        return connection.getresponse().status


def verify(service):
    walked = service.run("usage", "verify")
    ensure(walked.returncode == 0, f"the ledger does not verify: {walked.stdout}{walked.stderr}")


def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
