"""The subjects of the measurements: an upstream that answers at once, proxies in front of it, and our gateway.

A subject is a program that listens on a port. It runs in its own session, so that all its processes can be found.
"""

import datetime
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "outside"))
from service import BINARY, ROOT, Service, free_port  # noqa: E402

from measure import Unfit, machine  # noqa: E402

START_SECONDS = 120
# More than 256 clients need, so that no request is shed.
QUEUE = 512
# nginx and HAProxy are configured to use all cores, as the others do by default.
CORES = os.cpu_count()

ANSWER = json.dumps({
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1700000000, "model": "adriaticum",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Zagreb."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
})
QUESTION = json.dumps({"model": "adriaticum", "messages": [{"role": "user", "content": "The capital of Croatia?"}]})

# A benchmark that is ended by SIGTERM ends its children.
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


class Subject:
    """A program under test, and the request that wrk sends to it."""

    def __init__(self, name, folder, command, port, environment=None, headers=None, size=(), version=""):
        self.name, self.command, self.port, self.version = name, command, port, version
        self.folder = folder
        self.environment = os.environ if environment is None else environment
        self.headers = {"Content-Type": "application/json", **(headers or {})}
        self.size = sum(map(size_of, size)) / 2**20
        self.script = folder / "post.lua"
        self.session = None
        self.ask(QUESTION)

    def ask(self, body):
        """Sets the body of all further requests."""
        self.body = body
        # From a file, because Lua's quoted strings have other rules.
        (self.folder / "body.json").write_text(body)
        headers = "".join(f"wrk.headers['{name}'] = '{value}'\n" for name, value in self.headers.items())
        self.script.write_text(
            f"wrk.method = 'POST'\nwrk.body = io.open('{self.folder}/body.json'):read('*a')\n{headers}")

    def start(self):
        """Starts it, and returns the milliseconds from exec to the first 200."""
        with (self.folder / "log").open("ab") as log:
            began = time.perf_counter()
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True)
        self.session = self.process.pid
        while self.first_line() != b"HTTP/1.1 200":
            if self.process.poll() is not None or time.perf_counter() > began + START_SECONDS:
                self.stop()
                output = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise Unfit(f"{self.name} did not give a first answer:\n{output}")
            time.sleep(0.0002)
        return (time.perf_counter() - began) * 1000

    def first_line(self):
        """Returns the first bytes of its answer to a request, or none if it does not answer yet."""
        headers = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(self.body)}\r\n\r\n"
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=START_SECONDS) as client:
                client.sendall((head + self.body).encode())
                return client.recv(65536)[:12]
        except OSError:
            return b""

    def other_sessions(self):
        """The sessions of other programs that work for it."""
        return ()

    def stop(self):
        """Ends all its processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.session, number)
                self.process.wait(10)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()


def size_of(path):
    """Returns the size of a file, or of all files in a folder, in bytes."""
    path = pathlib.Path(path)
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def version_of(*command):
    """Returns the first version number that a command prints."""
    output = subprocess.run(command, capture_output=True, text=True)
    return re.search(r"\d+\.\d+[\w.+~-]*", output.stdout + output.stderr)[0]


def conditions():
    """Returns what every published result says of its origin."""
    return {"build": version_of(BINARY, "--version"), "machine": machine(), "made": datetime.date.today().isoformat()}


def origin(result):
    return f"Adriaticum {result['build']}, {result['machine']}, {result['made']}"


def nginx(name, folder, what, workers):
    """Returns nginx with one server, and its temporary files in the folder."""
    folder.mkdir()
    port = free_port()
    (folder / "nginx.conf").write_text(f"""
        daemon off; worker_processes {workers}; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
        events {{ worker_connections 4096; }}
        http {{ access_log off; keepalive_requests 1000000000; client_body_temp_path {folder}/body;
            proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u;
            scgi_temp_path {folder}/s; {what.replace("LISTEN", f"listen 127.0.0.1:{port};")} }}""")
    return Subject(name, folder, ["nginx", "-e", folder / "nginx.log", "-c", folder / "nginx.conf"], port,
                   size=[shutil.which("nginx")], version=version_of("nginx", "-v"))


def upstream(folder):
    """Returns nginx with the same completion for every call: the inference runtime, and the subject `direct`."""
    answer = f"server {{ LISTEN default_type application/json; location / {{ return 200 '{ANSWER}'; }} }}"
    subject = nginx("direct", folder / "direct", answer, workers=1)
    subject.url = f"http://127.0.0.1:{subject.port}/v1"
    return subject


def nginx_proxy(folder, upstream):
    return nginx("nginx, plain proxy", folder / "nginx", f"""
        upstream runtime {{ server 127.0.0.1:{upstream.port}; keepalive 256; keepalive_requests 1000000000; }}
        server {{ LISTEN location / {{ proxy_pass http://runtime; proxy_http_version 1.1;
            proxy_set_header Connection ""; }} }}""", workers=CORES)


def haproxy(folder, upstream):
    folder = folder / "haproxy"
    folder.mkdir()
    port = free_port()
    (folder / "haproxy.cfg").write_text(f"""
global
    nbthread {CORES}
    maxconn 8192
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    http-reuse always
frontend front
    bind 127.0.0.1:{port}
    default_backend runtime
backend runtime
    server runtime 127.0.0.1:{upstream.port}
""")
    return Subject("HAProxy", folder, ["haproxy", "-db", "-f", folder / "haproxy.cfg"], port,
                   size=[shutil.which("haproxy")], version=version_of("haproxy", "-v"))


class Ours(Subject):
    """A build of the gateway, with its own database on the disk that has the build."""

    def __init__(self, name, folder, upstream, binary=BINARY, environment=None, **settings):
        folder.mkdir()
        self.service = Service(folder, upstream, **{"queue": QUEUE, "log_level": "warn", **settings})
        self.service.binary = binary
        super().__init__(
            name, folder, [binary, "serve"], self.service.port, self.service.environment | (environment or {}),
            {"Authorization": self.service.authorization}, [binary], version_of(binary, "--version"))


def without_syncing(folder):
    """Returns an environment that turns syncing off: a preloaded library whose fsync and fdatasync do nothing."""
    source, library = folder / "no_sync.c", folder / "no_sync.so"
    source.write_text("int fsync(int fd) { (void)fd; return 0; }\nint fdatasync(int fd) { (void)fd; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_PRELOAD": str(library)}
