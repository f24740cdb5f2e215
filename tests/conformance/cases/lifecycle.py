"""Load, overload, start and stop."""

import contextlib
import signal
import threading
import time

from harness import REPLY_SECONDS, STOP_SECONDS, Runtime, Server, chat, is_completion, is_error, read_reply, request, until
from shared import RUNTIME


def slow_clients_hold_no_worker():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME, workers=1, queue=1) as server, contextlib.ExitStack() as clients:
        key = server.create_key()
        whole = request(chat(), key)
        for part in (b"", whole[:20], whole[:-1]) * 3:
            connection = clients.enter_context(server.connect())
            connection.sendall(part)
        is_completion(server.post(chat(), key))
        connection.sendall(whole[-1:])
        is_completion(read_reply(connection))


def a_full_queue_sheds_at_once():
    """Two requests are processed and two wait: of ten more than the first two, eight are shed, and leave no row."""
    runtime, gate, replies = Runtime(), threading.Event(), []
    with Server(runtime, workers=2, queue=2) as server:
        key = server.create_key()
        # A key that was accepted before may use every place.
        is_completion(server.post(chat(), key), "What is the capital of Croatia?")
        runtime.answer = runtime.held(gate)
        threads = [threading.Thread(target=lambda: replies.append(server.post(chat(), key))) for _ in range(12)]
        [thread.start() for thread in threads[:2]]
        are_running = until(lambda: len(runtime.calls) == 3)
        [thread.start() for thread in threads[2:]]
        until(lambda: len(replies) == 8)
        shed = list(replies)
        gate.set()
        [thread.join() for thread in threads]
        assert are_running and len(shed) == 8 and len(replies) == 12, (are_running, shed, replies)
        for reply in shed:
            is_error(reply, "service_unavailable")
        for reply in replies[8:]:
            is_completion(reply)
        assert server.rows("SELECT count(*) FROM usage") == [(5,)], "a shed request left a row"


def _waits(server, metrics_key, count):
    return f"\nadriaticum_queue_length {count}\n".encode() in server.get("/metrics", metrics_key).body


@contextlib.contextmanager
def _held_server(**settings):
    """Yields a server, its runtime, and a function that sends a request. The runtime holds those that say so."""
    runtime, gate = Runtime(), threading.Event()

    def answer(body):
        content = body["messages"][-1]["content"]
        assert "held" not in content or gate.wait(REPLY_SECONDS)
        return runtime.echo(body)

    runtime.answer = answer
    with Server(runtime, **settings) as server, contextlib.ExitStack() as connections:
        def send(key, content):
            connection = connections.enter_context(server.connect())
            connection.sendall(request(chat(content), key))
            return connection

        yield server, runtime, gate, send


def _asked(runtime):
    return [call.body["messages"][-1]["content"] for call in runtime.calls]


def keys_take_turns():
    """A key with many requests delays another by one request, and loses its newest when the queue is full."""
    with _held_server(workers=1, queue=8) as (server, runtime, gate, send):
        many, few = server.create_key("many"), server.create_key("few")
        metrics_key = server.create_key("watch", "--permission", "metrics")
        for key in (many, few):
            is_completion(server.post(chat("first"), key), "first")
        running = send(many, "held")
        assert until(lambda: len(runtime.calls) == 3)
        waiting = [send(many, f"many {number}") for number in range(8)]
        assert until(lambda: _waits(server, metrics_key, 8))
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
    with _held_server(workers=8) as (server, runtime, gate, send):
        limited, free = server.create_key("limited", "--concurrent", "2"), server.create_key("free")
        metrics_key, identifier = server.create_key("watch", "--permission", "metrics"), server.keys()["limited"]["id"]
        for limit in (2, 1):
            if limit == 1:
                server.cli("keys", "set", identifier, "--concurrent", "1")
            gate.clear()
            connections = [send(limited, f"held {limit}") for _ in range(6)]
            assert until(lambda: _waits(server, metrics_key, 6 - limit)), f"not {limit} at once"
            # The others have left the queue, but may not have reached the runtime yet.
            assert until(lambda: _asked(runtime).count(f"held {limit}") >= limit), _asked(runtime)
            is_completion(server.post(chat("other"), free), "other")
            assert _asked(runtime).count(f"held {limit}") == limit, _asked(runtime)
            gate.set()
            for connection in connections:
                is_completion(read_reply(connection), f"held {limit}")


def strangers_do_not_wait_for_a_worker():
    """A key that does not exist is refused while the only worker is busy, and takes no place of a key that does."""
    with _held_server(workers=1, queue=8) as (server, runtime, gate, send):
        key, metrics_key = server.create_key(), server.create_key("watch", "--permission", "metrics")
        is_completion(server.post(chat("first"), key), "first")
        running = [send(key, "held")]
        assert until(lambda: len(runtime.calls) == 2)
        new = server.create_key("new")
        running += [send(key, "held") for _ in range(7)] + [send(new, "held")]
        assert until(lambda: _waits(server, metrics_key, 8)), "a key has no place"
        for connection in [send("adr_" + 48 * "0", "stranger") for _ in range(10)]:
            is_error(read_reply(connection), "invalid_api_key")
        gate.set()
        for connection in running:
            is_completion(read_reply(connection), "held")


def a_stop_completes_requests_in_progress_and_waiting():
    """An idle client does not delay the stop, and new connections are not answered any more."""
    runtime, gate, replies = Runtime(), threading.Event(), []
    runtime.answer = runtime.held(gate)

    def is_answered():
        with contextlib.suppress(OSError), server.connect(timeout=3) as connection:
            connection.sendall(request(chat()))
            return read_reply(connection).status

    def is_one_waiting():
        return b"\nadriaticum_queue_length 1\n" in server.get("/metrics", metrics_key).body

    with Server(runtime, workers=1) as server, server.connect():
        key, metrics_key = server.create_key(), server.create_key("watch", "--permission", "metrics")
        threads = [threading.Thread(target=lambda: replies.append(server.post(chat(), key))) for _ in range(2)]
        threads[0].start()
        assert until(lambda: runtime.calls)
        threads[1].start()
        assert until(is_one_waiting), "the second request does not wait"
        server.process.send_signal(signal.SIGTERM)
        is_refused = until(lambda: not is_answered())
        has_ended = until(lambda: server.process.poll() is not None, 1)
        gate.set()
        assert is_refused, "a new connection is answered after SIGTERM"
        assert not has_ended, "the service ended while a request was in progress"
        assert server.process.wait(STOP_SECONDS) == 0, "SIGTERM did not lead to exit code 0"
        [thread.join() for thread in threads]
        assert len(replies) == 2, replies
        for reply in replies:
            is_completion(reply)
        assert server.rows("SELECT count(*) FROM usage WHERE status = 200") == [(2,)]


def an_interrupt_stops_it_too():
    with Server(RUNTIME) as server:
        is_error(server.post(chat()), "invalid_api_key")
        assert server.stop(signal.SIGINT) == 0


def a_second_serve_on_the_same_database_is_refused():
    runtime, gate, replies = Runtime(), threading.Event(), []
    runtime.answer = runtime.held(gate)
    with Server(runtime) as first:
        key = first.create_key()
        thread = threading.Thread(target=lambda: replies.append(first.post(chat(), key)))
        thread.start()
        assert until(lambda: runtime.calls)
        done = Server(runtime, database=first.database).cli("serve", check=False)
        # The pid, or in a shared database the address.
        named = f"127.0.0.1:{first.port}" if Server.postgres else str(first.process.pid)
        assert done.returncode == 1 and named in done.stderr, done
        gate.set()
        thread.join()
        done = is_completion(replies[0])
        assert first.rows("SELECT request_id, status FROM usage") == [(done["id"], 200)], "the first can't write any more"


def a_stop_at_any_moment_of_the_start_is_clean():
    for milliseconds in range(0, 40, 2):
        server = Server(RUNTIME)
        server.start()
        # Not a wait for anything: the signal has to arrive at different moments of the start.
        time.sleep(milliseconds / 1000)
        code = server.stop()
        # Before the program has registered its handlers, the system's own ends it.
        assert code in (0, -signal.SIGTERM), (milliseconds, code)


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
