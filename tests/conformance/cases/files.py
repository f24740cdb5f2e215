"""Files that can't be read, written or created: what still works, and which file a message names."""

import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

from harness import Runtime, Secured, Server, chat, is_completion, is_error, until
from service import REPLY_SECONDS

# A user who is held to the modes of files: root only without its capability to ignore them.
HELD = () if os.geteuid() else ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
DENIED = "Permission denied (os error 13)"


def _run(server, *arguments, **environment):
    command = [str(part) for part in (*HELD, server.binary, *arguments)]
    return subprocess.run(command, env=server.environment | environment, cwd=server.folder, capture_output=True, text=True,
                          timeout=REPLY_SECONDS, check=False)


def _content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _set_modes(folder, mode, of_files):
    """Sets the mode of a folder, and that of every file in it."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(of_files)
    folder.chmod(mode)


def a_database_in_a_folder_that_can_not_be_written_is_read_and_nothing_is_created():
    """tests/outside/full_disk.py does the same on a file system that is mounted read-only."""
    server = Server(database="database/a.db")
    folder, copies = server.folder / "database", server.folder / "copies"
    folder.mkdir()
    copies.mkdir()

    def read_all(copy, key):
        _set_modes(folder, 0o555, 0o440)
        before = _content(folder)
        for arguments, expected in ((("usage",), "0 requests"), (("usage", "verify"), "nothing wrong"),
                                    (("keys", "list"), key), (("audit",), key), (("backup", copies / copy), "0 rows")):
            done = _run(server, *arguments)
            assert done.returncode == 0 and expected in done.stdout, done
        assert "a.db: the database can't be written" in _run(server, "check").stdout
        assert _content(folder) == before, "a file was changed or created"
        # The copy has all of it. It is not changed by a look at it either: its journal stays.
        whole = _content(copies)
        for arguments in (("keys", "list"), ("usage", "verify"), ("audit",)):
            done = _run(server, *arguments, ADRIATICUM_DATABASE=str(copies / copy))
            assert done.returncode == 0 and (key in done.stdout or arguments[0] == "usage"), done
        assert _content(copies) == whole, "a copy was changed"
        _set_modes(folder, 0o755, 0o640)

    created = server.cli("keys", "create", "one").stderr
    assert created.startswith(f"Created the database {folder}/a.db"), created
    read_all("closed.db", "one")
    # A service that was killed leaves its WAL, and the key in it.
    with server:
        server.cli("keys", "create", "two")
        server.stop(signal.SIGKILL)
        read_all("killed.db", "two")
        (folder / "a.db-shm").unlink()
        _set_modes(folder, 0o555, 0o440)
        for arguments in (("usage",), ("keys", "list"), ("backup", copies / "half.db")):
            done = _run(server, *arguments)
            assert done.returncode == 1 and "database/a.db-wal has changes" in done.stderr, done
            assert "Copy both files" in done.stderr, done
        assert not (copies / "half.db").exists(), "half of a copy"
        _set_modes(folder, 0o755, 0o640)
        server.cli("restore", copies / "killed.db")


def _make_gone(path):
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink()


def _make_denied(path):
    path.write_text("x")
    path.chmod(0)


def _make_a_folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


def _make_closed(path):
    path.chmod(0o555)


def a_message_names_the_file_that_failed():
    """One that blames another file sends the operator to the wrong place."""
    serve, listed, created, backup = ("serve",), ("keys", "list"), ("keys", "create", "new"), ("backup", "out/copy.db")
    gone, denied, a_folder, closed = _make_gone, _make_denied, _make_a_folder, _make_closed
    with tempfile.TemporaryDirectory() as made:
        secured = Secured(pathlib.Path(made))
        certificate, private_key = secured.certificate.read_bytes(), secured.key.read_bytes()
    files = {"set.toml": b"", "runtime-key": b"secret", "cert.pem": certificate, "key.pem": private_key, "ca.pem": certificate}
    for fault, file, command, expected in (
            (gone, "set.toml", serve, "set.toml: it can't be read: No such file"),
            (denied, "set.toml", listed, f"set.toml: it can't be read: {DENIED}"),
            (a_folder, "set.toml", listed, "set.toml: it can't be read: Is a directory"),
            (denied, "db/a.db", serve, f"the database {{}}/db/a.db: {DENIED}"),
            (denied, "db/a.db", listed, f"the database {{}}/db/a.db: {DENIED}"),
            (denied, "db/a.db", created, f"the database {{}}/db/a.db: {DENIED}"),
            (denied, "db/a.db", backup, f"the database {{}}/db/a.db: {DENIED}"),
            (a_folder, "db/a.db", listed, "the database {}/db/a.db: is a directory"),
            (a_folder, "db/a.db", backup, "the database {}/db/a.db: is a directory"),
            (a_folder, "db/a.db", created, "the database {}/db/a.db: Is a directory"),
            (gone, "db/a.db", backup, "there is no database at {}/db/a.db"),
            (closed, "db", serve, f"{{}}/db/a.db.lock: {DENIED}"),
            (closed, "db", created, f"{{}}/db: {DENIED}"),
            (closed, "db", ("keys", "revoke", "key_0"), f"{{}}/db: {DENIED}"),
            (denied, "db/a.db-wal", serve, f"{{}}/db/a.db-wal: {DENIED}"),
            (denied, "db/a.db-wal", created, f"{{}}/db/a.db-wal: {DENIED}"),
            (denied, "db/a.db-wal", listed, f"{{}}/db/a.db-wal: {DENIED}"),
            (denied, "db/a.db-wal", backup, f"the database {{}}/db/a.db: {{}}/db/a.db-wal: {DENIED}"),
            (a_folder, "db/a.db-wal", serve, "{}/db/a.db-wal: it is not a regular file"),
            (a_folder, "db/a.db-wal", listed, "{}/db/a.db-wal: it is not a regular file"),
            (denied, "db/a.db-shm", created, f"{{}}/db/a.db-shm: {DENIED}"),
            (denied, "db/a.db.lock", serve, f"{{}}/db/a.db.lock: {DENIED}"),
            (a_folder, "db/a.db.lock", serve, "{}/db/a.db.lock: Is a directory"),
            (denied, "db/a-search.db", ("search", "query", "x"), f"the index {{}}/db/a-search.db can't be opened: {DENIED}"),
            (gone, "out", backup, "out/copy.db: there is no folder out"),
            (closed, "out", backup, f"out/copy.db: {DENIED}"),
            (a_folder, "out/copy.db", backup, "out/copy.db: Is a directory"),
            (a_folder, "socket", serve, "unix:{}/socket: a file that is not a socket is there"),
            (gone, "cert.pem", serve, 'tls.cert = "{}/cert.pem": No such file'),
            (denied, "cert.pem", serve, f'tls.cert = "{{}}/cert.pem": {DENIED}'),
            (a_folder, "cert.pem", serve, 'tls.cert = "{}/cert.pem": it is not a regular file'),
            (gone, "key.pem", serve, 'tls.key = "{}/key.pem": No such file'),
            (denied, "key.pem", serve, f'tls.key = "{{}}/key.pem": {DENIED}'),
            (denied, "ca.pem", serve, 'ADRIATICUM_RUNTIME_CA="{}/ca.pem": expected a PEM file'),
            (denied, "runtime-key", serve, 'ADRIATICUM_RUNTIME_API_KEY_FILE="{}/runtime-key": expected a file')):
        server = Server()
        folder = server.folder
        for name in ("db", "out"):
            (folder / name).mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        server.environment |= {f"ADRIATICUM_{name}": str(folder / file) for name, file in (
            ("CONFIG", "set.toml"), ("DATABASE", "db/a.db"), ("TLS_CERT", "cert.pem"), ("TLS_KEY", "key.pem"),
            ("RUNTIME_CA", "ca.pem"), ("RUNTIME_API_KEY_FILE", "runtime-key"))}
        server.environment |= {"ADRIATICUM_LISTEN": f"unix:{folder}/socket", "ADRIATICUM_SEARCH_URL": "folder:x",
                               "ADRIATICUM_RUNTIME_URL": "https://127.0.0.1:1/v1"}
        server.create_key()
        fault(folder / file)
        done = _run(server, *command)
        expected = expected.replace("{}", str(folder))
        assert done.returncode and expected in done.stderr, (fault.__name__, command, expected, done.stderr)
        if fault is closed:
            (folder / file).chmod(0o755)


def a_certificate_that_cannot_be_used_and_a_pipe_are_reported_at_once():
    """A command that waits for a pipe's writer would wait forever."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        one, other = Secured(pathlib.Path(first)), Secured(pathlib.Path(second))
        nonsense, pipe = pathlib.Path(first, "nonsense"), pathlib.Path(first, "pipe")
        nonsense.write_text("nonsense")
        os.mkfifo(pipe)
        good = {"tls_cert": one.certificate, "tls_key": one.key}
        for settings, expected in (({"tls_key": other.key}, "tls.key = "), ({"tls_key": nonsense}, "tls.key = "),
                                   ({"tls_cert": one.key}, "tls.cert = "), ({"tls_cert": pipe}, "tls.cert = "),
                                   ({"tls_key": pipe}, "tls.key = "), ({"runtime_ca": pipe}, "ADRIATICUM_RUNTIME_CA="),
                                   ({"runtime_api_key_file": pipe}, "ADRIATICUM_RUNTIME_API_KEY_FILE="),
                                   ({"database_password_file": pipe}, "ADRIATICUM_DATABASE_PASSWORD_FILE=")):
            server = Server(**good | settings)
            for command in ("serve", "check"):
                done = server.cli(command, check=False)
                printed = done.stdout + done.stderr
                assert done.returncode in (1, 2) and expected in printed and "BEGIN" not in printed, (settings, done)
                assert pipe not in settings.values() or "it is not a regular file" in printed, (settings, done)


def a_file_that_was_removed_or_replaced_is_not_written_on():
    runtime = Runtime()
    for name, is_replaced in (("adriaticum.db", False), ("adriaticum.db-wal", False), ("adriaticum.db", True)):
        with Server(runtime) as server:
            key, path, aside = server.create_key(), server.folder / name, server.folder / "aside"
            is_completion(server.post(chat("x"), key), "x")
            calls = len(runtime.calls)
            path.rename(aside)
            if is_replaced:
                shutil.copy(aside, path)
            # The first row that is not written, or a look before, makes the ledger unavailable.
            for _ in range(5):
                is_error(server.post(chat("x"), key), "service_unavailable")
            assert len(runtime.calls) <= calls + 1, f"{name}: inference was spent for rows that would be lost"
            assert until(lambda: "was removed, replaced or changed" in server.logged()), server.last_logged()
            aside.rename(path)
            is_error(server.post(chat("x"), key), "service_unavailable")
            assert server.stop() == 0
            server.start()
            server.wait_until_it_listens()
            is_completion(server.post(chat("x"), key), "x")


def a_damaged_page_is_refused_at_the_start_and_nothing_is_made_anew():
    with Server(Runtime()) as server:
        key, path = server.create_key(), pathlib.Path(server.database)
        for _ in range(30):
            is_completion(server.post(chat("x"), key), "x")
        server.stop()
        good = path.read_bytes()
        for start in range(0, len(good), 4096):
            damaged = good[:start] + b"\xa5" * 4096 + good[start + 4096:]
            path.write_bytes(damaged)
            done = server.cli("serve", check=False)
            assert done.returncode == 1 and "damaged" in done.stderr and ".recover" in done.stderr, (start, done)
            assert path.read_bytes() == damaged, f"the page at {start}: it was written to"
        path.write_bytes(good)
        server.start()
        server.wait_until_it_listens()
        is_completion(server.post(chat("x"), key), "x")


def a_database_that_has_lost_its_content_is_not_a_new_one():
    """SQLite deletes the WAL of an empty database, and every row in it."""
    with Server() as server:
        path, wal = pathlib.Path(server.database), pathlib.Path(f"{server.database}-wal")
        created = f"WARN] {path} is a new, empty database: no key works yet."
        assert until(lambda: created in server.logged()), server.logged()
        server.create_key()
        server.stop(signal.SIGKILL)
        size = wal.stat().st_size
        for lose in (lambda: path.write_bytes(b""), path.unlink):
            lose()
            for command in (("serve",), ("keys", "list"), ("keys", "create", "x")):
                done = server.cli(*command, check=False)
                assert done.returncode == 1 and f"{wal} beside it has {size} bytes" in done.stderr, (command, done)
                assert "Restore a backup, or delete both" in done.stderr, done
        assert wal.stat().st_size == size
        wal.unlink()
        server.start()
        assert until(lambda: created in server.logged()), server.logged()
