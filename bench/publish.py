"""Writes the last results of compare.py and scale.py into README.md and docs/performance.md, between their marks."""

import json

import compare
import scale
from subjects import ROOT


def main():
    for result, page, table in (
        (compare.RESULT, ROOT / "README.md", comparison),
        (scale.RESULT, ROOT / "docs" / "performance.md", growth),
    ):
        if result.exists():
            put_between_marks(page, table(json.loads(result.read_text())))
            print(f"{page.relative_to(ROOT)}: wrote the table of {result.relative_to(ROOT)}")
        else:
            print(f"{result.relative_to(ROOT)} does not exist, so {page.relative_to(ROOT)} is not changed")


def put_between_marks(page, lines):
    before, begin, rest = page.read_text().partition("<!-- bench -->\n")
    _, end, after = rest.partition("<!-- /bench -->\n")
    if not end:
        raise SystemExit(f"{page} lacks the marks <!-- bench --> and <!-- /bench -->, each on its own line.")
    page.write_text(before + begin + "\n".join(["", *lines, "", ""]) + end + after)


def comparison(result):
    yield ("| | added to a direct call, median | 99th percentile | requests/s of 32 clients | processor, a request"
           " | memory, idle | after the load | exec to the first 200 | on disk |")
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name, its in result["subjects"].items():
        value = {figure: its[figure]["median"] for figure in its}
        if name == "direct":
            yield f"| direct | | | {value['rate_32']:,.0f} | | | | | |"
        else:
            shown = f"**{name}**" if name == compare.SHIPPED else name
            yield (f"| {shown} | {value['added_us']:,.0f} µs | {value['added_p99_us']:,.0f} µs | {value['rate_32']:,.0f}"
                   f" | {value['processor_us']:,.0f} µs | {value['idle_mib']:.1f} MiB | {value['loaded_mib']:.1f} MiB"
                   f" | {value['first_ms']:,.0f} ms | {value['disk_mib']:,.1f} MiB |")
    versions = {name.split(",")[0]: version for name, version in result["versions"].items() if name != "direct"}
    yield ""
    yield (f"{result['machine']}, {result['made']}, medians of {result['rounds']} rounds. One synced commit of its disk takes "
           f"{result['commit_us']['median']:.0f} µs. " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".")


def growth(result):
    yield "| | | added to a direct call, median | requests/s of 32 clients | processor, a request | memory after it |"
    yield "|---|--:|--:|--:|--:|--:|"
    for kind, sizes in result["kinds"].items():
        for size, its in sizes.items():
            value = {figure: its[figure]["median"] for figure in its}
            yield (f"| {kind} | {int(size):,} | {value['added_us']:,.0f} µs | {value['rate']:,.0f} | {value['processor_us']:,.0f} µs"
                   f" | {value['memory_mib']:.1f} MiB |")
    yield ""
    yield f"{result['machine']}, {result['made']}, medians of {result['rounds']} rounds."


if __name__ == "__main__":
    main()
