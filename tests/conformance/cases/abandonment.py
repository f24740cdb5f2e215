"""Clients that close their connection before the answer: their requests are cancelled. cases/ledger.py has their rows."""

import contextlib
import socket
import struct
import time

from harness import SILENT, Runtime, Server, chat, ends, is_completion, request, until

RUNNING, WAITING = (f'adriaticum_requests_abandoned_total{{phase="{phase}"}}' for phase in ("running", "waiting"))
# The silent runtime would take until the service's timeout, 120 s; an answer in this time was not waited for.
SOON = 20


def _shut(connection):
    connection.shutdown(socket.SHUT_WR)
    # Without its session, the end of TLS cannot be read.
    assert Server.secured or ends(connection), "something is sent"


def _reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _close_behind_another_request(connection):
    connection.sendall(request(chat("next"), "adr_none"))
    connection.close()


def _abandoned(server):
    return server.rows("SELECT count(*) FROM usage WHERE status IS NULL AND error_code = 'abandoned' AND total_tokens IS NULL")[0][0]


def a_running_request_is_cancelled_however_its_client_leaves():
    runtime = Runtime()
    with Server(runtime, workers=1) as server:
        key = server.create_key()
        for number, leave in enumerate((socket.socket.close, _shut, _reset, _close_behind_another_request), 1):
            # A connection to the runtime that was kept from before, and is then needed again.
            runtime.answer = runtime.good
            is_completion(server.post(chat(), key))
            calls, began = len(runtime.calls), time.monotonic()
            runtime.answer = lambda _body: (SILENT, None)
            with contextlib.closing(server.connect()) as connection:
                connection.sendall(request(chat(), key))
                assert until(lambda: len(runtime.calls) == calls + 1)
                leave(connection)
                assert until(lambda: len(runtime.ended) == number), f"{leave.__name__}: the runtime's call goes on"
            runtime.answer = runtime.good
            is_completion(server.post(chat(), key))
            assert time.monotonic() - began < SOON, f"{leave.__name__}: the worker was not free"
            assert server.metric(RUNNING) == _abandoned(server) == number, leave.__name__
        assert server.metric(WAITING) == 0
        assert server.metric('adriaticum_requests_total{status="502",code="inference_error"}') == 0
        # They count as requests and as errors.
        assert "\n12 requests, 4 errors" in server.cli("usage").stdout
        assert "abandoned" in server.cli("usage", "--by", "status").stdout
        assert "status=- error=abandoned" in server.logged(), server.logged()
        assert "WARN] id=" not in server.logged(), "a cancelled call is no fault"


def a_cancelled_call_is_not_tried_elsewhere_and_blames_no_runtime():
    first, second = Runtime(), Runtime()
    first.answer = lambda _body: (SILENT, None)
    with Server(runtime_url=f"{first.url},{second.url}") as server:
        key = server.create_key()
        with server.connect() as connection:
            connection.sendall(request(chat(), key))
            assert until(lambda: first.calls)
        assert until(lambda: _abandoned(server) == 1)
        first.answer = first.good
        is_completion(server.post(chat(), key))
        assert (len(first.calls), len(second.calls)) == (2, 0)


def a_search_is_cancelled_and_not_to_blame():
    runtime = Runtime()
    with socket.create_server(("127.0.0.1", 0)) as search:
        url = f"http://127.0.0.1:{search.getsockname()[1]}"
        with Server(runtime, search_url=url, search_grounding="always", search_timeout=100) as server:
            with server.connect() as connection:
                connection.sendall(request(chat(), server.create_key()))
                asked, _ = search.accept()
                assert asked.recv(65536).startswith(b"GET /search?"), "Search is not asked"
            began = time.monotonic()
            with asked:
                assert ends(asked), "Search's call goes on"
            assert until(lambda: _abandoned(server) == 1) and time.monotonic() - began < SOON
            assert not runtime.calls, "inference was spent"
            assert server.metric('adriaticum_searches_total{reason="always",outcome="unavailable"}') == 0


def an_outcome_that_is_recorded_stays():
    """The client closes its connection before it has read any of a large answer."""
    runtime, statuses = Runtime(), "SELECT status FROM usage"
    runtime.answer = lambda _body: (200, runtime.completion("x" * 900_000))
    with Server(runtime) as server:
        with server.connect() as connection:
            connection.sendall(request(chat(), server.create_key()))
            assert until(lambda: server.rows(statuses) == [(200,)]), server.rows(statuses)
        assert server.rows(statuses) == [(200,)] and "\n1 request, 0 errors" in server.cli("usage").stdout
