#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The anchor of bench.cu: one decode step of dense attention through torch, cuDNN where it serves, as a replayed CUDA graph."""
import json, sys
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def measure(tokens, rows, backend):
    sets = max(1, min(8, int(40e9 / (rows * tokens * 8 * 128 * 4))))
    q = torch.randn(rows, 32, 1, 128, device='cuda', dtype=torch.bfloat16)
    kv = [(torch.randn(rows, 8, tokens, 128, device='cuda', dtype=torch.bfloat16), torch.randn(rows, 8, tokens, 128, device='cuda', dtype=torch.bfloat16)) for _ in range(sets)]
    run = lambda: [torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True) for k, v in kv]
    with sdpa_kernel(backend):
        run(); torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            keep = run()
    t = []
    for _ in range(15):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize()
        t.append(a.elapsed_time(b) * 1000 / sets)
    return sorted(t)[7]


for tokens, rows in ((8192, 1), (32768, 1), (131072, 1), (1 << 20, 1), (32768, 8), (131072, 8)):
    for name in ('CUDNN_ATTENTION', 'FLASH_ATTENTION'):
        try:
            us = measure(tokens, rows, getattr(SDPBackend, name))
            print(f'torch {torch.__version__} {name} 32/8 heads, {tokens} x {rows}: {us:.1f} us', flush=True)
            if len(sys.argv) > 1:
                open(sys.argv[1], 'a').write(json.dumps(dict(kind='anchor', backend=name, tokens=tokens, rows=rows, us=us)) + '\n')
        except Exception as e:
            print(f'{name} {tokens} x {rows}: {str(e).splitlines()[0][:120]}', flush=True)
        torch.cuda.empty_cache()
