"""The time zone of a database: its days and months, and the times that people read and write."""

import csv
import datetime
import io
import json
import pathlib
import time
import zoneinfo

from harness import Server, chat, is_completion, is_error
from shared import RUNTIME

ZONEINFO = pathlib.Path("/usr/share/zoneinfo")

# 14 hours ahead: for most of a day its date is not that of UTC.
FAR, ZAGREB = "Pacific/Kiritimati", "Europe/Zagreb"

ZONE = "SELECT name, tzdata FROM time_zone"


def _local(seconds, zone):
    return datetime.datetime.fromtimestamp(seconds, zoneinfo.ZoneInfo(zone))


def _version():
    return (ZONEINFO / "tzdata.zi").open().readline().removeprefix("# version ").strip()


def _set(server, zone):
    """Changes the setting, as an edit of the configuration would."""
    server.environment.pop("ADRIATICUM_TIME_ZONE", None)
    if zone:
        server.environment["ADRIATICUM_TIME_ZONE"] = zone


def _completion(server, key):
    RUNTIME.answer = RUNTIME.good
    return is_completion(server.post(chat(), key))["id"]


def _audit(server, action):
    return [row["details"] for row in json.loads(server.cli("audit", "--json").stdout) if row["action"] == action]


def the_setting_is_taken_when_the_database_is_created_and_kept():
    server = Server(RUNTIME, time_zone=FAR)
    key = server.create_key()
    assert server.rows(ZONE) == [(FAR, _version())], server.rows(ZONE)
    assert _audit(server, "time_zone_set") == [f"{FAR}, tzdata {_version()}"]
    # Neither an unset setting nor the host decides from then on.
    _set(server, None)
    server.environment |= {"TZ": "America/New_York", "TZDIR": "/nonexistent"}
    with server:
        request_id = _completion(server, key)
        created, day = server.rows("SELECT created, day FROM usage")[0]
        expected = _local(created, FAR)
        assert day == expected.strftime("%Y-%m-%d"), (day, expected)
        assert server.rows("SELECT day, requests FROM usage_days") == [(day, 1)]
        iso = expected.isoformat()
        assert iso in server.cli("usage", "show", request_id).stdout
        assert iso in server.cli("usage", "list").stdout
        row, = csv.DictReader(io.StringIO(server.cli("usage", "list", "--csv").stdout))
        utc = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created))
        assert (row["created"], row["created_utc"], row["created_local"]) == (str(created), utc, iso), row
        report = json.loads(server.cli("usage", "--since", day, "--until", day, "--by", "day", "--json").stdout)
        start = datetime.datetime.combine(expected.date(), datetime.time(), expected.tzinfo)
        assert (report["since"], report["until"]) == (start.timestamp(), start.timestamp() + 86_400), report
        assert report["requests"] == 1 and report["rows"][0]["day"] == day, report
        text = server.cli("usage", "--since", day, "--until", day, "--csv").stdout
        figures, = csv.DictReader(io.StringIO(text))
        assert (figures["since"], figures["since_local"]) == (str(report["since"]), start.isoformat()), figures
        month = json.loads(server.cli("usage", "--month", day[:7], "--json").stdout)
        assert month["since"] == start.replace(day=1).timestamp() and month["requests"] == 1, month
        assert f"{day} ({FAR})" in server.cli("usage", "--since", day, "--until", day).stdout
        assert expected.strftime("%Y-%m-%d %H:%M") in server.cli("check", check=False).stdout
    log = server.logged().splitlines()
    assert all(line[10] == "T" and line[23] == "Z" for line in log), log


def a_day_of_the_zone_renews_a_budget():
    with Server(RUNTIME, time_zone=FAR) as server:
        key = server.create_key("thrifty", "--budget", "14/day")
        _completion(server, key)
        message = is_error(server.post(chat(), key), "insufficient_permission")["message"]
        created, = server.rows("SELECT created FROM usage WHERE status = 403")[0]
        tomorrow = _local(created, FAR).date() + datetime.timedelta(days=1)
        assert f"renewed at {tomorrow} 00:00+14:00" in message, message


def another_zone_is_refused_once_there_are_rows():
    server = Server(RUNTIME)
    key = server.create_key()
    for zone in (FAR, ZAGREB):
        # Without rows, each start takes it.
        _set(server, zone)
        with server:
            server.get("/healthz")
            assert server.rows("SELECT name FROM time_zone") == [(zone,)]
    with server:
        _completion(server, key)
    for zone in ("UTC", FAR):
        _set(server, zone)
        done = server.cli("serve", check=False)
        assert done.returncode == 2, done
        assert all(part in done.stderr for part in (f'"{zone}"', ZAGREB, "ADRIATICUM_TIME_ZONE")), done
        # Commands do not care, but for the check.
        assert json.loads(server.cli("usage", "--json").stdout)["requests"] == 1
        assert server.cli("check", check=False).stdout.count(f'time_zone = "{zone}"') == 1
    for zone in (None, ZAGREB):
        _set(server, zone)
        with server:
            _completion(server, key)
    names = [details.split(",")[0] for details in _audit(server, "time_zone_set")]
    assert names == [FAR, ZAGREB], names


def a_zone_that_is_not_installed_is_refused_with_the_package():
    for command in (["serve"], ["keys", "create", "x"]):
        server = Server(RUNTIME, time_zone="Europe/Atlantis")
        done = server.cli(*command, check=False)
        assert done.returncode == 2 and "tzdata" in done.stderr and "Europe/Atlantis" in done.stderr, done
        assert server.postgres or not pathlib.Path(server.database).exists(), "it was created all the same"


def a_start_stores_newer_rules_and_no_older_ones():
    server = Server(RUNTIME, time_zone=ZAGREB)
    key = server.create_key()
    with server:
        _completion(server, key)
    own, other = ((ZONEINFO / name).read_bytes() for name in (ZAGREB, FAR))
    for version, renewed in (("2000a", True), ("2999a", False), (_version(), False)):
        literal = f"'\\x{other.hex()}'" if server.postgres else f"x'{other.hex()}'"
        server.change(f"UPDATE time_zone SET tzif = {literal}, tzdata = '{version}'")
        with server:
            server.get("/healthz")
            stored, = server.rows("SELECT tzif FROM time_zone")[0]
            assert bytes(stored) == (own if renewed else other), version
    assert _audit(server, "time_zone_renewed") == [f"{ZAGREB}, tzdata {_version()}"]
    row = next(line for line in server.cli("audit").stdout.splitlines() if "time zone renewed" in line)
    assert "command" in row, row


def a_local_time_that_exists_twice_or_never_is_refused():
    server = Server(RUNTIME, time_zone=ZAGREB)
    server.create_key()
    for since, parts in (("2025-10-26T02:30", ("2025-10-26 02:30+02:00", "2025-10-26 02:30+01:00")),
                         ("2025-03-30T02:30", ("2025-03-30 02:00+01:00", "2025-03-30 03:00+02:00"))):
        for command in (["usage"], ["usage", "list"], ["audit"]):
            done = server.cli(*command, "--since", since, check=False)
            assert done.returncode == 2 and all(part in done.stderr for part in parts), (command, done)
    report = json.loads(server.cli("usage", "--since", "2025-10-26 02:30+01:00", "--json").stdout)
    assert report["since"] == 1_761_442_200, report
