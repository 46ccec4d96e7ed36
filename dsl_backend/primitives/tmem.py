# SPDX-License-Identifier: Apache-2.0
"""Copies between tensor memory and registers: thread t of a warpgroup accesses lane t."""

from collections.abc import Sequence

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op

LANE_STRIDE = 1 << 16  # of tensor-memory addresses
REPETITIONS = {width: getattr(tcgen05.Repetition, f"x{width}") for width in (1, 2, 4, 8, 16, 32, 64, 128)}


def columns_at(base: cute.Pointer, first: cutlass.Int32 | int, count: int) -> cute.Tensor:
    """View `count` columns from `first` on: [128 lanes, count] of 32 bits."""
    return cute.make_tensor(base + first, cute.make_layout((128, count), stride=(LANE_STRIDE, 1)))


def split_columns(count: int, most: int) -> list[tuple[int, int]]:
    """Split `count` columns into (first, width), each of a width that one instruction has, up to `most`."""
    found, first = [], 0
    while first < count:
        width = max(width for width in REPETITIONS if width <= min(most, count - first))
        found.append((first, width))
        first += width
    return found


def load(
    base: cute.Pointer, first: cutlass.Int32 | int, registers: cute.Tensor, thread: cutlass.Int32, most: int = 32
) -> None:
    """Load columns from `first` on of the thread's lane into registers [count]. In flight until the caller waits."""
    for start, width in split_columns(cute.size(registers), most):
        source = columns_at(base, first + start, width)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(REPETITIONS[width]), cutlass.Float32)
        thr_copy = tcgen05.make_tmem_copy(atom, source).get_slice(thread)
        target = cute.make_tensor(registers.iterator + start, cute.make_layout(thr_copy.partition_D(source).shape))
        cute.copy(atom, thr_copy.partition_S(source), target)


def load_rows(base: cute.Pointer, first: cutlass.Int32 | int, registers: cute.Tensor, thread: cutlass.Int32) -> None:
    """Load columns from `first` on of 64 rows, 16 in each warp's lanes, in the register order of a WGMMA accumulator.

    A thread gets a part of two rows. In flight until the caller waits.
    """
    count = cute.size(registers) * 2
    first = cute.assume(cutlass.Int32(first), divby=8)  # more than the access needs to know
    source = cute.make_tensor(
        base + first, cute.make_layout(((16, 4), count), stride=((LANE_STRIDE, 32 * LANE_STRIDE), 1))
    )
    atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(REPETITIONS[count // 8]), cutlass.Float32)
    thr_copy = tcgen05.make_tmem_copy(atom, source).get_slice(thread)
    target = cute.make_tensor(registers.iterator, cute.make_layout(thr_copy.partition_D(source).shape))
    cute.copy(atom, thr_copy.partition_S(source), target)


def store(
    registers: cute.Tensor, base: cute.Pointer, first: cutlass.Int32 | int, thread: cutlass.Int32, most: int = 32
) -> None:
    """Store registers [count] into columns from `first` on of the thread's lane. In flight until the caller waits."""
    for start, width in split_columns(cute.size(registers), most):
        target = columns_at(base, first + start, width)
        atom = cute.make_copy_atom(tcgen05.St32x32bOp(REPETITIONS[width]), cutlass.Float32)
        thr_copy = tcgen05.make_tmem_copy(atom, target).get_slice(thread)
        source = cute.make_tensor(registers.iterator + start, cute.make_layout(thr_copy.partition_S(target).shape))
        cute.copy(atom, source, thr_copy.partition_D(target))


@dsl_user_op
def store_rows(words: Sequence[cutlass.Int32], address: cutlass.Int32, *, loc=None, ip=None) -> None:
    """Store words in the order of a 16-bit A operand in registers into 16 lanes. In flight until the caller waits.

    By a warp. Of columns 4i to 4i + 3 a thread has words 2i, of lane thread / 4, and 2i + 1, 8 lanes behind it; in both
    of column 4i + thread % 4.

    Args:
        words: two, four, ... or 128.
        address: of the first lane, which is one of the warp's 32 and a multiple of 16, and of the first column.
    """
    registers = ", ".join(f"{{$r{1 + i}}}" for i in range(len(words)))
    cute.arch.inline_ptx(
        f"tcgen05.st.sync.aligned.16x128b.x{len(words) // 2}.b32 [{{$r0}}], {{ {registers} }};",
        read_only_args=[address, *words],
        loc=loc,
        ip=ip,
    )


def before_sync() -> None:
    """Order this thread's tcgen05 operations before the barrier that follows."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def after_sync() -> None:
    """Order this thread's tcgen05 operations after the barrier that it has passed."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
