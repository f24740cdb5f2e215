"""Attacks from one or two addresses, while honest clients of another go on working.

    python3 tests/outside/attacks.py [PART...]

Runs the attacks whose name contains one of the PARTs, by default all, each against a service of its own at its default
settings (except SETTINGS). The attackers (attackers.py) come from 127.0.0.1, 127.0.0.3 or others, the honest clients from
127.0.0.2. Prints what the honest clients saw, and fails if one of the bounds below was exceeded in any attack.
"""

import argparse
import asyncio
import collections
import contextlib
import pathlib
import resource
import statistics
import tempfile
import time

from attackers import BODY
from service import ensure
from tls import Secured, hello_of
from trial import CONNECTIONS, SUCCESS, WORKERS, Browser, Client, Tally, Trial, chat

# How long each attack lasts.
SECONDS = 3
# How long honest connections are idle while strangers hold all others.
IDLE_SECONDS = 10
# Contract 24: log lines about requests without a valid key, and the bytes that they may add to the log in an hour.
LINES_BURST, LINES_PER_SECOND, LOG_BYTES_PER_HOUR = 20, 1, 2_000_000
# Sign-ins of each kind while strangers keep the console busy, and the statuses of a good one.
SIGN_INS = 20
GOOD_SIGN_IN = (200, 303, 200)
# Among pipelined requests, a completion waits for two rounds of the listener's loop, 10 ms each. Turns of 4,000 connections
# take 100 ms.
PIPELINED_SECONDS = 0.06
# The longest health probe, handshake included, while other addresses' handshakes wait.
HANDSHAKE_SECONDS = 2


async def chunk_extensions_over_tls(trial):
    """One connection sends chunks of one byte with long extensions, as fast as it can."""
    await trial.compare("chunk_extensions")


async def unfinished_bodies_with_unknown_keys(trial):
    """Requests whose bodies lack their last bytes fill the buffers."""
    await trial.compare("unfinished_bodies")


async def one_byte_each_over_tls(trial):
    """As many connections as there may be begin a handshake with one byte. Idle connections of honest clients survive it."""
    idle, before = [Client(trial) for _ in range(50)], Tally()
    await asyncio.gather(*(client.ask(before, trial.key, chat("idle 0")) for client in idle))
    await trial.compare("one_byte", byte=0x16, connections=CONNECTIONS)
    kept = [client.streams for client in idle if client.streams and not client.streams[0].at_eof()]
    trial.expect(len(kept) == len(idle), f"{len(idle) - len(kept)} of {len(idle)} idle connections were closed")
    for client in idle:
        client.close()


async def silent_connections(trial):
    """Two addresses hold all connections in silence, and reopen what is closed.

    Uploads that pause in the middle of a request succeed, and idle connections survive it.
    """
    tallies = {f"uploads with a pause of {pause} s": (pause, Tally()) for pause in (0.05, 1)}
    idle, kept = [Client(trial) for _ in range(20)], Tally()

    async def upload(pause, tally):
        while True:
            client = Client(trial)
            await client.ask(tally, trial.key, chat("upload 0"), pause=pause)
            client.close()

    async def stay_idle(client):
        await client.ask(Tally(), trial.key, chat("idle 0"))
        await asyncio.sleep(IDLE_SECONDS)
        await client.ask(kept, trial.key, chat("idle 0"))

    comparing = trial.compare("silent", seconds=IDLE_SECONDS, connections=CONNECTIONS, sources=["127.0.0.1", "127.0.0.3"])
    uploads = [asyncio.create_task(upload(pause, tally)) for pause, tally in tallies.values() for _ in range(10)]
    await asyncio.gather(comparing, *map(stay_idle, idle))
    for task in uploads:
        task.cancel()
    for client in idle:
        client.close()
    for what, (_, tally) in tallies.items():
        trial.expect(tally.success >= SUCCESS, f"{what}: {tally}")
    trial.expect(kept.success >= SUCCESS, f"connections that were idle for {IDLE_SECONDS} s: {kept}")


async def unread_answers(trial):
    """One address fills the buffers with requests and reads no answer. Some of its connections send less, for what room is
    left."""
    groups = [("127.0.0.1", 1500, 600), ("127.0.0.1", 500, 150)]
    await trial.compare("pipelined_404s", groups=groups, reads=False)


async def unread_answers_everywhere(trial):
    """Two addresses hold all connections this way, and a third one takes what becomes free."""
    half = CONNECTIONS // 2
    groups = [("127.0.0.1", half, 200), ("127.0.0.3", half, 200), ("127.0.0.4", 16, 200)]
    await trial.compare("pipelined_404s", groups=groups, reads=False)


async def pipelined_404s(trial):
    """4,000 connections of two addresses pipeline requests and read the answers."""
    groups = [("127.0.0.1", 2000, 500), ("127.0.0.3", 2000, 500)]
    await trial.compare("pipelined_404s", {"content": "honest 0"}, groups=groups, reads=True)
    trial.expect(trial.attacked.median <= PIPELINED_SECONDS,
                 f"median {trial.attacked.median * 1000:.0f} ms, at most {PIPELINED_SECONDS * 1000:.0f} ms are allowed")


async def requests_with_unknown_keys(trial):
    """Requests with keys that do not exist. They do not fill the disk with log lines."""
    before, began = len(trial.service.logged()), time.monotonic()
    await trial.compare("requests", {"clients": 24, "pause": 0.05}, connections=100, key="unknown")
    lines = [line for line in trial.service.logged()[before:].splitlines(keepends=True) if " status=200 " not in line]
    bound = LINES_BURST + LINES_PER_SECOND * (time.monotonic() - began + 1)
    trial.expect(LINES_BURST <= len(lines) <= bound, f"{len(lines)} log lines, at most {bound:.0f} are allowed")
    size = statistics.mean(map(len, lines or [""])) * (LINES_BURST + LINES_PER_SECOND * 3600)
    trial.expect(size <= LOG_BYTES_PER_HOUR, f"{size / 1e6:.1f} MB of log per hour")
    trial.note = f"{len(lines)} log lines, {size / 1e6:.1f} MB per hour"


def set_password(trial, password):
    done = trial.service.run("console", "password", input=f"{password}\n")
    ensure(done.returncode == 0, f"console password failed: {done.stderr}")
    return password


async def keep_the_console_busy(trial, attacker, **options):
    """Prometheus still gets its figures. The operator signs in from a known browser, also after a change of the password, and
    from new ones on this host and elsewhere.

    Each elsewhere has an address of its own: of unknown clients, the one that has sent most so far is shed, and before the
    attack that would be the operator.
    """
    async def sign_in(label, password, browsers):
        for browser in browsers:
            statuses = await asyncio.to_thread(browser.sign_in, password)
            outcomes[label, statuses] += 1

    async def sign_in_often():
        await sign_in("known browser", first, [own] * SIGN_INS)
        second = await asyncio.to_thread(set_password, trial, "another password than before")
        await sign_in("after a change of the password", second, [own] * SIGN_INS)
        await sign_in("new browser on this host", second, [Browser(port, "127.0.0.1") for _ in range(SIGN_INS)])
        await sign_in("new browser elsewhere", second, [Browser(port, f"127.0.4.{one + 1}") for one in range(SIGN_INS)])

    outcomes, port = collections.Counter(), trial.service.port
    first = set_password(trial, "correct horse battery staple")
    # Not from the loopback address that local clients have: its token alone makes it known.
    own = Browser(port, "127.0.0.2")
    statuses = own.sign_in(first)
    ensure(statuses == GOOD_SIGN_IN, f"without an attack: {statuses}")
    async with scraping(trial):
        await trial.compare(attacker, meanwhile=sign_in_often, **options)
    bad = {outcome: number for outcome, number in outcomes.items() if outcome[1] != GOOD_SIGN_IN}
    trial.expect(not bad, f"sign-ins: {bad}")
    trial.note = f"{outcomes.total()} sign-ins"


async def wrong_passwords(trial):
    """40 addresses guess the console's password."""
    await keep_the_console_busy(trial, "wrong_passwords", addresses=40)


async def sign_in_pages(trial):
    """40 connections of one address ask for the sign-in page."""
    await keep_the_console_busy(trial, "requests", connections=40, method="GET", path="/sign-in", host="console.localhost",
                                body="", address="127.0.0.3")


async def metrics_with_unknown_keys(trial):
    """40 connections of one address ask for the metrics."""
    await keep_the_console_busy(trial, "requests", connections=40, method="GET", path="/metrics", host="console.localhost",
                                body="", address="127.0.0.3", key="unknown")


@contextlib.asynccontextmanager
async def scraping(trial):
    """Prometheus, with a key that it used before, gets its figures all the time."""
    key, metrics = trial.service.create_key("prometheus", "--permission", "metrics"), Tally()

    async def scrape():
        client = Client(trial)
        while True:
            await client.ask(metrics, key, path="/metrics", host="console.localhost")
            await asyncio.sleep(0.1)

    task = asyncio.create_task(scrape())
    try:
        yield
    finally:
        task.cancel()
    trial.expect(metrics.success == 1, f"/metrics: {metrics}")


async def hellos_of_two_addresses(trial):
    """Two addresses begin 2,000 handshakes at once, 14 s of work. A third one does not wait for them, nor for the rest when they go."""
    await trial.compare("simultaneous_hellos", hello=hello_of(trial.client_context).hex(), connections=2000,
                        sources=["127.0.0.1", "127.0.0.3"])
    slowest = max(trial.health.seconds, default=0)
    trial.expect(slowest <= HANDSHAKE_SECONDS, f"a health probe took {slowest:.1f} s, at most {HANDSHAKE_SECONDS} are allowed")
    trial.note = f"the slowest health probe took {slowest * 1000:.0f} ms"


async def greedy_key(trial):
    """150 clients of one key beside 4 of another."""
    seconds = 0.25
    honest = {"clients": 4, "pause": 0, "content": f"honest {seconds}"}
    await trial.compare("requests", honest, connections=150, key=trial.other_key, body=chat(f"greedy {seconds}").decode())
    trial.expect(trial.attacked.success == 1, f"honest requests were shed: {trial.attacked}")
    # A worker is free after one call to the runtime at the latest.
    bound = 2 * trial.quiet.median + seconds
    trial.expect(trial.attacked.median <= bound,
                 f"median {trial.attacked.median * 1000:.0f} ms, at most {bound * 1000:.0f} ms are allowed")


async def full_bodies_of_one_key(trial):
    """One key's clients fill the buffers with complete requests, most of them as long as allowed.

    Shorter ones fill the rest. A client that gets 503 waits: the unfinished bodies of immediate retries could be evicted.
    """
    honest = {"pause": 0.2, "content": "honest 0.25"}
    async with scraping(trial):
        await trial.compare("requests", honest, connections=80, key=trial.other_key, body=chat("full 0.5").decode(),
                            sizes=(BODY, BODY, 60_000, 20_000), pause=0.1)


async def abandoned_requests(trial):
    """Requests whose clients go away are not run: their workers are free."""
    await trial.compare("abandoned", key=trial.other_key, body=chat("left 10").decode(), number=80)
    crowd = await trial.honest(0, clients=WORKERS, content="after 0.1")
    trial.expect(crowd.success == 1 and crowd.median < 2, f"after it: {crowd}, median {crowd.median:.1f} s")


ATTACKS = [
    chunk_extensions_over_tls, unfinished_bodies_with_unknown_keys, one_byte_each_over_tls, silent_connections, unread_answers,
    unread_answers_everywhere, pipelined_404s, greedy_key, full_bodies_of_one_key, abandoned_requests,
    requests_with_unknown_keys, sign_in_pages, metrics_with_unknown_keys, wrong_passwords, hellos_of_two_addresses,
]
OVER_TLS = {chunk_extensions_over_tls, one_byte_each_over_tls, hellos_of_two_addresses}
SETTINGS = {
    unread_answers: {"buffer_limit": 16 << 20},
    full_bodies_of_one_key: {"buffer_limit": 16 << 20},
}


async def run(attacks, secured):
    headings = ["attack", "honest", "success", "quiet", "attacked", "health", "memory", ""]
    print(LINE.format(*headings), flush=True)
    faults = []
    for attack in attacks:
        trial = Trial(attack.__name__, SECONDS, secured if attack in OVER_TLS else None)
        trial.settings |= SETTINGS.get(attack, {})
        try:
            async with trial:
                await attack(trial)
        except (Exception, SystemExit) as error:
            trial.faults.append(repr(error))
        note = "FAILED" if trial.faults else trial.note
        print(LINE.format(*trial.row(), note), *trial.faults, sep="\n    ", flush=True)
        faults += trial.faults
    return len(faults)


LINE = "{:<36} {:>7} {:>8} {:>8} {:>9} {:>8} {:>8}  {}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART")
    parts = parser.parse_args().parts
    # For the service too, which starts with the same limit: all of its connections should fit.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    ensure(hard >= 2 * CONNECTIONS, f"the hard limit on open files is {hard}; {2 * CONNECTIONS} are needed: raise it (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attacks = [one for one in ATTACKS if not parts or any(part in one.__name__ for part in parts)]
    with tempfile.TemporaryDirectory(prefix="adriaticum-attacks-") as folder:
        # A long key: its handshakes cost the service most.
        faults = asyncio.run(run(attacks, Secured(pathlib.Path(folder), ("rsa:4096",))))
    ensure(not faults, f"{faults} bounds were exceeded")


if __name__ == "__main__":
    main()
