"""Slow clients, as slowhttptest and slow TLS handshakes make them: the service stays available to everybody else.

    python3 tests/outside/slow_clients.py

Each of slowhttptest's three kinds gets a service of its own, all at the same time: heads that do not end (-H), bodies that
do not end (-B), answers that are not read (-X); the first two also against a service that may have fewer connections
than they open. Meanwhile completions go on being run, for a client on another address.
"""

import concurrent.futures
import contextlib
import pathlib
import re
import socket
import subprocess
import tempfile
import time

from service import REPLY_SECONDS, Runtime, Service, ensure
from tls import Secured, SecuredService, hello_of

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
HANDSHAKES = 300
# The service ends a handshake after 20 s. The rest is for a busy machine.
HANDSHAKE_SECONDS = 90


class DistantService(Service):
    client_address = "127.0.0.2"


def attack(kind, max_connections, runtime, folder):
    folder.mkdir()
    name = f"{kind}, max_connections {max_connections}"
    with DistantService(folder, runtime, max_connections=max_connections) as service:
        service.ensure_it_still_answers()
        attacker = subprocess.Popen(
            ["slowhttptest", kind, *KINDS[kind], "-c", str(CONNECTIONS), "-r", "500", "-l", str(SECONDS), "-p", "30",
             "-u", f"http://localhost:{service.port}/v1/chat/completions"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={"TERM": "dumb", "PATH": "/usr/bin:/bin"},
        )
        served = complete_while(service, lambda: attacker.poll() is None)
        told = re.sub(r"\x1b\[[0-9;]*m", "", attacker.stdout.read())
        available = re.findall(r"service available:\s*(\w+)", told)
        connected = max(map(int, re.findall(r"connected:\s*(\d+)", told)), default=0)
        ensure(available and set(available) == {"YES"}, f"{name}: not always available\n{told}")
        # One address gets half of the places.
        ensure(connected >= min(CONNECTIONS, max_connections) / 2, f"{name}: slowhttptest did not get to attack\n{told}")
        service.ensure_it_ends_well()
    return f"{name}: {connected} slow connections, {served}"


def complete_while(service, condition):
    """Runs completions as long as a condition is true. Their number, and the time of the slowest."""
    slowest, completions, threads = 0, 0, service.status("Threads")
    while condition():
        began = time.monotonic()
        service.ensure_it_still_answers()
        slowest = max(slowest, time.monotonic() - began)
        completions += 1
        ensure(service.status("Threads") == threads, "the number of threads changed")
        time.sleep(0.05)  # not a wait for anything: a pace that leaves the machine to the others
    return f"{completions} completions, the slowest {slowest * 1000:.0f} ms"


def shake_hands_slowly(runtime, folder):
    """Handshakes with half of a first message, a whole one and nothing more, or one byte at a time. One worker still answers
    other clients, and unfinished handshakes are ended in time."""
    with SecuredService(folder, runtime, Secured(folder.parent), workers=1) as service, contextlib.ExitStack() as stack:
        hello = hello_of(service.secured.client)
        service.ensure_it_still_answers()
        memory, began, sent = service.status("VmRSS"), time.monotonic(), 1

        def clients(bytes_sent):
            opened = [stack.enter_context(socket.create_connection(("127.0.0.1", service.port), REPLY_SECONDS))
                      for _ in range(HANDSHAKES)]
            for index, client in enumerate(opened):
                client.sendall(hello[:bytes_sent(index)])
                client.setblocking(False)
            return opened

        slow = clients(lambda index: 1)
        waiting = {*slow, *clients(lambda index: 1 + index % (len(hello) - 1)), *clients(lambda index: len(hello))}
        grown = service.status("VmRSS") - memory
        ensure(grown < len(waiting) * 24, f"{len(waiting)} handshakes took {grown} KiB")

        def are_open():
            nonlocal sent
            ensure(time.monotonic() - began < HANDSHAKE_SECONDS, f"{len(waiting)} handshakes are still open")
            for client in slow if sent < len(hello) - 1 else ():
                with contextlib.suppress(OSError):
                    client.send(hello[sent:sent + 1])
            sent += 1
            waiting.difference_update([client for client in waiting if has_ended(client)])
            return waiting

        served = complete_while(service, are_open)
        seconds = time.monotonic() - began
        service.ensure_it_ends_well()
    return f"{3 * HANDSHAKES} slow handshakes, the last ended after {seconds:.0f} s: {served}"


def has_ended(client):
    """Returns whether the service has closed the connection; earlier bytes are ignored."""
    try:
        while True:
            if not client.recv(65536):
                return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def main():
    with tempfile.TemporaryDirectory(prefix="adriaticum-slow-") as name, Runtime() as runtime:
        folder = pathlib.Path(name)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            attacks = [pool.submit(attack, *settings, runtime, folder / str(number)) for number, settings in enumerate(ATTACKS)]
            attacks.append(pool.submit(shake_hands_slowly, runtime, folder / "tls"))
            for one in attacks:
                print(one.result(), flush=True)


if __name__ == "__main__":
    main()
