# SPDX-License-Identifier: Apache-2.0
"""Which configuration a CuTe DSL kernel of attention gets: a tuned one, or the heuristic's."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, PositiveInt

from dsl_backend.attention.cute.sm90 import dense_configs as sm90
from dsl_backend.attention.cute.sm90 import fp8_configs as fp8_sm90
from dsl_backend.attention.cute.sm90 import mla_configs as latent_sm90
from dsl_backend.attention.cute.sm90 import mla_fp8_configs as latent_fp8_sm90
from dsl_backend.attention.cute.sm100 import dense_configs as sm100
from dsl_backend.attention.cute.sm100 import fp8_configs as fp8_sm100
from dsl_backend.attention.cute.sm100 import mla_configs as latent_sm100
from dsl_backend.attention.cute.sm100 import mla_fp8_configs as latent_fp8_sm100
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.checks import short
from dsl_backend.runtime import tuned
from dsl_backend.runtime.target import Target

Feature = Literal["alibi", "sinks", "softcap"]


class ProblemShape(tuned.ProblemShape):
    """The facts of a layer that its kernel's tiles depend on.

    The numbers of requests, queries and keys are not among them, because a kernel is bound to a layer before a batch is
    known.

    Attributes:
        operation: `prefill` of long queries, `decode` and `mla_decode` of short ones; with products in 8 bits
            `prefill_e4m3` and `mla_decode_e4m3`.
        group: query heads that share a key head: the rows of a token in a tile.
        paged: whether keys are in pages.
        features: that change scores, and cost registers; sorted.
    """

    operation: Literal["prefill", "prefill_e4m3", "decode", "mla_decode", "mla_decode_e4m3"]
    head_dim: PositiveInt
    head_dim_v: PositiveInt
    dtype: Literal["float16", "bfloat16"]
    kv_dtype: Literal["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"]
    group: PositiveInt
    paged: bool = True
    features: tuple[Feature, ...] = Field(default=())

    @property
    def name(self) -> str:
        """As `--classes` of `dsl-backend tune` finds it: `decode-hd128-g4-bfloat16`."""
        dims = f"hd{self.head_dim}" + (f"x{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        keys = [self.kv_dtype] if self.kv_dtype != self.dtype else []
        parts = [self.operation, dims, f"g{self.group}", self.dtype, *keys, *self.features]
        return "-".join(parts if self.paged else [*parts, "packed"])


def problem_of(spec: AttentionSpec, operation: str) -> ProblemShape:
    features = {"alibi": spec.alibi, "sinks": spec.sinks, "softcap": spec.softcap > 0}
    fields = {
        "operation": operation,
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "dtype": short(spec.dtype),
        "kv_dtype": short(spec.kv_dtype),
        "group": spec.group,
        "paged": spec.page_size is not None,
        "features": tuple(name for name, has in features.items() if has),
    }
    return ProblemShape.model_validate(fields)


Heuristic = Callable[[AttentionSpec], Any]


@dataclass(frozen=True)
class Tunable:
    """The configurations that a heuristic chooses among.

    Attributes:
        operation: as in ProblemShape.
        kind: the type of configuration that its kernel takes.
        variants: (spec, shared memory of a CTA) -> the configurations to time.
    """

    operation: str
    kind: type
    variants: Callable[[AttentionSpec, int], Iterator[Any]]


TUNABLE: Mapping[Heuristic, Tunable] = MappingProxyType(
    {
        sm90.default_config: Tunable("prefill", sm90.DenseConfig, sm90.variants),
        fp8_sm90.default_fp8_config: Tunable("prefill_e4m3", fp8_sm90.Fp8Config, fp8_sm90.fp8_variants),
        sm90.default_split_config: Tunable("decode", sm90.DenseConfig, sm90.split_variants),
        sm100.default_config: Tunable("prefill", sm100.DenseConfig, sm100.variants),
        fp8_sm100.default_fp8_config: Tunable("prefill_e4m3", fp8_sm100.Fp8DenseConfig, fp8_sm100.fp8_variants),
        sm100.default_split_config: Tunable("decode", sm100.DenseConfig, sm100.split_variants),
        latent_sm90.default_mla_config: Tunable("mla_decode", latent_sm90.MlaConfig, latent_sm90.mla_variants),
        latent_fp8_sm90.default_fp8_mla_config: Tunable(
            "mla_decode_e4m3", latent_fp8_sm90.Fp8MlaConfig, latent_fp8_sm90.fp8_mla_variants
        ),
        latent_fp8_sm100.default_fp8_mla_config: Tunable(
            "mla_decode_e4m3", latent_fp8_sm100.Fp8MlaConfig, latent_fp8_sm100.fp8_mla_variants
        ),
        latent_sm100.default_mla_config: Tunable("mla_decode", latent_sm100.MlaConfig, latent_sm100.mla_variants),
    }
)

TUNED_CONFIGS = tuned.TunedConfigs(
    "attention",
    Path(__file__).with_name("tuned.json"),
    ProblemShape,
    {
        "sm90.DenseConfig": sm90.DenseConfig,
        "sm90.Fp8Config": fp8_sm90.Fp8Config,
        "sm90.MlaConfig": latent_sm90.MlaConfig,
        "sm90.Fp8MlaConfig": latent_fp8_sm90.Fp8MlaConfig,
        "sm100.DenseConfig": sm100.DenseConfig,
        "sm100.MlaConfig": latent_sm100.MlaConfig,
        "sm100.Fp8DenseConfig": fp8_sm100.Fp8DenseConfig,
        "sm100.Fp8MlaConfig": latent_fp8_sm100.Fp8MlaConfig,
        "sm100.TwoCtaMlaConfig": latent_sm100.TwoCtaMlaConfig,
    },
)


def config_of(spec: AttentionSpec, target: Target, default: Heuristic) -> Any:
    """The configuration of a kernel whose heuristic is `default`: of a tuning record that fits, or the heuristic's.

    A batch-invariant layer gets the heuristic's: it splits keys in another way than the kernel that was measured.
    """
    tunable = TUNABLE.get(default)
    if tunable is None or spec.batch_invariant or target.gpu is None:
        return default(spec)
    problem = problem_of(spec, tunable.operation)
    for record in TUNED_CONFIGS.on(target):
        fits = record.problem == problem and isinstance(record.config, tunable.kind)
        if fits and not record.config.objections(spec, target.smem_bytes):
            return record.config
    return default(spec)
