"""Measures what a gateway takes from a real model on the same machine: tokens per second, latency, CPU time, memory.

    python3 bench/model.py

The runtime is llama.cpp with the model of `make run`, on all cores and with four slots. Eight clients call it directly,
through Adriaticum, nginx, HAProxy and other gateways (not with PEERS=0), one after another in every round. Each runs the
same completions, at temperature 0. ROUNDS (5) and REQUESTS, of each client (4), change how often and how long. With all peers
a round takes some three minutes on two cores. The result is printed and written to target/model.json.
"""

import concurrent.futures
import http.client
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import measure
import peers
import subjects
from measure import Unfit, summary
from subjects import ROOT, Ours, Subject, free_port

sys.path.insert(0, str(ROOT / "demo"))
import run as make_run  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", "5"))
REQUESTS = int(os.environ.get("REQUESTS", "4"))
RESULT = ROOT / "target" / "model.json"
DIRECT, OURS = "direct", "Adriaticum, as shipped"
CLIENTS = 8
MAX_TOKENS = 48
# A request waits for three others in its slot at most; other work on the machine may slow it down.
PATIENCE_SECONDS = 300
TOPICS = ("a lighthouse", "the tides", "a ship's bell", "olive trees", "stone bridges", "a fishing net", "the north wind", "salt")


def chat(content, max_tokens):
    return json.dumps({"model": "adriaticum", "messages": [{"role": "user", "content": content}],
                       "max_tokens": max_tokens, "temperature": 0})


class Model(Subject):
    """The runtime of `make run`, and the subject `direct`."""

    def __init__(self, folder):
        folder.mkdir()
        port = free_port()
        command = [ROOT / make_run.PYTHON, "-I", ROOT / "demo" / "server.py", ROOT / make_run.MODEL, str(port)]
        super().__init__(DIRECT, folder, command, port)
        self.url = f"http://127.0.0.1:{port}/v1"


def complete(subject, client):
    """Runs the completions of one client; returns how long each took, and the number of all completion tokens."""
    times, tokens = [], 0
    connection = http.client.HTTPConnection("127.0.0.1", subject.port, timeout=PATIENCE_SECONDS)
    for number in range(REQUESTS):
        body = chat(f"Write {number + 2} sentences about {TOPICS[client]}.", MAX_TOKENS)
        began = time.perf_counter()
        try:
            connection.request("POST", "/v1/chat/completions", body, subject.headers)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unfit(f"{subject.name}: {error!r}")
        times.append(time.perf_counter() - began)
        if response.status != 200:
            raise Unfit(f"{subject.name}: {response.status} {text[:500]}")
        tokens += json.loads(text)["usage"]["completion_tokens"]
    connection.close()
    return times, tokens


def load(subject, model):
    before, began = measure.Processor(), time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        results = list(pool.map(lambda client: complete(subject, client), range(CLIENTS)))
    seconds, after = time.monotonic() - began, measure.Processor()

    def processor(session):
        return after.sessions.get(session, 0) - before.sessions.get(session, 0)

    own = after.own - before.own
    others = after.busy - before.busy - own - sum(map(processor, {subject.session, model.session, measure.KERNEL}))
    return {
        "rate": sum(tokens for _, tokens in results) / seconds,
        "latency_ms": statistics.median(time for times, _ in results for time in times) * 1000,
        "core_share": 0.0 if subject is model else processor(subject.session) / seconds,
        "memory_mib": measure.memory(subject),
        "foreign": max(0.0, others) / seconds / os.cpu_count(),
    }


def one_round(chosen, model, left_out):
    figures = {}
    for subject in chosen:
        try:
            if subject is not model:
                subject.start()
            figures[subject.name] = load(subject, model)
        except Unfit as reason:
            left_out[subject.name] = str(reason)
        finally:
            if subject is not model and subject.session:
                subject.stop()
    for its in figures.values():
        its["share"] = its["rate"] / figures[DIRECT]["rate"]
        its["added_ms"] = its["latency_ms"] - figures[DIRECT]["latency_ms"]
    return figures


def main():
    os.chdir(ROOT)
    pathlib.Path("var").mkdir(exist_ok=True)
    make_run.prepare_runtime()
    with tempfile.TemporaryDirectory(prefix="model-", dir=ROOT / "target") as name:
        result = compare(pathlib.Path(name))
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False))
    print_table(result)


def compare(folder):
    model = Model(folder / "model")
    model.ask(chat("Say yes.", 1))
    left_out, runs = {}, {}
    with model:
        chosen = [model, Ours(OURS, folder / "ours", model), subjects.nginx_proxy(folder, model), subjects.haproxy(folder, model)]
        if os.environ.get("PEERS") != "0":
            chosen += peers.installed(folder, model)
        for subject in chosen:
            subject.ask(model.body)
        load(model, model)  # the first answers after a start are slower
        for number in range(ROUNDS):
            print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            # Another order in every round, so that none always comes after the same one.
            turn = number % len(chosen)
            for name, figures in one_round(chosen[turn:] + chosen[:turn], model, left_out).items():
                runs.setdefault(name, []).append(figures)
            chosen = [subject for subject in chosen if subject.name not in left_out]
    for name, reason in left_out.items():
        print(f"left out: {reason}")
        runs.pop(name, None)
    if left_out.keys() & {DIRECT, OURS}:
        raise SystemExit(1)
    return {
        **subjects.conditions(), "rounds": ROUNDS, "clients": CLIENTS,
        "foreign": statistics.median(figures["foreign"] for its in runs.values() for figures in its),
        "versions": {subject.name: subject.version for subject in chosen},
        "subjects": {subject.name: {figure: summary([its[figure] for its in runs[subject.name]]) for figure in runs[subject.name][0]}
                     for subject in chosen},
    }


def print_table(result):
    print(f"{'':<42}{'tokens/s':>10}{'share':>9}{'spread':>8}{'median ms':>11}{'added ms':>10}{'% of a core':>13}{'MiB':>8}")
    for name, its in result["subjects"].items():
        value = {figure: its[figure]["median"] for figure in its}
        print(f"{name:<42}{value['rate']:10.1f}{value['share']:9.1%}{its['share']['spread']:8.1%}{value['latency_ms']:11.0f}"
              f"{value['added_ms']:10.0f}{value['core_share'] * 100:13.2f}{value['memory_mib']:8.1f}")
    print(f"other processes used {result['foreign']:.1%} of the machine (median)")
    share = result["subjects"][OURS]["share"]["median"]
    print(f"{'yes' if share >= 0.99 else 'NO'}  at least 99 % of the direct call's tokens per second: {share:.1%}")


if __name__ == "__main__":
    main()
