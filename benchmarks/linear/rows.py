# SPDX-License-Identifier: Apache-2.0
"""The rows of the linear benchmark: the default group, and further groups, selected by a regular expression."""

from ..case import Case, case_of
from .problems import Problem

# (columns of the output, columns of x): gate and up projections of dense models.
LLAMA_8B, QWEN3_32B, SEED = (14336, 4096), (25600, 5120), (10880, 4096)
MAIN = {"llama-8b": LLAMA_8B, "qwen3-32b": QWEN3_32B, "seed": SEED}
TOKENS = (1, 16, 64, 256, 1024, 8192)
SWEEP = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
# Shapes that are not used for tuning: layers of other models, their tensor-parallel ranks, ragged shapes.
HELD_OUT = {
    "llama-70b-tp4": (7168, 8192),
    "qwen3-4b": (9728, 2560),
    "gemma3-27b-tp2": (10752, 5376),
    "mistral-small-tp2": (16384, 5120),
    "deepseek-v2-lite-shared": (2816, 2048),
    "ragged": (11008 + 8, 4096 + 8),
    "narrow": (1024, 2048),
}
HELD_OUT_TOKENS = (1, 7, 24, 64, 200, 640, 3000)
# Plain products: square ones, the seed's, and the other projections of Llama-8B.
PLAIN_LARGE = ((8192, 8192, 8192), (8192, 8192, 2048), (8192, 8192, 3072))
PLAIN_FEW = {"qkv": (6144, 4096), "o": (4096, 4096), "down": (4096, 14336)}


def cases() -> list[Case[Problem]]:
    found = [case_of(f"{name}-{m}", Problem(m=m, n=n, k=k)) for name, (n, k) in MAIN.items() for m in TOKENS]
    n, k = LLAMA_8B
    found += [case_of(f"{m}", Problem(m=m, n=n, k=k), "sweep", "m") for m in SWEEP]
    found += [
        case_of(f"{name}-{m}", Problem(m=m, n=n, k=k), "held-out")
        for name, (n, k) in HELD_OUT.items()
        for m in HELD_OUT_TOKENS
    ]
    found += [case_of(f"{m}x{n}x{k}", Problem(m=m, n=n, k=k, gated=False), "plain") for m, n, k in PLAIN_LARGE]
    found += [
        case_of(f"{name}-{m}", Problem(m=m, n=n, k=k, gated=False), "plain-few")
        for name, (n, k) in PLAIN_FEW.items()
        for m in (1, 16, 64)
    ]
    found += [case_of(f"{m}x{n}x{k}", Problem(m=m, n=n, k=k), "tiny") for m, n, k in ((1, 8, 8), (3, 40, 64))]
    return found
