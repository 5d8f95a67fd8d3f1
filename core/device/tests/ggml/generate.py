"""Writes blocks.txt with the `gguf` package as the outside oracle: python3 generate.py > blocks.txt

Lines: `dequantize TYPE BYTES VALUES` and `quantize TYPE VALUES BYTES`, bytes and f32 bit patterns in hex.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize, quantize

rng = np.random.default_rng(7)
SIMPLE = {"q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0]}
K = {"q4_k": ([0, 2], 144), "q5_k": ([0, 2], 176), "q6_k": ([208], 210)}
EXPANDED = {"q2_k": ([80, 82], 84), "q3_k": ([108], 110), "iq4_nl": ([0], 18), "iq4_xs": ([0], 136), "mxfp4": ([], 17)}
FLOAT = ["f32", "f16", "bf16"]


def hex32(x):
    return x.astype("<f4").tobytes().hex()


def show_dequantize(name, raw):
    print("dequantize", name, raw.tobytes().hex(), hex32(dequantize(raw, T[name.upper()]).reshape(-1)))


def random_block(halves, size):
    raw = rng.integers(0, 256, size, dtype=np.uint8)
    for at in halves:
        raw[at : at + 2] = np.array([rng.normal() * 0.1], dtype="<f2").view(np.uint8)
    return raw


for name, halves in SIMPLE.items():
    size = {"q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34}[name]
    show_dequantize(name, random_block(halves, size))
    for x in (rng.normal(size=32), rng.normal(size=32) * 1e-3 + 0.5, np.zeros(32)):
        x = x.astype(np.float32)
        print("quantize", name, hex32(x), quantize(x, T[name.upper()]).tobytes().hex())
for name, (halves, size) in K.items():
    show_dequantize(name, random_block(halves, size))
for name in FLOAT:
    x = (rng.normal(size=32) * 10.0 ** rng.integers(-4, 4, 32)).astype(np.float32)
    raw = quantize(x, T[name.upper()])
    print("quantize", name, hex32(x), raw.tobytes().hex())
    show_dequantize(name, raw.view(np.uint8))
for name, (halves, size) in EXPANDED.items():
    for _ in range(3):
        show_dequantize(name, random_block(halves, size))
for e in (0, 1, 2, 126, 255):
    raw = random_block([], 17)
    raw[0] = e
    show_dequantize("mxfp4", raw)
for x in (rng.normal(size=32), rng.normal(size=32) * 1e-3 + 0.5, np.zeros(32), 2.0 ** np.arange(-16, 16)):
    x = x.astype(np.float32)
    print("quantize mxfp4", hex32(x), quantize(x, T.MXFP4).tobytes().hex())
