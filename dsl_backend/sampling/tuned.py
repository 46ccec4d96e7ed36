# SPDX-License-Identifier: Apache-2.0
"""Which configuration the CuTe DSL sampler gets: of a tuning record, or the default.

No configuration changes a token, so that a record may hold for some numbers of rows.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from dsl_backend.checks import short
from dsl_backend.runtime import tuned
from dsl_backend.runtime.target import Target
from dsl_backend.sampling.configs import ClusterConfig, cluster_configs, widest_vector
from dsl_backend.sampling.spec import SamplingSpec


class ProblemShape(tuned.RowsProblemShape):
    """Logits of a vocabulary, for a range of rows, of plans that return tokens only.

    Attributes:
        vocab, dtype: as `SamplingSpec` has them.
        top_p_alone: rows have top-p without top-k and min-p; else they have any or none of the filters.
        sm_count: of the GPU; a partition of it has fewer.
    """

    vocab: PositiveInt
    dtype: Literal["float32", "float16", "bfloat16"]
    top_p_alone: bool
    sm_count: PositiveInt

    @property
    def name(self) -> str:
        """As `--classes` of `dsl-backend tune` finds it: `sampling-151936-float32-top-p-m67-128`."""
        kind = ["top-p"] if self.top_p_alone else []
        return "-".join(["sampling", f"{self.vocab}", self.dtype, *kind, f"m{self.least_rows}-{self.most_rows}"])


TUNED_CONFIGS = tuned.TunedConfigs(
    "sampling", Path(__file__).with_name("tuned.json"), ProblemShape, {"ClusterConfig": ClusterConfig}
)


def problem_of(spec: SamplingSpec, top_p_alone: bool, sm_count: int) -> ProblemShape:
    """The problem of a plan's launches, for one row."""
    return ProblemShape(
        least_rows=1,
        most_rows=1,
        vocab=spec.vocab,
        dtype=short(spec.dtype),  # type: ignore[arg-type]
        top_p_alone=top_p_alone,
        sm_count=sm_count,
    )


def recorded(
    spec: SamplingSpec, target: Target, vector: int, *, any_gpu: bool = False
) -> Iterator[tuple[ProblemShape, ClusterConfig]]:
    """Tuning records that fit a plan, for any number of rows.

    Args:
        vector: adjacent logits that one load may take in every row. Records are of contiguous rows.
        any_gpu: as in `TunedConfigs.on`; then of any number of SMs too.
    """
    timed = spec.logprobs_mode is None and vector == widest_vector(spec)
    for record in TUNED_CONFIGS.on(target, any_gpu=any_gpu) if timed else ():
        problem, config = record.problem, record.config
        sm_count = target.sm_count if target.gpu is not None else problem.sm_count
        if problem.of_rows(1, 1) != problem_of(spec, problem.top_p_alone, sm_count) or config.vector != vector:
            continue
        # A second launch removes no token by top-k and min-p.
        if (problem.top_p_alone or not config.finish_cluster) and not config.objections(spec, target):
            yield problem, config


def config_of(spec: SamplingSpec, target: Target, rows: int, vector: int, top_p_alone: bool) -> ClusterConfig:
    """The configuration of a launch: of a tuning record that fits, or the default. Arguments as of the default."""
    found = (
        config
        for problem, config in recorded(spec, target, vector)
        if problem.holds(rows) and problem.top_p_alone == top_p_alone
    )
    return next(found, None) or ClusterConfig.default(spec, target, rows, vector, top_p_alone)


def configs_of(spec: SamplingSpec, target: Target, max_rows: int, vector: int) -> list[ClusterConfig]:
    """All configurations that launches of up to `max_rows` rows may get; these are compiled before serving."""
    found = (
        config for problem, config in recorded(spec, target, vector, any_gpu=True) if problem.least_rows <= max_rows
    )
    return list(dict.fromkeys((*cluster_configs(spec, target, max_rows, vector), *found)))
