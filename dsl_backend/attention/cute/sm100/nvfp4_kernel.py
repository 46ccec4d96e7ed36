# SPDX-License-Identifier: Apache-2.0
"""Attention forward for SM100 over an NVFP4 cache: elements of four bits, and a scale in e4m3 for each 16 of them.

The kernel is that of an fp8 cache (dense_kernel.py): TMA fills stages of their own with what is stored, a warpgroup
dequantizes them to the 16-bit stages that the MMAs read. A stage has the scales of its keys behind their elements.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.attention.cute.args import DenseLoads, Nvfp4Loads, Nvfp4Tensors
from dsl_backend.attention.cute.dequant import Nvfp4DequantWarps, fp8_tma_box
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, WorkTilePipeline
from dsl_backend.attention.cute.sm100.dense_kernel import DenseForward
from dsl_backend.attention.cute.sm100.kv_stages import SeparateKVLoadWarp
from dsl_backend.attention.cute.tiles import Nvfp4Stages
from dsl_backend.quant.format import KV_BLOCK


class Nvfp4LoadWarp(SeparateKVLoadWarp):
    """Loads the elements of K and V, and their scales into the same stage."""

    def __init__(
        self,
        kernel: Any,
        work_pipeline: WorkTilePipeline,
        barriers: Any,
        loads: Nvfp4Loads,
        sQ: cute.Tensor,
        k_stages: Nvfp4Stages,
        v_stages: Nvfp4Stages,
        requests: Requests,
    ) -> None:
        elements: Any = DenseLoads(*loads[:6])
        super().__init__(kernel, work_pipeline, barriers, elements, sQ, k_stages.elements, v_stages.elements, requests)
        self.tma_atom_k_scales, self.mKScales = loads.tma_atom_k_scales, loads.mKScales
        self.tma_atom_v_scales, self.mVScales = loads.tma_atom_v_scales, loads.mVScales
        self.dims, self.dims_v = kernel.dims, kernel.dims_v
        self.sKScales = self.in_boxes(k_stages.scales, self.box // KV_BLOCK, self.dims)
        self.sVScales = self.in_boxes(v_stages.scales, self.box // KV_BLOCK, self.dims_v)

    def atoms(self) -> tuple[cute.CopyAtom, ...]:
        return (*super().atoms(), self.tma_atom_k_scales, self.tma_atom_v_scales)

    @cute.jit
    def fill_keys(self, work: WorkTile, n_block: cutlass.Int32, pages: cutlass.Int32, stage: cutlass.Int32):
        super().fill_keys(work, n_block, pages, stage)
        full, rows = self.barriers.k_full + stage, self.box // KV_BLOCK
        self.load_tile(
            self.tma_atom_k_scales,
            self.mKScales,
            self.sKScales,
            self.dims,
            range(1),
            work,
            n_block,
            pages,
            stage,
            full,
            rows,
        )

    @cute.jit
    def fill_values(self, work: WorkTile, n_block: cutlass.Int32, pages: cutlass.Int32, stage: cutlass.Int32):
        super().fill_values(work, n_block, pages, stage)
        full, rows = self.barriers.v_full + stage, self.box // KV_BLOCK
        self.load_tile(
            self.tma_atom_v_scales,
            self.mVScales,
            self.sVScales,
            self.dims_v,
            range(1),
            work,
            n_block,
            pages,
            stage,
            full,
            rows,
        )


class Nvfp4Forward(DenseForward):
    """As DenseForward; the cache is NVFP4."""

    load_warp = Nvfp4LoadWarp
    dequant_warps = Nvfp4DequantWarps

    def loads(self, tensors: Nvfp4Tensors) -> Any:
        """`Nvfp4Loads`."""
        *found, _, _ = super().loads(tensors)
        for scales, width in ((tensors.k_scales, self.dims), (tensors.v_scales, self.dims_v)):
            view = cute.make_tensor(scales.iterator, cute.select(scales.layout, mode=[1, 3, 2, 0]))
            found += cpasync.make_tiled_tma_atom(self.load_op(), view, *fp8_tma_box(self.box // KV_BLOCK, width))
        return Nvfp4Loads(*found)
