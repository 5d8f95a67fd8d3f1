#!/usr/bin/env python3
"""Speed beside llama.cpp on the same files, in one paired run, and beside what the memory can deliver.

    benches/compare.py --llama-bench PATH MODEL.gguf... [-t 1,2] [-r ROUNDS] [-p 512] [-n 128] [--predict HOW]
                       [--busy] [--no-roofline] [--json FILE] [--svg FILE]

A model may be given as STORE.gguf=TWIN.gguf: then neuropil runs the neuron store and llama.cpp its dense twin.

Rounds alternate between the two programs, so that what else the machine does hits both alike; each round is one
repetition after a warm-up, as both programs do it. Printed are medians, the spread, and the median of the rounds'
ratios. "of read" is what a decoded token reads of the weights times tokens per second, as a share of the best
streaming read of memory, which the roofline bench measures before and after the rounds. "others" says how many cores
other programs kept busy meanwhile: with more than a tenth of one, measure again.

`cargo build --release` first. benches/peers.sh builds llama-bench and makes the models; benches/dense.py makes a
large one. benches/bars.py draws the plot again from the JSON file.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

from bars import draw

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
OURS = os.path.join(ROOT, "target", "release", "neuropil")
ROOFLINE = ["cargo", "bench", "--quiet", "-p", "neuropil-benches", "--bench", "roofline", "--"]


def output(command):
    """What a command prints; ends the program when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run ({error.strerror}); build it first")
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        hint = "; it was built for another processor, see benches/peers.sh --no-amx" if done.returncode == -4 else ""
        sys.exit(f"{' '.join(command)}: code {done.returncode}{hint}\n{last[0]}")
    return done.stdout


def spread(values):
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def speeds(command):
    """Tokens per second of the prefill and of the decode test."""
    return {("pp" if row["n_prompt"] else "tg"): row["avg_ts"] for row in json.loads(output(command))}


def streaming_read(threads):
    """Bytes per second of the best loop, by number of threads."""
    best = {}
    for count in threads:
        for row in json.loads(output([*ROOFLINE, "--memory", "--json", "--threads", str(count)])):
            if row["threads"] == count:
                best[count] = row["median"] * 1e9
    return best


def bytes_per_token(model):
    """Bytes of weights that a decoded token reads: all but unused experts and, unless it is also the output, the
    embedding."""
    about = json.loads(output([OURS, "inspect", model, "--json"]))
    meta, arch = about["metadata"], about["architecture"]
    tied = not any(t["name"] == "output.weight" for t in about["tensors"])
    experts = meta.get(f"{arch}.expert_count") or 1
    used = (meta.get(f"{arch}.expert_used_count") or 1) / experts
    total = 0
    for tensor in about["tensors"]:
        if tensor["name"] != "token_embd.weight" or tied:
            total += tensor["bytes"] * (used if "_exps" in tensor["name"] else 1)
    return total


def busy_seconds():
    """Seconds of all cores together that programs took, and of these what our children took; None if unknown."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except OSError:
        return None
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return taken - children.ru_utime - children.ru_stime


def rounds_of(a, model, threads):
    """The speeds of each round, and the cores that others kept busy. `model` is our file and theirs."""
    common = ["-t", str(threads), "-p", str(a.p), "-n", str(a.n), "-r", "1"]
    ours, peer = model
    order = [
        ("neuropil", [OURS, "bench", ours, *common, "--predict", a.predict, "--json"]),
        ("llama.cpp", [a.llama_bench, "-m", peer, *common, "-o", "json"]),
    ]
    before, start = busy_seconds(), time.monotonic()
    rounds = []
    for number in range(a.r):
        rounds.append({name: speeds(command) for name, command in (order if number % 2 == 0 else order[::-1])})
    after, elapsed = busy_seconds(), time.monotonic() - start
    return rounds, None if before is None else max(0.0, (after - before) / elapsed)


def compare(a, model, threads):
    """A row for the prefill and one for the decode test."""
    rounds, others = rounds_of(a, model, threads)
    rows = []
    for test, size in (("pp", a.p), ("tg", a.n)):
        row = {"model": os.path.basename(model[0]), "threads": threads, "test": f"{test}{size}", "busy": a.busy}
        for name in ("neuropil", "llama.cpp"):
            row[name] = spread([r[name][test] for r in rounds])
        row["ratio"] = spread([r["neuropil"][test] / r["llama.cpp"][test] for r in rounds])
        row["others"] = others
        # What a store reads for a token depends on what fires.
        if test == "tg" and model[0] == model[1]:
            row["bytes_per_token"] = bytes_per_token(model[0])
        rows.append(row)
        print(f"{row['model']}, {row['test']}, {threads} threads: {row['ratio']['median']:.2f}", file=sys.stderr)
    return rows


def add_shares(rows, read):
    """How much of the streaming read the decode tests take."""
    for row in rows:
        if "bytes_per_token" in row and row["threads"] in read:
            for name in ("neuropil", "llama.cpp"):
                speed = row[name]["median"] * row["bytes_per_token"]
                row[f"{name} of read"] = speed / read[row["threads"]]


def cell(values):
    digits = 1 if values["median"] < 1000 else 0
    return f"{values['median']:.{digits}f} ({values['least']:.{digits}f} to {values['most']:.{digits}f})"


def share(row, name):
    part = row.get(f"{name} of read")
    return "" if part is None else f", {100 * part:.0f} % of read"


def table(rows):
    """A table in Markdown, aligned."""
    lines = [["model", "test", "neuropil", "llama.cpp", "ratio", "others"]]
    for row in rows:
        ratio = row["ratio"]
        lines.append(
            [
                row["model"],
                f"{row['test']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}{', busy' if row['busy'] else ''}",
                cell(row["neuropil"]) + share(row, "neuropil"),
                cell(row["llama.cpp"]) + share(row, "llama.cpp"),
                f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})",
                "?" if row["others"] is None else f"{row['others']:.2f}",
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(text.ljust(w) for text, w in zip(line, widths)) + " |" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--llama-bench", required=True, metavar="PATH")
    parser.add_argument("-t", default="2", help="numbers of threads, with commas between (2)")
    parser.add_argument("-r", type=int, default=5, help="rounds (5)")
    parser.add_argument("-p", type=int, default=512, help="tokens of the prefill test (512)")
    parser.add_argument("-n", type=int, default=128, help="tokens of the decode test (128)")
    parser.add_argument("--predict", default="auto", metavar="HOW", help="who chooses neurons in a store (auto)")
    parser.add_argument("--busy", action="store_true", help="another process computes on CPU 0 meanwhile")
    parser.add_argument("--no-roofline", action="store_true", help="do not measure what the memory can deliver")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--svg", metavar="FILE", help="draw the ratios")
    a = parser.parse_args()
    a.models = [[os.path.abspath(path) for path in (model.split("=") * 2)[:2]] for model in a.models]
    a.llama_bench = os.path.abspath(a.llama_bench)
    threads = [int(count) for count in a.t.split(",")]

    read = {} if a.no_roofline else streaming_read(threads)
    neighbour = None
    if a.busy:
        neighbour = subprocess.Popen(["taskset", "-c", "0", "sh", "-c", "while :; do :; done"])
    try:
        rows = [row for model in a.models for count in threads for row in compare(a, model, count)]
    finally:
        if neighbour:
            neighbour.kill()
            neighbour.wait()
    if not a.no_roofline:
        for count, speed in streaming_read(threads).items():
            read[count] = max(read[count], speed)
    add_shares(rows, read)

    print(f"{a.r} paired rounds, tokens/s: median (least to most)")
    for count, speed in read.items():
        print(f"best streaming read, threads {count}: {speed / 1e9:.1f} GB/s")
    print(table(rows))
    if a.json:
        with open(a.json, "w") as file:
            json.dump({"rounds": a.r, "read": read, "rows": rows}, file, indent=1)
    if a.svg:
        with open(a.svg, "w") as file:
            file.write(draw(rows))


if __name__ == "__main__":
    main()
