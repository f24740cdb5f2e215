"""Prints the sizes of the packages, the exposure of the unit, and whether a second build has the same bytes.

    python3 packaging/sizes.py

Run `make deb` and `make static` first. It fails if the unit is more exposed than allowed, or if the builds differ.
"""

import hashlib
import pathlib
import platform
import re
import shutil
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
BINARY = pathlib.Path("target/release/adriaticum")
STATIC = pathlib.Path("target/static", "arm64" if platform.machine() == "aarch64" else "amd64", "adriaticum")
MOST_EXPOSED = 1.0


def main():
    package = newest_package(ROOT)
    for name, path in (("binary", BINARY), ("static binary", STATIC), ("package", package)):
        print(f"{name:15} {(ROOT / path).stat().st_size / 1024 / 1024:5.2f} MiB   {path}")
    exposure = exposure_of("systemd/adriaticum.service")
    print(f"exposure        {exposure:5.1f}       systemd-analyze security (at most {MOST_EXPOSED})")
    same = [(name, digest(ROOT / name), other) for name, other in built_again((BINARY, package))]
    for name, here, there in same:
        print(f"built again     {'same' if here == there else 'DIFFERENT':9}    {name}, {here[:16]} and {there[:16]}")
    if exposure > MOST_EXPOSED or any(here != there for _, here, there in same):
        raise SystemExit(1)


def exposure_of(unit):
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", ROOT / unit]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(re.search(r"exposure level for .*: ([0-9.]+)", output)[1])


def built_again(paths):
    """Yields the digests of the same files from a build of the same sources in another folder."""
    with tempfile.TemporaryDirectory(prefix="adriaticum-again-") as name:
        folder = pathlib.Path(name) / "elsewhere"
        ignored = shutil.ignore_patterns("target", "var", ".git", ".venv*", "node_modules", "__pycache__")
        shutil.copytree(ROOT, folder, ignore=ignored, symlinks=True)
        # The copy has no repository, which the version would be read from.
        version = subprocess.run([ROOT / "packaging/version"], capture_output=True, text=True, check=True).stdout.strip()
        subprocess.run(["make", "-s", "deb", f"ADRIATICUM_VERSION={version}"], cwd=folder, check=True, capture_output=True)
        for path in paths:
            yield path, digest(folder / path)


def newest_package(folder):
    found = sorted((folder / "target/debian").glob("adriaticum_*.deb"), key=lambda path: path.stat().st_mtime)
    return found[-1].relative_to(folder)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
