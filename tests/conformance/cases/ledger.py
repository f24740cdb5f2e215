"""The usage ledger: which requests have a row, what it contains, and when it is durable."""

import concurrent.futures
import contextlib
import functools
import json
import signal
import socket
import sqlite3
import threading
import time

from harness import (
    MAX_BODY, SILENT, STOP_SECONDS, Runtime, Server, beside, chat, is_completion, is_error, padded, read_reply, request, until)
from shared import KEY, METRICS_KEY, RUNTIME, SERVER, UNREACHABLE, bad, ok

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
        assert SERVER.rows(sql, error["request_id"]) == [row], f"there is no row {row}"
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
    # Were a row written late, the row of a completion would come after it.
    ok(chat())
    assert _count(SERVER) == before + 1, SERVER.rows("SELECT * FROM usage ORDER BY request_id DESC LIMIT 3")


def the_row_is_written_once_with_its_outcome():
    """A running request has none, and is in no sum. When its answer is sent, the row is complete."""
    with _running_request() as (server, connection, gate):
        assert _count(server) == 0, server.rows("SELECT * FROM usage")
        assert json.loads(server.cli("usage", "--json").stdout)["requests"] == 0, "a running request is in a sum"
        gate.set()
        done = is_completion(read_reply(connection))
        rows = server.rows("SELECT request_id, status, error_code, total_tokens, grounded, seq FROM usage")
        assert rows == [(done["id"], 200, None, 14, 0, 1)], rows
        sums = server.rows("SELECT requests, usage_days.total_tokens FROM usage_days JOIN usage ON usage.day = usage_days.day")
        assert sums == [(1, 14)], sums
        server.cli("usage", "verify")


def rows_of_many_clients_are_in_the_chain_and_in_the_sums_when_their_answers_are_read():
    with Server(RUNTIME) as server:
        RUNTIME.answer = RUNTIME.good

        def client(number):
            """Its sums are not changed by other clients. Every fourth request is refused."""
            key = server.create_key(f"client {number}")
            with server.connect() as connection:
                for count in range(1, 13):
                    connection.sendall(request({} if count % 4 == 0 else chat(), key))
                    request_id = read_reply(connection).headers["x-request-id"]
                    found = server.rows(
                        "SELECT sum(requests), sum(sums.total_tokens), seq > 0, length(hash) FROM usage"
                        " JOIN usage_days AS sums USING (key_id) WHERE request_id = ? GROUP BY seq, hash", request_id)
                    row, = found
                    assert row[:2] == (count, 14 * (count - count // 4)) and row[2] in (1, "t") and row[3] == 32, (count, found)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(client, range(8)))
        assert server.cli("usage", "verify").stdout.startswith("96 rows, nothing wrong. The head is ")


def the_row_has_the_times():
    RUNTIME.answer = lambda body: (time.sleep(0.2), RUNTIME.good(body))[1]
    done = is_completion(SERVER.post(chat(), KEY))
    (created, runtime, whole), = SERVER.rows(
        "SELECT created, runtime_ms, duration_ms FROM usage WHERE request_id = ?", done["id"])
    assert 190 <= runtime <= whole and created == done["created"], (created, runtime, whole)
    refused = bad({})["request_id"]
    assert SERVER.rows("SELECT runtime_ms FROM usage WHERE request_id = ?", refused) == [(None,)]
    odd = "SELECT count(*) FROM usage WHERE queue_ms + coalesce(runtime_ms, 0) > duration_ms + 0.002 OR duration_ms <= 0"
    assert SERVER.rows(odd) == [(0,)], SERVER.rows(odd)


def created_is_when_the_request_was_complete_and_not_when_a_worker_took_it():
    runtime, gate = Runtime(), threading.Event()
    runtime.answer = runtime.held(gate)
    with Server(runtime, workers=1) as server, server.connect() as running, server.connect() as waiting:
        key, metrics_key = server.create_key(), server.create_key("watch", "--permission", "metrics")
        running.sendall(request(chat(), key))
        assert until(lambda: runtime.calls)
        waiting.sendall(request(chat(), key))
        assert until(lambda: _has_metric(server, metrics_key, "adriaticum_queue_length", 1))
        complete = int(time.time())
        assert until(lambda: time.time() > complete + 2)
        gate.set()
        for connection in (running, waiting):
            done = is_completion(read_reply(connection))
            assert done["created"] <= complete and int(done["id"][9:21], 16) // 1000 == done["created"], done
            assert server.rows("SELECT created FROM usage WHERE request_id = ?", done["id"]) == [(done["created"],)]


def usage_that_cannot_be_recorded():
    """Without its row a completion is not sent. After that no inference is spent, until a write succeeds."""
    runtime = Runtime()
    runtime.answer = runtime.good
    with Server(runtime) as server:
        key, metrics_key = server.create_key(), server.create_key("watch", "--permission", "metrics")
        has_metric = functools.partial(_has_metric, server, metrics_key)
        is_completion(server.post(chat(), key))
        with contextlib.closing(sqlite3.connect(server.database, isolation_level=None)) as database:
            database.execute("CREATE TRIGGER full BEFORE INSERT ON usage BEGIN SELECT RAISE(FAIL, 'disk full'); END")
            lost = server.post(chat(), key)
            is_error(lost, "service_unavailable")
            assert lost.headers.get("x-should-retry") == "false", lost.headers
            assert len(runtime.calls) == 2, "the runtime was not called"
            assert has_metric("adriaticum_ledger_available", 0) and has_metric("adriaticum_ledger_errors_total", 1)
            for _ in range(5):
                refused = server.post(chat(), key)
                is_error(refused, "service_unavailable")
                assert "x-should-retry" not in refused.headers, refused.headers
            # An error stays what it is, unless the request is refused while it waits for a worker.
            assert until(lambda: server.post({}, key).status == 400), "an invalid request has lost its error"
            assert until(lambda: server.get("/readyz").status == 503)
            assert len(runtime.calls) == 2, "inference was spent while the ledger was unavailable"
            assert has_metric("adriaticum_ledger_errors_total", 1), "rows of refused requests were tried"
            database.execute("DROP TRIGGER full")
        assert until(lambda: server.post(chat(), key).status == 200), "it does not end by itself"
        assert has_metric("adriaticum_ledger_available", 1)
        assert server.rows("SELECT status FROM usage") == [(200,)] * 2, "a request that was not recorded has a row"
        usage = json.loads(server.cli("usage", "--json").stdout)
        assert (usage["requests"], usage["total_tokens"]) == (2, 28), usage
        server.cli("usage", "verify")


def a_locked_database_delays_the_answer():
    """While another process writes, a completion waits; it is not sent without its row."""
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME) as server:
        key, replies = server.create_key(), []
        with contextlib.closing(sqlite3.connect(server.database, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            thread = threading.Thread(target=lambda: replies.append(server.post(chat(), key)))
            thread.start()
            has_come = until(lambda: replies, 1)
            database.execute("ROLLBACK")
        thread.join()
        assert not has_come, f"an answer came before its row: {replies}"
        is_completion(replies[0])
        assert server.rows("SELECT status FROM usage") == [(200,)], replies


@beside
def a_database_locked_for_five_seconds_costs_no_more_inferences():
    """A completion waits for its row. Once it has waited for 5 s, requests are refused before the runtime is called."""
    runtime = Runtime()
    runtime.answer = runtime.good
    with Server(runtime) as server:
        key, metrics_key, replies = server.create_key(), server.create_key("watch", "--permission", "metrics"), []
        is_available = functools.partial(_has_metric, server, metrics_key, "adriaticum_ledger_available")
        with contextlib.closing(sqlite3.connect(server.database, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            began = time.monotonic()
            thread = threading.Thread(target=lambda: replies.append(server.post(chat(), key)))
            thread.start()
            is_noticed = until(lambda: is_available(0), 19)
            seconds = time.monotonic() - began
            refused = [server.post(chat(), key) for _ in range(5)] if is_noticed else []
            came_early = list(replies)
            database.execute("ROLLBACK")
        thread.join()
        assert is_noticed and seconds >= 5 and not came_early, (is_noticed, seconds, came_early)
        for reply in refused:
            is_error(reply, "service_unavailable")
        is_completion(replies[0])
        assert len(runtime.calls) == 1, "inference was spent while the ledger was unavailable"
        assert is_available(1), "the row that was written does not end it"
        is_completion(server.post(chat(), key))
        assert server.rows("SELECT status FROM usage") == [(200,)] * 2


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


def requests_without_a_measured_token_leave_a_bounded_number_of_rows():
    """Of one key a burst of 100 and ten per second; the others are counted in a metric and in the log. With a dead runtime, one key
    wrote 5,000 rows a second."""
    runtime = Runtime()
    runtime.answer = runtime.good
    for body, status, code in (({}, 400, "invalid_request"), (chat(), 502, "inference_error")):
        url = runtime.url if status == 400 else f"{UNREACHABLE.url}/v1"
        with Server(runtime_url=url) as server, server.connect() as connection:
            key, other, metrics_key = (server.create_key(name, *options) for name, options in (
                ("greedy", ()), ("other", ()), ("watch", ("--permission", "metrics"))))
            data, began = request(body, key), time.monotonic()
            for _ in range(400):
                connection.sendall(data)
                is_error(read_reply(connection), code)
            seconds, rows = time.monotonic() - began, _count(server)
            # A machine that needs 30 s for them has not exceeded the rate.
            assert 100 <= rows <= min(400, 101 + 10 * seconds), f"{rows} rows in {seconds} s"
            assert _has_metric(server, metrics_key, "adriaticum_refusals_unrecorded_total", 400 - rows), "each is counted once"
            assert rows == 400 or until(lambda: "requests without a measured token that were not recorded: 1 since" in server.logged())
            assert until(lambda: server.logged().count(f"status={status}") == rows), "one beyond the bound has no line either"
            # Another key's refusals still get their rows, and so do completions of this one.
            is_error(server.post({}, other), "invalid_request")
            assert _count(server) == rows + 1
            if status == 400:
                is_completion(server.post(chat(), key))
                assert _count(server) == rows + 2


def _has_metric(server, key, name, value):
    return f"\n{name} {value}\n".encode() in server.get("/metrics", key).body


def a_request_that_runs_when_the_process_dies_leaves_no_row():
    with _running_request() as (server, _connection, gate):
        server.stop(signal.SIGKILL)
        gate.set()
        assert _count(server) == 0, server.rows("SELECT * FROM usage")
        server.start()
        server.wait_until_it_listens()
        is_completion(server.post(chat(), server.create_key()))
        assert json.loads(server.cli("usage", "--json").stdout)["requests"] == _count(server) == 1
        server.cli("usage", "verify")


def an_acknowledged_request_survives_a_crash():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME) as server:
        key = server.create_key()
        done = is_completion(server.post(chat(), key))
        refused = is_error(server.post({}, key), "invalid_request")
        server.stop(signal.SIGKILL)
        for request_id, status in ((done["id"], 200), (refused["request_id"], 400)):
            assert server.rows("SELECT status FROM usage WHERE request_id = ?", request_id) == [(status,)]


def a_stop_folds_the_log_of_the_database_into_it():
    with Server(RUNTIME) as server:
        RUNTIME.answer = RUNTIME.good
        is_completion(server.post(chat(), server.create_key()))
        log = server.folder / "adriaticum.db-wal"
        assert log.exists() or server.postgres
        server.stop()
        assert not log.exists()


def a_damaged_database_is_refused_with_what_to_do():
    server = Server(database="damaged.db")
    (server.folder / "damaged.db").write_text("not a database at all" * 100)
    for command in ("serve", "check"):
        done = server.cli(command, check=False)
        printed = done.stdout + done.stderr
        assert done.returncode == 1 and "damaged" in printed and "restore a backup" in printed, printed


def _version(server):
    (version,), = server.rows("SELECT version FROM schema_version" if server.postgres else "PRAGMA user_version")
    return version


def _set_version(server, version):
    server.change(f"UPDATE schema_version SET version = {version}" if server.postgres else f"PRAGMA user_version = {version}")


def a_database_of_another_schema_is_refused_and_left_alone():
    server = Server()
    server.create_key()
    own = _version(server)
    for version, advice in ((own - 1, "no release had it, so begin with a new database"),
                            (own + 1, "install the version that made it, or a later one")):
        _set_version(server, version)
        for command in ("serve", "check", "keys list", "keys create another", "keys revoke one", "usage", "usage list", "usage verify",
                        "audit", "console password"):
            done = server.cli(*command.split(), check=False, input="")
            printed = done.stdout + done.stderr
            assert done.returncode == 1 and advice in printed, (command, done)
            assert f"has version {version}, and this program needs version {own}" in printed, (command, done)
        assert _version(server) == version
        if not server.postgres:
            done = server.cli("move", "--from", "adriaticum.db", "--to", "postgresql://nobody@127.0.0.1:1/none", check=False)
            assert done.returncode == 1 and advice in done.stderr, done
            # The copy is for the program that knows it.
            server.cli("backup", f"copy-{version}.db")
            with contextlib.closing(sqlite3.connect(server.folder / f"copy-{version}.db")) as copy:
                assert copy.execute("PRAGMA user_version").fetchall() == [(version,)]
    _set_version(server, own)
    assert list(server.keys()) == ["test"]


@beside
def a_service_whose_schema_was_changed_stops():
    server = Server(Runtime())
    server.start()
    try:
        server.wait_until_it_listens()
        assert server.get("/readyz").status == 200
        newer = _version(server) + 1
        _set_version(server, newer)
        # While probes arrive, it looks every second.
        server.get("/readyz")
        assert server.process.wait(STOP_SECONDS) == 1
    finally:
        server.kill()
    log = server.logged()
    assert f"the database now has version {newer}" in log and "this process stops" in log, log
    assert "serves under the name" not in log, log


def old_rows_are_removed_and_their_sums_stay():
    """But not while there is no row between the cut and today: the clock may be wrong. Sums were made before the change."""
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME) as server:
        key = server.create_key()
        ids = [is_completion(server.post(chat(), key))["id"] for _ in range(4)]
        server.stop()
        for old in ids[:3]:
            _make_older(server, old, 10)
        server.environment["ADRIATICUM_USAGE_RETENTION_DAYS"] = "7"
        server.start()
        assert until(lambda: "retention removes nothing" in server.logged()), server.last_logged()
        findings = json.loads(server.cli("check", "--json", check=False).stdout)
        assert [finding["status"] for finding in findings if finding["part"] == "retention"] == ["warn"], findings
        assert _count(server) == 4, "rows were removed although the days before today are empty"
        server.stop()
        _make_older(server, ids[3], 1)
        server.start()
        assert until(lambda: _count(server) == 1), "rows of ten days ago are still there"
        assert "4 requests" in server.cli("usage").stdout
        server.wait_until_it_listens()


def _make_older(server, request_id, days):
    """Moves a row to an earlier day: its id has the time, too."""
    milliseconds = int(request_id[9:21], 16) - days * 86_400_000
    day = time.strftime("%Y-%m-%d", time.gmtime(milliseconds // 1000))
    server.change(f"UPDATE usage SET request_id = 'chatcmpl_{milliseconds:012x}{request_id[21:]}', "
                  f"created = {milliseconds // 1000}, day = '{day}' WHERE request_id = '{request_id}'")
    # A start walks the rows after the anchor, and the hash of this one is not its own any more.
    server.change("UPDATE gateways SET anchor_seq = head_seq, anchor_hash = head_hash")
