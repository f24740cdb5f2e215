"""HTTP/1.1 on the wire: framing, persistent connections, and requests that must not be accepted."""

import contextlib
import json
import re
import threading

from harness import (MAX_BODY, Runtime, Server, beside, chat, chunked, ends, is_completion, is_error, padded, read_reply,
                     request)
from shared import KEY, METRICS_KEY, RUNTIME, SERVER, ok


def persistent_connections_and_pipelining():
    RUNTIME.answer = RUNTIME.echo
    with SERVER.connect() as connection:
        for content in ("one", "after", "the other"):
            connection.sendall(request(chat(content), KEY))
            is_completion(read_reply(connection), content)
        trailers = "0\r\nX-A: a\r\nX-B: b\r\n\r\n"
        connection.sendall(request(chat("first"), KEY) + chunked(chat("second"), KEY, last=trailers)
                           + request(chat("third"), KEY))
        rest = b""
        for content in ("first", "second", "third"):
            reply = read_reply(connection, rest)
            is_completion(reply, content)
            rest = reply.rest
        assert rest == b"", rest


def chunked_bodies():
    RUNTIME.answer = RUNTIME.good
    is_completion(SERVER.raw(chunked(chat(), KEY)))
    is_completion(SERVER.raw(chunked(chat(), KEY).replace(b": chunked", b": Chunked")))
    is_completion(SERVER.raw(chunked(chat(), KEY, extension=";name=value", last="0\r\nX-After: y\r\n\r\n")))
    is_completion(SERVER.raw(chunked(padded(MAX_BODY), KEY, 65_536)))


def the_body_of_a_refused_request_is_not_the_next_request():
    RUNTIME.answer = RUNTIME.echo
    inner = request(chat("inner"), KEY)
    for parts in ({"key": None}, {"key": METRICS_KEY}, {"path": "/v1/nope"}, {"host": "example.com"}, {"method": "PUT"},
                  {"content_type": "text/plain"}, {"body": inner + b" " * MAX_BODY}):
        before = len(RUNTIME.calls)
        with SERVER.connect() as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(request(**{"body": inner, "key": KEY} | parts) + request(chat("next"), KEY))
            first = read_reply(connection)
            assert first.status in (400, 401, 403, 404, 413), first
            with contextlib.suppress(ConnectionError):
                second = read_reply(connection, first.rest)
                assert not second.status or is_completion(second, "next")
        assert "inner" not in str(RUNTIME.calls[before:]), "the body of a refused request was run"


def a_request_sent_byte_by_byte():
    RUNTIME.answer = RUNTIME.good
    whole = request(chat(), KEY, headers=[("Connection", "Close")])
    with SERVER.connect() as connection:
        for index in range(len(whole)):
            connection.sendall(whole[index:index + 1])
        is_completion(read_reply(connection))
        assert ends(connection), "Connection: close was not honoured"


def expect_continue():
    RUNTIME.answer = RUNTIME.good
    head, _, body = request(chat(), KEY, headers=[("Expect", "100-continue")]).partition(b"\r\n\r\n")
    with SERVER.connect() as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 100"), "no 100 Continue"
        connection.sendall(body)
        is_completion(read_reply(connection))


def a_request_that_its_head_refuses_is_not_asked_for_its_body():
    large, chunks = {"framing": "Content-Length: 262145"}, {"framing": "Transfer-Encoding: chunked"}
    expect = ("Expect", "100-continue")
    for parts, code in (({"key": None}, "invalid_api_key"), ({"key": None} | chunks, "invalid_api_key"),
                        ({"headers": [("Authorization", "Bearer x"), expect]}, "invalid_api_key"),
                        (large, "payload_too_large"), ({"key": None} | large, "payload_too_large"),
                        ({"path": "/v1/nope"}, "not_found"), ({"key": None, "method": "PUT"} | large, "not_found"),
                        ({"key": None, "host": "example.com"} | chunks, "not_found")):
        whole = request(**{"body": chat(), "key": KEY, "headers": [expect]} | parts)
        with SERVER.connect() as connection:
            connection.sendall(whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
            reply = read_reply(connection)
            is_error(reply, code)
            assert reply.headers["connection"] == "close" and ends(connection), "it stays open although the body has not come"


def a_refused_request_with_its_body_or_without_one_keeps_the_connection():
    RUNTIME.answer = RUNTIME.good
    with SERVER.connect() as connection:
        for _ in range(3):
            connection.sendall(request(chat(), None))
            is_error(read_reply(connection), "invalid_api_key")
            connection.sendall(b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n")
            is_error(read_reply(connection), "not_found")
        connection.sendall(request(chat(), KEY))
        is_completion(read_reply(connection))


def names_and_schemes_in_any_case():
    RUNTIME.answer = RUNTIME.good
    for scheme in ("bearer", "BEARER", "BeArEr"):
        is_completion(SERVER.post(chat(), None, headers=[("Authorization", f"{scheme} {KEY}")]))
    head, _, body = request(chat(), KEY).partition(b"\r\n\r\n")
    line, _, headers = head.partition(b"\r\n")
    for change in (bytes.lower, bytes.upper):
        spelt = re.sub(rb"(?m)^[\w-]+", lambda name: change(name[0]), headers)
        is_completion(SERVER.raw(line + b"\r\n" + spelt + b"\r\n\r\n" + body))


def http_1_0_is_closed_unless_it_asks_for_keep_alive():
    RUNTIME.answer = RUNTIME.good
    reply = SERVER.raw(request(chat(), KEY, version="HTTP/1.0"), closes=True)
    is_completion(reply)
    assert reply.headers["connection"] == "close", reply.headers
    with SERVER.connect() as connection:
        for _ in range(2):
            connection.sendall(request(chat(), KEY, version="HTTP/1.0", headers=[("Connection", "keep-alive")]))
            reply = read_reply(connection)
            is_completion(reply)
            assert reply.headers["connection"] == "keep-alive", reply.headers


def http_that_cannot_be_parsed():
    line, host = b"POST /v1/chat/completions HTTP/1.1\r\n", b"Host: api.test\r\n"
    for raw in (b"GARBAGE\r\n\r\n", b"POST /v1/chat/completions\r\n\r\n",
                b"POST /v1/chat/completions HTTP/3.0\r\n" + host + b"\r\n",
                line + b"\r\n", line + host + host + b"\r\n", line + host + b"Host: example.com\r\n\r\n",
                line + host + b"bad header\r\n\r\n", line + host + b"X-Space : y\r\n\r\n",
                line + host + b"X: " + b"a" * 16_500 + b"\r\n\r\n"):
        is_error(SERVER.raw(raw, closes=True), "invalid_request")
    ok(chat(), headers=[("X", "a" * 15_900)])


def an_early_answer_reaches_a_client_that_is_still_sending():
    """It is accepted and dropped, up to a limit: a close with unread bytes would destroy the answer."""
    much = b"x" * 6_000_000
    for start, code in ((b"GARBAGE\r\n\r\n", "invalid_request"),
                        (request(b"", KEY, framing=f"Content-Length: {len(much)}"), "payload_too_large")):
        with SERVER.connect() as connection:
            connection.sendall(start)
            connection.sendall(much)
            is_error(read_reply(connection), code)
            assert ends(connection)


def bytes_that_cannot_begin_a_request_are_refused_at_once():
    for raw in (b"\0\0\0", b"SSH-2.0-x\r\n", b"GET /\r\n", b"\n", b"\r\n\r\n\r\n", b" GET / HTTP/1.1\r\n",
                b"POST /v1/chat/completions# HTTP/1.1\r\n", b"POST /\xc3\xa9 HTTP/1.1\r\n", b"\x16\x03\x01\0\xf8\1"):
        with SERVER.connect(timeout=15) as connection:
            connection.sendall(raw)
            is_error(read_reply(connection), "invalid_request")
            assert ends(connection)


def framing_that_is_not_safe():
    for framing in ("Content-Length: x", "Content-Length: -1", "Content-Length: +5", "Content-Length: 5, 6",
                    "Content-Length: 5\r\nContent-Length: 6", "Content-Length: 5\r\nContent-Length: 5",
                    "Content-Length: 5, 5", "Content-Length: 5\r\nTransfer-Encoding: chunked",
                    "Transfer-Encoding: gzip", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: identity",
                    "Transfer-Encoding: xchunked"):
        is_error(SERVER.raw(request(b"0\r\n\r\n", framing=framing), closes=True), "invalid_request")
    raw = json.dumps(chat()).encode()
    for size in ("zz", "", f"+{len(raw):x}", f"-{len(raw):x}", f"0x{len(raw):x}", f"{len(raw) - 1:x}"):
        body = size.encode() + b"\r\n" + raw + b"\r\n0\r\n\r\n"
        reply = SERVER.raw(request(body, KEY, framing="Transfer-Encoding: chunked"), closes=True)
        is_error(reply, "invalid_request")
    ok(chat())


def concurrent_requests_get_their_own_answers():
    together, failures = threading.Barrier(8), []
    RUNTIME.answer = lambda body: (together.wait(60), RUNTIME.echo(body))[1]

    def send(number):
        try:
            is_completion(SERVER.post(chat(f"number {number}"), KEY), f"number {number}")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures, failures


@beside
def an_incomplete_request_gets_400_and_an_idle_connection_nothing():
    """Takes a minute: the service waits 20 s for the rest of a request and 60 s for the next one."""
    with Server(Runtime()) as server, contextlib.ExitStack() as stack:
        key = server.create_key()
        idle, half, used, blank = (stack.enter_context(server.connect(timeout=180)) for _ in range(4))
        used.sendall(request(chat("x"), key))
        is_completion(read_reply(used), "x")
        blank.sendall(b"\r\n\r\n")
        half.sendall(request(chat("x"), key)[:-1])
        is_error(read_reply(half), "invalid_request")
        assert ends(half), "the connection of an incomplete request stays open"
        assert ends(idle) and ends(used) and ends(blank), "an idle connection got an answer"
