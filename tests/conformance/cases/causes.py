"""Why a request got no completion: a word of a fixed list, the same in its log line and in its row."""

import json
import signal
import threading

from harness import (
    MAX_BODY, SILENT, STOP_SECONDS, Runtime, Server, beside, chat, is_completion, is_error, read_reply, request, until)
from shared import RUNTIME, UNREACHABLE

MEMBERS = ({"max_tokens": 513}, {"temperature": "hot"}, {"messages": []}, {"model": "xyzzy"}, {"stream": False},
           {"max_completion_tokens": 5})


def _line(server, request_id):
    """Returns the names and values of a request's line."""
    lines = lambda: [line for line in server.logged().splitlines() if request_id in line]  # noqa: E731
    assert until(lines), f"no line of {request_id}: {server.last_logged()}"
    pairs = lines()[0].partition("] ")[2].split(" ")
    assert pairs[0] == f"id={request_id}" and all("=" in pair for pair in pairs), lines()[0]
    return dict(pair.split("=", 1) for pair in pairs)


def _has_cause(server, reply, code, cause, key="-", row=True):
    error = is_error(reply, code)
    line = _line(server, error["request_id"])
    assert (line["cause"], line["key"], line["error"]) == (cause, key, code), line
    rows = server.rows("SELECT cause FROM usage WHERE request_id = ?", error["request_id"])
    assert rows == ([(cause,)] if row else []), (cause, rows)
    return error


def a_refusal_without_a_valid_key_has_its_cause_and_a_known_key_its_id():
    with Server(RUNTIME) as server:
        key, revoked, expired = (server.create_key(name) for name in ("good", "revoked", "expired"))
        ids = {name: known["id"] for name, known in server.keys().items()}
        server.cli("keys", "revoke", ids["revoked"])
        server.change(f"UPDATE keys SET expires = 1 WHERE id = '{ids['expired']}'")
        large = request(b"", key, framing=f"Content-Length: {MAX_BODY + 1}")
        for reply, code, cause, name in (
                (server.post(chat(), key, host="xyzzy.test"), "not_found", "host", None),
                (server.post(chat(), key, path="/v1/xyzzy"), "not_found", "route", None),
                (server.raw(large), "payload_too_large", "too_large", None),
                (server.raw(b"XYZZY\r\n\r\n"), "invalid_request", "http", None),
                (server.post(chat()), "invalid_api_key", "no_key", None),
                (server.post(chat(), "adr_" + 48 * "0"), "invalid_api_key", "unknown_key", None),
                (server.post(chat(), revoked), "invalid_api_key", "revoked", "revoked"),
                (server.post(chat(), expired), "invalid_api_key", "expired", "expired")):
            _has_cause(server, reply, code, cause, ids.get(name, "-"), row=False)
        assert "xyzzy" not in server.logged().lower(), "the log has a client's text"
        assert "one of api_hosts (" in server.logged(), "the log does not name the setting that a 404 depends on"


def a_refusal_of_a_valid_key_has_its_cause():
    with Server(RUNTIME) as server:
        key, metrics_key = server.create_key("good"), server.create_key("watch", "--permission", "metrics")
        ids = {name: known["id"] for name, known in server.keys().items()}
        _has_cause(server, server.post(chat(), metrics_key), "insufficient_permission", "permission", ids["watch"])
        causes = [(chat() | members, next(iter(members))) for members in MEMBERS]
        message = {"role": "user", "content": "x"}
        causes += [(chat(messages=[message | {name: 7}]), name) for name in message]
        causes += [(chat(xyzzy=1), "unknown_member"), (chat(messages=[message | {"xyzzy": 1}]), "unknown_member")]
        for body, cause in causes:
            error = _has_cause(server, server.post(body, key), "invalid_request", cause, ids["good"])
            shown = json.loads(server.cli("usage", "show", error["request_id"], "--json").stdout)
            assert shown["cause"] == cause, shown
            assert cause in server.cli("usage", "show", error["request_id"]).stdout
        assert "xyzzy" not in server.logged(), "the log has a client's text"
        server.cli("usage", "verify")


def a_refused_parameter_says_what_to_do():
    with Server(RUNTIME) as server:
        key = server.create_key()
        for members, hint in (({"max_completion_tokens": 5}, "max_tokens."), ({"stream": False}, 'compatibility = "openai"')):
            error = is_error(server.post(chat() | members, key), "invalid_request")
            assert hint in error["message"], error


def a_failure_has_its_class():
    runtime = Runtime()
    with Server(runtime) as server:
        key, key_id = server.create_key("good"), server.keys()["good"]["id"]
        for answer, cause in (((500, {}), "status_500"), ((429, {}), "status_429"), ((200, b"xyzzy"), "not_json"),
                              ((200, {"choices": []}), "no_text"), ((None, b""), "broken")):
            runtime.answer = lambda body, answer=answer: answer
            reply = server.post(chat(), key)
            _has_cause(server, reply, "inference_error", cause, key_id)
            # The runtime has answered, so a retry would only cost another inference.
            assert reply.headers.get("x-should-retry") == ("false" if cause == "no_text" else None), reply.headers
        server.cli("usage", "verify")
    for settings, code, cause in (({"runtime_url": f"{UNREACHABLE.url}/v1"}, "inference_error", "refused"),
                                  ({}, "service_unavailable", "no_runtime")):
        with Server(**settings) as server:
            key, key_id = server.create_key("good"), server.keys()["good"]["id"]
            _has_cause(server, server.post(chat(), key), code, cause, key_id)


@beside
def a_runtime_timeout_is_not_to_be_retried():
    runtime = Runtime()
    runtime.answer = lambda _body: (SILENT, None)
    with Server(runtime, runtime_timeout=1) as server:
        key, key_id = server.create_key("good"), server.keys()["good"]["id"]
        reply = server.post(chat(), key)
        _has_cause(server, reply, "inference_error", "timeout", key_id)
        assert reply.headers.get("x-should-retry") == "false", reply.headers


def a_stop_says_how_many_requests_it_waits_for():
    runtime, gate = Runtime(), threading.Event()
    runtime.answer = runtime.held(gate)
    with Server(runtime) as server, server.connect() as connection:
        connection.sendall(request(chat(), server.create_key()))
        assert until(lambda: runtime.calls)
        server.process.send_signal(signal.SIGTERM)
        is_logged = until(lambda: "stopping: no new connections; waits for 1 request\n" in server.logged())
        gate.set()
        is_completion(read_reply(connection))
        assert server.process.wait(STOP_SECONDS) == 0 and is_logged, server.last_logged()
