#!/usr/bin/env python3
"""Draws the speeds that benches/capped.py measured against the memory limit, as lines in an SVG file.

    benches/curve.py RESULTS.json... OUT.svg

One line per program. A point is the median of the rounds, its whisker goes from the least to the most. Speed has a
logarithmic axis; what has no limit, "in memory", is a dashed line over the whole width. The colours follow the reader's
light or dark setting; the background is the page's.
"""

import json
import math
import sys
from html import escape

LEFT, TOP = 64, 46
WIDTH, HEIGHT = 460, 260
LABELS = 110
COLOURS = {
    # A program's colour in the light and in the dark setting.
    "neuropil": ("#c8641e", "#ea8a4a"),
    "llm-flash": ("#2f6fb7", "#5b9be6"),
    "mmap": ("#6a8a2f", "#9cc25a"),
    "llama.cpp": ("#7a4fa3", "#b48ae0"),
}
OTHERS = ("#57606a", "#9aa4ae")
STYLE = """\
text { font: 12px sans-serif; fill: #24292f; }
.title { font-weight: bold; }
.grid { stroke: #24292f; stroke-opacity: 0.15; }
.line { fill: none; stroke-width: 2; } .whole { stroke-dasharray: 5 4; }"""


def style(names):
    """The style sheet with a class for each program."""
    rules, dark = [STYLE], ["text { fill: #e6edf3; } .grid { stroke: #e6edf3; }"]
    for number, name in enumerate(names):
        light, night = COLOURS.get(name, OTHERS)
        rules.append(f".s{number} {{ stroke: {light}; }} .f{number} {{ fill: {light}; }}")
        dark.append(f".s{number} {{ stroke: {night}; }} .f{number} {{ fill: {night}; }}")
    return "\n".join([*rules, "@media (prefers-color-scheme: dark) {", *(f"  {rule}" for rule in dark), "}"])


def ticks(low, high):
    """1, 2 and 5 times powers of ten from one below `low` to one above `high`."""
    steps = [digit * 10.0**power for power in range(-4, 6) for digit in (1, 2, 5)]
    first = max(number for number, step in enumerate(steps) if step <= low)
    last = min(number for number, step in enumerate(steps) if step >= high)
    return steps[first : max(last, first + 1) + 1]


def apart(wanted, distance):
    """Heights as near to those wanted as they can be when labels must not cover each other; by name."""
    placed, last = {}, -math.inf
    for name, y in sorted(wanted.items(), key=lambda item: item[1]):
        last = placed[name] = max(y, last + distance)
    return placed


def draw(title, rows):
    """The text of an SVG file; `rows` are those of benches/capped.py."""
    rows = [row for row in rows if "speed" in row]
    if not rows:
        sys.exit("there is no speed to draw: all programs were killed")
    names = list(dict.fromkeys(row["name"] for row in rows))
    caps = sorted({row["cap"] for row in rows})
    speeds = [speed for row in rows for speed in row["speed"].values()]
    grid = ticks(min(speeds), max(speeds))
    low, high = math.log(grid[0]), math.log(grid[-1])
    margin = (caps[-1] - caps[0]) * 0.05 or caps[0] * 0.05
    least, most = caps[0] - margin, caps[-1] + margin
    bottom, right = TOP + HEIGHT, LEFT + WIDTH

    def x(cap):
        return round(LEFT + WIDTH * (cap - least) / (most - least), 1)

    def y(speed):
        return round(bottom - HEIGHT * (math.log(speed) - low) / (high - low), 1)

    width, height = right + LABELS, bottom + 44
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{style(names)}</style>",
        f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>',
        f'<text x="{LEFT}" y="34">tokens per second by memory limit</text>',
    ]
    for speed in grid:
        out.append(f'<line class="grid" x1="{LEFT}" y1="{y(speed)}" x2="{right}" y2="{y(speed)}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(speed) + 4}" text-anchor="end">{speed:g}</text>')
    for cap in caps:
        out.append(f'<line class="grid" x1="{x(cap)}" y1="{TOP}" x2="{x(cap)}" y2="{bottom}"/>')
        out.append(f'<text x="{x(cap)}" y="{bottom + 18}" text-anchor="middle">{cap / 1e9:.2g} GB</text>')
    ends = {}
    for number, name in enumerate(names):
        own = sorted((row for row in rows if row["name"] == name), key=lambda row: row["cap"])
        if name == "in memory":
            # It has no limit, so all its rounds are one figure.
            at = y(max(row["speed"]["median"] for row in own))
            out.append(f'<line class="line whole s{number}" x1="{LEFT}" y1="{at}" x2="{right}" y2="{at}"/>')
            ends[name] = at
            continue
        points = [(x(row["cap"]), {kind: y(speed) for kind, speed in row["speed"].items()}) for row in own]
        line = " ".join(f"{at},{of['median']}" for at, of in points)
        out.append(f'<polyline class="line s{number}" points="{line}"/>')
        for at, of in points:
            out.append(f'<line class="s{number}" x1="{at}" y1="{of["least"]}" x2="{at}" y2="{of["most"]}"/>')
            out.append(f'<circle class="f{number}" cx="{at}" cy="{of["median"]}" r="3"/>')
        ends[name] = points[-1][1]["median"]
    for name, at in apart(ends, 14).items():
        number = names.index(name)
        out.append(f'<text class="f{number}" x="{right + 8}" y="{at + 4}">{escape(name)}</text>')
    out.append("</svg>\n")
    return "\n".join(out)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    rows, title = [], ""
    for path in sys.argv[1:-1]:
        with open(path) as file:
            result = json.load(file)
        rows, title = rows + result["rows"], title or result["title"]
    with open(sys.argv[-1], "w") as file:
        file.write(draw(title, rows))


if __name__ == "__main__":
    main()
