# SPDX-License-Identifier: Apache-2.0
"""The rows of the benchmark of weight-only layers: Llama-8B in 4 bits; other layers and 8 bits in further groups."""

from ..case import SMALLEST, TABLE, Case, case_of
from .problems import Problem

# (rows of the weight, columns of x).
LLAMA_8B = {
    "llama-8b-gate-up": (28672, 4096),
    "llama-8b-down": (4096, 14336),
    "llama-8b-qkv": (6144, 4096),
    "llama-8b-o": (4096, 4096),
}
# Llama-70B on 8 ranks, and Qwen2.5-7B.
OTHERS = {
    "llama-70b-tp8-gate-up": (7168, 8192),
    "llama-70b-tp8-down": (8192, 3584),
    "llama-70b-tp8-qkv": (1280, 8192),
    "qwen-7b-gate-up": (37888, 3584),
    "qwen-7b-down": (3584, 18944),
    "qwen-7b-qkv": (4608, 3584),
}
TOKENS = (1, 16, 64, 128, 256, 512, 2048)
BITS = (4, 8)


def cases() -> list[Case[Problem]]:
    found = []
    for bits in BITS:
        of_llama = TABLE if bits == 4 else "w8"
        for group, layers in ((of_llama, LLAMA_8B), (f"others-w{bits}", OTHERS)):
            found += [
                case_of(f"{name}-{m}", Problem(m=m, n=n, k=k, bits=bits), group)
                for name, (n, k) in layers.items()
                for m in TOKENS
            ]
        found.append(case_of(f"w{bits}-3x72x264", Problem(m=3, n=72, k=264, bits=bits), SMALLEST))
    return found
