"""Prints the package's changelog, made from CHANGELOG.md.

    MAINTAINER="NAME <ADDRESS>" SOURCE_DATE_EPOCH=SECONDS python3 packaging/changelog.py

What is under "Unreleased" is an entry with the version of this build and the time of its sources.
"""

import datetime
import os
import pathlib
import re
import subprocess
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main():
    build = subprocess.run([ROOT / "packaging/version"], capture_output=True, text=True, check=True).stdout.strip()
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
    releases = re.split(r"^(?=## \[)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    if releases[0].startswith("## [Unreleased]"):
        now = datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.timezone.utc)
        entry(build, now, releases.pop(0))
    if releases and not releases[0].startswith(f"## [{version}] - "):
        raise SystemExit(f"CHANGELOG.md: the newest release should be {version}, the version in Cargo.toml.")
    for release in releases:
        version, day = re.match(r"## \[(.*)\] - (.*)", release).groups()
        entry(version, datetime.datetime.fromisoformat(day), release)


def entry(version, date, text):
    """Prints the entry of a version, unless nothing was changed."""
    # A change is a list item with the indented lines that continue it.
    changes = re.findall(r"^- (.*(?:\n  .*)*)", text, re.MULTILINE)
    if not changes:
        return
    print(f"adriaticum ({version}-1) stable; urgency=medium\n")
    for change in changes:
        words = change.replace("`", "").split()
        print(textwrap.fill(" ".join(words), 78, initial_indent="  * ", subsequent_indent="    "))
    print(f"\n -- {os.environ['MAINTAINER']}  {date.strftime('%a, %d %b %Y %H:%M:%S +0000')}\n")


if __name__ == "__main__":
    main()
