# SPDX-License-Identifier: Apache-2.0
"""The SM100 kernels of dense attention for one layer spec."""

from dataclasses import replace

from dsl_backend.attention.cute.host import DenseKernel, fake_args, rows_of
from dsl_backend.attention.cute.scheduler.tile_scheduler import row_tiles
from dsl_backend.attention.cute.sm100.dense_configs import (
    PAIR,
    ForwardConfig,
    default_config,
    default_split_config,
    few_rows_config,
)
from dsl_backend.attention.cute.sm100.dense_kernel import Forward, ForwardKey
from dsl_backend.attention.cute.sm100.swap_ab_kernel import SwappedForward
from dsl_backend.attention.cute.sm100.two_cta_kernel import PairForward
from dsl_backend.attention.spec import Batch
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target


def build(key: ForwardKey, target: Target) -> Function:
    """The compiled function: (q, keys, values, *what LayerKernel.bind adds)."""
    if target.fast_exponentials:
        key = replace(key, config=replace(key.config, polynomial=0))
    kind = PairForward if key.config.pair else SwappedForward if key.config.swapped else Forward
    return compile_kernel(kind(key), fake_args(key, *rows_of(key)), key=key, target=target)


class Prefill(DenseKernel):
    """Attention of long queries; see forward.py."""

    build = staticmethod(build)
    key_type = ForwardKey
    default = staticmethod(default_config)

    def sizes(self) -> tuple[int, int, int]:
        blocks, pack, tile_m = super().sizes()
        return blocks // PAIR * PAIR if self.config.pair else blocks, pack, tile_m

    def grid(self, batch: Batch, shortest: int) -> int:
        if not self.config.launch_control:
            return self.blocks
        # A bound: the host knows no lengths.
        requests = min(batch.num_requests, batch.num_tokens // max(1, shortest))
        return row_tiles(requests, batch.num_tokens, self.tile_m) * self.units


class SplitKV(Prefill):
    """Attention of short queries, whose key ranges are cut into equal shares; the other kernel's have few rows."""

    default = staticmethod(default_split_config)
    split = True

    def other_config(self) -> ForwardConfig | None:
        return few_rows_config(self.spec, self.target.smem_bytes)

    def is_for_other(self, batch: Batch, longest: int) -> bool:
        return self.other is not None and longest * self.pack <= self.other.tile_m
