"""The server that most cases share, its scripted runtime and its keys."""

from harness import Runtime, Server, Unreachable, is_completion, is_error

RUNTIME, UNREACHABLE = Runtime(), Unreachable()
SERVER = Server(RUNTIME)
KEY = SERVER.create_key("conformance")
METRICS_KEY = SERVER.create_key("metrics only", "--permission", "metrics")


def ok(body, **parts):
    """Sends a request that must succeed."""
    RUNTIME.answer = RUNTIME.good
    return is_completion(SERVER.post(body, KEY, **parts))


def bad(body, code="invalid_request", key=KEY, **parts):
    """Sends a request that must be refused before it reaches the runtime."""
    before = len(RUNTIME.calls)
    error = is_error(SERVER.post(body, key, **parts), code)
    assert len(RUNTIME.calls) == before, "a refused request reached the runtime"
    return error
