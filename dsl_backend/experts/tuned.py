# SPDX-License-Identifier: Apache-2.0
"""For which numbers of tokens this package's experts were measured to be faster than vLLM's Triton kernels."""

from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from dsl_backend.checks import short
from dsl_backend.experts.spec import MAX_TOKENS, ExpertsSpec
from dsl_backend.quant.format import BLOCK_SCALED
from dsl_backend.runtime import tuned
from dsl_backend.runtime.target import Target

# Formats of weights that vLLM's Triton kernels are its default for on SM90.
WEIGHTS = (None, BLOCK_SCALED)
# Tokens of layers in 16 bits without a record. On an H100 these are where four models' layers take at most 0.98 of the
# time of vLLM's Triton kernels without a tuned configuration (docs/performance/experts.md); between them some are
# slower.
UNRECORDED = ((1, 8), (2048, MAX_TOKENS))


class ProblemShape(tuned.RowsProblemShape):
    """A layer's sizes, for a range of tokens.

    Attributes:
        num_experts, hidden_size, intermediate_size, topk: as `ExpertsSpec` has them.
        sm_count: of the GPU; a partition of it has fewer.
        weight: the name of the weights' format; None is `dtype`.
    """

    num_experts: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    topk: PositiveInt
    dtype: Literal["float16", "bfloat16"]
    sm_count: PositiveInt
    weight: tuned.FormatName | None = None

    @property
    def name(self) -> str:
        """As `--classes` of `dsl-backend tune` finds it: `experts-128x2048x768-top8-bfloat16-m33-128`."""
        sizes = f"{self.num_experts}x{self.hidden_size}x{self.intermediate_size}-top{self.topk}-{self.dtype}"
        weight = "" if self.weight is None else f"-{self.weight}"
        return f"experts-{sizes}{weight}-m{self.least_rows}-{self.most_rows}"


@dataclass(frozen=True)
class Ours:
    """This package's kernels, the ones that dispatch chooses."""


@dataclass(frozen=True)
class Theirs:
    """VLLM's Triton kernels: what others are compared with, and no record."""


TUNED_CONFIGS = tuned.TunedConfigs("experts", Path(__file__).with_name("tuned.json"), ProblemShape, {"dsl": Ours})


def problem_of(spec: ExpertsSpec, sm_count: int) -> ProblemShape:
    """The problem of a layer, for one token."""
    return ProblemShape(
        least_rows=1,
        most_rows=1,
        num_experts=spec.num_experts,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        topk=spec.topk,
        dtype=short(spec.dtype),  # type: ignore[arg-type]
        sm_count=sm_count,
        weight=None if spec.weight is None else str(spec.weight),
    )


def faster(spec: ExpertsSpec, target: Target) -> list[ProblemShape]:
    """Ranges of tokens for which a layer is taken to be faster than vLLM's; none where experts are distributed.

    By the tuning records of the layer's sizes; without any, `UNRECORDED` on an SM90 if weights have 16 bits. With an
    expert map, most rows of a step may be other ranks': nothing that was measured without one tells of that.
    """
    if spec.global_experts is not None or spec.weight not in WEIGHTS:
        return []
    unrecorded = UNRECORDED if spec.weight is None else ()
    return tuned.faster(TUNED_CONFIGS, target, partial(problem_of, spec), unrecorded, Theirs)


@lru_cache(maxsize=1 << 16)
def is_faster(tokens: int, spec: ExpertsSpec, target: Target) -> bool:
    """Whether a layer is taken to be faster than vLLM's for so many tokens."""
    return any(problem.holds(tokens) for problem in faster(spec, target))
