"""Cuts the power under load again and again: every completion that a client has read is in the ledger, once.

    python3 tests/outside/power_cut.py [--cuts N] [--seed SEED] [--prove-it]

The service runs with unsynced.c preloaded, which logs what it writes to the database's files and what it syncs. When
it was killed, the files are put back to what a disk may have of them: all that was synced, and of the rest nothing,
some sectors, or nearly all. Then the service starts on them. A quarter of the starts are cut as well, in the middle of
the recovery.

As the log tells when each call was made, the power can also fail earlier than the kill: what clients read after that
moment has not happened then. Every other cut goes back so into a checkpoint, or to where the -wal file begins anew.

At the end, and alone with --prove-it, the same is done with syncs of the -wal file that do nothing and succeed: this
has to be found out.
"""

import argparse
import contextlib
import pathlib
import random
import struct
import subprocess
import tempfile
import time
import typing

from acknowledged import Answers, MeasuringRuntime, compare, kill_under_load
from service import Service, ensure

# After the first answers of a run.
CUT_SECONDS = (0.03, 0.4)

CUT_STARTS = 0.25
RECOVERY_SECONDS = 0.02

PROOFS = 2

SOURCE = pathlib.Path(__file__).with_name("unsynced.c")
RECORD = struct.Struct("=c15sQQQ")
ENDINGS = ("", "-wal", "-journal")
SECTOR = 512
# The most that SQLite writes with one call: a page.
LONGEST_WRITE = 4096
# So many calls after one for the database itself, the first frames of a new -wal file are written.
CALLS_AFTER_CHECKPOINT = 20

# How many of the unsynced writes to one sector, the first ones, have reached the disk.
MANNERS = {
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
    """One file: what the disk has for sure, and what was written since it was synced last."""

    def __init__(self, content):
        self.exists = content is not None
        # The name of a new file is in its folder for sure only when one of the two was synced.
        self.is_named = self.exists
        self.synced = bytearray(content or b"")
        self.since = []

    def take(self, call):
        match call.operation:
            case b"c": self.exists = True
            case b"w": self.since.append((call.offset, call.data))
            case b"t": self.since.append((call.offset, None))
            case b"s": self.sync()
            case _: raise SystemExit(f"a file was removed or renamed, which is not provided for: {call}")

    def sync(self):
        apply(self.since, self.synced)
        self.since.clear()
        self.is_named = True

    def with_everything(self):
        content = bytearray(self.synced)
        apply(self.since, content)
        return content

    def after_cut(self, reached, chance):
        """What the disk has of it, and how many writes of a sector it has not. Sectors are written one by one."""
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
    """A write as writes within one sector each."""
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
    """The disk under a service's database, which has for sure what was synced."""

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
        """Takes what is there now for synced. Nobody may have the database open."""
        self.settled = {ending: self.content(ending) for ending in ENDINGS}
        self.log.write_bytes(b"")

    def calls(self):
        """What was written and synced since, when whoever did so was killed."""
        calls = list(read_log(self.log.read_bytes()))
        for ending, image in self.images(calls).items():
            self.ensure_the_log_is_complete(ending, image)
        return calls

    def cut_power(self, calls, manner, chance):
        """Leaves of the files what the disk has after these calls."""
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
        """All that was logged gives the file as it is, but for one call that was made and not logged any more."""
        found, logged = self.content(ending) or b"", image.with_everything()
        if found != logged:
            places = [place for place in range(max(len(found), len(logged)))
                      if found[place:place + 1] != logged[place:place + 1]]
            ensure(places[-1] - places[0] < LONGEST_WRITE, f"the log of unsynced.c lacks writes to the file {ending}")


def read_log(log):
    """The calls of a log, whose last one may be cut off."""
    place = 0
    while place + RECORD.size <= len(log):
        operation, ending, time_, offset, length = RECORD.unpack_from(log, place)
        place += RECORD.size
        data = log[place:place + length]
        place += length
        if len(data) == length:
            yield Call(operation, ending.rstrip(b"\0").decode(), time_, offset, data)


def ends_in_checkpoints(calls):
    """The numbers of calls after which the database was being written, or had just been."""
    ends, last = [], None
    for number, call in enumerate(calls, 1):
        if call.ending == "":
            last = number
        if last is not None and number - last <= CALLS_AFTER_CHECKPOINT:
            ends.append(number)
    return ends


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--prove-it", action="store_true", help="only show that syncs that do nothing are found out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="adriaticum-power-") as name, MeasuringRuntime() as runtime:
        # SQLite and unsynced.c compare names without symbolic links in them.
        folder = pathlib.Path(name).resolve()
        shim = compile_shim(folder)
        if not options.prove_it:
            print(f"power cut: {options.cuts} cuts, seed {options.seed}", flush=True)
            cut_and_compare(folder, runtime, shim, options.cuts, options.seed)
        prove_it(folder, runtime, shim, options.seed)


def compile_shim(folder):
    shim = folder / "unsynced.so"
    subprocess.run(["cc", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", shim, SOURCE, "-ldl"], check=True)
    return shim


def cut_and_compare(folder, runtime, shim, cuts, seed):
    chance, answers, in_checkpoints = random.Random(seed), Answers(), 0
    service = new_service(folder / "true", runtime)
    disk = Disk(service, shim)
    disk.settle()
    with service:
        for cut in range(1, cuts + 1):
            manner = list(MANNERS)[cut % len(MANNERS)]
            kill_under_load(service, answers, chance.uniform(*CUT_SECONDS), f"{seed} {cut}")
            calls = disk.calls()
            ends = ends_in_checkpoints(calls) if cut % 2 else []
            if ends:
                calls = calls[:chance.choice(ends)]
                answers.forget_since(calls[-1].time)
                in_checkpoints += 1
            disk.cut_power(calls, manner, chance)
            if chance.random() < CUT_STARTS:
                cut_a_start(service, disk, manner, chance)
            start(service, disk)
            findings = compare(service, answers, cut, refusals_stay=False)
            findings.ensure_nothing_is_wrong(f"after cut {cut} ({manner} of the unsynced writes kept), seed {seed}")
        service.ensure_it_ends_well()
    findings.ensure_they_prove_something(cuts)
    ensure(disk.missing, "everything was always synced: no cut took anything away")
    print(f"power cut: {cuts} cuts, {in_checkpoints} of them in checkpoints, {disk.missing} unsynced sectors gone, "
          f"{findings}", flush=True)


def cut_a_start(service, disk, manner, chance):
    disk.settle()
    service.start()
    time.sleep(chance.uniform(0, RECOVERY_SECONDS))
    service.kill()
    disk.cut_power(disk.calls(), manner, chance)


def prove_it(folder, runtime, shim, seed):
    """Shows that completions that are acknowledged and not synced are found to be lost."""
    for proof in range(PROOFS):
        answers = Answers()
        service = new_service(folder / f"false-{proof}", runtime)
        disk = Disk(service, shim, lie="-wal")
        disk.settle()
        with service:
            # At once: before the log is long enough to be folded into the database, which is synced as it should be.
            kill_under_load(service, answers, 0, f"{seed} proof {proof}")
            disk.cut_power(disk.calls(), "none", random.Random(seed))
            start(service, disk)
            findings = compare(service, answers, 1, refusals_stay=False)
        ensure(findings.lost, f"syncs that do nothing were not found out: {findings}")
        print(f"power cut: with syncs that do nothing, {findings.lost} of {findings.acknowledged} found to be lost, "
              "as they should be")


def start(service, disk):
    disk.settle()
    service.start()
    service.wait_until_it_answers()


def new_service(folder, runtime):
    folder.mkdir()
    service = Service(folder, runtime)
    ensure(service.key, "the key has to be on the disk before its power can be cut")
    return service


if __name__ == "__main__":
    main()
