#!/usr/bin/env python3
"""Speed in less memory than the weights: neuropil, its own baselines and llama.cpp under one memory limit.

    benches/capped.py STORE.gguf --cap SIZE[,SIZE...] [--llama-bench PATH --twin TWIN.gguf] [-t 2] [-r ROUNDS]
                      [-n 48] [-p 0] [-d 16] [--with NAME=FLAGS]... [--only NAMES] [--json FILE] [--svg FILE]

Every program runs in a control group of its own whose limit counts anonymous memory and page cache (root and version 1
of control groups are needed), after the files were dropped from the page cache. The page cache of a process counts
against its group: the program's own code, and the pages of a file that it reads through a map or without O_DIRECT. So
neuropil is given --memory LIMIT - 64 MiB, which is also what its peak may be over its budget; mmap and llama.cpp have no
budget and use what the limit leaves. Rounds go through all contenders in turn, so that what else the machine does hits
all alike. Contenders are

    neuropil      as it comes                  in memory   neuropil without a limit
    llm-flash     --policy llm-flash           mmap        --policy mmap
    llama.cpp     --repack 0, the twin

and what --with adds: flags of neuropil, as --with "no cache=--no-cache". Printed are medians, the spread, the ratio to
each other contender (median of the rounds' ratios), bytes read per token (by neuropil's report; of programs without one
as the disks count them, loading included), the share of neurons found in memory, and the share of the time that was
spent waiting for storage. Every context holds -d tokens before the clock starts, in all programs: the first token of a
context is computed with all neurons, and that is part of reading a prompt.

`cargo build --release` first. benches/peers.sh builds llama-bench; `neuropil synth --twin` makes both files.
benches/curve.py draws the plot again from the JSON file.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time

from curve import draw

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
OURS = os.path.join(ROOT, "target", "release", "neuropil")
# What a group holds besides the memory that --memory bounds.
BESIDES = 64 << 20
UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6, "GB": 10**9}


def size(text):
    match = re.fullmatch(r"([0-9.]+) *([A-Za-z]*)", text)
    if not match or match[2] not in UNITS:
        sys.exit(f"{text} is no size such as 2500MiB or 2.5GB")
    return int(float(match[1]) * UNITS[match[2]])


def group_root():
    """The folder of this process's memory group."""
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if "memory" in controllers.split(","):
                return "/sys/fs/cgroup/memory" + path
    sys.exit("there is no control group of version 1 for memory here; without one page cache cannot be limited")


class Group:
    """A memory group with a limit, for one program."""

    def __init__(self, limit):
        self.path = os.path.join(group_root(), f"neuropil-capped-{os.getpid()}")
        os.mkdir(self.path)
        self.write("memory.limit_in_bytes", limit)

    def write(self, name, value):
        with open(os.path.join(self.path, name), "w") as file:
            file.write(str(value))

    def enter(self):
        self.write("cgroup.procs", os.getpid())

    def peak(self):
        with open(os.path.join(self.path, "memory.max_usage_in_bytes")) as file:
            return int(file.read())

    def close(self):
        try:
            self.write("memory.force_empty", 0)
        except OSError:
            pass
        for _ in range(50):
            try:
                return os.rmdir(self.path)
            except OSError:
                time.sleep(0.1)


def drop(paths):
    """Drops files from the page cache, so that nobody is served what another has read."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def device_bytes():
    """Bytes read from all disks so far."""
    with open("/proc/diskstats") as file:
        rows = [line.split() for line in file]
    return sum(512 * int(row[5]) for row in rows if re.fullmatch(r"(vd|sd|xvd)[a-z]+|nvme\d+n\d+", row[2]))


def run(command, limit, files):
    """The rows that a bench prints, the peak of its group and what it read from disks; None if it was killed."""
    drop(files)
    group = Group(limit) if limit else None
    before = device_bytes()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, preexec_fn=group.enter if group else None
        )
        read, peak = device_bytes() - before, group.peak() if group else None
    finally:
        if group:
            group.close()
    if done.returncode == -9:
        return None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        sys.exit(f"{' '.join(command)}: code {done.returncode}\n{last[0]}")
    return json.loads(done.stdout), peak, read


def contenders(a, cap):
    """Name, command, limit and files of each."""
    common = ["-t", str(a.t), "-p", str(a.p), "-n", str(a.n), "-d", str(a.d), "-r", "1"]
    ours = [OURS, "bench", a.store, *common, "--json", *a.flags.split()]
    budget = ["--memory", str(cap - BESIDES)]
    flags = {
        "neuropil": budget,
        "llm-flash": [*budget, "--policy", "llm-flash"],
        "mmap": ["--policy", "mmap"],
    }
    flags.update({name: [*budget, *text.split()] for name, text in (item.split("=", 1) for item in a.extra)})
    table = {name: (ours + more, cap, [a.store]) for name, more in flags.items()}
    table["in memory"] = (ours, None, [])
    if a.llama_bench:
        theirs = [a.llama_bench, "-m", a.twin, *common, "--repack", "0", "-o", "json"]
        table["llama.cpp"] = (theirs, cap, [a.twin])
    wanted = a.only.split(",") if a.only else table
    return {name: table[name] for name in wanted}


def spread(values):
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def measure(a, cap):
    """A row per contender."""
    who = contenders(a, cap)
    tokens = a.n + a.p
    samples = {name: [] for name in who}
    details = {name: {} for name in who}
    for number in range(a.r):
        order = list(who) if number % 2 == 0 else list(who)[::-1]
        for name in order:
            done = run(*who[name])
            if done is None:
                details[name]["killed"] = True
                continue
            rows, peak, read = done
            row = rows[-1]
            samples[name].append(row["avg_ts"])
            details[name].update(peak=peak, read_with_load=read, row=row)
            print(f"  {name}: {row['avg_ts']:.2f}", file=sys.stderr)
    rows = []
    for name in who:
        row = {"cap": cap, "name": name, "killed": details[name].get("killed", False)}
        if samples[name]:
            last = details[name]["row"]
            row["speed"] = spread(samples[name])
            row["peak"] = details[name]["peak"]
            row["latency_ms"] = last.get("latency_ms")
            # Of those without a report: what the disks brought, loading included; all of it is loading in memory.
            all_read = details[name]["read_with_load"] // tokens if who[name][1] else None
            row["bytes_per_token"] = last.get("io", {}).get("bytes_per_token", all_read)
            row["waiting"] = last.get("io", {}).get("critical_path_share")
            segments = last.get("cache", {}).values()
            asked = sum(s["hits"] + s["joined"] + s["misses"] for s in segments)
            row["hit_rate"] = sum(s["hits"] for s in segments) / asked if asked else None
            pairs = zip(samples.get("neuropil", []), samples[name])
            ratios = [ours / other for ours, other in pairs]
            row["ratio"] = spread(ratios) if ratios and name != "neuropil" else None
        rows.append(row)
    return rows


def shown(row):
    if "speed" not in row:
        return [f"{row['cap'] / 1e9:.2f} GB", row["name"], "killed" if row["killed"] else "-", "", "", "", "", "", ""]
    speed, latency = row["speed"], row["latency_ms"]
    percent = lambda share: "" if share is None else f"{100 * share:.1f} %"
    return [
        f"{row['cap'] / 1e9:.2f} GB",
        row["name"],
        f"{speed['median']:.2f} ({speed['least']:.2f} to {speed['most']:.2f})",
        "" if row["ratio"] is None else f"{row['ratio']['median']:.2f}",
        "" if row["bytes_per_token"] is None else f"{row['bytes_per_token'] / 1e6:.1f} MB",
        percent(row["hit_rate"]),
        percent(row["waiting"]),
        "" if not latency else f"{latency['p99'] / latency['mean']:.2f}",
        "" if row["peak"] is None else f"{row['peak'] / 1e9:.2f} GB",
    ]


def table(rows):
    head = ["limit", "program", "tokens/s", "neuropil is", "read/token", "found", "waiting", "P99/mean", "peak"]
    lines = [head, *map(shown, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(text.ljust(w) for text, w in zip(line, widths)) + " |" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", metavar="STORE.gguf")
    parser.add_argument("--cap", required=True, metavar="SIZE,...", help="limits of memory, page cache included")
    parser.add_argument("--llama-bench", metavar="PATH")
    parser.add_argument("--twin", metavar="TWIN.gguf", help="the same weights for llama.cpp")
    parser.add_argument("-t", type=int, default=2, help="threads (2)")
    parser.add_argument("-r", type=int, default=3, help="rounds (3)")
    parser.add_argument("-p", type=int, default=0, help="tokens of a prefill test (0)")
    parser.add_argument("-n", type=int, default=48, help="tokens of the decode test (48)")
    parser.add_argument("-d", type=int, default=16, help="tokens that the context holds before the test (16)")
    parser.add_argument("--flags", default="", help="flags of neuropil in all its rows")
    parser.add_argument("--with", dest="extra", action="append", default=[], metavar="NAME=FLAGS")
    parser.add_argument("--only", metavar="NAMES", help="these contenders, with commas between")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--svg", metavar="FILE", help="draw speed against limit")
    a = parser.parse_args()
    if bool(a.llama_bench) != bool(a.twin):
        parser.error("--llama-bench and --twin go together")
    a.store, a.twin = os.path.abspath(a.store), a.twin and os.path.abspath(a.twin)
    a.llama_bench = a.llama_bench and os.path.abspath(a.llama_bench)
    rows, title = [], os.path.basename(a.store).removesuffix(".gguf")
    for cap in map(size, a.cap.split(",")):
        print(f"{cap / 1e9:.2f} GB", file=sys.stderr)
        rows += measure(a, cap)
    print(table(rows))
    if a.json:
        with open(a.json, "w") as file:
            json.dump({"title": title, "rows": rows}, file, indent=1)
    if a.svg:
        with open(a.svg, "w") as file:
            file.write(draw(title, rows))


if __name__ == "__main__":
    main()
