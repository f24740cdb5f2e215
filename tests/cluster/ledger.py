"""Compares what clients have read with the ledger."""

import collections

from cluster import psql  # first: it adds tests/outside to the path
from acknowledged import Row, failed_verification, other_sums, some
from load import figures_of

COLUMNS = "request_id, status, error_code, prompt_tokens, completion_tokens, total_tokens"


def read(database):
    printed = psql(database, f"SELECT {COLUMNS} FROM usage", "-F", "|", "-P", "null=")
    for line in printed.splitlines():
        request_id, status, error_code, *figures = line.split("|")
        yield Row(request_id, number(status), error_code or None, tuple(map(number, figures)))


def number(text):
    return int(text) if text else None


def faults(database, gateways, answers, asked):
    """What is wrong when no request is running: a line for each kind of fault."""
    rows = list(read(database))
    by_id = {row.request_id: row for row in rows}
    completed = {answer.request_id: answer for answer in answers if answer.status == 200}
    # The database's answer was lost and could not be found out in time: the row may say 200.
    doubtful = {answer.request_id for answer in answers if answer.status == 503 and not answer.may_retry}
    # A gateway may have got the request. HAProxy's own 503 means that none did.
    broken = sum(answer.request_id is None and answer.status != 503 for answer in answers)
    known = {answer.request_id for answer in answers if answer.request_id}
    found = {
        "acknowledged completions without their row": [
            answer for answer in completed.values()
            if answer.request_id not in by_id or by_id[answer.request_id].status != 200],
        "rows with other figures than the completion": [
            answer for answer in completed.values()
            if answer.request_id in by_id and by_id[answer.request_id].figures != figures_of(answer.number)],
        "rows twice": [request_id for request_id, count in collections.Counter(row.request_id for row in rows).items() if count > 1],
        "completions with the same id": [] if len(completed) == sum(answer.status == 200 for answer in answers) else ["an id"],
        "prompts that a model got twice": [prompt for prompt, count in asked.items() if count > 1],
        "rows of another outcome than the answer": [
            (answer, by_id[answer.request_id]) for answer in answers
            if answer.request_id in by_id and by_id[answer.request_id].status != answer.status
            and answer.request_id not in doubtful],
        "rows without an outcome": [row for row in rows if row.status is None and row.error_code is None],
        # A completion whose row could not be written has none, or one that says 200.
        "rows of requests that the service could not record": [row for row in rows if row.status == 503],
        "requests that were refused, and that a model got": [
            answer for answer in answers
            if answer.request_id and answer.status == 503 and answer.may_retry and asked[answer.number]],
    }
    unknown = [row for row in rows if row.request_id not in known]
    if len(unknown) > broken:
        found[f"rows of requests that no client sent (connections broke: {broken})"] = unknown
    for gateway in gateways:
        found[f"usage verify of gateway {gateway.name} fails"] = failed_verification(gateway)
        found[f"the sums of usage of gateway {gateway.name} differ from the rows"] = other_sums(gateway, rows)
    return [line for what, cases in found.items() for line in some(what, cases)]
