"""Writes the last results of compare.py, model.py, scale.py, memory.py, database.py and console.py into README.md and
docs/performance.md, between their marks, and draws the picture of both. All results have to be of the same build."""

import json

import compare
import console
import database
import memory
import model
import picture
import scale
from measure import is_noise
from subjects import ROOT, origin

README, PERFORMANCE = ROOT / "README.md", ROOT / "docs" / "performance.md"


def main():
    modules = (compare, model, scale, memory, database, console)
    results = {module: json.loads(module.RESULT.read_text()) for module in modules if module.RESULT.exists()}
    builds = {module.RESULT.name: result["build"] for module, result in results.items()}
    if len(set(builds.values())) > 1:
        raise SystemExit(f"target/ has results of different builds: {builds}. Measure with one build, or remove the others.")
    if not results:
        raise SystemExit(f"{compare.RESULT.parent} has no results. Measure first: make bench PEERS=1, make bench-model, …")
    if compare in results:
        picture.PATH.write_text(picture.svg(results[compare]))
        print(f"{picture.PATH.relative_to(ROOT)}: drew {compare.RESULT.relative_to(ROOT)}")
    for module, page, mark, text in (
        (compare, README, "picture", lambda result: embedded(result, README)),
        (compare, PERFORMANCE, "picture", lambda result: embedded(result, PERFORMANCE)),
        (compare, PERFORMANCE, "comparison", comparison),
        (model, README, "model", lost_tokens),
        (model, PERFORMANCE, "model", beside_a_model),
        (scale, PERFORMANCE, "scale", growth),
        (memory, PERFORMANCE, "memory", least_memory),
        (database, PERFORMANCE, "database", database.table),
        (console, PERFORMANCE, "console", page_times),
    ):
        source, target = module.RESULT.relative_to(ROOT), page.relative_to(ROOT)
        if module in results:
            put_between_marks(page, mark, text(results[module]))
            print(f"{target}: wrote <!-- {mark} --> from {source}")
        else:
            print(f"{source} does not exist: {target}, <!-- {mark} -->, is not changed")


def put_between_marks(page, mark, lines):
    before, begin, rest = page.read_text().partition(f"<!-- {mark} -->\n")
    _, end, after = rest.partition(f"<!-- /{mark} -->\n")
    if not end:
        raise SystemExit(f"{page} lacks the marks <!-- {mark} --> and <!-- /{mark} -->, each on its own line.")
    page.write_text(before + begin + "\n".join(["", *lines, "", ""]) + end + after)


def embedded(result, page):
    yield f"![{picture.description(result)}]({picture.PATH.relative_to(page.parent)})"


def comparison(result):
    yield ("| | writes | added latency, median | added latency, p99 | requests/s, 32 clients | CPU time per request"
           " | memory, idle | memory after the load | exec to first 200 | size on disk |")
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name, its in result["subjects"].items():
        value = {figure: its[figure]["median"] for figure in its}
        if name == compare.BASELINE:
            continue  # It is for developers.
        if name == "direct":
            yield f"| direct | | | | {value['rate_32']:,.0f} | | | | | |"
        else:
            label = f"**{name}**" if name == compare.SHIPPED else name
            yield (f"| {label} | {compare.WRITTEN[name]} | {latency(its['added_us'])} | {latency(its['added_p99_us'])} | {value['rate_32']:,.0f}"
                   f" | {value['processor_us']:,.0f} µs | {value['idle_mib']:.1f} MiB | {value['loaded_mib']:.1f} MiB"
                   f" | {value['first_ms']:,.0f} ms | {value['disk_mib']:,.1f} MiB |")
    known = {"direct", compare.SHIPPED, compare.UNSYNCED, compare.BASELINE}
    versions = {name.split(",")[0]: version for name, version in result["versions"].items() if name not in known}
    yield ""
    yield (f"{origin(result)}, medians of {result['rounds']} rounds. The commit latency of its disk is "
           f"{result['commit_us']['median']:.0f} µs. " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
    yield ""
    yield result["disturbances"] + "."


def latency(figure):
    return "not measurable" if is_noise(figure) else f"{figure['median']:,.0f} µs"


def lost_tokens(result):
    share = result["subjects"][model.OURS]["share"]
    figure = f"a loss of {1 - share['median']:.1%} of its" if is_measurable(share) else "no measurable loss of"
    yield f"A real model on the same {result['machine'].split(' ')[0]} cores has {figure} tokens per second."


def is_measurable(share):
    """A loss below the spread between rounds is noise."""
    return 1 - share["median"] > share["spread"]


def beside_a_model(result):
    yield "| | tokens/s | loss of tokens/s | latency, median | share of one core | memory |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name, its in result["subjects"].items():
        value = {figure: its[figure]["median"] for figure in its}
        tokens, latency = f"{value['rate']:.0f}", f"{value['latency_ms']:,.0f} ms"
        if name == model.DIRECT:
            yield f"| direct | {tokens} | | {latency} | | |"
        else:
            label = f"**{name}**" if name == model.OURS else name
            loss = f"{1 - value['share']:.1%}" if is_measurable(its["share"]) else "not measurable"
            yield (f"| {label} | {tokens} | {loss} | {latency} | {value['core_share']:.2%} | {value['memory_mib']:.1f} MiB |")
    yield ""
    yield (f"{origin(result)}, medians of {result['rounds']} rounds. Other processes used {result['foreign']:.1%} of the machine.")
    yield ""
    yield from lost_tokens(result)


def least_memory(result):
    yield "| workers | bodies | least memory | answered 200 there |"
    yield "|--:|---|--:|--:|"
    for row in result["rows"]:
        yield f"| {row['workers']} | {row['bodies']} | {row['mib']} MiB | {row['success']:.0%} |"
    yield ""
    yield f"One core, {origin(result)}."


def growth(result):
    yield "| | | added latency, median | requests/s, 32 clients | CPU time per request | memory after the load |"
    yield "|---|--:|--:|--:|--:|--:|"
    for kind, sizes in result["kinds"].items():
        for size, its in sizes.items():
            value = {figure: its[figure]["median"] for figure in its}
            yield (f"| {kind} | {int(size):,} | {value['added_us']:,.0f} µs | {value['rate']:,.0f} | {value['processor_us']:,.0f} µs"
                   f" | {value['memory_mib']:.1f} MiB |")
    yield ""
    yield f"{origin(result)}, " + ("one round." if result["rounds"] == 1 else f"medians of {result['rounds']} rounds.")


def page_times(result):
    counts = sorted(result["pages"], key=int)
    yield "| page | " + " | ".join(f"{keys} keys" for keys in counts) + " |"
    yield "|---|" + "--:|" * len(counts)
    for page, label in console.PUBLISHED.items():
        yield f"| {label} | " + " | ".join(f"{result['pages'][keys][page]:.1f}" for keys in counts) + " |"
    yield ""
    yield f"Median milliseconds, {result['rows']:,} rows, {origin(result)}."
    yield ""
    # More than all of them is noise.
    shares = [f"{min(1, result['api_shares'][keys]):.0%}" for keys in counts]
    yield f"With the console in constant use, the API answers {' / '.join(shares)} of the requests per second without it."


if __name__ == "__main__":
    main()
