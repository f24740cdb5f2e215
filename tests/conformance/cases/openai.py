"""`compatibility = "openai"`: what it accepts, streams, the models; and runtimes that think or restart."""

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time

from harness import Server, beside, chat, is_completion, is_error, request, until
from service import ROOT, free_port
from shared import KEY, RUNTIME, SERVER

OURS = {"model", "messages", "temperature", "max_tokens", "stream"}


def members_that_change_nothing_are_accepted():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME, compatibility="openai") as server:
        key = server.create_key()
        for members in ({"stream": False}, {"n": 1}, {"user": "u"}, {"top_p": 1.0}, {"tools": []}, {"seed": None},
                        {"response_format": {"type": "text"}}, {"tool_choice": "auto"}, {"stream_options": {}}):
            is_completion(server.post(chat(**members), key))
            assert set(RUNTIME.calls[-1].body) == OURS, RUNTIME.calls[-1].body
        for members, limit in (({}, 512), ({"max_tokens": 100_000}, 512), ({"max_completion_tokens": 9}, 9)):
            is_completion(server.post(chat(**members), key))
            assert RUNTIME.calls[-1].body["max_tokens"] == limit, RUNTIME.calls[-1].body
        parts = [{"type": "text", "text": text} for text in ("Name a sea.", "And a town.")]
        is_completion(server.post(chat(parts, user="u") | {"messages": [{"role": "developer", "content": parts}]}, key))
        assert RUNTIME.calls[-1].body["messages"] == [{"role": "system", "content": "Name a sea.\nAnd a town."}]


def members_that_change_the_result_are_refused_without_repeating_them():
    with Server(RUNTIME, compatibility="openai") as server:
        key = server.create_key()
        image = [{"type": "image_url", "image_url": {"url": "xyzzy"}}]
        for path, body in (("n", chat(n=2)), ("tools", chat(tools=[{"xyzzy": 1}])), ("top_p", chat(top_p=0.25)), ("stop", chat(stop=["xyzzy"])),
                           ("seed", chat(seed=7)), ("response_format", chat(response_format={"type": "json_object"})),
                           ("nonsense", chat(nonsense="xyzzy")), ("messages[0].content[0]", chat(image))):
            message = is_error(server.post(body, key), "invalid_request")["message"]
            assert message.startswith(path) and not {"xyzzy", "0.25", "json_object"} & set(message.split()), message
        assert "docs/clients.md" in is_error(server.post(chat(tools=[{}]), key), "invalid_request")["message"]


def _chunks(reply):
    """The chunks of a stream. It is ASCII, because some clients end a line at U+2028, U+2029 and U+0085."""
    assert reply.status == 200 and reply.headers["content-type"] == "text/event-stream; charset=utf-8", reply
    assert reply.body.isascii() and int(reply.headers["content-length"]) == len(reply.body), reply
    *events, done, end = reply.body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", ""), reply
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    for chunk in chunks:
        assert chunk["id"] == reply.headers["x-request-id"] and chunk["model"] == "adriaticum", chunk
        assert chunk["object"] == "chat.completion.chunk" and abs(chunk["created"] - time.time()) < 120, chunk
    return chunks


def a_stream_has_the_whole_completion():
    text = 'Zagreb \u2028\u2029\u0085 \N{WATER WAVE} "\\\n'
    with Server(RUNTIME, compatibility="openai") as server:
        key = server.create_key()
        RUNTIME.answer = lambda body: (200, RUNTIME.completion(text, "length"))
        for options, count in (({}, 2), ({"stream_options": {"include_usage": True}}, 3)):
            chunks = _chunks(server.post(chat(stream=True, **options), key))
            assert chunks[0]["choices"] == [
                {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}], chunks
            assert chunks[1]["choices"] == [{"index": 0, "delta": {}, "finish_reason": "length"}], chunks
            assert len(chunks) == count, chunks
        assert chunks[2]["choices"] == [], chunks
        assert chunks[2]["usage"] == {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}, chunks
        assert server.rows("SELECT status, total_tokens FROM usage") == [(200, 14)] * 2
        assert RUNTIME.calls[-1].body["stream"] is False, RUNTIME.calls[-1].body
        RUNTIME.answer = lambda body: (500, {})
        is_error(server.post(chat(stream=True), key), "inference_error")


def a_client_may_leave_in_the_middle_of_a_stream():
    with Server(RUNTIME, compatibility="openai") as server:
        key = server.create_key()
        RUNTIME.answer = lambda body: (200, RUNTIME.completion(100_000 * "\u010d"))
        for _ in range(8):
            with contextlib.closing(server.connect()) as connection:
                connection.sendall(request(chat(stream=True), key))
                assert connection.recv(15) == b"HTTP/1.1 200 OK"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        RUNTIME.answer = RUNTIME.good
        is_completion(server.post(chat(), key))
        # The row is durable before the first byte.
        assert server.rows("SELECT status, cause FROM usage") == [(200, None)] * 9


def the_models_are_listed_beside_running_requests():
    gate = threading.Event()
    RUNTIME.answer = RUNTIME.held(gate)
    with Server(RUNTIME, compatibility="openai", workers=1) as server:
        key, calls, replies = server.create_key(), len(RUNTIME.calls), []
        threads = [threading.Thread(target=lambda: replies.append(server.post(chat(), key))) for _ in range(4)]
        [thread.start() for thread in threads]
        assert until(lambda: len(RUNTIME.calls) == calls + 1)
        models = server.get("/v1/models", host="api.test", key=key)
        assert models.status == 200 and models.json["object"] == "list", models
        assert [model["id"] for model in models.json["data"]] == ["adriaticum"], models
        model = server.get("/v1/models/adriaticum", host="api.test", key=key)
        assert [model.json] == models.json["data"], model
        is_error(server.get("/v1/models", host="api.test"), "invalid_api_key")
        is_error(server.get("/v1/models/other", host="api.test", key=key), "not_found")
        metrics = server.create_key("watcher", "--permission", "metrics")
        is_error(server.get("/v1/models", host="api.test", key=metrics), "insufficient_permission")
        gate.set()
        [thread.join() for thread in threads]
        [is_completion(reply) for reply in replies]
        assert server.rows("SELECT count(*) FROM usage") == [(4,)], "a list of models has a row"
    is_error(SERVER.get("/v1/models", host="api.test", key=KEY), "not_found")


def a_reasoning_model_answers_if_its_thoughts_are_switched_off():
    """vLLM and llama.cpp's server give the thoughts beside the text. They use up its tokens, and are not passed on."""
    for thoughts in ({"content": None, "reasoning": "Hm."}, {"content": None, "reasoning_content": "Hm."},
                     {"content": "", "reasoning_content": "Hm."}):
        def think(body, thoughts=thoughts):
            if body.get("chat_template_kwargs") == {"enable_thinking": False}:
                return 200, RUNTIME.completion("Zagreb.")
            reply = RUNTIME.completion(finish="length")
            reply["choices"][0]["message"] |= thoughts
            return 200, reply

        RUNTIME.answer = think
        is_completion(SERVER.post(chat(), KEY), "", "length")
    both = RUNTIME.completion("Zagreb.")
    both["choices"][0]["message"]["reasoning_content"] = "Hm."
    RUNTIME.answer = lambda body: (200, both)
    is_completion(SERVER.post(chat(), KEY), "Zagreb.")
    RUNTIME.answer = think
    for source in ("file", "variable"):
        server = Server(RUNTIME)
        if source == "file":
            path = server.folder / "adriaticum.toml"
            path.write_text("[runtime]\nparameters = { chat_template_kwargs = { enable_thinking = false } }\n")
            server.environment["ADRIATICUM_CONFIG"] = str(path)
        else:
            server.environment["ADRIATICUM_RUNTIME_PARAMETERS"] = '{"chat_template_kwargs": {"enable_thinking": false}}'
        with server:
            is_completion(server.post(chat(), server.create_key()), "Zagreb.")


@beside
def a_runtime_that_is_killed_and_restarted_costs_a_wait():
    """Only a request that is with the runtime at that moment fails: it may have been run."""
    port = free_port()
    with Server(runtime_url=f"http://127.0.0.1:{port}/v1", runtime_wait=20) as server:
        key, results, is_over, threads = server.create_key(), [], threading.Event(), []
        with _runtime(port) as runtime:
            assert until(lambda: server.post(chat(), key).status == 200)
            threads += [threading.Thread(target=_ask, args=(server, key, results, is_over)) for _ in range(8)]
            [thread.start() for thread in threads]
            assert until(lambda: len(results) >= 20)
            runtime.kill()
            runtime.wait()
            killed = time.monotonic()
        assert until(lambda: "Requests wait for it" in server.logged()), server.last_logged()
        with _runtime(port):
            assert until(lambda: sum(began > killed and status == 200 for began, status in results) >= 20), results
            is_over.set()
            [thread.join() for thread in threads]
        # A client may ask again, and fail again, before the killed process has closed its sockets.
        assert all(status == 200 or began < killed for began, status in results), (killed, results)


@beside
def requests_fail_at_once_after_the_wait():
    with Server(RUNTIME, runtime_url="http://127.0.0.1:1/v1", runtime_wait=2) as server:
        key = server.create_key()
        for _ in range(3):
            is_error(server.post(chat(), key), "inference_error")
        first, *others = server.rows("SELECT runtime_ms FROM usage ORDER BY seq")
        assert first[0] >= 900, first
        assert all(time < 900 for time, in others), others


@contextlib.contextmanager
def _runtime(port):
    program = f"import sys, threading; sys.path.insert(0, {str(ROOT / 'tests' / 'outside')!r}); from service import Runtime; Runtime({port}); threading.Event().wait()"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            yield process
        finally:
            process.kill()


def _ask(server, key, results, is_over):
    while not is_over.is_set():
        began = time.monotonic()
        results.append((began, server.post(chat(), key).status))
