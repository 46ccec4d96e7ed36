# SPDX-License-Identifier: Apache-2.0
"""Which configuration the CuTe DSL softmax gets: of a tuning record, or the default."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from dsl_backend.checks import short
from dsl_backend.runtime import tuned
from dsl_backend.runtime.target import Target
from dsl_backend.softmax.configs import SoftmaxConfig, default_config
from dsl_backend.softmax.spec import SoftmaxSpec

Dtype = Literal["float32", "float16", "bfloat16"]


class ProblemShape(tuned.ProblemShape):
    """The facts of `SoftmaxSpec`. The number of rows is not among them: a row has the same bits in every batch."""

    width: PositiveInt
    dtype: Dtype
    out_dtype: Dtype
    log: bool = False
    vector: Literal[1, 2, 4, 8]

    @property
    def name(self) -> str:
        """As `--classes` of `dsl-backend tune` finds it: `softmax-128256-float32`, `log-softmax-4099-bfloat16-v1`."""
        types = dict.fromkeys((self.dtype, self.out_dtype))
        vector = [] if self.vector == 8 else [f"v{self.vector}"]
        return "-".join(["log-softmax" if self.log else "softmax", f"{self.width}", *types, *vector])


TUNED_CONFIGS = tuned.TunedConfigs(
    "softmax", Path(__file__).with_name("tuned.json"), ProblemShape, {"SoftmaxConfig": SoftmaxConfig}
)


def problem_of(spec: SoftmaxSpec) -> ProblemShape:
    return ProblemShape(
        width=spec.width,
        dtype=short(spec.dtype),  # type: ignore[arg-type]
        out_dtype=short(spec.out_dtype),  # type: ignore[arg-type]
        log=spec.log,
        vector=spec.vector,  # type: ignore[arg-type]
    )


def recorded(spec: SoftmaxSpec, target: Target, *, any_gpu: bool = False) -> Iterator[SoftmaxConfig]:
    """The configurations of tuning records that fit; `any_gpu` as in `TunedConfigs.on`."""
    objections = partial(SoftmaxConfig.objections, spec=spec, smem_bytes=target.smem_bytes)
    return TUNED_CONFIGS.fitting(problem_of(spec), target, objections, any_gpu=any_gpu)


def config_of(spec: SoftmaxSpec, target: Target) -> SoftmaxConfig:
    """The configuration for any number of rows: of a tuning record that fits, or the default."""
    return next(recorded(spec, target), None) or default_config(spec, target.chips[0])


def configs_of(spec: SoftmaxSpec, target: Target) -> list[SoftmaxConfig]:
    """What a GPU of the target may get: one configuration, or several where the target names no GPU."""
    if target.gpu is not None:
        return [config_of(spec, target)]
    defaults = (default_config(spec, chip) for chip in target.chips)
    return list(dict.fromkeys((*defaults, *recorded(spec, target, any_gpu=True))))
