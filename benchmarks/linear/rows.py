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
# Plain products: 8192 x 8192 outputs over the depth.
PLAIN_DEPTHS = (2048, 3072, 4096, 6144, 8192, 12288, 16384)
# Gate and up projections of 8192 tokens: hidden sizes d, and 5.3 d rows of both weights together.
SWIGLU_DEPTHS = (2048, 3072, 4096, 5120, 6144, 8192)
SWIGLU_OUTPUT = 85 / 32
# The other projections of models, with the rows of a decode step: Llama-3.1-8B, Qwen2.5-7B, the MLA of DeepSeek-V3
# (its two down-projections as one), routers of DeepSeek-V2-Lite and V3.
PROJECTIONS = {
    "llama-8b-qkv": (6144, 4096),
    "llama-8b-o": (4096, 4096),
    "llama-8b-down": (4096, 14336),
    "llama-8b-head": (128256, 4096),
    "qwen2.5-7b-qkv": (4608, 3584),
    "qwen2.5-7b-o": (3584, 3584),
    "qwen2.5-7b-down": (3584, 18944),
    "qwen2.5-7b-head": (152064, 3584),
    "deepseek-v3-qa-kva": (2112, 7168),
    "deepseek-v2-lite-router": (64, 2048),
    "deepseek-v3-router": (256, 7168),
}
PROJECTION_TOKENS = (1, 8, 16, 64)


def cases() -> list[Case[Problem]]:
    found = [case_of(f"{name}-{m}", Problem(m=m, n=n, k=k)) for name, (n, k) in MAIN.items() for m in TOKENS]
    n, k = LLAMA_8B
    found += [case_of(f"{m}", Problem(m=m, n=n, k=k), "sweep", "m") for m in SWEEP]
    found += [
        case_of(f"{name}-{m}", Problem(m=m, n=n, k=k), "held-out")
        for name, (n, k) in HELD_OUT.items()
        for m in HELD_OUT_TOKENS
    ]
    large = [Problem(m=8192, n=8192, k=k, gated=False) for k in PLAIN_DEPTHS]
    found += [case_of(f"{one.m}x{one.n}x{one.k}", one, "plain", "k") for one in large]
    layers = [Problem(m=8192, n=round(SWIGLU_OUTPUT * k), k=k) for k in SWIGLU_DEPTHS]
    found += [case_of(f"{one.m}x{one.n}x{one.k}", one, "swiglu", "k") for one in layers]
    found += [
        case_of(f"{name}-{m}", Problem(m=m, n=n, k=k, gated=False), "projections")
        for name, (n, k) in PROJECTIONS.items()
        for m in PROJECTION_TOKENS
    ]
    found += [case_of(f"{m}x{n}x{k}", Problem(m=m, n=n, k=k), "tiny") for m, n, k in ((1, 8, 8), (3, 40, 64))]
    return found
