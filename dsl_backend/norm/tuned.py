# SPDX-License-Identifier: Apache-2.0
"""Which configuration the CuTe DSL RMSNorm gets: of a tuning record, or the default."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from dsl_backend.checks import short
from dsl_backend.norm.configs import NormConfig, default_config
from dsl_backend.norm.spec import NormSpec, Scaling
from dsl_backend.runtime import tuned
from dsl_backend.runtime.target import Target

Dtype = Literal["float32", "float16", "bfloat16"]


class ProblemShape(tuned.ProblemShape):
    """The facts of `NormSpec` that its configuration depends on, of norms whose output has no scale.

    The number of rows is not among them: a row has the same bits in every batch.
    """

    width: PositiveInt
    dtype: Dtype
    out_dtype: Dtype
    weight_dtype: Dtype | None
    residual: bool
    vector: Literal[1, 2, 4, 8]

    @property
    def name(self) -> str:
        """As `--classes` of `dsl-backend tune` finds it: `norm-4096-bfloat16-residual`, `norm-4099-float32-v1`."""
        types = dict.fromkeys((self.dtype, self.out_dtype, self.weight_dtype or "unweighted"))
        more = ["residual"] if self.residual else []
        more += [] if self.vector == 8 else [f"v{self.vector}"]
        return "-".join(["norm", f"{self.width}", *types, *more])


TUNED_CONFIGS = tuned.TunedConfigs(
    "norm", Path(__file__).with_name("tuned.json"), ProblemShape, {"NormConfig": NormConfig}
)


def problem_of(spec: NormSpec) -> ProblemShape | None:
    """None where the output has a scale: `tune` does not compare how good quantized outputs are."""
    if spec.scaling is not Scaling.NONE:
        return None
    return ProblemShape(
        width=spec.width,
        dtype=short(spec.dtype),  # type: ignore[arg-type]
        out_dtype=short(spec.out_dtype),  # type: ignore[arg-type]
        weight_dtype=None if spec.weight_dtype is None else short(spec.weight_dtype),  # type: ignore[arg-type]
        residual=spec.residual,
        vector=spec.vector,  # type: ignore[arg-type]
    )


def recorded(spec: NormSpec, target: Target, *, any_gpu: bool = False) -> Iterator[NormConfig]:
    """The configurations of tuning records that fit; `any_gpu` as in `TunedConfigs.on`."""
    problem = problem_of(spec)
    if problem is not None:
        objections = partial(NormConfig.objections, spec=spec, smem_bytes=target.smem_bytes)
        yield from TUNED_CONFIGS.fitting(problem, target, objections, any_gpu=any_gpu)


def config_of(spec: NormSpec, target: Target) -> NormConfig:
    """The configuration for any number of rows: of a tuning record that fits, or the default."""
    return next(recorded(spec, target), None) or default_config(spec)


def configs_of(spec: NormSpec, target: Target) -> list[NormConfig]:
    """What a GPU of the target may get: one configuration, or several where the target names no GPU."""
    if target.gpu is not None:
        return [config_of(spec, target)]
    return list(dict.fromkeys((default_config(spec), *recorded(spec, target, any_gpu=True))))
