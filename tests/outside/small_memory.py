"""16 workers with full bodies in 32 MiB of memory and with short ones in 16 MiB, and 64 workers in at most 64 (as root).

    python3 tests/outside/small_memory.py

The service runs in a memory cgroup, without swap and on one core. It must not be killed, and must answer every request with
200 or 503. The runtime echoes the whole conversation, or it and Search send 64 workers the longest answers that are read, or
64 workers query an index in which every passage has the word that they look for.
"""

import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess

from service import Service, ensure, until
from trial import SlowRuntime, Tally, Trial, chat

BODY = 262_144
SECONDS = 5


class Confined(Service):
    """Runs in the cgroup and on one core."""

    group = None

    def start(self):
        enter = 'echo $$ > "$0/cgroup.procs" && exec taskset -c "$@"'
        with self.log.open("wb") as log:
            core = str(max(os.sched_getaffinity(0)))
            command = ["sh", "-c", enter, self.group, core, self.uncached_binary(), "serve"]
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def uncached_binary(self):
        """A copy that is not in the page cache: a cgroup is charged only for the pages of files that it reads first."""
        copy = self.folder / "adriaticum"
        shutil.copy(self.binary, copy)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return copy


class Indexed(Confined):
    """Has a large index, with the word "short" in each of its 32,000 passages."""

    def __enter__(self):
        documents = self.folder / "documents"
        documents.mkdir()
        numbers = itertools.count()
        for name in range(400):
            paragraphs = (" ".join(["short", *(f"word{next(numbers) % 20_000}" for _ in range(120))]) for _ in range(80))
            (documents / f"{name}.txt").write_text("\n\n".join(paragraphs))
        self.environment["ADRIATICUM_SEARCH_URL"] = f"folder:{documents}"
        super().__enter__()
        ensure(until(lambda: "are indexed" in self.logged()), f"there is no index:\n{self.last_logged()}")
        return self


class EchoingRuntime(SlowRuntime):
    def text(self, contents, label):
        return "".join(contents)


class LongRuntime(SlowRuntime):
    """Answers with the longest text that is read, and 1 KiB for the rest of the answer."""

    def text(self, contents, label):
        return "x" * (127 << 10)


class SearchingRuntime(LongRuntime):
    """Is a SearXNG instance, too, and sends the longest answers that are read."""

    def settings(self, origin):
        return super().settings(origin) | {"search_url": origin, "search_grounding": "always"}

    def page(self):
        return {"results": [{"title": "x", "url": "http://x.test/", "content": "x" * 240} for _ in range(880)]}


@contextlib.contextmanager
def memory_group(mebibytes):
    """A cgroup with a limit, of version 2 or 1."""
    root = pathlib.Path("/sys/fs/cgroup")
    is_second = (root / "cgroup.controllers").exists()
    group = (root if is_second else root / "memory") / f"adriaticum-test-{os.getpid()}"
    limits = (["memory.max", "memory.swap.max"] if is_second else ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"])
    try:
        group.mkdir()
    except OSError as error:
        raise SystemExit(f"no cgroup can be made, which needs root and a writable {root}: {error}")
    try:
        ensure((group / limits[0]).exists(), f"{group} has no memory controller")
        limit = str(mebibytes << 20)
        (group / limits[0]).write_text(limit)
        if (group / limits[1]).exists():  # not if the kernel counts no swap
            (group / limits[1]).write_text("0" if is_second else limit)
        yield group
    finally:
        group.rmdir()


def full_body(character):
    """As long and with as much content as a body may be: 32,000 characters, and white space for the rest."""
    messages = [{"role": "user", "content": character * 6_398} for _ in range(5)]
    messages.append({"role": "user", "content": "full 0.1"})
    text = json.dumps({"model": "adriaticum", "messages": messages}, ensure_ascii=character < " ").encode()
    return text[:-1] + b" " * (BODY - len(text)) + b"}"


# Characters of four bytes are large in memory, control characters in the request to the runtime.
FULL = [full_body("\N{GRINNING FACE}"), full_body("\1")]
SHORT = [chat("short 0.02")] * 2
INDEX = {"search_url": "folder:documents", "search_grounding": "always"}


async def load(mebibytes, clients, bodies, seconds, runtime=EchoingRuntime, service=Confined, **settings):
    """Loads a service in a cgroup. Returns what the clients saw, the most memory in MiB, and what went wrong."""
    with memory_group(mebibytes) as Confined.group:
        trial, tally = Trial("small_memory", seconds), Tally()
        trial.runtime_class, trial.service_class = runtime, service
        trial.settings |= settings
        async with trial:
            await asyncio.gather(*(trial.honest(seconds, clients // 2, 0, tally=tally, body=body) for body in bodies))
            trial.expect(set(tally.outcomes) <= {200, 503} and tally.outcomes[200], f"outcomes: {tally}")
    return tally, trial.peak / 1024, trial.faults


def main():
    faults = []
    for name, mebibytes, clients, bodies, options in (
        ("full bodies", 32, 32, FULL, {}),
        ("full bodies", 32, 80, FULL, {}),
        ("short bodies", 16, 32, SHORT, {}),
        ("full bodies", 64, 192, FULL, {"workers": 64, "queue": 128}),
        ("long answers", 28, 80, SHORT, {"workers": 64, "runtime": LongRuntime}),
        ("long answers of Search", 32, 80, SHORT, {"workers": 64, "runtime": SearchingRuntime}),
        ("a large index", 64, 80, SHORT, {"workers": 64, "runtime": SlowRuntime, "service": Indexed} | INDEX),
    ):
        tally, peak, its_faults = asyncio.run(load(mebibytes, clients, bodies, SECONDS, **options))
        print(f"{clients} clients with {name} in {mebibytes} MiB: {tally}; at most {peak:.1f} MiB were used", flush=True)
        faults += [f"{clients} clients with {name} in {mebibytes} MiB: {fault}" for fault in its_faults]
    ensure(not faults, "\n".join(faults))


if __name__ == "__main__":
    main()
