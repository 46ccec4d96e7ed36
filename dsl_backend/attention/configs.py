# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the Triton kernels: frozen configurations with a pure default for a spec and a target."""

from dataclasses import dataclass

from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.runtime.target import Target


def power_of_2(value: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, value - 1).bit_length()


def split_dim(dim: int, first: int | None = None) -> tuple[int, int]:
    """A head size as one or two power-of-two blocks of 16 or more, whichever pads less: 80 is (64, 16).

    Args:
        first: the first block's size where something else decides it, as the latent part of absorbed MLA does.
    """
    whole = power_of_2(max(dim, 16))
    if first is None:
        first = whole if whole == dim else whole // 2
        if dim < 32 or first + max(16, power_of_2(dim - first)) >= whole:
            return whole, 0
    rest = dim - first
    return first, max(16, power_of_2(rest)) if rest else 0


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """A tile of query rows against tiles of keys.

    Attributes:
        block_m: query rows (tokens times packed heads) of a tile.
        block_n: keys of a tile.
        num_warps, num_stages: warps of a program; key tiles in flight.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Shared memory that the compiled kernel needs at most: staged key and value tiles, and the query tile."""
        row = sum(split_dim(spec.head_dim, spec.head_dim_v if spec.latent else None))
        value_row = 0 if spec.latent else sum(split_dim(spec.head_dim_v))
        # fp8 tiles are widened through shared memory: one more tile in the queries' dtype.
        widened = 2 * self.block_n * (row + value_row) if spec.is_fp8_kv else 0
        staged = self.num_stages * self.block_n * (row + value_row) * spec.kv_dtype.itemsize
        return staged + widened + 2 * self.block_m * (row + self.block_n)


def fitting(spec: AttentionSpec, target: Target, *configs: TileConfig) -> int:
    """Index of the first configuration that fits the target's shared memory; the last one where none does."""
    for index, config in enumerate(configs):
        if target.is_cpu or config.smem_bytes(spec) <= target.smem_bytes:
            return index
    return len(configs) - 1


@dataclass(frozen=True, kw_only=True)
class SplitKVConfig(TileConfig):
    """Tiles of the split-KV kernel.

    Attributes:
        num_programs: programs that share the batch's key tiles, all resident at once.
        min_share: key tiles that a program takes at least: below it, merging costs more than splitting gains.
        scan: requests whose lengths a program sums at a time.
    """

    num_programs: int
    min_share: int = 2
    scan: int = 128

    @classmethod
    def default(cls, spec: AttentionSpec, target: Target, max_query_len: int) -> "SplitKVConfig":
        """A configuration for requests of up to max_query_len queries."""
        block_m = min(64, max(16, power_of_2(max_query_len * spec.group)))
        per_sm = 1 if spec.latent else 2
        wide = spec.latent and block_m == 64
        block_n = 32 if spec.head_dim > 256 and not wide else 64 if spec.head_dim > 64 or spec.latent else 128
        shapes = [
            cls(
                block_m=block_m,
                block_n=n,
                num_warps=8 if wide else 4,
                num_stages=stages,
                num_programs=max(1, target.sm_count * programs),
            )
            for programs, n, stages in (
                (per_sm, block_n, 3),
                (per_sm, block_n, 2),
                (1, block_n, 2),
                (1, block_n // 2, 2),
                (1, 16, 2),
                (1, 16, 1),
            )
        ]
        if target.is_cpu:
            shapes = [cls(block_m=16, block_n=16, num_warps=4, num_stages=1, num_programs=4, scan=4)]
        return shapes[fitting(spec, target, *shapes)]


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(TileConfig):
    """Tiles of the prefill kernel."""

    @classmethod
    def default(cls, spec: AttentionSpec, target: Target) -> "PrefillConfig":
        if target.is_cpu:
            return cls(block_m=16, block_n=16, num_warps=4, num_stages=1)
        if spec.head_dim <= 128:
            shapes = [(128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1)]
        elif spec.head_dim <= 256:
            shapes = [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 16, 4, 1)]
        else:
            shapes = [(64, 32, 8, 2), (64, 32, 8, 1), (32, 16, 4, 2), (16, 16, 4, 1)]
        configs = [cls(block_m=m, block_n=n, num_warps=warps, num_stages=stages) for m, n, warps, stages in shapes]
        return configs[fitting(spec, target, *configs)]
