"""Holds the real binary to docs/openapi.yaml: Schemathesis makes up requests from it and judges the answers.

    .venv/bin/pip install -r tests/outside/requirements.txt
    .venv/bin/python tests/outside/openapi.py

ADRIATICUM names another binary than target/release/adriaticum. Schemathesis loads this file too, for the hook
`stands`.
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

# The same requests on every run, so that a failure can be looked into.
SEED = 20260101
EXAMPLES = 2500

MAX_CONTENT_TOGETHER = 32_000
MAX_BODY = 262_144


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
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": __file__,
        "PYTHONPATH": str(pathlib.Path(__file__).parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
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


def main():
    with tempfile.TemporaryDirectory(prefix="adriaticum-schemathesis-") as name, HalfMeasuredRuntime() as runtime:
        folder = pathlib.Path(name)
        with Service(folder, runtime) as service:
            report, passed = run_schemathesis(service, folder)
            completions = len(runtime.calls)
            service.ensure_it_still_answers()
            service.ensure_it_ends_well()
    ensure(passed, "Schemathesis found what it tells above")
    ensure_it_tested(report, completions)
    print(f"{report['test_cases']['generated']} cases, {completions} completions, no failure")


if __name__ == "__main__":
    main()
