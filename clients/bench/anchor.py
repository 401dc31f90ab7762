# SPDX-License-Identifier: MIT
"""Dense decode attention through torch, as a replayed CUDA graph: the anchor of `locks-bench device`.

    python3 anchor.py GPU ROUNDS CACHE_BYTES QHEADS/KVHEADS:TOKENS:ROWS ...

bf16, d 128. Prints "torch VERSION, cuDNN VERSION" and then, for each case and backend that serves it,
"QHEADS KVHEADS TOKENS ROWS cudnn|flash MICROSECONDS". Calls go over several sets of keys and values, so
that nothing stays in the cache. Exit code 1: no torch, or it sees no GPU.
"""
import sys

D = 128
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}


def measure(torch, case, backend, rounds, cache):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q_heads, kv_heads, tokens, rows = case
    each = rows * kv_heads * tokens * D * 4
    if each > torch.cuda.mem_get_info()[0] * 0.9:
        return None
    sets = max(1, min(64, -(-int(2.5 * cache) // each)))
    new = lambda heads, n: torch.randn(rows, heads, n, D, device="cuda", dtype=torch.bfloat16)
    q, kv = new(q_heads, 1), [(new(kv_heads, tokens), new(kv_heads, tokens)) for _ in range(sets)]
    calls = max(2, sets)
    attend = torch.nn.functional.scaled_dot_product_attention
    run = lambda: [attend(q, *kv[i % sets], enable_gqa=True) for i in range(calls)]
    with sdpa_kernel(getattr(SDPBackend, BACKENDS[backend])):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = run()
    times = []
    for i in range(rounds + 2):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(begun.elapsed_time(ended) * 1000 / calls)
    del kept, graph
    return sorted(times)[(len(times) - 1) // 2]


def main(gpu, rounds, cache, *cases):
    try:
        import torch
    except ImportError:
        return 1
    if not torch.cuda.is_available():
        return 1
    torch.cuda.set_device(int(gpu))
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}", flush=True)
    for text in cases:
        heads, tokens, rows = text.split(":")
        case = *map(int, heads.split("/")), int(tokens), int(rows)
        for backend in BACKENDS:
            try:
                us = measure(torch, case, backend, int(rounds), int(cache))
                if us is not None:
                    print(*case, backend, f"{us:.3f}", flush=True)
            except RuntimeError as error:  # this backend does not serve this case
                print(f"{text} {backend}: {str(error).splitlines()[0]}", file=sys.stderr)
            torch.cuda.empty_cache()
    return 0


sys.exit(main(*sys.argv[1:]))
