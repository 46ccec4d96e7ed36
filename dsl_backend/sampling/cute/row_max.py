# SPDX-License-Identifier: Apache-2.0
"""The maximum of a row, of each of its groups of threads, and its token id."""

from functools import partial

import cutlass
from cutlass import cute

from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.cute.cluster import Cluster, store_peer_smem
from dsl_backend.sampling.cute.row import Row, RowReader, write_token
from dsl_backend.sampling.cute.scan import WARP, load_smem_vector
from dsl_backend.sampling.cute.smem import SharedStorage

NO_ID = (1 << 31) - 1


class RowMax:
    """The groups are up to 256 sets of lanes: their maxima bound the row's k-th largest logit from below."""

    def __init__(self, config: ClusterConfig, cluster: Cluster, reader: RowReader):
        self.threads, self.groups, self.lanes_per_group = config.threads, config.groups, config.lanes_per_group
        self.cluster, self.reader = cluster, reader

    @cute.jit
    def share_group_max(self, smem: SharedStorage, thread_max):
        """Write the maximum logit of every group to the shared memory of every CTA."""
        group_max = cute.arch.warp_reduction(thread_max, cute.arch.fmax, threads_in_group=self.lanes_per_group)
        thread = cute.arch.thread_idx()[0]
        group = (self.cluster.rank() * self.threads + thread) // self.lanes_per_group
        if cutlass.const_expr(self.cluster.ctas > 1):
            # The shared memory of a CTA may be written once the CTA runs.
            cute.arch.cluster_wait()
        if thread % self.lanes_per_group == 0:
            if cutlass.const_expr(self.cluster.ctas > 1):
                for peer in cutlass.range_constexpr(self.cluster.ctas):
                    store_peer_smem(group_max, smem.sGroupMax.iterator + group, peer)
            else:
                smem.sGroupMax[group] = group_max
        self.cluster.barrier()

    @cute.jit
    def reduce(self, smem: SharedStorage):
        """(the row's maximum logit, the least group maximum that is above -inf), in every warp."""
        row_max, lowest = -cutlass.Float32.inf, cutlass.Float32.inf
        count = cutlass.const_expr(self.groups // WARP)
        rGroupMax = load_smem_vector(smem.sGroupMax, cute.arch.lane_idx() * count, count)
        for i in cutlass.range_constexpr(count):
            group_max = rGroupMax[i]
            row_max = cute.arch.fmax(row_max, group_max)
            lowest = cute.arch.fmin(lowest, group_max) if group_max > -cutlass.Float32.inf else lowest
        return (
            cute.arch.warp_reduction(row_max, cute.arch.fmax),
            cute.arch.warp_reduction(lowest, cute.arch.fmin),
        )

    @cute.jit
    def argmax(self, smem: SharedStorage, row: Row, thread_max):
        """Write the lowest token id of the maximum, and return it in the first warp of the first CTA."""
        self.reader.for_each_logit_of(
            smem,
            row,
            thread_max,
            lambda x: x == row.row_max,
            partial(self.take_lower_id, smem, row),
        )
        self.cluster.barrier()
        lane = cute.arch.lane_idx()
        token_id = cutlass.Uint32(NO_ID)
        if self.cluster.rank() == 0 and cute.arch.warp_idx() == 0:
            if lane < self.cluster.ctas:
                token_id = self.cluster.load(smem.sCount, 1, lane, cutlass.Uint32)
            token_id = cute.arch.warp_reduction(token_id, cutlass.min)
            if lane == 0:
                write_token(row, token_id)
        self.cluster.wait_for_peer_reads()
        return cutlass.Int32(token_id)

    @cute.jit
    def take_lower_id(self, smem: SharedStorage, row: Row, x, token_id):
        if x == row.row_max:
            cute.arch.atomic_min(smem.sCount.iterator + 1, cutlass.Uint32(token_id), sem="relaxed", scope="cta")
        return cutlass.Boolean(False)
