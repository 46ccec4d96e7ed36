# SPDX-License-Identifier: Apache-2.0
"""Matrix products of SM100's tensor cores, issued for all of a tile's columns at a time.

`cute.gemm` elects a thread for each instruction, and the compiler computes each operand's descriptor ahead of the loop
around it, for which a warp of few registers has no room: 10 warp instructions for one product. Here the descriptors of
a block are sums of two 32-bit words and constants, out of the compiler's sight: 2 to 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

# PTX ISA 9.2, instruction descriptor of .kind::f16.
FLOAT32_SUMS, A_TYPE, B_TYPE, A_TRANSPOSED, B_TRANSPOSED, COLUMNS, ROWS = 1 << 4, 7, 10, 15, 16, 17, 24
TYPES = {cutlass.Float16: 0, cutlass.BFloat16: 1}


@dataclass(frozen=True, kw_only=True)
class TensorProduct:
    """Sums [rows, columns] in tensor memory (+)= A [rows, k] B [columns, k]^T, of 16-bit operands, 16 of k at a time.

    Attributes:
        dtype: of both operands.
        rows, columns: of one instruction.
        rows_inside, columns_inside: A's rows, B's columns lie side by side in shared memory, rather than their k.
        from_tensor_memory: A lies there.
        group: blocks that multiply together; rows and columns are those of all of them.
        cluster: blocks that barriers can be told in.
    """

    dtype: type[cutlass.Numeric]
    rows: int
    columns: int
    rows_inside: bool = False
    columns_inside: bool = False
    from_tensor_memory: bool = False
    group: int = 1
    cluster: int = 1

    @property
    def descriptor(self) -> int:
        kind = TYPES[self.dtype]
        return (
            FLOAT32_SUMS
            | kind << A_TYPE
            | kind << B_TYPE
            | self.rows_inside << A_TRANSPOSED
            | self.columns_inside << B_TRANSPOSED
            | self.columns >> 3 << COLUMNS
            | self.rows >> 4 << ROWS
        )

    def issue(
        self,
        sums: cute.Pointer,
        a: cute.Tensor,
        b: Sequence[cute.Tensor],
        adds: bool | cutlass.Boolean,
        then: Sequence[cute.Pointer] = (),
        everywhere: Sequence[cute.Pointer] = (),
        steps: range | None = None,
    ) -> None:
        """By all lanes of a warp, of which one issues.

        Args:
            sums: in tensor memory.
            a: fragment [instruction, 1, k].
            b: fragments like it, wherever they lie, whose k follow one another.
            adds: to what is there; else the first of k overwrites it.
            then: mbarriers that hear of the end of all products so far.
            everywhere: those that hear of it in each block of the cluster.
            steps: of k that are multiplied; all where there is none.
        """
        start = a.iterator.toint() if self.from_tensor_memory else tcgen05.smem_descriptor_to_int(a.iterator)
        arguments = [sums.toint(), start]
        group = f"cta_group::{self.group}"
        code = [
            ".reg .pred leader, adds, overwrites; .reg .b64 from, to;",
            ".reg .b32 a, a_rest, b, b_rest, x, y, zero, kind;",
            # A lane's number is below 32, which ptxas does not know: what is added to it is not moved ahead of a loop.
            "elect.sync zero|leader, 0xffffffff; and.b32 zero, zero, 32;",
            f"mov.b32 kind, {self.descriptor};",
            "setp.eq.b32 adds, kind, kind;" + ("" if adds is True else " setp.ne.b32 overwrites, kind, kind;"),
            "mov.b32 a, {$r1};" if self.from_tensor_memory else "mov.b64 {a, a_rest}, {$r1};",
            "add.s32 a, a, zero;",
        ]
        if isinstance(adds, bool):
            fate = "adds" if adds else "overwrites"
        else:
            fate = "adds_first"
            code.append(f".reg .pred adds_first; setp.ne.b32 adds_first, {{$r{len(arguments)}}}, 0;")
            arguments.append(cutlass.Int32(adds))
        k = 0
        for part in b:
            size = cute.size(part, mode=[2])
            wanted = [step for step in steps or range(k, k + size) if k <= step < k + size]
            if wanted:
                code.append(f"mov.b64 {{b, b_rest}}, {{$r{len(arguments)}}}; add.s32 b, b, zero;")
                arguments.append(tcgen05.smem_descriptor_to_int(part.iterator))
            for step in wanted:
                at_a, at_b = cute.crd2idx((0, 0, step), a.layout), cute.crd2idx((0, 0, step - k), part.layout)
                if self.from_tensor_memory:
                    # Addresses count columns of 32 bits.
                    operand = f"[a + {at_a * self.dtype.width // 32}]"
                else:
                    code.append(word("x", "a", at_a) + f" mov.b64 from, {{{'x' if at_a else 'a'}, a_rest}};")
                    operand = "from"
                code.append(word("y", "b", at_b) + f" mov.b64 to, {{{'y' if at_b else 'b'}, b_rest}};")
                code.append(f"@leader tcgen05.mma.{group}.kind::f16 [{{$r0}}], {operand}, to, kind, {fate};")
                fate = "adds"
            k += size
        commit = f"@leader tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster"
        one, each = (".b64", ""), (".multicast::cluster.b64", ", blocks")
        if self.cluster > 1:
            code.append(f".reg .b16 blocks; mov.b16 blocks, {(1 << self.cluster) - 1};")
        for barriers, (kind, blocks) in ((then, one), (everywhere, each if self.cluster > 1 else one)):
            for barrier in barriers:
                code.append(f"{commit}{kind} [{{$r{len(arguments)}}}]{blocks};")
                arguments.append(barrier.toint())
        cute.arch.inline_ptx("{ " + " ".join(code) + " }", read_only_args=arguments)


def word(register: str, first: str, offset: int) -> str:
    """The code for a word behind the first one; none where it is that one."""
    return f"add.s32 {register}, {first}, {offset};" if offset else ""
