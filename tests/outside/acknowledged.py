"""Compares the answers that clients read with the ledger, for the tests that end the service at a bad moment."""

import collections
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import random
import sqlite3
import threading
import time
import typing

from service import Runtime, ask, conversation, ensure

CLIENTS = 8
REFUSED = 0.04
FIRST_ANSWERS_SECONDS = 60

# With fewer completions than this for each end of the service, a run proves little.
LEAST_ACKNOWLEDGED = 10

FIGURES = ("prompt_tokens", "completion_tokens", "total_tokens")


class MeasuringRuntime(Runtime):
    """A runtime with different token figures for every answer, some of them missing."""

    def __init__(self):
        self.numbers = itertools.count(1)
        super().__init__()

    def answer(self, body):
        number = next(self.numbers)
        reply = self.completion(usage=(number, number % 97, number + number % 97) if number % 5 else None)
        if number % 5 and number % 7 == 0:
            del reply["usage"][FIGURES[number % 3]]
        return 200, reply

    def handle_error(self, request, client_address):
        """Prints nothing: the service is expected to end in the middle of a call."""


class Answer(typing.NamedTuple):
    request_id: str
    status: int
    figures: tuple
    time: int


class Answers:
    """All answers that clients have read completely, and the number of requests that got none."""

    def __init__(self):
        self.read = []
        self.unanswered = 0
        self.changed = threading.Condition()

    def add(self, answer):
        with self.changed:
            self.read.append(answer)
            self.changed.notify_all()

    def add_unanswered(self):
        with self.changed:
            self.unanswered += 1

    def wait_for_more(self, count):
        with self.changed:
            enough = len(self.read) + count
            return self.changed.wait_for(lambda: len(self.read) >= enough, FIRST_ANSWERS_SECONDS)

    def forget_since(self, time):
        """Forgets answers that were read at or after a time of the monotonic clock, in nanoseconds."""
        self.read = [answer for answer in self.read if answer.time < time]

    def with_status(self, status):
        return [answer for answer in self.read if answer.status == status]


def kill_under_load(service, answers, seed, meanwhile):
    """Lets clients send requests in a loop, calls `meanwhile` after their first answers, and kills the service then."""
    killed = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(be_a_client, service, answers, killed, random.Random(f"{seed} {number}"))
                   for number in range(CLIENTS)]
        answered = answers.wait_for_more(CLIENTS)
        try:
            meanwhile()
        finally:
            killed.set()
            service.kill()
    for client in clients:
        client.result()
    ensure(answered, f"fewer than {CLIENTS} answers within {FIRST_ANSWERS_SECONDS} s:\n{service.last_logged()}")
    service.ensure_it_did_not_panic()


def be_a_client(service, answers, killed, chance):
    connection = service.connection()
    with contextlib.closing(connection):
        while not killed.is_set():
            refused = chance.random() < REFUSED
            try:
                response = send(connection, service, "nobody" if refused else "user")
            except (ConnectionError, http.client.HTTPException):
                ensure(killed.is_set(), f"a connection broke while the service ran:\n{service.last_logged()}")
                return answers.add_unanswered()
            ensure(response.status == (400 if refused else 200), f"not the answer to this request: {response.status} {response.text}")
            answers.add(parse(response))


def send(connection, service, role):
    """Sends a request and reads the whole answer. An unknown role is refused."""
    return ask(connection, service.key, conversation("", messages=[{"role": role, "content": "How many?"}]))


def parse(response):
    """Returns what an answer says about the request."""
    status, headers, body = response.status, response.headers, json.loads(response.text)
    if status == 200:
        request_id, usage = body["id"], body.get("usage") or {}
    else:
        request_id, usage = body["error"]["request_id"], {}
    ensure(headers["x-request-id"] == request_id, f"two ids: {headers['x-request-id']} and {request_id}")
    return Answer(request_id, status, tuple(usage.get(name) for name in FIGURES), time.monotonic_ns())


class Row(typing.NamedTuple):
    request_id: str
    status: int | None
    error_code: str | None
    figures: tuple


class Findings(typing.NamedTuple):
    acknowledged: int
    lost: int
    doubled: int
    unanswered: int
    wrong: list

    def ensure_nothing_is_wrong(self, when):
        ensure(not self.wrong, "\n".join([f"{when}:", *self.wrong]))

    def ensure_they_prove_something(self, ends):
        least = ends * LEAST_ACKNOWLEDGED
        ensure(self.acknowledged >= least, f"only {self.acknowledged} completions were acknowledged, fewer than {least}")
        ensure(self.unanswered, "no request was ever without an answer: the service always ended between two requests")

    def __str__(self):
        return (f"{self.acknowledged} acknowledged completions, {self.lost} rows lost, {self.doubled} rows doubled, "
                f"{self.unanswered} requests without an answer")


def compare(service, answers, ends):
    """Compares the answers with the ledger, when no request is running and the service has ended `ends` times."""
    rows, damage = read_ledger(service.database)
    by_id = {row.request_id: row for row in rows}
    completions = answers.with_status(200)
    lost, lost_refusals = (
        [answer for answer in answers.with_status(status) if not has_its_row(answer, by_id)] for status in (200, 400))
    doubled = [name for name, count in collections.Counter(row.request_id for row in rows).items() if count > 1]
    wrong = [
        *some("a completion was acknowledged and its row is lost", lost),
        *some("a refusal was sent and its row is lost", lost_refusals),
        *some("a request has two rows", doubled),
        *some("a row and its answer have different figures", other_figures(completions, by_id)),
        *some("a row has no outcome", [row for row in rows if row.status is None]),
        *some("the database is damaged", damage),
        *some("usage verify fails", failed_verification(service)),
        *some("the sums of usage differ from the rows", other_sums(service, rows)),
    ]
    # A client has at most one request running, so each end leaves at most one row per client without a reader.
    unread = by_id.keys() - {answer.request_id for answer in answers.read}
    if len(unread) > ends * CLIENTS:
        wrong += some("rows of requests that nobody sent", sorted(unread))
    return Findings(len(completions), len(lost), len(doubled), answers.unanswered, wrong)


def read_ledger(database):
    """Returns the rows and the faults of the database. If it is damaged, rows may be missing, and count as lost."""
    columns = ", ".join(["request_id", "status", "error_code", *FIGURES])
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        try:
            damage = [text for (text,) in connection.execute("PRAGMA integrity_check") if text != "ok"]
            # From the table and not from an index, which would show each request only once.
            found = connection.execute(f"SELECT {columns} FROM usage NOT INDEXED").fetchall()
        except sqlite3.DatabaseError as error:
            return [], [str(error)]
    return [Row(*row[:3], figures=row[3:]) for row in found], damage


def has_its_row(answer, by_id):
    row = by_id.get(answer.request_id)
    return row is not None and row.status == answer.status


def other_figures(completions, by_id):
    for answer in completions:
        row = by_id.get(answer.request_id)
        if row is not None and row.status == 200 and row.figures != answer.figures:
            yield answer, row


def failed_verification(service):
    verified = service.run("usage", "verify")
    return [] if verified.returncode == 0 else [verified.stdout + verified.stderr]


def other_sums(service, rows):
    usage = service.run("usage", "--json")
    if usage.returncode != 0:
        return [usage.stderr]
    found = json.loads(usage.stdout)
    expected = {
        "requests": len(rows),
        "errors": sum(row.status != 200 for row in rows),
        **{name: sum(row.figures[place] or 0 for row in rows) for place, name in enumerate(FIGURES)},
        "unmeasured": sum(row.status == 200 and row.figures[-1] is None for row in rows),
    }
    return [f"{name} is {found[name]} and should be {sum_}" for name, sum_ in expected.items() if found[name] != sum_]


def some(what, cases):
    """Returns a line with the problem, the number of cases and the first one, or nothing if there are none."""
    cases = list(cases)
    return [f"{what} ({len(cases)} cases): {cases[0]}"] if cases else []
