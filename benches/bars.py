#!/usr/bin/env python3
"""Draws the ratios that benches/compare.py measured as bars in an SVG file.

    benches/bars.py RESULTS.json... OUT.svg

A bar is a median of ratios, its whisker goes from the least to the most of the rounds, and a line stands at 1.0, where
both programs are equally fast. The colours follow the reader's light or dark setting; the background is the page's.
"""

import json
import sys
from html import escape

ROW = 26
BAR = 14
CHAR = 7.0  # width of a character of the labels, generously
PLOT = 460
TOP = 46
STYLE = """\
text { font: 12px sans-serif; fill: #24292f; }
.title { font-weight: bold; }
.prefill { fill: #2f6fb7; } .decode { fill: #c8641e; }
.whisker { stroke: #24292f; stroke-width: 1.2; }
.grid { stroke: #24292f; stroke-opacity: 0.15; }
.even { stroke: #24292f; stroke-width: 1.5; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .prefill { fill: #5b9be6; } .decode { fill: #ea8a4a; }
  .whisker, .grid, .even { stroke: #e6edf3; }
}"""


def step_for(most):
    """Distance of the grid's lines, so that there are not more than about eight."""
    return next(step for step in (0.25, 0.5, 1, 2, 5, 10, 50, 1000) if most / step <= 8 or step == 1000)


def label(row):
    model = row["model"].removesuffix(".gguf")
    threads = f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
    return f"{model}  {row['test']}, {threads}{', busy' if row['busy'] else ''}"


def draw(rows):
    """The text of an SVG file."""
    labels = [label(row) for row in rows]
    left = round(max(len(text) for text in labels) * CHAR) + 16
    step = step_for(max([1.0, *(row["ratio"]["most"] for row in rows)]))
    lines = int(max([1.0, *(row["ratio"]["most"] for row in rows)]) / step) + 1
    bottom = TOP + ROW * len(rows)
    width, height = left + PLOT + 60, bottom + 30

    def x(ratio):
        return round(left + PLOT * ratio / (lines * step), 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{left}" y="16">neuropil / llama.cpp, tokens per second</text>',
        f'<rect class="prefill" x="{left}" y="24" width="10" height="10"/><text x="{left + 15}" y="33">prefill</text>',
        f'<rect class="decode" x="{left + 75}" y="24" width="10" height="10"/><text x="{left + 90}" y="33">decode</text>',
    ]
    for number in range(lines + 1):
        at = x(number * step)
        out.append(f'<line class="grid" x1="{at}" y1="{TOP}" x2="{at}" y2="{bottom}"/>')
        out.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{number * step:g}</text>')
    for number, (row, text) in enumerate(zip(rows, labels)):
        ratio, middle = row["ratio"], TOP + ROW * number + ROW / 2
        kind = "prefill" if row["test"].startswith("pp") else "decode"
        out += [
            f'<text x="{left - 8}" y="{middle + 4}" text-anchor="end">{escape(text)}</text>',
            f'<rect class="{kind}" x="{left}" y="{middle - BAR / 2}" width="{round(x(ratio["median"]) - left, 1)}" height="{BAR}"/>',
            f'<line class="whisker" x1="{x(ratio["least"])}" y1="{middle}" x2="{x(ratio["most"])}" y2="{middle}"/>',
        ]
        for end in (ratio["least"], ratio["most"]):
            out.append(f'<line class="whisker" x1="{x(end)}" y1="{middle - 4}" x2="{x(end)}" y2="{middle + 4}"/>')
        out.append(f'<text x="{max(x(ratio["most"]), x(1)) + 8}" y="{middle + 4}">{ratio["median"]:.2f}</text>')
    out.append(f'<line class="even" x1="{x(1)}" y1="{TOP - 4}" x2="{x(1)}" y2="{bottom}"/>')
    out.append("</svg>\n")
    return "\n".join(out)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    rows = []
    for path in sys.argv[1:-1]:
        with open(path) as file:
            rows += json.load(file)["rows"]
    with open(sys.argv[-1], "w") as file:
        file.write(draw(rows))


if __name__ == "__main__":
    main()
