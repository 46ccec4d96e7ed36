# SPDX-License-Identifier: Apache-2.0
"""What the threads of a block and the blocks of a cluster do together: barriers, sums, running sums, reads of peers."""

import cutlass
from cutlass import cute
from cutlass.cutlass_dsl import dsl_user_op

WARP = 32
# PTX's names of what peers read of each other.
PEER_TYPES = {cutlass.Uint32: "u32", cutlass.Uint64: "u64", cutlass.Float32: "f32"}


def add(a, b):
    return a + b


def barrier():
    """All threads of the block.

    Lanes that left a loop early may come first: the barrier takes whole warps, so they wait for their warp before.
    """
    cute.arch.sync_warp()
    cute.arch.sync_threads()


def neighbours(tensor: cute.Tensor, start, count: int) -> cute.Tensor:
    """Some neighbours of shared memory in registers, as few wide accesses; start is a multiple of count."""
    size = tensor.element_type.width // 8
    address = tensor.iterator.toint() + start * size
    there = cute.make_ptr(tensor.element_type, address, cute.AddressSpace.smem, assumed_align=min(16, count * size))
    held = cute.make_rmem_tensor(count, tensor.element_type)
    cute.autovec_copy(cute.make_tensor(there, cute.make_layout(count)), held)
    return held


@dsl_user_op
def read_peer(place, dtype, block, *, loc=None, ip=None):
    """What lies at the same place of another block's shared memory.

    Args:
        dtype: Uint32, Uint64 or Float32; pointers do not say whether their integers have a sign.
    """
    there = cute.arch.map_dsmem_ptr(place, block, loc=loc, ip=ip)
    found = cute.arch.inline_ptx(
        f"ld.shared::cluster.{PEER_TYPES[dtype]} {{$w0}}, [{{$r0}}];",
        write_only_types=[dtype],
        read_only_args=[cutlass.Int32(there.toint(loc=loc, ip=ip))],
        loc=loc,
        ip=ip,
    )
    # Integers come back with a sign, whatever was asked for.
    return dtype(found)


@dsl_user_op
def write_peer(value, place, block, *, loc=None, ip=None):
    """A float32 to the same place of another block's shared memory."""
    there = cute.arch.map_dsmem_ptr(place, block, loc=loc, ip=ip)
    cute.arch.inline_ptx(
        "st.shared::cluster.f32 [{$r0}], {$r1};",
        read_only_args=[cutlass.Int32(there.toint(loc=loc, ip=ip)), value],
        loc=loc,
        ip=ip,
    )


@cute.jit
def running_in_warp(value):
    """The sum of the values of the lanes up to this one."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        value = value + below if lane >= (1 << step) else value
    return value


@cute.jit
def running(value, slots: cute.Tensor, warps: cutlass.Constexpr[int]):
    """(sum of the values of the threads up to this one, sum of all) in a block; all of its threads take part.

    Args:
        slots: [warps] of the value's type, which nobody has read since a barrier before the last one.
    """
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    own = running_in_warp(value)
    if lane == WARP - 1:
        slots[warp] = own
    barrier()
    zero = value.dtype(0)
    total = slots[lane] if lane < warps else zero
    before = total if lane < warp else zero
    return own + cute.arch.warp_reduction(before, add), cute.arch.warp_reduction(total, add)


@cute.jit
def summed(value, slots: cute.Tensor, warps: cutlass.Constexpr[int]):
    """The sum of all threads' values in a block; as `running`."""
    own = cute.arch.warp_reduction(value, add)
    if cute.arch.lane_idx() == 0:
        slots[cute.arch.warp_idx()] = own
    barrier()
    lane = cute.arch.lane_idx()
    total = slots[lane] if lane < warps else value.dtype(0)
    return cute.arch.warp_reduction(total, add)
