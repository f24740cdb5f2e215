"""Settings: the file, the environment, and what is refused at start."""

import os
import socket
import subprocess

from harness import REPLY_SECONDS, Runtime, Server, chat, is_completion, is_error, read_reply, request, until
from service import BINARY
from shared import RUNTIME, SERVER


def _refused_start(server, *parts, arguments=()):
    """Asserts that `serve` ends at once, and that its message contains each of the parts."""
    done = server.cli(*arguments, "serve", check=False)
    assert done.returncode in (1, 2), done
    assert done.stderr.strip() and "panicked" not in done.stderr, done
    assert all(part in done.stderr for part in parts), f"{parts} expected in {done.stderr!r}"


def _post(path, key):
    """Sends a request over a Unix socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(REPLY_SECONDS)
        connection.connect(str(path))
        connection.sendall(request(chat(), key))
        return read_reply(connection)


def _write(server, text):
    path = server.folder / "adriaticum.toml"
    path.write_text(text)
    return path


def a_wrong_variable_is_named():
    for name, value in (("listen", "nonsense"), ("socket_mode", "0999"), ("workers", "0"), ("workers", "many"), ("queue", "-1"),
                        ("max_connections", "0"), ("buffer_limit", "1048575"), ("buffer_limit", "64 MB"),
                        ("compatibility", "loose"), ("log_level", "loud"),
                        ("trusted_proxies", "nobody"), ("runtime_url", "ftp://x"), ("runtime_url", "http://x"), ("runtime_timeout", "soon"), ("runtime_ca", "/nonexistent.pem"),
                        ("time_zone", "CET"), ("time_zone", "Europe/../Zagreb"), ("database_password_file", "/nonexistent"), ("runtime_api_key_file", "/nonexistent"),
                        ("search_url", "ftp://x"), ("search_grounding", "sometimes"), ("search_results", "0"),
                        ("usage_retention_days", "-1")):
        variable = f"ADRIATICUM_{name.upper()}"
        _refused_start(Server(RUNTIME, **{name: value}), variable)


def every_problem_is_listed_at_once():
    server = Server(RUNTIME, workers="many", queue="-1")
    path = _write(server, 'max_connections = 0\nworker = 3\n[runtime]\napi_key = "two words"\n')
    parts = (f"{path}:1: max_connections = 0: ", f"{path}:2: worker: ", "workers?", f"{path}:4: runtime.api_key: ",
             'ADRIATICUM_WORKERS="many": ', 'ADRIATICUM_QUEUE="-1": ')
    _refused_start(server, *parts, arguments=("--config", path))
    for command in (["serve"], ["check"], ["keys", "list"]):
        done = server.cli("--config", path, *command, check=False)
        assert done.returncode == 2 and all(part in done.stderr for part in parts), done
        assert "two words" not in done.stderr, done


def a_start_that_cannot_work_is_refused():
    _refused_start(Server(RUNTIME, database="/dev/null/x.db"))
    _refused_start(Server(RUNTIME, listen=f"127.0.0.1:{SERVER.port}"))
    _refused_start(Server(RUNTIME, search_grounding="always"), "search.url")
    _refused_start(Server(RUNTIME, tls_cert="/nonexistent.pem", tls_key="/nonexistent.pem"))
    lone = Server(RUNTIME)
    lone.environment.pop("ADRIATICUM_TLS_KEY", None)
    lone.environment["ADRIATICUM_TLS_CERT"] = "/nonexistent.pem"
    _refused_start(lone, "tls.key")


def the_environment_overrides_the_file():
    RUNTIME.answer = RUNTIME.good
    server = Server(RUNTIME)
    path = _write(server, 'api_hosts = ["file.test"]\n[runtime]\nmodel = "of the file"\n')
    server.environment["ADRIATICUM_CONFIG"] = str(path)
    with server:
        key = server.create_key()
        is_completion(server.post(chat(), key))
        assert RUNTIME.calls[-1].body["model"] == "of the file", RUNTIME.calls[-1]
        is_error(server.post(chat(), key, host="file.test"), "not_found")


def a_wrong_file_is_named():
    server = Server(RUNTIME)
    for text, name in (("nonsense = 1", "nonsense"), ("[runtime]\nnonsense = 1", "nonsense"),
                       ('workers = "many"', "workers"), ("workers = 0", "workers"), ("workers =", "")):
        path = _write(server, text)
        _refused_start(server, name, str(path), arguments=("--config", path))
    _refused_start(server, "/nonexistent.toml", arguments=("--config", "/nonexistent.toml"))


def runtime_url_is_a_string_or_an_array():
    runtime = Runtime()
    for value in (f'"{runtime.url}"', f'["{runtime.url}"]'):
        server = Server()
        server.environment["ADRIATICUM_CONFIG"] = str(_write(server, f"[runtime]\nurl = {value}\n"))
        with server:
            assert server.post(chat(), server.create_key()).status == 200, value


def an_unknown_variable_is_a_warning():
    with Server(RUNTIME, worker=3) as server:
        assert until(lambda: "ADRIATICUM_WORKER" in server.logged()), server.logged()


def the_log_level_limits_the_log():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME, log_level="error") as server:
        is_completion(server.post(chat(), server.create_key()))
        server.stop()
        assert server.logged() == "", server.logged()


def connections_are_limited():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME, max_connections=4) as server:
        key = server.create_key()
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
        is_completion(server.post(chat(), key))
        [connection.close() for connection in idle]


def forwarded_addresses_of_trusted_proxies_are_logged():
    forwarded = [("X-Forwarded-For", "203.0.113.7")]
    for settings, address in (({"trusted_proxies": "127.0.0.0/8"}, "client=203.0.113.7"), ({}, "client=127.0.0.1")):
        with Server(RUNTIME, **settings) as server:
            error = is_error(server.post(chat(), headers=forwarded), "invalid_api_key")
            line = f"{error['request_id']} {address}"
            assert until(lambda: line in server.logged()), (line, server.logged())


def a_unix_socket():
    RUNTIME.answer = RUNTIME.good
    server = Server(RUNTIME)
    path = server.folder / "api.sock"
    server.environment["ADRIATICUM_LISTEN"] = f"unix:{path}"
    server.start()
    try:
        assert until(path.exists), server.last_logged()
        assert until(lambda: path.stat().st_mode & 0o777 == 0o660), oct(path.stat().st_mode)
        is_completion(_post(path, server.create_key()))
        assert server.stop() == 0 and not path.exists(), "the socket's file is still there"
    finally:
        server.kill()


def sockets_passed_by_systemd_replace_listen():
    RUNTIME.answer = RUNTIME.good
    server = Server(RUNTIME)
    path = server.folder / "passed.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        script = f'exec 3<&{listener.fileno()}; LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" serve'
        with server.log.open("wb") as log:
            server.process = subprocess.Popen(["bash", "-c", script, BINARY], env=server.environment, stdout=log, stderr=log,
                                              pass_fds=[listener.fileno()])
        try:
            is_completion(_post(path, server.create_key()))
            assert server.stop() == 0 and os.path.exists(path), "the socket belongs to its owner"
        finally:
            server.kill()
