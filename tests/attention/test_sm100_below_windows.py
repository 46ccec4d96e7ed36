# SPDX-License-Identifier: Apache-2.0
"""What lies below a window may be another request's by now: NaN there reaches no row of the SM100 kernels.

A page that no row of a request sees shares a tile of keys with pages that some do. Such keys have a weight of 0, and 0
times NaN is NaN, unless the values are cleared.
"""

from typing import Any

import pytest

from dsl_backend.attention.cute.sm100.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm100.dense_host import Prefill, SplitKV
from dsl_backend.attention.cute.sm100.mla_configs import MlaConfig, TwoCtaMlaConfig
from dsl_backend.attention.cute.sm100.mla_host import MlaSplitKV
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.testing.cases import Case, mla
from tests.attention import mla_cases
from tests.attention.emulated import emulate, scratch
from tests.attention.mla_cases import Run

FACTS: dict[str, Any] = {"window": (70, None), "why": "tiles straddle the beginning of windows"}
LONG = Case(q_lens=(20, 140, 33), kv_lens=(300, 260, 115), heads=(2, 1), **FACTS)
SHORT = Case(q_lens=(1, 3, 1, 2, 1), kv_lens=(300, 260, 90, 75, 210), heads=(8, 2), **FACTS)
WIDE = Case(q_lens=(20, 140), kv_lens=(200, 330), heads=(2, 1), dim=256, **FACTS)
FP8 = Case(q_lens=(1, 40), kv_lens=(300, 150), heads=(4, 2), fp8=True, **FACTS)
RING = Case(q_lens=(20, 140), kv_lens=(300, 260), heads=(2, 2), dim=192, dim_v=128, **FACTS)

# Of long queries (Prefill) or of short ones (SplitKV).
DENSE: dict[str, tuple[Case, type[Prefill] | type[SplitKV], DenseConfig]] = {
    "two-softmax-warpgroups": (LONG, Prefill, DenseConfig(tile_n=64)),
    "one-softmax-warpgroup": (LONG, Prefill, DenseConfig(softmax_warpgroups=1, tile_n=128)),
    "shared-kv-stages": (RING, Prefill, DenseConfig(shared_kv_stages=True, tile_n=64)),
    "pair": (WIDE, Prefill, DenseConfig(softmax_warpgroups=1, two_cta=True, tile_n=64, stages=3)),
    "pair-two-stages": (WIDE, Prefill, DenseConfig(softmax_warpgroups=1, two_cta=True, tile_n=128, stages=2)),
    "alternate": (SHORT, SplitKV, DenseConfig(alternate=True, tile_n=64, ex2_emulation=0, min_split_tiles=1)),
    "swapped": (SHORT, SplitKV, DenseConfig(alternate=True, swap_ab=16, ex2_emulation=0, stages=2, min_split_tiles=1)),
    "split-one-softmax-warpgroup": (
        SHORT,
        SplitKV,
        DenseConfig(softmax_warpgroups=1, tile_n=32, ex2_emulation=0, min_split_tiles=1),
    ),
    "fp8": (FP8, Prefill, DenseConfig(tile_n=64, dequant_stages=2)),
    "fp8-alternate": (FP8, SplitKV, DenseConfig(alternate=True, tile_n=64, ex2_emulation=0, dequant_stages=3)),
}
QUICK_DENSE = ("two-softmax-warpgroups", "pair", "alternate", "swapped", "fp8-alternate")


@pytest.mark.parametrize(
    ("index", "name"),
    [
        pytest.param(i, name, id=name, marks=() if name in QUICK_DENSE else pytest.mark.full)
        for i, name in enumerate(DENSE)
    ],
)
@pytest.mark.parametrize(
    "schedule", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)]
)
def test_dense(index: int, name: str, schedule: int) -> None:
    case, kind, config = DENSE[name]

    def make(planner: Planner, short: bool) -> Kernel:
        if issubclass(kind, SplitKV) == short:
            assert config.objections(planner.spec, planner.target.smem_bytes) == []
            return kind(planner.spec, planner.target, scratch(), config)
        return (SplitKV if short else Prefill)(planner.spec, planner.target, scratch())

    emulate(case, "sm_100a", make, index + schedule, sms=2, nan_below=True)


MLA = mla(16, q_lens=(1, 2, 1), kv_lens=(300, 150, 75), **FACTS)
MLA_128 = mla(128, q_lens=(1, 1), kv_lens=(300, 90), page=64, **FACTS)
MLA = {
    "mla": Run(MLA, "random", config=MlaConfig(tile_n=32, stages=3, min_split_tiles=1)),
    "mla-tiles-of-64": Run(MLA, "eager", config=MlaConfig(stages=2, min_split_tiles=1)),
    "mla-fp8": Run(
        mla(16, q_lens=(1, 2), kv_lens=(300, 150), fp8=True, **FACTS),
        "lazy",
        config=MlaConfig(tile_n=32, stages=2, dequant_stages=3, min_split_tiles=1),
    ),
    "mla-pairs": Run(MLA_128, "lazy", config=TwoCtaMlaConfig(min_split_tiles=1)),
    "mla-pairs-three-stages": Run(MLA_128, "random", config=TwoCtaMlaConfig(tile_n=32, stages=3, min_split_tiles=1)),
    "mla-clusters": Run(MLA_128, "lazy", config=MlaConfig(stages=2, min_split_tiles=1, cluster=2)),
}
QUICK_MLA = ("mla", "mla-pairs")


@pytest.mark.parametrize(
    ("seed", "name"),
    [pytest.param(i, name, id=name, marks=() if name in QUICK_MLA else pytest.mark.full) for i, name in enumerate(MLA)],
)
def test_mla(seed: int, name: str) -> None:
    run = MLA[name]
    mla_cases.emulate(run, seed, "sm_100a", MlaSplitKV, run.config, nan_below=True)
