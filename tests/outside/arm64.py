"""Tests the arm64 builds under QEMU, on a machine of another architecture.

    python3 tests/outside/arm64.py

Runs the unit tests, the conformance suite (plain and over TLS; a part of it with the static binary) and lintian. Run
`make deb static ARCH=arm64` first, or all of it: make test-arm64.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

from service import ROOT, ensure

TARGET = "aarch64-unknown-linux-gnu"
QEMU = "qemu-aarch64-static"
BINARY = ROOT / "target" / "cross" / TARGET / "release" / "adriaticum"
STATIC = ROOT / "target" / "static" / "arm64" / "adriaticum"


def run(*command, **environment):
    """Runs a command in the project's folder, which must succeed, and returns what it printed last."""
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    ensure(done.returncode == 0, f"{' '.join(map(str, command))} failed:\n{done.stdout[-10_000:]}")
    return done.stdout


def conformance(folder, binary, *arguments):
    """Runs the suite with a script in place of the binary, because the kernel cannot start a binary for arm64 itself."""
    script = folder / "adriaticum"
    script.write_text(f'#!/bin/sh\nexec {QEMU} {binary} "$@"\n')
    script.chmod(0o755)
    printed = run(sys.executable, "tests/conformance/run.py", *arguments, ADRIATICUM=str(script))
    return printed.splitlines()[-1]


def size(path):
    return f"{path.stat().st_size / 2**20:.2f} MiB"


def main():
    tests = run("packaging/cross.sh", "arm64", "gnu", "test", "--lib", "--locked",
                **{f"CARGO_TARGET_{TARGET.replace('-', '_').upper()}_RUNNER": QEMU})
    print(f"unit tests: {re.search('test result: (.*)', tests)[1]}", flush=True)
    with tempfile.TemporaryDirectory(prefix="adriaticum-arm64-") as name:
        folder = pathlib.Path(name)
        print(f"binary, {size(BINARY)}: conformance, {conformance(folder, BINARY)}", flush=True)
        print(f"over TLS: {conformance(folder, BINARY, '--tls')}", flush=True)
        print(f"static binary, {size(STATIC)}: completions, {conformance(folder, STATIC, 'completions')}", flush=True)
    packages = sorted((ROOT / "target" / "debian" / "arm64").glob("*.deb"), key=lambda path: path.stat().st_mtime)
    ensure(packages, "there is no package for arm64: make deb ARCH=arm64")
    found = subprocess.run(["lintian", "--allow-root", packages[-1]], capture_output=True, text=True)
    ensure(found.returncode == 0, f"lintian finds:\n{found.stdout}{found.stderr}")
    warnings = len(re.findall("^W:", found.stdout, re.MULTILINE))
    print(f"package, {size(packages[-1])}: lintian finds no error, {warnings} warnings")


if __name__ == "__main__":
    main()
