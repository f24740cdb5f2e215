"""Load, overload, start and stop."""

import contextlib
import os
import pathlib
import signal
import subprocess
import threading

from harness import (
    MAX_BODY, REPLY_SECONDS, STOP_SECONDS, Runtime, Server, chat, ends, held_server, is_completion, is_error, padded, read_reply,
    request, until)
from shared import RUNTIME

QUEUE = "adriaticum_queue_length"


def a_full_queue_sheds_at_once():
    """Two requests are processed and two wait: of ten more than the first two, eight are shed, and leave no row."""
    with held_server(workers=2, queue=2) as (server, runtime, gate, send):
        key = server.create_key()
        # A key that was accepted before may use every place.
        is_completion(server.post(chat("first"), key), "first")
        connections = [send(key, "held") for _ in range(2)]
        assert until(lambda: len(runtime.calls) == 3)
        connections += [send(key, "held") for _ in range(10)]
        for connection in connections[4:]:
            is_error(read_reply(connection), "service_unavailable")
        gate.set()
        for connection in connections[:4]:
            is_completion(read_reply(connection), "held")
        assert server.rows("SELECT count(*) FROM usage") == [(5,)], "a shed request left a row"


def _asked(runtime):
    return [call.body["messages"][-1]["content"] for call in runtime.calls]


def keys_take_turns():
    """A key with many requests delays another by one request, and loses its newest when the queue is full."""
    with held_server(workers=1, queue=8) as (server, runtime, gate, send):
        many, few = server.create_key("many"), server.create_key("few")
        for key in (many, few):
            is_completion(server.post(chat("first"), key), "first")
        running = send(many, "held")
        assert until(lambda: len(runtime.calls) == 3)
        waiting = [send(many, f"many {number}") for number in range(8)]
        assert until(lambda: server.metric(QUEUE) == 8)
        others = [send(few, f"few {number}") for number in range(2)]
        for connection in waiting[6:]:
            is_error(read_reply(connection), "service_unavailable")
        gate.set()
        is_completion(read_reply(running), "held")
        for number, connection in enumerate(waiting[:6]):
            is_completion(read_reply(connection), f"many {number}")
        for number, connection in enumerate(others):
            is_completion(read_reply(connection), f"few {number}")
        turns = ["many 0", "few 0", "many 1", "few 1", "many 2", "many 3", "many 4", "many 5"]
        assert _asked(runtime)[3:] == turns, _asked(runtime)


def a_limit_on_a_key_holds():
    """From its first request on, and after a change. The other keys use the other workers."""
    with held_server(workers=8) as (server, runtime, gate, send):
        limited, free = server.create_key("limited", "--concurrent", "2"), server.create_key("free")
        identifier = server.keys()["limited"]["id"]
        for limit in (2, 1):
            if limit == 1:
                server.cli("keys", "set", identifier, "--concurrent", "1")
            gate.clear()
            connections = [send(limited, f"held {limit}") for _ in range(6)]
            assert until(lambda: server.metric(QUEUE) == 6 - limit), f"not {limit} at once"
            # The others have left the queue, but may not have reached the runtime yet.
            assert until(lambda: _asked(runtime).count(f"held {limit}") >= limit), _asked(runtime)
            is_completion(server.post(chat("other"), free), "other")
            assert _asked(runtime).count(f"held {limit}") == limit, _asked(runtime)
            assert server.metric("adriaticum_workers_busy") == limit
            gate.set()
            for connection in connections:
                is_completion(read_reply(connection), f"held {limit}")


def a_raised_limit_starts_the_requests_that_wait_with_the_next_one():
    gates = {"first": threading.Event(), "next": threading.Event()}
    with held_server(workers=8) as (server, runtime, _gate, send):
        runtime.answer = lambda body: (gates[body["messages"][0]["content"]].wait(REPLY_SECONDS), runtime.echo(body))[1]
        key = server.create_key("limited", "--concurrent", "1")
        connections = [send(key, "first")]
        assert until(lambda: runtime.calls)
        connections += [send(key, "next") for _ in range(4)]
        assert until(lambda: server.metric(QUEUE) == 4)
        server.cli("keys", "set", server.keys()["limited"]["id"], "--concurrent", "none")
        gates["first"].set()
        assert until(lambda: len(runtime.calls) == 5), _asked(runtime)
        gates["next"].set()
        for connection in connections:
            assert read_reply(connection).status == 200


def full_bodies_of_one_key_shed_none_of_another():
    """They fill the memory. A key that holds less gets through; a key that is not known and the one that holds most do not."""
    # The sessions of TLS would take some of the memory.
    with held_server(plain=True, workers=1, buffer_limit=4 << 20) as (server, runtime, gate, send):
        most, much, few = (server.create_key(name) for name in ("most", "much", "few"))
        for key in (most, much, few):
            is_completion(server.post(chat("first"), key), "first")
        shed = lambda: server.metric('adriaticum_requests_shed_total{reason="buffer"}')  # noqa: E731
        # Each of them needs three times its body and some more: five have room.
        full = padded(MAX_BODY, "held")
        crowd = [send(most, full)]
        assert until(lambda: len(runtime.calls) == 4)
        crowd += [send(most, full) for _ in range(5)]
        assert until(lambda: shed() == 3), "three quarters of the memory are its share"
        second = [send(much, full) for _ in range(2)]
        assert until(lambda: server.metric(QUEUE) == 4)
        # There is room for two small ones; a scrape needs as much.
        is_error(server.post(padded(30_000), server.create_key("stranger")), "service_unavailable")
        assert shed() == 4, "a key that is not known displaced another"
        small = [send(few, "few") for _ in range(3)]
        assert until(lambda: shed() == 5 and server.metric(QUEUE) == 6), (shed(), server.metric(QUEUE))
        gate.set()
        assert sorted(read_reply(connection).status for connection in crowd) == [200, 200, 503, 503, 503, 503]
        assert {read_reply(connection).status for connection in second + small} == {200}


def strangers_do_not_wait_for_a_worker():
    """A key that does not exist is refused while the only worker is busy, and takes no place of a key that does."""
    with held_server(workers=1, queue=8) as (server, runtime, gate, send):
        key = server.create_key()
        is_completion(server.post(chat("first"), key), "first")
        running = [send(key, "held")]
        assert until(lambda: len(runtime.calls) == 2)
        new, another = server.create_key("new"), server.create_key("another")
        running += [send(key, "held") for _ in range(7)]
        assert until(lambda: server.metric(QUEUE) == 7)
        running.append(send(new, "held"))
        assert until(lambda: server.metric(QUEUE) == 8), "a key has no place"
        for connection in [send("adr_" + 48 * "0", "stranger") for _ in range(10)]:
            is_error(read_reply(connection), "invalid_api_key")
        # If there is no room, a new key displaces the newest of the longest lane, as a known one does.
        running.append(send(another, "held"))
        is_error(read_reply(running.pop(7)), "service_unavailable")
        gate.set()
        for connection in running:
            is_completion(read_reply(connection), "held")


def a_stop_completes_requests_in_progress_and_waiting():
    """An idle client does not delay the stop, and new connections are not answered any more."""
    def is_answered():
        with contextlib.suppress(OSError), server.connect(timeout=3) as connection:
            connection.sendall(request(chat()))
            return read_reply(connection).status

    with held_server(workers=1) as (server, runtime, gate, send), server.connect() as idle:
        idle.sendall(request(chat()))
        is_error(read_reply(idle), "invalid_api_key")
        key = server.create_key()
        connections = [send(key, "held")]
        assert until(lambda: runtime.calls)
        connections.append(send(key, "held"))
        assert until(lambda: server.metric(QUEUE) == 1), "the second request does not wait"
        server.process.send_signal(signal.SIGTERM)
        said = "[INFO] stopping: no new connections; waits for 2 requests\n"
        assert until(lambda: said in server.logged()), server.last_logged()
        assert ends(idle), "an idle connection stays open"
        assert until(lambda: not is_answered()), "a new connection is answered after SIGTERM"
        assert server.process.poll() is None, "the service ended while a request was in progress"
        gate.set()
        for connection in connections:
            reply = read_reply(connection)
            is_completion(reply, "held")
            assert reply.headers["connection"] == "close" and ends(connection), reply.headers
        assert server.process.wait(STOP_SECONDS) == 0, "SIGTERM did not lead to exit code 0"
        assert server.rows("SELECT count(*) FROM usage WHERE status = 200") == [(2,)]


def an_interrupt_stops_it_too_and_half_a_request_does_not_delay_it():
    with Server(RUNTIME) as server, server.connect() as half:
        half.sendall(b"POST /v1/chat")
        # It is read by the time that a later connection is answered.
        is_error(server.post(chat()), "invalid_api_key")
        server.process.send_signal(signal.SIGINT)
        is_error(read_reply(half), "invalid_request")
        assert server.process.wait(STOP_SECONDS) == 0


def a_second_signal_ends_it_at_once():
    with held_server() as (server, runtime, _gate, send):
        send(server.create_key(), "held")
        assert until(lambda: runtime.calls)
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: "stopping: " in server.logged())
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(STOP_SECONDS) == 1
        # What ends with the block is another one.
        server.start()
        server.wait_until_it_listens()


def a_second_serve_on_the_same_database_is_refused():
    with held_server() as (first, runtime, gate, send):
        running = send(first.create_key(), "held")
        assert until(lambda: runtime.calls)
        done = Server(Runtime(), database=first.database).cli("serve", check=False)
        # The pid, or in a shared database the address.
        named = f"127.0.0.1:{first.port}" if Server.postgres else f"another adriaticum serve uses it (pid {first.process.pid})"
        assert done.returncode == 1 and named in done.stderr, done
        assert Server.postgres or "ADRIATICUM_DATABASE" in done.stderr, "the setting is not named"
        gate.set()
        done = is_completion(read_reply(running), "held")
        assert first.rows("SELECT request_id, status FROM usage") == [(done["id"], 200)], "the first can't write any more"


def a_second_serve_on_another_name_of_the_file_is_refused():
    """Each of two services had a WAL of its own for one file, and half of the acknowledged rows were lost."""
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME) as first:
        key, database = first.create_key(), pathlib.Path(first.database)
        is_completion(first.post(chat(), key))
        link, linked = first.folder / "link.db", first.folder / "linked"
        os.link(database, link)
        linked.mkdir()
        for path in (*first.folder.glob("adriaticum.db*"), first.folder / "empty.toml"):
            os.link(path, linked / path.name)

        def refuses(path, holder):
            done = Server(RUNTIME, database=path).cli("serve", check=False)
            message = f"{path}: another adriaticum serve uses it (pid {holder}): stop that"
            assert done.returncode == 1 and message in done.stderr and "ADRIATICUM_DATABASE" in done.stderr, done

        refuses(link, "unknown")
        refuses(linked / "adriaticum.db", first.process.pid)
        # Without its lock file, the file itself is still locked.
        pathlib.Path(f"{database}.lock").unlink()
        refuses(database, "unknown")
        first.cli("backup", "copy.db")
        done = Server(RUNTIME, database=link).cli("restore", first.folder / "copy.db", check=False)
        assert done.returncode == 1 and "(pid unknown)" in done.stderr, done
        is_completion(first.post(chat(), key))
        assert first.stop() == 0
        # When it has ended, any of the names will do.
        with Server(RUNTIME, database=link) as second:
            is_completion(second.post(chat(), key))
            refuses(database, "unknown")
            assert second.cli("usage", "verify").stdout.startswith("3 rows, nothing wrong")


def _serve_with(server, limit):
    """Starts the service by way of a shell that sets a limit."""
    with server.log.open("wb") as log:
        server.process = subprocess.Popen(["bash", "-c", f'ulimit {limit}; exec "$0" serve', server.binary],
                                          env=server.environment, cwd=server.folder, stdout=log, stderr=log)


def too_few_threads_are_an_error_with_advice():
    """The stacks of 1,024 threads do not fit. For the service this is like a limit on threads, which root does not have."""
    server = Server(workers=1024)
    # Stacks of 64 MiB and no arenas: what is left when the next stack does not fit is enough for the threads that start.
    server.environment |= {"RUST_MIN_STACK": str(64 << 20), "MALLOC_ARENA_MAX": "1"}
    _serve_with(server, "-v 500000")
    assert server.process.wait(STOP_SECONDS) == 1, server.logged()
    assert "can't start all threads: " in server.logged() and "TasksMax=" in server.logged(), server.logged()
    assert "panicked" not in server.logged(), server.logged()


def a_start_says_what_runs_and_a_crash_leaves_no_core_file():
    """A core file would have prompts and keys in it. Constant use of the console would cost completions a third of their rate."""
    server = Server(RUNTIME)
    _serve_with(server, "-Sc unlimited")
    try:
        version = server.cli("--version").stdout.strip()
        assert until(lambda: f"{version}, database " in server.logged()), server.logged()
        assert until(lambda: f"://console.test:{server.port}/\n" in server.logged()), server.logged()
        process = pathlib.Path(f"/proc/{server.process.pid}")
        assert "\nMax core file size        0                    0 " in (process / "limits").read_text()

        def nice(name):
            threads = [path.read_text() for path in process.glob("task/*/stat")]
            return [int(text.rpartition(")")[2].split()[16]) for text in threads if f"({name})" in text]

        assert until(lambda: (len(nice("console")), len(nice("worker"))) == (2, 16)), (nice("console"), nice("worker"))
        assert min(nice("console")) > max(nice("worker")), (nice("console"), nice("worker"))
        assert server.stop() == 0
    finally:
        server.kill()


def a_standard_error_that_is_not_read_blocks_nothing():
    """Everything waited for it: the API, the probes and the stop."""
    RUNTIME.answer = RUNTIME.good
    server, log = Server(RUNTIME, log_level="debug"), b""
    server.log.touch()
    os.mkfifo(server.folder / "pipe")
    pipe = os.open(server.folder / "pipe", os.O_RDWR | os.O_NONBLOCK)

    def fill():
        for size in (4096, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(pipe, b"." * size)

    def what_was_kept_is_written():
        nonlocal log
        with contextlib.suppress(BlockingIOError):
            log += os.read(pipe, 65536)
        return b"configuration reloaded" in log and b" log lines dropped: " in log

    key = server.create_key()
    server.process = subprocess.Popen(["bash", "-c", 'exec "$0" serve 2> pipe', server.binary], env=server.environment,
                                      cwd=server.folder)
    try:
        server.wait_until_it_listens()
        fill()
        # Each has a line at the level `debug`, all together more than the buffer takes.
        for _ in range(25):
            with server.connect() as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n" * 100)
                rest = b""
                for _ in range(100):
                    reply = read_reply(connection, rest)
                    is_error(reply, "not_found")
                    rest = reply.rest
        is_completion(server.post(chat(), key))
        for path in ("/healthz", "/readyz"):
            assert server.get(path).status == 200, path
        # A change of state finds room although lines about requests are dropped.
        server.process.send_signal(signal.SIGHUP)
        assert until(what_was_kept_is_written), log
        assert log.count(b"[DEBUG]") > 100, log
        fill()
        is_completion(server.post(chat(), key))
        assert server.stop() == 0
    finally:
        server.kill()
        os.close(pipe)


def a_restart_keeps_keys_and_rows():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME) as server:
        key = server.create_key()
        is_completion(server.post(chat(), key))
        assert server.stop() == 0
        server.start()
        server.wait_until_it_listens()
        is_completion(server.post(chat(), key))
        assert server.rows("SELECT count(*) FROM usage WHERE status = 200") == [(2,)]
