# SPDX-License-Identifier: Apache-2.0
"""Micro-kernels: each takes a time that is a constant of the clock, or a sum of some, for every step more.

A kernel of twice the steps is compared with one of once, so that nothing else counts. The same text runs on a chip
(`measure.py`) and on the clock, which has to give back the constants that it was given (tests/emulator/clock). What a
launch takes is the time of many empty ones in a row.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
.reg .f32 %f<80>;
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
mov.u32 %r63, %ctaid.x;
add.s32 %r60, %r60, %r61;
add.s32 %r60, %r60, %r62;
add.s32 %r63, %r63, %r0;
st.volatile.shared.u32 [%r1+8192], %r60;
bar.sync 0;
mov.u64 %rd3, %clock64;
sub.s64 %rd4, %rd3, %rd2;
setp.eq.u32 %p0, %r63, 0;
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
    """A kernel of one cluster.

    Attributes:
        measures: the constants, in words.
        step: the text of a step, by its number.
        expected: cycles of a step by a chip's constants.
        before: runs once, in front of the steps.
        after: runs once, behind them: puts results that are in no register of `INIT` into %f0.
        threads: of a CTA.
        ctas: of the cluster.
        arch: that alone has its instructions, such as sm_90a; any where it is empty.
        cold: `data` is a chain of pointers as `chain` writes it, of which nothing is in L2.
        steps: of the shorter of the two kernels that are compared.
        data_bytes: that it reads, unless it is cold.
    """

    name: str
    measures: str
    step: Callable[[int], str]
    expected: Callable[[ChipClock], float]
    before: str = ""
    after: str = ""
    threads: int = 32
    ctas: int = 1
    arch: str = ""
    cold: bool = False
    steps: int = STEPS
    data_bytes: int = 16

    def text(self, steps: int, arch: str) -> str:
        """The PTX; steps of the same number are the same text."""
        body = "".join(self.step(number) for number in range(steps))
        return HEAD.format(arch=arch) + INIT + self.before + START + body + self.after + TAIL


# Of a chain of pointers: other sectors, lines and pages of HBM, and few pages of the memory's tables.
STRIDE = 4224
CHAIN_BYTES = STRIDE * (2 * STEPS + 1)


def chain(address: int) -> list[int]:
    """The 8-byte words of a chain of pointers at an address: each STRIDE bytes begin with the address of the next."""
    words = [0] * (CHAIN_BYTES // 8)
    for place in range(0, len(words), STRIDE // 8):
        words[place] = address + 8 * place + STRIDE
    return words


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
# Of the cluster's two CTAs each reads the other's shared memory: a word there has its own address.
NEIGHBOUR = """
mov.u32 %r50, %cluster_ctarank;
xor.b32 %r51, %r50, 1;
mapa.shared::cluster.u32 %r52, %r1, %r50;
mapa.shared::cluster.u32 %r2, %r1, %r51;
"""
TOGETHER = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
DISTANT_CHASE = f"{NEIGHBOUR}st.shared.u32 [%r1], %r52;\n{TOGETHER}"
DISTANT_BARRIER = f"""{FIRST_BARRIER}{NEIGHBOUR}
mov.u32 %r53, %r2;
mov.u32 %r2, 0;
or.b32 %r54, %r0, %r50;
or.b32 %r55, %r0, %r51;
setp.eq.u32 %p1, %r54, 0;
setp.eq.u32 %p3, %r55, 0;
{TOGETHER}"""
# The first CTA arrives and waits, the second one waits and arrives.
DISTANT_ROUND = """
@%p1 mbarrier.arrive.shared::cluster.b64 _, [%r53];
W{n}:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], {parity};
@!%p2 bra W{n};
@%p3 mbarrier.arrive.shared::cluster.b64 _, [%r53];
"""
# Where the scope is written, ptxas puts a fence of the GPU's scope in front of the arrival.
RELEASED_ROUND = DISTANT_ROUND.replace("arrive.", "arrive.release.cluster.").replace(
    "parity.shared", "parity.acquire.cluster.shared"
)
# A warp of each CTA stores 512 bytes into the other one's memory in each step; at the end each waits for all of them.
DISTANT_STORES = f"""{DISTANT_BARRIER}
mad.lo.u32 %r56, %r0, 16, %r53;
setp.eq.u32 %p1, %r0, 0;
mov.u32 %r57, 0;
mov.u32 %r58, 7;
"""
STORED = f"""
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], %r57;
STORED:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r1], 0;
@!%p2 bra STORED;
{TOGETHER}"""
STORED_BYTES, LOADED_BYTES, COPIED_FROM = 512, 4096, 16384  # a warp stores, a load copies, both to places from here on
FEW_STEPS = 16  # where a step needs much shared memory, or ptxas much time: for 512 products it takes a minute
SHARED_BYTES = COPIED_FROM + 2 * FEW_STEPS * LOADED_BYTES  # of a CTA


def _distant_store(warps: int) -> Callable[[int], str]:
    def step(number: int) -> str:
        place = f"%r56+{COPIED_FROM + warps * STORED_BYTES * number}"
        store = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
        values = "{%r58, %r58, %r58, %r58}"
        return f"{store} [{place}], {values}, [%r53];\nadd.u32 %r57, %r57, {warps * STORED_BYTES};\n"

    return step


def _loads(number: int) -> str:
    """A load whose end only `LOADED` waits for."""
    load = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    place = COPIED_FROM + LOADED_BYTES * number
    return f"@%p1 {load} [%r1+{place}], [%rd1], {LOADED_BYTES}, [%r1];\nadd.u32 %r57, %r57, {LOADED_BYTES};\n"


LOADED = """
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], %r57;
LOADED:
mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
@!%p2 bra LOADED;
"""


# Operands of zeros without a swizzle: rows of 16 bytes, the next 8 columns of k 128 bytes behind, the next 8 rows 256.
OPERANDS = f"""
mad.lo.u32 %r50, %r0, 32, %r1;
mov.b32 %r51, 0;
st.shared.v4.b32 [%r50], {{%r51, %r51, %r51, %r51}};
st.shared.v4.b32 [%r50+16], {{%r51, %r51, %r51, %r51}};
fence.proxy.async.shared::cta;
shr.u32 %r52, %r1, 4;
cvt.u64.u32 %rd8, %r52;
or.b64 %rd8, %rd8, {128 >> 4 << 16 | 256 >> 4 << 32};
setp.ne.b32 %p1, %r51, 1;
"""


@dataclass(frozen=True)
class Products:
    """Products of 64 x `columns` x 32 bytes, each added to the one before, and the wait for them."""

    count: int
    columns: int
    kind: str = "f16"

    @property
    def depth(self) -> int:
        return 16 if self.kind == "f16" else 32

    @property
    def text(self) -> str:
        sums = ", ".join(f"%f{8 + n}" for n in range(self.columns // 2))
        shape = f"m64n{self.columns}k{self.depth}.f32.{self.kind}.{self.kind}"
        transposed = ", 0, 0" if self.kind == "f16" else ""
        one = f"wgmma.mma_async.sync.aligned.{shape} {{{sums}}}, %rd8, %rd8, %p1, 1, 1{transposed};\n"
        wait = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
        return f"wgmma.fence.sync.aligned;\n{one * self.count}{wait}"

    def cycles(self, chip: ChipClock) -> float:
        """Of the arithmetic or the operands from shared memory, as `tables.wgmma_cycles` has them, and the latency."""
        rate = chip["matrix_flops"] * self.depth / 16
        one = max(2 * 64 * self.columns * self.depth / rate, 32 * (64 + self.columns) / chip["shared_bytes"])
        return chip["wgmma_latency"] + self.count * one

    @property
    def micro(self) -> dict[str, Any]:
        """Fields of the micro-kernel."""
        sums = "".join(f"mov.f32 %f{8 + n}, %f1;\n" for n in range(self.columns // 2))
        total = "".join(f"add.f32 %f0, %f0, %f{8 + n};\n" for n in range(self.columns // 2))
        fixed = {"threads": 128, "arch": "sm_90a", "steps": FEW_STEPS // 2}
        return {"step": _same(self.text), "expected": self.cycles, "before": OPERANDS + sums, "after": total, **fixed}


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
        "bulk-load", "tma_issue, l2_latency, bulk_latency and mbarrier_wake, of 16 bytes", _phase(LOAD),
        lambda chip: chip["tma_issue"] + chip["l2_latency"] + chip["bulk_latency"] + chip["mbarrier_wake"] + 3,
        before=FIRST_BARRIER,
    ),
    Micro("hbm", "hbm_latency, and a wavefront and a sector", _same("ld.global.cg.u64 %rd5, [%rd5];"),
          lambda chip: chip["hbm_latency"] + 1 + 32 / chip["port_bytes"], before="mov.u64 %rd5, %rd1;\n", cold=True),
    Micro("distant", "distant_latency: loads from another SM's shared memory",
          _same("ld.shared::cluster.u32 %r2, [%r2];"), lambda chip: chip["distant_latency"], before=DISTANT_CHASE,
          after=TOGETHER, ctas=2),
    Micro(
        "distant-arrive", "twice distant_arrive and mbarrier_wake: there and back", _phase(DISTANT_ROUND),
        lambda chip: 2 * (chip["distant_arrive"] + chip["mbarrier_wake"] + 2), before=DISTANT_BARRIER, after=TOGETHER,
        ctas=2,
    ),
    Micro(
        "distant-release", "the same with gpu_fence: the arrivals release", _phase(RELEASED_ROUND),
        lambda chip: 2 * (chip["gpu_fence"] + chip["distant_arrive"] + chip["mbarrier_wake"] + 2),
        before=DISTANT_BARRIER, after=TOGETHER, ctas=2,
    ),
    Micro("fence", "gpu_fence, with no access that it waits for", _same("fence.acq_rel.gpu;"),
          lambda chip: chip["gpu_fence"]),
    Micro("cluster-barrier", "cluster_barrier: of two CTAs", _same(TOGETHER.replace("arrive", "arrive.relaxed")),
          lambda chip: chip["cluster_barrier"] + 1, ctas=2),
    Micro("cluster-release", "the same with gpu_fence: the arrivals release", _same(TOGETHER),
          lambda chip: chip["gpu_fence"] + chip["cluster_barrier"] + 1, ctas=2),
    Micro("distant-store", "512 divided by distant_bytes: stores of a warp into another SM's memory",
          _distant_store(1), lambda chip: STORED_BYTES / chip["distant_bytes"], before=DISTANT_STORES, after=STORED,
          ctas=2),
    Micro("distant-stores", "2048 divided by distant_bytes: the same of four warps", _distant_store(4),
          lambda chip: 4 * STORED_BYTES / chip["distant_bytes"], before=DISTANT_STORES, after=STORED, threads=128,
          ctas=2, steps=FEW_STEPS),
    Micro("port", "4096 divided by port_bytes: loads by the copy engine, of what L2 has", _loads,
          lambda chip: LOADED_BYTES / chip["port_bytes"], before=FIRST_BARRIER + "mov.u32 %r57, 0;\n", after=LOADED,
          steps=FEW_STEPS, data_bytes=LOADED_BYTES),
    Micro("wgmma", "wgmma_latency, and a product of 64 x 8 x 16", **Products(1, 8).micro),
    Micro("wgmma-chain", "wgmma_latency, and four products of 64 x 64 x 16", **Products(4, 64).micro),
    Micro("wgmma-e4m3", "wgmma_latency, and four products of 64 x 128 x 32 in 8 bits",
          **Products(4, 128, "e4m3").micro),
)  # fmt: skip


# A chain of FMAs whose result ptxas has to keep: nobody knows that it is not 1.
CHAINED_TURN = "fma.rn.f32 %f0, %f0, %f0, %f0;\n" * 16
CHAINED = """cvt.rn.f32.u32 %f0, %r0;
mov.u32 %r2, {turns};
TURN:
{turn}sub.u32 %r2, %r2, 1;
setp.ne.u32 %p0, %r2, 0;
@%p0 bra TURN;
setp.eq.f32 %p1, %f0, 0f3F800000;
@%p1 st.global.f32 [%rd0], %f0;
"""
LATE_STEPS = 2048


@dataclass(frozen=True)
class LaunchMicro:
    """Kernels of a warp, one behind the other in a graph, that do nothing but let the next one start, wait and add.

    Attributes:
        measures: the constants, in words.
        programmatic: each may begin before the one in front of it ended.
        expected: microseconds of each by a chip's constants.
        steps: of a chain of FMAs behind the wait. Where there are any, twice as many are timed too, and what they add
            is taken off, whatever the GPU's clock.
    """

    name: str
    measures: str
    programmatic: bool
    expected: Callable[[ChipClock], float]
    steps: int = 0

    def text(self, arch: str, times: int = 1) -> str:
        """The PTX, with so many times the steps."""
        control = "griddepcontrol.launch_dependents;\ngriddepcontrol.wait;\n"
        work = CHAINED.format(turns=self.steps * times // 16, turn=CHAINED_TURN) if self.steps else ""
        return f"{HEAD.format(arch=arch)}{control}{work}ret;\n}}\n"

    def of(self, once: Callable[[str], float], arch: str) -> float:
        """Microseconds of each launch, given what one of a text takes."""
        if not self.steps:
            return once(self.text(arch))
        return 2 * once(self.text(arch)) - once(self.text(arch, 2))


LAUNCH_MICROS = (
    LaunchMicro("launch", "launch_us", False, lambda chip: chip["launch_us"]),
    LaunchMicro(
        "dependent", "launch_us less overlapped_us", True,
        lambda chip: max(0.0, chip["launch_us"] - chip["overlapped_us"]),
    ),
    LaunchMicro(
        "dependent-late", "dependent_us: a wait that is there before the launch in front ends", True,
        lambda chip: chip["dependent_us"], LATE_STEPS,
    ),
)  # fmt: skip
