"""A PostgreSQL server for the run, with a database for every service, and its rows read through psql."""

import itertools
import pathlib
import subprocess

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "postgres.sh"
SEPARATOR, NULL = "\x1f", "<null>"

# Cases about the files, triggers and locks of SQLite.
LEFT_OUT = ("files.", "lifecycle.a_second_serve_on_another_name", "ledger.usage_that_cannot_be_recorded",
            "ledger.a_locked_database_delays_the_answer", "ledger.a_database_locked_for_five_seconds_costs_no_more_inferences")
# Cases about SQLite in which nothing depends on the connections of clients, so they need not be run over TLS.
OF_FILES = ("restore.", "figures.a_range_has_the_same_figures_everywhere", "figures.a_list_has_the_newest_requests",
            "ledger.a_damaged_database_is_refused")


class Postgres:
    def __enter__(self):
        self.process = subprocess.Popen([SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.uri, folder = (self.process.stdout.readline().strip() for _ in range(2))
        assert folder, "PostgreSQL did not start"
        port = self.uri.rpartition(":")[2].partition("/")[0]
        self.superuser = f"postgresql://postgres@{folder.replace('/', '%2F')}:{port}/postgres"
        self.numbers = itertools.count()
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def new_database(self):
        name = f"case_{next(self.numbers)}"
        psql(self.superuser, f"CREATE DATABASE {name} OWNER adriaticum")
        return self.uri.replace("/postgres?", f"/{name}?")


def query(uri, sql, *arguments):
    """Returns rows as sqlite3 does. A text that looks like a number becomes one."""
    for argument in arguments:
        sql = sql.replace("?", literal(argument), 1)
    printed = psql(uri, sql, "-F", SEPARATOR, "-P", f"null={NULL}")
    return [tuple(map(value, line.split(SEPARATOR))) for line in printed.splitlines()]


def literal(argument):
    if isinstance(argument, bytes):
        return f"'\\x{argument.hex()}'"
    return "'" + str(argument).replace("'", "''") + "'"


def value(text):
    if text == NULL:
        return None
    if text.startswith("\\x"):
        return bytes.fromhex(text[2:])
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def psql(uri, sql, *options):
    command = ["psql", "-X", "-q", "-A", "-t", *options, "-c", sql, uri]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{sql}: {done.stderr}"
    return done.stdout
