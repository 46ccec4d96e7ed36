# SPDX-License-Identifier: Apache-2.0
"""Problems of weights of 4 and 8 bits for SM90's kernels, with tiles small enough for the emulator."""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

import emulator
from dsl_backend.gemm import weight_only_host as host
from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.sm90.weight_only_configs import Config, WeightOnlyConfig, WeightOnlyGemmConfig
from dsl_backend.quant.weight_only import WeightOnlyFormat
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.linear import F16
from dsl_backend.testing.weight_only import WeightOnlyCase, judge, random_case, tensors

ARCH = "sm_90a"
SMEM_BYTES = 227 * 1024
SMS = 4


@dataclass(frozen=True, kw_only=True)
class WeightOnlyEmulated:
    """A case and the kernel that it runs with.

    Attributes:
        why: what this case alone would find.
        sms: CTAs at most, with stream-K and of the persistent GEMM.
    """

    id: str
    why: str
    case: WeightOnlyCase
    config: Config
    sms: int = SMS


def emulate(one: WeightOnlyEmulated, schedule: str, seed: int = 0, kernel: type[Any] | None = None) -> None:
    """Compile, run on the emulator and judge; any finding or warning raises."""
    case = one.case
    assert one.config.objections(case.spec, SMEM_BYTES) == []
    given, workspace = tensors(case, "cpu"), Workspace(torch.device("cpu"))
    operands = GemmOperands(given.x, given.packed, given.bias, None, given.out)
    with emulator.device(arch=ARCH, sms=one.sms, schedule=schedule, seed=seed, strict=True):
        function = host.build(host.key_of(case.spec, one.config), from_arch(ARCH), kernel)
        host.run(function, one.config, operands, one.sms, workspace)
    assert not workspace.flags(0).any(), "a flag was left set"
    judge(case, given)


W4, ASYMMETRIC, W8 = WeightOnlyFormat(), WeightOnlyFormat(zero_points=True), WeightOnlyFormat(bits=8)
# Three tiles of rows, of which two are a stage's.
FEW = WeightOnlyCase(rows=5, n=136, k=456, kind=W4)
SMALL = WeightOnlyConfig(tokens=8, stages=2)

CASES = [
    WeightOnlyEmulated(id="w4", why="all edges ragged; CTAs share tiles", case=FEW, config=SMALL),
    WeightOnlyEmulated(
        id="w4-zero-points",
        why="a zero point for two tiles of columns; float16; two consumers; a bias",
        case=replace(
            FEW, rows=13, n=328, k=712, kind=replace(ASYMMETRIC, group=256), dtype=F16, bias=True, pad_x=8, pad_out=16
        ),
        config=WeightOnlyConfig(tokens=16, stages=3, groups=2),
    ),
    WeightOnlyEmulated(
        id="w4-row",
        why="one scale for a row; no edge but the last tile of k; CTAs with several tiles",
        case=replace(FEW, rows=8, n=384, k=320, kind=WeightOnlyFormat(group=None)),
        config=SMALL,
        sms=2,
    ),
    WeightOnlyEmulated(
        id="w4-row-zero-points",
        why="bfloat16 zero points",
        case=replace(FEW, kind=WeightOnlyFormat(group=None, zero_points=True)),
        config=SMALL,
    ),
    WeightOnlyEmulated(
        id="w8",
        why="eight bits, tiles of other rows",
        case=replace(FEW, rows=40, kind=W8),
        config=WeightOnlyConfig(tokens=16, stages=2),
        sms=6,
    ),
    WeightOnlyEmulated(
        id="w8-split",
        why="eight bits of float16 in halves of k",
        case=replace(FEW, rows=13, n=328, kind=W8, dtype=F16, bias=True),
        config=WeightOnlyConfig(tokens=16, stages=3, groups=2, num_splits=2),
    ),
    WeightOnlyEmulated(
        id="w4-split",
        why="uneven parts of k: of seven tiles and three CTAs",
        case=replace(FEW, rows=16, k=840),
        config=WeightOnlyConfig(tokens=16, stages=2, num_splits=3),
    ),
    WeightOnlyEmulated(
        id="w4-many",
        why="consumers take registers from the producer's warpgroup",
        case=replace(FEW, rows=61, k=704),
        config=WeightOnlyConfig(tokens=64, stages=2, groups=2),
    ),
    WeightOnlyEmulated(
        id="w4-one-tile",
        why="a CTA has one position, and no CTA another",
        case=replace(FEW, rows=1, n=64, k=128),
        config=SMALL,
    ),
    WeightOnlyEmulated(
        id="w4-special",
        why="NaN, infinities and zeros among x and scales",
        case=replace(FEW, kind=ASYMMETRIC, special=True),
        config=SMALL,
    ),
    WeightOnlyEmulated(
        id="w4-rows",
        why="tiles of tokens and of columns with ragged edges; a CTA with several tiles; stages come round",
        case=replace(FEW, rows=83, n=264, k=456),
        config=WeightOnlyGemmConfig(tokens=48, stages=5),
    ),
    WeightOnlyEmulated(
        id="w4-rows-zero-points",
        why="a zero point for two tiles of columns; float16; a bias; two buffers of tokens; a tile of k of one half",
        case=replace(
            FEW,
            rows=130,
            n=136,
            k=704,
            kind=replace(ASYMMETRIC, group=256),
            dtype=F16,
            bias=True,
            pad_x=8,
            pad_out=16,
        ),
        config=WeightOnlyGemmConfig(tokens=128, stages=4),
        sms=2,
    ),
    WeightOnlyEmulated(
        id="w8-rows",
        why="eight bits; one packed tile of k: nothing before or behind it",
        case=replace(FEW, rows=31, n=192, k=72, kind=W8),
        config=WeightOnlyGemmConfig(tokens=32, stages=4),
    ),
    WeightOnlyEmulated(
        id="w4-rows-special",
        why="NaN, infinities and zeros among x and scales",
        case=replace(FEW, rows=40, kind=ASYMMETRIC, special=True),
        config=WeightOnlyGemmConfig(tokens=32, stages=4),
        sms=1,
    ),
]


def random_emulated(seed: int) -> WeightOnlyEmulated:
    """Any problem with a kernel that takes it."""
    choose = random.Random(seed)
    many = choose.random() < 0.5
    case = random_case(seed, most_n=400, most_k=900, most_rows=200 if many else 64)
    while True:
        stages = choose.randint(2, 4)
        config: Config = WeightOnlyConfig(
            tokens=choose.choice((8, 16, 32, 64)),
            stages=stages,
            groups=choose.choice((1, 2)),
            num_splits=choose.choice((1, 1, 2, 3, 4)),
        )
        if many:
            config = WeightOnlyGemmConfig(
                tokens=16 * choose.randint(1, 8),
                stages=stages + 2,
                band=choose.randint(1, 8),
            )
        if not config.objections(case.spec, SMEM_BYTES):
            break
    m_tiles = 1 if isinstance(config, WeightOnlyGemmConfig) else -(-case.rows // config.tile_tokens)
    return WeightOnlyEmulated(
        id=f"fuzz-{seed}", why="any", case=case, config=config, sms=m_tiles * choose.randint(1, 4)
    )
