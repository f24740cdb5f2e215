"""What the ledger costs: requests per second and time added, with it, with syncing off, and without it.

    python3 bench/load.py [ROUNDS]

The runtime is nginx with a fixed answer, the load is wrk, both from Debian's packages. The subjects take turns in
every round, so that whatever else the machine does hits them alike. Syncing is turned off from outside, by a
library that makes the two calls for it do nothing.
"""

import json
import pathlib
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "outside"))
from service import BINARY, ROOT, Service, free_port  # noqa: E402

CLIENTS = (1, 8, 32, 128)
SECONDS = 2
NO_LEDGER = ROOT / "target" / "release" / "examples" / "no_ledger"
NO_SYNC = "int fsync(int fd) { (void)fd; return 0; }\nint fdatasync(int fd) { (void)fd; return 0; }\n"
ANSWER = json.dumps({
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Zagreb."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
})


class InstantRuntime:
    """nginx, which answers every call with the same completion."""

    def __init__(self, folder):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        configuration = folder / "nginx.conf"
        configuration.write_text(f"""
            daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
            events {{ worker_connections 1024; }}
            http {{ access_log off; keepalive_requests 1000000000; client_body_temp_path {folder}/body;
                proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u;
                scgi_temp_path {folder}/s;
                server {{ listen 127.0.0.1:{self.port}; default_type application/json;
                    location / {{ return 200 '{ANSWER}'; }} }} }}""")
        self.process = subprocess.Popen(["nginx", "-c", configuration], stderr=subprocess.DEVNULL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()


class Subject(Service):
    """A service under load; each with a database of its own on the same disk."""

    def __init__(self, folder, runtime, program=BINARY, **environment):
        folder.mkdir()
        super().__init__(folder, runtime, queue=512, log_level="warn")
        self.program = program
        self.environment |= environment
        self.script = folder / "post.lua"
        body = json.dumps({"model": "adriaticum", "messages": [{"role": "user", "content": "The capital of Croatia?"}]})
        self.script.write_text(
            f"wrk.method = 'POST'\nwrk.body = '{body}'\nwrk.headers['Content-Type'] = 'application/json'\n"
            f"wrk.headers['Authorization'] = '{self.authorization}'\n")

    def start(self):
        with self.log.open("ab") as log:
            command = [self.program, "serve"] if self.program == BINARY else [self.program]
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def wrk(self, clients, seconds):
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        told = subprocess.run(
            ["wrk", "--latency", "-t1", f"-c{clients}", f"-d{seconds}", "-s", self.script, url],
            capture_output=True, text=True, check=True).stdout
        if "Non-2xx" in told or "Socket errors" in told:
            raise SystemExit(f"not every request was answered with 200:\n{told}")
        return told

    def load(self, clients):
        """Requests per second, and the median time of one in microseconds."""
        told = self.wrk(clients, SECONDS)
        return float(re.search(r"Requests/sec:\s+([\d.]+)", told)[1]), percentile(told, 50)


def percentile(told, which):
    """One of the times that wrk tells, in microseconds."""
    number, unit = re.search(rf"{which}%\s+([\d.]+)(us|ms|s)", told).groups()
    return float(number) * {"us": 1, "ms": 1e3, "s": 1e6}[unit]


def one_sync(folder):
    """What one synced commit takes more than one that is not, in microseconds: a row into a WAL on this disk."""
    medians = []
    for mode in ("NORMAL", "FULL"):
        database = sqlite3.connect(folder / f"{mode}.db", isolation_level=None)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {mode}")
        database.execute("CREATE TABLE t (x)")
        times = []
        for number in range(500):
            began = time.perf_counter()
            database.execute("INSERT INTO t VALUES (?)", (number,))
            times.append(time.perf_counter() - began)
        medians.append(statistics.median(times) * 1e6)
    return medians[1] - medians[0]


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    # Where the build is, as a file system in memory would have nothing to sync.
    with tempfile.TemporaryDirectory(prefix="bench-", dir=ROOT / "target") as name:
        folder = pathlib.Path(name)
        (folder / "no_sync.c").write_text(NO_SYNC)
        library = folder / "no_sync.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "no_sync.c"], check=True)
        with InstantRuntime(folder) as runtime:
            subjects = {
                "ledger": Subject(folder / "ledger", runtime),
                "syncing off": Subject(folder / "no-sync", runtime, LD_PRELOAD=str(library)),
                "no ledger": Subject(folder / "no-ledger", runtime, program=NO_LEDGER),
            }
            measured = {(subject, clients): [] for subject in subjects for clients in CLIENTS}
            syncs = []
            for number in range(rounds):
                syncs.append(one_sync(pathlib.Path(tempfile.mkdtemp(dir=folder))))
                for clients in CLIENTS:
                    for subject, service in subjects.items():
                        with service:
                            measured[subject, clients].append(service.load(clients))
    print(f"one sync of this disk: {statistics.median(syncs):.0f} µs")
    print(f"{'clients':<13}" + "".join(f"{clients:>24}" for clients in CLIENTS))
    middle = {key: (statistics.median(r for r, _ in runs), statistics.median(t for _, t in runs))
              for key, runs in measured.items()}
    for subject in subjects:
        cells = []
        for clients in CLIENTS:
            rate, median = middle[subject, clients]
            share = rate / middle["no ledger", clients][0]
            cells.append(f"{rate:>9.0f}/s {share:>4.0%} {median:>6.0f} µs")
        print(f"{subject:<13}" + "".join(f"{cell:>24}" for cell in cells))
    added = middle["ledger", 1][1] - middle["no ledger", 1][1]
    print(f"added by the ledger at one client: {added:.0f} µs, {added - statistics.median(syncs):.0f} beside the sync")


if __name__ == "__main__":
    main()
