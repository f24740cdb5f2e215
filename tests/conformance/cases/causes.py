"""Why a request got no completion: a word of a fixed list, the same in its log line and in its row."""

import json
import re
import time

from harness import (
    MAX_BODY, SILENT, Runtime, Server, beside, chat, held_server, is_completion, is_error, read_reply, request, until)
from shared import RUNTIME, UNREACHABLE

PAIR = r'([a-z_]+)=("[^"]*"|[^ "]+)'


def _lines(server, request_id, count=1):
    """Returns the names and values of each of a request's lines."""
    lines = lambda: [line.partition("] ")[2] for line in server.logged().splitlines() if request_id in line]  # noqa: E731
    assert until(lambda: len(lines()) >= count), f"not {count} lines of {request_id}: {server.last_logged()}"
    for line in lines():
        assert line.startswith(f"id={request_id} ") and re.fullmatch(f"({PAIR} ?)+", line), line
    return [dict(re.findall(PAIR, line)) for line in lines()]


def _has_cause(server, reply, code, cause, key="-", row=True, details=""):
    error = is_error(reply, code)
    lines = _lines(server, error["request_id"], 2 if details else 1)
    assert (lines[0]["cause"], lines[0]["key"], lines[0]["error"]) == (cause, key, code), lines
    assert len(lines) == (2 if details else 1) and details in lines[-1].get("details", ""), (details, lines)
    rows = server.rows("SELECT cause FROM usage WHERE request_id = ?", error["request_id"])
    assert rows == ([(cause,)] if row else []), (cause, rows)
    return error


def a_refusal_without_a_valid_key_has_its_cause_and_a_known_key_its_id():
    with Server(RUNTIME, log_level="trace") as server:
        key, revoked, expired = (server.create_key(name) for name in ("good", "revoked", "expired"))
        ids = {name: known["id"] for name, known in server.keys().items()}
        server.cli("keys", "revoke", ids["revoked"])
        server.change(f"UPDATE keys SET expires = 1 WHERE id = '{ids['expired']}'")
        large = request(b"", key, framing=f"Content-Length: {MAX_BODY + 1}")
        for reply, code, cause, name in (
                (server.post(chat(), key, path="/v1/xyzzy"), "not_found", "route", None),
                (server.raw(large), "payload_too_large", "too_large", None),
                (server.raw(b"XYZZY\r\n\r\n"), "invalid_request", "http", None),
                (server.post(chat()), "invalid_api_key", "no_key", None),
                (server.post(chat(), "xyzzy"), "invalid_api_key", "no_key", None),
                (server.post(chat(), "adr_" + 48 * "0"), "invalid_api_key", "unknown_key", None),
                (server.post(chat(), revoked), "invalid_api_key", "revoked", "revoked"),
                (server.post(chat(), expired), "invalid_api_key", "expired", "expired")):
            _has_cause(server, reply, code, cause, ids.get(name, "-"), row=False)
        # What a host is not is in a line of its own, with the setting that decides it.
        elsewhere = server.post(chat(), key, host="xyzzy.test")
        _has_cause(server, elsewhere, "not_found", "host", row=False, details="one of api_hosts (")
        assert "xyzzy" not in server.logged().lower(), "the log has a client's text"


def a_refusal_of_a_valid_key_has_its_cause():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME, log_level="trace") as server:
        key, metrics_key = server.create_key("good"), server.create_key("watch", "--permission", "metrics")
        ids = {name: known["id"] for name, known in server.keys().items()}
        _has_cause(server, server.post(chat(), metrics_key), "insufficient_permission", "permission", ids["watch"])
        message = {"role": "user", "content": "xyzzy"}
        for body, parts, cause in (
                (chat(), {"content_type": "text/xyzzy"}, "content_type"),
                (chat(), {"headers": [("Content-Encoding", "xyzzy")]}, "content_encoding"),
                (b"xyzzy", {}, "body"),
                (chat(max_tokens=513), {}, "max_tokens"),
                (chat(temperature="hot"), {}, "temperature"),
                (chat(messages=[]), {}, "messages"),
                (chat(model="xyzzy"), {}, "model"),
                (chat(stream=False), {}, "stream"),
                (chat(max_completion_tokens=5), {}, "max_completion_tokens"),
                (chat(messages=[message | {"role": "xyzzy"}]), {}, "role"),
                (chat(messages=[message | {"content": ["xyzzy"]}]), {}, "content"),
                (chat(messages=[message | {"xyzzy": 1}]), {}, "unknown_member"),
                (chat(xyzzy=1), {}, "unknown_member")):
            error = _has_cause(server, server.post(body, key, **parts), "invalid_request", cause, ids["good"])
            shown = json.loads(server.cli("usage", "show", error["request_id"], "--json").stdout)
            assert shown["cause"] == cause, shown
            assert cause in server.cli("usage", "show", error["request_id"]).stdout
        done = is_completion(server.post(chat("xyzzy"), key))
        assert _lines(server, done["id"])[0]["cause"] == "-"
        assert server.rows("SELECT cause FROM usage WHERE request_id = ?", done["id"]) == [(None,)]
        assert "xyzzy" not in server.logged(), "the log has a client's text"
        server.cli("usage", "verify")


def a_refused_parameter_says_what_to_do():
    with Server(RUNTIME) as server:
        key = server.create_key()
        for members, hint in (({"max_completion_tokens": 5}, "max_tokens."), ({"stream": False}, 'compatibility = "openai"')):
            error = is_error(server.post(chat() | members, key), "invalid_request")
            assert hint in error["message"], error


def a_failure_has_its_class_and_a_second_line_has_the_details():
    runtime = Runtime()
    with Server(runtime) as server:
        key, key_id = server.create_key("good"), server.keys()["good"]["id"]
        too_long = {"error": {"code": "context_length_exceeded"}}
        for answer, code, cause, details in (
                ((500, {}), "inference_error", "status_500", "HTTP status 500"),
                ((404, {}), "inference_error", "status_404", "HTTP status 404"),
                ((429, {}), "inference_error", "status_429", "HTTP status 429"),
                ((200, b"xyzzy"), "inference_error", "not_json", "not JSON of the expected form"),
                ((200, {"choices": []}), "inference_error", "no_text", "has no text"),
                ((200, b"x" * (8 << 20)), "inference_error", "answer_too_large", "too large"),
                ((None, b""), "inference_error", "broken", "runtime http://"),
                ((400, too_long), "invalid_request", "context", "")):
            runtime.answer = lambda body, answer=answer: answer
            reply = server.post(chat(), key)
            error = _has_cause(server, reply, code, cause, key_id, details=details)
            assert "xyzzy" not in error["message"], "the message has a text of the runtime"
            # The runtime has answered, so a retry would only cost another inference.
            assert reply.headers.get("x-should-retry") == ("false" if cause == "no_text" else None), reply.headers
        server.cli("usage", "verify")
    for settings, code, cause, details in (
            ({"runtime_url": f"{UNREACHABLE.url}/v1"}, "inference_error", "refused", "no connection: "),
            ({}, "service_unavailable", "no_runtime", "set runtime.url")):
        with Server(**settings) as server:
            key, key_id = server.create_key("good"), server.keys()["good"]["id"]
            reply = server.post(chat(), key)
            _has_cause(server, reply, code, cause, key_id, details=details)
            assert "x-should-retry" not in reply.headers, "no inference was spent"


@beside
def a_runtime_timeout_is_not_to_be_retried():
    runtime = Runtime()
    runtime.answer = lambda _body: (SILENT, None)
    with Server(runtime, runtime_timeout=1) as server:
        key, key_id = server.create_key("good"), server.keys()["good"]["id"]
        reply = server.post(chat(), key)
        _has_cause(server, reply, "inference_error", "timeout", key_id, details="no complete answer in 1.")
        assert reply.headers.get("x-should-retry") == "false", reply.headers


def a_shed_request_has_its_cause():
    """The listener counts such requests in one line a minute; at the level `debug` each has its own as well."""
    with held_server(workers=1, queue=0, log_level="debug") as (server, runtime, gate, send):
        key = server.create_key()
        running = send(key, "held")
        assert until(lambda: runtime.calls)
        reply = server.post(chat(), key)
        _has_cause(server, reply, "service_unavailable", "queue_full", row=False)
        assert reply.headers["retry-after"] == "1", "it is soon over"
        assert until(lambda: "listener, since the last line: queue_full=1" in server.logged()), server.last_logged()
        gate.set()
        is_completion(read_reply(running), "held")


def refusals_of_strangers_have_few_lines_and_a_summary():
    """Keys that do not exist were logged one by one, 5 MB per second on 8 connections."""
    with Server(RUNTIME) as server:
        stranger, count, began = request(chat(), "adr_" + 48 * "0"), 400, time.monotonic()
        with server.connect() as connection:
            for _ in range(count):
                connection.sendall(stranger)
                is_error(read_reply(connection), "invalid_api_key")
        assert server.stop() == 0
        log = server.logged()
        lines = log.count(" status=401 ")
        assert 20 <= lines <= 21 + time.monotonic() - began, log
        summary = r"further requests refused without a valid key in the last \d+ s: (\d+) \(unknown_key \d+\), most from 127\.0\.0\.1\n"
        assert lines + sum(map(int, re.findall(summary, log))) == count, log
