"""Tests the real binary against docs/openapi.yaml: Schemathesis generates requests from it and checks the answers.

    .venv/bin/pip install -r tests/outside/requirements.txt
    .venv/bin/python tests/outside/openapi.py

ADRIATICUM names another binary than target/release/adriaticum. Schemathesis also loads this file, for the hook
`is_real_failure`.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import schemathesis
from schemathesis.core.failures import AcceptedNegativeData
from schemathesis.openapi.checks import RejectedPositiveData, UnsupportedMethodResponse

from service import ROOT, HalfMeasuredRuntime, Service, ensure

DOCUMENT = ROOT / "docs" / "openapi.yaml"

# The same requests on every run, so that a failure can be reproduced.
SEED = 20260101
EXAMPLES = 1000

MAX_CONTENT_TOGETHER = 32_000
MAX_BODY = 262_144


@schemathesis.hook("filter_failure")
def is_real_failure(_context, failure, case, response):
    """Returns False for a failure that contradicts the specification. All checks are on."""
    status, body_size = response.status_code, len(response.request.body or b"")
    if isinstance(failure, UnsupportedMethodResponse):
        # The check wants 405. In the specification an unknown method is an unknown route.
        return status != 404
    if isinstance(failure, AcceptedNegativeData):
        # The check does not accept 413 as a refusal. The size is checked before the content.
        return not (status == 413 and body_size > MAX_BODY)
    if isinstance(failure, RejectedPositiveData):
        # The check does not know rules that JSON Schema cannot express.
        return status != (413 if body_size > MAX_BODY else 400 if breaks_unwritten_rule(case.body) else None)
    return True


def breaks_unwritten_rule(body):
    """Returns whether a body that matches the schema breaks a rule that the document has only in words."""
    together = sum(len(message["content"]) for message in body["messages"])
    # In JSON Schema 16.0 is an integer; here an integer has no fraction.
    return together > MAX_CONTENT_TOGETHER or isinstance(body.get("max_tokens"), float)


def run_schemathesis(service, folder):
    """Runs Schemathesis, and returns its report and whether it passed."""
    report = folder / "report.json"
    command = [
        pathlib.Path(sys.executable).with_name("schemathesis"), "run", DOCUMENT,
        "--url", f"http://127.0.0.1:{service.port}/v1",
        "--header", f"Authorization: {service.authorization}",
        "--checks", "all",
        "--continue-on-failure",
        "--max-examples", str(EXAMPLES),
        "--seed", str(SEED),
        # Independent of earlier runs.
        "--generation-database", "none",
        # max_tokens is no secret, and a failure should show everything.
        "--output-sanitize", "false",
        "--report", "json", "--report-json-path", report,
    ]
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": __file__,
        "PYTHONPATH": str(pathlib.Path(__file__).parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # It leaves files in its working directory.
    done = subprocess.run(command, cwd=folder, env=environment)
    ensure(report.exists(), f"Schemathesis wrote no report and ended with {done.returncode}")
    return json.loads(report.read_text()), done.returncode == 0


def ensure_it_tested(report, completions):
    """Fails if the run tested too little."""
    cases = report["test_cases"]
    ensure(report["complete"] and report["operations"]["tested"] == 1, "Schemathesis did not test the operation")
    ensure(cases["generated"] > cases["without_checks"], "Schemathesis tested no case")
    for phase in ("examples", "coverage", "fuzzing"):
        ensure(report["phases"][phase]["status"] == "success", f"Schemathesis did not complete its phase {phase}")
    # It warns if its requests were refused early, for example because of the key.
    warnings = [kind for kind, places in report["warnings"].items() if places]
    ensure(not warnings, f"Schemathesis warned of {', '.join(warnings)}")
    ensure(completions > 0, "no request reached the runtime")


def main():
    with tempfile.TemporaryDirectory(prefix="adriaticum-schemathesis-") as name, HalfMeasuredRuntime() as runtime:
        folder = pathlib.Path(name)
        with Service(folder, runtime) as service:
            report, passed = run_schemathesis(service, folder)
            completions = len(runtime.calls)
            service.ensure_it_still_answers()
            service.ensure_it_ends_well()
    ensure(passed, "Schemathesis found failures, see above")
    ensure_it_tested(report, completions)
    print(f"{report['test_cases']['generated']} cases, {completions} completions, no failure")


if __name__ == "__main__":
    main()
