"""Load, overload, start and stop."""

import contextlib
import signal
import threading
import time

from harness import STOP_SECONDS, Runtime, Server, chat, is_completion, is_error, read_reply, request, until
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
    runtime.answer = runtime.held(gate)
    with Server(runtime, workers=2, queue=2) as server:
        key = server.create_key()
        threads = [threading.Thread(target=lambda: replies.append(server.post(chat(), key))) for _ in range(12)]
        [thread.start() for thread in threads[:2]]
        are_running = until(lambda: len(runtime.calls) == 2)
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
        assert server.rows("SELECT count(*) FROM usage") == [(4,)], "a shed request left a row"


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
        assert done.returncode == 1 and str(first.process.pid) in done.stderr, done
        assert first.rows("SELECT status, error_code FROM usage") == [(None, None)], "the running request was changed"
        gate.set()
        thread.join()
        is_completion(replies[0])


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
