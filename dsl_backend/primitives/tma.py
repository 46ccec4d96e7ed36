# SPDX-License-Identifier: Apache-2.0
"""TMA loads for a pair of CTAs, issued for all boxes of a tile at once.

`cute.copy` elects a thread for each box, behind a branch of its own: 4 warp instructions a box. Here one thread is
elected for all boxes, and a box takes 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cutlass_dsl import dsl_user_op

# The bit of a shared::cluster address that is set in the second CTA of a pair.
PEER_CTA_BIT = 1 << 24


class TmaBox(NamedTuple):
    """A box of a tensor, and where in shared memory it goes.

    Attributes:
        offset: in bytes from the target.
        coord: TMA coordinates of its first element: the iterator of a slice of the atom's tensor.
    """

    offset: int
    coord: tuple


@dsl_user_op
def tma_descriptor_of(atom: cute.CopyAtom, *, loc=None, ip=None) -> cutlass.Int64:
    """The address of the atom's TMA descriptor."""
    made = cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    kind = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<128>>")
    return cute_nvgpu.get_tma_desc_addr(kind, made, loc=loc, ip=ip).toint()


def tma_load_boxes(
    atom: cute.CopyAtom,
    boxes: Sequence[TmaBox],
    target: cute.Pointer,
    mbar: cute.Pointer,
    tx_count: int,
    arrives: cutlass.Boolean,
) -> None:
    """Load boxes into this CTA of a pair. All lanes of a warp call it, one of them issues.

    Args:
        mbar: mbarrier of the leader CTA, which counts the bytes of both CTAs.
        tx_count: bytes of both CTAs.
        arrives: whether this CTA arrives with `tx_count`: the leader does, once for both.
    """
    arguments = [target.toint(), tma_descriptor_of(atom), mbar.toint(), cutlass.Int32(arrives)]
    code = [
        ".reg .pred leader, expects; .reg .b32 full;",
        "elect.sync _|leader, 0xffffffff; setp.ne.and.b32 expects, {$r3}, 0, leader;",
        f"@expects mbarrier.arrive.expect_tx.shared.b64 _, [{{$r2}}], {tx_count};",
        f"and.b32 full, {{$r2}}, {~PEER_CTA_BIT & 0xFFFFFFFF};",
    ]
    for box in boxes:
        coord = []
        for c in box.coord:
            coord.append(str(c) if isinstance(c, int) else f"{{$r{len(arguments)}}}")
            if not isinstance(c, int):
                arguments.append(c)
        code.append(
            f"@leader cp.async.bulk.tensor.{len(coord)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            f".cta_group::2 [{{$r0}} + {box.offset}], [{{$r1}}, {{{', '.join(coord)}}}], [full];"
        )
    cute.arch.inline_ptx("{ " + " ".join(code) + " }", read_only_args=arguments)
