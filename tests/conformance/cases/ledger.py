"""The usage ledger: which requests have a row, what it contains, and when it is durable."""

import contextlib
import functools
import json
import signal
import socket
import sqlite3
import threading
import time

from harness import MAX_BODY, SILENT, Runtime, Server, chat, is_completion, is_error, padded, read_reply, request, until
from shared import KEY, METRICS_KEY, RUNTIME, SERVER, bad, ok

FIGURES = "prompt_tokens, completion_tokens, total_tokens"


def _count(server):
    (count,), = server.rows("SELECT count(*) FROM usage")
    return count


def every_request_with_a_valid_key_has_its_row():
    secret = SERVER.create_key("rows")
    RUNTIME.answer = RUNTIME.good
    done = is_completion(SERVER.post(chat(), secret))
    ids = {name: key["id"] for name, key in SERVER.keys().items()}
    row = SERVER.rows(f"SELECT key_id, status, error_code, {FIGURES} FROM usage WHERE request_id = ?", done["id"])
    assert row == [(ids["rows"], 200, None, 11, 3, 14)], row
    invalid = bad(chat() | {"stream": True}, key=secret)
    forbidden = bad(chat(), "insufficient_permission", key=METRICS_KEY)
    RUNTIME.answer = lambda body: (500, {})
    failed = is_error(SERVER.post(chat(), secret), "inference_error")
    for error, name, status in ((invalid, "rows", 400), (forbidden, "metrics only", 403), (failed, "rows", 502)):
        sql = f"SELECT key_id, status, error_code, {FIGURES} FROM usage WHERE request_id = ?"
        row = ids[name], status, error["code"], None, None, None
        assert until(lambda: SERVER.rows(sql, error["request_id"]) == [row]), f"there is no row {row}"
    assert SERVER.rows("SELECT count(*) FROM usage WHERE key_id = ?", ids["rows"]) == [(3,)]


def what_leaves_no_row():
    """No valid key, 404, 413 and HTTP that cannot be parsed."""
    before = _count(SERVER)
    bad(chat(), "invalid_api_key", key=None)
    bad(chat(), "invalid_api_key", key="adr_" + "0" * 48)
    bad(chat(), "not_found", path="/v1/nope")
    bad(chat(), "not_found", host="example.com")
    bad(padded(MAX_BODY + 1), "payload_too_large")
    is_error(SERVER.raw(request(chat(), KEY, framing="Content-Length: x"), closes=True), "invalid_request")
    # The rows of refused requests may be written late: the row of a completion comes after them.
    ok(chat())
    assert _count(SERVER) == before + 1, SERVER.rows("SELECT * FROM usage ORDER BY request_id DESC LIMIT 3")


def the_row_exists_before_the_runtime_is_called():
    runtime, gate = Runtime(), threading.Event()
    runtime.answer = runtime.held(gate)
    with Server(runtime) as server:
        key, replies = server.create_key(), []
        thread = threading.Thread(target=lambda: replies.append(server.post(chat(), key)))
        thread.start()
        assert until(lambda: runtime.calls)
        sql = f"SELECT status, error_code, duration_ms, {FIGURES} FROM usage"
        assert server.rows(sql) == [(None,) * 6], server.rows(sql)
        gate.set()
        thread.join()
        done = is_completion(replies[0])
        rows = server.rows("SELECT request_id, status, total_tokens, grounded FROM usage")
        assert rows == [(done["id"], 200, 14, 0)], rows


def the_row_has_the_times():
    RUNTIME.answer = lambda body: (time.sleep(0.2), RUNTIME.good(body))[1]
    done = is_completion(SERVER.post(chat(), KEY))
    (created, runtime, whole), = SERVER.rows(
        "SELECT created, runtime_ms, duration_ms FROM usage WHERE request_id = ?", done["id"])
    assert 190 <= runtime <= whole and created == done["created"], (created, runtime, whole)


def usage_that_cannot_be_recorded():
    """Without its row no inference is spent; without the outcome the completion is not sent."""
    runtime = Runtime()
    with Server(runtime) as server:
        key = server.create_key()
        is_completion(server.post(chat(), key), chat()["messages"][0]["content"])
        with contextlib.closing(sqlite3.connect(server.database, isolation_level=None)) as database:
            database.execute("CREATE TRIGGER full BEFORE INSERT ON usage BEGIN SELECT RAISE(FAIL, 'disk full'); END")
            calls = len(runtime.calls)
            error = is_error(server.post(chat(), key), "service_unavailable")
            assert len(runtime.calls) == calls, "inference was spent on a request without a row"
            database.execute("DROP TRIGGER full")
            assert server.post(chat(), key).status == 200
            database.execute("CREATE TRIGGER full BEFORE UPDATE ON usage BEGIN SELECT RAISE(FAIL, 'disk full'); END")
            late = server.post(chat(), key)
            is_error(late, "service_unavailable")
            assert late.headers.get("x-should-retry") == "false", late.headers
            database.execute("DROP TRIGGER full")
        assert server.post(chat(), key).status == 200
        assert server.rows("SELECT 1 FROM usage WHERE request_id = ?", error["request_id"]) == []


def a_locked_database_delays_the_answer():
    """While another process writes, a completion waits or is refused; it is not sent without its row."""
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME) as server:
        key, replies = server.create_key(), []
        with contextlib.closing(sqlite3.connect(server.database, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            thread = threading.Thread(target=lambda: replies.append(server.post(chat(), key)))
            thread.start()
            until(lambda: replies, 1)
            assert not replies or is_error(replies[0], "service_unavailable")
            database.execute("ROLLBACK")
        thread.join()
        expected = [(200,)] if replies[0].status == 200 else []
        assert server.rows("SELECT status FROM usage WHERE status = 200") == expected, replies


@contextlib.contextmanager
def _running_request():
    """Yields a server and a connection whose request waits for the runtime, and then lets the runtime answer."""
    runtime, gate = Runtime(), threading.Event()
    runtime.answer = runtime.held(gate)
    with Server(runtime) as server:
        key = server.create_key()
        with server.connect() as connection:
            connection.sendall(request(chat(), key))
            assert until(lambda: runtime.calls)
            try:
                yield server, connection, gate
            finally:
                gate.set()


def a_running_request_whose_client_leaves_is_abandoned():
    """The runtime sees the end of its call, and the row says why there is no status."""
    runtime = Runtime()
    runtime.answer = lambda _body: (SILENT, None)
    with Server(runtime, workers=1) as server:
        key, sql = server.create_key(), "SELECT status, error_code, total_tokens FROM usage ORDER BY request_id"
        for count, leave in enumerate((socket.socket.close, lambda connection: connection.shutdown(socket.SHUT_WR)), 1):
            with server.connect() as connection:
                connection.sendall(request(chat(), key))
                assert until(lambda: len(runtime.calls) == count), "the worker is not free"
                leave(connection)
                assert until(lambda: len(runtime.ended) == count), "the runtime's call goes on"
        assert until(lambda: server.rows(sql) == [(None, "abandoned", None)] * 2), server.rows(sql)
        runtime.answer = runtime.good
        is_completion(server.post(chat(), key))
        usage = json.loads(server.cli("usage", "--json").stdout)
        assert (usage["requests"], usage["errors"]) == (3, 2), usage
        server.cli("usage", "verify")


def a_waiting_request_whose_client_leaves_has_no_row():
    runtime, gate = Runtime(), threading.Event()
    runtime.answer = runtime.held(gate)
    with Server(runtime, workers=1) as server, server.connect() as running:
        key, metrics_key = server.create_key(), server.create_key("watch", "--permission", "metrics")
        running.sendall(request(chat(), key))
        assert until(lambda: runtime.calls)
        waits = functools.partial(_has_metric, server, metrics_key, "adriaticum_queue_length")
        with server.connect() as waiting:
            waiting.sendall(request(chat(), key))
            assert until(lambda: waits(1)), "the second request does not wait"
        assert until(lambda: waits(0)), "a request without a client waits for a worker"
        gate.set()
        is_completion(read_reply(running))
        assert _count(server) == len(runtime.calls) == 1, "a waiting request that was dropped left a row"
        assert _has_metric(server, metrics_key, 'adriaticum_requests_abandoned_total{phase="waiting"}', 1)


def refused_requests_of_one_key_leave_a_bounded_number_of_rows():
    """A burst of 100 and ten per second; the others are counted in a metric and in the log."""
    with Server(RUNTIME) as server, server.connect() as connection:
        key, metrics_key = server.create_key(), server.create_key("watch", "--permission", "metrics")
        invalid, began = request({}, key), time.monotonic()
        for _ in range(400):
            connection.sendall(invalid)
            is_error(read_reply(connection), "invalid_request")
        seconds, rows = time.monotonic() - began, _count(server)
        # A machine that needs 30 s for them has not exceeded the rate.
        assert 100 <= rows <= min(400, 101 + 10 * seconds), f"{rows} rows in {seconds} s"
        assert _has_metric(server, metrics_key, "adriaticum_refusals_unrecorded_total", 400 - rows)
        assert rows == 400 or "refused requests that were not recorded" in server.logged()


def _has_metric(server, key, name, value):
    return f"\n{name} {value}\n".encode() in server.get("/metrics", key).body


def requests_interrupted_by_a_crash_are_marked_at_the_next_start():
    with _running_request() as (server, _connection, gate):
        server.keys()  # a command is not a start: it leaves the rows of running requests alone
        assert server.rows("SELECT status, error_code FROM usage") == [(None, None)]
        assert json.loads(server.cli("usage", "--json").stdout)["requests"] == 0, "a running request is in no sum"
        server.stop(signal.SIGKILL)
        gate.set()
        server.start()
        sql = "SELECT status, error_code, total_tokens FROM usage"
        assert until(lambda: server.rows(sql) == [(None, "interrupted", None)]), server.rows(sql)
        server.wait_until_it_listens()


def an_acknowledged_completion_survives_a_crash():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME) as server:
        done = is_completion(server.post(chat(), server.create_key()))
        server.stop(signal.SIGKILL)
        assert server.rows("SELECT status FROM usage WHERE request_id = ?", done["id"]) == [(200,)]


def old_rows_are_removed_and_their_sums_stay():
    """The service notices the change of `created` by its retention only: sums were made before."""
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME) as server:
        key = server.create_key()
        for _ in range(3):
            is_completion(server.post(chat(), key))
        server.stop()
        server.change("UPDATE usage SET created = created - 10 * 86400")
        server.environment["ADRIATICUM_USAGE_RETENTION_DAYS"] = "7"
        server.start()
        assert until(lambda: _count(server) == 0), "rows of ten days ago are still there"
        assert "3 requests" in server.cli("usage").stdout
        server.wait_until_it_listens()
