"""Slow clients, as slowhttptest makes them: the service stays available to everybody else.

    python3 tests/outside/slow_clients.py

Each of its three kinds gets a service of its own, all at the same time: heads that do not end (-H), bodies that
do not end (-B), answers that are not read (-X); the first two also against a service that may have fewer connections
than they open. Meanwhile completions go on being run, for a client on another address.
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
    # A key of the right form: without one the head decides, and no body is awaited.
    "-B": ["-i", "5", "-x", "64", "-s", "200000", "-f", f"application/json\r\nAuthorization: Bearer adr_{'0' * 48}"],
    # A window of a few bytes, and several requests in a row so that the answers do not fit into it.
    "-X": ["-w", "8", "-y", "16", "-n", "5", "-z", "4", "-k", "8"],
}
ATTACKS = [("-H", 4096), ("-B", 4096), ("-X", 4096), ("-H", CONNECTIONS // 2), ("-B", CONNECTIONS // 2)]


class DistantService(Service):
    client_address = "127.0.0.2"


def attack(kind, max_connections, runtime, folder):
    folder.mkdir()
    name = f"{kind}, max_connections {max_connections}"
    with DistantService(folder, runtime, max_connections=max_connections) as service:
        service.ensure_it_still_answers()
        threads = service.status("Threads")
        attacker = subprocess.Popen(
            ["slowhttptest", kind, *KINDS[kind], "-c", str(CONNECTIONS), "-r", "500", "-l", str(SECONDS), "-p", "30",
             "-u", f"http://localhost:{service.port}/v1/chat/completions"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={"TERM": "dumb", "PATH": "/usr/bin:/bin"},
        )
        slowest = completions = 0
        while attacker.poll() is None:
            began = time.monotonic()
            service.ensure_it_still_answers()
            slowest = max(slowest, time.monotonic() - began)
            completions += 1
            ensure(service.status("Threads") == threads, f"{name}: the number of threads changed")
            time.sleep(0.05)  # not a wait for anything: a pace that leaves the machine to the others
        told = re.sub(r"\x1b\[[0-9;]*m", "", attacker.stdout.read())
        available = re.findall(r"service available:\s*(\w+)", told)
        connected = max(map(int, re.findall(r"connected:\s*(\d+)", told)), default=0)
        ensure(available and set(available) == {"YES"}, f"{name}: not always available\n{told}")
        # One address gets half of the places.
        ensure(connected >= min(CONNECTIONS, max_connections) / 2, f"{name}: slowhttptest did not get to attack\n{told}")
        service.ensure_it_ends_well()
    return f"{name}: {connected} slow connections, {completions} completions, the slowest {slowest * 1000:.0f} ms"


def main():
    with tempfile.TemporaryDirectory(prefix="adriaticum-slow-") as name, Runtime() as runtime:
        with concurrent.futures.ThreadPoolExecutor(len(ATTACKS)) as pool:
            attacks = [pool.submit(attack, *settings, runtime, pathlib.Path(name) / str(number))
                       for number, settings in enumerate(ATTACKS)]
            for one in attacks:
                print(one.result())


if __name__ == "__main__":
    main()
