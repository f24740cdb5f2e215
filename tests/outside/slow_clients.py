"""Slow clients, as slowhttptest makes them: the service stays available to everybody else.

    python3 tests/outside/slow_clients.py

Each of its three kinds gets a service of its own, all at the same time: heads that do not end (-H), bodies that
do not end (-B), answers that are not read (-X). Meanwhile completions go on being run.
"""

import concurrent.futures
import pathlib
import re
import subprocess
import tempfile
import time

from service import Runtime, Service, ensure

CONNECTIONS = 1000
SECONDS = 20
KINDS = {
    "-H": ["-i", "5", "-x", "24"],
    "-B": ["-i", "5", "-x", "64", "-s", "200000"],
    # A window of a few bytes, and several requests in a row so that the answers do not fit into it.
    "-X": ["-w", "8", "-y", "16", "-n", "5", "-z", "4", "-k", "8"],
}


def attack(kind, options, runtime, folder):
    folder.mkdir()
    with Service(folder, runtime) as service:
        service.ensure_it_still_answers()
        threads = service.status("Threads")
        attacker = subprocess.Popen(
            ["slowhttptest", kind, *options, "-c", str(CONNECTIONS), "-r", "500", "-l", str(SECONDS), "-p", "30",
             "-u", f"http://localhost:{service.port}/v1/chat/completions"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={"TERM": "dumb", "PATH": "/usr/bin:/bin"},
        )
        slowest = completions = 0
        while attacker.poll() is None:
            began = time.monotonic()
            service.ensure_it_still_answers()
            slowest = max(slowest, time.monotonic() - began)
            completions += 1
            ensure(service.status("Threads") == threads, f"{kind}: the number of threads changed")
            time.sleep(0.05)  # not a wait for anything: a pace that leaves the machine to the others
        told = re.sub(r"\x1b\[[0-9;]*m", "", attacker.stdout.read())
        available = re.findall(r"service available:\s*(\w+)", told)
        connected = max(map(int, re.findall(r"connected:\s*(\d+)", told)), default=0)
        ensure(available and set(available) == {"YES"}, f"{kind}: not always available\n{told}")
        ensure(connected > CONNECTIONS / 2, f"{kind}: slowhttptest did not get to attack\n{told}")
        service.ensure_it_ends_well()
    return f"{kind}: {connected} slow connections, {completions} completions, the slowest {slowest * 1000:.0f} ms"


def main():
    with tempfile.TemporaryDirectory(prefix="adriaticum-slow-") as name, Runtime() as runtime:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            attacks = [pool.submit(attack, kind, options, runtime, pathlib.Path(name) / kind.strip("-"))
                       for kind, options in KINDS.items()]
            for one in attacks:
                print(one.result())


if __name__ == "__main__":
    main()
