#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Writes synthetic traces into a folder: `traces.py FOLDER [NAME...]`. `traces.py --list` prints the names.

A trace holds layers.L.q [steps, q_heads, d] and layers.L.k, layers.L.v [tokens, kv_heads, d]; query i belongs to token
tokens - steps + i. Keys drift (neighbours are alike, as after RoPE), a few tokens stand out, and queries look for some
of them, so that shares are as uneven as a model's. Everything follows from the name: two runs write equal bytes.
"""
import json
import struct
import sys
import zlib

import numpy as np

TOKENS, STEPS = 1553, 24  # lengths cross a page's end and meet multiples of 8, 16, 32 and 64


def structured(rng, tokens, steps, kv, group, d):
    """-> q, k, v as float64."""
    drift = np.cumsum(rng.standard_normal((tokens, kv, d)), 0) / np.sqrt(np.arange(1, tokens + 1))[:, None, None]
    k = drift + 0.6 * rng.standard_normal((tokens, kv, d))
    k[:, :, : d // 16] *= 4  # outlier channels
    v = rng.standard_normal((tokens, kv, d))
    seen = rng.integers(0, max(1, tokens - steps), (steps, kv, group))
    q = rng.standard_normal((steps, kv, group, d))
    for i in range(steps):
        for g in range(kv):
            q[i, g] += 2.0 * k[seen[i, g], g] / np.linalg.norm(k[seen[i, g], g], axis=-1, keepdims=True) * np.sqrt(d) / 2
    return q.reshape(steps, kv * group, d), k, v


def plain(dtype="F16", tokens=TOKENS, steps=STEPS, kv=2, group=3, d=64):
    def make(rng):
        return structured(rng, tokens, steps, kv, group, d), dtype
    return make


def constant(dtype):
    def make(rng):
        q, k, v = structured(rng, TOKENS, STEPS, 2, 3, 64)
        k[:, :, [5, 40]] = 600
        return (q, k, v), dtype
    return make


def scaled(dtype, keys, queries, d=64):
    def make(rng):
        q, k, v = structured(rng, TOKENS, STEPS, 2, 3, d)
        return (q * queries, k * keys, v), dtype
    return make


def equal(rng):
    q, k, v = structured(rng, TOKENS, STEPS, 2, 3, 64)
    return (q, np.broadcast_to(k[:1], k.shape), v), "F16"


def few(rng):  # pages of one key, of two, and of their own
    q, k, v = structured(rng, TOKENS, STEPS, 2, 3, 64)
    page = np.arange(TOKENS) // 16
    k[page % 3 == 0] = k[(page[page % 3 == 0] * 16)]
    two = page % 3 == 1
    k[two] = k[page[two] * 16 + np.arange(TOKENS)[two] % 2]
    return (q, k, v), "F16"


def outlier(rng):  # keys so long that their pages are estimated far above and below what they are
    q, k, v = structured(rng, TOKENS, STEPS, 2, 11, 80)
    k[100::150] *= 1e4
    return (q, k, v), "BF16"


def sink(rng):  # a first key that every query looks at
    q, k, v = structured(rng, TOKENS, STEPS, 2, 5, 128)
    k[0] *= 2
    q += np.repeat(k[0] / np.linalg.norm(k[0], axis=-1, keepdims=True), 5, 0) * np.sqrt(128) / 2
    return (q, k, v), "F16"


def peaked(rng):  # each head has one page, and those pages' shares differ by what it leaves to all others
    q, k, v = structured(rng, TOKENS, STEPS, 1, 32, 64)
    return q * 40, k, v


TRACES = {
    "constant-f16": constant("F16"),
    "constant-f32": constant("F32"),
    "huge-f32": scaled("F32", 1e30, 1e-30),
    "huge-bf16": scaled("BF16", 1e30, 1e-30),
    "denormal-f32": scaled("F32", 5e-39, 2e37),
    "denormal-bf16": scaled("BF16", 5e-39, 2e37),
    "denormal-d80": scaled("BF16", 5e-39, 2e37, d=80),
    "equal": equal,
    "few": few,
    "outlier": outlier,
    "sink": sink,
    "peaked-f32": lambda rng: (peaked(rng), "F32"),
    "peaked-bf16": lambda rng: (peaked(rng), "BF16"),
    "d80": plain(d=80),
    "d96": plain("BF16", d=96),
    "d128": plain("BF16", d=128),
    "d112": plain("BF16", kv=1, group=5, d=112),
    "d192": plain(kv=1, group=7, d=192),
    "d256": plain("BF16", kv=1, group=32, d=256),
    "group1": plain(kv=3, group=1),
    "group8-f32": plain("F32", kv=1, group=8),
    "group8-bf16": plain("BF16", kv=1, group=8),
    "long": plain("BF16", tokens=32768, steps=16, kv=1, group=2),
}


def stored(values, dtype):
    """-> bytes of the array as the dtype holds it."""
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    bits = values.astype("<f4")
    if dtype == "F32":
        return bits.tobytes()
    u = bits.view("<u4").astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype("<u2").tobytes()  # to the nearest, ties to even


def write(path, tensors):
    """tensors: {name: (dtype, shape, bytes)}"""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            f.write(data)


def make(name, path):
    arrays, dtype = TRACES[name](np.random.default_rng(zlib.crc32(name.encode())))
    write(path, {f"layers.3.{part}": (dtype, a.shape, stored(a, dtype)) for part, a in zip("qkv", arrays)})


def main():
    if sys.argv[1:] == ["--list"]:
        print("\n".join(TRACES))
        return
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(TRACES):
        sys.exit(__doc__)
    for name in sys.argv[2:] or TRACES:
        make(name, f"{sys.argv[1]}/{name}.safetensors")


if __name__ == "__main__":
    main()
