"""Tests real client libraries with the real binary: their results, their exceptions, and their retries.

    .venv-clients/bin/pip install -r tests/clients/requirements.txt
    npm ci --prefix tests/clients
    .venv-clients/bin/python tests/clients/run.py

ADRIATICUM names another binary than target/release/adriaticum. Every check has its own service and runtime, so that their
counts belong to one client. The clients run at the same time, because they mostly wait for Retry-After.
"""

import concurrent.futures
import contextlib
import faulthandler
import functools
import json
import os
import pathlib
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

# No setting of the user's own may redirect a client, least of all to a proxy.
for name in list(os.environ):
    if name.lower().endswith("_proxy") or name.startswith(("OPENAI_", "LANGCHAIN_", "LANGSMITH_", "LITELLM_", "LLM_")):
        del os.environ[name]

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "outside"))
from service import SILENT, Runtime, Service, ensure, until  # noqa: E402

outside_hosts = set()


def stay_inside(event, arguments):
    """An audit hook that refuses every connection to another machine, and remembers its address."""
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    if host not in ("127.0.0.1", "localhost", "::1", None):
        outside_hosts.add(host)
        raise ConnectionRefusedError(f"{host} is not on this machine")


sys.addaudithook(stay_inside)
from clients import CLIENTS, LiteLLM  # noqa: E402

# For the whole run. A client that hangs would wait ten minutes by default.
DEADLINE_SECONDS = 900
# The service sends this with a 503.
RETRY_AFTER_SECONDS = 5
MAX_BODY = 262_144
MAX_CONTENT = 10_000
HERE = pathlib.Path(__file__).parent
SYSTEM = "Answer in few words."
QUESTIONS = ["What is the sea called?", "Who sails it?", "Where to?"]


class Script(Runtime):
    """A runtime whose answers contain the number of questions in the conversation."""

    def __init__(self, status=200, figures=True):
        super().__init__()
        self.status = status
        self.figures = figures

    def answer(self, body):
        if self.status != 200:
            return self.status, {"error": {"message": "scripted"}}
        asked = sum(message["role"] == "user" for message in body["messages"])
        return 200, self.completion(f"Answer {asked}", usage=(11, 3, 14) if self.figures else None)

    @property
    def chats(self):
        return [[(message["role"], message["content"]) for message in call.body["messages"]] for call in self.calls]


def fill_the_ledger(service):
    """Makes every further row fail: the runtime is called once, and then the usage cannot be recorded. From then on requests
    are refused before the call, because the service's test writes fail, too."""
    # A start makes a test write before this line.
    ensure(until(lambda: "listening on" in service.logged()), "the service does not start")
    with contextlib.closing(sqlite3.connect(service.database)) as database:
        database.execute("CREATE TRIGGER full BEFORE INSERT ON usage BEGIN SELECT RAISE(FAIL, 'disk full'); END")


@dataclass
class Error:
    """One of the errors of the specification, and how to cause it."""

    status: int
    code: str
    when: str
    # How often every client sends the request by default, and how often the runtime gets it.
    tries: int = 1
    calls: int = 0
    # The shortest time it takes if the clients wait for Retry-After.
    least_seconds: int = 0
    settings: dict = field(default_factory=dict)
    runtime_status: int = 200
    path: str = "v1"
    key: Callable = lambda service: service.key
    prepare: Callable = lambda service: None
    question: str = QUESTIONS[0]
    options: dict = field(default_factory=dict)


# No client retries, because of x-should-retry: false.
USAGE_NOT_KEPT = Error(503, "service_unavailable", "usage not recorded, after inference", prepare=fill_the_ledger, calls=1)
ERRORS = [
    Error(400, "invalid_request", "a message that is too long", question=(MAX_CONTENT + 1) * "x"),
    Error(401, "invalid_api_key", "an unknown key", key=lambda _: "adr_" + 48 * "0"),
    Error(403, "insufficient_permission", "a key for metrics only",
          key=lambda service: service.create_key("metrics", "--permission", "metrics")),
    Error(404, "not_found", "another path", path="v2"),
    Error(413, "payload_too_large", "a body over 256 KB", question=MAX_BODY * "x"),
    Error(502, "inference_error", "a failing runtime", runtime_status=500, tries=3, calls=3),
    # No client retries: the runtime would only be slow again.
    Error(502, "inference_error", "a slow runtime", settings={"runtime_timeout": 1}, runtime_status=SILENT, calls=1),
    Error(503, "service_unavailable", "no runtime configured", settings={"runtime_url": ""}, tries=3,
          least_seconds=2 * RETRY_AFTER_SECONDS),
    # No client retries either: Search will not be back so soon.
    Error(503, "search_unavailable", "Search needed, but down",
          settings={"search_url": "http://127.0.0.1:1", "search_grounding": "always"}),
    USAGE_NOT_KEPT,
]
NOTHING_WRONG = Error(200, "", "")


@dataclass
class Seen:
    """The result of a conversation, as seen by the client, the service and the runtime."""

    completions: list
    refusal: object
    seconds: float
    # The ids of the requests, in the order of the service's log.
    requests: list
    chats: list


@contextlib.contextmanager
def stage(status=200, figures=True, **settings):
    with tempfile.TemporaryDirectory(prefix="adriaticum-clients-") as folder, Script(status, figures) as runtime:
        service = Service(pathlib.Path(folder), runtime, **settings)
        ensure(service.key, "creating the key first creates the tables, because one check adds a trigger to them")
        with service:
            yield service, runtime


def hold(client_class, questions, error=NOTHING_WRONG, figures=True, compatibility="openai", **options):
    """Lets a client ask its questions, in a situation that causes the error if one is given."""
    with stage(error.runtime_status, figures, compatibility=compatibility, **error.settings) as (service, runtime):
        error.prepare(service)
        client = client_class(f"http://127.0.0.1:{service.port}/{error.path}", error.key(service))
        completions, refusal = [], None
        began = time.monotonic()
        try:
            completions.extend(client.converse(questions, **error.options, **options))
        except Exception as raised:
            refusal = client.refusal(raised)
        seconds = time.monotonic() - began
        # The log is complete only after the service has ended.
        service.ensure_it_ends_well()
        logged = re.findall(r"chatcmpl_[0-9a-f]{32}", service.logged())
        return Seen(completions, refusal, seconds, list(dict.fromkeys(logged)), runtime.chats)


def expect(what, found, wanted):
    ensure(found == wanted, f"{what}: {found!r} instead of {wanted!r}")


def expect_conversation(seen):
    """Checks that every answer arrived, and that the runtime got the whole conversation each time."""
    expect("refusal", seen.refusal, None)
    expect("answers", [one.text for one in seen.completions], ["Answer 1", "Answer 2", "Answer 3"])
    expect("ids", [one.id for one in seen.completions], seen.requests)
    said = [("system", SYSTEM)]
    for number, (question, chat) in enumerate(zip(QUESTIONS, seen.chats, strict=True), 1):
        said.append(("user", question))
        expect(f"chat {number}", chat, said)
        said.append(("assistant", f"Answer {number}"))


def check_conversation(client):
    expect_conversation(hold(client, QUESTIONS, system=SYSTEM))
    return "three turns"


def check_stream(client):
    """A streamed answer, with letters that some clients take for the end of a line."""
    with stage(compatibility="openai") as (service, runtime):
        text = "Answer \u2028\u2029\u0085 \N{WATER WAVE}"
        runtime.answer = lambda body: (200, runtime.completion(text, usage=(11, 3, 14)))
        completion, total = client(f"http://127.0.0.1:{service.port}/v1", service.key).stream(QUESTIONS[0])
        expect("text", completion.text, text)
        expect("tokens", total, 14)
        service.ensure_it_ends_well()
        if completion.id:
            ensure(completion.id in service.logged(), f"{completion.id} is not in the log")
    return "streams"


def check_vercel():
    """Vercel's `ai`, which has a conversation of three turns, all streamed."""
    with stage(compatibility="openai") as (service, runtime):
        asked = {"baseURL": f"http://127.0.0.1:{service.port}/v1", "apiKey": service.key, "questions": QUESTIONS}
        answered = subprocess.run(
            ["node", HERE / "vercel.mjs"], input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True)
        completions = json.loads(answered.stdout)["completions"]
        expect("answers", [one["text"] for one in completions], ["Answer 1", "Answer 2", "Answer 3"])
        expect("tokens", [one["total"] for one in completions], [14] * 3)
        service.ensure_it_ends_well()
        ensure(all(one["id"] in service.logged() for one in completions), "an id is not in the log")
    return "three turns, streamed"


def check_shell_gpt():
    """shell-gpt's command, which always streams."""
    with stage(compatibility="openai") as (service, _), tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "HOME": folder, "OPENAI_API_KEY": service.key, "API_BASE_URL": f"http://127.0.0.1:{service.port}/v1",
            "DEFAULT_MODEL": "adriaticum", "OPENAI_USE_FUNCTIONS": "false", "PRETTIFY_MARKDOWN": "false",
        }
        printed = subprocess.run(
            [pathlib.Path(sys.executable).with_name("sgpt"), "--no-cache", QUESTIONS[0]], env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True).stdout
        expect("answer", printed.strip(), "Answer 1")
    return "an answer, streamed"


def check_strict(client):
    refused = client.refused_by_strict or client.own_answer_refused_by_strict
    if refused is None:
        expect_conversation(hold(client, QUESTIONS, system=SYSTEM, compatibility="strict"))
        return "three turns with strict"
    seen = hold(client, QUESTIONS, compatibility="strict")
    # A member of every request is refused at once, a member of the answer object when that is sent back.
    expect("answers", [one.text for one in seen.completions], [] if client.refused_by_strict else ["Answer 1"])
    expect_refusal(client, seen, 400, "invalid_request")
    wanted = f"{refused} is not recognized"
    ensure(wanted in seen.refusal.message, f"{seen.refusal.message!r} does not say {wanted!r}")
    return f"strict refuses its {refused}"


def check_missing_figures(client):
    """If the runtime reports no token figures, they are null."""
    seen = hold(client, QUESTIONS[:1], figures=False)
    expect("calls of the runtime", len(seen.chats), 1)
    if client.refuses_missing_figures is None:
        expect("refusal", seen.refusal, None)
        expect("answers", [one.text for one in seen.completions], ["Answer 1"])
        return "accepts null figures"
    expect("kind", seen.refusal and seen.refusal.kind, client.refuses_missing_figures)
    return f"{client.refuses_missing_figures} for null figures"


def check_num_retries(client):
    """litellm's num_retries, unlike the default and max_retries, ignores x-should-retry. Its retries cost no inference: the
    ledger is unavailable."""
    for option, tries in (("num_retries", 3), ("max_retries", 1)):
        seen = hold(client, QUESTIONS[:1], USAGE_NOT_KEPT, **{option: 2})
        expect_refusal(client, seen, USAGE_NOT_KEPT.status, USAGE_NOT_KEPT.code)
        expect(f"tries with {option}", len(seen.requests), tries)
        expect(f"calls of the runtime with {option}", len(seen.chats), 1)
    return "num_retries=2 tries three times, max_retries=2 once, and both spend one inference"


def check_error(error, client):
    seen = hold(client, [error.question], error)
    expect_refusal(client, seen, error.status, error.code)
    expect("tries", len(seen.requests), error.tries)
    expect("calls of the runtime", len(seen.chats), error.calls)
    ensure(seen.seconds >= error.least_seconds, f"it waited {seen.seconds:.1f} s, not {error.least_seconds}")
    return f"{seen.refusal.kind}, {error.tries} {'try' if error.tries == 1 else 'tries'}"


def expect_refusal(client, seen, status, code):
    ensure(seen.refusal is not None, "it raised nothing")
    expect("kind", seen.refusal.kind, client.raises[code])
    expect("status", seen.refusal.status, status)
    expect("code", seen.refusal.code, None if code in client.loses_the_code_of else code)
    expect("request id", seen.refusal.request_id, seen.requests[-1])


def checks_of(client):
    """Returns the checks by name."""
    checks = {
        "openai": check_conversation, "stream": check_stream, "strict": check_strict, "no figures": check_missing_figures,
    }
    if client is LiteLLM:
        checks["num_retries"] = check_num_retries
    for error in ERRORS:
        checks[f"{error.status} {error.code}: {error.when}"] = functools.partial(check_error, error)
    return checks


def run(client):
    """Runs the checks of a client. Returns for each its name, whether it passed, and a text."""
    return [run_one(check, client, name=name) for name, check in checks_of(client).items()]


def run_one(check, *arguments, name=None):
    name = name or check.__name__.removeprefix("check_")
    try:
        return name, True, check(*arguments)
    except SystemExit as failure:
        return name, False, str(failure)
    # An error in one check must not stop the others.
    except Exception as broken:
        return name, False, repr(broken)


def main():
    faulthandler.dump_traceback_later(DEADLINE_SECONDS, exit=True)
    with tempfile.TemporaryDirectory(prefix="adriaticum-clients-llm-") as folder:
        os.environ["LLM_USER_PATH"] = folder
        with concurrent.futures.ThreadPoolExecutor(len(CLIENTS) + 2) as pool:
            others = [pool.submit(run_one, check) for check in (check_vercel, check_shell_gpt)]
            results = dict(zip(CLIENTS, pool.map(run, CLIENTS)))
            results_of_others = [other.result() for other in others]
    for client, of_client in results.items():
        print(f"{client.name} {client.version()}: {sum(good for _, good, _ in of_client)} of {len(of_client)} checks")
    width = max(len(name) for of_client in results.values() for name, _, _ in of_client)
    for client, of_client in results.items():
        print(f"\n{client.name}")
        for name, good, note in of_client:
            print(f"  {name:{width}}  {'' if good else 'FAILED '}{note}")
    print(f"\noutside hosts that a client tried to reach: {', '.join(map(str, outside_hosts)) or 'none'}\n")
    for name, good, note in results_of_others:
        print(f"{name}: {'' if good else 'FAILED '}{note}")
    verdicts = [good for of_client in results.values() for _, good, _ in of_client]
    verdicts += [good for _, good, _ in results_of_others] + [not outside_hosts]
    print(f"{sum(verdicts)} passed, {len(verdicts) - sum(verdicts)} failed")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
