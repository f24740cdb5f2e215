"""Starts the service as an operator would and talks to it in bytes. Standard library only."""

import contextlib
import functools
import json
import pathlib
import re
import socket
import sqlite3
import sys
import tempfile
import threading
import time

import postgres

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "outside"))
from service import REPLY_SECONDS, SILENT, STOP_SECONDS, Runtime, Service, until  # noqa: E402, F401
from tls import NAME, Secured  # noqa: E402, F401

ID = re.compile(r"^chatcmpl_[0-9a-fA-F]{32}$")
DATE = re.compile(r"^[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT$")
STATUS = {
    "invalid_request": 400, "invalid_api_key": 401, "insufficient_permission": 403, "not_found": 404,
    "payload_too_large": 413, "inference_error": 502, "search_unavailable": 503, "service_unavailable": 503,
}
MAX_BODY = 262_144


def beside(case):
    """Marks a case that has a service of its own and mostly waits for a deadline: it runs beside the others."""
    case.runs_beside = True
    return case


class Unreachable:
    """An address that refuses every connection: its port is bound, but nothing listens."""

    def __init__(self):
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"


class Reply:
    """One response, and the bytes that came after it."""

    def __init__(self, status, headers, body, rest):
        self.status, self.headers, self.body, self.rest = status, headers, body, rest

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def text(self):
        return self.body.decode()

    def __repr__(self):
        return f"<{self.status} {self.body[:200]!r}>"


class Server(Service):
    """The service under test, configured by environment alone, in a temporary folder. A `plain` one never uses TLS."""

    # A certificate and clients that trust it: with it, every server and every connection uses TLS.
    secured = None
    tls_versions = []
    # A PostgreSQL server: with it, every service has its database there.
    postgres = None

    def __init__(self, runtime=None, plain=False, **settings):
        if plain:
            self.secured = None
        self.temporary = tempfile.TemporaryDirectory(prefix="adriaticum-")
        settings = {"api_hosts": "api.test,127.0.0.1", "console_host": "console.test"} | settings
        if self.secured:
            settings = self.secured.settings | settings
        if self.postgres and "database" not in settings:
            settings["database"] = self.postgres.new_database()
        super().__init__(pathlib.Path(self.temporary.name), runtime, **settings)
        self.database = self.environment["ADRIATICUM_DATABASE"]

    def __exit__(self, kind, *_):
        """A server that runs to the end of its case must also stop cleanly."""
        try:
            code = self.stop()
        finally:
            self.kill()
        assert kind or code in (0, -9), f"the service ended with {code}: {self.last_logged()}"

    def cli(self, *arguments, check=True, **options):
        done = self.run(*arguments, **options)
        assert not check or done.returncode == 0, f"{arguments}: exit {done.returncode}: {done.stderr}"
        return done

    def keys(self):
        """Returns what `keys list` shows, by name."""
        return {key["name"]: key for key in json.loads(self.cli("keys", "list", "--json").stdout)}

    def rows(self, sql, *arguments):
        if self.postgres:
            return postgres.query(self.database, sql, *arguments)
        with contextlib.closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as database:
            return database.execute(sql, arguments).fetchall()

    def change(self, sql):
        """Does something to the tables that the program itself would not do."""
        if self.postgres:
            postgres.psql(self.database, sql)
        else:
            with contextlib.closing(sqlite3.connect(self.database)) as database, database:
                database.execute(sql)

    def files_with(self, text):
        """Returns the files of the server's folder (database, log) that contain a text."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return [path for path in files if text.encode() in path.read_bytes()]

    @functools.cached_property
    def metrics_key(self):
        return self.create_key("watch", "--permission", "metrics")

    def metric(self, series):
        """Returns the value of a series, such as `adriaticum_queue_length`."""
        reply = self.get("/metrics", self.metrics_key)
        assert reply.status == 200, reply
        values = [line.removeprefix(f"{series} ") for line in reply.body.decode().splitlines() if line.startswith(f"{series} ")]
        assert len(values) == 1, f"{series} in {reply.body.decode()}"
        return float(values[0])

    def connect(self, timeout=REPLY_SECONDS, source=None):
        """Connects, from another address of this host if `source` names one."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout, source and (source, 0))
        if self.secured:
            connection = self.secured.client.wrap_socket(connection, server_hostname=NAME)
            self.tls_versions.append(connection.version())
        return connection

    def raw(self, data, closes=False, source=None):
        """Sends bytes and reads one response. With `closes`, the server must then close the connection."""
        with self.connect(source=source) as connection:
            with contextlib.suppress(OSError):  # the server may answer and close before it has read everything
                connection.sendall(data)
            reply = read_reply(connection)
            assert not closes or ends(connection), f"{reply}, and the connection is open after {data[:80]!r}"
            return reply

    def post(self, body, key=None, **parts):
        return self.raw(request(body, key, **parts))

    def get(self, path, key=None, host="console.test"):
        return self.raw(request(b"", key, host=host, path=path, method="GET", content_type=None))


@contextlib.contextmanager
def held_server(**settings):
    """Yields a server, its runtime, a gate, and a function that sends a request. Those that say `held` wait there for the gate."""
    runtime, gate = Runtime(), threading.Event()

    def answer(body):
        content = body["messages"][-1]["content"]
        assert "held" not in content or gate.wait(REPLY_SECONDS)
        return runtime.echo(body)

    runtime.answer = answer
    with Server(runtime, **settings) as server, contextlib.ExitStack() as connections:
        def send(key, content):
            connection = connections.enter_context(server.connect())
            connection.sendall(request(content if isinstance(content, bytes) else chat(content), key))
            return connection

        try:
            yield server, runtime, gate, send
        finally:
            gate.set()


def request(body, key=None, host="api.test", path="/v1/chat/completions", headers=(), method="POST",
            content_type="application/json", framing=None, version="HTTP/1.1"):
    """Returns the bytes of one request; `framing` replaces its Content-Length line."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    lines = [f"{method} {path} {version}", f"Host: {host}", framing or f"Content-Length: {len(body)}"]
    if content_type:
        lines.append(f"Content-Type: {content_type}")
    if key:
        lines.append(f"Authorization: Bearer {key}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(body, key, size=7, extension="", last="0\r\n\r\n", **parts):
    """Returns the bytes of one request with a chunked body."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    pieces = [raw[start:start + size] for start in range(0, len(raw), size)]
    data = b"".join(f"{len(piece):x}{extension}\r\n".encode() + piece + b"\r\n" for piece in pieces) + last.encode()
    return request(data, key, framing="Transfer-Encoding: chunked", **parts)


def read_reply(connection, data=b""):
    """Reads one response; `data` is what came after the one before it. Status 0: the server closed the connection."""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return Reply(0, {}, data, b"")
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    assert first.startswith("HTTP/1.1 "), f"no response: {data[:200]!r}"
    status = int(first.split(" ")[1])
    headers = {}
    for name, _, value in (line.partition(":") for line in lines):
        # Repeated headers, as only Set-Cookie may be, are joined by a line break.
        headers[name.lower()] = "\n".join([*filter(None, [headers.get(name.lower())]), value.strip()])
    if status == 100:
        return read_reply(connection, rest)
    length = int(headers.get("content-length", 0))
    while len(rest) < length and (piece := connection.recv(65536)):
        rest += piece
    return Reply(status, headers, rest[:length], rest[length:])


def ends(connection):
    """Returns whether the server closes the connection and sends nothing more."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def chat(content="What is the capital of Croatia?", **members):
    return {"model": "adriaticum", "messages": [{"role": "user", "content": content}]} | members


def turns(*contents):
    return {"model": "adriaticum", "messages": [{"role": "user", "content": content} for content in contents]}


def padded(size, content="x"):
    """Returns a valid body of exactly `size` bytes, padded with white space."""
    raw = json.dumps(chat(content)).encode()
    return raw[:-1] + b" " * (size - len(raw)) + b"}"


def is_error(reply, code):
    """Asserts that a reply is exactly the envelope of part 2.5 with this code, and returns the error object."""
    assert reply.status == STATUS[code], f"expected {STATUS[code]} {code}, got {reply}"
    assert reply.headers.get("content-type", "").split(";")[0] == "application/json", reply.headers
    document = reply.json
    assert set(document) == {"error"}, document
    error = document["error"]
    assert set(error) == {"code", "message", "request_id"}, document
    assert error["code"] == code, document
    assert isinstance(error["message"], str) and error["message"], document
    assert ID.match(error["request_id"]), document
    assert reply.headers.get("x-request-id") == error["request_id"], reply.headers
    assert DATE.match(reply.headers.get("date", "")), reply.headers
    if reply.status == 401:
        assert reply.headers.get("www-authenticate", "").startswith("Bearer"), reply.headers
    if reply.status == 503:
        assert reply.headers.get("retry-after"), reply.headers
    return error


def is_completion(reply, content="Zagreb.", finish="stop", usage=(11, 3, 14)):
    """Asserts that a reply is exactly the completion object of part 2.2, and returns it."""
    assert reply.status == 200, f"expected 200, got {reply}"
    assert reply.headers.get("content-type", "").split(";")[0] == "application/json", reply.headers
    document = reply.json
    assert reply.headers.get("x-request-id") == document["id"], reply.headers
    assert DATE.match(reply.headers.get("date", "")), reply.headers
    assert set(document) == {"id", "object", "created", "model", "choices", "usage"}, document
    assert ID.match(document["id"]) and document["object"] == "chat.completion", document
    assert document["model"] == "adriaticum", document
    assert isinstance(document["created"], int) and abs(document["created"] - time.time()) < 120, document
    assert document["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}], document
    figures = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), usage))
    assert document["usage"] == figures, f"usage {document['usage']}, the runtime measured {figures}"
    return document
