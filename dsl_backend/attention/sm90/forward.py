# SPDX-License-Identifier: Apache-2.0
"""Attention forward for SM90: one warp finds work, one loads, one to three warpgroups multiply.

A block stays for the whole launch and takes tile after tile. K and V tiles pass through rings of buffers that tensor
copies fill; scores and weights stay in registers (FlashAttention-3: Shah et al., 2024). A tile's query rows are tokens
of one head, or tokens times the heads that share its keys.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from dsl_backend.attention.parts.load import Loader
from dsl_backend.attention.parts.merge import Merge
from dsl_backend.attention.parts.schedule import Requests
from dsl_backend.attention.parts.scores import Scoring
from dsl_backend.attention.parts.sizes import WARPGROUP
from dsl_backend.attention.parts.tiles import LayerKey, TiledKernel
from dsl_backend.attention.parts.work import SLOTS, Mailbox
from dsl_backend.attention.sm90.configs import REGISTERS, ForwardConfig
from dsl_backend.attention.sm90.multiply import Multiplier

LOAD_WARP, SCHEDULE_WARP = 0, 1


@dataclass(frozen=True, kw_only=True)
class ForwardKey(LayerKey):
    """All that the kernel's code depends on."""

    config: ForwardConfig


class Barriers(NamedTuple):
    """Pairs of mbarrier arrays: full ones say that a buffer was written, empty ones that it was read."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    v_full: cute.Pointer
    v_empty: cute.Pointer
    work_full: cute.Pointer
    work_empty: cute.Pointer


class Forward(TiledKernel):
    """out = softmax(q k^T) v for the requests of a batch; see `api.run` for the operands."""

    def __init__(self, key: ForwardKey):
        super().__init__(key, key.config)
        self.most_registers, self.least_registers = REGISTERS[self.config.groups]
        if self.config.resident > 1:
            self.most_registers, self.least_registers = 216, 24

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        keys: cute.Tensor,
        values: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        starts: cute.Tensor,
        lengths: cute.Tensor,
        table: cute.Tensor | None,
        packed_starts: cute.Tensor | None,
        causal: cute.Tensor | None,
        sinks: cute.Tensor | None,
        slopes: cute.Tensor | None,
        partials: cute.Tensor | None,
        merges: cute.Tensor | None,
        scale: cutlass.Float32,
        softcap: cutlass.Float32,
        left: cutlass.Int32,
        right: cutlass.Int32,
        shortest: cutlass.Int32,
        longest: cutlass.Int32,
        blocks: cutlass.Int32,
        rows: cutlass.Int32,
        stream,
    ):
        key, config = self.key, self.config
        product = hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            (config.groups, 1, 1),
            (64, self.tile_n),
        )
        weighing = hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            cutlass.Float32,
            (config.groups, 1, 1),
            (64, self.dims_v),
            warpgroup.OperandSource.RMEM,
        )
        q_layout = self.staged(self.tile_m, self.dims, config.query_stages)
        k_layout = self.staged(self.tile_n, self.dims, config.stages)
        v_layout = self.staged(self.tile_n, self.dims_v, config.stages)
        out_layout = self.staged(self.tile_m, self.dims_v, config.query_stages)
        (q_load, mQ), (k_load, mK), (v_load, mV) = self.copies(q, keys, values)
        scoring = Scoring(scale, softcap, sinks, slopes)
        self.kernel(
            product,
            weighing,
            q_load,
            mQ,
            k_load,
            mK,
            v_load,
            mV,
            q_layout,
            k_layout,
            v_layout,
            out_layout,
            out,
            lse,
            partials,
            merges,
            Requests(starts, lengths, table, packed_starts, causal, left, right, shortest, longest),
            scoring,
        ).launch(
            grid=(blocks, 1, 1),
            block=(config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=config.resident,
            preferred_smem_carveout=100,
        )
        if cutlass.const_expr(key.split):
            merge = Merge(key, self.tile_m, self.dims_v)
            merge.kernel(partials, merges, out, lse, scoring).launch(
                grid=(blocks, rows, 1), block=(merge.threads, 1, 1), stream=stream, use_pdl=True
            )

    @cute.kernel
    def kernel(
        self,
        product: cute.TiledMma,
        weighing: cute.TiledMma,
        q_load: cute.CopyAtom,
        mQ: cute.Tensor,
        k_load: cute.CopyAtom,
        mK: cute.Tensor,
        v_load: cute.CopyAtom,
        mV: cute.Tensor,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        out_layout: cute.ComposedLayout,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        partials: cute.Tensor | None,
        merges: cute.Tensor | None,
        requests: Requests,
        scoring: Scoring,
    ):
        config = self.config
        if cutlass.const_expr(self.key.split):
            # The merge kernel may take its place beside this one, and waits there.
            cute.arch.griddepcontrol_launch_dependents()
        allocator = cutlass.utils.SmemAllocator()
        places = config.query_stages * self.tile_m * max(self.dims, self.dims_v)
        q_place = allocator.allocate(places * 2, byte_alignment=1024)
        sQ = self.swizzled(q_place, q_layout)
        sOut = self.swizzled(q_place, out_layout)
        sK = allocator.allocate_tensor(self.dtype, k_layout.outer, byte_alignment=1024, swizzle=k_layout.inner)
        sV = allocator.allocate_tensor(self.dtype, v_layout.outer, byte_alignment=1024, swizzle=v_layout.inner)
        items = allocator.allocate_tensor(cutlass.Int32, Mailbox.layout(), byte_alignment=64)
        sizes = [config.query_stages] * 2 + [config.stages] * 4 + [SLOTS] * 2
        barriers = Barriers(*(allocator.allocate_array(cutlass.Int64, size) for size in sizes))

        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                warps = config.groups * WARPGROUP // 32
                # A loading warp fills by bytes; a math warp empties by one lane. The mailbox has the load warp as well.
                for pointer, size, count in zip(
                    barriers, sizes, [1, warps, 1, warps, 1, warps, 1, warps + 1], strict=True
                ):
                    for i in cutlass.range_constexpr(size):
                        cute.arch.mbarrier_init(pointer + i, count)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        mailbox = Mailbox(items, barriers.work_full, barriers.work_empty)
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(self.least_registers)
            if warp == LOAD_WARP:
                Loader(self, mailbox, barriers, q_load, mQ, sQ, k_load, mK, sK, v_load, mV, sV, requests).run()
            if warp == SCHEDULE_WARP:
                self.schedule(mailbox, requests, merges).run()
        else:
            cute.arch.setmaxregister_increase(self.most_registers)
            Multiplier(
                self,
                mailbox,
                product,
                weighing,
                barriers,
                sQ,
                sK,
                sV,
                sOut,
                out,
                lse,
                partials,
                requests,
                scoring,
                thread - WARPGROUP,
            ).run()
