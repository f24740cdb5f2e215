"""The same range has the same figures wherever it is asked for: the command, its exports, the console's pages and exports, and
the rows themselves."""

import contextlib
import csv
import datetime
import io
import json
import re
import sqlite3
import zoneinfo

from browser import Browser, field, set_password, texts, with_console
from harness import Runtime, Server, beside, chat, is_completion, is_error
from seal import seal
from shared import RUNTIME

# Days of 23, 23.5, 24.5 and 25 hours, and one that begins at 01:00.
PLACES = ("America/Havana", "Australia/Lord_Howe")

# Retention has removed what is before this date.
CUT = "2024-10-15"

# Seconds before and at the bounds of ranges, by the clock of the place.
BOUNDS = (
    "2024-02-29 23:59:59", "2024-03-01", "2024-10-14 23:59:59", "2024-10-15", "2024-10-15 12:29:59", "2024-10-15 12:30",
    "2024-11-30 23:59:59", "2024-12-01", "2024-12-05 13:29:59", "2024-12-05 13:30", "2024-12-05 13:30:07", "2024-12-05 13:30:08",
    "2024-12-05 14:14:59", "2024-12-05 14:15", "2024-12-31 23:59:59", "2025-01-01")

# The arguments of the command, and the same bounds: since then, and before then, by the clock of the place or with a Z by UTC.
END = "2070-01-01"
RANGES = (
    ("--since 2024-12-01 --until 2024-12-01", "2024-12-01", "2024-12-02"),
    ("--since 2024-11-01 --until 2024-11-30", "2024-11-01", "2024-12-01"),
    ("--month 2024-11", "2024-11-01", "2024-12-01"),
    ("--since 2024-02-29 --until 2024-02-29", "2024-02-29", "2024-03-01"),
    ("--month 2024-02", "2024-02-01", "2024-03-01"),
    ("--since 2024-12-31 --until 2025-01-01", "2024-12-31", "2025-01-02"),
    ("--since 2024-12-05T13:00 --until 2024-12-05T14:00", "2024-12-05 13:00", "2024-12-05 14:00"),
    ("--since 2024-03-10 --until 2024-04-07", "2024-03-10", "2024-04-08"),
    ("--since 2024-12-05T13:30 --until 2024-12-05T14:15", "2024-12-05 13:30", "2024-12-05 14:15"),
    ("--since 2024-12-05T14:30+01:00 --until 2024-12-05T09:15-05:00", "2024-12-05 13:30Z", "2024-12-05 14:15Z"),
    ("--since 2024-12-05T13:30:07 --until 2024-12-05T13:30:08", "2024-12-05 13:30:07", "2024-12-05 13:30:08"),
    ("--since 2024-12-31T23:59:59 --until 2025-01-01T00:00", "2024-12-31 23:59:59", "2025-01-01"),
    ("--since 2024-10-31T23:00 --until 2024-11-01T01:00", "2024-10-31 23:00", "2024-11-01 01:00"),
    ("--since 2024-10-15 --until 2024-10-15", "2024-10-15", "2024-10-16"),
    ("--since 2024-10-14 --until 2024-10-14", "2024-10-14", "2024-10-15"),
    ("--since 2024-10-26T12:00 --until 2024-11-03T12:30", "2024-10-26 12:00", "2024-11-03 12:30"),
    ("--since 2024-10-14 --until 2024-10-15T00:00:01", "2024-10-14", "2024-10-15 00:00:01"),
    ("--since 2023-11-01 --until 2023-12-31", "2023-11-01", "2024-01-01"),
    ("--until 2024-01-31", "2023-11-01", "2024-02-01"),
    ("--since 2024-12-05T13:30Z", "2024-12-05 13:30Z", END),
    ("", "2023-11-01", END),
    ("--since 2020-01-01 --until 2022-12-31", "2020-01-01", "2023-01-01"),
)

# Ranges that cut a day without rows, and that day.
REFUSED = (
    ("2024-03-05T13:00", "2024-03-05T17:00", "2024-03-05"),
    ("2024-10-14T23:59:59", "2024-10-15", "2024-10-14"),
    ("2024-10-01", "2024-10-14T23:30", "2024-10-14"),
)


def _time(bound, zone):
    """Returns the Unix time of a bound."""
    clock = datetime.datetime.fromisoformat(bound.removesuffix("Z"))
    return int(clock.replace(tzinfo=datetime.timezone.utc if bound.endswith("Z") else zone).timestamp())


@contextlib.contextmanager
def _old_ledger(place):
    """Yields a service whose ledger was filled and cut as retention does it, and time, day and tokens of all of its rows."""
    zone = zoneinfo.ZoneInfo(place)
    server = Server(Runtime(), time_zone=place, database="adriaticum.db")
    for name in ("even", "odd"):
        server.create_key(name)
    ids = {name: key["id"] for name, key in server.keys().items()}
    set_password(server)
    # A row about every twenty minutes, from November 2023 to February 2025, and rows at the bounds of the ranges.
    start = _time("2023-11-01", zone)
    times = sorted([start + i * 1200 + i * 7919 % 1200 for i in range(35_000)] + [_time(bound, zone) for bound in BOUNDS])
    rows, kept = [], []
    for seq, second in enumerate(times, 1):
        name = "odd" if seq % 2 else "even"
        outcome = (200, None) if seq % 11 else (502, "inference_error")
        tokens = (seq % 50, seq % 7, seq % 50 + seq % 7) if seq % 11 * (seq % 13) else (None, None, None)
        day = datetime.datetime.fromtimestamp(second, zone).date().isoformat()
        rows.append((f"chatcmpl_{second * 1000 + seq % 1000:012x}{seq:020x}", ids[name], name, second, *outcome, *tokens, day))
        kept.append((second, day, tokens[2] or 0))
    cut = _time(CUT, zone)
    with contextlib.closing(sqlite3.connect(server.folder / server.database)) as database, database:
        database.executemany(
            "INSERT INTO usage (request_id, key_id, key_name, created, status, error_code, prompt_tokens, completion_tokens,"
            " total_tokens, day, duration_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)", rows)
        seal(database)
        database.execute("UPDATE gateways SET (anchor_seq, anchor_hash) = (SELECT max(seq), hash FROM usage WHERE created < ?)", (cut,))
        database.execute("DELETE FROM usage WHERE created < ?", (cut,))
    with server:
        yield server, kept, zone


def _csv(text):
    return list(csv.DictReader(io.StringIO(text.lstrip("\ufeff"))))


def _number(text):
    digits = text.replace(",", "")
    return int(digits) if digits.isdecimal() else 0


# Requests and total tokens, as a CSV file has them by group or by request, and the usage page in its cards, charts and table.

def _of_totals(text):
    return [sum(_number(row[name]) for row in _csv(text)) for name in ("requests", "total_tokens")]


def _of_rows(text):
    return [len(_csv(text)), sum(_number(row["total_tokens"]) for row in _csv(text))]


def _of_cards(page):
    return [_number(texts(re.search(f"<dt>{title}</dt>(.*?)</strong>", page)[1])[0]) for title in ("Requests", "Total tokens")]


def _of_charts(page):
    """The rows of the table of bars: the time, three outcomes, and keys."""
    body = re.search('id="figures".*?<tbody>(.*?)</table>', page, re.DOTALL)
    rows = [[_number(text) for text in texts(row)[1:]] for row in body[1].split("<tr>")[1:]] if body else []
    return [sum(sum(row[:3]) for row in rows), sum(sum(row[3:]) for row in rows)]


def _of_keys(page):
    body = re.search('class="cards groups".*?<tbody role="rowgroup">(.*?)</table>', page, re.DOTALL)
    rows = [texts(row) for row in body[1].split('<tr role="row">')[1:]] if body else []
    return [sum(_number(row[1]) for row in rows), sum(_number(row[5]) for row in rows)]


@beside
def a_range_has_the_same_figures_everywhere():
    for place in PLACES:
        with _old_ledger(place) as (server, kept, zone):
            browser = Browser.signed_in(server)
            wrong = [line for line in (_compare(server, browser, kept, zone, *each) for each in RANGES) if line]
            assert not wrong, "\n".join([place, *wrong])
            for each in REFUSED:
                _check_refused(server, browser, *each)
            # Whole days that have no hours any more: the page has a bar for each of them.
            page = browser.get("/usage?from=2024-03-04&to=2024-03-05").text
            assert ">Mar 4<" in page and ">Mar 5<" in page, page
            done = server.cli("usage", "--by", "hour", "--since", "2024-03-04", "--until", "2024-03-05", check=False)
            assert done.returncode == 1 and "the rows of 2024-03-04 were removed" in done.stderr, done


def _compare(server, browser, kept, zone, arguments, since, until):
    """Returns what differs."""
    is_open, has_rows = until == END, _time(since, zone) >= _time(CUT, zone)
    with_time = lambda bound: bound.replace(" ", "T") if " " in bound else f"{bound}T00:00"  # noqa: E731
    match arguments.split():
        case []:
            query = "range=all"
        # The page has months as times.
        case ["--month", _]:
            query = f"from={with_time(since)}&to={with_time(until)}"
        case _:
            query = arguments.replace("--since ", "from=").replace("--until ", "to=").replace(" ", "&").replace("+", "%2B")
    since, until = _time(since, zone), _time(until, zone)
    rows = [(day, tokens) for second, day, tokens in kept if since <= second < until]
    counted = [len(rows), sum(tokens for _, tokens in rows)]
    days = {}
    for day, _ in rows:
        days[day] = days.get(day, 0) + 1
    run = lambda *command: server.cli("usage", *command, *arguments.split()).stdout  # noqa: E731
    total = json.loads(run("--json"))
    page = browser.get(f"/usage?{query}").text
    figures = {
        "usage --json": [total["requests"], total["total_tokens"]],
        "usage --csv": _of_totals(run("--csv")),
        "--by key,day": _of_totals(run("--by", "key,day", "--csv")),
        "the page's cards": _of_cards(page),
        "charts": _of_charts(browser.get(f"/usage?by=bar&{query}").text),
        "by key": _of_keys(page),
        "totals.csv": _of_totals(browser.get(f"/usage/totals.csv?{query}").text),
    }
    if has_rows:
        figures |= {
            "usage list": _of_rows(run("list", "--limit", "100000", "--csv")),
            "export.csv": _of_rows(browser.get(f"/requests/export.csv?{query}").text),
            "--by hour": _of_totals(run("--by", "hour", "--csv")),
        }
    wrong = {name: found for name, found in figures.items() if found != counted}
    if total["since"] != since or not is_open and total["until"] != until:
        wrong["bounds"] = total["since"], total["until"]
    by_day = {row["day"]: _number(row["requests"]) for row in _csv(run("--by", "day", "--csv"))}
    if by_day != days:
        wrong["days"] = by_day
    return f"{arguments}: counted {counted} from {since} to {until}: {wrong}" if wrong else ""


def _check_refused(server, browser, since, until, day):
    removed = f"the rows of {day} were removed"
    done = server.cli("usage", "--since", since, "--until", until, check=False)
    assert done.returncode == 1 and removed in done.stderr, done
    reply = browser.get(f"/usage/totals.csv?from={since}&to={until}")
    assert reply.status == 400 and removed in reply.text, reply
    # The page extends the range and says so. The command has the same figures for what the fields are now.
    page = browser.get(f"/usage?from={since}&to={until}").text
    bars = browser.get(f"/usage?by=bar&from={since}&to={until}").text
    assert "From and To are whole days now" in page, page
    since, until = field(page, "from"), field(page, "to")
    assert since.endswith("T00:00") and until.endswith("T00:00"), (since, until)
    sums = _of_totals(server.cli("usage", "--since", since, "--until", until, "--csv").stdout)
    exported = _of_totals(browser.get(f"/usage/totals.csv?from={since}&to={until}").text)
    assert [_of_cards(page), _of_charts(bars), _of_keys(page), exported] == [sums] * 4, (since, until, sums)


@beside
def a_list_has_the_newest_requests_and_says_what_it_leaves_out():
    with _old_ledger("UTC") as (server, _, _):
        listed = lambda arguments: server.cli("usage", "list", *arguments.split())  # noqa: E731
        done = listed("")
        assert len(done.stdout.splitlines()) == 102, "the period, the heading and a hundred requests"
        assert "There are more than these 100 requests" in done.stderr, done
        done = listed("--since 2024-12-31T23:59:59Z --until 2025-01-01T00:00:01Z")
        period, _, *rows = done.stdout.splitlines()
        assert period == "2024-12-31T23:59:59Z to 2025-01-01T00:00:01Z" and not done.stderr, done
        newest, before = rows
        assert newest.startswith("2025-01-01T00:00:00Z  chatcmpl_") and before.startswith("2024-12-31T23:59:59Z  chatcmpl_"), done
        done = listed("--month 2024-12 --key even --limit 3 --json")
        rows = json.loads(done.stdout)
        assert [row["key_name"] for row in rows] == ["even"] * 3 and done.stderr, done
        assert rows == sorted(rows, key=lambda row: row["request_id"], reverse=True), rows
        done = listed("--since 2024-10-14 --until 2024-10-15 --csv")
        assert "created_utc" in _csv(done.stdout)[0] and "other requests of this range have no row any more" in done.stderr, done.stderr
        done = listed("--since 2024-10-14T12:34Z --until 2024-10-15")
        assert done.stderr.startswith("Some requests of this range have no row"), done.stderr


def the_pages_have_what_the_ledger_holds():
    runtime = Runtime()
    with with_console(runtime) as server:
        one, other = server.create_key("one"), server.create_key("other")
        runtime.answer = lambda body: (200, runtime.completion(usage=None))
        is_completion(server.post(chat(), one), usage=(None, None, None))
        runtime.answer = lambda body: (500, {})
        is_error(server.post(chat(), one), "inference_error")
        runtime.answer = runtime.good
        for _ in range(3):
            is_completion(server.post(chat(), other))
        is_error(server.post({}, other), "invalid_request")
        browser = Browser.signed_in(server)
        get = lambda path: browser.get(path).text  # noqa: E731
        cards = lambda page: [texts(f">{part}")[-1] for part in re.findall("<strong>(.*?)</strong>", page)[:3]]  # noqa: E731
        for name in ("1h", "24h", "7d", "30d", "90d", "all"):
            page = get(f"/usage?range={name}")
            assert cards(page) == ["6", "66.7 %", "42"], (name, cards(page))
            for part in ("33 in, 9 out<br>1 request unmeasured", ">of 4 completions"):
                assert part in page, (name, part, page)
            assert len(page) < 45_000, len(page)
        # What was not measured is no zero, and is not drawn.
        page = get("/usage?range=1h&key=one")
        assert cards(page) == ["2", "50.0 %", "–"] and "Tokens by key" not in page, page
        # An outcome changes the rows. Rates and shares are still those of all requests.
        page = get("/usage?outcome=invalid_request")
        assert cards(page) == ["1", "66.7 %", "–"], cards(page)
        for part in (">of 6</a>", ">of 4 completions", ">75.0 %</td>"):
            assert part in page, (part, page)
        page = get("/usage?by=outcome")
        for share in ("16.7 %", "66.7 %"):
            assert f'data-label="Share of requests">{share}</td>' in page, page
        assert 'data-label="Requests"' in get("/usage?by=day")
        for outcome, badge, count in (("failed", "bad", 2), ("ok", "good", 4)):
            assert get(f"/requests?outcome={outcome}").count(f'class="badge {badge}"') == count, outcome
        rows = lambda sort: ["|".join(texts(row)) for row in get(f"/usage?sort={sort}").split(  # noqa: E731
            'class="cards groups"')[1].split("</table>")[0].split('<tr role="row">')[2:]]
        # By tokens: "other" has all of them.
        first, last = rows("")
        assert first.startswith("other|4|75.0 %|33|9|42|") and first.endswith("100 %"), first
        assert last.startswith("one|2|50.0 %|–|–|–|") and last.endswith("–"), last
        assert rows("total_tokens") == [last, first], "the other way round"
        for query, count in (("least=0", 6), ("least=4000000", 0), ("most=4000000&outcome=failed", 2), ("outcome=ok", 4)):
            listed = get(f"/requests?range=1h&{query}").count('href="/requests/chatcmpl_')
            exported = len(_csv(get(f"/requests/export.csv?range=1h&{query}")))
            assert (listed, exported) == (count, count), (query, listed, exported)
        assert ">4</a>" in get("/keys"), "requests of 30 days"
        totals = get("/usage/totals.csv?range=24h")
        columns = ["day", "key_id", "key_name", "requests", "errors", "prompt_tokens", "completion_tokens", "total_tokens", "unmeasured"]
        assert totals.startswith("\ufeff" + ",".join(f'"{column}"' for column in columns) + "\r\n"), totals
        assert [sum(int(row[column]) for row in _csv(totals)) for column in columns[3:]] == [6, 2, 33, 9, 42, 1], totals
        assert get("/usage/totals.csv?from=2020-01-01&to=2020-02-01").count("\r\n") == 1


def a_page_of_a_request_has_no_figure_that_was_not_measured():
    with with_console(RUNTIME) as server:
        secret = server.create_key()
        RUNTIME.answer = lambda body: (200, RUNTIME.completion(usage=None))
        answered = server.post(chat(), secret).json["id"]
        refused = is_error(server.post({}, secret), "invalid_request")["request_id"]
        browser = Browser.signed_in(server)
        page = browser.get(f"/requests/{answered}").text
        for name in ("Tokens in", "Tokens out", "Total tokens"):
            assert f"<dt>{name}</dt><dd>–</dd>" in page, (name, page)
        assert ">200</span> Answered in " in page, page
        page = browser.get(f"/requests/{refused}").text
        assert "of the request broke a rule" in page and ">400 invalid_request</span>" in page, page
        assert "</span>Runtime" not in page, page
        # Nothing is about Search while it is off.
        for text in (page, browser.get("/status").text):
            assert not re.search(">search<|grounded", text, re.IGNORECASE), text


def an_export_of_more_than_10000_lines_is_refused_with_its_command():
    with with_console() as server:
        browser = Browser.signed_in(server)
        day, request_id = "date(i * 86400, 'unixepoch')", "printf('chatcmpl_%012x%020x', (1577836800 + i) * 1000, i)"
        if server.postgres:
            day = "to_char(DATE '1970-01-01' + i, 'YYYY-MM-DD')"
            request_id = "'chatcmpl_' || lpad(to_hex((1577836800 + i::bigint) * 1000), 12, '0') || lpad(to_hex(i), 20, '0')"
        # One row too many, and lines too many for the totals of 3,601 days.
        server.change("WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 10000)"
                      " INSERT INTO usage (request_id, key_id, key_name, created, status, gateway, day)"
                      f" SELECT {request_id}, 'key_1', 'x', 1577836800 + i, 200, 'a', '2020-01-01' FROM n")
        server.change("WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 3600)"
                      " INSERT INTO usage_days (key_id, day, status, error_code, gateway, requests, prompt_tokens, completion_tokens,"
                      f" total_tokens, unmeasured) SELECT key, {day}, 200, '', '', 1, 1, 1, 2, 0 FROM n,"
                      " (SELECT 'key_1' AS key UNION SELECT 'key_2' UNION SELECT 'key_3') AS keys")
        for path, command in (
                ("/requests/export.csv?from=2020-01-01&to=2020-01-01&gateway=a&outcome=ok",
                 "usage list --limit 100000 --csv --since 2020-01-01 --until 2020-01-01 --gateway a --status ok<"),
                ("/usage/totals.csv?from=1970-01-01&to=1979-12-31", "usage --by day,key --csv --since 1970-01-01 --until 1979-12-31<")):
            reply = browser.get(path)
            assert reply.status == 400 and f"adriaticum {command}" in reply.text.replace("&quot;", '"'), (path, reply.text)
        part = browser.get("/requests/export.csv?from=2020-01-01T00:00&to=2020-01-01T02:00").text
        assert part.count("chatcmpl_") == 7200
