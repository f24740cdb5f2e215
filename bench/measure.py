"""One measurement: wrk's load on one subject, and what it took of the processor and of memory meanwhile.

What others took of the processor is known too: where it was too much, the measurement is made again.
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
# Of the whole machine: so much may have gone to processes that have no part in a measurement.
FOREIGN = 0.03
TRIES = 4
# A gateway that answers 60 requests per second has 128 clients wait for more than two.
PATIENCE_SECONDS = 60

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
KERNEL = "kernel"


class Unfit(Exception):
    """A subject that does not start, or does not answer every request with 200."""


@dataclasses.dataclass
class Load:
    """What wrk measured, and what the subject needed for it."""

    requests: int
    rate: float
    median: float  # in microseconds, as all times here
    slow: float  # the 99th percentile
    processor: float  # time for one request, of all the subject's threads
    foreign: float  # share of the machine that went to others


class Disturbances:
    """How often a measurement was made again, and how often that did not help."""

    def __init__(self):
        self.again = self.kept = 0

    def __str__(self):
        what = f"more than {FOREIGN:.0%} of the machine went to other processes"
        if not self.again:
            return f"no measurement was disturbed ({what})"
        left = f"; {self.kept} were so {TRIES} times, and of those the least disturbed is in the table" if self.kept else ""
        return f"{self.again} disturbed measurements ({what}) were made again{left}"


def load(subject, upstream, clients, disturbances):
    """Loads a subject until it could be done undisturbed, or the tries are used up; a slow one for longer."""
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
    told = subprocess.run(command, capture_output=True, text=True).stdout
    after, ended = Processor(), time.monotonic()
    requests = re.search(r"(\d+) requests in", told)
    if "Non-2xx" in told or "Socket errors" in told or not requests:
        raise Unfit(f"{subject.name} at {clients} clients did not answer every request with 200:\n{told}")
    taken = after.sessions.get(subject.session, 0) - before.sessions.get(subject.session, 0)
    others = after.busy - before.busy - (after.own - before.own)
    for session in {subject.session, upstream.session, KERNEL}:
        others -= after.sessions.get(session, 0) - before.sessions.get(session, 0)
    return Load(
        requests=int(requests[1]),
        rate=float(re.search(r"Requests/sec:\s+([\d.]+)", told)[1]),
        median=percentile(told, 50),
        slow=percentile(told, 99),
        processor=taken / max(1, int(requests[1])) * 1e6,
        foreign=max(0, others) / (ended - began) / os.cpu_count(),
    )


def percentile(told, which):
    number, unit = re.search(rf"{which}%\s+([\d.]+)(us|ms|s)", told).groups()
    return float(number) * {"us": 1, "ms": 1e3, "s": 1e6}[unit]


class Processor:
    """Processor time until now, in seconds: of the machine, of every session of processes, of this one with its wrk."""

    def __init__(self):
        self.sessions = {}
        for _, session, ticks, _ in processes():
            self.sessions[session] = self.sessions.get(session, 0) + ticks / TICKS
        user, nice, system, _idle, _wait, irq, softirq, stolen = map(
            int, pathlib.Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
        self.busy = (user + nice + system + irq + softirq + stolen) / TICKS
        self.own = sum(os.times()[:4])


def processes():
    """Of every process: its id, its session, its processor time in ticks, its memory in pages."""
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name, in brackets, may hold anything.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                # The kernel's own threads, such as those that write to the disk, work for the subject.
                session = KERNEL if fields[1] == "2" else int(fields[3])
                yield int(entry.name), session, int(fields[11]) + int(fields[12]), int(fields[21])


def memory(subject):
    """Resident memory of all the subject's processes, in MiB."""
    return sum(pages for _, session, _, pages in processes() if session == subject.session) * PAGE / 2**20


def summary(runs):
    """The median of several runs and its spread: half the distance between the extremes, as a share of it."""
    middle = statistics.median(runs)
    return {"median": middle, "spread": (max(runs) - min(runs)) / 2 / abs(middle) if middle else 0.0, "runs": runs}


def machine():
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return f"{os.cpu_count()} × {model[1] if model else platform.machine()}, Linux {platform.release()}"
