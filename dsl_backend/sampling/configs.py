# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the Triton sampler: a frozen configuration with a pure default for a spec and a target."""

from dataclasses import dataclass

from dsl_backend.runtime.target import Target
from dsl_backend.sampling.spec import SamplingSpec


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """One program for a row.

    Attributes:
        block: logits that a program looks at in one go; at least 256, as many as it has histogram bins.
        num_warps: warps of a program.
    """

    block: int
    num_warps: int

    @classmethod
    def default(cls, spec: SamplingSpec, target: Target) -> "RowConfig":
        wide = min(4096, max(256, 1 << (spec.vocab - 1).bit_length()))
        return cls(block=wide, num_warps=4 if wide < 2048 else 16)
