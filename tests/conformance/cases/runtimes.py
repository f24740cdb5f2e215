"""The inference runtime: how it is called, and what its failures become."""

import json
import pathlib
import tempfile
import threading
import time

from harness import SILENT, Runtime, Server, beside, chat, is_completion, is_error, until
from shared import KEY, RUNTIME, SERVER, UNREACHABLE, ok


def the_clients_key_is_not_sent_to_the_runtime():
    ok(chat())
    assert KEY not in json.dumps(RUNTIME.calls[-1].headers), "the client's key reached the runtime"


def the_runtimes_own_model_and_key():
    RUNTIME.answer = RUNTIME.good
    with tempfile.NamedTemporaryFile("w") as file:
        print("of-the-runtime", file=file, flush=True)
        for settings in ({"runtime_api_key": "of-the-runtime"}, {"runtime_api_key_file": file.name}):
            with Server(RUNTIME, runtime_model="other.gguf", **settings) as server:
                is_completion(server.post(chat(), server.create_key()))
            call = RUNTIME.calls[-1]
            assert call.body["model"] == "other.gguf", call.body
            assert call.headers.get("authorization") == "Bearer of-the-runtime", call.headers
        server = Server(RUNTIME)
        path = server.folder / "adriaticum.toml"
        path.write_text(f'[runtime]\napi_key_file = "{file.name}"\n')
        server.environment["ADRIATICUM_CONFIG"] = str(path)
        with server:
            is_completion(server.post(chat(), server.create_key()))
        assert RUNTIME.calls[-1].headers.get("authorization") == "Bearer of-the-runtime", RUNTIME.calls[-1].headers


def an_unreachable_runtime_is_skipped():
    RUNTIME.answer = RUNTIME.good
    with Server(runtime_url=f"{UNREACHABLE.url}/v1,{RUNTIME.url}") as server:
        is_completion(server.post(chat(), server.create_key()))


def a_runtime_that_refuses_is_skipped_and_tried_once():
    """503 and 429 say that nothing was run."""
    for status in (503, 429):
        first, second = Runtime(), Runtime()
        first.answer = lambda body, status=status: (status, {"error": {"message": "Loading model"}})
        second.answer = second.good
        with Server(runtime_url=f"{first.url},{second.url}") as server:
            key = server.create_key()
            is_completion(server.post(chat(), key))
            assert (len(first.calls), len(second.calls)) == (1, 1), (first.calls, second.calls)
            second.answer = first.answer
            is_error(server.post(chat(), key), "inference_error")
            assert (len(first.calls), len(second.calls)) == (2, 2), (first.calls, second.calls)


def the_first_refusal_of_several_is_reported():
    runtimes = [Runtime() for _ in range(3)]
    for runtime, status in zip(runtimes, (429, 503, 503)):
        runtime.answer = lambda body, status=status: (status, {})
    with Server(runtime_url=",".join(runtime.url for runtime in runtimes)) as server:
        reply = server.post(chat(), server.create_key())
        is_error(reply, "inference_error")
        assert "x-should-retry" not in reply.headers, "nothing was run"
        assert [len(runtime.calls) for runtime in runtimes] == [1, 1, 1]
        details = f'details="runtime {runtimes[0].url}: it answered with HTTP status 429"'
        assert until(lambda: "cause=status_429" in server.logged() and details in server.logged()), server.last_logged()


def a_call_that_may_have_been_run_is_not_repeated_and_the_next_request_goes_elsewhere():
    for answer, no_retry in (((SILENT, None), "false"), ((None, b""), None), ((500, {}), None), ((502, {}), None),
                             ((200, b"x"), None)):
        failing, good = Runtime(), Runtime()
        failing.answer, good.answer = lambda body, answer=answer: answer, good.good
        with Server(runtime_url=f"{failing.url},{good.url}", runtime_timeout=1) as server:
            key = server.create_key()
            reply = server.post(chat(), key)
            is_error(reply, "inference_error")
            assert reply.headers.get("x-should-retry") == no_retry, (answer, reply.headers)
            assert (len(failing.calls), len(good.calls)) == (1, 0), answer
            for _ in range(5):
                is_completion(server.post(chat(), key))
            assert (len(failing.calls), len(good.calls)) == (1, 5), answer


def a_conversation_that_is_refused_or_has_no_text_is_no_failure_of_the_runtime():
    """One key with seven requests took three of four runtimes out."""
    runtime, other = Runtime(), Runtime()
    with Server(runtime_url=f"{runtime.url},{other.url}") as server:
        key = server.create_key()
        figure = lambda name: server.metric(f'adriaticum_runtime_{name}{{runtime="{runtime.url}"}}')  # noqa: E731
        refusal, too_long = {"error": {"message": "bad template"}}, {"error": {"type": "exceed_context_size_error"}}
        answers = [(400, refusal), (413, refusal), (422, refusal), (400, too_long), (200, runtime.completion(None)),
                   (200, runtime.completion(None, "length"))]
        for answer in answers:
            runtime.answer = lambda body, answer=answer: answer
            server.post(chat(), key)
        assert (figure("up"), figure("failures_total"), len(runtime.calls), len(other.calls)) == (1, 0, len(answers), 0)
        # It can't run any other conversation either.
        runtime.answer = lambda body: (400, {"error": {"message": "model not found"}})
        is_error(server.post(chat(), key), "inference_error")
        assert figure("failures_total") == 1


def a_runtime_that_is_the_service_itself_is_refused():
    """Each call took a worker, which waited for the next, until `runtime.timeout`."""
    server = Server()
    url = f"http://localhost:{server.port}/v1"
    server.environment["ADRIATICUM_RUNTIME_URL"] = url
    expected = f"{url} leads to this service itself. Set runtime.url"
    for command in ("serve", "check"):
        done = server.cli(command, check=False)
        assert done.returncode == 1 and expected in done.stdout + done.stderr, done


def the_environments_proxy_is_not_asked():
    RUNTIME.answer = RUNTIME.good
    server = Server(RUNTIME)
    server.environment |= dict.fromkeys(("http_proxy", "HTTP_PROXY", "ALL_PROXY"), UNREACHABLE.url)
    with server:
        is_completion(server.post(chat(), server.create_key()))


def the_least_busy_runtime_is_used():
    first, second, gate = Runtime(), Runtime(), threading.Event()
    first.answer, second.answer = first.held(gate), second.held(gate)
    with Server(runtime_url=f"{first.url},{second.url}") as server:
        key, replies = server.create_key(), []
        threads = [threading.Thread(target=lambda: replies.append(server.post(chat(), key))) for _ in range(6)]
        for number, thread in enumerate(threads, 1):
            thread.start()
            while len(first.calls) + len(second.calls) < number:
                time.sleep(0.01)
        gate.set()
        [thread.join() for thread in threads]
        assert len(replies) == 6, replies
        for reply in replies:
            is_completion(reply)
    assert len(first.calls) == len(second.calls) == 3, (len(first.calls), len(second.calls))


def a_failing_runtime_is_502():
    for answer in ((500, {"error": {"message": "boom"}}), (503, {"error": {"message": "Loading model"}}),
                   (400, {"error": {"code": 400, "message": "bad grammar"}}), (101, b""), (301, {}), (307, {}), (401, {}), (404, {}), (413, {}),
                   (429, {}), (200, b"not json"), (200, {}), (200, {"choices": []}), (200, b""), (200, b"null"),
                   (200, {"choices": [{"index": 0, "message": {"role": "assistant"}, "finish_reason": "stop"}]}),
                   (200, RUNTIME.completion(content=None)), (None, b"")):
        RUNTIME.answer = lambda body, answer=answer: answer
        is_error(SERVER.post(chat(), KEY), "inference_error")
    ok(chat())


def no_reachable_runtime_is_502():
    with Server(runtime_url=f"{UNREACHABLE.url}/v1") as server:
        is_error(server.post(chat(), server.create_key()), "inference_error")


@beside
def the_timeout_is_for_the_whole_call():
    """An answer that arrives in small pieces for 15 s is too slow for 1 s as well."""
    runtime, gate = Runtime(), threading.Event()
    whole = json.dumps(runtime.completion()).encode()
    with Server(runtime, runtime_timeout=1) as server:
        key = server.create_key()
        for answer in (runtime.held(gate), lambda body: (200, [b" "] * 30 + [whole])):
            runtime.answer = answer
            began = time.monotonic()
            is_error(server.post(chat(), key), "inference_error")
            assert time.monotonic() - began < 12, "a call of at most 1 s"
    gate.set()


@beside
def all_calls_of_one_request_share_the_timeout():
    """A prompt that is too long is tried again with fewer passages. Each call takes 3 s of 5 s, so the second one is too late."""
    runtime = Runtime()
    too_long = {"error": {"type": "exceed_context_size_error", "n_prompt_tokens": 9, "n_ctx": 4}}
    runtime.answer = lambda body: (time.sleep(3), (400, too_long))[1]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a", "b"):
            (pathlib.Path(folder) / f"{name}.txt").write_text("The Velna lighthouse is 47 metres high.")
        settings = {"search_url": f"folder:{folder}", "search_grounding": "always", "runtime_timeout": 5}
        with Server(runtime, **settings) as server:
            assert until(lambda: "are indexed" in server.logged()), server.last_logged()
            is_error(server.post(chat("How high is the Velna lighthouse?"), server.create_key()), "inference_error")
    assert len(runtime.calls) == 2, runtime.calls


def no_configured_runtime_is_503():
    with Server() as server:
        key = server.create_key()
        is_error(server.post(chat(), key), "service_unavailable")
        is_error(server.post(chat(n=1), key), "invalid_request")
        is_error(server.post(chat()), "invalid_api_key")


def a_prompt_beyond_the_context_is_400():
    for error in ({"code": 400, "type": "exceed_context_size_error", "message": "too long", "n_prompt_tokens": 9000,
                   "n_ctx": 4096},
                  {"code": "context_length_exceeded", "type": "invalid_request_error", "param": "messages",
                   "message": "This model's maximum context length is 4096 tokens."}):
        RUNTIME.answer = lambda body, error=error: (400, {"error": error})
        message = is_error(SERVER.post(chat(), KEY), "invalid_request")["message"]
        assert "n_ctx" not in error or "9000" in message and "4096" in message, message
