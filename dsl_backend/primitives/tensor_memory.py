# SPDX-License-Identifier: Apache-2.0
"""Columns of tensor memory to registers and back; thread t of a warpgroup has lane t."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

LANE = 1 << 16  # a lane's stride in an address of tensor memory
REPETITIONS = {width: getattr(tcgen05.Repetition, f"x{width}") for width in (1, 2, 4, 8, 16, 32, 64, 128)}


def columns_at(base: cute.Pointer, first, count: int) -> cute.Tensor:
    """[128 lanes, count] of 32 bits."""
    return cute.make_tensor(base + first, cute.make_layout((128, count), stride=(LANE, 1)))


def pieces(count: int, most: int) -> list[tuple[int, int]]:
    """A range of columns as (first, width) with widths that one access can have."""
    found, first = [], 0
    while first < count:
        width = max(width for width in REPETITIONS if width <= min(most, count - first))
        found.append((first, width))
        first += width
    return found


def load(base: cute.Pointer, first, registers: cute.Tensor, thread, most: int = 32):
    """Columns first ... of the thread's lane into registers [count], in flight until the caller waits."""
    for start, width in pieces(cute.size(registers), most):
        source = columns_at(base, first + start, width)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(REPETITIONS[width]), cutlass.Float32)
        mine = tcgen05.make_tmem_copy(atom, source).get_slice(thread)
        part = mine.partition_S(source)
        target = cute.make_tensor(registers.iterator + start, cute.make_layout(mine.partition_D(source).shape))
        cute.copy(atom, part, target)


def load_rows(base: cute.Pointer, first, registers: cute.Tensor, thread):
    """Columns first ... of 64 rows, 16 in each warp's lanes, into registers as an accumulator of wgmma has them: a
    thread has a piece of two rows. In flight until the caller waits.
    """
    count = cute.size(registers) * 2
    first = cute.assume(cutlass.Int32(first), divby=8)  # more than the access needs to know
    source = cute.make_tensor(base + first, cute.make_layout(((16, 4), count), stride=((LANE, 32 * LANE), 1)))
    atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(REPETITIONS[count // 8]), cutlass.Float32)
    mine = tcgen05.make_tmem_copy(atom, source).get_slice(thread)
    part = mine.partition_S(source)
    target = cute.make_tensor(registers.iterator, cute.make_layout(mine.partition_D(source).shape))
    cute.copy(atom, part, target)


def store(registers: cute.Tensor, base: cute.Pointer, first, thread, most: int = 32):
    """Registers [count] into columns first ... of the thread's lane, in flight until the caller waits."""
    for start, width in pieces(cute.size(registers), most):
        target = columns_at(base, first + start, width)
        atom = cute.make_copy_atom(tcgen05.St32x32bOp(REPETITIONS[width]), cutlass.Float32)
        mine = tcgen05.make_tmem_copy(atom, target).get_slice(thread)
        part = mine.partition_D(target)
        source = cute.make_tensor(registers.iterator + start, cute.make_layout(mine.partition_S(target).shape))
        cute.copy(atom, source, part)


def before_sync():
    """What this thread did in tensor memory comes before what others do there after a barrier."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def after_sync():
    """What others did in tensor memory before a barrier comes before what this thread does there."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
