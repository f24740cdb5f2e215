"""Kills the service and simulates power cuts under load, and checks that each answer that a client has read is in the ledger once.

    python3 tests/outside/crash.py [--crashes N] [--seed SEED]

A quarter of the crashes are kills alone. The service runs with unsynced.c preloaded, which logs its writes to the database's
files and its syncs. In a power cut, the files are set after the kill to what a disk may contain: everything that was synced and,
of the rest, nothing, some sectors, or nearly all. Then the service starts on these files. A quarter of the starts are ended in
the same way, during recovery.

The log has the time of each call, so the power can also fail before the kill; answers that clients read after that moment
are ignored. Half of the power cuts are moved like this into a checkpoint, or to the moment when the -wal file starts again.

Some cuts follow a head that `usage verify` has printed while rows were written. It must still be in the chain: no process
may see a row that is not synced.

One sync fails, and nothing is written after that until a restart: the disk may have lost what it should have written.

At the end, the syncs of the -wal file do nothing and report success. The test must detect the lost rows.
"""

import argparse
import contextlib
import json
import pathlib
import random
import struct
import subprocess
import tempfile
import time
import typing

from acknowledged import Answers, MeasuringRuntime, compare, kill_under_load
from service import Service, ensure

# Counted from the first answers of a run.
CRASH_SECONDS = (0.03, 0.4)

# The leader of a group runs a checkpoint at 1,000 pages, which a run may not reach; a few together do.
LEAST_CRASHES_WITH_CHECKPOINT = 40

CRASHED_STARTS = 0.25
RECOVERY_SECONDS = 0.02

HEADS = 3

SOURCE = pathlib.Path(__file__).with_name("unsynced.c")
RECORD = struct.Struct("=c15sQQQ")
ENDINGS = ("", "-wal", "-journal")
SECTOR = 512
# SQLite writes at most one page with one call.
LONGEST_WRITE = 4096
# Within this many calls after a write to the database itself, the first frames of a new -wal file are written.
CALLS_AFTER_CHECKPOINT = 20

# How many of the unsynced writes to one sector have reached the disk, in order. A kill alone loses nothing.
MANNERS = {
    "all": None,
    "none": lambda count, chance: 0,
    "some": lambda count, chance: chance.randint(0, count),
    "nearly all": lambda count, chance: count if chance.random() < 0.9 else chance.randint(0, count - 1),
}


class Call(typing.NamedTuple):
    operation: bytes
    ending: str
    time: int
    offset: int
    data: bytes


class Image:
    """One file: its synced content, and the writes since the last sync."""

    def __init__(self, content):
        self.exists = content is not None
        # A new file's name is durable only after a sync of the file or of its folder.
        self.is_named = self.exists
        self.synced = bytearray(content or b"")
        self.since = []

    def take(self, call):
        match call.operation:
            case b"c": self.exists = True
            case b"w": self.since.append((call.offset, call.data))
            case b"t": self.since.append((call.offset, None))
            case b"s": self.sync()

    def sync(self):
        apply(self.since, self.synced)
        self.since.clear()
        self.is_named = True

    def with_everything(self):
        content = bytearray(self.synced)
        apply(self.since, content)
        return content

    def after_cut(self, reached, chance):
        """Returns the content after a power cut, and how many sector writes are missing. Each sector is written separately."""
        content, sectors, missing = bytearray(self.synced), {}, 0
        for offset, data in self.since:
            if data is not None:
                for part in split(offset, data):
                    sectors.setdefault(part[0] // SECTOR, []).append(part)
            elif reached(1, chance):
                sectors = {sector: parts for sector, parts in sectors.items() if sector * SECTOR < offset}
                resize(content, offset)
        for parts in sectors.values():
            there = reached(len(parts), chance)
            missing += len(parts) - there
            for offset, data in parts[:there]:
                put(content, offset, data)
        return content, missing


def apply(calls, content):
    for offset, data in calls:
        if data is None:
            resize(content, offset)
        else:
            put(content, offset, data)


def split(offset, data):
    """Splits a write into writes within one sector each."""
    start = 0
    while start < len(data):
        end = min(len(data), start + SECTOR - (offset + start) % SECTOR)
        yield offset + start, data[start:end]
        start = end


def put(content, offset, data):
    if len(content) < offset:
        resize(content, offset)
    content[offset:offset + len(data)] = data


def resize(content, length):
    del content[length:]
    content.extend(bytes(length - len(content)))


class Disk:
    """The disk with a service's database; only synced content is safe."""

    def __init__(self, service, shim, lie=None):
        self.database = service.database
        self.log = service.database.with_name("unsynced.log")
        self.missing = 0
        service.environment |= {
            "LD_PRELOAD": str(shim), "UNSYNCED_DATABASE": str(self.database), "UNSYNCED_LOG": str(self.log),
        }
        if lie is not None:
            service.environment["UNSYNCED_LIE"] = lie

    def path(self, ending):
        return self.database.with_name(self.database.name + ending)

    def content(self, ending):
        with contextlib.suppress(FileNotFoundError):
            return self.path(ending).read_bytes()

    def settle(self):
        """Treats the present content as synced. No process may have the database open."""
        self.settled = {ending: self.content(ending) for ending in ENDINGS}
        self.log.write_bytes(b"")

    def calls(self):
        """Returns the writes and syncs since then, after the service was killed."""
        calls = list(read_log(self.log.read_bytes()))
        for ending, image in self.images(calls).items():
            self.ensure_the_log_is_complete(ending, image)
        return calls

    def cut_power(self, calls, manner, chance):
        """Sets the files to what the disk may contain after these calls."""
        if manner == "all":
            return
        for ending, image in self.images(calls).items():
            content, missing = image.after_cut(MANNERS[manner], chance)
            self.missing += missing
            self.path(ending).unlink(missing_ok=True)
            if image.exists and (image.is_named or MANNERS[manner](1, chance)):
                self.path(ending).write_bytes(content)
        self.path("-shm").unlink(missing_ok=True)

    def images(self, calls):
        images = {ending: Image(content) for ending, content in self.settled.items()}
        for call in calls:
            if call.operation == b"d":
                for image in images.values():
                    image.is_named = image.exists
            else:
                images[call.ending].take(call)
        return images

    def ensure_the_log_is_complete(self, ending, image):
        """Checks that the logged calls give the present file, except for one call that was not logged before the kill."""
        found, logged = self.content(ending) or b"", image.with_everything()
        if found != logged:
            places = [place for place in range(max(len(found), len(logged)))
                      if found[place:place + 1] != logged[place:place + 1]]
            ensure(places[-1] - places[0] < LONGEST_WRITE, f"the log of unsynced.c lacks writes to the file {ending}")


def read_log(log):
    """Yields the calls of a log; the last one may be incomplete."""
    place = 0
    while place + RECORD.size <= len(log):
        operation, ending, time_, offset, length = RECORD.unpack_from(log, place)
        place += RECORD.size
        data = log[place:place + length]
        place += length
        if len(data) == length:
            yield Call(operation, ending.rstrip(b"\0").decode(), time_, offset, data)


def ends_in_checkpoints(calls):
    """Returns the numbers of calls during or shortly after which the database file was written."""
    ends, last = [], None
    for number, call in enumerate(calls, 1):
        if call.ending == "":
            last = number
        if last is not None and number - last <= CALLS_AFTER_CHECKPOINT:
            ends.append(number)
    return ends


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--crashes", type=int, default=12)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="adriaticum-crash-") as name, MeasuringRuntime() as runtime:
        # SQLite and unsynced.c compare names without symbolic links.
        folder = pathlib.Path(name).resolve()
        shim = compile_shim(folder)
        print(f"{options.crashes} crashes, seed {options.seed}", flush=True)
        crash_and_compare(folder, runtime, shim, options.crashes, options.seed)
        cut_after_heads(folder, runtime, shim, options.seed)
        fail_a_sync(folder / "failure", runtime, shim)
        prove_it(folder, runtime, shim, options.seed)


def compile_shim(folder):
    shim = folder / "unsynced.so"
    subprocess.run(["cc", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", shim, SOURCE, "-ldl"], check=True)
    return shim


def crash_and_compare(folder, runtime, shim, crashes, seed):
    chance, answers, in_checkpoints = random.Random(seed), Answers(), 0
    service = new_service(folder / "true", runtime)
    disk = Disk(service, shim)
    disk.settle()
    with service:
        for crash in range(1, crashes + 1):
            manner = list(MANNERS)[crash % len(MANNERS)]
            seconds = chance.uniform(*CRASH_SECONDS)
            kill_under_load(service, answers, f"{seed} {crash}", lambda seconds=seconds: time.sleep(seconds))
            calls = disk.calls()
            ends = ends_in_checkpoints(calls) if manner != "all" and crash // len(MANNERS) % 2 else []
            if ends:
                calls = calls[:chance.choice(ends)]
                answers.forget_since(calls[-1].time)
                in_checkpoints += 1
            disk.cut_power(calls, manner, chance)
            if chance.random() < CRASHED_STARTS:
                crash_a_start(service, disk, manner, chance)
            start(service, disk)
            findings = compare(service, answers, crash)
            findings.ensure_nothing_is_wrong(f"after crash {crash} ({manner} of the unsynced writes kept), seed {seed}")
        # The last connection writes the WAL into the database, which is another form of the same rows.
        service.ensure_it_ends_well()
        compare(service, answers, crashes).ensure_nothing_is_wrong(f"after the end, seed {seed}")
    findings.ensure_they_prove_something(crashes)
    ensure(disk.missing, "no cut removed anything, because everything was always synced")
    ensure(in_checkpoints or crashes < LEAST_CRASHES_WITH_CHECKPOINT, "no cut was in a checkpoint")
    print(f"{crashes} crashes, {in_checkpoints} of them in checkpoints, {disk.missing} unsynced sectors gone, {findings}", flush=True)


def fail_a_sync(folder, runtime, shim):
    """The failure stays final until a restart, although later syncs would succeed; after it the row may be there or not."""
    service, failure = new_service(folder, runtime), folder / "failure"
    Disk(service, shim).settle()
    service.environment["UNSYNCED_FAIL"] = str(failure)
    with service:
        service.ensure_it_still_answers()
        calls = len(runtime.calls)
        failure.touch()
        status, text = service.complete()
        ensure(status == 503, f"a completion was sent whose row is not synced: {status} {text}")
        failure.unlink()
        for _ in range(20):
            ensure(service.complete()[0] == 503, "something was written after a sync had failed")
        ensure(len(runtime.calls) == calls + 1, f"{len(runtime.calls) - calls - 1} inferences were spent after that")
        ensure("fsync failed" in service.logged(), "the log does not say why")
        service.stop()
        service.start()
        service.wait_until_it_listens()
        service.ensure_it_still_answers()
        service.ensure_it_verifies()
    print("after a sync that failed, nothing was written until the restart", flush=True)


def crash_a_start(service, disk, manner, chance):
    disk.settle()
    service.start()
    time.sleep(chance.uniform(0, RECOVERY_SECONDS))
    service.kill()
    disk.cut_power(disk.calls(), manner, chance)


def cut_after_heads(folder, runtime, shim, seed):
    rows = sum(cut_after_head(folder / f"head-{number}", runtime, shim, f"{seed} head {number}") for number in range(HEADS))
    print(f"{HEADS} heads that usage verify printed under load, after {rows} rows, are still in their chains",
          flush=True)


def cut_after_head(folder, runtime, shim, seed):
    """Cuts the power when `usage verify` has printed a head, while clients send requests. Returns the head's number."""
    service, answers, printed = new_service(folder, runtime), Answers(), []
    disk = Disk(service, shim)
    disk.settle()
    with service:
        kill_under_load(service, answers, seed, lambda: printed.extend(print_head(service)))
        head, moment = printed
        answers.forget_since(moment)
        disk.cut_power([call for call in disk.calls() if call.time <= moment], "none", random.Random())
        start(service, disk)
        verified = service.run("usage", "verify", "--through", head)
        ensure(verified.returncode == 0, f"after the power cut: {verified.stdout}{verified.stderr}")
        compare(service, answers, 1).ensure_nothing_is_wrong(f"after the head {head}, seed {seed}")
    return int(head.partition(":")[0])


def print_head(service):
    """Returns the head that `usage verify` prints, and the moment after that."""
    verified = service.run("usage", "verify", "--json")
    moment = time.monotonic_ns()
    ensure(verified.returncode == 0, f"usage verify fails: {verified.stdout}{verified.stderr}")
    head, = json.loads(verified.stdout)["heads"]
    return f"{head['seq']}:{head['hash']}", moment


def prove_it(folder, runtime, shim, seed):
    """Shows that the test detects the loss of answers that were acknowledged and not synced."""
    answers, service = Answers(), new_service(folder / "false", runtime)
    disk = Disk(service, shim, lie="-wal")
    disk.settle()
    with service:
        # At once, before a checkpoint: the database file itself is synced correctly.
        kill_under_load(service, answers, f"{seed} proof", lambda: None)
        disk.cut_power(disk.calls(), "none", random.Random(seed))
        start(service, disk)
        findings = compare(service, answers, 1)
    ensure(findings.lost, f"syncs without effect were not detected: {findings}")
    print(f"with syncs without effect, {findings.lost} of {findings.acknowledged} found to be lost, as expected")


def start(service, disk):
    disk.settle()
    service.start()
    service.wait_until_it_answers()


def new_service(folder, runtime):
    folder.mkdir()
    service = Service(folder, runtime)
    ensure(service.key, "the key has to be on the disk before the first power cut")
    return service


if __name__ == "__main__":
    main()
