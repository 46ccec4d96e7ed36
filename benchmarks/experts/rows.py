# SPDX-License-Identifier: Apache-2.0
"""The rows of the experts benchmark: the default group, and further groups, selected by a regular expression."""

from typing import Any

from dsl_backend.quant.format import BLOCK_SCALED, MXFP4_TILED, ROW_SCALED

from ..case import Case, case_of
from .problems import Problem

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b": {"experts": 128, "hidden": 2048, "width": 768, "topk": 8},
    "deepseek-v2-lite": {"experts": 64, "hidden": 2048, "width": 1408, "topk": 6},
    "gpt-oss-20b-size": {"experts": 32, "hidden": 2880, "width": 2880, "topk": 4},
    "mixtral-tp2": {"experts": 8, "hidden": 4096, "width": 7168, "topk": 2},
    "deepseek-v3-ep8": {"experts": 32, "hidden": 7168, "width": 2048, "topk": 8},
}
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SKEWED_TOKENS = (8, 128, 2048)
MXFP4_TOKENS = (1, 8, 32, 64, 256, 1024, 8192)
# Published with weights in e4m3, and the formats of these.
FP8_MODELS = ("qwen3-30b", "deepseek-v3-ep8")
FP8_TOKENS = (1, 8, 32, 64, 128, 512, 2048, 8192)
SCHEMES = {"blocks": BLOCK_SCALED, "channels": ROW_SCALED}


def cases() -> list[Case[Problem]]:
    found = [case_of(f"{name}-{m}", Problem(m=m, **model)) for name, model in MODELS.items() for m in TOKENS]
    qwen = MODELS["qwen3-30b"]
    found += [case_of(f"{m}", Problem(m=m, **qwen), "sweep", "m") for m in SWEEP]
    # By Zipf's law, all tokens to the same experts; half of the experts get no token.
    found += [
        case_of(f"{routing}-{name}-{m}", Problem(m=m, routing=routing, **model), group)
        for group, routings in (("skewed", ("zipf", "one")), ("without-tokens", ("half",)))
        for routing in routings
        for name, model in MODELS.items()
        for m in SKEWED_TOKENS
    ]
    found += [
        case_of(f"{ending}-{name}-{m}", Problem(m=m, weight=kind, **MODELS[name]), "fp8")
        for name in FP8_MODELS
        for ending, kind in SCHEMES.items()
        for m in FP8_TOKENS
    ]
    # By `--kernels cute-weight-only`.
    found += [
        case_of(f"gpt-oss-20b-size-{m}", Problem(m=m, weight=MXFP4_TILED, **MODELS["gpt-oss-20b-size"]), "mxfp4")
        for m in MXFP4_TOKENS
    ]
    tiny: dict[str, Any] = {"experts": 4, "hidden": 64, "width": 40, "topk": 2}
    found += [case_of(f"{m}", Problem(m=m, **tiny), "tiny") for m in (1, 5)]
    small: dict[str, Any] = {"experts": 4, "hidden": 64, "width": 128, "topk": 2}
    found += [case_of(ending, Problem(m=5, weight=kind, **small), "tiny") for ending, kind in SCHEMES.items()]
    found.append(case_of("mxfp4", Problem(m=5, weight=MXFP4_TILED, **small), "tiny"))
    return found
