# SPDX-License-Identifier: Apache-2.0
"""Exercises of docs/layouts.md on the emulator: `python docs/examples/layout_exercises.py WHAT LAYOUT`.

WHAT is `column`: the wavefronts of a warp that reads a column of a tile; or `ldmatrix`, `ldmatrix.trans`: whether a TV
layout is that of the instruction.
"""

import sys
from collections.abc import Callable

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.cutlass_dsl import dsl_user_op

import emulator
from dsl_backend.layouts import Layout, parse
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.runtime import toolkit
from emulator.profile import summary

ARCH = "sm_90a"
# Words of shared memory, and lanes of a warp.
WORDS, LANES = 4096, 32
SIDE = 8


class ReadColumn:
    """Lane i loads the 16 bytes at (i, 0) of a layout of 16-bit elements in shared memory."""

    def __init__(self, layout: Layout) -> None:
        self.words = [layout((row, 0)) // 2 for row in range(LANES)]

    @cute.jit
    def __call__(self, out: cute.Tensor, stream: object) -> None:
        self.kernel(out).launch(grid=(1, 1, 1), block=(LANES, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor) -> None:
        lane = cute.arch.lane_idx()
        shared = shared_words()
        for i in cutlass.range(lane, WORDS, LANES):
            shared[i] = 1
        cute.arch.sync_threads()
        offset = cutlass.Int32(0)
        for row in cutlass.range_constexpr(LANES):
            offset = self.words[row] if lane == row else offset
        words = cute.make_rmem_tensor(4, cutlass.Int32)
        address = (shared.iterator + offset).toint()
        place = cute.make_ptr(cutlass.Int32, address, cute.AddressSpace.smem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(4)), words)
        out[lane] = words[0] + words[1] + words[2] + words[3]


class LoadMatrix:
    """One ldmatrix of 8 x 8 elements of 16 bits. Element (row, column) has the value row + 8 * column."""

    def __init__(self, transposed: bool) -> None:
        self.transposed = transposed

    @cute.jit
    def __call__(self, out: cute.Tensor, stream: object) -> None:
        self.kernel(out).launch(grid=(1, 1, 1), block=(LANES, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor) -> None:
        lane = cute.arch.lane_idx()
        shared = shared_words()
        # Lane i writes word i of 32: row i / 4, columns 2 (i % 4) and the next one.
        first = lane // 4 + SIDE * 2 * (lane % 4)
        shared[lane] = first + (first + SIDE) * (1 << 16)
        cute.arch.sync_threads()
        address = cutlass.Int32((shared.iterator + lane % SIDE * 4).toint())
        out[lane] = load_matrix(address, self.transposed)


def shared_words() -> cute.Tensor:
    allocator = SmemAllocator()
    return allocator.allocate_tensor(cutlass.Int32, cute.make_layout(WORDS), byte_alignment=1024)


@dsl_user_op
def load_matrix(address: cutlass.Int32, transposed: bool, *, loc=None, ip=None) -> cutlass.Int32:
    """Ldmatrix of one matrix; lanes 0 to 7 give the addresses of its rows."""
    kind = ".trans" if transposed else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x1{kind}.shared.b16 {{ {{$w0}} }}, [{{$r0}}];",
        write_only_types=[cutlass.Int32],
        read_only_args=[address],
        loc=loc,
        ip=ip,
    )


def launched(kernel: Callable[..., None]) -> tuple[list[int], int]:
    """A word of each lane, and the wavefronts of all accesses to shared memory."""
    out = torch.zeros(LANES, dtype=torch.int32)
    with emulator.device(arch=ARCH, sms=1) as device:
        fake = make_fake_compact_tensor(cutlass.Int32, (LANES,), assumed_align=4)
        toolkit.compiled(kernel, (fake, make_fake_stream(use_tvm_ffi_env_stream=True)), ARCH, "")(out)
    (found,) = summary(device.profile).kernels
    return out.tolist(), int(found.wavefronts)


def column_wavefronts(layout: Layout) -> int:
    """Of a warp whose lane i loads 16 bytes from (i, 0)."""
    words, wavefronts = launched(ReadColumn(layout))
    assert words == [4] * LANES
    # Those of the stores that fill the memory: one for each round.
    return wavefronts - WORDS // LANES


def ldmatrix_differences(layout: Layout, transposed: bool) -> list[str]:
    """Where a layout from (thread, value) to row + 8 * column is not what the instruction loads."""
    words, _ = launched(LoadMatrix(transposed))
    found = []
    for thread, word in enumerate(words):
        for value, index in enumerate((word & 0xFFFF, word >> 16)):
            said = layout((thread, value))
            if said != index:
                found.append(f"thread {thread}, value {value}: {place(said)} by the layout, {place(index)} loaded")
    return found


def place(index: int) -> str:
    return f"row {index % SIDE}, column {index // SIDE}"


def answer(what: str, text: str) -> str:
    """What the emulator says of a layout."""
    layout = parse(text)
    if what == "column":
        return f"{column_wavefronts(layout)} wavefronts"
    found = ldmatrix_differences(layout, what.endswith(".trans"))
    return f"{len(found)} of 64 differ, first {found[0]}" if found else "right"


if __name__ == "__main__":
    print(answer(*sys.argv[1:]))  # noqa: T201
