"""`backup` and `restore`: the drill of docs/deploy.md, what it keeps, and what it refuses. They are for SQLite."""

import contextlib
import os
import pathlib
import shutil
import sqlite3
import subprocess
import threading
import time

from browser import Browser, set_password
from harness import Server, chat, is_completion, is_error, until
from service import BINARY
from shared import KEY, RUNTIME, SERVER, ok

FORMER = ".before-restore-"


def _complete(server, *secrets):
    RUNTIME.answer = RUNTIME.good
    for secret in secrets:
        is_completion(server.post(chat(), secret))


def _refused(server, file, *parts):
    done = server.cli("restore", file, check=False)
    assert done.returncode == 1 and not done.stdout, done
    assert all(part in done.stderr for part in parts), (parts, done)
    assert not (server.folder / "adriaticum.db.restoring").exists(), "the copy is left"


def _execute(path, statements):
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(statements)


def _logs(server):
    """Returns the files that SQLite would apply to the database."""
    return [name for name in os.listdir(server.folder) if name in [f"adriaticum.db-{end}" for end in ("wal", "shm", "journal")]]


def a_backup_is_a_consistent_copy_of_a_running_service():
    done, copy = ok(chat()), SERVER.folder / "copy.db"
    printed = SERVER.cli("backup", copy).stdout
    (rows,), = SERVER.rows("SELECT count(*) FROM usage")
    assert printed == f"{copy}: {rows:,} row{'s' * (rows != 1)}, {copy.stat().st_size:,} bytes\n", printed
    assert [path.name for path in SERVER.folder.glob("copy.db*")] == ["copy.db"], "nothing is beside it"
    assert copy.stat().st_mode & 0o7777 == 0o640
    with contextlib.closing(sqlite3.connect(f"file:{copy}?mode=ro", uri=True)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert database.execute("SELECT status FROM usage WHERE request_id = ?", [done["id"]]).fetchall() == [(200,)]
    with Server(RUNTIME, database=copy) as restored:
        is_completion(restored.post(chat(), KEY))
    before = copy.read_bytes()
    done = SERVER.cli("backup", copy, check=False)
    assert done.returncode == 1 and "new file" in done.stderr and copy.read_bytes() == before, "it was overwritten"
    copy.unlink()


def a_backup_that_fails_leaves_no_file():
    server = Server()
    server.create_key()
    copy = server.folder / "copy.db"
    # The copy may not grow to its size, as on a full disk.
    limited = ["bash", "-c", "trap '' XFSZ; ulimit -f 32; exec \"$@\"", "bash", BINARY, "backup", copy]
    backup = lambda: subprocess.run(limited, env=server.environment, capture_output=True, text=True, check=False)  # noqa: E731
    done = backup()
    assert done.returncode == 1 and "copy.db: " in done.stderr and "new file" not in done.stderr, done
    assert list(server.folder.glob("copy.db*")) == []
    # It must not remove a file that it did not create.
    copy.touch()
    assert backup().returncode == 1 and copy.exists()
    copy.unlink()
    server.cli("backup", copy)
    assert copy.stat().st_size > 32 * 1024, "the limit should be less than the copy"


def a_drill_with_keys_created_changed_rotated_and_revoked_since_the_backup():
    with Server(RUNTIME) as server:
        set_password(server)
        names = ("stays", "revoked", "renamed", "narrowed", "rotated", "overlapping")
        secrets = {name: server.create_key(name) for name in names}
        ids = {name: key["id"] for name, key in server.keys().items()}
        _complete(server, *secrets.values())
        browser = Browser.signed_in(server)
        copy = server.folder / "copy.db"
        server.cli("backup", copy)
        backup = copy.read_bytes()
        server.cli("keys", "revoke", ids["revoked"])
        server.cli("keys", "rename", ids["renamed"], "another")
        server.cli("keys", "set", ids["narrowed"], "--permission", "metrics", "--concurrent", "2")
        new = server.cli("keys", "rotate", ids["rotated"]).stdout.strip()
        beside_old = server.cli("keys", "rotate", ids["overlapping"], "--overlap", "30d").stdout.strip()
        created = server.create_key("created")
        created_id = server.keys()["created"]["id"]
        _complete(server, created)
        set_password(server, "another password than before")
        kept = ("SELECT revoked FROM keys WHERE revoked IS NOT NULL", "SELECT hash FROM console_password",
                "SELECT id FROM audit WHERE action IN ('key_revoked', 'key_rotated', 'password_set') ORDER BY id")
        before = [server.rows(sql) for sql in kept]
        assert len(before[2]) == 5, before
        _refused(server, copy, f"another adriaticum serve uses it (pid {server.process.pid})")
        server.stop()

        printed = server.cli("restore", copy).stdout
        assert ": writable, " in server.cli("check").stdout
        for part in (
                "copy.db: 6 rows, the newest of ",
                "The former database has 1 request more, which the ledger and its sums lose.\n",
                "Changes since the backup, which are undone:\n",
                f' key changed {ids["renamed"]} (renamed): name: "renamed" → "another"\n',
                f" key changed {ids['narrowed']} (narrowed): permissions: completions → metrics, concurrent: none → 2\n",
                f" key created {created_id} (created): permissions: completions",
                f"these stay revoked:\n  {ids['revoked']} (revoked)\n",
                "these keep their present secret:\n", f"  {ids['rotated']} (rotated)\n", f"  {ids['overlapping']} (overlapping)\n",
                "The console keeps its present password.\nAll console sessions have ended.\n"):
            assert part in printed, (part, printed)
        assert ids["stays"] not in printed, printed
        assert copy.read_bytes() == backup, "it was changed"
        assert _logs(server) == []
        assert [server.rows(sql) for sql in kept] == before, "who changed what, and since when, is kept"
        assert server.rows("SELECT session_ends FROM console_browsers") == [(None,)], "no session"
        # Rows of one millisecond have no order, so it need not be the last.
        restored, = (line for line in server.cli("audit").stdout.splitlines() if "database restored" in line)
        assert "a backup with 6 rows" in restored, restored
        assert server.cli("usage", "verify").stdout.startswith("6 rows, nothing wrong")

        server.start()
        server.wait_until_it_listens()
        _complete(server, secrets["stays"], secrets["renamed"], secrets["narrowed"], new, secrets["overlapping"], beside_old)
        for secret in (secrets["revoked"], created, secrets["rotated"]):
            is_error(server.post(chat(), secret), "invalid_api_key")
        assert browser.get("/keys").status == 303
        server.stop()

        # Back again.
        command = printed.strip().splitlines()[-1]
        back = server.cli("restore", command.rpartition("adriaticum restore ")[2]).stdout
        for part in (f"so these work again unless they have expired:\n  {created_id} (created)\n", ": 7 rows, the newest of ",
                     "The former database has 6 requests more"):
            assert part in back, (part, back)
        server.start()
        server.wait_until_it_listens()
        _complete(server, created, new, secrets["overlapping"])
        for secret in (secrets["revoked"], secrets["rotated"]):
            is_error(server.post(chat(), secret), "invalid_api_key")
        assert server.cli("usage", "verify").stdout.startswith("10 rows, nothing wrong")


def paths_of_any_bytes():
    """A path need not be UTF-8. Neither a backup nor a restore leaves another file."""
    server = Server()
    server.create_key("first")
    name = os.fsdecode(b"copy \xff%41?#.db")
    before = len(os.listdir(server.folder))
    for command, files in (("backup", 1), ("restore", 3)):
        done = subprocess.run([BINARY, command, name], env=server.environment, cwd=server.folder, capture_output=True, check=False)
        assert done.returncode == 0, done
        # After a restore there are the lock and the former database, too.
        assert len(os.listdir(server.folder)) == before + files, os.listdir(server.folder)
    assert "first" in server.keys()


def a_present_database_that_is_damaged_or_missing_is_replaced():
    server = Server()
    server.create_key("first")
    set_password(server)
    server.cli("backup", "copy.db")
    database, wal = server.folder / "adriaticum.db", server.folder / "adriaticum.db-wal"
    database.unlink()
    printed = server.cli("restore", "copy.db").stdout
    assert "There was no database before." in printed and "is restored" in printed and "kept as" not in printed, printed
    assert "first" in server.keys()
    # No database at all, with a WAL that belongs to it, and an empty file beside one.
    for content in ("garbage " * 2000, ""):
        database.write_text(content)
        database.chmod(0o600)
        wal.write_text("garbage " * 2000)
        printed = server.cli("restore", "copy.db").stdout
        for part in ("The former database can't be read (it", "look through adriaticum keys list",
                     "The console's password is that of the backup", "kept as"):
            assert part in printed, (part, printed)
        assert "To go back" not in printed, printed
        assert _logs(server) == [], "its WAL would be applied to the new database"
        former = printed.split("kept as ")[1].splitlines()[0]
        assert pathlib.Path(f"{former}-wal").read_text() == "garbage " * 2000
        assert database.stat().st_mode & 0o777 == 0o600 and "first" in server.keys()


def what_can_be_read_of_a_damaged_database_is_compared():
    server = Server()
    server.create_key("first")
    server.cli("backup", "copy.db")
    server.cli("keys", "revoke", "first")
    (page,), = server.rows("SELECT rootpage FROM sqlite_schema WHERE name = 'audit'")
    database = server.folder / "adriaticum.db"
    damaged = bytearray(database.read_bytes())
    damaged[(page - 1) * 4096:page * 4096] = b"\xff" * 4096
    database.write_bytes(damaged)
    printed = server.cli("restore", "copy.db").stdout
    for part in ("The audit of the former database can't be read: it is damaged.\n", "these stay revoked:\n",
                 "What can be read of it: sqlite3 "):
        assert part in printed, (part, printed)
    assert pathlib.Path(printed.split("kept as ")[1].splitlines()[0]).read_bytes() == damaged
    assert server.keys()["first"]["revoked"]


def what_can_not_be_restored_changes_nothing():
    with Server(RUNTIME) as server:
        _complete(server, *[server.create_key("first")] * 3)
        server.stop()
    server.cli("backup", "copy.db")
    copy, database = server.folder / "copy.db", server.folder / "adriaticum.db"
    good, present = copy.read_bytes(), database.read_bytes()
    tables = [name for name, in server.rows("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    # Those that others refer to come last.
    drop_all = "PRAGMA foreign_keys = OFF;" + "".join(f"DROP TABLE {name};" for name in tables) + "PRAGMA user_version = 0"
    for statements, part in (
            ("UPDATE usage SET total_tokens = 9 WHERE seq = 2", "does not verify: after 1 good row: the row of chatcmpl_"),
            ("UPDATE usage_days SET requests = 9", "does not verify: "),
            ("PRAGMA user_version = 99", "version 99"),
            ("PRAGMA user_version = 3", "no release had it"),
            (drop_all, "empty database"),
            (f"{drop_all}; CREATE TABLE mine (x)", "another program")):
        copy.write_bytes(good)
        _execute(copy, statements)
        _refused(server, "copy.db", part)
    damaged = bytes(byte ^ 0xff if at >= 8192 and at % 7 == 2 else byte for at, byte in enumerate(good))
    for content, part in ((damaged, "damaged"), (b"", "empty")):
        copy.write_bytes(content)
        _refused(server, "copy.db", part)
    _refused(server, "missing.db", "missing.db: No such file")
    _refused(server, "adriaticum.db", "it is the database itself")
    _refused(server, ".", "not a regular file")
    assert database.read_bytes() == present
    # Another process has it open.
    copy.write_bytes(good)
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.executescript("PRAGMA journal_mode = WAL; BEGIN; SELECT * FROM keys")
        other.execute("SELECT * FROM keys").fetchall()
        _refused(server, "copy.db", "locked by another process")
    server.cli("restore", "copy.db")
    server.environment["ADRIATICUM_DATABASE"] = "postgresql://a@127.0.0.1:1/a"
    _refused(server, "copy.db", "pg_restore")


def _with_planted_wal():
    """Returns a server that is stopped, with a backup, and a WAL that replaces every page of it: the key has another name."""
    server = Server()
    server.create_key("genuine")
    server.cli("backup", "copy.db")
    copy, forged = server.folder / "copy.db", server.folder / "forged.db"
    shutil.copy(copy, forged)
    with contextlib.closing(sqlite3.connect(forged, isolation_level=None)) as database:
        database.executescript("PRAGMA journal_mode = WAL; UPDATE keys SET name = 'planted'; VACUUM")
        wal = (server.folder / "forged.db-wal").read_bytes()
    # The attack works: SQLite itself applies it.
    victim = server.folder / "victim"
    victim.mkdir()
    shutil.copy(copy, victim)
    (victim / "copy.db-wal").write_bytes(wal)
    with contextlib.closing(sqlite3.connect(victim / "copy.db")) as database:
        assert database.execute("SELECT name FROM keys").fetchall() == [("planted",)]
    return server, wal


def a_backup_with_a_wal_or_a_journal_beside_it_is_refused():
    """In a folder that others may write to, such as /tmp, a local user replaced every page of a backup like this."""
    server, wal = _with_planted_wal()
    database = server.folder / "adriaticum.db"
    present = database.read_bytes()
    (server.folder / "link.db").symlink_to("copy.db")
    for name, content in (("copy.db-wal", wal), ("copy.db-journal", b"anything"), ("copy.db-wal", b"")):
        planted = server.folder / name
        planted.write_bytes(content)
        for backup in ("copy.db", "link.db"):
            _refused(server, backup, f"{backup}: {planted.resolve()} lies beside it",
                     "Make a backup with adriaticum backup FILE; or if you know")
        assert planted.read_bytes() == content
        planted.unlink()
        planted.symlink_to("/nowhere")
        _refused(server, "copy.db", "lies beside it")
        planted.unlink()
    assert database.read_bytes() == present
    assert "verified" in server.cli("restore", "copy.db").stdout and list(server.keys()) == ["genuine"]


def a_wal_that_is_planted_after_the_check_has_no_effect():
    """It comes and goes all the time, so that a check may miss it."""
    server, wal = _with_planted_wal()
    planted, aside = server.folder / "copy.db-wal", server.folder / "aside"
    aside.write_bytes(wal)
    is_over = threading.Event()

    def plant():
        while not is_over.is_set():
            aside.rename(planted)
            planted.rename(aside)

    thread = threading.Thread(target=plant)
    thread.start()
    restored = []

    def try_it():
        if server.cli("restore", "copy.db", check=False).returncode == 0:
            restored.append(list(server.keys()))
        return len(restored) == 5

    try:
        until(try_it)
    finally:
        is_over.set()
        thread.join()
    assert restored == [["genuine"]] * 5, restored


def a_restore_that_is_killed_leaves_one_of_the_two():
    """At any moment: the present database, or the new one."""
    with Server(RUNTIME) as server:
        secret = server.create_key("first")
        _complete(server, secret)
        server.cli("backup", "copy.db")
        _complete(server, secret)
        server.cli("keys", "revoke", "first")
    server.cli("backup", "later.db")
    pause, has_ended, end = 0, False, time.monotonic() + 60
    while not has_ended:
        with subprocess.Popen([BINARY, "restore", "copy.db"], env=server.environment, cwd=server.folder, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL) as restoring:
            time.sleep(pause)
            has_ended = restoring.poll() is not None
            restoring.kill()
        verified = server.cli("usage", "verify").stdout
        rows = verified.split()[0]
        assert rows in ("1", "2") and "nothing wrong" in verified, verified
        assert server.keys()["first"]["revoked"], "revoked in either"
        if has_ended:
            assert (restoring.returncode, rows) == (0, "1"), (restoring, rows)
        elif rows == "1":
            server.cli("restore", "later.db")
        assert time.monotonic() < end, "it does not end"
        pause += max(0.001, pause / 20)
