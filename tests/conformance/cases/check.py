"""`check`: what works, what does not, and what to do."""

import json
import socket

from harness import SILENT, Runtime, Secured, Server, beside, chat, is_completion, until
from shared import RUNTIME, UNREACHABLE


def _findings(server, code):
    """Returns the statuses and the messages of each part."""
    done = server.cli("check", "--json", check=False)
    assert done.returncode == code, done
    found = {}
    for finding in json.loads(done.stdout):
        statuses, messages = found.setdefault(finding["part"], ([], []))
        statuses.append(finding["status"])
        messages.append(finding["message"])
    return {part: (statuses, "\n".join(messages)) for part, (statuses, messages) in found.items()}


def what_works():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME) as server:
        # The service listens before it has created its tables.
        server.create_key()
        found = _findings(server, 0)
        parts = ["configuration", "clock", "database", "search", "runtime", "service"]
        if server.secured:
            # Behind TLS the service can't be asked for its own verdict.
            parts = [*found]
            assert "service" not in parts and {"database", "runtime"} < {*parts}, parts
        assert [*found] == parts and all(statuses == ["ok"] for statuses, _ in found.values()), found
        printed = server.cli("check").stdout
        for part in (": writable", "reports usage", *([] if server.postgres else [": writable, ", "MiB free"])):
            assert part in printed, (part, printed)
        if not server.postgres:
            printed = server.cli("check", "--database").stdout
            assert "sound and writable" in printed, printed
        assert all(line.startswith("ok  ") for line in printed.splitlines()), printed
        assert server.rows("SELECT count(*) FROM usage") == [(0,)]


def what_does_not_work():
    RUNTIME.answer = RUNTIME.good
    url = f"{UNREACHABLE.url}/v1"
    for settings, statuses, message in (
            ({"runtime_url": f"{RUNTIME.url},{url}"}, ["ok", "fail"], f"{url}: no connection"),
            ({"runtime_url": url}, ["fail"], f"{url}: no connection"), ({}, ["fail"], "ADRIATICUM_RUNTIME_URL")):
        server = Server(**settings)
        server.create_key()
        found = _findings(server, 1)
        assert found["runtime"][0] == statuses and message in found["runtime"][1], found
        assert [part for part, (statuses, _) in found.items() if "fail" in statuses] == ["runtime"], found
        assert f"FAIL  runtime        {found['runtime'][1].splitlines()[-1]}" in server.cli("check", check=False).stdout


def what_a_runtime_says_of_itself():
    runtime = Runtime()
    models = [{"id": "other.gguf"}]
    runtime.describe = lambda path: (200, {"data": models} if path == "/v1/models" else {"default_generation_settings": {"n_ctx": 8192}})
    runtime.answer = lambda body: (200, runtime.completion(usage=None))
    server = Server(runtime)
    server.create_key()
    statuses, message = _findings(server, 0)["runtime"]
    assert statuses == ["warn"] and "reports no usage" in message, message
    assert "context of 8192 tokens; the largest requests may not fit" in message, message
    models[0]["max_model_len"] = 4096
    for status, answer, advice in (
            (404, {"error": {"message": "model 'adriaticum' not found"}}, "Set runtime.model to a model that it has: other.gguf"),
            (404, {"detail": "Not Found"}, "Check runtime.url"), (401, {}, "check runtime.api_key"), (403, {}, "check runtime.api_key"),
            (503, {"error": {"message": "Loading model"}}, "It is loading its model"), (500, {}, "Read its log")):
        runtime.answer = lambda body: (status, answer)  # noqa: B023
        # One that loads its model works soon.
        _, message = _findings(server, int(status != 503))["runtime"]
        assert f"HTTP status {status}" in message and advice in message, (status, message)
        assert ("runtime.model" in message) == ("runtime.model" in advice), message
    runtime.answer = lambda body: (SILENT, None)
    server.environment["ADRIATICUM_RUNTIME_TIMEOUT"] = "1"
    _, message = _findings(server, 1)["runtime"]
    assert "no complete answer in 1.0 s" in message and "runtime.timeout" in message, message


@beside
def it_waits_fifteen_seconds_for_a_part_at_most():
    """A person waits for it, whatever `runtime.timeout` is."""
    runtime = Runtime()
    runtime.answer = lambda body: (SILENT, None)
    server = Server(runtime, runtime_timeout=600)
    server.create_key()
    _, message = _findings(server, 1)["runtime"]
    assert "no complete answer in 15." in message, message


def it_prints_nothing_that_a_terminal_executes():
    """With this, a runtime set the title of the terminal, and could have written lines of its own."""
    escape = "\x1b]0;x\x07\nok    runtime \x9b31m"
    runtime, search = Runtime(), Runtime()
    search.describe = lambda path: (200, {"results": [], "unresponsive_engines": [[escape, escape]]})
    runtime.describe = lambda path: (200, {"data": [{"id": escape, "max_model_len": 4096}]})
    runtime.answer = lambda body: (404, {"error": {"message": f"model not found {escape}"}})
    server = Server(runtime, search_url=search.url, search_grounding="always")
    server.create_key()
    printed = server.cli("check", check=False).stdout
    assert all(character == "\n" or character.isprintable() for character in printed), printed
    assert r"that it has: \u{1b}]0;x\u{7}\u{a}ok" in printed and "\nok    runtime" not in printed, printed


def a_clock_that_was_set_back():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME) as server:
        is_completion(server.post(chat(), server.create_key()))
        server.change("UPDATE usage SET created = created + 3600")
        assert _findings(server, 0)["clock"][0] == ["warn"]


def files_with_secrets_that_everybody_can_read():
    server = Server()
    secured = Secured(server.folder)
    paths = database, key, _ = server.folder / "a.db", server.folder / "runtime-key", secured.key
    key.write_text("sesame")
    server.environment |= {"ADRIATICUM_DATABASE": str(database), "ADRIATICUM_RUNTIME_API_KEY_FILE": str(key),
                           "ADRIATICUM_TLS_CERT": str(secured.certificate), "ADRIATICUM_TLS_KEY": str(secured.key)}
    server.create_key()
    for path in paths:
        path.chmod(0o640)
    assert "secrets" not in _findings(server, 1)
    for path in paths:
        path.chmod(0o644)
        statuses, message = _findings(server, 1)["secrets"]
        assert statuses == ["warn"] and message.endswith(f"chmod o-rwx {path}"), message
        path.chmod(0o640)
    # The configuration itself, if there is a secret in it.
    server = Server()
    path, password = server.folder / "a.toml", server.folder / "password"
    server.environment["ADRIATICUM_CONFIG"] = str(path)
    server.environment.pop("ADRIATICUM_DATABASE")
    with_password = "database = 'postgresql://user:sesame@127.0.0.1:1/db'\n"
    for text, mode, advice in ((with_password, 0o644, "database_password_file"), (with_password, 0o640, None),
                               ("runtime.api_key = 'sesame'\n", 0o644, "runtime.api_key_file"), ("runtime.api_key = ''\n", 0o644, None)):
        path.write_text(text)
        path.chmod(mode)
        found = _findings(server, 1)
        assert "sesame" not in str(found) and ("secrets" in found) == bool(advice), (text, found)
        assert not advice or advice in found["secrets"][1], found
    path.write_text("database = 'postgresql://user@127.0.0.1:1/db'\n")
    password.write_text("sesame\n")
    password.chmod(0o644)
    server.environment["ADRIATICUM_DATABASE_PASSWORD_FILE"] = str(password)
    assert f"chmod o-rwx {password}" in _findings(server, 1)["secrets"][1]


def an_address_that_other_hosts_can_reach():
    """Other hosts got 404 from a service that said nothing about it, or sent their keys in the clear."""
    for listen, hosts, proxies, settings in (
            ("0.0.0.0", "localhost,127.0.0.1,::1", "10.0.0.1", ["api_hosts"]),
            ("0.0.0.0", "localhost,192.0.2.7", "unix", ["trusted_proxies"]),
            ("0.0.0.0", "127.0.0.9", "", ["api_hosts", "trusted_proxies"]), ("0.0.0.0", "192.0.2.7", "10.0.0.0/8", []),
            ("127.0.0.1", "localhost", "", [])):
        server = Server(RUNTIME, database="adriaticum.db", api_hosts=hosts, trusted_proxies=proxies)
        own = f"127.0.0.1:{server.port}"
        server.environment["ADRIATICUM_LISTEN"] = f"{listen}:{server.port}"
        if server.secured and "trusted_proxies" in settings:
            settings.remove("trusted_proxies")

        def warned(text):
            line = next((line for line in text.splitlines() if "other hosts can reach" in line), "")
            return [name for name in ("api_hosts", "trusted_proxies") if name in line]

        server.create_key()
        printed = server.cli("check", check=False).stdout
        assert warned(printed) == settings, (listen, hosts, proxies, printed)
        with server:
            assert until(lambda: "console at" in server.logged())
            assert warned(server.logged()) == settings, server.logged()
            # As if systemd had passed the socket: the setting says nothing about it then, and it counts where it listened last.
            server.environment["ADRIATICUM_LISTEN"] = own
            printed = server.cli("check", check=False).stdout
            assert warned(printed) == settings, printed


def an_address_that_can_not_be_used_has_its_reason():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for listen, reason in ((f"127.0.0.1:{taken.getsockname()[1]}", "another program uses"),
                               ("192.0.2.1:0", "does not have this address")):
            done = Server(listen=listen).cli("serve", check=False)
            assert done.returncode == 1 and reason in done.stderr and not done.stdout, done
