"""What is measured: an instant upstream, what stands before it, and ourselves.

A subject is a program that listens on a port. It runs in a session of its own, so that all its processes are found.
"""

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

from measure import Unfit  # noqa: E402

START_SECONDS = 120
# More than 128 clients need, so that none is shed: what is measured is the work, not the refusal of it.
QUEUE = 512
# nginx and HAProxy are told to use as much of the machine as the others do by themselves.
CORES = os.cpu_count()

ANSWER = json.dumps({
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1700000000, "model": "adriaticum",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Zagreb."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
})
QUESTION = json.dumps({"model": "adriaticum", "messages": [{"role": "user", "content": "The capital of Croatia?"}]})

# Ended from outside, a benchmark ends what it has started.
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


class Subject:
    """A program under test, with what wrk sends to it."""

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
        """Sets the body of every request, from now on."""
        self.body = body
        # From a file, as Lua's quoted strings have rules of their own.
        (self.folder / "body.json").write_text(body)
        headers = "".join(f"wrk.headers['{name}'] = '{value}'\n" for name, value in self.headers.items())
        self.script.write_text(
            f"wrk.method = 'POST'\nwrk.body = io.open('{self.folder}/body.json'):read('*a')\n{headers}")

    def start(self):
        """Starts it; the milliseconds from exec to the first 200."""
        with (self.folder / "log").open("ab") as log:
            began = time.perf_counter()
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True)
        self.session = self.process.pid
        while self.first_line() != b"HTTP/1.1 200":
            if self.process.poll() is not None or time.perf_counter() > began + START_SECONDS:
                self.stop()
                told = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise Unfit(f"{self.name} did not get as far as its first answer:\n{told}")
            time.sleep(0.0002)
        return (time.perf_counter() - began) * 1000

    def first_line(self):
        """The beginning of its answer to a request; nothing, where it does not answer yet."""
        headers = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(self.body)}\r\n\r\n"
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=START_SECONDS) as client:
                client.sendall((head + self.body).encode())
                return client.recv(65536)[:12]
        except OSError:
            return b""

    def stop(self):
        """Ends it with all its processes."""
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
    """Bytes on the disk, of a file or of all in a folder."""
    path = pathlib.Path(path)
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def told_version(*command):
    """The first thing like a version in what a command says of itself."""
    told = subprocess.run(command, capture_output=True, text=True)
    return re.search(r"\d+\.\d+[\w.+~-]*", told.stdout + told.stderr)[0]


def nginx(name, folder, what, workers):
    """nginx with one server; its temporary files are in the folder given."""
    folder.mkdir()
    port = free_port()
    (folder / "nginx.conf").write_text(f"""
        daemon off; worker_processes {workers}; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
        events {{ worker_connections 4096; }}
        http {{ access_log off; keepalive_requests 1000000000; client_body_temp_path {folder}/body;
            proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u;
            scgi_temp_path {folder}/s; {what.replace("LISTEN", f"listen 127.0.0.1:{port};")} }}""")
    return Subject(name, folder, ["nginx", "-e", folder / "nginx.log", "-c", folder / "nginx.conf"], port,
                   size=[shutil.which("nginx")], version=told_version("nginx", "-v"))


def upstream(folder):
    """nginx, which answers every call with the same completion: the inference runtime, and the direct call."""
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
                   size=[shutil.which("haproxy")], version=told_version("haproxy", "-v"))


class Ours(Subject):
    """A build of the service, with a database of its own on the disk that holds the build."""

    def __init__(self, name, folder, upstream, binary=BINARY, environment=None, **settings):
        folder.mkdir()
        self.service = Service(folder, upstream, **{"queue": QUEUE, "log_level": "warn", **settings})
        self.service.binary = binary
        super().__init__(
            name, folder, [binary, "serve"], self.service.port, self.service.environment | (environment or {}),
            {"Authorization": self.service.authorization}, [binary], told_version(binary, "--version"))


def without_syncing(folder):
    """The environment that turns syncing off from outside: a library whose two calls for it do nothing."""
    source, library = folder / "no_sync.c", folder / "no_sync.so"
    source.write_text("int fsync(int fd) { (void)fd; return 0; }\nint fdatasync(int fd) { (void)fd; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_PRELOAD": str(library)}
