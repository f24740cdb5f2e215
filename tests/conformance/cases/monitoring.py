"""Metrics on the console's host: what is counted, and who may read it."""

from harness import Runtime, Server, chat, held_server, is_completion, is_error, read_reply, request, until


def what_was_answered_is_counted():
    runtime = Runtime()
    with Server(runtime) as server:
        key = server.create_key()
        for answer in ((200, runtime.completion()), (200, runtime.completion(usage=(5, None, None))), (500, {})):
            runtime.answer = lambda body, answer=answer: answer
            server.post(chat(), key)
        is_error(server.post(chat(), "adr_wrong"), "invalid_api_key")
        is_error(server.post(chat(), server.metrics_key), "insufficient_permission")
        is_error(server.post({}, key), "invalid_request")
        is_error(server.get("/", host="other.test"), "not_found")
        is_error(server.raw(b"no HTTP at all\r\n\r\n"), "invalid_request")
        for series, expected in (
                ('requests_total{status="200",code="ok"}', 2), ('requests_total{status="400",code="invalid_request"}', 2),
                ('requests_total{status="401",code="invalid_api_key"}', 1),
                ('requests_total{status="403",code="insufficient_permission"}', 1),
                ('requests_total{status="404",code="not_found"}', 1),
                ('requests_total{status="502",code="inference_error"}', 1),
                ('requests_total{status="503",code="service_unavailable"}', 0),
                ('tokens_total{kind="prompt"}', 16), ('tokens_total{kind="completion"}', 3),
                ("completions_unmeasured_total", 1), ("requests_head_refused_total", 2),
                # Broken HTTP has no time, nor has a request that its head refuses.
                ('request_duration_seconds_count{outcome="completion"}', 2),
                ('request_duration_seconds_count{outcome="error"}', 3),
                ("queue_duration_seconds_count", 5), ("runtime_duration_seconds_count", 3),
                # All that a valid key asked for.
                ("ledger_duration_seconds_count", 5), ("ledger_errors_total", 0), ("ledger_available", 1)):
            assert server.metric(f"adriaticum_{series}") == expected, series
        parts = [server.metric(f"adriaticum_{part}_duration_seconds_sum") for part in ("queue", "runtime", "ledger")]
        whole = [server.metric(f'adriaticum_request_duration_seconds_sum{{outcome="{outcome}"}}')
                 for outcome in ("completion", "error")]
        assert sum(parts) <= sum(whole) and parts[2] > 0, (parts, whole)


def the_load_is_reported():
    with held_server(workers=2, queue=1) as (server, runtime, gate, send):
        key, load = server.create_key(), lambda name: server.metric(f"adriaticum_{name}")
        is_completion(server.post(chat("first"), key), "first")
        held = [send(key, "held" + 9_000 * "x") for _ in range(3)]
        assert until(lambda: (load("queue_length"), load("workers_busy")) == (1, 2))
        assert load("workers") == 2
        # The scrape is answered all the same, and counts as a connection and not as a worker.
        assert until(lambda: load("connections_open") == 4)
        # Each is counted for what it costs until it is answered.
        assert load("buffered_bytes") > 3 * (27_000 + 32_768)
        is_error(server.post(chat(), key), "service_unavailable")
        assert load('requests_shed_total{reason="queue"}') == 1
        assert load('requests_total{status="503",code="service_unavailable"}') == 1
        gate.set()
        for connection in held:
            assert read_reply(connection).status == 200
        assert (load("queue_length"), load("workers_busy")) == (0, 0)
        # The sessions of TLS, if it is used, stay with their connections.
        free = 3 * 32_768 if server.secured else 50_000
        assert until(lambda: load("buffered_bytes") < free), "the memory is not free"


def a_scrape_needs_its_permission_and_leaves_no_row():
    with Server() as server:
        key = server.create_key()
        for wrong, code in ((None, "invalid_api_key"), ("adr_wrong", "invalid_api_key"), (key, "insufficient_permission")):
            is_error(server.get("/metrics", wrong), code)
        reply = server.get("/metrics", server.metrics_key)
        assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8", reply.headers
        assert reply.headers["cache-control"] == "no-store", reply.headers
        with server.connect() as connection:
            connection.sendall(request(b"", server.metrics_key, host="console.test", path="/metrics", method="HEAD",
                                       headers=[("Connection", "close")]))
            head = b"".join(iter(lambda: connection.recv(65536), b""))
        assert head.startswith(b"HTTP/1.1 200 ") and head.endswith(b"\r\n\r\n"), head
        # Neither on an API host nor on an unknown one.
        for host in ("api.test", "other.test"):
            for path in ("/metrics", "/healthz", "/readyz"):
                is_error(server.get(path, server.metrics_key, host=host), "not_found")
        assert server.rows("SELECT 1 FROM usage") == []
        assert all(key["last_used"] is None for key in server.keys().values()), server.keys()
