"""Attacks from one or two addresses, while honest clients of another go on working.

    python3 tests/outside/attacks.py [--seconds N] [PART...]

Runs the attacks whose name contains one of the PARTs, by default all, N seconds each, each against a service of its own
at its default settings (except SETTINGS). The attackers (attackers.py) come from 127.0.0.1, 127.0.0.3 or others, the honest
clients from 127.0.0.2.
Prints what the honest clients saw, and fails if one of the bounds below was exceeded in any attack.
"""

import argparse
import asyncio
import collections
import contextlib
import functools
import pathlib
import resource
import sqlite3
import statistics
import subprocess
import tempfile
import time

from attackers import BODY
from service import ensure
from tls import NAME, hello_of
from trial import CONNECTIONS, SUCCESS, WORKERS, Browser, Client, Tally, Trial, chat

# An abandoned request's connection to the runtime is closed within this time: the median of several trials.
CANCEL_SECONDS = 0.1
# How long honest connections are idle while strangers hold all others.
IDLE_SECONDS = 10
# Contract 13: refused requests of one key that leave a row.
REFUSALS_BURST, REFUSALS_PER_SECOND = 100, 10
# Contract 24: log lines about requests without a valid key, and the bytes that they may add to the log in an hour.
LINES_BURST, LINES_PER_SECOND, LOG_BYTES_PER_HOUR = 20, 1, 2_000_000
# Sign-ins of each kind while strangers keep the console busy, and the statuses of a good one.
SIGN_INS = 30
GOOD_SIGN_IN = (200, 303, 200)
# Among pipelined requests, a completion waits for two rounds of the listener's loop, 10 ms each. Turns of 4,000 connections
# take 100 ms.
PIPELINED_SECONDS = 0.06
# The longest health probe, handshake included, while other addresses' handshakes wait.
HANDSHAKE_SECONDS = 2


async def chunk_extensions(trial):
    """One connection sends chunks of one byte with long extensions, as fast as it can."""
    await trial.compare("chunk_extensions", tls=False)


async def chunk_extensions_over_tls(trial):
    await trial.compare("chunk_extensions", tls=True)


async def unfinished_bodies_without_a_key(trial):
    """Requests whose bodies lack their last bytes fill the buffers."""
    await trial.compare("unfinished_bodies", with_key=False)


async def unfinished_bodies_with_unknown_keys(trial):
    await trial.compare("unfinished_bodies", with_key=True)


async def one_byte_each(trial):
    """As many connections as there may be send one byte. Idle connections of honest clients survive it."""
    idle, before = [Client(trial) for _ in range(50)], Tally()
    await asyncio.gather(*(client.ask(before, trial.key, chat("idle 0")) for client in idle))
    await trial.compare("one_byte", byte=0x16 if trial.client_context else ord("P"), connections=CONNECTIONS)
    kept = [client.streams for client in idle if client.streams and not client.streams[0].at_eof()]
    trial.expect(len(kept) == len(idle), f"{len(idle) - len(kept)} of {len(idle)} idle connections were closed")
    for client in idle:
        client.close()


async def one_byte_each_over_tls(trial):
    await one_byte_each(trial)


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


async def requests_without_a_key(trial):
    await trial.compare("requests", {"clients": 24, "pause": 0.05}, connections=100)


async def requests_with_unknown_keys(trial):
    await trial.compare("requests", {"clients": 24, "pause": 0.05}, connections=100, key="unknown")


async def log_lines_of_unknown_keys(trial):
    """Requests with keys that do not exist do not fill the disk with log lines."""
    before, began = len(trial.service.logged()), time.monotonic()
    await trial.compare("requests", connections=8, key="unknown")
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


async def expect_sign_ins(trial, attacker, **options):
    """The operator signs in from a known browser, also after a change of the password, and from new ones on this host."""
    async def sign_in(label, password, browser=None, address="127.0.0.1"):
        for _ in range(SIGN_INS):
            statuses = await asyncio.to_thread((browser or Browser(trial.service.port, address)).sign_in, password)
            outcomes[label, statuses] += 1

    outcomes, password = collections.Counter(), set_password(trial, "correct horse battery staple")
    # Not from the loopback address that local clients have: its token alone makes it known.
    own, elsewhere = Browser(trial.service.port, "127.0.0.2"), "127.0.0.4"
    first = own.sign_in(password)
    ensure(first == GOOD_SIGN_IN, f"without an attack: {first}")
    async with trial.attack(attacker, **options) as in_place:
        await in_place()
        await sign_in("known browser", password, own)
        password = await asyncio.to_thread(set_password, trial, "another password than before")
        await sign_in("after a change of the password", password, own)
        await sign_in("new browser on this host", password)
        await sign_in("new browser elsewhere", password, address=elsewhere)
    bad = {outcome: number for outcome, number in outcomes.items() if outcome[1] != GOOD_SIGN_IN}
    trial.expect(not bad, f"sign-ins: {bad}")
    trial.note = f"{outcomes.total()} sign-ins"


async def wrong_passwords(trial):
    """40 addresses guess the console's password. The operator still signs in."""
    await trial.compare("wrong_passwords", addresses=40)
    await expect_sign_ins(trial, "wrong_passwords", addresses=40)


async def sign_in_connections(trial):
    """20 connections ask for the sign-in page. The operator still signs in."""
    await expect_sign_ins(trial, "requests", connections=20, method="GET", path="/sign-in", host="console.localhost", body="",
                          address="127.0.0.3")


async def metrics_without_a_key(trial, **options):
    """40 connections of one address ask for the metrics. The operator signs in from new browsers elsewhere all the time.

    Each has an address of its own: of unknown clients, the one that has sent most so far is shed, and before the attack that
    would be the operator.
    """
    password, outcomes = set_password(trial, "correct horse battery staple"), collections.Counter()
    comparing = asyncio.create_task(trial.compare(
        "requests", connections=40, method="GET", path="/metrics", host="console.localhost", body="", address="127.0.0.3",
        **options))
    while not comparing.done():
        outcomes[await asyncio.to_thread(Browser(trial.service.port, f"127.0.4.{outcomes.total() % 250 + 1}").sign_in, password)] += 1
    await comparing
    trial.expect(set(outcomes) == {GOOD_SIGN_IN}, f"sign-ins: {dict(outcomes)}")
    trial.note = f"{outcomes.total()} sign-ins"


async def metrics_with_unknown_keys(trial):
    await metrics_without_a_key(trial, key="unknown")


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


async def sign_in_pages(trial):
    """Strangers ask for the sign-in page. Prometheus still gets its figures."""
    async with scraping(trial):
        await trial.compare("requests", connections=40, method="GET", path="/sign-in", host="console.localhost", body="")


async def replayed_hellos(trial):
    """Handshakes that are begun with a key of 4,096 bits. Health probes need handshakes of their own."""
    await trial.compare("hellos", hello=hello_of(trial.client_context).hex(), rate=50)


async def hellos_of_two_addresses(trial):
    """Two addresses begin 2,000 handshakes at once, 14 s of work. A third one does not wait for them, nor for the rest when they go."""
    await trial.compare("simultaneous_hellos", hello=hello_of(trial.client_context).hex(), connections=2000,
                        sources=["127.0.0.1", "127.0.0.3"])
    slowest = max(trial.health.seconds, default=0)
    trial.expect(slowest <= HANDSHAKE_SECONDS, f"a health probe took {slowest:.1f} s, at most {HANDSHAKE_SECONDS} are allowed")
    trial.note = f"the slowest health probe took {slowest * 1000:.0f} ms"


async def invalid_requests_of_one_key(trial):
    """Refused requests do not fill the disk."""
    began = time.monotonic()
    await trial.compare("requests", connections=8, key=trial.other_key)
    with contextlib.closing(sqlite3.connect(f"file:{trial.service.database}?mode=ro", uri=True)) as database:
        [rows] = database.execute("SELECT count(*) FROM usage WHERE status = 400").fetchone()
    bound = REFUSALS_BURST + REFUSALS_PER_SECOND * (time.monotonic() - began + 1)
    trial.expect(rows <= bound, f"{rows} rows of refused requests, at most {bound:.0f} are allowed")
    trial.expect(rows >= REFUSALS_BURST, f"only {rows} rows of refused requests")


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


async def full_bodies_of_one_key(trial, connections=80):
    """One key's clients fill the buffers with complete requests, most of them as long as allowed.

    Shorter ones fill the rest. A client that gets 503 waits: the unfinished bodies of immediate retries could be evicted.
    """
    honest = {"pause": 0.2, "content": "honest 0.25"}
    async with scraping(trial):
        await trial.compare("requests", honest, connections=connections, key=trial.other_key, body=chat("full 0.5").decode(),
                            sizes=(BODY, BODY, 60_000, 20_000), pause=0.1)


async def full_bodies_of_one_key_at_64_workers(trial):
    await full_bodies_of_one_key(trial, connections=200)


async def equal_shares(trial):
    """16 clients of one key get as much as 60 of another."""
    # The other key is known before its clients come: together, strangers have a quarter of the queue.
    await trial.honest(0, clients=1, key=trial.other_key)
    honest = functools.partial(trial.honest, trial.seconds, pause=0)
    trial.attacked, others = await asyncio.gather(
        honest(clients=16, content="few 0.1"), honest(clients=60, content="many 0.1", key=trial.other_key))
    few, many = trial.runtime.done["few"], trial.runtime.done["many"]
    share = few / (few + many)
    trial.expect(0.4 <= share <= 0.6, f"{few} completions of one key, {many} of the other")
    trial.expect(trial.attacked.success == others.success == 1, f"{trial.attacked}; {others}")


async def limited_key(trial):
    """50 clients of a key with --concurrent 2: two of its requests run at once, and the others use the other workers."""
    key = trial.service.create_key("limited", "--concurrent", "2")
    honest = {"clients": WORKERS - 2, "pause": 0, "content": "honest 0.1"}
    await trial.compare("requests", honest, connections=50, key=key, body=chat("limited 0.1").decode())
    limited, others = trial.most["limited"], trial.most["honest"]
    trial.expect(limited == 2, f"{limited} requests of the limited key ran at once")
    trial.expect(others == WORKERS - 2, f"{others} requests of the other key ran at once")
    trial.expect(trial.attacked.median <= 2 * trial.quiet.median, "the other key's requests waited for a worker")


async def abandoned_requests(trial):
    """Requests whose clients go away are not run: their workers are free, and the runtime stops."""
    delays = []
    for number in range(20):
        label, client = f"left-{number}", Client(trial)
        asking = asyncio.create_task(client.ask(Tally(), trial.other_key, chat(f"{label} 5")))
        while not trial.runtime.running[label]:
            await asyncio.sleep(0.001)
        began = time.monotonic()
        client.close()
        while trial.runtime.running[label]:
            await asyncio.sleep(0.001)
        await asking
        delays.append(trial.runtime.closed.get(label, time.monotonic()) - began)
        if delays[-1] > 1:
            break  # it is not cancelled at all: once is enough
    trial.expect(statistics.median(delays) <= CANCEL_SECONDS,
                 f"the runtime sees an abandoned request's end after {statistics.median(delays) * 1000:.0f} ms")
    trial.note = f"closed after {statistics.median(delays) * 1000:.1f} ms, at most {max(delays) * 1000:.1f} ms"
    await trial.compare("abandoned", key=trial.other_key, body=chat("left 10").decode(), number=80)
    crowd = await trial.honest(0, clients=WORKERS, content="after 0.1")
    trial.expect(crowd.success == 1 and crowd.median < 2, f"after it: {crowd}, median {crowd.median:.1f} s")


async def no_http(trial):
    """Bytes that cannot begin an HTTP request are refused at once."""
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"\0\0\0\0", b"SSH-2.0-x\r\n", b"GET /\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", trial.service.port, local_addr=("127.0.0.2", 0))
        with contextlib.closing(writer):
            began, outcome = time.monotonic(), "no answer"
            writer.write(data)
            with contextlib.suppress(OSError, TimeoutError):
                answer = await asyncio.wait_for(reader.read(), 5)
                outcome = int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else repr(answer[:40])
            trial.attacked.add(200 if outcome == 400 else outcome, time.monotonic() - began)
            trial.expect(outcome == 400, f"{data!r}: {outcome}")
    trial.expect(trial.attacked.median < 2, f"refused after {trial.attacked.median:.1f} s")


ATTACKS = [
    chunk_extensions, chunk_extensions_over_tls, unfinished_bodies_without_a_key, unfinished_bodies_with_unknown_keys,
    one_byte_each, one_byte_each_over_tls, silent_connections, unread_answers, unread_answers_everywhere, pipelined_404s,
    greedy_key, full_bodies_of_one_key, full_bodies_of_one_key_at_64_workers, equal_shares, limited_key, abandoned_requests,
    requests_without_a_key, requests_with_unknown_keys, log_lines_of_unknown_keys, sign_in_pages, sign_in_connections,
    metrics_without_a_key, metrics_with_unknown_keys, wrong_passwords, replayed_hellos, hellos_of_two_addresses,
    invalid_requests_of_one_key, no_http,
]
OVER_TLS = {chunk_extensions_over_tls, one_byte_each_over_tls, replayed_hellos, hellos_of_two_addresses}
SETTINGS = {
    unread_answers: {"buffer_limit": 16 << 20},
    full_bodies_of_one_key: {"buffer_limit": 16 << 20},
    full_bodies_of_one_key_at_64_workers: {"workers": 64, "queue": 128},
}


def make_certificate(folder):
    files = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:4096", "-nodes", "-days", "2", "-subj", f"/CN={NAME}",
         "-addext", f"subjectAltName=DNS:{NAME}", "-keyout", files[1], "-out", files[0]], check=True, capture_output=True)
    return files


async def run(attacks, seconds, certificate):
    headings = ["attack", "honest", "success", "quiet", "attacked", "health", "memory", ""]
    print(LINE.format(*headings), flush=True)
    faults = []
    for attack in attacks:
        trial = Trial(attack.__name__, seconds, certificate if attack in OVER_TLS else None)
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
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("parts", nargs="*", metavar="PART")
    options = parser.parse_args()
    # For the service too, which starts with the same limit: all of its connections should fit.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    ensure(hard >= 2 * CONNECTIONS, f"the hard limit on open files is {hard}; {2 * CONNECTIONS} are needed: raise it (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attacks = [one for one in ATTACKS if not options.parts or any(part in one.__name__ for part in options.parts)]
    with tempfile.TemporaryDirectory(prefix="adriaticum-attacks-") as folder:
        faults = asyncio.run(run(attacks, options.seconds, make_certificate(pathlib.Path(folder))))
    ensure(not faults, f"{faults} bounds were exceeded")


if __name__ == "__main__":
    main()
