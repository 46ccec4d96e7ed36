# SPDX-License-Identifier: Apache-2.0
"""The work that follows from an instruction's text, for each time that a warp executes it.

Sources: PTX ISA 9.2, 9.7.14.5 (mma), 9.7.15.5 (wgmma), 9.7.16.9.1 (tcgen05.cp).
"""

import re
from dataclasses import dataclass

from emulator.machine.fragments import WIDTHS
from emulator.machine.watch import RATE_OF_FORMAT
from emulator.ptx.ir import Instr

SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
WARPS = 4  # that execute a wgmma together


@dataclass(frozen=True)
class Work:
    """Attributes:
    rate: at which tensor cores do it: f16, tf32, f8, f4 or i8.
    flops: multiplications and additions.
    shared_bytes: read from shared memory.
    """

    rate: str = ""
    flops: int = 0
    shared_bytes: int = 0


NOTHING = Work()


def work_of(instr: Instr) -> Work:
    """A warp's part of a wgmma, all of an mma.sync; a copy into tensor memory as well.

    The multiplications of tcgen05.mma depend on its descriptor and are counted when it runs.
    """
    op = instr.op
    if op.name == "tcgen05.cp":
        rows, bits = (int(part) for part in (op["shape"] or "").removesuffix("b").split("x"))
        return Work(shared_bytes=rows * bits // 8 * (2 if op["group"] == "cta_group::2" else 1))
    if op.name not in ("mma", "wgmma.mma_async"):
        return NOTHING
    found = SHAPE.fullmatch(op["shape"] or "")
    assert found is not None
    m, n, k = map(int, found.groups())
    kind = op["atype"] or ""
    if op.name == "mma":
        return Work(RATE_OF_FORMAT[kind], 2 * m * n * k)
    a = m * k * WIDTHS[kind] if op.form.id.endswith("#ss") else 0
    b = n * k * WIDTHS[op["btype"] or ""]
    return Work(RATE_OF_FORMAT[kind], 2 * m * n * k // WARPS, (a + b) // 8 // WARPS)
