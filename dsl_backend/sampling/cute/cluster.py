# SPDX-License-Identifier: Apache-2.0
"""The CTAs of a cluster: barriers and distributed shared memory."""

import cutlass
from cutlass import cute
from cutlass.cutlass_dsl import dsl_user_op

from dsl_backend.primitives.barrier import cta_barrier

# Type suffixes of ld.shared::cluster and st.shared::cluster.
PTX_TYPES = {cutlass.Uint32: "u32", cutlass.Uint64: "u64", cutlass.Float32: "f32"}


@dsl_user_op
def load_peer_smem(pointer, dtype, peer, *, loc=None, ip=None):
    """Load from the same shared memory address of another CTA of the cluster.

    Args:
        dtype: Uint32, Uint64 or Float32; pointers do not say whether their integers have a sign.
        peer: rank of the other CTA.
    """
    peer_pointer = cute.arch.map_dsmem_ptr(pointer, peer, loc=loc, ip=ip)
    value = cute.arch.inline_ptx(
        f"ld.shared::cluster.{PTX_TYPES[dtype]} {{$w0}}, [{{$r0}}];",
        write_only_types=[dtype],
        read_only_args=[cutlass.Int32(peer_pointer.toint(loc=loc, ip=ip))],
        loc=loc,
        ip=ip,
    )
    # inline_ptx returns signed integers, whatever type is asked for.
    return dtype(value)


@dsl_user_op
def store_peer_smem(value, pointer, peer, *, loc=None, ip=None):
    """Store a Uint32, Uint64 or Float32 at the same shared memory address of another CTA of the cluster."""
    peer_pointer = cute.arch.map_dsmem_ptr(pointer, peer, loc=loc, ip=ip)
    cute.arch.inline_ptx(
        f"st.shared::cluster.{PTX_TYPES[type(value)]} [{{$r0}}], {{$r1}};",
        read_only_args=[cutlass.Int32(peer_pointer.toint(loc=loc, ip=ip)), value],
        loc=loc,
        ip=ip,
    )


class Cluster:
    """The CTAs that share a row: one along the grid's y dimension for each rank."""

    def __init__(self, ctas: int):
        self.ctas = ctas

    def rank(self):
        """This CTA's rank in its cluster."""
        return cute.arch.block_idx()[1]

    @cute.jit
    def barrier(self):
        """Synchronize all threads of the cluster, and make their writes to shared memory visible to each other."""
        if cutlass.const_expr(self.ctas > 1):
            cute.arch.sync_warp()
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cta_barrier()

    @cute.jit
    def wait_for_peer_reads(self):
        """Wait until the other CTAs have read this CTA's shared memory: it is gone once the CTA exits."""
        if cutlass.const_expr(self.ctas > 1):
            self.barrier()

    @cute.jit
    def share(self, value, sTensor: cute.Tensor, index):
        """Write one value of this CTA to the shared memory of every CTA. It is there after the next barrier."""
        thread = cute.arch.thread_idx()[0]
        if cutlass.const_expr(self.ctas > 1):
            if thread < self.ctas:
                store_peer_smem(value, sTensor.iterator + index, thread)
        elif thread == 0:
            sTensor[index] = value

    @cute.jit
    def load(self, sTensor: cute.Tensor, index, rank, dtype: cutlass.Constexpr):
        """An element of the tensor at the same shared memory address of another CTA."""
        if cutlass.const_expr(self.ctas > 1):
            return load_peer_smem(sTensor.iterator + index, dtype, rank)
        return dtype(sTensor[index])
