"""One service under one attack: the honest clients, their runtime, and the bounds that hold in every attack."""

import asyncio
import collections
import contextlib
import http.client
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse

from service import Runtime, Service, conversation, until
from tls import NAME

FOLDER = pathlib.Path(__file__).resolve().parent

# What has to hold in every attack.
SUCCESS = 0.99
SLOWER = 5
NOT_SLOW_SECONDS = 0.1
MEMORY_KIB = 96 * 1024
# An honest client gives up after this time, far more than any request here should take.
PATIENCE_SECONDS = 8
# Connections whose client has gone are closed within this time: the service drains one for 10 s at most.
BACK_SECONDS = 20
# The most rounds of a warm-up.
WARM_UPS = 10
# The default settings.
WORKERS = 16
CONNECTIONS = 4096
# The time without an attack, as a share of that under it.
QUIET_SHARE = 0.4


def chat(content):
    return json.dumps(conversation(content)).encode()


class SlowRuntime:
    """An inference runtime in this program's loop. A message says whose it is and how many seconds it takes: "label 0.2"."""

    def __init__(self):
        self.running, self.most = collections.Counter(), collections.Counter()

    async def serve(self, reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                body = await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0))
                reply = self.page()
                if body:
                    contents = [message["content"] for message in json.loads(body)["messages"]]
                    # The console's status page sends a message of its own.
                    label, seconds = contents[-1].split() if contents[-1] != "Say yes." else ("check", 0)
                    if await self.leaves(reader, label, float(seconds)):
                        return
                    reply = Runtime.completion(self.text(contents, label))
                text = json.dumps(reply).encode()
                # The warm-up sees to it that each worker has its connection for completions. There are none for pages.
                connection = b"keep-alive" if body else b"close"
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: %b\r\n\r\n%b"
                             % (len(text), connection, text))
                if not body:
                    return

    def settings(self, origin):
        """What a service needs to know about it."""
        return {"runtime_url": f"{origin}/v1"}

    def page(self):
        """What it answers to a request without a body."""
        return {"status": "ok"}

    def text(self, contents, label):
        """What it answers to these messages."""
        return label

    async def leaves(self, reader, label, seconds):
        """Whether the caller goes away before the answer is due."""
        self.running[label] += 1
        self.most[label] = max(self.most[label], self.running[label])
        try:
            async with asyncio.timeout(seconds):
                await reader.read(1)
        except TimeoutError:
            return False
        finally:
            self.running[label] -= 1
        return True


class Tally:
    """What some clients saw."""

    def __init__(self):
        self.outcomes, self.seconds = collections.Counter(), []

    def add(self, outcome, seconds):
        self.outcomes[outcome] += 1
        if outcome == 200:
            self.seconds.append(seconds)

    @property
    def success(self):
        return self.outcomes[200] / max(1, self.outcomes.total())

    @property
    def median(self):
        return statistics.median(self.seconds or [PATIENCE_SECONDS])

    def __str__(self):
        return ", ".join(f"{number}x {outcome}" for outcome, number in self.outcomes.most_common())


class Client:
    """A connection from 127.0.0.2 that is kept, and opened again after a failure."""

    def __init__(self, trial):
        self.trial, self.streams, self.head = trial, None, b""

    async def ask(self, tally, key=None, body=b"", path="/v1/chat/completions", host="localhost", pause=None):
        """Sends one request, a POST if there is a body, and adds its outcome to the tally. A pause is before the last byte."""
        lines = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
        lines += ["Content-Type: application/json"] if body else []
        lines += [f"Authorization: Bearer {key}"] if key else []
        began = time.monotonic()
        try:
            # Not wait_for: it may ignore that the task is cancelled (until Python 3.12), and a client in a loop would never end.
            async with asyncio.timeout(PATIENCE_SECONDS):
                outcome = await self.exchange("\r\n".join([*lines, "", ""]).encode() + body, pause)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            outcome = type(error).__name__
            self.close()
        tally.add(outcome, time.monotonic() - began)

    async def exchange(self, request, pause=None):
        if not self.streams:
            self.streams = await asyncio.open_connection(
                "127.0.0.1", self.trial.service.port, local_addr=("127.0.0.2", 0), ssl=self.trial.client_context,
                server_hostname=NAME if self.trial.client_context else None)
        reader, writer = self.streams
        if pause:
            writer.write(request[:-1])
            await asyncio.sleep(pause)
            request = request[-1:]
        writer.write(request)
        self.head = head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        if b"connection: close" in head:
            self.close()
        return int(head.split()[1])

    def close(self):
        if self.streams:
            self.streams[1].close()
            self.streams = None


class Browser:
    """The operator's browser, with its cookies. It blocks."""

    def __init__(self, port, address):
        self.port, self.address, self.cookies = port, address, {}

    def ask(self, method, path, form=None):
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=PATIENCE_SECONDS, source_address=(self.address, 0))
        cookies = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        headers = {"Host": "console.localhost", "Sec-Fetch-Site": "same-origin", "Cookie": cookies}
        with contextlib.closing(connection):
            connection.request(method, path, urllib.parse.urlencode(form) if form else None, headers)
            response = connection.getresponse()
            for line in response.headers.get_all("Set-Cookie", []):
                name, _, value = line.partition(";")[0].partition("=")
                self.cookies[name] = value
            return response.status, response.read().decode()

    def sign_in(self, password):
        """The way from the sign-in page to the keys, without a session: the three statuses."""
        try:
            if self.cookies:
                self.ask("POST", "/sign-out")
            return tuple(self.ask(*request)[0] for request in (
                ("GET", "/sign-in"), ("POST", "/sign-in", {"password": password}), ("GET", "/keys")))
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__


class Trial:
    """One service under one attack."""

    service_class = Service
    runtime_class = SlowRuntime

    def __init__(self, name, seconds, secured=None):
        self.name, self.seconds, self.faults = name, seconds, []
        self.settings, self.client_context = (dict(secured.settings), secured.client) if secured else ({}, None)
        self.peak, self.note = 0, ""
        self.health, self.quiet, self.attacked = Tally(), Tally(), Tally()

    async def __aenter__(self):
        self.runtime = self.runtime_class()
        self.server = await asyncio.start_server(self.runtime.serve, "127.0.0.1", 0)
        self.folder = tempfile.TemporaryDirectory(prefix="adriaticum-attacks-")
        settings = self.runtime.settings(f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}") | self.settings
        self.service = self.service_class(pathlib.Path(self.folder.name), **settings)
        self.key, self.other_key = self.service.create_key("honest"), self.service.create_key("attacker")
        self.service.__enter__()
        # Every worker gets its connection to the runtime: on a busy machine not in the first round.
        workers = self.settings.get("workers", WORKERS)
        for _ in range(WARM_UPS):
            await self.honest(0.5, clients=workers, content="warm-up 0.2")
            if self.runtime.most["warm-up"] >= workers:
                break
        await asyncio.to_thread(until, lambda: not self.count_connections())
        self.threads, self.sockets = self.service.status("Threads"), self.count_sockets()
        return self

    async def __aexit__(self, kind, *_):
        try:
            if not kind:
                await self.check_the_process()
        finally:
            self.service.kill()
            self.server.close()
            self.folder.cleanup()

    def expect(self, condition, otherwise):
        if not condition:
            self.faults.append(otherwise)

    def count_sockets(self):
        """The service's open sockets. Its other files are the database's: a few for each thread that has read it."""
        folder, links = f"/proc/{self.service.process.pid}/fd", []
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"{folder}/{name}"))
        return sum(link.startswith("socket:") for link in links)

    def count_connections(self):
        """Connections that the service has not closed."""
        lines = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
        is_open = {"01": True, "08": True}  # established, and closed by the client alone
        return sum(is_open.get(state, False) for _, local, _, state, *_ in lines
                   if local.endswith(f":{self.service.port:04X}"))

    async def check_the_process(self):
        self.expect(self.service.process.poll() is None, f"the service ended:\n{self.service.last_logged()}")
        if self.service.process.poll() is not None:
            return
        self.expect(self.service.status("Threads") == self.threads, "the number of threads changed")
        self.peak = self.service.status("VmHWM")
        self.expect(self.peak < MEMORY_KIB, f"{self.peak // 1024} MiB of memory")
        is_back = await asyncio.to_thread(until, lambda: self.count_sockets() <= self.sockets, BACK_SECONDS)
        self.expect(is_back, f"{self.count_sockets()} sockets, {self.sockets} before")
        code = await asyncio.to_thread(self.service.stop)
        self.expect(code == 0, f"exit code {code} on SIGTERM")
        self.expect("panicked" not in self.service.logged(), "the service panicked")

    async def honest(self, seconds, clients=8, pause=0.02, content="honest 0.02", key=None, tally=None, body=None):
        """Has clients run completions for some time, at least one each."""
        tally, body = tally or Tally(), body or chat(content)
        end = time.monotonic() + seconds

        async def one():
            client = Client(self)
            while True:
                await client.ask(tally, key or self.key, body)
                if time.monotonic() > end:
                    return client.close()
                await asyncio.sleep(pause)

        await asyncio.gather(*(one() for _ in range(clients)))
        return tally

    @contextlib.asynccontextmanager
    async def attack(self, name, **options):
        """Runs an attacker from its first connection on."""
        command = [sys.executable, FOLDER / "attackers.py", name, str(self.service.port), json.dumps(options)]
        attacker = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        try:
            yield attacker.stdout.readline
        finally:
            attacker.kill()
            await attacker.wait()

    async def probe(self):
        """Asks for the health over and over, each time on a new connection, as an orchestrator does."""
        while True:
            for path in ("/healthz", "/readyz"):
                client = Client(self)
                await client.ask(self.health, path=path, host="console.localhost")
                client.close()
                await asyncio.sleep(0.1)

    async def compare(self, attacker, honest=None, seconds=None, meanwhile=None, **options):
        """The honest clients without and then with the attacker, and the bounds that hold in every attack.

        `meanwhile` is awaited during the attack, too.
        """
        honest = honest or {}
        self.quiet = await self.honest(self.seconds * QUIET_SHARE, **honest)
        async with self.attack(attacker, **options) as in_place:
            probes = asyncio.create_task(self.probe())
            placing = asyncio.create_task(in_place())
            # Also while the attacker takes its place.
            while not placing.done():
                await self.honest(0.1, **honest, tally=self.attacked)
            attacked = self.honest(seconds or self.seconds, **honest, tally=self.attacked)
            await asyncio.gather(attacked, *([meanwhile()] if meanwhile else []))
            self.expect(self.service.status("Threads") == self.threads, "the number of threads changed")
            probes.cancel()
        self.check()

    def check(self):
        bound = max(SLOWER * self.quiet.median, NOT_SLOW_SECONDS)
        self.expect(self.quiet.success == 1, f"without an attack: {self.quiet}")
        self.expect(self.attacked.success >= SUCCESS, f"honest requests: {self.attacked}")
        self.expect(self.attacked.median <= bound,
                    f"median {self.attacked.median * 1000:.0f} ms, at most {bound * 1000:.0f} ms are allowed")
        self.expect(self.health.success == 1, f"health probes: {self.health}")

    def row(self):
        milliseconds = [f"{tally.median * 1000:.0f} ms" if tally.outcomes else "" for tally in (self.quiet, self.attacked)]
        return [self.name, str(self.attacked.outcomes.total()), f"{self.attacked.success:.1%}", *milliseconds,
                f"{self.health.outcomes[200]}/{self.health.outcomes.total()}", f"{self.peak / 1024:.0f} MiB"]
