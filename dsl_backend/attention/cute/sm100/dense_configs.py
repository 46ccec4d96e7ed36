# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the SM100 kernels: frozen, and able to say why they do not fit."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from dsl_backend.attention.cute.sizes import (
    CLC_RESPONSE_BYTES,
    MBARRIER_BYTES,
    WARPGROUP,
    WORK_TILE_SMEM_BYTES,
    chunk,
    dequant_stage_bytes,
    packed_gqa_heads,
    padded,
    v_split_dim,
)
from dsl_backend.attention.spec import AttentionSpec

WARP = 32
MMA_M = 128  # rows of an MMA of one CTA
MMA_K = 16  # keys, or elements of a head, of an MMA of 16-bit operands
P_COLUMNS = 32  # of P that a softmax thread has in registers at a time
TENSOR_COLUMNS = 512  # of tensor memory
SHARED_STAGES = 3  # of stages that K and V share: for V, the next K, and the V after it
# First warps of the roles: up to two softmax warpgroups, a correction warpgroup, single warps, a dequant warpgroup.
CORRECTION_WARP, QK_WARP, MMA_WARP, LOAD_WARP, SCHEDULER_WARP, DEQUANT_WARP = 8, 12, 13, 14, 15, 16


class Registers(NamedTuple):
    """Of a thread, by its role."""

    softmax: int
    correction: int
    other: int
    dequant: int = 0


SHARED_S_STATS_STAGES = 3  # of an S stage: two of key tiles in turn, and one of the end of a work tile

CTA_PAIR = 2  # CTAs that multiply together (cta_group::2)
TWO_S_STAGES = 2  # of each of them
# First warps of the roles of such a CTA, after one softmax warpgroup, and all its warps.
TWO_CTA_CORRECTION_WARP, TWO_CTA_MMA_WARP, TWO_CTA_LOAD_WARP, TWO_CTA_SCHEDULER_WARP, TWO_CTA_WARPS = 4, 8, 9, 10, 12

# Times the threads of the roles, these are the 64 K registers of an SM.
REGISTERS = Registers(softmax=200, correction=64, other=48)
# With these, the correction warps of a shared S spilled 8 bytes.
SHARED_S_REGISTERS = Registers(softmax=192, correction=80, other=48)
# Warps 4 to 7 are idle: heads of 512 spilled 8 bytes with the registers that two softmax warpgroups leave.
ONE_SOFTMAX_WARPGROUP_REGISTERS = Registers(softmax=200, correction=96, other=80)
# 640 threads start with 96 each, since registers come in eights. Fewest bytes spilled (ptxas 13.0, heads of 128).
DEQUANT_REGISTERS = Registers(softmax=144, correction=80, other=48, dequant=64)

# 384 threads start with 168 each.
TWO_CTA_REGISTERS = Registers(softmax=240, correction=152, other=112)

# Swapped operands: first warps of the roles, after two softmax warpgroups, and all warps of a CTA.
SWAP_AB_MMA_WARP, SWAP_AB_LOAD_WARP, SWAP_AB_SCHEDULER_WARP, SWAP_AB_WARPS = 8, 9, 10, 12
SWAP_AB_REGISTERS = Registers(softmax=208, correction=0, other=88)
# Statistics of a query row in shared memory, for each S stage: one of each warp, its row_max, and two scales of O.
SWAP_AB_STATS = 7
# Query rows of a tile, the N of both MMAs; and head_dim_v, the M of V^T P^T.
SWAP_AB_TILE_M, SWAP_AB_HEAD_DIM_V = (16, 32), (64, 128)


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Tiles and stages of the dense kernels.

    Attributes:
        softmax_warpgroups: each with an S stage, which is an S and an O of 128 rows in tensor memory.
        two_cta: two CTAs of one softmax warpgroup each share their MMAs (cta_group::2); each has half of a tile's keys,
            and half of the columns of V; see two_cta_kernel.py.
        alternate: the S stages have the same query rows and every other key tile, rather than query rows of their own
            and all key tiles; for few queries over many keys.
        swap_ab: query rows of a tile where K is operand A of Q K^T, and Q operand B; see swap_ab_kernel.py. 0 where Q
            is operand A.
        tile_n: keys of a tile.
        stages: of K, and of V.
        direct_output: outputs go from registers to global memory, and not through the stage of their Q, which is free
            once Q K^T is done. Where Q has one stage, the next Q is loaded meanwhile.
        shared_kv_stages: K and V share three stages rather than having `stages` each; K's other
            columns have two of their own; see kv_stages.py.
        query_stages: of Q; an output leaves through the stage of its Q.
        min_split_tiles: fewest key tiles of a split.
        ex2_emulation: of each 16 exponentials, those computed on the FMA units rather than the special function units.
        late_p_keys: keys of a tile, the last ones, whose P is handed over by itself: the MMAs of those before need not
            wait for it. 0 for P in one piece.
        shared_s: the S stages have S in the same columns of tensor memory in turn, and each has columns of its own for
            P. So the next S is made while the softmax works on this one; see shared_s.py. Else P overwrites S.
        rescale_threshold: base-2 growth of row_max up to which O is not rescaled (conditional rescale).
        ctas_per_sm: 1, since a CTA has all of an SM's shared memory.
        use_clc: query tiles come from cluster launch control rather than from counters in memory.
        dequant_stages: stages of K, and of V, as an fp8 or NVFP4 cache stores them, which a further warpgroup
            dequantizes. 0 where K and V have 16 bits.
    """

    softmax_warpgroups: int = 2
    two_cta: bool = False
    alternate: bool = False
    swap_ab: int = 0
    tile_n: int = 128
    stages: int = 2
    query_stages: int = 1
    direct_output: bool = False
    shared_kv_stages: bool = False
    min_split_tiles: int = 2
    ex2_emulation: int = 4
    late_p_keys: int = 0
    shared_s: bool = False
    rescale_threshold: float = 8.0
    ctas_per_sm: int = 1
    use_clc: bool = False
    dequant_stages: int = 0

    @property
    def tile_m(self) -> int:
        """Query rows of a CTA."""
        if self.swap_ab:
            return self.swap_ab
        return MMA_M if self.alternate else self.softmax_warpgroups * MMA_M

    @property
    def s_stages(self) -> int:
        """S of 128 rows in tensor memory."""
        return TWO_S_STAGES if self.two_cta else self.softmax_warpgroups

    @property
    def threads(self) -> int:
        if self.two_cta:
            return TWO_CTA_WARPS * WARP
        if self.swap_ab:
            return SWAP_AB_WARPS * WARP
        return DEQUANT_WARP * WARP + (WARPGROUP if self.dequant_stages else 0)

    @property
    def registers(self) -> Registers:
        if self.two_cta:
            return TWO_CTA_REGISTERS
        if self.swap_ab:
            return SWAP_AB_REGISTERS
        if self.dequant_stages:
            return DEQUANT_REGISTERS
        if self.shared_s:
            return SHARED_S_REGISTERS
        return REGISTERS if self.softmax_warpgroups > 1 else ONE_SOFTMAX_WARPGROUP_REGISTERS

    @property
    def p_columns(self) -> int:
        """Columns of tensor memory of an S stage's P, in addition to those of S."""
        return self.tile_n // 2 if self.shared_s else 0

    @property
    def stats_stages(self) -> int:
        """Stages of a row's statistics, over all S stages; see shared_s.py."""
        return self.s_stages * (SHARED_S_STATS_STAGES if self.shared_s else 1)

    def tmem_columns(self, spec: AttentionSpec) -> int:
        """Columns of tensor memory: S, P where it does not overwrite S, and O."""
        if self.swap_ab:
            return 2 * self.s_stages * self.swap_ab
        scores = (1 if self.shared_s else self.s_stages) * self.tile_n + self.s_stages * self.p_columns
        return scores + self.softmax_warpgroups * padded(v_split_dim(spec.head_dim_v))

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Shared memory of a CTA."""
        dims, dims_v = padded(spec.head_dim), padded(v_split_dim(spec.head_dim_v))
        queries = self.query_stages * self.tile_m * max(dims, dims_v)
        columns = self.stages * (dims + dims_v)
        if self.shared_kv_stages:
            columns = SHARED_STAGES * dims_v + self.stages * (dims - dims_v)
        keys = self.tile_n * columns // (CTA_PAIR if self.two_cta else 1)
        stored_bytes = self.dequant_stages * sum(
            dequant_stage_bytes(spec.kv, width, self.tile_n, spec.page_size) for width in (dims, dims_v)
        )
        pipelines = self.query_stages + 2 * self.stages + 2 * self.dequant_stages
        of_s_stage = 3 + (self.late_p_keys > 0) + self.shared_s
        others = of_s_stage * self.s_stages + self.shared_s + self.stats_stages + 1
        barriers = MBARRIER_BYTES * (2 * pipelines + others)
        statistics = 2 * 4 * self.stats_stages * MMA_M
        if self.swap_ab:
            # P goes through shared memory.
            statistics = 4 * self.s_stages * self.swap_ab * SWAP_AB_STATS
            queries += self.s_stages * self.tile_n * self.swap_ab
        control = 2 * CLC_RESPONSE_BYTES if self.use_clc or self.two_cta else 0  # aligned, with its barriers
        return spec.dtype.itemsize * (queries + keys) + (
            stored_bytes + barriers + statistics + control + WORK_TILE_SMEM_BYTES
        )

    def objections(self, spec: AttentionSpec, smem_bytes: int) -> list[str]:
        """Why the kernel cannot be built so; empty where it can."""
        reasons = []
        if self.softmax_warpgroups not in (1, 2):
            reasons.append(f"{self.softmax_warpgroups} softmax warpgroups: 1 or 2 are possible")
        if self.tile_n % 32 or not 32 <= self.tile_n <= 128:
            reasons.append(f"tiles of {self.tile_n} keys: a multiple of 32 up to 128 is possible")
        if self.stages < 2 or self.query_stages < 1:
            reasons.append(f"{self.stages} K and V stages, {self.query_stages} Q stages: at least 2 and 1 are needed")
        reasons += self.dequant_objections(spec)
        if self.shared_kv_stages:
            reasons += self.shared_kv_objections(spec)
        if self.two_cta:
            reasons += self.two_cta_objections(spec)
        if self.swap_ab:
            reasons += self.swap_ab_objections(spec)
        if self.late_p_keys:
            reasons += self.late_p_objections()
        if self.shared_s and (self.alternate or self.softmax_warpgroups != 2 or self.dequant_stages):
            reasons.append("S is shared by two softmax warpgroups with query rows of their own, and keys of 16 bits")
        reasons += self.direct_output_objections()
        if spec.batch_invariant:
            reasons += self.batch_invariant_objections()
        if self.tmem_columns(spec) > TENSOR_COLUMNS:
            reasons.append(f"{self.tmem_columns(spec)} columns of tensor memory: there are {TENSOR_COLUMNS}")
        if self.alternate and self.softmax_warpgroups != 2:
            reasons.append("one softmax warpgroup cannot alternate")
        if self.use_clc and self.alternate:
            reasons.append(
                "cluster launch control has whole query tiles; S stages alternate where key ranges are split"
            )
        needed = self.smem_bytes(spec)
        if needed > smem_bytes:
            reasons.append(f"a CTA needs {needed} bytes of shared memory: there are {smem_bytes}")
        return reasons + self.swizzle_objections(spec)

    def swizzle_objections(self, spec: AttentionSpec) -> list[str]:
        """Why outputs cannot leave through the stage of their Q."""
        columns = v_split_dim(spec.head_dim_v)
        if chunk(spec.head_dim) == chunk(columns):
            return []
        return [
            f"values of {columns} elements and queries of {spec.head_dim} have different swizzles: their rows are "
            f"cut into chunks of {chunk(columns)} and {chunk(spec.head_dim)}"
        ]

    def dequant_objections(self, spec: AttentionSpec) -> list[str]:
        """Why the stages of a quantized cache cannot be so."""
        if spec.is_quantized_kv == (self.dequant_stages > 0) and self.dequant_stages != 1:
            return []
        return [f"{self.dequant_stages} fp8 stages: 2 or more for a quantized cache, 0 for others, are possible"]

    def direct_output_objections(self) -> list[str]:
        """Why outputs cannot go from registers to global memory."""
        if self.direct_output and (self.softmax_warpgroups != 2 or self.alternate):
            return ["direct outputs are those of two softmax warpgroups with query rows of their own"]
        return []

    def batch_invariant_objections(self) -> list[str]:
        """Why a row's bits would depend on more than the row, or splits could not be folded."""
        reasons = []
        if self.alternate:
            reasons.append("S stages that alternate sum keys in another order than the kernel of long queries")
        if self.ex2_emulation:
            reasons.append("masked tiles emulate no exponential: whether a tile is masked depends on other rows")
        if self.two_cta or self.use_clc or self.shared_s or self.direct_output:
            reasons.append(
                "batch-invariant layers go without two-CTA MMAs, cluster launch control, shared S and direct outputs"
            )
        return reasons

    def late_p_objections(self) -> list[str]:
        """Why P cannot be handed over in two pieces."""
        reasons = []
        if self.late_p_keys % P_COLUMNS or not 0 <= self.late_p_keys < self.tile_n:
            reasons.append(
                f"{self.late_p_keys} keys of a tile of {self.tile_n} with a late P: a multiple of {P_COLUMNS} is "
                "possible, if the tile has more"
            )
        if self.two_cta or self.swap_ab:
            reasons.append("two-CTA MMAs and swapped operands have P in one piece: late_p_keys must be 0")
        return reasons

    def shared_kv_objections(self, spec: AttentionSpec) -> list[str]:
        """Why K and V cannot share their stages."""
        reasons = []
        dims, columns = spec.head_dim, v_split_dim(spec.head_dim_v)
        if self.stages != 2:
            reasons.append(f"K and V share their stages, and {self.stages} stages: 2 are needed")
        if self.alternate or self.dequant_stages:
            reasons.append("K and V cannot share stages if S stages alternate or the cache is fp8")
        if padded(dims) < padded(columns):
            reasons.append(f"keys of {dims} elements and values of {columns} cannot share stages: keys are narrower")
        return reasons

    def two_cta_objections(self, spec: AttentionSpec) -> list[str]:
        """Why two CTAs cannot share their MMAs."""
        reasons = []
        if self.softmax_warpgroups != 1:
            reasons.append(f"{self.softmax_warpgroups} softmax warpgroups of a CTA with a peer: 1 is possible")
        if self.shared_kv_stages or self.dequant_stages or self.use_clc:
            reasons.append("two-CTA MMAs go without shared K and V stages, fp8 cache and cluster launch control")
        columns = padded(v_split_dim(spec.head_dim_v))
        if columns % (CTA_PAIR * 16):
            reasons.append(f"values of {columns} elements: each of two CTAs needs half, a multiple of 16")
        return reasons

    def swap_ab_objections(self, spec: AttentionSpec) -> list[str]:
        """Why the operands cannot be swapped."""
        reasons = []
        if self.swap_ab not in SWAP_AB_TILE_M:
            reasons.append(f"{self.swap_ab} query rows with swapped operands: {SWAP_AB_TILE_M} are possible")
        if not self.alternate or self.tile_n != MMA_M:
            reasons.append("swapped operands need S stages that alternate, and tiles of 128 keys")
        if self.two_cta or self.shared_kv_stages or self.dequant_stages or self.ex2_emulation:
            reasons.append(
                "swapped operands go without two-CTA MMAs, shared K and V stages, fp8 cache and exp2 emulation"
            )
        if padded(spec.head_dim_v) not in SWAP_AB_HEAD_DIM_V:
            reasons.append(f"values of {spec.head_dim_v} elements, operands swapped: {SWAP_AB_HEAD_DIM_V} are possible")
        return reasons


def default_config(spec: AttentionSpec) -> DenseConfig:
    """For long queries."""
    if spec.batch_invariant:
        return batch_invariant_config(spec)
    return long_query_config(spec)


def long_query_config(spec: AttentionSpec) -> DenseConfig:
    """The same for a layer that is not batch-invariant."""
    widest = max(spec.head_dim, spec.head_dim_v)
    if spec.is_quantized_kv:
        softmax_warpgroups = 1 if widest > 256 or spec.head_dim_v > 128 else 2
        if widest <= 64:
            return DenseConfig(tile_n=128, dequant_stages=4)
        # Stages of fp8 and of 16 bits, and 256 rows of queries, are in shared memory.
        if widest <= 128:
            return DenseConfig(softmax_warpgroups=softmax_warpgroups, tile_n=96, dequant_stages=2, late_p_keys=32)
        tile_n = 64 if widest <= 192 else 32
        return DenseConfig(softmax_warpgroups=softmax_warpgroups, tile_n=tile_n, dequant_stages=2)
    if widest > 256:
        # 128 rows of queries are more than half of shared memory.
        return DenseConfig(softmax_warpgroups=1, tile_n=32, stages=2)
    # Two stages of Q and P in two pieces: by the emulator's clock (docs/emulator-clock.md).
    if widest <= 96:
        return DenseConfig(stages=2, query_stages=2, late_p_keys=32, shared_s=True)
    # MMAs of wider heads take longer than seven eighths of the exponentials.
    if widest <= 128:
        wide = DenseConfig(ex2_emulation=2, late_p_keys=32)
        # Three stages of keys and values leave room for a second one of queries.
        shares = padded(spec.head_dim) >= padded(spec.head_dim_v)
        return replace(wide, query_stages=2, shared_kv_stages=True) if shares else wide
    if spec.head_dim_v <= 128:
        if widest > 192:
            # 256 rows of queries leave no room for three shared stages and those of K's other columns.
            return DenseConfig(tile_n=96, stages=2, ex2_emulation=2)
        # MMAs over 256 columns in all take as long as all exponentials.
        ex2_emulation = 0 if spec.head_dim + spec.head_dim_v > 256 else 2
        return DenseConfig(shared_kv_stages=True, direct_output=True, ex2_emulation=ex2_emulation, late_p_keys=32)
    if padded(spec.head_dim_v) % (CTA_PAIR * 16) == 0:
        return DenseConfig(softmax_warpgroups=1, two_cta=True)
    return DenseConfig(softmax_warpgroups=1, tile_n=64, stages=2)


def default_split_config(spec: AttentionSpec) -> DenseConfig:
    """For short queries over long key ranges: they are memory-bound, so no exponential needs to be emulated."""
    if spec.batch_invariant:
        return batch_invariant_split_config(spec)
    return replace(split_tiles(spec), ex2_emulation=0)


def batch_invariant_config(spec: AttentionSpec) -> DenseConfig:
    """For long queries of a batch-invariant layer."""
    config = replace(long_query_config(spec), ex2_emulation=0, shared_s=False, direct_output=False)
    if spec.is_quantized_kv:
        # With the fold, ptxas 13.0 has no registers for P in two pieces: 56 bytes spill, and 8 without.
        config = replace(config, late_p_keys=0)
    # Keys of a tile that fit without a peer.
    return DenseConfig(softmax_warpgroups=1, tile_n=64, stages=2, ex2_emulation=0) if config.two_cta else config


def batch_invariant_split_config(spec: AttentionSpec) -> DenseConfig:
    """For short queries of a batch-invariant layer: the same key tiles, so that the kernel changes no bit of a row."""
    long = batch_invariant_config(spec)
    widest = max(spec.head_dim, spec.head_dim_v)
    stages = 2 if spec.is_quantized_kv or widest > 128 else 6 if widest <= 64 else 3
    return replace(long, softmax_warpgroups=1, shared_kv_stages=False, stages=stages, query_stages=1)


def few_rows_config(spec: AttentionSpec, smem_bytes: int) -> DenseConfig | None:
    """For batches whose requests have few query rows; None where the tiles of 128 rows serve them.

    A Q tile has 4 KB rather than 32 KB, which leaves room for a third stage of K and V of 128 elements. Every thread
    has scores, where 8 heads of one token leave 120 of 128 rows without.
    """
    if spec.is_quantized_kv or spec.batch_invariant:
        # A batch-invariant layer has one kernel.
        return None
    pack_gqa = packed_gqa_heads(spec.group)
    for rows in SWAP_AB_TILE_M:
        if pack_gqa <= rows:
            tiles = DenseConfig(alternate=True, swap_ab=rows, ex2_emulation=0)
            return next(iter(deepest(tiles, spec, smem_bytes)), None)
    return None


def split_tiles(spec: AttentionSpec) -> DenseConfig:
    """Tiles and stages for short queries."""
    widest = max(spec.head_dim, spec.head_dim_v)
    if spec.is_quantized_kv:
        if widest > 256 or spec.head_dim_v > 128:
            return DenseConfig(softmax_warpgroups=1, tile_n=64 if widest <= 192 else 32, dequant_stages=2)
        # The fp8 stages are what is in flight from memory: small tiles, and many.
        if widest <= 64:
            return DenseConfig(alternate=True, tile_n=128, dequant_stages=6)
        return DenseConfig(alternate=True, tile_n=64, dequant_stages=6 if widest <= 128 else 4 if widest <= 192 else 2)
    if widest > 256:
        return DenseConfig(softmax_warpgroups=1, tile_n=32, stages=2)
    if spec.head_dim_v > 128:
        return DenseConfig(softmax_warpgroups=1, tile_n=64, stages=2)
    tile_n = 128 if widest <= 128 else 64
    return DenseConfig(alternate=True, tile_n=tile_n, stages=4 if widest <= 64 else 2)


TRIED_TILES = (32, 64, 96, 128)
TRIED_EX2_EMULATION = (0, 2, 4, 8)
TRIED_DEQUANT_STAGES = (2, 4, 6)
TRIED_LATE_P_KEYS = (32, 64)
MOST_STAGES = 8


def deepest(tiles: DenseConfig, spec: AttentionSpec, smem_bytes: int) -> list[DenseConfig]:
    """The configuration with the most stages that fit; empty where none fits."""
    made = (replace(tiles, stages=stages) for stages in range(2, MOST_STAGES + 1))
    return [config for config in made if not config.objections(spec, smem_bytes)][-1:]


def variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[DenseConfig]:
    """Configurations for long queries that are worth a try and fit."""
    tiles, dequant_stages = (
        itertools.product((1, 2), TRIED_TILES),
        TRIED_DEQUANT_STAGES if spec.is_quantized_kv else (0,),
    )
    sharing = (False, True) if spec.head_dim > spec.head_dim_v else (False,)
    shapes = itertools.product(tiles, (1, 2), TRIED_EX2_EMULATION, dequant_stages, sharing)
    for (softmax_warpgroups, tile_n), query_stages, ex2_emulation, fp8_stages, shared in shapes:
        made = DenseConfig(
            softmax_warpgroups=softmax_warpgroups,
            tile_n=tile_n,
            shared_kv_stages=shared,
            query_stages=query_stages,
            ex2_emulation=ex2_emulation,
            dequant_stages=fp8_stages,
        )
        yield from deepest(made, spec, smem_bytes)
    # Of narrower values, one CTA reads K and V no slower than its MMAs take.
    two_cta_tiles = TRIED_TILES if v_split_dim(spec.head_dim_v) > 128 else ()
    for tile_n, ex2_emulation in itertools.product(two_cta_tiles, TRIED_EX2_EMULATION):
        yield from deepest(
            DenseConfig(softmax_warpgroups=1, two_cta=True, tile_n=tile_n, ex2_emulation=ex2_emulation),
            spec,
            smem_bytes,
        )
    default = default_config(spec)
    others = [replace(default, late_p_keys=keys) for keys in TRIED_LATE_P_KEYS if keys != default.late_p_keys]
    for other in (*others, replace(default, use_clc=True)):
        if not other.objections(spec, smem_bytes):
            yield other


def split_variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[DenseConfig]:
    """The same for short queries over long key ranges."""
    dequant_stages = TRIED_DEQUANT_STAGES if spec.is_quantized_kv else (0,)
    for softmax_warpgroups, tile_n, min_split_tiles, fp8_stages in itertools.product(
        (1, 2), TRIED_TILES, (1, 2, 4), dequant_stages
    ):
        made = DenseConfig(
            softmax_warpgroups=softmax_warpgroups,
            alternate=softmax_warpgroups == 2,
            tile_n=tile_n,
            min_split_tiles=min_split_tiles,
            ex2_emulation=0,
            dequant_stages=fp8_stages,
        )
        yield from deepest(made, spec, smem_bytes)
