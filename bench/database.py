"""Compares a gateway on SQLite, on one PostgreSQL server and on a cluster of three with synchronous replication.

    python3 bench/database.py

Needs root. The upstream, the load and the rounds are those of compare.py, and all servers share the machine. Nothing has
syncing turned off. Variables: ROUNDS, SECONDS. The result is printed and written to target/bench-database.json.
"""

import contextlib
import json
import pathlib
import sys
import tempfile

import compare
import measure
import subjects
from measure import processes, summary
from subjects import ROOT, Ours, free_port

sys.path.insert(0, str(ROOT / "tests" / "cluster"))
from cluster import PROGRAMS, Cluster, Server, psql  # noqa: E402
from service import ensure, until  # noqa: E402

RESULT = ROOT / "target" / "bench-database.json"
CLIENTS = 32
# The users of the servers can reach it, and it is never in memory.
FOLDER = "/var/tmp"

FIGURES = ("added_us", "added_p99_us", f"rate_{CLIENTS}", "processor_us", "idle_mib", "loaded_mib")


class Postgres:
    """One PostgreSQL server as Debian's package has it."""

    def __enter__(self):
        self.temporary = tempfile.TemporaryDirectory(prefix="adriaticum-postgres-", dir=FOLDER, ignore_cleanup_errors=True)
        folder = pathlib.Path(self.temporary.name)
        folder.chmod(0o755)
        own, port = folder / "server", free_port()
        script = f"""{PROGRAMS}/initdb -D data -U postgres -E UTF8 --locale=C.UTF-8 -A trust && exec {PROGRAMS}/postgres -D data \\
            -p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={own}"""
        self.server = Server("postgres", own, "sh", "-c", script)
        self.server.start()
        superuser = f"postgresql://postgres@127.0.0.1:{port}/postgres"

        def is_ready():
            with contextlib.suppress(SystemExit):
                return psql(superuser, "SELECT 1")

        ensure(until(is_ready), self.server.last_logged())
        psql(superuser, "CREATE ROLE adriaticum LOGIN")
        psql(superuser, "CREATE DATABASE adriaticum OWNER adriaticum")
        self.uri = f"postgresql://adriaticum@127.0.0.1:{port}/adriaticum"
        return self

    def __exit__(self, *_):
        self.server.kill()
        self.temporary.cleanup()

    def processes(self):
        return self.server.processes()


class OnDatabase(Ours):
    """A gateway whose database servers work for it. The others are idle, but not quite."""

    servers = ()

    def other_sessions(self):
        pids = {pid for server in self.servers for pid in server.processes()}
        return {session for pid, session, _, _ in processes() if pid in pids}


def main():
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=ROOT / "target")))
        upstream = stack.enter_context(subjects.upstream(folder))
        single, cluster = stack.enter_context(Postgres()), stack.enter_context(Cluster(FOLDER))
        OnDatabase.servers = (single, cluster)
        chosen = [
            upstream,
            OnDatabase("SQLite", folder / "sqlite", upstream),
            OnDatabase("one PostgreSQL server", folder / "single", upstream, database=single.uri),
            OnDatabase("a cluster of three", folder / "cluster", upstream, database=cluster.new_database("adriaticum")),
        ]
        disturbances, runs = measure.Disturbances(), {subject.name: [] for subject in chosen}
        for number in range(compare.ROUNDS):
            print(f"round {number + 1} of {compare.ROUNDS}", file=sys.stderr, flush=True)
            left_out = {}
            for name, figures in compare.one_round(chosen, upstream, disturbances, left_out, (CLIENTS,)).items():
                runs[name].append(figures)
            ensure(not left_out, "\n".join(left_out.values()))
    result = {
        **subjects.conditions(),
        "rounds": compare.ROUNDS,
        "disturbances": str(disturbances),
        "subjects": {name: {figure: summary([its[figure] for its in rounds]) for figure in FIGURES} for name, rounds in runs.items()},
    }
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False))
    print("\n".join(table(result)))
    print(result["disturbances"])


def table(result):
    """The lines of a Markdown table."""
    yield ("| | added latency, median | added latency, p99 | requests/s, 32 clients | CPU time per request"
           " | memory of the gateway, idle | memory after the load |")
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for name, its in result["subjects"].items():
        value = {figure: its[figure]["median"] for figure in FIGURES}
        if name != "direct":
            yield (f"| {name} | {value['added_us']:,.0f} µs | {value['added_p99_us']:,.0f} µs | {value[f'rate_{CLIENTS}']:,.0f}"
                   f" | {value['processor_us']:,.0f} µs | {value['idle_mib']:.1f} MiB | {value['loaded_mib']:.1f} MiB |")
    yield ""
    yield f"{subjects.origin(result)}, medians of {result['rounds']} rounds."


if __name__ == "__main__":
    main()
