"""A long run under constant mixed load: does anything grow?

    SOAK_MINUTES=60 python3 tests/outside/soak.py

50 clients send good, broken and abandoned requests, and a visitor uses the console. Memory must be bounded and no longer grow in
the second half, descriptors and threads constant and the WAL bounded. Every 200 must be in the ledger, and the ledger must
verify. It prints a line a minute.
"""

import asyncio
import contextlib
import os
import pathlib
import random
import sqlite3
import statistics
import sys
import threading
import time

from attackers import head, unknown_key
from service import ROOT, ensure
from small_memory import full_body
from trial import Client, SlowRuntime, Tally, Trial, chat

sys.path.insert(0, str(ROOT / "bench"))
from console import PAGES, PASSWORD, Visitor  # noqa: E402

MINUTES = float(os.environ.get("SOAK_MINUTES", "60"))
CLIENTS = 50
# Requests per second of all clients together.
RATE = 100
SAMPLE_SECONDS = 1
# Caches fill and the allocator's arenas grow to their size in this time.
WARM_UP_MINUTES = min(5, MINUTES / 4)
MOST_MIB = 20
# Of the smallest memory of each minute, in the second half.
MOST_GROWTH_MIB = 0.5
# A checkpoint comes with 4 MiB, and the file keeps at most 8 once it begins again. A page of the console can hold it for a
# round or two.
MOST_WAL_MIB = 16


class UnreliableRuntime(SlowRuntime):
    """Hangs up on requests with the label "fails"."""

    async def leaves(self, reader, label, seconds):
        return label == "fails" or await super().leaves(reader, label, seconds)


class Soak(Trial):
    runtime_class = UnreliableRuntime

    def kinds(self):
        """Yields of every kind of request its share, its bytes, and the statuses that it may get."""
        good, any_body = {200, 503}, chat("brief 0.02")

        def request(body=any_body, key=self.key, **options):
            return head(key, f"Content-Length: {len(body)}", **options) + body

        yield 50, request(), good
        yield 15, request(chat("slow 0.3")), good
        yield 5, request(full_body("x")), good
        yield 5, request(full_body("\1")), good
        yield 5, request(chat("fails 0.1")), {502, 503}
        yield 4, request(b'{"model": "adriaticum", "messages": ['), {400, 503}
        yield 2, request(chat("x" * 20_000)), {400, 503}
        yield 2, request(key=unknown_key()), {401, 503}
        yield 2, request(path="/v1/models"), {404}
        yield 2, head(self.key, "Content-Length: 300000"), {413}
        yield 2, head(self.key, "Transfer-Encoding: chunked") + b"zz\r\n", {400}
        yield 2, b"\x16\x03\x01 no HTTP\r\n\r\n", {400}
        # These clients leave without an answer: after half a body, and during the inference.
        yield 2, request()[:-10], None
        yield 2, request(chat("abandoned 0.5")), None

    async def be_a_client(self, end, kinds, tally):
        client, shares = Client(self), [share for share, _, _ in kinds]
        while time.monotonic() < end:
            await asyncio.sleep(random.uniform(0, 2 * CLIENTS / RATE))
            [(_, payload, expected)] = random.choices(kinds, shares)
            if expected is None:
                await self.abandon(payload)
                continue
            try:
                status = await asyncio.wait_for(client.exchange(payload), 60)
            # The service may close after an error while the body is still sent, and closes idle connections.
            except (ConnectionError, asyncio.IncompleteReadError):
                tally.outcomes["closed"] += 1
                client.close()
                continue
            tally.outcomes[status] += 1
            self.expect(status in expected, f"{status} in place of {expected} for {payload[:200]}")
            if status == 200:
                self.ids.append(client.head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode())
        client.close()

    async def abandon(self, payload):
        _, writer = await asyncio.open_connection("127.0.0.1", self.service.port)
        writer.write(payload)
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()

    def use_console(self, stop):
        """Opens a page a second."""
        visitor = Visitor(self.service.port)
        while True:
            for page in PAGES:
                if stop.wait(1):
                    return
                self.expect("<html" in visitor.get(page), f"{page} is no page")
                self.pages += 1

    def sample(self):
        """Memory in MiB, threads, descriptors without and with sockets, and the WAL in MiB."""
        wal = pathlib.Path(f"{self.service.database}-wal").stat().st_size / 2**20
        descriptors, sockets = len(os.listdir(f"/proc/{self.service.process.pid}/fd")), self.count_sockets()
        return self.service.status("VmRSS") / 1024, self.service.status("Threads"), descriptors - sockets, sockets, wal

    async def watch(self, began, end, tally):
        samples = []
        while (now := time.monotonic()) < end:
            samples.append((now - began, *self.sample()))
            if len(samples) % (60 // SAMPLE_SECONDS) == 1:
                minutes, memory, threads, files, sockets, wal = now / 60 - began / 60, *samples[-1][1:]
                print(f"{minutes:4.0f} min  {memory:.2f} MiB  {threads} threads  {files} files  {sockets} sockets  WAL {wal:.1f} MiB"
                      f"  {self.pages} pages  {tally}", flush=True)
            await asyncio.sleep(SAMPLE_SECONDS)
        return samples

    def judge(self, samples):
        late = [sample for sample in samples if sample[0] >= WARM_UP_MINUTES * 60]
        seconds, memory, threads, files, sockets, wal = zip(*late)
        smallest = smallest_by_minute(samples[len(samples) // 2:])
        growth = statistics.linear_regression(range(len(smallest)), smallest).slope * len(smallest)
        print(f"memory {min(memory):.2f} to {max(memory):.2f} MiB, {growth:+.2f} MiB in the second half; threads {set(threads)};"
              f" files {min(files)} to {max(files)}; sockets {min(sockets)} to {max(sockets)}; WAL at most {max(wal):.1f} MiB")
        self.expect(smallest[-1] <= MOST_MIB, f"{smallest[-1]:.2f} MiB of memory at the end")
        self.expect(growth <= MOST_GROWTH_MIB, f"memory grows by {growth:.2f} MiB in the second half")
        self.expect(len(set(threads)) == 1, f"the number of threads changes: {set(threads)}")
        # One connection more for reads is two files.
        half = len(files) // 2
        grown = statistics.median(files[half:]) - statistics.median(files[:half])
        self.expect(grown <= 2, f"{grown} files more in the second half")
        self.expect(max(wal) <= MOST_WAL_MIB, f"the WAL grew to {max(wal):.1f} MiB")

    def check_ledger(self):
        verified = self.service.run("usage", "verify")
        print(f"usage verify: {verified.stdout.strip()}")
        self.expect(verified.returncode == 0, f"usage verify: {verified.stdout}{verified.stderr}")
        with contextlib.closing(sqlite3.connect(self.service.database)) as database:
            recorded = {id for (id,) in database.execute("SELECT request_id FROM usage WHERE status = 200")}
        missing = [id for id in self.ids if id not in recorded]
        self.expect(self.ids and not missing, f"{len(missing)} of {len(self.ids)} completions are not in the ledger")

    async def run(self):
        self.service.run("console", "password", input=PASSWORD + "\n")
        # The first page is read before threads and files are counted.
        Visitor(self.service.port)
        began, tally, stop, self.ids, self.pages = time.monotonic(), Tally(), threading.Event(), [], 0
        end = began + MINUTES * 60
        visits = asyncio.create_task(asyncio.to_thread(self.use_console, stop))
        kinds = list(self.kinds())
        clients = [self.be_a_client(end, kinds, tally) for _ in range(CLIENTS)]
        samples, *_ = await asyncio.gather(self.watch(began, end, tally), *clients)
        stop.set()
        await visits
        print(f"{len(self.ids)} completions; {tally}; {self.pages} pages")
        self.judge(samples)
        self.check_ledger()


def smallest_by_minute(samples):
    minutes = {}
    for seconds, memory, *_ in samples:
        minutes.setdefault(seconds // 60, []).append(memory)
    return [min(memory) for memory in minutes.values()]


async def main():
    soak = Soak("soak", MINUTES * 60)
    async with soak:
        await soak.run()
    ensure(not soak.faults, "\n".join(soak.faults[:20]))
    print("soak: passed")


if __name__ == "__main__":
    asyncio.run(main())
