# SPDX-License-Identifier: Apache-2.0
"""Problems for the CuTe DSL kernels, with tiles small enough for the emulator."""

import random
from dataclasses import dataclass, replace

import torch

import emulator
from dsl_backend.gemm import host
from dsl_backend.gemm.activation import SWIGLU_OAI, Geglu, Swiglu
from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.configs import Config
from dsl_backend.gemm.sm90.configs import GemmConfig, SmallMConfig, SwapABConfig
from dsl_backend.gemm.sm100 import configs as sm100
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.gemm.tiles import NUM_SPLITS
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.linear import F16, LinearCase, Tensors, expected, judge, random_case, tensors

SMEM_BYTES = 227 * 1024
SMS = 4


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """A case and the kernel that it runs with.

    Attributes:
        why: what this case alone would find.
        sms: CTAs at most.
    """

    id: str
    why: str
    case: LinearCase
    config: Config
    sms: int = SMS

    @property
    def arch(self) -> str:
        """Whose kernel the configuration is."""
        return "sm_100a" if isinstance(self.config, sm100.GemmConfig | sm100.SmallMConfig) else "sm_90a"


def spec_of(case: LinearCase) -> LinearSpec:
    return LinearSpec(
        n=case.n,
        k=case.k,
        dtypes=Dtypes.of(case.dtype),
        activation=case.activation,
        interleaved=case.interleaved,
        bias=case.bias,
        residual=case.residual,
    )


def emulate(one: Emulated, schedule: str, seed: int = 0) -> Tensors:
    """Compile, run on the emulator, judge; any finding or warning raises."""
    given = tensors(one.case, "cpu")
    wanted = expected(one.case, given)
    spec = spec_of(one.case)
    assert one.config.objections(spec, SMEM_BYTES) == []
    workspace = Workspace(torch.device("cpu"))
    with emulator.device(arch=one.arch, sms=one.sms, schedule=schedule, seed=seed, strict=True):
        function = host.build(host.key_of(spec, one.config), from_arch(one.arch))
        host.run(function, one.config, GemmOperands(*given), one.sms, workspace)
    assert not workspace.flags(0).any(), "a flag was left set"
    judge(one.case, given, wanted)
    return given


SWIGLU = Swiglu()
PLAIN = LinearCase(rows=150, n=72, k=328)
GATED = replace(PLAIN, activation=SWIGLU)
# Two stages and six blocks of k: every pipeline comes round three times a tile.
SMALL = GemmConfig(tile_m=128, box_n=16, stages=2)
TALL = GemmConfig(tile_m=64, box_n=32, stages=2, pingpong=True)
SMALL_M = SmallMConfig(tokens=16, stages=2)
SWAP_AB = SwapABConfig(tokens=48, box_n=64, stages=2)

CASES = [
    # --- many rows ---
    Emulated(id="gemm", why="consumers share a tile; all edges ragged", case=GATED, config=SMALL),
    Emulated(id="gemm-plain", why="neighbouring boxes", case=PLAIN, config=SMALL),
    Emulated(id="gemm-exact", why="no edge", case=replace(GATED, rows=256, n=64, k=256, dtype=F16), config=SMALL),
    Emulated(
        id="gemm-one", why="one element of each tile is inside", case=replace(GATED, rows=1, n=8, k=8), config=SMALL
    ),
    Emulated(id="gemm-repeats", why="two blocks of rows a consumer", case=GATED, config=replace(SMALL, tile_m=256)),
    Emulated(id="pingpong", why="consumers take turns; an odd number of tiles", case=GATED, config=TALL),
    Emulated(
        id="pingpong-one",
        why="the second consumer has no tile",
        case=replace(GATED, rows=3, n=8),
        config=replace(TALL, box_n=16),
    ),
    Emulated(
        id="pingpong-turns",
        why="each consumer has several tiles; a band ends in the middle",
        case=replace(GATED, rows=400, n=200, k=136),
        config=replace(TALL, band=3),
        sms=2,
    ),
    Emulated(
        id="cluster",
        why="weights are shared; the second block's last tile is outside",
        case=GATED,
        config=replace(SMALL, cluster=2),
    ),
    Emulated(
        id="boxes-112",
        why="tiles that are no power of two wide, as in models whose layers would leave a wave unfilled",
        case=replace(GATED, rows=300, n=232, k=136),
        config=GemmConfig(tile_m=128, box_n=112, stages=2, cluster=2),
    ),
    Emulated(
        id="boxes-24",
        why="an odd multiple of 8 wide, whose output buffer has no swizzle",
        case=replace(GATED, rows=300, n=136, k=136),
        config=replace(TALL, box_n=24, cluster=2),
    ),
    Emulated(
        id="cluster-pingpong",
        why="both, with a bias and three stages, interleaved",
        case=replace(GATED, rows=300, n=136, k=264, interleaved=True, bias=True),
        config=replace(TALL, cluster=2, stages=3, band=1),
    ),
    Emulated(
        id="gemm-all",
        why="bias and residual in place, rows apart",
        case=replace(PLAIN, dtype=F16, bias=True, residual=True, in_place=True, pad_x=8, pad_weight=16, pad_out=40),
        config=SMALL,
    ),
    Emulated(id="gemm-special", why="NaN and infinities", case=replace(GATED, rows=70, special=True), config=SMALL),
    Emulated(
        id="gemm-bias",
        why="roundings stay behind the wait for products, where one block of k is all there is",
        case=LinearCase(rows=128, n=16, k=8, dtype=F16, bias=True),
        config=replace(SMALL, tile_m=256),
    ),
    # --- swapped operands ---
    Emulated(id="swap-ab", why="consumers share tokens; all edges ragged", case=GATED, config=SWAP_AB),
    Emulated(
        id="swap-ab-exact",
        why="no edge; four matrices and one at a time are staged",
        case=replace(GATED, rows=160, n=128, k=256, dtype=F16),
        config=replace(SWAP_AB, tokens=80),
    ),
    Emulated(
        id="swap-ab-one",
        why="one element of each tile is inside",
        case=replace(GATED, rows=1, n=8, k=8),
        config=SWAP_AB,
    ),
    Emulated(
        id="swap-ab-wide",
        why="two wgmma tiles a consumer, stored in two pieces; interleaved, a bias, rows apart",
        case=replace(GATED, rows=70, n=200, interleaved=True, bias=True, pad_x=8, pad_weight=16, pad_out=40),
        config=replace(SWAP_AB, tokens=80, box_n=128),
    ),
    Emulated(
        id="swap-ab-three",
        why="three consumers, the last tile's second box is outside; halves, a bias",
        case=replace(GATED, rows=50, n=136, bias=True),
        config=replace(SWAP_AB, box_n=96),
    ),
    Emulated(
        id="swap-ab-pingpong",
        why="each consumer has several tiles; a band ends in the middle",
        case=replace(GATED, rows=100, n=200, k=136),
        config=replace(SWAP_AB, tokens=32, box_n=32, pingpong=True, band=3),
        sms=2,
    ),
    Emulated(
        id="swap-ab-cluster",
        why="tokens of two blocks share weights; the second block's last tile is outside",
        case=GATED,
        config=replace(SWAP_AB, cluster=2, stages=3),
    ),
    Emulated(
        id="swap-ab-whole",
        why="one copy of the last tile, of which one row is inside, and none of a tile outside",
        case=replace(GATED, rows=97),
        config=replace(SWAP_AB, cluster=2, tail_boxes=False),
    ),
    Emulated(
        id="swap-ab-cluster-pingpong",
        why="both, with a bias, in bands of one",
        case=replace(GATED, rows=300, n=136, k=264, interleaved=True, bias=True),
        config=replace(SWAP_AB, cluster=2, pingpong=True, band=1),
    ),
    Emulated(
        id="swap-ab-special", why="NaN and infinities", case=replace(GATED, rows=70, special=True), config=SWAP_AB
    ),
    # --- few rows ---
    Emulated(
        id="small-m", why="a tile of several shares; all edges ragged", case=replace(GATED, rows=13), config=SMALL_M
    ),
    Emulated(id="small-m-plain", why="neighbouring boxes", case=replace(PLAIN, rows=13, n=200), config=SMALL_M),
    Emulated(
        id="small-m-many-shares",
        why="one tile in more than two shares",
        case=replace(GATED, rows=2, n=8, k=1032),
        config=replace(SMALL_M, tokens=8),
        sms=6,
    ),
    Emulated(
        id="small-m-early",
        why="sums of other blocks are there before a block's last tile begins; also in its last items",
        case=replace(GATED, rows=27, n=440, k=320, bias=True, residual=True),
        config=replace(SMALL_M, tokens=32),
        sms=3,
    ),
    Emulated(
        id="small-m-early-tokens",
        why="the same with two consumers, copies of 48 rows, two rows of tiles",
        case=replace(GATED, rows=70, n=264, k=320),
        config=SmallMConfig(tokens=24, groups=2, split_tokens=True, stages=3),
        sms=4,
    ),
    Emulated(id="small-m-one", why="one item of work", case=replace(GATED, rows=1, n=8, k=8), config=SMALL_M),
    Emulated(
        id="small-m-groups",
        why="consumers with rows of weights of their own, partial sums of both",
        case=replace(GATED, rows=30, n=136, k=1032, interleaved=True, bias=True, residual=True, in_place=True),
        config=SmallMConfig(tokens=32, groups=2, stages=3),
    ),
    Emulated(
        id="small-m-tokens",
        why="consumers with tokens of their own; several rows of tiles",
        case=replace(PLAIN, rows=40, n=136, dtype=F16, bias=True, residual=True, pad_out=8),
        config=SmallMConfig(tokens=16, groups=2, split_tokens=True, stages=2),
    ),
    Emulated(
        id="small-m-registers",
        why="registers are traded; 256 tokens",
        case=replace(GATED, rows=140, n=72, k=200),
        config=SmallMConfig(tokens=128, groups=2, split_tokens=True, stages=2),
    ),
    Emulated(
        id="small-m-wide",
        why="256 bytes of weights at a time",
        case=replace(GATED, rows=8, activation=SWIGLU_OAI, gain=5),
        config=SmallMConfig(tokens=8, tile_k=128, stages=2),
    ),
    Emulated(
        id="small-m-special",
        why="NaN and infinities through partial sums",
        case=replace(GATED, rows=12, special=True, activation=Geglu()),
        config=SMALL_M,
    ),
    # --- few rows, a cluster for each tile ---
    Emulated(
        id="split-k",
        why="two CTAs sum up; all edges ragged, parts of unequal length, more positions than stages",
        case=replace(PLAIN, rows=13, n=200),
        config=replace(SMALL_M, num_splits=2),
    ),
    Emulated(
        id="split-k-least",
        why="one position each; a thread finishes one accumulator of each box",
        case=replace(PLAIN, rows=3, n=8, k=256, bias=True),
        config=replace(SMALL_M, tokens=8, num_splits=4),
    ),
    Emulated(
        id="split-k-most",
        why="eight CTAs, of a gated layer with all that there is",
        case=replace(GATED, rows=30, n=72, k=1032, interleaved=True, bias=True, residual=True, in_place=True),
        config=replace(SMALL_M, tokens=32, num_splits=8),
        sms=16,
    ),
    Emulated(
        id="split-k-tokens",
        why="consumers with tokens of their own, two rows of tiles",
        case=replace(PLAIN, rows=40, n=136, dtype=F16, bias=True, residual=True, pad_out=8),
        config=SmallMConfig(tokens=16, groups=2, split_tokens=True, stages=2, num_splits=2),
        sms=8,
    ),
    Emulated(
        id="split-k-odd",
        why="a thread finishes three accumulators of each box",
        case=replace(GATED, rows=40, n=72, k=264),
        config=SmallMConfig(tokens=24, groups=2, split_tokens=True, stages=2, num_splits=4),
    ),
    Emulated(
        id="split-k-of-six",
        why="a thread finishes two accumulators of each box, one position each",
        case=replace(PLAIN, rows=20, n=136, k=384, bias=True),
        config=SmallMConfig(tokens=24, groups=2, split_tokens=True, stages=2, num_splits=6),
        sms=12,
    ),
    Emulated(
        id="split-k-uneven",
        why="the last of three CTAs finishes less than the others; in place, where storing twice would add twice",
        case=replace(GATED, rows=29, n=72, k=328, residual=True, in_place=True),
        config=replace(SMALL_M, tokens=32, num_splits=3),
        sms=8,
    ),
    Emulated(
        id="split-k-groups",
        why="consumers with rows of weights of their own, NaN and infinities through partial sums",
        case=replace(GATED, rows=12, k=520, special=True),
        config=replace(SMALL_M, groups=2, num_splits=4),
        sms=8,
    ),
]

# Two stages and six blocks of k; tiles are 128 rows high, and the output leaves in pieces of 32 or 64 columns.
SM100 = sm100.GemmConfig(box_n=32, stages=2)
TWO_CTA = sm100.GemmConfig(box_n=32, stages=2, two_cta=True)
SMALL_M_SM100 = sm100.SmallMConfig(tokens=16, stages=2)
GATES = {"swiglu": SWIGLU, "geglu": Geglu(), "geglu-tanh": Geglu(tanh=True), "swiglu-oai": SWIGLU_OAI}

CASES_SM100 = [
    # --- many rows ---
    Emulated(id="gemm", why="sums of two tiles in turn; all edges ragged", case=replace(GATED, rows=300), config=SM100),
    Emulated(id="gemm-plain", why="neighbouring boxes, pieces of 64 columns", case=PLAIN, config=SM100),
    Emulated(id="gemm-exact", why="no edge", case=replace(GATED, rows=256, n=64, k=256, dtype=F16), config=SM100),
    Emulated(
        id="gemm-one",
        why="one element of each tile is inside",
        case=replace(GATED, rows=1, n=8, k=8),
        config=SM100,
    ),
    Emulated(
        id="gemm-turns",
        why="a block has more tiles than there are sums; a band ends in the middle; three stages",
        case=replace(GATED, rows=700, n=200, k=136),
        config=replace(SM100, stages=3, band=2),
        sms=2,
    ),
    Emulated(
        id="gemm-wide",
        why="several pieces a tile, which take places in turn; all of tensor memory",
        case=replace(GATED, rows=140, n=264, k=136, bias=True),
        config=sm100.GemmConfig(box_n=128, stages=2),
        sms=1,
    ),
    Emulated(
        id="gemm-all",
        why="bias and residual in place, rows apart",
        case=replace(PLAIN, dtype=F16, bias=True, residual=True, in_place=True, pad_x=8, pad_weight=16, pad_out=40),
        config=SM100,
    ),
    Emulated(
        id="gemm-interleaved",
        why="gate and up in turn, in weights and bias; three pieces",
        case=replace(GATED, n=104, k=72, interleaved=True, bias=True, residual=True, activation=SWIGLU_OAI, gain=5),
        config=sm100.GemmConfig(box_n=96, stages=2),
    ),
    Emulated(
        id="gemm-112",
        why="tiles that are no power of two wide, whose pieces have 16 columns",
        case=replace(GATED, rows=200, n=232, k=136),
        config=sm100.GemmConfig(box_n=112, stages=2),
        sms=2,
    ),
    Emulated(id="gemm-special", why="NaN and infinities", case=replace(GATED, rows=70, special=True), config=SM100),
    Emulated(
        id="two-cta",
        why="two blocks multiply as one; the second one's last rows are outside",
        case=replace(GATED, rows=300),
        config=TWO_CTA,
    ),
    Emulated(
        id="two-cta-plain",
        why="neighbouring boxes, one a block; the second block has no row",
        case=replace(PLAIN, rows=100, bias=True),
        config=TWO_CTA,
    ),
    Emulated(
        id="two-cta-turns",
        why="more tiles than there are sums, for two blocks; three stages",
        case=replace(GATED, rows=700, n=136, k=264, interleaved=True, bias=True, residual=True, in_place=True),
        config=replace(TWO_CTA, stages=3, band=1),
        sms=2,
    ),
    *(
        Emulated(
            id=f"gemm-special-{name}",
            why="NaN and infinities in gate, in up, in both",
            case=replace(GATED, rows=20, k=72, special_weights=True, activation=activation),
            config=SM100,
        )
        for name, activation in GATES.items()
    ),
    # --- few rows ---
    Emulated(
        id="small-m",
        why="a tile of several shares; all edges ragged",
        case=replace(GATED, rows=13, n=200),
        config=SMALL_M_SM100,
    ),
    Emulated(
        id="small-m-plain",
        why="neighbouring boxes; shares of several tiles",
        case=replace(PLAIN, rows=13, n=1304, k=136),
        config=SMALL_M_SM100,
        sms=2,
    ),
    Emulated(
        id="small-m-many-shares",
        why="one tile in more than two shares",
        case=replace(GATED, rows=2, n=8, k=1032),
        config=SMALL_M_SM100,
        sms=6,
    ),
    Emulated(id="small-m-one", why="one item of work", case=replace(GATED, rows=1, n=8, k=8), config=SMALL_M_SM100),
    Emulated(
        id="small-m-all",
        why="all that there is, several rows of tiles, tokens in more than one access",
        case=replace(GATED, rows=70, n=136, interleaved=True, bias=True, residual=True, in_place=True, pad_out=8),
        config=replace(SMALL_M_SM100, tokens=48, stages=3),
    ),
    Emulated(
        id="small-m-groups",
        why="two warpgroups store, partial sums of both; shares of more tiles than there are sums",
        case=replace(GATED, rows=110, n=392, k=200, bias=True, residual=True, pad_out=8),
        config=replace(SMALL_M_SM100, tokens=96),
        sms=3,
    ),
    Emulated(
        id="small-m-wide",
        why="256 bytes of weights at a time; a plain bias",
        case=replace(PLAIN, rows=60, n=264, dtype=F16, bias=True, residual=True),
        config=sm100.SmallMConfig(tokens=64, tile_k=128, stages=2),
    ),
    Emulated(
        id="small-m-special",
        why="NaN and infinities through partial sums",
        case=replace(GATED, rows=12, special=True, activation=Geglu()),
        config=SMALL_M_SM100,
    ),
    # --- few rows, a cluster for each tile ---
    Emulated(
        id="split-k",
        why="two CTAs sum up; all edges ragged, parts of unequal length, more positions than stages",
        case=replace(PLAIN, rows=13, n=200),
        config=replace(SMALL_M_SM100, num_splits=2),
    ),
    Emulated(
        id="split-k-most",
        why="eight CTAs, of a gated layer with all that there is",
        case=replace(GATED, rows=30, n=72, k=1032, interleaved=True, bias=True, residual=True, in_place=True),
        config=replace(SMALL_M_SM100, tokens=32, num_splits=8),
        sms=8,
    ),
    Emulated(
        id="split-k-uneven",
        why="the last of three CTAs finishes less than the others; in place, where storing twice would add twice",
        case=replace(GATED, rows=29, n=72, k=328, residual=True, in_place=True),
        config=replace(SMALL_M_SM100, tokens=32, num_splits=3),
        sms=8,
    ),
    Emulated(
        id="split-k-gated",
        why="as many accumulators as a thread may have, gate and up; two rows of tiles, the last column's tile ragged",
        case=replace(GATED, rows=70, n=136, k=520),
        config=replace(SMALL_M_SM100, tokens=64, num_splits=4),
        sms=16,
    ),
    Emulated(
        id="split-k-groups",
        why="two warpgroups store; two rows of tiles; NaN and infinities through partial sums",
        case=replace(PLAIN, rows=110, n=136, special=True, bias=True, residual=True, pad_out=8),
        config=replace(SMALL_M_SM100, tokens=96, num_splits=4),
        sms=8,
    ),
    *(
        Emulated(
            id=f"small-m-special-{name}",
            why="NaN and infinities in gate, in up, in both",
            case=replace(GATED, rows=12, k=72, special_weights=True, activation=activation),
            config=SMALL_M_SM100,
        )
        for name, activation in GATES.items()
    ),
]


def with_splits(draw: random.Random, config: Config, case: LinearCase) -> Config:
    """The configuration with split-K in half of all cases, with as many CTAs as a tile of the problem can have."""
    tried = [replace(config, num_splits=count) for count in NUM_SPLITS[1:]]
    fitting = [one for one in tried if not one.objections(spec_of(case), SMEM_BYTES)]
    return draw.choice(fitting) if fitting and draw.random() < 0.5 else config


def random_sm100(seed: int) -> Emulated:
    """A small problem for the SM100 kernels; the same for the same seed."""
    draw = random.Random(f"linear kernels for SM100 {seed}")
    if draw.random() < 0.5:
        config: Config = sm100.GemmConfig(
            box_n=draw.choice((16, 32, 64, 96)),
            stages=draw.randint(2, 4),
            two_cta=draw.random() < 0.5,
            band=draw.randint(1, 4),
        )
        case = random_case(draw, 320, aligned=True)
    else:
        tile_k = draw.choice((64, 128))
        tokens = draw.choice((16, 32, 48, 96) if tile_k == 64 else (16, 32, 48))
        stages = draw.randint(2, 3) if tile_k == 64 else 2
        config = sm100.SmallMConfig(tokens=tokens, tile_k=tile_k, stages=stages)
        case = replace(random_case(draw, 400, aligned=True), rows=draw.randint(1, 100))
        config = with_splits(draw, config, case)
    return Emulated(
        id=f"fuzz-{seed}", why="unforeseen combinations", case=case, config=config, sms=draw.choice((2, 4, 6))
    )


def random_emulated(seed: int) -> Emulated:
    """A small problem of any kind for the SM90 kernels; the same for the same seed."""
    draw = random.Random(f"linear kernels {seed}")
    if draw.random() < 0.5:
        pingpong = draw.random() < 0.5
        config: Config = GemmConfig(
            tile_m=draw.choice((64, 128) if pingpong else (128, 256)),
            box_n=draw.choice((16, 24, 32, 40, 48)),
            stages=draw.randint(2, 4),
            pingpong=pingpong,
            cluster=draw.choice((1, 2)),
            band=draw.randint(1, 4),
        )
        most = 320
    else:
        groups = draw.choice((1, 2))
        split = groups == 2 and draw.random() < 0.5
        config = SmallMConfig(
            tokens=draw.choice((8, 16, 24, 32, 40, 48) if split else (8, 16, 32, 48)),
            groups=groups,
            split_tokens=split,
            tile_k=draw.choice((64, 128)),
            stages=draw.randint(2, 3),
        )
        most = 400
    case = random_case(draw, most, aligned=True)
    if isinstance(config, SmallMConfig):
        case = replace(case, rows=draw.randint(1, 100))
        config = with_splits(draw, config, case)
    return Emulated(
        id=f"fuzz-{seed}", why="unforeseen combinations", case=case, config=config, sms=draw.choice((2, 4, 6))
    )
