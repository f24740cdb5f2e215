"""Prints the package's changelog, made from the released versions in CHANGELOG.md.

    MAINTAINER="NAME <ADDRESS>" python3 packaging/changelog.py
"""

import datetime
import os
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main():
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
    releases = re.split(r"^(?=## \[)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    if releases[0].startswith("## [Unreleased]"):
        releases.pop(0)
    if not releases or not releases[0].startswith(f"## [{version}] - "):
        raise SystemExit(f"CHANGELOG.md: the newest release should be {version}, the version in Cargo.toml.")
    for release in releases:
        version, day = re.match(r"## \[(.*)\] - (.*)", release).groups()
        date = datetime.datetime.fromisoformat(day).strftime("%a, %d %b %Y 00:00:00 +0000")
        print(f"adriaticum ({version}-1) stable; urgency=medium\n")
        # A change is a list item with the indented lines that continue it.
        for change in re.findall(r"^- (.*(?:\n  .*)*)", release, re.MULTILINE):
            words = change.replace("`", "").split()
            print(textwrap.fill(" ".join(words), 78, initial_indent="  * ", subsequent_indent="    "))
        print(f"\n -- {os.environ['MAINTAINER']}  {date}\n")


if __name__ == "__main__":
    main()
