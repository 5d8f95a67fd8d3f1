#!/usr/bin/env python3
"""Units that plugins drive, beside the processor: what they cost in perplexity, and what they give in speed.

    benches/units.py perplexity MODEL TEXT --unit NAME... [-t 2] [--json FILE]
    benches/units.py prefill MODEL --unit NAME... [-p 512] [-t 2] [-r ROUNDS] [--json FILE]

A NAME is what --device takes, such as "plugin:target/release/libneuropil_sim_npu.so?weights=channel8". Perplexity is
printed with its change against the processor. Prefill is measured in rounds that go through the processor and all units,
forwards and backwards in turn, so that what else the machine does hits all alike; printed are the median speed, its
spread, and the median of the rounds' ratios to the processor. `cargo build --release --workspace` first.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
OURS = os.path.join(os.path.dirname(HERE), "target", "release", "neuropil")


def run(a, verb, unit, *more):
    """The document that a verb prints."""
    command = [OURS, verb, a.model, "-t", str(a.t), "--device", unit, "--strict", "--json", *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: code {done.returncode}\n{done.stderr.strip()}")
    return json.loads(done.stdout)


def perplexity(a):
    """A row per unit."""
    rows = []
    for unit in ["cpu", *a.unit]:
        found = run(a, "perplexity", unit, "-f", a.text)
        change = 100 * (found["ppl"] / (rows[0]["ppl"] if rows else found["ppl"]) - 1)
        rows.append({"unit": unit, "ppl": found["ppl"], "tokens": found["tokens"], "change_percent": change})
        print(f"{found['ppl']:9.3f} {change:+7.2f} %  {unit}", flush=True)
    return rows


def prefill(a):
    """A row per unit."""
    units = ["cpu", *a.unit]
    speeds = {unit: [] for unit in units}
    for number in range(a.r):
        for unit in units if number % 2 == 0 else reversed(units):
            rows = run(a, "bench", unit, "-p", str(a.p), "-n", "0", "-r", "1")
            speeds[unit].append(rows[0]["avg_ts"])
    rows = []
    for unit in units:
        ratio = statistics.median(s / cpu for s, cpu in zip(speeds[unit], speeds["cpu"]))
        middle = statistics.median(speeds[unit])
        rows.append({"unit": unit, "tokens_per_second": middle, "ratio": ratio, "all": speeds[unit]})
        print(f"{middle:8.1f} t/s ({min(speeds[unit]):.1f} to {max(speeds[unit]):.1f}) {ratio:5.2f} x  {unit}")
    return rows


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = p.add_subparsers(dest="verb", required=True)
    for name in ["perplexity", "prefill"]:
        verb = verbs.add_parser(name)
        verb.add_argument("model")
        if name == "perplexity":
            verb.add_argument("text")
        verb.add_argument("--unit", action="append", default=[])
        verb.add_argument("-t", type=int, default=2)
        verb.add_argument("-p", type=int, default=512)
        verb.add_argument("-r", type=int, default=5)
        verb.add_argument("--json")
    a = p.parse_args()
    rows = perplexity(a) if a.verb == "perplexity" else prefill(a)
    if a.json:
        with open(a.json, "w") as out:
            json.dump(rows, out, indent=1)


if __name__ == "__main__":
    main()
