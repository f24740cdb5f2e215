"""Writes the last results of compare.py, model.py, scale.py, memory.py and database.py into README.md and
docs/performance.md, between their marks."""

import json

import compare
import database
import memory
import model
import scale
from subjects import ROOT

README, PERFORMANCE = ROOT / "README.md", ROOT / "docs" / "performance.md"


def main():
    for result, page, mark, text in (
        (compare.RESULT, README, "figures", three_figures),
        (compare.RESULT, PERFORMANCE, "comparison", comparison),
        (model.RESULT, README, "model", lost_tokens),
        (model.RESULT, PERFORMANCE, "model", beside_a_model),
        (scale.RESULT, PERFORMANCE, "scale", growth),
        (memory.RESULT, PERFORMANCE, "memory", least_memory),
        (database.RESULT, PERFORMANCE, "database", database.table),
    ):
        if result.exists():
            put_between_marks(page, mark, text(json.loads(result.read_text())))
            print(f"{page.relative_to(ROOT)}: wrote <!-- {mark} --> from {result.relative_to(ROOT)}")
        else:
            print(f"{result.relative_to(ROOT)} does not exist: {page.relative_to(ROOT)}, <!-- {mark} -->, is not changed")


def put_between_marks(page, mark, lines):
    before, begin, rest = page.read_text().partition(f"<!-- {mark} -->\n")
    _, end, after = rest.partition(f"<!-- /{mark} -->\n")
    if not end:
        raise SystemExit(f"{page} lacks the marks <!-- {mark} --> and <!-- /{mark} -->, each on its own line.")
    page.write_text(before + begin + "\n".join(["", *lines, "", ""]) + end + after)


def three_figures(result):
    value = {figure: its["median"] for figure, its in result["subjects"][compare.SHIPPED].items()}
    yield "| | |"
    yield "|---|--:|"
    yield f"| latency added to a request, median, with its row synced to disk | {value['added_us']:,.0f} µs |"
    yield f"| requests per second, 32 clients, on {result['machine'].split(' ')[0]} cores | {value['rate_32']:,.0f} |"
    yield f"| resident memory after that load | {value['loaded_mib']:.1f} MiB |"


def comparison(result):
    yield ("| | writes | added latency, median | added latency, p99 | requests/s, 32 clients | CPU time per request"
           " | memory, idle | memory after the load | exec to first 200 | size on disk |")
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name, its in result["subjects"].items():
        value = {figure: its[figure]["median"] for figure in its}
        if name == "direct":
            yield f"| direct | | | | {value['rate_32']:,.0f} | | | | | |"
        else:
            label = f"**{name}**" if name == compare.SHIPPED else name
            yield (f"| {label} | {compare.WRITTEN[name]} | {value['added_us']:,.0f} µs | {value['added_p99_us']:,.0f} µs | {value['rate_32']:,.0f}"
                   f" | {value['processor_us']:,.0f} µs | {value['idle_mib']:.1f} MiB | {value['loaded_mib']:.1f} MiB"
                   f" | {value['first_ms']:,.0f} ms | {value['disk_mib']:,.1f} MiB |")
    versions = {name.split(",")[0]: version for name, version in result["versions"].items() if name != "direct"}
    yield ""
    yield (f"{result['machine']}, {result['made']}, medians of {result['rounds']} rounds. The commit latency of its disk is "
           f"{result['commit_us']['median']:.0f} µs. " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".")


def lost_tokens(result):
    share = result["subjects"][model.OURS]["share"]
    lost = 1 - share["median"]
    # A difference below the spread between rounds is noise.
    figure = "no measurable loss of" if lost <= share["spread"] else f"a loss of {lost:.1%} of its"
    yield f"A real model on the same {result['machine'].split(' ')[0]} cores has {figure} tokens per second."


def beside_a_model(result):
    yield ("| | tokens/s | share of direct | spread | latency, median | added latency | share of one core | memory |")
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for name, its in result["subjects"].items():
        value = {figure: its[figure]["median"] for figure in its}
        if name == model.DIRECT:
            yield f"| direct | {value['rate']:.1f} | | | {value['latency_ms']:,.0f} ms | | | |"
        else:
            label = f"**{name}**" if name == model.OURS else name
            yield (f"| {label} | {value['rate']:.1f} | {value['share']:.1%} | ±{its['share']['spread']:.1%} | {value['latency_ms']:,.0f} ms"
                   f" | {value['added_ms']:+,.0f} ms | {value['core_share']:.2%} | {value['memory_mib']:.1f} MiB |")
    yield ""
    yield (f"{result['machine']}, {result['made']}, medians of {result['rounds']} rounds. Other processes used"
           f" {result['foreign']:.1%} of the machine.")
    yield ""
    yield from lost_tokens(result)


def least_memory(result):
    yield "| workers | bodies | least memory | answered 200 there |"
    yield "|--:|---|--:|--:|"
    for row in result["rows"]:
        yield f"| {row['workers']} | {row['bodies']} | {row['mib']} MiB | {row['success']:.0%} |"
    yield ""
    yield f"One core of {result['machine']}, {result['made']}."


def growth(result):
    yield "| | | added latency, median | requests/s, 32 clients | CPU time per request | memory after the load |"
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
