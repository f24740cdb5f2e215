"""Successful completions: defaults, bounds that are included, text and token figures passed on unchanged."""

import json

from harness import MAX_BODY, chat, is_completion, is_error, padded, turns, until
from shared import KEY, RUNTIME, SERVER, bad, ok


def defaults_are_sent_to_the_runtime():
    ok(chat())
    call = RUNTIME.calls[-1]
    assert call.path == "/v1/chat/completions", call.path
    assert call.body["model"] == "adriaticum", call.body
    assert call.body["temperature"] == 0.7 and call.body["max_tokens"] == 248, call.body
    assert call.body["messages"] == chat()["messages"], call.body
    assert call.body.get("stream", False) is False, call.body


def members_are_passed_on():
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    ok({"model": "adriaticum", "messages": messages, "temperature": 1.25, "max_tokens": 17})
    sent = RUNTIME.calls[-1].body
    assert sent["messages"] == messages and sent["temperature"] == 1.25 and sent["max_tokens"] == 17, sent


def bounds_are_included():
    for members in ({"temperature": 0}, {"temperature": 0.0}, {"temperature": 2}, {"temperature": 2.0},
                    {"max_tokens": 1}, {"max_tokens": 512}):
        ok(chat() | members)
    ok(chat(""))
    ok(chat("a" * 10_000))
    ok(chat("é" * 10_000))
    ok(chat("\U0001f30a" * 10_000))
    ok(turns(*["a"] * 20))
    ok(turns(*["a" * 8_000] * 4))
    ok(json.dumps(turns(*["\U0001f30a" * 8_000] * 4), ensure_ascii=False).encode())


def a_body_of_exactly_the_limit_is_accepted():
    ok(padded(MAX_BODY))


def text_is_unchanged_in_both_directions():
    text = ' spaces around, quote " back \\ slash / tab \t newline \n \u2028 emoji \U0001f30a combining e\u0301 \n'
    ok(chat(text))
    assert RUNTIME.calls[-1].body["messages"][0]["content"] == text
    RUNTIME.answer = lambda body: (200, RUNTIME.completion(text))
    is_completion(SERVER.post(chat(), KEY), text)


def ids_are_unique():
    ids = {ok(chat())["id"] for _ in range(20)}
    assert len(ids) == 20


def the_log_line_has_the_request_id():
    ids = ok(chat())["id"], bad(chat(), "invalid_api_key", key=None)["request_id"]
    assert until(lambda: all(request_id in SERVER.logged() for request_id in ids)), f"the log has no line for {ids}"


def the_finish_reason_is_the_runtimes():
    for reason in ("stop", "length", "content_filter"):
        RUNTIME.answer = lambda body, reason=reason: (200, RUNTIME.completion("x", reason))
        is_completion(SERVER.post(chat(), KEY), "x", reason)


def a_missing_finish_reason_becomes_stop_if_there_is_text():
    without = RUNTIME.completion("x")
    del without["choices"][0]["finish_reason"]
    for reply in (without, RUNTIME.completion("x", None)):
        RUNTIME.answer = lambda body, reply=reply: (200, reply)
        is_completion(SERVER.post(chat(), KEY), "x", "stop")


def a_finish_reason_is_at_most_64_printable_characters():
    for reason, expected in (("a" * 64, "a" * 64), ("a ~", "a ~"), ("a" * 65, "stop"), ("a" * 100_000, "stop"),
                             ("st\u00f6p", "stop"), ("a\nb", "stop"), ("\u0000", "stop"), (7, "stop"), ({}, "stop")):
        RUNTIME.answer = lambda body, reason=reason: (200, RUNTIME.completion("x", reason))
        is_completion(SERVER.post(chat(), KEY), "x", expected)


def an_empty_completion_is_a_completion():
    RUNTIME.answer = lambda body: (200, RUNTIME.completion(""))
    is_completion(SERVER.post(chat(), KEY), "")


def a_reasoning_model_that_has_used_up_its_tokens_has_an_empty_text():
    RUNTIME.answer = lambda body: (200, RUNTIME.completion(None, "length"))
    is_completion(SERVER.post(chat(), KEY), "", "length")


def an_answer_without_text_has_its_tokens_in_the_ledger():
    RUNTIME.answer = lambda body: (200, RUNTIME.completion(None))
    reply = SERVER.post(chat(), KEY)
    error = is_error(reply, "inference_error")
    assert reply.headers.get("x-should-retry") == "false", reply.headers
    row = json.loads(SERVER.cli("usage", "show", error["request_id"], "--json").stdout)
    assert (row["status"], row["cause"], row["total_tokens"]) == (502, "no_text", 14), row


def token_figures_are_measured_or_null():
    for usage in ((7, None, None), (None, None, 9), (None, 4, None), (7, 4, None), (7, None, 11), (0, 0, 0)):
        RUNTIME.answer = lambda body, usage=usage: (200, RUNTIME.completion(usage=usage))
        is_completion(SERVER.post(chat(), KEY), usage=usage)
    RUNTIME.answer = lambda body: (200, RUNTIME.completion(usage=None))
    is_completion(SERVER.post(chat(), KEY), usage=(None, None, None))
    # A figure that cannot be one is null, and does not cost the client its answer.
    for figure in (1_000_000_001, 2**53, 2**64, 10**400, -1, 1.5, "7", True):
        RUNTIME.answer = lambda body, figure=figure: (200, RUNTIME.completion(usage=(11, 3, figure)))
        is_completion(SERVER.post(chat(), KEY), usage=(11, 3, None))
    RUNTIME.answer = lambda body: (200, RUNTIME.completion(usage=(0, 1, 1_000_000_000)))
    is_completion(SERVER.post(chat(), KEY), usage=(0, 1, 1_000_000_000))
    partial = RUNTIME.completion()
    del partial["usage"]["total_tokens"]
    RUNTIME.answer = lambda body: (200, partial)
    is_completion(SERVER.post(chat(), KEY), usage=(11, 3, None))
