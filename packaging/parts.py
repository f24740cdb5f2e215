"""Writes the SBOM (CycloneDX) of the program and the licenses of its libraries.

    python3 packaging/parts.py SBOM.json THIRD-PARTY.gz

Both are made from Cargo.lock with `cargo metadata`. The same sources give the same bytes on any machine.
"""

import gzip
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[1]

# File names, in crates, of licenses and notices.
LICENSE_NAMES = ("license", "licence", "copying", "copyright", "notice", "unlicense")


def main():
    sbom, notices = map(pathlib.Path, sys.argv[1:])
    metadata = cargo_metadata()
    packages = {package["id"]: package for package in metadata["packages"]}
    edges = {node["id"]: in_the_program(node, packages) for node in metadata["resolve"]["nodes"]}
    root = metadata["resolve"]["root"]
    packages[root]["version"] = subprocess.run([ROOT / "packaging/version"], capture_output=True, text=True, check=True).stdout.strip()
    parts = sorted(reachable(root, edges), key=lambda part: reference(packages[part]))
    for path in (sbom, notices):
        path.parent.mkdir(parents=True, exist_ok=True)
    sbom.write_text(json.dumps(bill(root, parts, packages, edges), indent=1) + "\n")
    texts = "".join(notice(packages[part]) for part in parts if part != root)
    notices.write_bytes(gzip.compress(texts.encode(), mtime=0))
    print(f"{sbom}, {notices}: {len(parts) - 1} libraries")


def cargo_metadata():
    host = next(
        line.removeprefix("host: ")
        for line in subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout.splitlines()
        if line.startswith("host: ")
    )
    command = ["cargo", "metadata", "--format-version=1", "--locked", f"--filter-platform={host}"]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)


def in_the_program(node, packages):
    """Returns the packages that are linked in, without those for tests, build scripts and macros."""
    return [
        dependency["pkg"]
        for dependency in node["deps"]
        if any(kind["kind"] is None for kind in dependency["dep_kinds"])
        and not any("proc-macro" in target["kind"] for target in packages[dependency["pkg"]]["targets"])
    ]


def reachable(root, edges):
    found, ahead = set(), [root]
    while ahead:
        part = ahead.pop()
        if part not in found:
            found.add(part)
            ahead.extend(edges[part])
    return found


def reference(package):
    kind = "cargo" if package["source"] else "generic"
    return f"pkg:{kind}/{package['name']}@{package['version']}"


def bill(root, parts, packages, edges):
    lock = (ROOT / "Cargo.lock").read_bytes()
    checksums = dict(locked_checksums(lock.decode()))
    sqlite = sqlite_in(next(package for package in packages.values() if package["name"] == "libsqlite3-sys"))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        # Derived from the content, so that two builds give the same number.
        "serialNumber": f"urn:uuid:{uuid.UUID(bytes=hashlib.sha256(lock).digest()[:16], version=4)}",
        "version": 1,
        "metadata": {"component": component(packages[root], checksums, "application")},
        "components": [component(packages[part], checksums, "library") for part in parts if part != root] + [sqlite],
        "dependencies": [
            {
                "ref": reference(packages[part]),
                "dependsOn": sorted({reference(packages[other]) for other in edges[part]}),
            }
            for part in parts
        ],
    }


def sqlite_in(crate):
    """Returns the entry for SQLite, whose C source is inside libsqlite3-sys and has its own version."""
    header = pathlib.Path(crate["manifest_path"]).parent / "sqlite3" / "sqlite3.h"
    version = re.search(r'#define SQLITE_VERSION +"([0-9.]+)"', header.read_text())[1]
    purl = f"pkg:generic/sqlite@{version}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": "sqlite",
        "version": version,
        "description": "SQLite, compiled in",
        "purl": purl,
        "licenses": [{"expression": "blessing"}],
    }


def component(package, checksums, kind):
    found = {
        "type": kind,
        "bom-ref": reference(package),
        "name": package["name"],
        "version": package["version"],
        "description": " ".join((package["description"] or "").split()),
        "purl": reference(package),
    }
    if package["license"]:
        # Some crates still use the slash from before SPDX.
        found["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    if checksum := checksums.get((package["name"], package["version"])):
        found["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package["repository"]:
        found["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return found


def locked_checksums(lock):
    for block in lock.split("[[package]]")[1:]:
        fields = dict(line.split(" = ", 1) for line in block.splitlines() if " = " in line)
        if "checksum" in fields:
            yield (fields["name"].strip('"'), fields["version"].strip('"')), fields["checksum"].strip('"')


def notice(package):
    """Returns the name of a library and the texts of its licenses."""
    folder = pathlib.Path(package["manifest_path"]).parent
    texts = [
        path.read_text(errors="replace").strip()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name.lower().startswith(LICENSE_NAMES)
    ]
    authors = ", ".join(package["authors"])
    head = f"{package['name']} {package['version']}, {package['license']}" + (f", {authors}" if authors else "")
    return "\n\n".join(["=" * 80 + "\n" + head, *texts]) + "\n\n"


if __name__ == "__main__":
    main()
