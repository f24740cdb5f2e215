"""The real binary behind a scripted runtime, for the checks that come from outside. Standard library only."""

import contextlib
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

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("ADRIATICUM", ROOT / "target" / "release" / "adriaticum")).resolve()

START_SECONDS = 10
STOP_SECONDS = 15


class Runtime(http.server.ThreadingHTTPServer):
    """An inference runtime that says at once what it was told last."""

    daemon_threads = True
    # As many connections as all workers make at once: past it, the system makes them wait and lets some fail.
    request_queue_size = 128

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Without it, the body of every answer waits 40 ms for the other side to acknowledge the head.
        disable_nagle_algorithm = True

        def do_POST(self):
            chat = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = self.server.answer(chat)
            reply = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_):
            """Says nothing: the output is for what Schemathesis finds."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.completions = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def answer(self, chat):
        """The status and the body to answer a chat with: here its last message, said back."""
        return 200, self.completion(chat["messages"][-1]["content"])

    def completion(self, text):
        self.completions += 1
        reply = {
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]
        }
        # Every other answer is without figures, as both kinds have their place in the document.
        if self.completions % 2:
            reply["usage"] = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
        return reply


class Service:
    """The real binary, in a folder of its own."""

    def __init__(self, folder, runtime, **settings):
        self.port = free_port()
        self.log = folder / "log"
        self.database = folder / "adriaticum.db"
        no_settings = folder / "adriaticum.toml"
        no_settings.touch()
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("ADRIATICUM")}
        self.environment |= {
            # Without it, the settings of an installed service would be read.
            "ADRIATICUM_CONFIG": str(no_settings),
            "ADRIATICUM_LISTEN": f"127.0.0.1:{self.port}",
            "ADRIATICUM_DATABASE": str(self.database),
            "ADRIATICUM_RUNTIME_URL": runtime.url,
            **{f"ADRIATICUM_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self.key = self.create_key("outside")
        self.authorization = f"Bearer {self.key}"
        self.process = None

    def create_key(self, name, *options):
        created = self.run("keys", "create", name, *options)
        ensure(created.returncode == 0, f"no key could be created: {created.stderr}")
        return created.stdout.strip()

    def run(self, *arguments):
        """Another command of the same program, with the service's settings."""
        return subprocess.run([BINARY, *arguments], env=self.environment, capture_output=True, text=True)

    def start(self):
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([BINARY, "serve"], env=self.environment, stdout=log, stderr=log)

    def __enter__(self):
        self.start()
        self.wait_until_it_listens()
        return self

    def __exit__(self, *_):
        """Ends what a failure left running; after a good end there is nothing left to do."""
        self.kill()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def wait_until_it_listens(self):
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            ensure(self.process.poll() is None, f"the service ended at its start:\n{self.last_logged()}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.01)
        raise SystemExit(f"the service did not listen within {START_SECONDS} s:\n{self.last_logged()}")

    def wait_until_it_answers(self):
        """Waits until its start is over: it listens before it opens the database. The request leaves no row."""
        self.wait_until_it_listens()
        with contextlib.closing(self.connection(START_SECONDS)) as connection:
            try:
                connection.request("GET", "/")
                connection.getresponse().read()
            except (OSError, http.client.HTTPException) as error:
                raise SystemExit(f"the service did not get through its start: {error!r}\n{self.last_logged()}")

    def ensure_it_still_answers(self):
        self.ensure_it_did_not_panic()
        ensure(self.process.poll() is None, f"the service ended during the run:\n{self.last_logged()}")
        status, text = self.complete()
        ensure(status == 200, f"the service does not answer a good request: {status} {text}")

    def connection(self, timeout=10):
        """A way for requests to it, not connected yet."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def complete(self):
        """Runs a completion on a connection of its own; its status and the text of the answer."""
        with contextlib.closing(self.connection()) as connection:
            body = {"model": "adriaticum", "messages": [{"role": "user", "content": "Still there?"}]}
            headers = {"Authorization": self.authorization, "Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def status(self, name):
        """A number of the system's own account of the process, such as Threads or VmRSS (in KiB)."""
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0])
        raise KeyError(name)

    def ensure_it_ends_well(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_SECONDS)
        ensure(code == 0, f"the service ended with {code} on SIGTERM:\n{self.last_logged()}")
        self.ensure_it_did_not_panic()

    def ensure_it_did_not_panic(self):
        panics = [line for line in self.logged() if "panicked" in line]
        ensure(not panics, "\n".join(["the service panicked:", *panics]))

    def logged(self):
        return self.log.read_text(errors="replace").splitlines()

    def last_logged(self):
        return "\n".join(self.logged()[-20:])


def free_port():
    """A port below those that the system hands out, so that nothing else gets it before the service does."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def ensure(condition, otherwise):
    if not condition:
        raise SystemExit(otherwise)
