# SPDX-License-Identifier: Apache-2.0
"""Tensor copies (TMA) into shared memory, issued for all boxes of a tile at a time.

`cute.copy` elects a thread for each box, behind a branch of its own: 4 warp instructions for one copy. Here it is one,
and one thread is elected for all.
"""

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cutlass_dsl import dsl_user_op

# Of an address in a pair of blocks, the bit that names the second one.
SECOND_BLOCK = 1 << 24


class Box(NamedTuple):
    """A box of a tensor, and where in shared memory it goes.

    Attributes:
        place: in bytes behind the target.
        begin: its first element, as the tensor copy counts: the iterator of a slice of the copy's tensor.
    """

    place: int
    begin: tuple


@dsl_user_op
def descriptor_of(atom: cute.CopyAtom, *, loc=None, ip=None) -> cutlass.Int64:
    """The address of the tensor copy's descriptor."""
    made = cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    kind = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<128>>")
    return cute_nvgpu.get_tma_desc_addr(kind, made, loc=loc, ip=ip).toint()


def copy_boxes(
    atom: cute.CopyAtom,
    boxes: Sequence[Box],
    target: cute.Pointer,
    full: cute.Pointer,
    expected: int,
    expects: cutlass.Boolean,
) -> None:
    """Boxes into one block of a pair, by all lanes of a warp, of which one issues.

    Args:
        full: mbarrier of the pair's first block that counts the bytes of both.
        expected: so many.
        expects: says so to the barrier: once for both blocks, in the first.
    """
    arguments = [target.toint(), descriptor_of(atom), full.toint(), cutlass.Int32(expects)]
    code = [
        ".reg .pred leader, expects; .reg .b32 full;",
        "elect.sync _|leader, 0xffffffff; setp.ne.and.b32 expects, {$r3}, 0, leader;",
        f"@expects mbarrier.arrive.expect_tx.shared.b64 _, [{{$r2}}], {expected};",
        f"and.b32 full, {{$r2}}, {~SECOND_BLOCK & 0xFFFFFFFF};",
    ]
    for box in boxes:
        begin = []
        for at in box.begin:
            begin.append(str(at) if isinstance(at, int) else f"{{$r{len(arguments)}}}")
            if not isinstance(at, int):
                arguments.append(at)
        code.append(
            f"@leader cp.async.bulk.tensor.{len(begin)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            f".cta_group::2 [{{$r0}} + {box.place}], [{{$r1}}, {{{', '.join(begin)}}}], [full];"
        )
    cute.arch.inline_ptx("{ " + " ".join(code) + " }", read_only_args=arguments)
