"""The real binary and a scripted runtime, for every test that runs outside the process. Standard library only."""

import contextlib
import functools
import http.client
import http.server
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import threading
import time
import typing

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("ADRIATICUM", ROOT / "target" / "release" / "adriaticum")).resolve()

# Limits for a machine that is busy with other work. Nothing waits this long on a quiet one.
START_SECONDS = 60
STOP_SECONDS = 60
REPLY_SECONDS = 60


# See Runtime.
SILENT = object()


class Call(typing.NamedTuple):
    """A request as the runtime received it. Header names are in lower case."""

    path: str
    headers: dict
    body: dict


class Runtime(http.server.ThreadingHTTPServer):
    """A scripted inference runtime.

    `answer` maps a request body to a status and a reply. Assign a function to it, or override it. A reply is JSON, or
    bytes, or a list of bytes that are sent half a second apart. The status None hangs up without a reply; SILENT waits
    until the caller does, and notes in `ended` when that was.
    """

    daemon_threads = True
    # All workers may connect at once. With a shorter backlog the kernel delays or drops some of them.
    request_queue_size = 128

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body are two writes: with Nagle's algorithm the second waits 40 ms for an acknowledgement.
        disable_nagle_algorithm = True

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.server.calls.append(Call(self.path, headers, body))
            status, reply = self.server.answer(body)
            if status is SILENT:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.recv(1)  # returns at the caller's end
                self.server.ended.append(time.monotonic())
            elif status is None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self.send(status, reply)

        def do_GET(self):
            self.send(*self.server.describe(self.path))

        def send(self, status, reply):
            pieces = reply if isinstance(reply, list) else [reply if isinstance(reply, bytes) else json.dumps(reply).encode()]
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(sum(map(len, pieces))))
            try:
                self.end_headers()
                for index, piece in enumerate(pieces):
                    time.sleep(0.5 if index else 0)
                    self.wfile.write(piece)
            except OSError:  # the caller has hung up
                self.close_connection = True

        def log_message(self, *_):
            """Keeps the output free for what a test reports."""

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), self.Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.calls = []
        self.ended = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def answer(self, body):
        return self.echo(body)

    def describe(self, _path):
        """Answers a GET, such as for the list of models. Assign a function to it, or override it."""
        return 200, {"status": "ok"}

    def good(self, _body):
        return 200, self.completion()

    def echo(self, body):
        return 200, self.completion(body["messages"][-1]["content"])

    def held(self, gate):
        """Returns an `answer` that waits for a threading.Event."""
        return lambda body: (gate.wait(REPLY_SECONDS), self.good(body))[1]

    @staticmethod
    def completion(content="Zagreb.", finish="stop", usage=(11, 3, 14)):
        reply = {
            "id": "chatcmpl-upstream", "object": "chat.completion", "created": 1, "model": "whatever",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}],
        }
        if usage is not None:
            reply["usage"] = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), usage))
        return reply


class HalfMeasuredRuntime(Runtime):
    """Reports token figures for every other completion only."""

    def answer(self, body):
        is_measured = len(self.calls) % 2 == 1
        return 200, self.completion(body["messages"][-1]["content"], usage=(11, 3, 14) if is_measured else None)


class Service:
    """The real binary with a folder and an environment of its own.

    Keyword arguments are settings: `workers=2` becomes ADRIATICUM_WORKERS=2.
    """

    binary = BINARY
    # Where the clients of `connection` come from; None: from the service's own address.
    client_address = None

    def __init__(self, folder, runtime=None, **settings):
        self.folder = folder
        self.port = free_port()
        self.log = folder / "log"
        self.database = folder / "adriaticum.db"
        no_settings = folder / "empty.toml"
        no_settings.touch()
        if runtime:
            settings.setdefault("runtime_url", runtime.url)
        # An error of a runtime comes at once.
        settings.setdefault("runtime_wait", 0)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("ADRIATICUM")}
        self.environment |= {
            # Without it, the configuration of an installed service would be read.
            "ADRIATICUM_CONFIG": str(no_settings),
            "ADRIATICUM_LISTEN": f"127.0.0.1:{self.port}",
            "ADRIATICUM_DATABASE": str(self.database),
            **{f"ADRIATICUM_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self.process = None

    @functools.cached_property
    def key(self):
        return self.create_key("outside")

    @property
    def authorization(self):
        return f"Bearer {self.key}"

    def create_key(self, name="test", *options):
        created = self.run("keys", "create", name, *options)
        ensure(created.returncode == 0, f"keys create failed: {created.stderr}")
        return created.stdout.strip()

    def run(self, *arguments, **options):
        """Runs another command of the program with the service's settings."""
        command = [str(part) for part in (self.binary, *arguments)]
        return subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=REPLY_SECONDS, **options)

    def start(self):
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [self.binary, "serve"], env=self.environment, cwd=self.folder, stdout=log, stderr=log)

    def __enter__(self):
        self.start()
        self.wait_until_it_listens()
        return self

    def __exit__(self, *_):
        """Ends what a failure left running."""
        self.kill()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self, number=signal.SIGTERM):
        """Sends a signal, waits for the end of the process and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_SECONDS)

    def wait_until_it_listens(self):
        def is_listening():
            ensure(self.process.poll() is None, f"the service ended at its start:\n{self.last_logged()}")
            return listens(self.port)

        ensure(until(is_listening, START_SECONDS), f"the service did not listen within {START_SECONDS} s:\n{self.last_logged()}")

    def wait_until_it_answers(self):
        """Waits for the end of the start: the service listens before it opens the database. Leaves no row."""
        self.wait_until_it_listens()
        try:
            self.fetch("/", "localhost")
        except (OSError, http.client.HTTPException) as error:
            raise SystemExit(f"the service did not answer after its start: {error!r}\n{self.last_logged()}")

    def ensure_it_still_answers(self):
        self.ensure_it_did_not_panic()
        ensure(self.process.poll() is None, f"the service ended during the run:\n{self.last_logged()}")
        status, text = self.complete()
        ensure(status == 200, f"the service does not answer a good request: {status} {text}")

    def connection(self, timeout=REPLY_SECONDS):
        """An HTTP client for the service, not connected yet."""
        source = self.client_address and (self.client_address, 0)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout, source_address=source)

    def ask(self, body):
        """Sends a body on a connection of its own, and returns the response, with its `text`."""
        with contextlib.closing(self.connection()) as connection:
            return ask(connection, self.key, body)

    def complete(self):
        """Runs a completion; returns the status and the body's text."""
        response = self.ask(conversation("Still there?"))
        return response.status, response.text

    def fetch(self, path, host="console.localhost", **headers):
        with contextlib.closing(self.connection()) as connection:
            connection.request("GET", path, headers={"Host": host} | headers)
            return read(connection)

    def status(self, name):
        """Returns a number from /proc/PID/status, such as Threads or VmRSS (in KiB)."""
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0])
        raise KeyError(name)

    def ensure_it_verifies(self):
        verified = self.run("usage", "verify")
        ensure(verified.returncode == 0, f"the ledger does not verify: {verified.stdout}{verified.stderr}")

    def ensure_it_ends_well(self):
        code = self.stop()
        ensure(code == 0, f"the service ended with {code} on SIGTERM:\n{self.last_logged()}")
        self.ensure_it_did_not_panic()

    def ensure_it_did_not_panic(self):
        panics = [line for line in self.logged().splitlines() if "panicked" in line]
        ensure(not panics, "\n".join(["the service panicked:", *panics]))

    def logged(self):
        return self.log.read_text(errors="replace")

    def last_logged(self):
        return "\n".join(self.logged().splitlines()[-20:])


def conversation(content, **members):
    return {"model": "adriaticum", "messages": [{"role": "user", "content": content}]} | members


def send(connection, key, body, **headers):
    headers |= {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)


def read(connection):
    """Returns the response, with its `text`."""
    response = connection.getresponse()
    response.text = response.read().decode()
    return response


def ask(connection, key, body, **headers):
    send(connection, key, body, **headers)
    return read(connection)


def free_port():
    """Returns a port below the range of outgoing connections, so that nothing takes it before the service does."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def listens(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def until(condition, seconds=REPLY_SECONDS):
    """Waits for a condition; returns whether it became true in time."""
    end = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return bool(is_true)


def ensure(condition, otherwise):
    if not condition:
        raise SystemExit(otherwise)
