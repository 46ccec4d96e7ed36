# SPDX-License-Identifier: Apache-2.0
"""The SM100 kernels of dense attention for one layer spec."""

from dataclasses import replace

from dsl_backend.attention.cute.fake_args import fake_args, fake_dense_tensors
from dsl_backend.attention.cute.host import DenseKernel
from dsl_backend.attention.cute.sm100.dense_configs import (
    CTA_PAIR,
    default_config,
    default_split_config,
)
from dsl_backend.attention.cute.sm100.dense_kernel import DenseForward, DenseKey
from dsl_backend.attention.cute.sm100.fp8_configs import default_fp8_config
from dsl_backend.attention.cute.sm100.fp8_kernel import Fp8DenseForward, Fp8Key
from dsl_backend.attention.cute.sm100.swap_ab_kernel import SwapABForward
from dsl_backend.attention.cute.sm100.two_cta_kernel import TwoCtaForward
from dsl_backend.attention.spec import Batch
from dsl_backend.attention.variants import SM100_DECODE, SM100_FP8_PREFILL, SM100_PREFILL
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target


def build(key: DenseKey, target: Target) -> Function:
    """The compiled function. It takes DenseTensors, then what LayerKernel.bind adds."""
    if target.fast_exponentials:
        key = replace(key, config=replace(key.config, ex2_emulation=0))
    kind = TwoCtaForward if key.config.two_cta else SwapABForward if key.config.swap_ab else DenseForward
    return compile_kernel(kind(key), fake_args(key, fake_dense_tensors(key)), key=key, target=target)


class SplitKV(DenseKernel):
    """Attention of short queries, whose key ranges are split; and of prompts whose query tiles are too few."""

    build = staticmethod(build)
    key_type = DenseKey
    default = staticmethod(default_split_config)
    variants = staticmethod(SM100_DECODE)
    split = True


class Prefill(DenseKernel):
    """Attention of long queries: key ranges are not split."""

    build = staticmethod(build)
    key_type = DenseKey
    default = staticmethod(default_config)
    variants = staticmethod(SM100_PREFILL)
    extend_type = SplitKV

    def sizes(self) -> tuple[int, int, int]:
        num_ctas, pack_gqa, tile_m = super().sizes()
        return num_ctas // CTA_PAIR * CTA_PAIR if self.config.two_cta else num_ctas, pack_gqa, tile_m

    def grid(self, batch: Batch, min_seqlen_q: int) -> int:
        if not self.config.use_clc:
            return self.num_ctas
        # An upper bound, since the host does not know the lengths.
        requests = min(batch.num_requests, batch.num_tokens // max(1, min_seqlen_q))
        row_tiles = requests + -(-batch.num_tokens // self.tile_m)
        return row_tiles * self.head_blocks


def build_fp8(key: Fp8Key, target: Target) -> Function:
    """The compiled function of the kernel with e4m3 products; it takes the same."""
    if target.fast_exponentials:
        key = replace(key, config=replace(key.config, ex2_emulation=0))
    return compile_kernel(Fp8DenseForward(key), fake_args(key, fake_dense_tensors(key)), key=key, target=target)


class Fp8Prefill(DenseKernel):
    """Attention of long queries with e4m3 products; see fp8_kernel.py."""

    build = staticmethod(build_fp8)
    key_type = Fp8Key
    default = staticmethod(default_fp8_config)
    variants = staticmethod(SM100_FP8_PREFILL)
