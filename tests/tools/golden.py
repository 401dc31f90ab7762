#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""Writes tests/golden/*.bin from the float64 reference: `golden.py [ORACLE_FOLDER] [NAME...]`.

The folder holds locksd_ref.py; without an argument it is $LOCKSD_ORACLE, else ../shared/oracle beside the repository.
Everything follows from the name: two runs write equal bytes.

A file is little endian, no padding: uint32 d, B, r, G, dtype (1 bf16, 2 fp16, 3 fp32), P pages; then
    keys [P][B][d] and queries [G][d] in dtype
    of the pages, rank r:              int8 centroid [P][d], float32 its scale [P], int8 basis [P][r][d], int8 coeffs [P][r][B],
                                       float32 scales [P][r]
    of the P / 4 superpages, rank 2:   the same with 4 B tokens
    float32 scores at rank r [G][P], at rank 2 [G][P], of superpages [G][P / 4]; sm_scale is d^-1/2
"""
import os
import sys
import zlib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BF16, FP16, FP32 = 1, 2, 3
PAGES = 4

CASES = {  # name: d, B, r, G, dtype, kind
    **{f"d{d}": (d, 16, 8, 4, BF16, "plain") for d in (64, 80, 96, 112, 128, 192, 256)},
    "b8r2": (128, 8, 2, 1, BF16, "plain"),
    "b8r8": (80, 8, 8, 3, FP16, "plain"),
    "b16r2": (64, 16, 2, 2, FP32, "plain"),
    "b16r4": (96, 16, 4, 8, FP16, "plain"),
    "b16r16": (128, 16, 16, 5, BF16, "plain"),
    "b32r8": (80, 32, 8, 4, BF16, "plain"),
    "b32r16": (112, 32, 16, 7, FP16, "plain"),
    "b64r4": (192, 64, 4, 2, BF16, "plain"),
    "b64r8": (256, 64, 8, 4, BF16, "plain"),
    "b64r16": (64, 64, 16, 32, BF16, "plain"),
    "fp16": (128, 16, 8, 4, FP16, "plain"),
    "fp32": (128, 16, 8, 4, FP32, "plain"),
    "constant-bf16": (128, 16, 8, 4, BF16, "constant"),
    "constant-fp16": (64, 16, 8, 4, FP16, "constant"),
    "huge-bf16": (128, 16, 8, 4, BF16, "huge"),
    "huge-fp32": (80, 16, 8, 4, FP32, "huge"),
    "denormal-bf16": (128, 16, 8, 4, BF16, "denormal"),
    "denormal-fp32": (96, 16, 8, 4, FP32, "denormal"),
    "denormal-fp16": (64, 16, 8, 4, FP16, "half-denormal"),
    "equal": (128, 16, 8, 4, BF16, "equal"),
    "two": (128, 16, 8, 4, BF16, "two"),
    "five": (64, 16, 8, 4, FP16, "five"),
    "zero": (64, 8, 4, 1, BF16, "zero"),
}


def rounded(a, dtype):
    """-> the bytes of a in dtype, and what they mean as float64"""
    a = np.ascontiguousarray(a, np.float32)
    if dtype == FP32:
        return a.tobytes(), a.astype(np.float64)
    if dtype == FP16:
        h = a.astype(np.float16)
        return h.tobytes(), h.astype(np.float64)
    u = a.view(np.uint32)
    h = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return h.tobytes(), (h.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def make_keys(rng, kind, d, B):
    K = rng.standard_normal((PAGES, B, d)) * np.exp(0.5 * rng.standard_normal(d)) + rng.standard_normal(d)
    K += rng.standard_normal((PAGES, 1, d))
    K += (rng.standard_normal((PAGES, B, 4)) * np.array([6, 4, 2, 1])) @ rng.standard_normal((4, d)) * 0.3
    if kind == "constant":
        K[:, :, 3] += 600
        K[:, :, d - 5] -= 600
    scale = {"huge": 1e30, "denormal": 1e-40, "half-denormal": 1e-6, "zero": 0}
    K *= scale.get(kind, 1)
    if kind == "equal":
        K[:] = K[:, :1]
    if kind == "two":
        K[:, 1::2] = K[:, 1:2]
        K[:, ::2] = K[:, :1]
    if kind == "five":
        K = np.concatenate([K[:, :5]] * B, 1)[:, :B]
    return K


def make_queries(rng, kind, d, G):
    q = rng.standard_normal((G, d))
    return q * {"huge": 1e-30, "denormal": 1e30, "half-denormal": 1e4}.get(kind, 1)


def summary_bytes(S):
    order = (("mu8", "i1"), ("mu_scale", "<f4"), ("V4", "i1"), ("C8", "i1"), ("scale", "<f4"))
    return b"".join(np.ascontiguousarray(S[name], dtype).tobytes() for name, dtype in order)


def write(ref, name):
    d, B, r, G, dtype, kind = CASES[name]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    raw_keys, K = rounded(make_keys(rng, kind, d, B), dtype)
    raw_queries, q = rounded(make_queries(rng, kind, d, G), dtype)
    K = K.reshape(PAGES, B, d)
    S, SS = ref.build(K, r), ref.build(K.reshape(-1, ref.SUPER * B, d), ref.COARSE)
    q = q.reshape(G, d) @ ref.rotation(d)
    scores = [ref.score(q, S, r, d**-0.5), ref.score(q, S, ref.COARSE, d**-0.5), ref.score(q, SS, ref.COARSE, d**-0.5)]
    head = np.array([d, B, r, G, dtype, PAGES], "<u4").tobytes()
    body = b"".join(np.ascontiguousarray(s, "<f4").tobytes() for s in scores)
    data = head + raw_keys + raw_queries + summary_bytes(S) + summary_bytes(SS) + body
    (ROOT / "tests/golden" / f"{name}.bin").write_bytes(data)
    return len(data)


def main():
    arguments = sys.argv[1:]
    names = [a for a in arguments if a in CASES]
    folders = [a for a in arguments if a not in CASES]
    folder = folders[0] if folders else os.environ.get("LOCKSD_ORACLE", ROOT.parent / "shared/oracle")
    sys.path.insert(0, str(folder))
    try:
        import locksd_ref
    except ImportError:
        sys.exit(f"golden.py: no locksd_ref.py in {folder}; name its folder as an argument or in LOCKSD_ORACLE")
    total = sum(write(locksd_ref, name) for name in names or CASES)
    print(f"{len(names or CASES)} files, {total} bytes")


if __name__ == "__main__":
    main()
