"""The instructions of one plain completion, counted by callgrind.

    python3 bench/instructions.py [--functions]

One client sends the same request again and again on one connection; the system's part of the work is not counted.
The count of a short run is subtracted from that of a long one, which leaves neither the start nor the end.

Prints the instructions by module, from a build that has kept its symbols, and the difference to the last count, which
it keeps in instructions.json beside this file. With --functions the most expensive functions follow. It decides no
test: threads that wait for work are counted too, so the sum depends on how busy the machine is.
"""

import http.client
import json
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "outside"))
from service import ROOT, Runtime, Service, ensure  # noqa: E402

WITH_SYMBOLS = ROOT / "target" / "symbols" / "adriaticum"
KEPT = pathlib.Path(__file__).with_name("instructions.json")
# Enough for every worker and the ledger to have done all that happens once.
WARM_UP = 200
REQUESTS = 2000
# The counter makes everything some fifty times slower.
PATIENCE_SECONDS = 50


class SameAnswer(Runtime):
    """A runtime whose answers are all the same."""

    def answer(self, body):
        return self.good(body)


class Counted(Service):
    """The service under callgrind."""

    def __init__(self, folder, runtime, program):
        super().__init__(folder, runtime, log_level="warn")
        self.counts = folder / "counts"
        self.command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={self.counts}", program, "serve"]

    def start(self):
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=log)


def count(program, requests):
    """The instructions of a run, by function, with a number of requests after the start."""
    body = json.dumps({"model": "adriaticum", "messages": [{"role": "user", "content": "The capital of Croatia?"}]})
    with tempfile.TemporaryDirectory(prefix="instructions-") as name, SameAnswer() as runtime:
        with Counted(pathlib.Path(name), runtime, program) as service:
            connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_SECONDS)
            headers = {"Authorization": service.authorization, "Content-Type": "application/json"}
            for _ in range(requests):
                connection.request("POST", "/v1/chat/completions", body, headers)
                response = connection.getresponse()
                text = response.read()
                ensure(response.status == 200, f"no completion: {response.status} {text}")
            connection.close()
            service.ensure_it_ends_well()
        return by_function(service.counts.read_text())


def by_function(text):
    """Reads callgrind's file: the instructions of each function by itself, without those of what it calls."""
    names, functions, object_name, skip = {}, {}, "", False
    for line in text.splitlines():
        kind, _, value = line.partition("=")
        if kind in ("fn", "cfn", "ob", "cob"):
            # A name is written out once; afterwards its number stands for it.
            number, _, name = value.partition(" ")
            key = (kind[-2:], number)
            if name:
                names[key] = name
            if kind == "ob":
                object_name = names[key]
            elif kind == "fn":
                function = (object_name, names[key])
        elif kind == "calls":
            skip = True
        elif line[:1].isdigit() or line[:1] in ("+", "-", "*"):
            # After a call comes what was spent within it, which its own entry has.
            if not skip:
                functions[function] = functions.get(function, 0) + int(line.split()[1])
            skip = False
        elif line.startswith("totals:"):
            total = int(line.split()[1])
    ensure(sum(functions.values()) == total, "callgrind's file was not understood: the functions do not add up to its total")
    return functions


def module(function):
    """Where a function's instructions belong: a module of ours, a crate, or what is not Rust."""
    object_name, name = function
    if "adriaticum" not in pathlib.Path(object_name).name:
        return "C library"
    if ours := re.search(r"adriaticum::(\w+)", name):
        return f"src/{ours[1]}"
    crates = [crate for crate in re.findall(r"(?<![\w:])([a-z]\w*)::", name) if crate not in ("core", "alloc", "std")]
    if crates:
        return f"{crates[0]} (crate)"
    return "Rust's library" if "::" in name or name.startswith(("__rust", "_R")) else "SQLite"


def per_request(program):
    """The instructions of one request, by function."""
    short, long = count(program, WARM_UP), count(program, WARM_UP + REQUESTS)
    return {function: (long.get(function, 0) - short.get(function, 0)) / REQUESTS for function in long.keys() | short.keys()}


def main():
    functions = per_request(WITH_SYMBOLS)
    modules = {}
    for function, instructions in functions.items():
        modules[module(function)] = modules.get(module(function), 0) + instructions
    total = sum(functions.values())
    for name, instructions in sorted(modules.items(), key=lambda entry: -entry[1]):
        if instructions >= total / 1000:
            print(f"{name:<24} {instructions:>9,.0f} {instructions / total:>6.1%}")
    last = json.loads(KEPT.read_text())["plain_completion"]
    print(f"{'a plain completion':<24} {total:>9,.0f} {total / last - 1:>+6.1%} to the last count, {last:,}")
    if sys.argv[1:] == ["--functions"]:
        for (_, name), instructions in sorted(functions.items(), key=lambda entry: -entry[1])[:40]:
            print(f"{instructions:>9,.0f}  {name[:150]}")
    KEPT.write_text(json.dumps({"plain_completion": round(total)}) + "\n")


if __name__ == "__main__":
    main()
