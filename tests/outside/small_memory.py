"""Clients with full bodies, while the service may use 32 MiB of memory and no swap (as root).

    python3 tests/outside/small_memory.py [--seconds N]

The service runs in a memory cgroup. It must not be killed, and answers nothing but 200 and 503.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import subprocess

from service import Service, ensure
from trial import Tally, Trial

LIMIT = 32 * 1024 * 1024
CLIENTS = 80
BODY = 262_144


class Confined(Service):
    """Runs in the cgroup."""

    group = None

    def start(self):
        enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        with self.log.open("wb") as log:
            command = ["sh", "-c", enter, self.group, self.binary, "serve"]
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)


class ConfinedTrial(Trial):
    service_class = Confined


@contextlib.contextmanager
def memory_group():
    """A cgroup with the limit, of version 2 or 1."""
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
        (group / limits[0]).write_text(str(LIMIT))
        if (group / limits[1]).exists():  # not if the kernel counts no swap
            (group / limits[1]).write_text("0" if is_second else str(LIMIT))
        yield group
    finally:
        group.rmdir()


def full_body(character):
    """As long and with as much content as a body may be: 32,000 characters, and white space for the rest."""
    messages = [{"role": "user", "content": character * 6_398} for _ in range(5)]
    messages.append({"role": "user", "content": "full 0.1"})
    text = json.dumps({"model": "adriaticum", "messages": messages}, ensure_ascii=character < " ").encode()
    return text[:-1] + b" " * (BODY - len(text)) + b"}"


async def run(seconds):
    trial = ConfinedTrial("small_memory", seconds)
    async with trial:
        # Characters of four bytes are large in memory, control characters in the request to the runtime.
        bodies, tally = [full_body("\N{GRINNING FACE}"), full_body("\1")], Tally()
        await asyncio.gather(*(trial.honest(seconds, CLIENTS // 2, 0, tally=tally, body=body) for body in bodies))
        trial.expect(set(tally.outcomes) <= {200, 503} and tally.outcomes[200], f"outcomes: {tally}")
    print(f"{CLIENTS} clients with full bodies in {LIMIT >> 20} MiB: {tally}; at most {trial.peak // 1024} MiB were used")
    ensure(not trial.faults, "\n".join(trial.faults))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    with memory_group() as Confined.group:
        asyncio.run(run(options.seconds))


if __name__ == "__main__":
    main()
