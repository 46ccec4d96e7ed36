# SPDX-License-Identifier: Apache-2.0
"""tcgen05.mma of SM100, issued from inline PTX for all k-blocks of a tile at once.

`cute.gemm` elects a thread for each instruction, and the compiler hoists each operand's descriptor out of the loop,
for which a warp of few registers has no room: 10 warp instructions for one MMA. Here a descriptor is the sum of two
32-bit words and a constant, which the compiler does not see: 2 to 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

# PTX ISA 9.2, instruction descriptor of .kind::f16 and .kind::f8f6f4.
D_FLOAT32, A_FORMAT, B_FORMAT, A_MN_MAJOR, B_MN_MAJOR, N_DIM, M_DIM = 1 << 4, 7, 10, 15, 16, 17, 24
# Of an element type: the .kind of the instruction, and how the descriptor encodes it.
KINDS = {cutlass.Float16: ("f16", 0), cutlass.BFloat16: ("f16", 1), cutlass.Float8E4M3FN: ("f8f6f4", 0)}
K_BLOCK_BYTES = 32  # of a row that one instruction takes


@dataclass(frozen=True, kw_only=True)
class Tcgen05Mma:
    """D [m, n] in tensor memory (+)= A [m, k] B [n, k]^T, of operands of 16 bits or e4m3, in k-blocks of 32 bytes.

    Attributes:
        dtype: of both operands.
        m, n: of one instruction, over all CTAs of the group.
        a_mn_major, b_mn_major: major mode of the operand in shared memory; else it is K-major.
        a_in_tmem: A lies in tensor memory.
        cta_group: CTAs that multiply together, 1 or 2.
        cluster: CTAs to which a commit can be multicast.
    """

    dtype: type[cutlass.Numeric]
    m: int
    n: int
    a_mn_major: bool = False
    b_mn_major: bool = False
    a_in_tmem: bool = False
    cta_group: int = 1
    cluster: int = 1

    @property
    def descriptor(self) -> int:
        """The instruction descriptor."""
        operand = KINDS[self.dtype][1]
        return (
            D_FLOAT32
            | operand << A_FORMAT
            | operand << B_FORMAT
            | self.a_mn_major << A_MN_MAJOR
            | self.b_mn_major << B_MN_MAJOR
            | self.n >> 3 << N_DIM
            | self.m >> 4 << M_DIM
        )

    def issue(
        self,
        accumulator: cute.Pointer,
        a: cute.Tensor,
        b: Sequence[cute.Tensor],
        accumulate: bool | cutlass.Boolean,
        commit: Sequence[cute.Pointer] = (),
        commit_multicast: Sequence[cute.Pointer] = (),
        steps: range | None = None,
    ) -> None:
        """Issue the MMAs of a tile, and commit them. All lanes of a warp call it, one of them issues.

        Args:
            accumulator: D, in tensor memory.
            a: fragment [instruction, 1, k].
            b: fragments like it, at any addresses, whose k-blocks follow one another.
            accumulate: add to D; else the first k-block overwrites it.
            commit: mbarriers of this CTA that are signalled once all MMAs so far are done.
            commit_multicast: mbarriers that are signalled in every CTA of the cluster.
            steps: k-blocks to multiply; None for all.
        """
        start = a.iterator.toint() if self.a_in_tmem else tcgen05.smem_descriptor_to_int(a.iterator)
        arguments = [accumulator.toint(), start]
        group, kind = f"cta_group::{self.cta_group}", f"kind::{KINDS[self.dtype][0]}"
        code = [
            ".reg .pred leader, adds, overwrites; .reg .b64 from, to;",
            ".reg .b32 a, a_rest, b, b_rest, x, y, zero, kind;",
            # 0, since a lane index is below 32. ptxas does not know that, so it does not hoist the sums out of a loop.
            "elect.sync zero|leader, 0xffffffff; and.b32 zero, zero, 32;",
            f"mov.b32 kind, {self.descriptor};",
            "setp.eq.b32 adds, kind, kind;" + ("" if accumulate is True else " setp.ne.b32 overwrites, kind, kind;"),
            "mov.b32 a, {$r1};" if self.a_in_tmem else "mov.b64 {a, a_rest}, {$r1};",
            "add.s32 a, a, zero;",
        ]
        if isinstance(accumulate, bool):
            scale_d = "adds" if accumulate else "overwrites"
        else:
            scale_d = "adds_first"
            code.append(f".reg .pred adds_first; setp.ne.b32 adds_first, {{$r{len(arguments)}}}, 0;")
            arguments.append(cutlass.Int32(accumulate))
        k = 0
        for part in b:
            size = cute.size(part, mode=[2])
            k_blocks = [step for step in steps or range(k, k + size) if k <= step < k + size]
            if k_blocks:
                code.append(f"mov.b64 {{b, b_rest}}, {{$r{len(arguments)}}}; add.s32 b, b, zero;")
                arguments.append(tcgen05.smem_descriptor_to_int(part.iterator))
            for step in k_blocks:
                at_a, at_b = cute.crd2idx((0, 0, step), a.layout), cute.crd2idx((0, 0, step - k), part.layout)
                if self.a_in_tmem:
                    # Addresses count columns of 32 bits.
                    operand = f"[a + {at_a * self.dtype.width // 32}]"
                else:
                    code.append(add_offset("x", "a", at_a) + f" mov.b64 from, {{{'x' if at_a else 'a'}, a_rest}};")
                    operand = "from"
                code.append(add_offset("y", "b", at_b) + f" mov.b64 to, {{{'y' if at_b else 'b'}, b_rest}};")
                code.append(f"@leader tcgen05.mma.{group}.{kind} [{{$r0}}], {operand}, to, kind, {scale_d};")
                scale_d = "adds"
            k += size
        instruction = f"@leader tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster"
        one, each = (".b64", ""), (".multicast::cluster.b64", ", cta_mask")
        if self.cluster > 1:
            code.append(f".reg .b16 cta_mask; mov.b16 cta_mask, {(1 << self.cluster) - 1};")
        for mbars, (kind, ctas) in ((commit, one), (commit_multicast, each if self.cluster > 1 else one)):
            for mbar in mbars:
                code.append(f"{instruction}{kind} [{{$r{len(arguments)}}}]{ctas};")
                arguments.append(mbar.toint())
        cute.arch.inline_ptx("{ " + " ".join(code) + " }", read_only_args=arguments)


def add_offset(register: str, base: str, offset: int) -> str:
    """PTX for register = base + offset; empty for an offset of 0."""
    return f"add.s32 {register}, {base}, {offset};" if offset else ""
