#!/usr/bin/env python3
"""Writes a GGUF file of a dense model with the shape of a real one and random weights, for speed only.

    benches/dense.py OUT.gguf --vocab VOCAB.gguf [--shape mistral-7b] [--type q4_0] [--layers N]

Needs the `gguf` package from PyPI, which brings numpy. VOCAB.gguf is any GGUF file with a tokenizer, such as
ggml-vocab-llama-spm.gguf from the source package of llama-cpp-python: both programs refuse a model without one.

The weights are pieces of one random buffer, so that 4 GB take seconds and the program stays small. Their mean is 0
and their size keeps activations finite through all layers; norms are 1. The same arguments give the same file.
"""

import argparse
import os
import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType

# Width, neurons of the feed-forward part, layers, heads, heads of K and V.
SHAPES = {
    "mistral-7b": (4096, 14336, 32, 32, 8),
    "llama-7b": (4096, 11008, 32, 32, 32),
    "llama-1b": (2048, 8192, 16, 32, 8),
}
SPREAD = 0.016  # standard deviation of a weight: about 1 / sqrt(4096)
BUFFER_BYTES = 48 << 20
SEED = 7


def halves(values):
    """Numbers as the bytes of F16, one row each."""
    return np.asarray(values, np.float16).reshape(len(values), -1).view(np.uint8)


def scales(rng, n, steps):
    """Block scales of either sign whose codes, spread by `steps`, give weights of the wanted size."""
    return rng.choice([-1.0, 1.0], n) * rng.uniform(0.7, 1.3, n) * SPREAD / steps


def q4_0(rng, n):
    return np.hstack([halves(scales(rng, n, 4.6)), rng.integers(0, 256, (n, 16), np.uint8)])


def q4_1(rng, n):
    d = scales(rng, n, 4.6)
    return np.hstack([halves(d), halves(-7.5 * d), rng.integers(0, 256, (n, 16), np.uint8)])


def q8_0(rng, n):
    return np.hstack([halves(scales(rng, n, 73.0)), rng.integers(0, 256, (n, 32), np.uint8)])


def q4_k(rng, n):
    # The scales and the minima of the 8 parts are the same bytes, and the middle code stands for 0.
    d = scales(rng, n, 4.6 * 32)
    low = rng.integers(20, 44, (n, 4), np.uint8)
    high = rng.integers(0, 16, (n, 4), np.uint8)
    packed = np.hstack([low, low, high | high << 4])
    packed[:, :8] |= 0x80  # upper bits of parts 4 to 7: these are 32 to 47
    return np.hstack([halves(d), halves(7.5 * d), packed, rng.integers(0, 256, (n, 128), np.uint8)])


def q6_k(rng, n):
    parts = rng.choice([-1, 1], (n, 16)) * rng.integers(20, 44, (n, 16))
    codes = rng.integers(0, 256, (n, 192), np.uint8)
    return np.hstack([codes, parts.astype(np.int8).view(np.uint8), halves(np.full(n, SPREAD / (18.5 * 32)))])


def f16(rng, n):
    return halves(rng.normal(0, SPREAD, n))


def bf16(rng, n):
    return (rng.normal(0, SPREAD, n).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(n, 2)


# How to make n blocks, weights in a block, the file's own number for the type.
TYPES = {
    "q4_0": (q4_0, 32, LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (q4_1, 32, LlamaFileType.MOSTLY_Q4_1),
    "q8_0": (q8_0, 32, LlamaFileType.MOSTLY_Q8_0),
    "q4_k": (q4_k, 256, LlamaFileType.MOSTLY_Q4_K_M),
    "q6_k": (q6_k, 256, LlamaFileType.MOSTLY_Q6_K),
    "f16": (f16, 1, LlamaFileType.MOSTLY_F16),
    "bf16": (bf16, 1, LlamaFileType.MOSTLY_BF16),
}


def tensors(width, neurons, layers, heads, kv_heads, vocabulary):
    """Names and shapes, rows first; norms have one number."""
    kv = width // heads * kv_heads
    yield "token_embd.weight", (vocabulary, width)
    for layer in range(layers):
        for name, shape in (
            ("attn_norm", (width,)),
            ("attn_q", (width, width)),
            ("attn_k", (kv, width)),
            ("attn_v", (kv, width)),
            ("attn_output", (width, width)),
            ("ffn_norm", (width,)),
            ("ffn_gate", (neurons, width)),
            ("ffn_up", (neurons, width)),
            ("ffn_down", (width, neurons)),
        ):
            yield f"blk.{layer}.{name}.weight", shape
    yield "output_norm.weight", (width,)
    yield "output.weight", (vocabulary, width)


def copy_tokenizer(path, writer):
    """Copies the tokenizer's keys; how many tokens it has."""
    fields = GGUFReader(path).fields
    if "tokenizer.ggml.tokens" not in fields:
        sys.exit(f"{path} has no tokenizer; --vocab takes a GGUF file that has one")
    for key, field in fields.items():
        if key.startswith("tokenizer."):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
    return len(fields["tokenizer.ggml.tokens"].data)


def write_weights(out, rng, buffer, block_bytes, size):
    """Writes `size` bytes as pieces of the buffer from random blocks on."""
    while size:
        start = int(rng.integers(0, len(buffer) // block_bytes // 2)) * block_bytes
        piece = buffer[start : start + size]
        out.write(piece)
        size -= len(piece)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--vocab", required=True, help="a GGUF file whose tokenizer to copy")
    parser.add_argument("--shape", choices=SHAPES, default="mistral-7b")
    parser.add_argument("--type", choices=TYPES, default="q4_0")
    parser.add_argument("--layers", type=int, help="another number of layers than the shape's")
    a = parser.parse_args()

    width, neurons, layers, heads, kv_heads = SHAPES[a.shape]
    layers = a.layers or layers
    make, block, file_type = TYPES[a.type]
    kind = GGMLQuantizationType[a.type.upper()]
    rng = np.random.default_rng(SEED)
    block_bytes = make(rng, 1).shape[1]
    buffer = memoryview(make(rng, BUFFER_BYTES // block_bytes).tobytes())

    writer = GGUFWriter(None, "llama")
    writer.add_name(f"{a.shape}, random {a.type}")
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(neurons)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    vocabulary = copy_tokenizer(a.vocab, writer)
    writer.add_vocab_size(vocabulary)

    sizes = []
    for name, shape in tensors(width, neurons, layers, heads, kv_heads, vocabulary):
        norm = len(shape) == 1
        size = shape[0] * 4 if norm else shape[0] * shape[1] // block * block_bytes
        sizes.append((norm, size))
        tensor_type = GGMLQuantizationType.F32 if norm else kind
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, tensor_type)

    partial = a.out + ".part"
    writer.write_header_to_file(partial)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    out = writer.fout[0]
    for norm, size in sizes:
        writer.write_padding(out, out.tell())
        if norm:
            out.write(np.ones(size // 4, np.float32).tobytes())
        else:
            write_weights(out, rng, buffer, block_bytes, size)
    writer.write_padding(out, out.tell())
    writer.close()
    os.replace(partial, a.out)
    print(f"{a.out}: {layers} layers of {a.shape}, {a.type}, {os.path.getsize(a.out) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
