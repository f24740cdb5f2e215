"""Settings: the file, the environment, and what is refused at start."""

import contextlib
import os
import pathlib
import socket
import subprocess
import tempfile

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


def a_wrong_variable_or_file_is_named():
    """Every message is in tests/wrong_configurations.txt."""
    for name, value in (("workers", "many"), ("runtime_url", "http://x"), ("runtime_ca", "/nonexistent.pem"),
                        ("time_zone", "Europe/../Zagreb"), ("search_grounding", "always")):
        _refused_start(Server(RUNTIME, **{name: value}), f"ADRIATICUM_{name.upper()}=")
    server = Server(RUNTIME)
    for text, name in (("[runtime]\nnonsense = 1", ":2: runtime.nonsense"), ("workers =", ":1: ")):
        path = _write(server, text)
        _refused_start(server, f"{path}{name}", arguments=("--config", path))
    _refused_start(server, "/nonexistent.toml", arguments=("--config", "/nonexistent.toml"))


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


def runtime_url_is_a_string_or_an_array():
    runtime = Runtime()
    for value in (f'"{runtime.url}"', f'["{runtime.url}"]'):
        server = Server()
        server.environment["ADRIATICUM_CONFIG"] = str(_write(server, f"[runtime]\nurl = {value}\n"))
        with server:
            assert server.post(chat(), server.create_key()).status == 200, value


def an_unknown_variable_is_a_warning():
    with Server(RUNTIME, worker=3) as server:
        warning = "unknown variable in the environment: ADRIATICUM_WORKER (did you mean"
        assert until(lambda: warning in server.logged()), server.logged()


def the_log_level_limits_the_log():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME, log_level="error") as server:
        is_completion(server.post(chat(), server.create_key()))
        server.stop()
        assert server.logged() == "", server.logged()




def forwarded_addresses_of_trusted_proxies_are_logged():
    forwarded = [("X-Forwarded-For", "192.0.2.1, 203.0.113.7")]
    for trusted, address in (("127.0.0.0/8", "client=203.0.113.7"), ("10.0.0.0/8", "client=127.0.0.1"), ("", "client=127.0.0.1")):
        with Server(RUNTIME, trusted_proxies=trusted) as server:
            error = is_error(server.post(chat(), headers=forwarded), "invalid_api_key")
            line = f"{error['request_id']} {address}"
            assert until(lambda: line in server.logged()), (line, server.logged())
            # What is broken has no head that could be believed.
            is_error(server.raw(b"nonsense\n\n"), "invalid_request")
            assert until(lambda: " client=127.0.0.1 status=400" in server.logged()), server.logged()


def a_unix_socket():
    """It has the mode of the setting, whatever the umask is. What a killed service left behind is no obstacle."""
    RUNTIME.answer = RUNTIME.good
    for umask, settings, mode in ((0o000, {}, 0o660), (0o077, {"socket_mode": "0666"}, 0o666)):
        server = Server(RUNTIME, **settings)
        path = server.folder / "api.sock"
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(str(path))
        server.environment["ADRIATICUM_LISTEN"] = f"unix:{path}"
        before = os.umask(umask)
        server.start()
        os.umask(before)
        try:
            assert until(lambda: "listening on unix:" in server.logged()), server.last_logged()
            assert path.stat().st_mode & 0o777 == mode, oct(path.stat().st_mode)
            key = server.create_key()
            is_completion(_post(path, key))
            _refused_start(Server(RUNTIME, listen=f"unix:{path}"), f"{path}: another program uses this address")
            is_completion(_post(path, key))
            assert server.stop() == 0 and not path.exists(), "the socket's file is still there"
        finally:
            server.kill()


def only_a_socket_on_which_no_process_listens_is_replaced():
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as sockets:
        def bound(name, kind):
            made = sockets.enter_context(socket.socket(socket.AF_UNIX, kind))
            made.bind(f"{folder}/{name}")
            return made

        bound("datagrams", socket.SOCK_DGRAM)
        # A service that hangs: its backlog is full.
        bound("busy", socket.SOCK_STREAM).listen(0)
        sockets.enter_context(socket.socket(socket.AF_UNIX)).connect(f"{folder}/busy")
        pathlib.Path(folder, "file").touch()
        for name, message in (("datagrams", "Protocol wrong type for socket"), ("busy", "another program uses this address"),
                              ("file", "a file that is not a socket is there")):
            _refused_start(Server(RUNTIME, listen=f"unix:{folder}/{name}"), message)
            assert pathlib.Path(folder, name).exists(), f"{name} was removed"


def localhost_is_both_loopback_addresses_or_none():
    """A local user who listened on [::1], where the service did not, got the keys of clients that use `localhost`."""
    RUNTIME.answer = RUNTIME.good
    server = Server(RUNTIME)
    server.environment["ADRIATICUM_LISTEN"] = f"localhost:{server.port}"
    with server:
        is_completion(server.post(chat(), server.create_key()))
        socket.create_connection(("::1", server.port)).close()
        for address in ("127.0.0.1", "[::1]"):
            assert f"://{address}:{server.port}\n" in server.logged(), server.logged()
        assert server.logged().count(f"console at {'https' if Server.secured else 'http'}://console.test:{server.port}/\n") == 1
        assert "other hosts can reach" not in server.cli("check", check=False).stdout
    with socket.create_server(("::1", server.port), family=socket.AF_INET6):
        taken = f"://[::1]:{server.port}: another program uses this address"
        _refused_start(server, taken, "localhost is both 127.0.0.1 and [::1]")


def sockets_passed_by_systemd_replace_listen():
    RUNTIME.answer = RUNTIME.good
    server = Server(RUNTIME)
    path = server.folder / "passed.sock"
    with socket.socket(socket.AF_UNIX) as unix, socket.create_server(("127.0.0.1", 0)) as tcp:
        unix.bind(str(path))
        unix.listen()
        server.port = tcp.getsockname()[1]
        # Through two other descriptors, because the present numbers may be the ones that are needed.
        script = (f'exec 203<&{unix.fileno()} 204<&{tcp.fileno()}; exec 3<&203 4<&204; '
                  'LISTEN_PID=$$ LISTEN_FDS=2 exec "$0" serve')
        with server.log.open("wb") as log:
            server.process = subprocess.Popen(["bash", "-c", script, BINARY], env=server.environment, stdout=log, stderr=log,
                                              pass_fds=[unix.fileno(), tcp.fileno()])
        try:
            key = server.create_key()
            is_completion(_post(path, key))
            is_completion(server.post(chat(), key))
            assert server.stop() == 0 and os.path.exists(path), "the socket belongs to its owner"
            socket.create_connection(("127.0.0.1", server.port)).close()
        finally:
            server.kill()
