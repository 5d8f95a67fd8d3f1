#!/usr/bin/env python3
"""Makes a text to calibrate on and another to check with, out of the documentation in Debian packages.

    benches/corpus.py DIR        writes DIR/learn.txt and DIR/check.txt

Packages are fetched with apt-get download. Of each source, learn.txt takes pieces from all over it but its end, and
check.txt one piece of the end, so that nothing is in both. The pieces are a few kilobytes, and sources alternate.
"""

import gzip
import html
import pathlib
import re
import subprocess
import sys

SOURCES = {
    "debian-handbook": "*/debian-handbook/html/en-US/*.html",
    "debian-reference-en": "*/debian-reference/ch*.en.html",
    "developers-reference": "*/developers-reference/*.html",
    "anarchism": "*/anarchism/html/*.html",
    "fortunes": "*/games/fortunes/*",
    "dict-devil": "*/dictd/devil.dict.dz",
    "dict-jargon": "*/dictd/jargon.dict.dz",
    "dict-foldoc": "*/dictd/foldoc.dict.dz",
    "manpages": "*/man/man7/*.gz",
    "manpages-dev": "*/man/man2/*.gz",
    "perl-doc": "*.pod",
    "python3.11-doc": "*/html/*/*.html",
}
PIECE = 3000
LEARN_PIECES = 9
CHECK = 6000


def text_of(path):
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    text = data.decode("utf-8", "replace")
    if path.suffix == ".html":
        text = re.sub(r"(?is)<(script|style|head).*?</\1>", " ", text)
        text = html.unescape(re.sub(r"(?s)<[^>]*>", "", text))
    if ".gz" == path.suffix:
        text = re.sub(r"(?m)^[.'][^\n]*\n", "", text).replace("\\-", "-")
        text = re.sub(r"\\f[A-Z]|\\&|\\\(..", "", text)
    return re.sub(r"\n\s*\n\s*\n+", "\n\n", text)


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    learn, check = [], []
    for package, pattern in SOURCES.items():
        tree = folder / package
        if not tree.exists():
            subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True)
            deb = next(folder.glob(f"{package}_*.deb"))
            subprocess.run(["dpkg-deb", "-x", deb, tree], check=True)
        paths = sorted(p for p in tree.rglob("*") if p.is_file() and p.match(pattern) and p.suffix != ".dat")
        text = "\n\n".join(text_of(p) for p in paths)
        if len(text) < 10 * PIECE:
            sys.exit(f"{package}: found only {len(text)} characters under {pattern}")
        check.append(text[-CHECK:])
        rest = text[: -2 * CHECK]
        step = len(rest) // LEARN_PIECES
        learn.append([rest[i * step :][:PIECE] for i in range(LEARN_PIECES)])
        print(f"{package}: {len(text)} characters")
    pieces = [source[i] for i in range(LEARN_PIECES) for source in learn]
    (folder / "learn.txt").write_text("\n\n".join(pieces))
    (folder / "check.txt").write_text("\n\n".join(check))


main()
