# SPDX-License-Identifier: Apache-2.0
"""Micro-kernels: each takes a time that is a constant of the clock, or a sum of some, for every step more.

A kernel of twice the steps is compared with one of once, so that nothing else counts. The same text runs on a chip
(`measure.py`) and on the clock, which has to give back the constants that it was given (tests/emulator/clock).
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from emulator.clock.constants import ChipClock

STEPS = 64
HEAD = """.version 8.6
.target {arch}
.address_size 64
.extern .shared .align 1024 .b8 shared[];
.visible .entry micro(.param .b64 out, .param .b64 data)
{{
.reg .pred %p<4>;
.reg .b32 %r<64>;
.reg .f32 %f<64>;
.reg .b64 %rd<16>;
ld.param.b64 %rd0, [out];
ld.param.b64 %rd1, [data];
mov.u32 %r0, %tid.x;
mov.u32 %r1, shared;
mov.u32 %r40, 1;
"""
# Results are stored in front of a barrier behind which the clock is read: ptxas keeps the steps, and moves none of them
# behind the reading (without the barrier it did with loads, shuffles and ex2).
TAIL = """
add.s32 %r60, %r2, %r3;
cvt.rzi.s32.f32 %r61, %f0;
cvt.u32.u64 %r62, %rd5;
add.s32 %r60, %r60, %r61;
add.s32 %r60, %r60, %r62;
st.volatile.shared.u32 [%r1+8192], %r60;
bar.sync 0;
mov.u64 %rd3, %clock64;
sub.s64 %rd4, %rd3, %rd2;
setp.eq.u32 %p0, %r0, 0;
@%p0 st.global.u64 [%rd0], %rd4;
@%p0 st.global.u32 [%rd0+8], %r60;
ret;
}
"""
START = "bar.sync 0;\nmov.u64 %rd2, %clock64;\n"
# Values that ptxas does not know: it computes ex2 and shuffles of constants itself.
INIT = """
mov.u32 %r2, %r0;
mov.u32 %r3, 0;
mov.u64 %rd5, 0;
cvt.rn.f32.u32 %f0, %r0;
neg.f32 %f0, %f0;
mov.f32 %f1, 0f3F000000;
"""


@dataclass(frozen=True)
class Micro:
    """A kernel of one CTA.

    Attributes:
        measures: the constants, in words.
        step: the text of a step, by its number.
        expected: cycles of a step by a chip's constants.
        before: runs once, in front of the steps.
        after: runs once, behind them: puts results that are in no register of `INIT` into %f0.
        threads: of the CTA.
    """

    name: str
    measures: str
    step: Callable[[int], str]
    expected: Callable[[ChipClock], float]
    before: str = ""
    after: str = ""
    threads: int = 32

    def text(self, steps: int, arch: str) -> str:
        """The PTX; steps of the same number are the same text."""
        body = "".join(self.step(number) for number in range(steps))
        return HEAD.format(arch=arch) + INIT + self.before + START + body + self.after + TAIL


def _float(value: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def _same(text: str) -> Callable[[int], str]:
    return lambda _: text + "\n"


def _phase(text: str) -> Callable[[int], str]:
    """A step with the parity of the mbarrier's phase, and a label of its own."""
    return lambda number: text.format(parity=number & 1, n=number)


FIRST_BARRIER = """
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r1], 1;
bar.sync 0;
"""
ROUND_TRIP = """
@%p1 mbarrier.arrive.shared.b64 _, [%r1];
W{n}:
mbarrier.try_wait.parity.shared.b64 %p2, [%r1], {parity};
@!%p2 bra W{n};
"""
LOAD = """
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1024], [%rd1], 16, [%r1];
W{n}:
mbarrier.try_wait.parity.shared.b64 %p2, [%r1], {parity};
@!%p2 bra W{n};
"""
CHASE = "st.shared.u32 [%r1], %r1;\nmov.u32 %r2, %r1;\nbar.sync 0;\n"
GLOBAL_CHASE = "st.global.u64 [%rd1], %rd1;\nmov.u64 %rd5, %rd1;\nbar.sync 0;\n"

MICROS = (
    Micro("fma", "fma_latency", _same("fma.rn.f32 %f0, %f0, %f1, %f1;"), lambda chip: chip["fma_latency"]),
    Micro(
        "alu", "twice alu_latency", _same("xor.b32 %r2, %r2, %r0;\nadd.s32 %r2, %r2, %r40;"),
        lambda chip: 2 * chip["alu_latency"],
    ),
    Micro("special", "special_latency", _same("ex2.approx.ftz.f32 %f0, %f0;"), lambda chip: chip["special_latency"]),
    Micro(
        "special-rate", "512 divided by special_rate",
        lambda number: f"ex2.approx.ftz.f32 %f{2 + number % 32}, %f{2 + number % 32};\n",
        lambda chip: 512 / chip["special_rate"],
        before="".join(f"add.f32 %f{2 + n}, %f0, {_float(n)};\n" for n in range(32)),
        after="".join(f"add.f32 %f0, %f0, %f{2 + n};\n" for n in range(32)), threads=512,
    ),
    Micro("shared", "shared_latency, and a wavefront", _same("ld.shared.u32 %r2, [%r2];"),
          lambda chip: chip["shared_latency"] + 1, before=CHASE),
    Micro("shuffle", "shuffle_latency", _same("shfl.sync.bfly.b32 %r2, %r2, 1, 31, -1;"),
          lambda chip: chip["shuffle_latency"]),
    Micro("l2", "l2_latency, and a wavefront and a sector", _same("ld.global.cg.u64 %rd5, [%rd5];"),
          lambda chip: chip["l2_latency"] + 1 + 32 / chip["port_bytes"], before=GLOBAL_CHASE),
    Micro("barrier", "barrier, of 256 threads", _same("bar.sync 0;"), lambda chip: chip["barrier"], threads=256),
    Micro(
        "mbarrier", "mbarrier_arrive and mbarrier_wake, and a branch", _phase(ROUND_TRIP),
        lambda chip: chip["mbarrier_arrive"] + chip["mbarrier_wake"] + 2, before=FIRST_BARRIER,
    ),
    Micro(
        "bulk-load", "tma_issue, l2_latency, tma_latency and mbarrier_wake, of 16 bytes", _phase(LOAD),
        lambda chip: chip["tma_issue"] + chip["l2_latency"] + chip["tma_latency"] + chip["mbarrier_wake"] + 3,
        before=FIRST_BARRIER,
    ),
)  # fmt: skip
