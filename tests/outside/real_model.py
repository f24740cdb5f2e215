"""Tests the service with a real language model: the one of `make run`.

    python3 tests/outside/real_model.py

First it runs `make run` as a newcomer would. Then it tests with the same runtime what a scripted runtime cannot show: real
token figures, languages, long and short answers, a prompt longer than the context, and a runtime that is killed in the
middle of an answer.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import types

from service import ROOT, STOP_SECONDS, Service, conversation, ensure, free_port, until

sys.path.insert(0, str(ROOT / "demo"))
import run as make_run  # noqa: E402

PROMPTS = [
    {"content": "What is the capital of France?", "temperature": 0},
    {"content": "Write a short poem about the sea.", "temperature": 2, "max_tokens": 60},
    {"content": "Wie heißt die Hauptstadt von Österreich?", "temperature": 0, "max_tokens": 40},
    {"content": "Koji je glavni grad Hrvatske?", "temperature": 0.7, "max_tokens": 40},
    {"content": "¿Cuál es la capital de España?", "max_tokens": 40},
    {"content": "日本の首都はどこですか。", "max_tokens": 40},
    {"content": "ما هي عاصمة مصر؟", "max_tokens": 40},
    {"content": "Say yes.", "temperature": 0, "max_tokens": 1},
    {"content": "🌊" * 50, "max_tokens": 20},
    {"content": "Tell me a very long story about a ship, with many chapters.", "max_tokens": 512},
]


GROUNDING = ROOT / "tests" / "grounding"
# Questions about invented facts, and texts of which a good answer contains one.
QUESTIONS = {asked["question"]: asked["facts"] for asked in json.loads((GROUNDING / "questions.json").read_text())
             if asked.get("model")}
# Eight or nine were found: what the runtime has cached changes some words.
LEAST_FACTS_WITH, MOST_FACTS_WITHOUT = 7, 1


def prepare():
    """Downloads the runtime and the model, unless an earlier run has done so."""
    make_run.RUNTIME.mkdir(parents=True, exist_ok=True)
    make_run.prepare_runtime()


def under_way(service, metrics_key):
    """Returns whether a worker processes a request."""
    return "\nadriaticum_workers_busy 1\n" in service.fetch("/metrics", Authorization=f"Bearer {metrics_key}").text


class PatientService(Service):
    """A long answer takes minutes on a busy machine."""

    def connection(self, timeout=300):
        return super().connection(timeout)


def complete(service, content, **members):
    """Runs a completion with plausible figures."""
    response = service.ask(conversation(content, **members))
    ensure(response.status == 200, f"no completion: {response.status} {response.text}")
    return ensure_plausible(response.text, members.get("max_tokens", 248))


def ensure_plausible(text, max_tokens=248):
    answer = json.loads(text)
    prompt, completion, total = (answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens"))
    ensure(prompt > 0 and 0 < completion <= max_tokens and total == prompt + completion, f"odd figures: {answer['usage']}")
    ensure(answer["choices"][0]["finish_reason"] in ("stop", "length"), f"odd reason: {text}")
    return answer


def check_make_run():
    """Starts make run, runs the curl command that it prints, and stops it with Ctrl-C."""
    environment = os.environ | {"PORT": str(free_port())}
    for _ in range(2):
        began = time.monotonic()
        with subprocess.Popen(
            [sys.executable, ROOT / "demo" / "run.py"], env=environment, stdout=subprocess.PIPE, text=True,
            # A background job ignores Ctrl-C, and its children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as running:
            printed = []
            for line in running.stdout:
                printed.append(line)
                if "Ctrl-C stops it" in line:
                    break
            seconds = time.monotonic() - began
            text = "".join(printed)
            ensure("Adriaticum is ready." in text, f"make run did not become ready:\n{text}")
            ensure("\nADRIATICUM_DATABASE=var/adriaticum.db " in text, f"it does not print the command for a password:\n{text}")
            command = text[text.index("\ncurl "):].split("\n\n")[0]
            done = subprocess.run(command, shell=True, capture_output=True, text=True)
            ensure_plausible(done.stdout)
            running.send_signal(signal.SIGINT)
            rest = running.communicate(timeout=STOP_SECONDS)[0]
        ensure(running.returncode == 0 and "Stopped." in rest, f"Ctrl-C did not stop it cleanly: {running.returncode} {rest}")
    starts = make_run.SERVICE_LOG.read_text(errors="replace").count("database ")
    ensure(starts >= 2, "the second start did not append to the log of the first")
    return f"make run: the second start took {seconds:.1f} s"


@contextlib.contextmanager
def runtime(port, log):
    """Runs the runtime of make run on a fixed port, so that it can come back there."""
    with make_run.started([make_run.PYTHON, "-I", "demo/server.py", make_run.MODEL, str(port)], log,
                          stdout=subprocess.PIPE) as process:
        ensure(process.stdout.readline().strip(), f"the runtime did not start: {log.read_text(errors='replace')}")
        yield process


def check_prompts(service):
    tokens = 0
    for prompt in PROMPTS:
        tokens += complete(service, **prompt)["usage"]["total_tokens"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        questions = [f"What is {number} plus {number}?" for number in range(8)]
        answers = list(pool.map(lambda question: complete(service, question, max_tokens=24, temperature=0), questions))
    tokens += sum(answer["usage"]["total_tokens"] for answer in answers)
    sums = json.loads(service.run("usage", "--json").stdout)
    ensure(sums["total_tokens"] == tokens and sums["unmeasured"] == 0, f"the answers have {tokens} tokens, the ledger has {sums}")
    ensure(sums["errors"] == 0, f"errors in the ledger: {sums}")
    return f"{len(PROMPTS) + 8} completions, {tokens} tokens, all of them in the ledger"


def check_context(service):
    response = service.ask(conversation("𓀀𓁐𓂀" * 3_000))
    ensure(response.status == 400, f"a prompt longer than the context gets {response.status}: {response.text[:300]}")
    error = json.loads(response.text)["error"]
    ensure(error["code"] == "invalid_request" and "8192" in error["message"], f"the message does not name the context: {error}")
    return f"longer than the context: {error['message']}"


def count_facts(service):
    """Returns how many answers contain their fact. Prints each."""
    count = 0
    for question, facts in QUESTIONS.items():
        answer = complete(service, question, max_tokens=64, temperature=0)
        text = " ".join(answer["choices"][0]["message"]["content"].split())
        is_found = any(fact in text for fact in facts)
        count += is_found
        print(f"  {'found  ' if is_found else 'missing'}  {question} {text[:100]}")
    return count


def check_grounding(service, grounded):
    without = count_facts(service)
    ensure(without <= MOST_FACTS_WITHOUT, f"without grounding, the model gives {without} facts, which it cannot know")
    with grounded:
        ensure(until(lambda: "are indexed" in grounded.logged()), f"there is no index:\n{grounded.last_logged()}")
        found = count_facts(grounded)
        ensure(found >= LEAST_FACTS_WITH, f"with grounding, the model gives {found} facts; at least {LEAST_FACTS_WITH} are expected")
        grounded.ensure_it_ends_well()
    return f"{found} of {len(QUESTIONS)} facts with grounding, {without} without"


def check_killed(service, port, log):
    """Kills the runtime in the middle of an answer, and starts it again."""
    metrics_key = service.create_key("watch", "--permission", "metrics")
    with runtime(port, log) as process, concurrent.futures.ThreadPoolExecutor(1) as pool:
        long = conversation("Tell me a very long story.", max_tokens=512, temperature=2)
        asking = pool.submit(service.ask, long)
        while not under_way(service, metrics_key):
            ensure(not asking.done(), "the answer came before the kill")
            time.sleep(0.01)
        process.kill()
        status = asking.result().status
        ensure(status == 502, f"a runtime that was killed gives {status}")
    status, text = service.complete()
    ensure(status == 502, f"an unreachable runtime gives {status}: {text}")
    with runtime(port, log):
        complete(service, "Are you back?", max_tokens=8)
    return "killed in the middle: 502, and completions again after its return"


def main():
    print(check_make_run())
    with tempfile.TemporaryDirectory(prefix="adriaticum-model-") as name:
        folder, port = pathlib.Path(name), free_port()
        address = types.SimpleNamespace(url=f"http://127.0.0.1:{port}/v1")
        (folder / "grounded").mkdir()
        with PatientService(folder, address) as service:
            with runtime(port, folder / "runtime.log"):
                print(check_prompts(service))
                print(check_context(service))
                print(check_grounding(service, PatientService(
                    folder / "grounded", address, search_url=f"folder:{GROUNDING / 'documents'}", search_grounding="always")))
            print(check_killed(service, port, folder / "runtime.log"))
            service.ensure_it_ends_well()


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
