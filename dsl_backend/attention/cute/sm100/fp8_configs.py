# SPDX-License-Identifier: Apache-2.0
"""Configurations of the dense SM100 kernel whose products are in 8 bits. Needs no CuTe DSL."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsl_backend.attention.cute.sizes import (
    FP8_K_BLOCK,
    MAX_P_EXPONENT,
    MBARRIER_BYTES,
    WARPGROUP,
    WORK_TILE_SMEM_BYTES,
    has_many_rows,
    p_offset_objections,
    padded,
)
from dsl_backend.attention.cute.sm100.dense_configs import (
    DEQUANT_WARP,
    MMA_M,
    MOST_STAGES,
    TWO_S_STAGES,
    WARP,
    DenseConfig,
    Registers,
)
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.quant.format import E4M3

QUERY_WARP = DEQUANT_WARP  # the first of the warpgroup that quantizes Q, where others have one that dequantizes K and V
QUERY_LANES = 8  # threads of this warpgroup that share a row
QUERY_VECTOR = 8  # elements of Q that a thread loads at once: 16 bytes
# 640 threads start with 96 each. Nothing spills with heads of up to 128 (ptxas 13.0).
FP8_REGISTERS = Registers(softmax=168, correction=48, other=40, dequant=56)
# The same with S stages that alternate, which emulate no exponentials. Fewest bytes spilled.
ALTERNATING_FP8_REGISTERS = Registers(softmax=160, correction=56, other=48, dequant=56)
# The same with one softmax warpgroup, in place of whose peer four warps are idle.
ONE_FP8_SOFTMAX_WARPGROUP_REGISTERS = Registers(softmax=200, correction=88, other=48, dequant=96)
MOST_DIM = 256


def query_lanes(dims: int) -> int:
    """Threads that share a row of Q: where its elements do not suffice for QUERY_LANES, half as many."""
    return QUERY_LANES if dims % (QUERY_LANES * QUERY_VECTOR) == 0 else QUERY_LANES // 2


def query_batch(dims: int) -> tuple[int, int]:
    """Rows of Q that a thread quantizes side by side, and the bytes of these rows of all threads in 16 bits."""
    ahead = 2 if dims <= 128 and query_lanes(dims) == QUERY_LANES else 1
    return ahead, ahead * WARPGROUP // query_lanes(dims) * dims * 2


@dataclass(frozen=True, kw_only=True)
class Fp8DenseConfig(DenseConfig):
    """Tiles and stages: `stages` of K and of V as TMA fills them, `query_stages` of the quantized Q.

    Attributes:
        p_offset: P is 2^p_offset where a score is the row's maximum, so that small P are normal numbers of e4m3. What
            is left below 448 is how far a score may exceed row_max before O is rescaled.
        copied_q_bytes: of shared memory, for rows of Q in 16 bits on their way to the warps that quantize them.
        rounded_sums: row sums are those of the rounded P, in float16 up to the last additions. Else they are P's in
            float32: conversions back to float16 would be the longest of all work, by public rates.
    """

    query_stages: int = 2
    direct_output: bool = True
    rescale_threshold: float = MAX_P_EXPONENT - 8.0
    p_offset: float = 8.0
    copied_q_bytes: int = 16 << 10
    rounded_sums: bool = False

    @property
    def s_stages(self) -> int:
        """Two, of one softmax warpgroup as well; see two_s.py."""
        return TWO_S_STAGES

    @property
    def threads(self) -> int:
        return QUERY_WARP * WARP + WARPGROUP

    @property
    def registers(self) -> Registers:
        if self.softmax_warpgroups == 1:
            return ONE_FP8_SOFTMAX_WARPGROUP_REGISTERS
        return ALTERNATING_FP8_REGISTERS if self.alternate else FP8_REGISTERS

    @property
    def scale_stages(self) -> int:
        """Stages of the scales of Q; see query_warps.py."""
        return self.query_stages + 1

    def smem_bytes(self, spec: AttentionSpec) -> int:
        dims, dims_v = padded(spec.head_dim), padded(spec.head_dim_v)
        tiles = self.query_stages * self.tile_m * dims + self.stages * self.tile_n * (dims + dims_v)
        pipelines = self.query_stages + 2 * self.stages
        others = self.scale_stages + (3 + (self.late_p_keys > 0)) * self.s_stages + self.stats_stages + 1
        statistics = 4 * MMA_M * 2 * self.stats_stages + 4 * self.tile_m * self.scale_stages
        tiles += 0 if spec.is_fp8_q else self.copied_q_bytes
        return tiles + MBARRIER_BYTES * (2 * pipelines + others) + statistics + WORK_TILE_SMEM_BYTES

    def objections(self, spec: AttentionSpec, smem_bytes: int) -> list[str]:
        reasons = unserved(spec) + p_offset_objections(self.p_offset)
        _, batch_bytes = query_batch(padded(spec.head_dim))
        if not spec.is_fp8_q and self.copied_q_bytes < batch_bytes:
            reasons.append(f"{self.copied_q_bytes} bytes for copied rows of Q: {batch_bytes} are needed")
        return reasons or super().objections(spec, smem_bytes) + self.own_objections()

    def dequant_objections(self, spec: AttentionSpec) -> list[str]:
        if self.dequant_stages:
            return [f"{self.dequant_stages} stages to dequantize: 0 are possible, as nothing is dequantized"]
        return []

    def direct_output_objections(self) -> list[str]:
        """None: outputs of S stages that alternate are direct too."""
        return []

    def swizzle_objections(self, spec: AttentionSpec) -> list[str]:
        """None: outputs are direct, and each tensor of bytes has its own swizzle."""
        return []

    def own_objections(self) -> list[str]:
        reasons = []
        if self.softmax_warpgroups == 1 and self.late_p_keys:
            reasons.append("one softmax warpgroup with two S hands P over in one piece: late_p_keys must be 0")
        if not self.direct_output:
            reasons.append("products in 8 bits have direct outputs")
        if self.two_cta or self.swap_ab or self.shared_kv_stages or self.shared_s or self.use_clc:
            reasons.append(
                "products in 8 bits go without two-CTA MMAs, swapped operands, shared stages, shared S and cluster "
                "launch control"
            )
        if self.rescale_threshold > MAX_P_EXPONENT - self.p_offset:
            reasons.append(
                f"P of up to 2^{self.p_offset + self.rescale_threshold:g} saturates: 2^{MAX_P_EXPONENT:g} is possible"
            )
        return reasons


def unserved(spec: AttentionSpec) -> list[str]:
    """What no configuration serves."""
    reasons = []
    if spec.kv != E4M3:
        reasons.append(f"keys of {spec.kv.name}: its products are of {E4M3.name}")
    for name, dim in (("head size", spec.head_dim), ("value head size", spec.head_dim_v)):
        if dim % FP8_K_BLOCK or not 64 <= dim <= MOST_DIM:
            reasons.append(
                f"{name} {dim} is not a multiple of {FP8_K_BLOCK} from 64 to {MOST_DIM}: Q of 128 rows and two stages "
                "of 128 keys and values fill shared memory"
            )
    if spec.batch_invariant:
        # Decode converts the cache to 16 bits: a row's bits would depend on how many queries its request has.
        reasons.append("batch invariance: short queries have other products than long ones")
    return reasons


def has_wide_values(spec: AttentionSpec) -> bool:
    """Whether O of 256 rows leaves no room in tensor memory for two S of 128 columns."""
    return spec.head_dim_v > 128


def wide_value_config(spec: AttentionSpec) -> Fp8DenseConfig:
    """For wide values: 128 rows of queries, one softmax warpgroup and one O. Not measured on a GPU."""
    stages = 2 if max(spec.head_dim, spec.head_dim_v) > 192 else 3
    return Fp8DenseConfig(softmax_warpgroups=1, stages=stages)


def default_fp8_config(spec: AttentionSpec) -> Fp8DenseConfig:
    """The default: not measured on a GPU."""
    if has_wide_values(spec):
        return wide_value_config(spec)
    widest = max(spec.head_dim, spec.head_dim_v)
    if widest > 192:
        # Two stages of Q, 128 KB, leave no room for two of K and V beside the statistics.
        return Fp8DenseConfig(stages=3, query_stages=1, late_p_keys=32, ex2_emulation=0, copied_q_bytes=8 << 10)
    if widest <= 64:
        return Fp8DenseConfig(stages=6, late_p_keys=32, ex2_emulation=2)
    if widest <= 128:
        return Fp8DenseConfig(stages=4, late_p_keys=32, ex2_emulation=2)
    return Fp8DenseConfig(stages=2, late_p_keys=32, ex2_emulation=0)


def many_rows_config(spec: AttentionSpec) -> Fp8DenseConfig | None:
    """For short queries whose rows are many, with keys split; None for a layer that has no such queries."""
    return packed_config(spec) if has_many_rows(spec.group) else None


def packed_config(spec: AttentionSpec) -> Fp8DenseConfig:
    """For packed heads, with keys split.

    Tiles of 128 rows, whose keys both S stages share. Memory bounds them: no exponential is emulated, and stages of K
    and V take what Q leaves of shared memory. Not measured on a GPU. Tiles of 128 keys spill 32 bytes with heads of
    128; with heads of 192, those of 96 spill 16 and those of 64 spill 8 (ptxas 13.0).
    """
    widest = max(spec.head_dim, spec.head_dim_v)
    if has_wide_values(spec):
        # S stages that alternate have an O each.
        return replace(wide_value_config(spec), ex2_emulation=0)
    if widest > 192:
        return Fp8DenseConfig(alternate=True, tile_n=64, stages=6, ex2_emulation=0, copied_q_bytes=8 << 10)
    tile_n, stages = (128, 8) if widest <= 64 else (96, 7) if widest <= 128 else (64, 8)
    copied_q_bytes = 16 << 10 if widest <= 128 else 12 << 10
    return Fp8DenseConfig(alternate=True, tile_n=tile_n, stages=stages, ex2_emulation=0, copied_q_bytes=copied_q_bytes)


def fp8_variants(spec: AttentionSpec, smem_bytes: int) -> Iterator[Fp8DenseConfig]:
    """Configurations worth a try that fit."""
    tried = itertools.product((64, 96, 128), (1, 2), (0, 2, 4), (0, 32), (False, True))
    warpgroups = 1 if has_wide_values(spec) else 2
    for tile_n, query_stages, ex2_emulation, late_p_keys, rounded_sums in tried:
        made = Fp8DenseConfig(
            softmax_warpgroups=warpgroups,
            tile_n=tile_n,
            query_stages=query_stages,
            ex2_emulation=ex2_emulation,
            late_p_keys=late_p_keys,
            rounded_sums=rounded_sums,
        )
        fitting = (replace(made, stages=stages) for stages in range(MOST_STAGES, 1, -1))
        yield from itertools.islice((one for one in fitting if not one.objections(spec, smem_bytes)), 1)
