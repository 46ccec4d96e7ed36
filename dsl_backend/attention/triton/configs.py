# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the Triton kernels: frozen configurations with a pure default for a spec and a target."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.runtime.target import Target


def power_of_2(value: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, value - 1).bit_length()


def split_dim(dim: int, first: int | None = None, narrowest: int = 16) -> tuple[int, int]:
    """A head size as two power-of-two blocks where they fill up, as 80 is (64, 16); else as one that is padded.

    A second block that was padded gave wrong results and faults under wgmma (Triton 3.6.0, H200; head sizes 72, 88 and
    136), a first one never did.

    Args:
        first: the first block's size where something else decides it, as the latent part of absorbed MLA does.
        narrowest: the least size of a block.
    """
    whole = power_of_2(max(dim, narrowest))
    if first is None:
        rest = dim - whole // 2
        return (whole // 2, rest) if narrowest <= rest < whole // 2 and rest == power_of_2(rest) else (whole, 0)
    rest = dim - first
    return first, max(narrowest, power_of_2(rest)) if rest else 0


def key_blocks(spec: AttentionSpec) -> tuple[int, int]:
    """The blocks of a query and key row; the first is the latent where V is a part of K."""
    return split_dim(spec.head_dim, spec.head_dim_v if spec.mla else None, narrowest_block(spec))


def value_blocks(spec: AttentionSpec) -> tuple[int, int]:
    """The blocks of a value row."""
    return split_dim(spec.head_dim_v, None, narrowest_block(spec))


def narrowest_block(spec: AttentionSpec) -> int:
    """64 for fp8: blocks 32 wide came out wrong or faulted (Triton 3.6.0, H200; head sizes 88 and 160)."""
    return 64 if spec.is_quantized_kv else 16


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

    @property
    def programs_per_sm(self) -> int:
        """Programs that must be resident on an SM side by side."""
        return 1

    def smem_bytes(self, spec: AttentionSpec, target: Target) -> int:
        """Shared memory of a program: key and value tiles in flight, and the query tile.

        The tile being computed on needs a buffer where wgmma or tcgen05 reads it from shared memory; otherwise it is in
        registers, and the weights pass through shared memory. Compiled kernels agree to the byte for power-of-two head
        sizes (Triton 3.6.0, SM80 and SM90); others may need the weights' part on top, and Triton 3.9.0 less of it.
        """
        row = sum(key_blocks(spec))
        value_row = 0 if spec.mla else sum(value_blocks(spec))
        if not target.native_bf16:
            # Triton multiplies without tensor cores there: float32 operands pass through shared memory, none in flight.
            return 4 * (self.block_m * (row + self.block_n) + self.block_n * max(row, value_row))
        tensor_memory = target.tcgen05 and self.block_m >= 64
        # fp8 tiles are widened on their way to tcgen05: one stage less waits for it.
        from_shared = (target.wgmma and self.block_m >= 64) or (tensor_memory and not spec.is_quantized_kv)
        tiles = self.num_stages if from_shared else max(1, self.num_stages - 1)
        staged = tiles * self.block_n * spec.kv.row_bytes(row + value_row)
        # The latent of an fp8 cache is both operands, widened once for both.
        widened = 2 * self.block_n * (row + value_row) if spec.is_quantized_kv and (spec.mla or tensor_memory) else 0
        if spec.kv.nvfp4 and not tensor_memory:
            # A thread widens whole blocks; the products take other elements of it, of keys or of values.
            widened = 2 * self.block_n * max(row, value_row)
        # Triton 3.6.0 needs as much more as copies of two latent tiles take; 3.9.0 does not.
        copied = 4 * self.block_n * spec.head_dim_v if spec.mla and tensor_memory and not spec.is_fp8_kv else 0
        return staged + widened + copied + 2 * self.block_m * (row + self.block_n)

    def fits(self, spec: AttentionSpec, target: Target) -> bool:
        """Whether the programs of an SM fit its shared memory."""
        return self.smem_bytes(spec, target) * self.programs_per_sm <= target.smem_bytes


Config = TypeVar("Config", bound=TileConfig)


def first_fitting(spec: AttentionSpec, target: Target, configs: Sequence[Config]) -> Config:
    """The first configuration that fits the target's shared memory; the last one where none does."""
    return next((config for config in configs if config.fits(spec, target)), configs[-1])


@dataclass(frozen=True, kw_only=True)
class SplitKVConfig(TileConfig):
    """Tiles of the split-KV kernel.

    Attributes:
        num_programs: programs that share the batch's key tiles.
        resident: of these on each SM: all of them run at once.
        min_split_tiles: least number of key tiles for a program; with fewer, combining costs more than splitting gains.
        scan: requests whose lengths a program sums at a time.
    """

    num_programs: int
    ctas_per_sm: int = 1
    min_split_tiles: int = 2
    scan: int = 128

    @property
    def programs_per_sm(self) -> int:
        return self.ctas_per_sm

    @classmethod
    def default(cls, spec: AttentionSpec, target: Target, max_query_len: int) -> "SplitKVConfig":
        """A configuration for requests of up to max_query_len queries."""
        if target.is_cpu:
            return cls(block_m=16, block_n=16, num_warps=4, num_stages=1, num_programs=4, min_split_tiles=2, scan=4)
        block_m = min(64, max(16, power_of_2(max_query_len * spec.group)))
        config = first_fitting(spec, target, cls.choices(spec, target, block_m))
        # On other chips, what the estimate puts above the limit was seen to fit.
        while block_m > 8 and not target.native_bf16 and not config.fits(spec, target):
            block_m //= 2
            config = first_fitting(spec, target, cls.choices(spec, target, block_m))
        return config

    @classmethod
    def choices(cls, spec: AttentionSpec, target: Target, block_m: int) -> list["SplitKVConfig"]:
        """Configurations for tiles of that many rows, best first."""
        if not spec.mla and target.tcgen05 and block_m == 64 and spec.head_dim > 128:
            # The accumulators of one program fill tensor memory.
            shapes = [(64, 4, 2, 1), (32, 4, 2, 1), (16, 4, 2, 1)]
        elif not spec.mla:
            block_n = 128 if spec.head_dim <= 64 else 64
            shapes = [(block_n, 4, 3, 2), (block_n, 4, 2, 2), (block_n // 2, 4, 2, 2), (32, 4, 2, 1), (16, 4, 2, 1)]
        elif block_m <= 16:
            shapes = [(64, 8, 3, 1), (64, 8, 2, 1), (32, 4, 2, 1), (16, 4, 2, 1), (16, 4, 1, 1)]
        elif block_m == 32:
            shapes = [(64, 8, 3, 1), (64, 8, 2, 1), (32, 8, 2, 1), (16, 8, 2, 1), (16, 4, 1, 1)]
        else:
            shapes = [(32, 8, 3, 1), (32, 8, 2, 1), (16, 8, 2, 1), (16, 4, 1, 1)]
        return [
            cls(
                block_m=block_m,
                block_n=n,
                num_warps=warps,
                num_stages=stages,
                num_programs=target.sm_count * ctas_per_sm,
                ctas_per_sm=ctas_per_sm,
            )
            for n, warps, stages, ctas_per_sm in shapes
        ]


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(TileConfig):
    """Tiles of the prefill kernel."""

    @classmethod
    def default(cls, spec: AttentionSpec, target: Target) -> "PrefillConfig":
        if target.is_cpu:
            return cls(block_m=16, block_n=16, num_warps=4, num_stages=1)
        if spec.head_dim <= 128:
            shapes = [(128, 128, 8, 2), (128, 64, 8, 2), (128, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1)]
        elif spec.head_dim <= 256:
            shapes = [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 16, 4, 1)]
        else:
            shapes = [(64, 32, 8, 2), (64, 32, 8, 1), (32, 16, 4, 2), (16, 16, 4, 1)]
        configs = [cls(block_m=m, block_n=n, num_warps=warps, num_stages=stages) for m, n, warps, stages in shapes]
        return first_fitting(spec, target, configs)


# Of partial results in batch-invariant mode, whatever the batch.
SCRATCH_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True)
class BatchInvariantConfig(TileConfig):
    """Tiles of the batch-invariant kernel. The spec and the target decide them: a batch must not.

    Attributes:
        tiles_per_split: key tiles of a split.
        num_programs: programs that share the batch's splits.
        resident: of these on each SM.
        split_factor: a request's splits are work tiles of their own where a row tile has more key tiles than an even
            share of the batch's over this. Changes no result.
        scratch_bytes: for partial results. Changes no result.
        scan: requests whose lengths a program sums at a time.
    """

    tiles_per_split: int
    num_programs: int
    ctas_per_sm: int = 1
    split_factor: int = 4
    scratch_bytes: int = SCRATCH_BYTES
    scan: int = 128

    @property
    def programs_per_sm(self) -> int:
        return self.ctas_per_sm

    @classmethod
    def default(cls, spec: AttentionSpec, target: Target) -> "BatchInvariantConfig":
        if target.is_cpu:
            return cls(
                block_m=16,
                block_n=16,
                num_warps=4,
                num_stages=1,
                tiles_per_split=2,
                num_programs=4,
                scratch_bytes=1 << 20,
                scan=4,
            )
        # Twice 64 registers a thread are for accumulators: a split's, and that of the splits after it.
        width = sum(value_blocks(spec))
        widest = 64 if width <= 256 else 32
        block_m = min(32, max(16, power_of_2(spec.group))) if spec.mla else widest
        config = first_fitting(spec, target, cls.choices(spec, target, block_m, width))
        # On other chips, what the estimate puts above the limit was seen to fit.
        while block_m > 8 and not target.native_bf16 and not config.fits(spec, target):
            block_m //= 2
            config = first_fitting(spec, target, cls.choices(spec, target, block_m, width))
        return config

    @classmethod
    def choices(cls, spec: AttentionSpec, target: Target, block_m: int, width: int) -> list["BatchInvariantConfig"]:
        """Configurations for tiles of that many rows of `width` value elements, best first."""
        if width <= 128:
            shapes = [(64, 4, 3, 2), (64, 4, 2, 2), (32, 4, 2, 2), (32, 4, 2, 1), (16, 4, 2, 1), (16, 4, 1, 1)]
        else:
            shapes = [(64, 8, 3, 1), (64, 8, 2, 1), (32, 8, 2, 1), (16, 8, 2, 1), (16, 8, 1, 1)]
        # One long request of few key heads has fewer row tiles than there are SMs.
        split_keys = 512 if spec.heads_kv >= 4 else 256
        return [
            cls(
                block_m=block_m,
                block_n=n,
                num_warps=warps,
                num_stages=stages,
                tiles_per_split=split_keys // n,
                num_programs=target.sm_count * ctas_per_sm,
                ctas_per_sm=ctas_per_sm,
            )
            for n, warps, stages, ctas_per_sm in shapes
        ]
