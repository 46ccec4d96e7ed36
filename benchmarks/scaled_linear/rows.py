# SPDX-License-Identifier: Apache-2.0
"""The rows of the benchmark of e4m3 linear layers."""

from ..case import Case, case_of
from .problems import SCHEMES, Problem

# (columns of the output, columns of x).
GATED = {"llama-8b": (14336, 4096), "deepseek-v3-dense": (18432, 7168)}
PLAIN = {"llama-8b-down": (4096, 14336), "llama-8b-qkv": (6144, 4096), "deepseek-v3-o": (7168, 16384)}
TOKENS = (1, 64, 256, 2048, 8192)
# Of a sweep: (columns of the output, columns of x, whether it is gated), and rows.
LAYERS = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate-up": (14336, 4096, True),
    "down": (4096, 14336, False),
    "v3-o": (7168, 16384, False),
    "v3-gate-up": (18432, 7168, True),
    # Not used to choose constants.
    "qwen-32b-gate-up": (25600, 5120, True),
    "qwen-32b-down": (5120, 25600, False),
    "70b-tp4-qkv": (2560, 8192, False),
}
# Of `dsl-backend tune`, with those above of Llama-8B: Qwen2.5-7B, and DeepSeek-V3 on 8 ranks.
TUNED = {
    **{name: LAYERS[name] for name in ("qkv", "o", "gate-up", "down")},
    "qwen-7b-qkv": (4608, 3584, False),
    "qwen-7b-o": (3584, 3584, False),
    "qwen-7b-gate-up": (18944, 3584, True),
    "qwen-7b-down": (3584, 18944, False),
    "v3-tp8-qkv-a": (2112, 7168, False),
    "v3-tp8-q-b": (3072, 1536, False),
    "v3-tp8-kv-b": (4096, 512, False),
    "v3-tp8-o": (7168, 2048, False),
    "v3-tp8-gate-up": (2304, 7168, True),
    "v3-tp8-down": (7168, 2304, False),
    "v3-tp8-shared-gate-up": (256, 7168, True),
    "v3-tp8-shared-down": (7168, 256, False),
}
ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 8192)


def cases() -> list[Case[Problem]]:
    """Gate and up projections with SwiGLU and the next quantisation; in group `plain` products to bfloat16."""
    found = []
    for scheme in SCHEMES:
        found += [
            case_of(f"{name}-{scheme}-{m}", Problem(m=m, n=n, k=k, scheme=scheme))
            for name, (n, k) in GATED.items()
            for m in TOKENS
        ]
        found += [
            case_of(f"{name}-{scheme}-{m}", Problem(m=m, n=n, k=k, scheme=scheme, gated=False), "plain")
            for name, (n, k) in {**PLAIN, "llama-8b-gate-up": (28672, 4096)}.items()
            for m in TOKENS
        ]
        found += [
            case_of(f"{scheme}-{m}x{n}x{k}", Problem(m=m, n=n, k=k, scheme=scheme, gated=gated), "tiny")
            for m, n, k, gated in ((1, 16, 128, True), (3, 128, 256, False))
        ]
    return found
