"""One measurement: loads a subject with wrk, and measures its CPU time and memory.

The CPU time of other processes is measured too. If they used too much, the measurement is repeated.
"""

import contextlib
import dataclasses
import os
import pathlib
import platform
import re
import statistics
import subprocess
import time

SECONDS = int(os.environ.get("SECONDS", "2"))
# The share of the machine that unrelated processes may use during a measurement.
FOREIGN = 0.03
TRIES = 4
# With a gateway that answers 60 requests per second, 256 clients wait for more than four seconds.
PATIENCE_SECONDS = 60

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
KERNEL = "kernel"


class Unfit(Exception):
    """A subject that does not start, or does not answer every request with 200."""


@dataclasses.dataclass
class Load:
    """What wrk measured, and the CPU time that the subject used."""

    requests: int
    rate: float
    median: float  # in microseconds, like all times here
    slow: float  # the 99th percentile
    processor: float  # CPU time of one request, in all threads of the subject
    foreign: float  # share of the machine used by other processes


class Disturbances:
    """Counts repeated measurements, and those that stayed disturbed."""

    def __init__(self):
        self.again = self.kept = 0

    def __str__(self):
        what = f"other processes used more than {FOREIGN:.0%} of the machine"
        if not self.again:
            return f"no measurement was disturbed ({what})"
        left = f"; {self.kept} were disturbed {TRIES} times, and the table has the least disturbed of those" if self.kept else ""
        return f"{self.again} disturbed measurements ({what}) were repeated{left}"


def load(subject, upstream, clients, disturbances):
    """Loads a subject until a measurement is undisturbed, at most TRIES times; a slow subject is loaded for longer."""
    tries, seconds = [], SECONDS
    while len(tries) < TRIES:
        measured = load_once(subject, upstream, clients, seconds)
        if measured.requests < 2 * clients and seconds < PATIENCE_SECONDS / 4:
            seconds *= 4
            continue
        if measured.foreign <= FOREIGN:
            return measured
        tries.append(measured)
        disturbances.again += len(tries) < TRIES
    disturbances.kept += 1
    return min(tries, key=lambda load: load.foreign)


def load_once(subject, upstream, clients, seconds=SECONDS):
    command = ["wrk", "--latency", "-t1", f"-c{clients}", f"-d{seconds}", f"--timeout={PATIENCE_SECONDS}", "-s", subject.script,
               f"http://127.0.0.1:{subject.port}/v1/chat/completions"]
    before, began = Processor(), time.monotonic()
    output = subprocess.run(command, capture_output=True, text=True).stdout
    after, ended = Processor(), time.monotonic()
    requests = re.search(r"(\d+) requests in", output)
    if "Non-2xx" in output or "Socket errors" in output or not requests:
        raise Unfit(f"{subject.name} at {clients} clients did not answer every request with 200:\n{output}")
    taken = after.sessions.get(subject.session, 0) - before.sessions.get(subject.session, 0)
    others = after.busy - before.busy - (after.own - before.own)
    for session in {subject.session, upstream.session, KERNEL, *subject.other_sessions()}:
        others -= after.sessions.get(session, 0) - before.sessions.get(session, 0)
    return Load(
        requests=int(requests[1]),
        rate=float(re.search(r"Requests/sec:\s+([\d.]+)", output)[1]),
        median=percentile(output, 50),
        slow=percentile(output, 99),
        processor=taken / max(1, int(requests[1])) * 1e6,
        foreign=max(0, others) / (ended - began) / os.cpu_count(),
    )


def percentile(output, which):
    number, unit = re.search(rf"{which}%\s+([\d.]+)(us|ms|s)", output).groups()
    return float(number) * {"us": 1, "ms": 1e3, "s": 1e6}[unit]


class Processor:
    """CPU time until now, in seconds: of the machine, of every session of processes, and of this process with wrk."""

    def __init__(self):
        self.sessions = {}
        for _, session, ticks, _ in processes():
            self.sessions[session] = self.sessions.get(session, 0) + ticks / TICKS
        user, nice, system, _idle, _wait, irq, softirq, stolen = map(
            int, pathlib.Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
        self.busy = (user + nice + system + irq + softirq + stolen) / TICKS
        self.own = sum(os.times()[:4])


def processes():
    """Yields of every process its id, session, CPU time in ticks and memory in pages."""
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name is in brackets, and may contain anything.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                # The kernel's threads, such as those that write to the disk, work for the subject.
                session = KERNEL if fields[1] == "2" else int(fields[3])
                yield int(entry.name), session, int(fields[11]) + int(fields[12]), int(fields[21])


def memory(subject):
    """Returns the resident memory of all processes of the subject, in MiB."""
    return sum(pages for _, session, _, pages in processes() if session == subject.session) * PAGE / 2**20


def summary(runs):
    """Returns the median of several runs, and its spread: half the distance between the extremes, relative to it."""
    middle = statistics.median(runs)
    return {"median": middle, "spread": (max(runs) - min(runs)) / 2 / abs(middle) if middle else 0.0, "runs": runs}


def is_noise(figure):
    """Returns whether a figure differs between rounds by more than itself, or is a difference that should be positive."""
    return figure["spread"] > 1 or figure["median"] <= 0


def machine():
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return f"{os.cpu_count()} × {model[1] if model else platform.machine()}, Linux {platform.release()}"
