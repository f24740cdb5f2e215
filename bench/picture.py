"""Draws latency, throughput and memory of every program in the results of compare.py, as one SVG."""

import html
import math
import textwrap

import compare
import peers
from measure import is_noise
from subjects import ROOT, origin

PATH = ROOT / "docs" / "images" / "benchmark.svg"
TITLE = "Adriaticum beside other gateways and proxies"
# Heading, which direction is better, name in the JSON, how a value is written.
PANELS = (
    ("Added latency, median", "lower is better", "added_us", "{:,.0f} µs"),
    ("Requests/s, 32 clients", "higher is better", "rate_32", "{:,.0f}/s"),
    ("Memory after the load", "lower is better", "loaded_mib", "{:.1f} MiB"),
)
# If the largest value is more than this times the smallest, the short bars of a linear scale would look the same.
LINEAR = 50

# Names and notes are left of the panels. They have to fit in DejaVu Sans, the widest of the usual fonts.
WIDTH, MARGIN, PANEL_X, PANEL_STEP = 830, 20, 272, 184
BAR_LENGTH, BAR_HEIGHT, NOTE_CHARACTERS = 106, 14, 46
NAME_LINE, NOTE_LINE, ROW_GAP, HEAD = 15, 13, 14, 116

# The picture has its own background, because the theme of a page may differ from the one that the browser prefers. A value
# has an outline in the colour of the background, so that lines end before it.
STYLE = """
text { font: 11px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #17212b }
.title { font-size: 16px; font-weight: 600 } .name, .heading { font-size: 12px } .heading, .ours { font-weight: 600 }
.note { font-size: 10px; fill: #55636f } .tick { text-anchor: middle } .value { paint-order: stroke; stroke: #fff; stroke-width: 4px }
.page { fill: #fff; stroke: #d8dee5 } .line { stroke: #e1e6eb } .bar { fill: #a9b5c1 } .bar.ours { fill: #0b5c8f }
@media (prefers-color-scheme: dark) {
  text { fill: #e5ebf1 } .note { fill: #9eabb8 } .value { stroke: #0e141a }
  .page { fill: #0e141a; stroke: #303b46 } .line { stroke: #2b3641 } .bar { fill: #5c6975 } .bar.ours { fill: #4aa3e0 }
}
"""


def names(result):
    """Returns the programs in the order of the table, with peers that failed, and without a baseline, which is for developers."""
    shown, others = result["subjects"].keys(), {peer.name for peer in peers.TABLE}
    if shown & others:
        shown |= others
    return [name for name in compare.WRITTEN if name in shown and name != compare.BASELINE]


def measured(result, name, figure, form):
    """Returns what the bar shows, 0 for no bar, and the text at its end."""
    value = result["subjects"].get(name, {}).get(figure)
    if not value:
        return 0, "not measured"
    if is_noise(value):
        return 0, "not measurable"
    return value["median"], form.format(value["median"])


def description(result):
    """Returns all figures as text, for readers who do not see the picture."""
    rows = (name + ": " + ", ".join(measured(result, name, *panel[2:])[1] for panel in PANELS) for name in names(result))
    return "Added latency (median), requests per second of 32 clients, and memory after the load. " + "; ".join(rows) + "."


def svg(result):
    parts, y, middles = [], HEAD, {}
    for name in names(result):
        ours = " ours" if name in (compare.SHIPPED, compare.UNSYNCED) else ""
        parts.append(text(MARGIN, y, name, "name" + ours))
        notes = textwrap.wrap("writes " + compare.WRITTEN[name], NOTE_CHARACTERS)
        parts += (text(MARGIN, y + NAME_LINE + NOTE_LINE * number, note, "note") for number, note in enumerate(notes))
        middles[name] = y + (NAME_LINE + NOTE_LINE * (len(notes) - 1)) / 2 - 4, ours
        y += NAME_LINE + NOTE_LINE * len(notes) + ROW_GAP
    bottom = y - ROW_GAP - 4
    for number, panel in enumerate(PANELS):
        parts += draw(result, panel, PANEL_X + PANEL_STEP * number, middles, bottom)
    height = bottom + 62
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">',
        f"<title>{TITLE}</title><desc>{html.escape(description(result))}</desc>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>',
        text(MARGIN, 34, TITLE, "title"),
        text(MARGIN, 52, "Each forwards the same requests to the same upstream, which answers immediately.", "note"),
        text(MARGIN, height - 18, f"{origin(result)}, medians of {result['rounds']} rounds", "note"),
        *parts, "</svg>\n"])


def draw(result, panel, x, middles, bottom):
    """Yields one panel. A logarithmic scale has a line at each power of ten, a linear one only at zero."""
    heading, better, *figure = panel
    values = {name: measured(result, name, *figure) for name in middles}
    numbers = [number for number, _ in values.values() if number] or [1]
    least, most = min(numbers), max(numbers)
    logarithmic = most > LINEAR * least
    # Below the least value, so that it has a bar too.
    start = math.floor(math.log10(least) - 0.1)

    def length(number):
        share = (math.log10(number) - start) / (math.log10(most) - start) if logarithmic else number / most
        return round(BAR_LENGTH * share, 1)

    yield text(x, 80, heading, "heading")
    yield text(x, 95, f"{better}, {'log' if logarithmic else 'linear'} scale", "note")
    ticks = [10**power for power in range(start, math.ceil(math.log10(most)))] if logarithmic else []
    for at, label in [(x + length(tick), f"{tick:,}".replace(",000", "k")) for tick in ticks] or [(x, "0")]:
        yield f'<path class="line" d="M{at} {HEAD - 12}V{bottom}"/>' + text(at, bottom + 14, label, "note tick")
    for name, (middle, ours) in middles.items():
        number, label = values[name]
        bar = length(number) if number else 0
        if number:
            yield f'<rect class="bar{ours}" x="{x}" y="{middle - BAR_HEIGHT / 2}" width="{bar}" height="{BAR_HEIGHT}"/>'
        yield text(x + bar + 5, middle + 4, label, "value" + ours)


def text(x, y, content, style):
    return f'<text class="{style}" x="{x}" y="{y}">{html.escape(content)}</text>'
