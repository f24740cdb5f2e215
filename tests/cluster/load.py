"""What runs while the cluster is attacked: clients of every gateway, readiness probes, revocations, and psql as a yardstick.

Each class is a group of threads that starts when it is entered and ends when it is left. What went wrong is in `faults`.
"""

import collections
import contextlib
import http.client
import itertools
import json
import subprocess
import threading
import time
import typing

from cluster import CHANGE_SECONDS, psql
from proxies import CONSOLE, HOST
from service import REPLY_SECONDS, Runtime, conversation, ensure, read, send, until

# Of each gateway and of HAProxy: more than a gateway has workers, so that some of their requests always wait for one.
CLIENTS = 12
PAUSE_SECONDS = 0.05
MODEL_SECONDS = 0.1
SLOW_SECONDS = 20
PSQL_SECONDS = 3
# A gateway gives up a server when the commit of a heartbeat, one per second, has hung for 4 s; the rest is for a slow machine.
STALE_SECONDS = 15


class NumberedRuntime(Runtime):
    """Each prompt is a number, and its figures follow from it. A prompt with `slow` takes 20 s. `times` has the moment of each
    call."""

    def __init__(self):
        self.asked, self.slow, self.times = collections.Counter(), [], []
        super().__init__()

    def answer(self, body):
        number, *is_slow = body["messages"][-1]["content"].split()
        self.asked[int(number)] += 1
        self.times.append(time.monotonic())
        self.slow += [number] if is_slow else []
        self.calls.clear()
        time.sleep(SLOW_SECONDS if is_slow else MODEL_SECONDS)
        return 200, self.completion(number, usage=figures_of(int(number)))

    def handle_error(self, request, client_address):
        """Prints nothing: a gateway may be killed in the middle of a call."""


def figures_of(number):
    return number, number % 97, number + number % 97


class Answer(typing.NamedTuple):
    gateway: str
    number: int
    request_id: str | None  # None: the connection broke, or HAProxy answered
    status: int | None
    may_retry: bool
    began: float
    ended: float


NUMBERS = itertools.count(1)


def ask(gateway, key, is_slow=False):
    """Sends one completion on a new connection. Returns the answer; None if the gateway does not listen."""
    number = next(NUMBERS)
    body, began = conversation(f"{number} slow" if is_slow else str(number)), time.monotonic()
    with contextlib.closing(gateway.connection(REPLY_SECONDS)) as connection:
        try:
            connection.connect()
        except OSError:
            return None
        try:
            send(connection, key, body, Host=HOST)
            response = read(connection)
        except (OSError, http.client.HTTPException):
            return Answer(gateway.name, number, None, None, False, began, time.monotonic())
        return Answer(gateway.name, number, response.headers["x-request-id"], response.status,
                      response.headers["x-should-retry"] != "false", began, time.monotonic())


class Threads:
    def __init__(self):
        self.ended, self.faults = threading.Event(), []
        self.threads = []

    def run(self, work, *arguments):
        """Repeats work in a thread until the end."""
        def repeat():
            try:
                while not self.ended.is_set():
                    work(*arguments)
            except BaseException as error:  # SystemExit too, which ensure raises
                self.faults.append(repr(error))

        self.threads.append(threading.Thread(target=repeat))

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        for thread in self.threads:
            thread.join()


class Clients(Threads):
    """Clients that send completions one after the other."""

    def __init__(self, gateways, key):
        super().__init__()
        self.answers = []
        for gateway in gateways:
            for _ in range(CLIENTS):
                self.run(self.send, gateway, key)

    def send(self, gateway, key):
        if answer := ask(gateway, key):
            self.answers.append(answer)
        self.ended.wait(PAUSE_SECONDS)

    def completed(self, gateway):
        """When completions of a gateway began and ended, in the order of their ends."""
        return sorted(((answer.began, answer.ended) for answer in list(self.answers)
                       if answer.gateway == gateway and answer.status == 200), key=lambda times: times[1])


class Writer(Threads):
    """psql in a loop, a row each: what any client of the cluster sees."""

    numbers = itertools.count()

    def __init__(self, uri):
        super().__init__()
        self.uri, self.times = f"{uri}?connect_timeout=2", []
        self.run(self.write)

    def write(self):
        began = time.monotonic()
        with contextlib.suppress(SystemExit, subprocess.TimeoutExpired):
            psql(self.uri, f"INSERT INTO written VALUES ({next(self.numbers)})", timeout=PSQL_SECONDS)
            self.times.append((began, time.monotonic()))
        self.ended.wait(0.1)

    def completed(self):
        return list(self.times)


class Revoker(Threads):
    """Makes keys, revokes them with the command of one gateway, and uses them at another at once. `is_split`: two servers claim
    to be the primary, so the other gateway may not know a new key until it has left the old one."""

    def __init__(self, gateways, name, is_split):
        super().__init__()
        self.stale_seconds = STALE_SECONDS if is_split else 0
        self.names = (f"{name} {number}" for number in itertools.count())
        self.revoked, self.answers = [], []
        self.run(self.revoke_one, gateways[0], gateways[-1])

    def revoke_one(self, here, there):
        name = next(self.names)
        created = here.run("keys", "create", name)
        if created.returncode:
            return self.ended.wait(0.2)
        secret, ids = created.stdout.strip(), []

        def is_listed():
            listed = here.run("keys", "list", "--json")
            keys = [] if listed.returncode else json.loads(listed.stdout)
            ids.extend(key["id"] for key in keys if key["name"] == name)
            return ids

        def is_known():
            before = ask(there, secret)
            self.answers += [before] if before else []
            return not before or before.status in (200, 503, None)

        # While two servers say that they are the primary, the old one may be asked. A key that was created is never lost.
        ensure(until(is_listed, CHANGE_SECONDS), f"the key {name} was created and is not listed")
        identity = ids[0]
        if not until(is_known, self.stale_seconds):
            self.faults.append(f"a good key got {self.answers[-1].status}")
        # The command may not know whether it was done; then it is asked again.
        while here.run("keys", "revoke", identity).returncode:
            if self.ended.is_set():
                return None
        self.revoked.append(secret)
        after = ask(there, secret)
        if after and after.status not in (401, 503, None):
            self.faults.append(f"a revoked key got {after.status}: {after}")
        return self.ended.wait(0.2)


class Probes(Threads):
    """Asks every gateway for /readyz and /healthz, and notes when the answers came."""

    def __init__(self, gateways):
        super().__init__()
        self.ready = {gateway.name: [] for gateway in gateways}
        for gateway in gateways:
            self.run(self.probe, gateway)

    def probe(self, gateway):
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(gateway.connection(5)) as connection:
            for path in ("/readyz", "/healthz"):
                connection.request("GET", path, headers={"Host": CONSOLE})
                response = read(connection)
                if path == "/readyz":
                    self.ready[gateway.name].append((time.monotonic(), response.status == 200))
                elif response.status != 200:
                    self.faults.append(f"/healthz of gateway {gateway.name} says {response.status}")
        self.ended.wait(0.1)


class Noise(Threads):
    """How late a thread of this program wakes up at worst: what the machine adds to every time that is measured."""

    def __init__(self):
        super().__init__()
        self.latest = 0.0
        self.run(self.sleep)

    def sleep(self):
        began = time.monotonic()
        time.sleep(0.05)
        self.latest = max(self.latest, time.monotonic() - began - 0.05)


def longest_gap(completed, began, ended):
    """The longest time without a completion between two moments."""
    times = [began, *(end for _, end in completed if began < end < ended), ended]
    return max(after - before for before, after in itertools.pairwise(times))
