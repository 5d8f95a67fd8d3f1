#!/usr/bin/env python3
"""Speed beside llama.cpp on the same file, in one paired run.

    benches/compare.py --llama-bench PATH MODEL.gguf [-t THREADS] [-r ROUNDS] [-p 512] [-n 128]

Rounds alternate between the two programs, so that what else the machine does hits both alike; each round is one
repetition after a warm-up, as both programs do it. Printed are medians, the spread, and the median of the rounds'
ratios. `cargo build --release` first. llama-bench comes with the source package of llama-cpp-python on PyPI, built
natively; on a virtual machine whose kernel does not let programs use AMX, add `-mno-amx-tile -mno-amx-int8
-mno-amx-bf16` to its C and C++ flags, or it stops with an illegal instruction.
"""

import argparse
import json
import os
import statistics
import subprocess

HERE = os.path.dirname(os.path.abspath(__file__))
OURS = os.path.join(HERE, "..", "target", "release", "neuropil")


def speeds(command):
    """Tokens per second of the prefill and of the decode test."""
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {("pp" if row["n_prompt"] else "tg"): row["avg_ts"] for row in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("-t", type=int, default=2)
    parser.add_argument("-r", type=int, default=5)
    parser.add_argument("-p", type=int, default=512)
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("--busy", action="store_true", help="another process computes on CPU 0 meanwhile")
    a = parser.parse_args()
    common = ["-t", str(a.t), "-p", str(a.p), "-n", str(a.n), "-r", "1"]
    ours = [OURS, "bench", a.model, *common, "--json"]
    theirs = [a.llama_bench, "-m", a.model, *common, "-o", "json"]
    neighbour = None
    if a.busy:
        neighbour = subprocess.Popen(["taskset", "-c", "0", "sh", "-c", "while :; do :; done"])
    rounds = []
    for number in range(a.r):
        order = [("ours", ours), ("theirs", theirs)]
        rounds.append({name: speeds(command) for name, command in (order if number % 2 == 0 else order[::-1])})
    if neighbour:
        neighbour.kill()
    print(f"{os.path.basename(a.model)}, {a.t} threads, {a.r} paired rounds, tokens/s: median (least to most){', CPU 0 busy' if a.busy else ''}")
    print(f"{'test':8} {'neuropil':>24} {'llama.cpp':>24} {'ratio':>7}")
    for test, size in (("pp", a.p), ("tg", a.n)):
        cells = []
        for name in ("ours", "theirs"):
            values = [r[name][test] for r in rounds]
            cells.append(f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})")
        ratio = statistics.median(r["ours"][test] / r["theirs"][test] for r in rounds)
        print(f"{test + str(size):8} {cells[0]:>24} {cells[1]:>24} {ratio:>7.2f}")


if __name__ == "__main__":
    main()
