"""What the service must not keep: prompts, completions and secrets. This module runs last."""

from harness import Runtime, Server, chat, is_completion, is_error
from shared import KEY, METRICS_KEY, SERVER


def no_text_and_no_secret_is_logged_or_stored():
    runtime = Runtime()
    runtime.answer = lambda body: (200, runtime.completion("answer-xyzzy"))
    with Server(runtime, log_level="trace", runtime_api_key="of-the-runtime") as server:
        key = server.create_key()
        is_completion(server.post(chat("question-xyzzy"), key), "answer-xyzzy")
        for body in (chat("question-xyzzy" * 1_000), b'{"messages":"question-xyzzy"', chat("question-xyzzy", xyzzy=1)):
            is_error(server.post(body, key), "invalid_request")
        runtime.answer = lambda body: (200, {"choices": [{"text": "answer-xyzzy"}]})
        is_error(server.post(chat("question-xyzzy"), key), "inference_error")
        runtime.answer = lambda body: (500, {"error": {"message": "failure-xyzzy"}})
        is_error(server.post(chat("question-xyzzy"), key), "inference_error")
        is_error(server.post(chat("question-xyzzy"), key + "x"), "invalid_api_key")
        is_error(server.post(chat(), key, path="/v1/xyzzy"), "not_found")
        is_error(server.post(chat(), key, host="xyzzy.test"), "not_found")
        server.stop()
        for text in (key, "of-the-runtime", "xyzzy"):
            assert not server.files_with(text), f"{text} is in {server.files_with(text)}"


def the_shared_server_kept_no_secret_and_did_not_panic():
    for key in (KEY, METRICS_KEY):
        assert not SERVER.files_with(key), SERVER.files_with(key)
    assert "panicked" not in SERVER.logged()
