"""Kills the service under load, many times, and checks that each answer that a client has read is in the ledger once.

    python3 tests/outside/crash.py [--kills N] [--seed SEED]

A quarter of the starts are killed too, during recovery.
"""

import argparse
import pathlib
import random
import tempfile
import time

from acknowledged import Answers, MeasuringRuntime, compare, kill_under_load
from service import Service, ensure

# Counted from the first answers of a run.
KILL_SECONDS = (0.03, 0.4)

KILLED_STARTS = 0.25
RECOVERY_SECONDS = 0.02


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    options = parser.parse_args()
    print(f"crash: {options.kills} kills, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="adriaticum-crash-") as name, MeasuringRuntime() as runtime:
        with Service(pathlib.Path(name), runtime) as service:
            ensure(service.key, "the clients share a key that exists before they start")
            findings = kill_and_compare(service, options.kills, options.seed)
    findings.ensure_they_prove_something(options.kills)
    print(f"crash: {options.kills} kills, {findings}")


def kill_and_compare(service, kills, seed):
    chance, answers = random.Random(seed), Answers()
    for kill in range(1, kills + 1):
        seconds = chance.uniform(*KILL_SECONDS)
        kill_under_load(service, answers, f"{seed} {kill}", lambda seconds=seconds: time.sleep(seconds))
        start_again(service, chance)
        compare(service, answers, kill).ensure_nothing_is_wrong(f"after kill {kill}, seed {seed}")
    # The last connection writes the WAL into the database, which is another form of the same rows.
    service.ensure_it_ends_well()
    findings = compare(service, answers, kills)
    findings.ensure_nothing_is_wrong(f"after the end, seed {seed}")
    return findings


def start_again(service, chance):
    if chance.random() < KILLED_STARTS:
        service.start()
        time.sleep(chance.uniform(0, RECOVERY_SECONDS))
        service.kill()
    service.start()
    service.wait_until_it_answers()


if __name__ == "__main__":
    main()
