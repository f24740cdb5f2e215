"""Holds the real binary to docs/openapi.yaml: Schemathesis makes up requests from it and judges the answers.

    .venv/bin/pip install -r tests/requirements.txt
    .venv/bin/python tests/schemathesis/run.py

ADRIATICUM names another binary than target/release/adriaticum. Schemathesis loads this file too, for the hook
`stands`.
"""

import contextlib
import http.client
import http.server
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import schemathesis
from schemathesis.core.failures import AcceptedNegativeData
from schemathesis.openapi.checks import RejectedPositiveData, UnsupportedMethodResponse

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "openapi.yaml"
BINARY = pathlib.Path(os.environ.get("ADRIATICUM", ROOT / "target" / "release" / "adriaticum")).resolve()

# The same requests on every run, so that a failure can be looked into.
SEED = 20260101
EXAMPLES = 2500

MAX_CONTENT_TOGETHER = 32_000
MAX_BODY = 262_144
START_SECONDS = 10
STOP_SECONDS = 15


@schemathesis.hook("filter_failure")
def stands(_context, failure, case, response):
    """Whether a failure stands. Every check is on; this lets go what one holds against the specification itself."""
    status, body_size = response.status_code, len(response.request.body or b"")
    if isinstance(failure, UnsupportedMethodResponse):
        # The check wants 405. The specification has none: an unknown method is an unknown route.
        return status != 404
    if isinstance(failure, AcceptedNegativeData):
        # The check does not know 413 for a refusal. Size comes before content.
        return not (status == 413 and body_size > MAX_BODY)
    if isinstance(failure, RejectedPositiveData):
        # The check takes for good what breaks a rule that JSON Schema can't tell.
        return status != (413 if body_size > MAX_BODY else 400 if breaks_an_untold_rule(case.body) else None)
    return True


def breaks_an_untold_rule(body):
    """Whether a body that fits its schema is wrong by a rule that the document has in words only."""
    together = sum(len(message["content"]) for message in body["messages"])
    # To JSON Schema 16.0 is an integer; here an integer is written without a fraction.
    return together > MAX_CONTENT_TOGETHER or isinstance(body.get("max_tokens"), float)


class Runtime(http.server.ThreadingHTTPServer):
    """An inference runtime that says at once what it was told last."""

    daemon_threads = True

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Without it, the body of every answer waits 40 ms for the other side to acknowledge the head.
        disable_nagle_algorithm = True

        def do_POST(self):
            chat = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = json.dumps(self.server.completion(chat["messages"][-1]["content"])).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_):
            """Says nothing: the output is for what Schemathesis finds."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.completions = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def completion(self, text):
        self.completions += 1
        reply = {
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]
        }
        # Every other answer is without figures, as both kinds have their place in the document.
        if self.completions % 2:
            reply["usage"] = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
        return reply


class Service:
    """The real binary, in a folder of its own."""

    def __init__(self, folder, runtime):
        self.port = free_port()
        self.log = folder / "log"
        no_settings = folder / "adriaticum.toml"
        no_settings.touch()
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("ADRIATICUM")}
        self.environment |= {
            # Without it, the settings of an installed service would be read.
            "ADRIATICUM_CONFIG": str(no_settings),
            "ADRIATICUM_LISTEN": f"127.0.0.1:{self.port}",
            "ADRIATICUM_DATABASE": str(folder / "adriaticum.db"),
            "ADRIATICUM_RUNTIME_URL": runtime.url,
        }
        created = subprocess.run(
            [BINARY, "keys", "create", "schemathesis"],
            env=self.environment, capture_output=True, text=True,
        )
        ensure(created.returncode == 0, f"no key could be created: {created.stderr}")
        self.authorization = f"Bearer {created.stdout.strip()}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([BINARY, "serve"], env=self.environment, stdout=log, stderr=log)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Ends what a failure left running; after a good end there is nothing left to do."""
        self.process.kill()
        self.process.wait()

    def wait_until_it_listens(self):
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            ensure(self.process.poll() is None, f"the service ended at its start:\n{self.last_logged()}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.01)
        raise SystemExit(f"the service did not listen within {START_SECONDS} s:\n{self.last_logged()}")

    def ensure_it_still_answers(self):
        self.ensure_it_did_not_panic()
        ensure(self.process.poll() is None, f"the service ended during the run:\n{self.last_logged()}")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            body = {"model": "adriaticum", "messages": [{"role": "user", "content": "Still there?"}]}
            headers = {"Authorization": self.authorization, "Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode()
        ensure(response.status == 200, f"the service no longer answers a good request: {response.status} {text}")

    def ensure_it_ends_well(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_SECONDS)
        ensure(code == 0, f"the service ended with {code} on SIGTERM:\n{self.last_logged()}")
        self.ensure_it_did_not_panic()

    def ensure_it_did_not_panic(self):
        panics = [line for line in self.logged() if "panicked" in line]
        ensure(not panics, "\n".join(["the service panicked:", *panics]))

    def logged(self):
        return self.log.read_text(errors="replace").splitlines()

    def last_logged(self):
        return "\n".join(self.logged()[-20:])


def free_port():
    """A port below those that the system hands out, so that nothing else gets it before the service does."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def run_schemathesis(service, folder):
    """Runs the command line; its report, and whether it found nothing wrong."""
    report = folder / "report.json"
    command = [
        pathlib.Path(sys.executable).with_name("schemathesis"), "run", DOCUMENT,
        "--url", f"http://127.0.0.1:{service.port}/v1",
        "--header", f"Authorization: {service.authorization}",
        "--checks", "all",
        "--continue-on-failure",
        "--max-examples", str(EXAMPLES),
        "--seed", str(SEED),
        # What an earlier run found must not change this one.
        "--generation-database", "none",
        # A member called max_tokens is no secret, and a failure is told whole.
        "--output-sanitize", "false",
        "--report", "json", "--report-json-path", report,
    ]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": __file__, "PYTHONDONTWRITEBYTECODE": "1"}
    # It leaves files in the folder that it runs in.
    done = subprocess.run(command, cwd=folder, env=environment)
    ensure(report.exists(), f"Schemathesis made no report and ended with {done.returncode}")
    return json.loads(report.read_text()), done.returncode == 0


def ensure_it_tested(report, completions):
    """A run that tried too little proves nothing."""
    cases = report["test_cases"]
    ensure(report["complete"] and report["operations"]["tested"] == 1, "Schemathesis did not test the operation")
    ensure(cases["generated"] > cases["without_checks"], "Schemathesis tested no case")
    for phase in ("examples", "coverage", "fuzzing"):
        ensure(report["phases"][phase]["status"] == "success", f"Schemathesis did not go through its phase {phase}")
    # It warns where its requests did not get far: a refused key, for one.
    warnings = [kind for kind, places in report["warnings"].items() if places]
    ensure(not warnings, f"Schemathesis warned of {', '.join(warnings)}")
    ensure(completions > 0, "no request got through to the runtime")


def ensure(condition, otherwise):
    if not condition:
        raise SystemExit(otherwise)


def main():
    with tempfile.TemporaryDirectory(prefix="adriaticum-schemathesis-") as name, Runtime() as runtime:
        folder = pathlib.Path(name)
        with Service(folder, runtime) as service:
            service.wait_until_it_listens()
            report, passed = run_schemathesis(service, folder)
            completions = runtime.completions
            service.ensure_it_still_answers()
            service.ensure_it_ends_well()
    ensure(passed, "Schemathesis found what it tells above")
    ensure_it_tested(report, completions)
    print(f"{report['test_cases']['generated']} cases, {completions} completions, no failure")


if __name__ == "__main__":
    main()
