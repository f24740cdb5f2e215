"""Refused requests: 400, 401, 403, 404 and 413, what the messages say, and which error wins."""

import json

from harness import MAX_BODY, Server, chat, chunked, is_completion, is_error, padded, request, turns
from shared import KEY, METRICS_KEY, RUNTIME, SERVER, bad, ok

# --- 400 -----------------------------------------------------------------------------------------


def a_body_that_is_not_a_json_object():
    valid = json.dumps(chat()).encode()
    for raw in (b"", b" ", b"{", b"nonsense", b"[]", b"null", b'"text"', b"1", b"\xff\xfe", b'{"model":"adriaticum"',
                valid + b"x", valid * 2, b"\xef\xbb\xbf" + valid, b"[" + valid + b"]", valid[:-1] + b",}",
                json.dumps(chat("a~b")).encode().replace(b"~", b"\n"), b"[" * 100_000, b'{"a":' * 40_000):
        bad(raw)
    is_error(SERVER.raw(request(b"", KEY, framing="X-No: length")), "invalid_request")


def text_that_is_not_unicode():
    for content in (b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\udf0a\\ud83c"):
        bad(b'{"model":"adriaticum","messages":[{"role":"user","content":"%s"}]}' % content)


def missing_members():
    for member in ("model", "messages"):
        body = chat()
        del body[member]
        assert member in bad(body)["message"]
    for member in ("role", "content"):
        message = {"role": "user", "content": "x"}
        del message[member]
        assert f"messages[0].{member}" in bad({"model": "adriaticum", "messages": [message]})["message"]


def unrecognized_members():
    for extra in ({"stream": True}, {"stream": False}, {"n": 1}, {"top_p": 1}, {"user": "x"}, {"tools": []},
                  {"Model": "adriaticum"}, {"max_completion_tokens": 5}, {"": 1}):
        assert list(extra)[0] in bad(chat() | extra)["message"]
    bad({"model": "adriaticum", "messages": [{"role": "user", "content": "x", "name": "y"}]})


def a_message_repeats_at_most_64_characters_of_a_name():
    message = bad(chat() | {"é" * 5_000: 1})["message"]
    assert "é" * 60 in message and "é" * 65 not in message, message


def duplicate_members():
    bad(b'{"model":"adriaticum","model":"adriaticum","messages":[{"role":"user","content":"x"}]}')
    bad(b'{"model":"adriaticum","\\u006dodel":"adriaticum","messages":[{"role":"user","content":"x"}]}')
    bad(b'{"model":"adriaticum","messages":[{"role":"user","content":"x","content":"x"}]}')


def wrong_types():
    for members in ({"model": 1}, {"model": None}, {"messages": {}}, {"messages": None}, {"messages": "x"},
                    {"temperature": "0.7"}, {"temperature": None}, {"temperature": True}, {"temperature": []},
                    {"max_tokens": "5"}, {"max_tokens": 5.5}, {"max_tokens": 5.0}, {"max_tokens": None},
                    {"max_tokens": True}):
        bad(chat() | members)
    for content in (None, 1, [], [{"type": "text", "text": "x"}], {}, True):
        bad({"model": "adriaticum", "messages": [{"role": "user", "content": content}]})
    for message in (None, "x", [], 1):
        bad({"model": "adriaticum", "messages": [message]})


def wrong_values():
    for members in ({"model": "gpt-4o"}, {"model": ""}, {"model": "Adriaticum"}, {"model": "adriaticum "},
                    {"messages": []}, {"temperature": -0.1}, {"temperature": 2.0001}, {"temperature": 1e300},
                    {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 513}, {"max_tokens": 2**64}):
        bad(chat() | members)
    for number in (b"1e400", b"NaN", b"Infinity", b"01"):
        bad(json.dumps(chat()).encode()[:-1] + b',"temperature":%s}' % number)
    for role in ("tool", "developer", "User", "", None, 1):
        bad({"model": "adriaticum", "messages": [{"role": role, "content": "x"}]})


def an_exceeded_bound_is_named_with_the_value_sent():
    for body, parts in ((turns(*["a"] * 21), ("messages", "20", "21")),
                        (turns(*["a"] * 3, "a" * 10_001), ("messages[3].content", "10000", "10001")),
                        (chat("é" * 10_002), ("messages[0].content", "10000", "10002")),
                        (turns(*["a" * 8_000] * 4, "a"), ("messages", "32000", "32001")),
                        (chat(temperature=2.5), ("temperature", "2", "2.5")),
                        (chat(max_tokens=513), ("max_tokens", "512", "513"))):
        message = bad(body)["message"].replace(",", "")
        assert all(part in message for part in parts), f"{parts} expected in {message!r}"


def the_content_type_must_be_json():
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
                 "application/jsonl", "application/problem+json"):
        bad(chat(), content_type=kind)
    ok(chat(), content_type="application/json; charset=utf-8")
    ok(chat(), content_type="Application/JSON")


def any_content_encoding_is_refused():
    for coding in ("gzip", "br", "identity"):
        bad(chat(), headers=[("Content-Encoding", coding)])


# --- 401, 403 --------------------------------------------------------------------------------------


def missing_and_malformed_keys():
    bad(chat(), "invalid_api_key", key=None)
    for value in ("", "Bearer", "Bearer ", "Basic dXNlcjpwYXNz", KEY, f"Token {KEY}", "Bearer x", "Bearer adr_",
                  f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY.upper()}", f"Bearer {KEY} {KEY}",
                  "Bearer adr_" + "0" * 48, "Bearer ' OR 1=1 --", "Bearer é"):
        error = bad(chat(), "invalid_api_key", key=None, headers=[("Authorization", value)])
        assert KEY[:-1] not in json.dumps(error), "the key is echoed"


def two_authorization_headers_are_refused():
    bad(chat(), "invalid_api_key", headers=[("Authorization", f"Bearer {KEY}")])


def a_key_without_the_permission():
    error = bad(chat(), "insufficient_permission", key=METRICS_KEY)
    assert METRICS_KEY not in json.dumps(error), "the key is echoed"


# --- 404 -----------------------------------------------------------------------------------------


def unknown_routes_and_methods():
    for path in ("/", "/v1", "/v1/", "/v1/models", "/v1/chat", "/v1/chat/completions/", "/chat/completions",
                 "/v2/chat/completions", "/V1/chat/completions", "/v1//chat/completions", "/v1/chat/completions/x",
                 "/v1/chat/../chat/completions", "/healthz", "/metrics", "/keys", "/usage"):
        bad(chat(), "not_found", path=path)
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND", "post"):
        bad(chat(), "not_found", method=method)


def a_head_request_gets_the_headers_of_its_404():
    with SERVER.connect() as connection:
        connection.sendall(request(b"", KEY, method="HEAD", headers=[("Connection", "close")]))
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    assert data.startswith(b"HTTP/1.1 404 ") and data.endswith(b"\r\n\r\n"), data
    assert b"\r\nx-request-id: chatcmpl_" in data.lower(), data


def a_query_is_ignored():
    ok(chat(), path="/v1/chat/completions?x=1")


def other_hosts_do_not_serve_the_api():
    for host in ("example.com", "console.test", "api.test.example.com", "xapi.test", "localhost", "[::1]", ""):
        bad(chat(), "not_found", host=host)
    for host in ("api.test", "API.test", f"api.test:{SERVER.port}", "api.test:1", "127.0.0.1",
                 f"127.0.0.1:{SERVER.port}"):
        ok(chat(), host=host)
    with Server(RUNTIME, api_hosts="::1,other.test") as server:
        key = server.create_key()
        for host in ("[::1]", f"[::1]:{server.port}", "other.test"):
            is_completion(server.post(chat(), key, host=host))
        is_error(server.post(chat(), key), "not_found")


def an_absolute_target_names_the_host():
    ok(chat(), host="api.test", path="http://api.test/v1/chat/completions")
    ok(chat(), host="example.com", path=f"http://api.test:{SERVER.port}/v1/chat/completions?x=1")
    bad(chat(), "not_found", host="api.test", path="http://example.com/v1/chat/completions")


# --- 413 -----------------------------------------------------------------------------------------


def a_body_over_the_limit():
    bad(padded(MAX_BODY + 1), "payload_too_large")
    bad(padded(MAX_BODY * 8), "payload_too_large")
    is_error(SERVER.raw(chunked(padded(MAX_BODY + 1), KEY, 65_536)), "payload_too_large")
    is_error(SERVER.raw(chunked(padded(MAX_BODY + 65_536), KEY, 65_536, last="")), "payload_too_large")


def a_declared_length_over_the_limit():
    for length in (MAX_BODY + 1, 10**10, 10**13, 2**63 - 1):
        is_error(SERVER.raw(request(b"", KEY, framing=f"Content-Length: {length}")), "payload_too_large")
    ok(chat())


# --- precedence ------------------------------------------------------------------------------------


def which_error_wins():
    huge, junk, text = padded(MAX_BODY + 1), b"junk", {"content_type": "text/plain"}
    bad(huge, "not_found", key=None, host="example.com")
    bad(huge, "not_found", key=None, path="/v1/nope")
    bad(huge, "payload_too_large", key=None)
    bad(junk, "invalid_api_key", key=None, **text)
    bad(junk, "insufficient_permission", key=METRICS_KEY, **text)
    bad(junk, "invalid_request", **text)
