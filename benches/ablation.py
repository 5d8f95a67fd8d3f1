#!/usr/bin/env python3
"""What each means of the storage engine is worth, one added after the other, on imitated storage of a phone.

    benches/ablation.py STORE.gguf --memory SIZE [--io throttle:ufs4.0] [-t 2] [-r ROUNDS] [-n 12] [--flags FLAGS]
                        [--json FILE]

The baseline reads each row of a neuron by itself, keeps nothing from token to token, waits for all reads of a layer
before it computes, and never looks at a gate first. Then bundles, the cache, the cluster pipeline and two-phase reads
are switched on, in this order. Rounds go through all steps, forwards and backwards in turn, so that what else the
machine does hits all alike. Printed are the median speed and its spread, the factor over the step before (median of the
rounds' factors), reads and bytes per token, the share of neurons that were found in memory, and the share of the time
in which nothing could be computed because reads had not arrived.

The first token of a sequence is computed with all neurons, so its time is left out of the speeds; it is in the other
columns, of which long runs tell more. `cargo build --release` first.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
OURS = os.path.join(os.path.dirname(HERE), "target", "release", "neuropil")
SWITCHES = {"bundle": "--no-bundle", "cache": "--no-cache", "pipeline": "--no-pipeline", "two-phase": "--no-two-phase"}


def steps():
    """Name and switches of each step: those of what is not there yet."""
    names = list(SWITCHES)
    table = {"baseline": list(SWITCHES.values())}
    table.update({f"+ {name}": [SWITCHES[other] for other in names[at + 1 :]] for at, name in enumerate(names)})
    return table


def bench(a, switches):
    """The row that a bench of the decode test prints."""
    command = [OURS, "bench", a.store, "-t", str(a.t), "-p", "0", "-n", str(a.n), "-r", "1", "--json"]
    command += ["--memory", a.memory, "--io", a.io, *switches, *a.flags.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: code {done.returncode}\n{done.stderr.strip()}")
    row = json.loads(done.stdout)[-1]
    if "io" not in row:
        sys.exit(f"everything is in memory with --memory {a.memory}; give less")
    return row


def speed(row):
    """Tokens per second after the first token."""
    return 1000 / row["latency_ms"]["mean"]


def measure(a):
    """A row per step."""
    table = steps()
    runs = {name: [] for name in table}
    for number in range(a.r):
        for name in list(table)[:: 1 if number % 2 == 0 else -1]:
            runs[name].append(bench(a, table[name]))
            print(f"  {name}: {speed(runs[name][-1]):.2f}", file=sys.stderr)
    rows, before = [], None
    for name, of in runs.items():
        speeds = [speed(row) for row in of]
        counts = [segment for row in of for segment in row["cache"].values()]
        asked = sum(s["hits"] + s["joined"] + s["misses"] for s in counts)
        rows.append(
            {
                "step": name,
                "speed": {"median": statistics.median(speeds), "least": min(speeds), "most": max(speeds)},
                "factor": statistics.median(now / then for now, then in zip(speeds, before)) if before else None,
                "reads_per_token": statistics.median(row["io"]["reads"] for row in of) / a.n,
                "bytes_per_token": statistics.median(row["io"]["bytes_per_token"] for row in of),
                "found": sum(s["hits"] for s in counts) / asked if asked else None,
                "waiting": statistics.median(row["io"]["critical_path_share"] for row in of),
            }
        )
        before = speeds
    return rows


def shown(row):
    speed, percent = row["speed"], lambda share: "" if share is None else f"{100 * share:.1f} %"
    return [
        row["step"],
        f"{speed['median']:.2f} ({speed['least']:.2f} to {speed['most']:.2f})",
        "" if row["factor"] is None else f"{row['factor']:.2f}",
        f"{row['reads_per_token']:.0f}",
        f"{row['bytes_per_token'] / 1e6:.1f} MB",
        percent(row["found"]),
        percent(row["waiting"]),
    ]


def table(rows):
    lines = [["step", "tokens/s", "factor", "reads/token", "read/token", "found", "waiting"], *map(shown, rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(text.ljust(w) for text, w in zip(line, widths)) + " |" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", metavar="STORE.gguf")
    parser.add_argument("--memory", required=True, metavar="SIZE", help="what neuropil may take")
    parser.add_argument("--io", default="throttle:ufs4.0", help="how it reads (throttle:ufs4.0)")
    parser.add_argument("-t", type=int, default=2, help="threads (2)")
    parser.add_argument("-r", type=int, default=3, help="rounds (3)")
    parser.add_argument("-n", type=int, default=12, help="tokens (12)")
    parser.add_argument("--flags", default="", help="more flags of neuropil")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    a = parser.parse_args()
    rows = measure(a)
    print(table(rows))
    if a.json:
        with open(a.json, "w") as file:
            json.dump({"store": os.path.basename(a.store), "memory": a.memory, "io": a.io, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
