# SPDX-License-Identifier: Apache-2.0
"""The SM100 kernels of dense attention for one layer spec."""

from dataclasses import replace
from typing import Any

import cutlass
import torch

from dsl_backend.attention.cute.args import Nvfp4Tensors
from dsl_backend.attention.cute.fake_args import fake_args, fake_dense_tensors, fake_pages, fake_rows
from dsl_backend.attention.cute.host import Alignment, DenseKernel, FewOrManyRows, ManyRows
from dsl_backend.attention.cute.sizes import widened_tokens
from dsl_backend.attention.cute.sm100.dense_configs import (
    CTA_PAIR,
    default_config,
    default_split_config,
)
from dsl_backend.attention.cute.sm100.dense_kernel import DenseForward, DenseKey
from dsl_backend.attention.cute.sm100.fp8_configs import default_fp8_config
from dsl_backend.attention.cute.sm100.fp8_kernel import Fp8DenseForward, Fp8Key
from dsl_backend.attention.cute.sm100.nvfp4_kernel import Nvfp4Forward
from dsl_backend.attention.cute.sm100.swap_ab_kernel import SwapABForward
from dsl_backend.attention.cute.sm100.two_cta_kernel import TwoCtaForward
from dsl_backend.attention.protocol import Misaligned, Operands
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.attention.variants import SM100_DECODE, SM100_FP8_DECODE, SM100_FP8_PREFILL, SM100_PREFILL
from dsl_backend.quant.format import KV_BLOCK, NVFP4_KV
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


def build(key: DenseKey, target: Target) -> Function:
    """The compiled function. It takes DenseTensors, then what LayerKernel.bind adds."""
    if target.fast_exponentials:
        key = replace(key, config=replace(key.config, ex2_emulation=0))
    tensors = fake_nvfp4_tensors(key) if key.kv.nvfp4 else fake_dense_tensors(key)
    return compile_kernel(kind_of(key)(key), fake_args(key, tensors), key=key, target=target)


def kind_of(key: DenseKey) -> type[DenseForward]:
    """The class of the kernel."""
    if isinstance(key, Fp8Key):
        return Fp8DenseForward
    if key.kv.nvfp4:
        return Nvfp4Forward
    return TwoCtaForward if key.config.two_cta else SwapABForward if key.config.swap_ab else DenseForward


def fake_nvfp4_tensors(key: DenseKey) -> Nvfp4Tensors:
    q, heads, (pages, page_size) = fake_dense_tensors(key).q, key.heads_kv, fake_pages(key)
    dims = key.head_dim, key.head_dim_v
    elements = [fake_rows(cutlass.Uint8, dim // 2, heads, pages, page_size) for dim in dims]
    scales = [fake_rows(cutlass.Uint8, dim, heads, pages, page_size // KV_BLOCK) for dim in dims]
    return Nvfp4Tensors(q, *elements, *scales)


def nvfp4_rows(name: str, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements and scales of NVFP4 keys or values as `Nvfp4Tensors` has them. Raises Misaligned if TMA cannot."""
    elements, scales = NVFP4_KV.parts(pages)
    count, tokens, heads, width = scales.shape
    if heads > 1 and scales.stride(2) != tokens * width:
        raise Misaligned(
            f"{name} have strides {pages.stride()}: the tokens of a head must follow one another in a page of NVFP4 "
            f"(vLLM's layout HND)"
        )
    shape, dim = (count, tokens // KV_BLOCK, heads, width * KV_BLOCK), width * KV_BLOCK
    return elements, scales.as_strided(shape, (scales.stride(0), dim, tokens * width, 1), scales.storage_offset())


class QuantizedTensors(DenseKernel):
    """Launches that pass an NVFP4 cache in parts."""

    def __init__(self, spec: AttentionSpec, target: Target, workspace: Workspace, config: Any = None) -> None:
        super().__init__(spec, target, workspace, config)
        key = self.key(False, None)
        self.alignment = Alignment(head_steps=kind_of(key)(key).page_boxes)

    def tensors(self, operands: Operands) -> Any:
        if not self.spec.kv.nvfp4:
            return super().tensors(operands)
        keys, k_scales = nvfp4_rows("keys", operands.keys)
        values, v_scales = nvfp4_rows("values", operands.values)
        (q,) = self.queries(operands.q)
        self.alignment.check(("q", "keys", "values", "out"), (q, keys, values, operands.out))
        return Nvfp4Tensors(q, keys, values, k_scales, v_scales)


class SplitKV(QuantizedTensors):
    """Attention of short queries, whose key ranges are split; and of prompts whose query tiles are too few."""

    build = staticmethod(build)
    key_type = DenseKey
    default = staticmethod(default_split_config)
    variants = staticmethod(SM100_DECODE)
    split = True


class Prefill(QuantizedTensors):
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


class Fp8SplitKV(ManyRows):
    """Short queries of many rows with e4m3 products."""

    build = staticmethod(build)
    key_type = Fp8Key
    default = staticmethod(default_fp8_config)
    variants = staticmethod(SM100_FP8_DECODE)


class Fp8Prefill(DenseKernel):
    """Attention of long queries with e4m3 products; see fp8_kernel.py."""

    build = staticmethod(build)
    key_type = Fp8Key
    default = staticmethod(default_fp8_config)
    variants = staticmethod(SM100_FP8_PREFILL)
    extend_type = Fp8SplitKV
    takes_short_queries = False


class WidenedOrFp8SplitKV(FewOrManyRows, SplitKV):
    """Short queries of layers whose long ones have e4m3 products."""

    variants = staticmethod(SM100_FP8_DECODE)
    other_type = Fp8SplitKV


def fp8_decode(spec: AttentionSpec, target: Target, workspace: Workspace) -> DenseKernel:
    """The kernel for short queries: where the heads of one token are many rows, for these alone."""
    return (WidenedOrFp8SplitKV if widened_tokens(spec.group) else Fp8SplitKV)(spec, target, workspace)
