# SPDX-License-Identifier: Apache-2.0
"""Summaries of kernels that are small enough to count by hand."""

import json

import numpy as np
import pytest
from ptx_kernels import run, text, zeros

from emulator import __main__ as command
from emulator.core.program import Program
from emulator.errors import Unsupported
from emulator.machine.profile import KernelProfile, Profile
from emulator.profile import H200, KernelSummary, Summary, Unit, compare, rates, summary
from emulator.profile.report import warps_text
from emulator.ptx import parse

THREAD = """
mov.u32 %r1, %tid.x;
shr.u32 %r2, %r1, 5;
mov.b32 %r3, shared;
ld.param.b64 %rd1, [p0];
"""


def only(made: Summary) -> KernelSummary:
    (kernel,) = made.kernels
    return kernel


def ran(body: str, *, block: int = 32, arch: str = "sm_90a", **options) -> KernelSummary:
    return only(summary(run(THREAD + body, zeros(1024), block=block, arch=arch, **options).profile))


def counted(body: str, times: dict[int, int], arch: str = "sm_90a") -> KernelProfile:
    """A profile of a kernel that did not run: each warp is said to have executed all of it so many times."""
    module = parse(text(body, 0, arch))
    program = Program(module, module.entries["k"])
    profile = KernelProfile("k", program)
    for number, count in times.items():
        profile.executed[number] = np.full(len(program.instrs), count, np.int64)
    profile.ctas = 1
    return profile


def cycles(body: str, times: dict[int, int], arch: str = "sm_90a") -> dict[str, float]:
    return dict(only(summary(counted(body, times, arch))).cycles)


# Counting.


def test_free_moves_are_counted_and_not_charged() -> None:
    kernel = ran("mov.b64 %rd2, {%r1, %r2};\nadd.s32 %r4, %r1, %r2;")
    assert kernel.executed["register moves (free)"] == 3
    assert kernel.executed["parameter loads (free)"] == 1
    assert kernel.issued == 3  # shr, add, ret
    assert kernel.cycles["issue"] == 3


def test_launches_and_ctas_add_up() -> None:
    kernel = ran("ex2.approx.ftz.f32 %f1, 0f3F800000;", grid=3, block=64)
    assert kernel.ctas == 3
    assert kernel.executed["MUFU"] == 6
    assert kernel.cycles[Unit.XU.value] == 8  # of one CTA; its two warps are in two parts of the SM


def test_conflicts_are_counted_by_place() -> None:
    column = "shl.b32 %r4, %r1, 7; add.s32 %r4, %r3, %r4;"
    kernel = ran(f"{column}\nst.shared.b32 [%r4], %r1;\nshl.b32 %r5, %r1, 2;\nadd.s32 %r5, %r3, %r5;\n"
                 "st.shared.b32 [%r5+4096], %r1;\nld.shared.b32 %r6, [%r4];")  # fmt: skip
    assert (kernel.wavefronts, kernel.least_wavefronts) == (32 + 1 + 32, 3)
    assert [(site.text.split()[0], site.amount, site.times) for site in kernel.conflicts] == [
        ("st.shared.b32", 31, 1),
        ("ld.shared.b32", 31, 1),
    ]
    assert kernel.conflicts[0].line < kernel.conflicts[1].line
    assert kernel.cycles["shared memory"] == 65


def test_generic_accesses_and_masks() -> None:
    body = """
    setp.lt.u32 %p1, %r1, 4;
    shl.b32 %r4, %r1, 7;
    add.s32 %r4, %r3, %r4;
    cvt.u64.u32 %rd2, %r4;
    cvta.shared.u64 %rd2, %rd2;
    @%p1 st.b32 [%rd2], %r1;
    mul.wide.u32 %rd3, %r1, 128;
    add.s64 %rd3, %rd1, %rd3;
    st.b32 [%rd3], %r1;
    """
    assert ran(body).wavefronts == 4


def test_registers_that_a_load_overwrites() -> None:
    body = "shl.b32 %r4, %r1, 7; add.s32 %r4, %r3, %r4; st.shared.b32 [%r4], %r4; ld.shared.b32 %r4, [%r4];"
    assert ran(body).wavefronts == 64


@pytest.mark.parametrize(("stride", "needed"), [(128, 32), (144, 4), (16, 4)])
def test_rows_of_matrices(stride, needed) -> None:
    body = f"""
    mul.lo.s32 %r4, %r1, {stride};
    add.s32 %r4, %r3, %r4;
    st.shared.v4.b32 [%r4], {{%r1, %r1, %r1, %r1}};
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r4];
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r10}}, [%r4];
    """
    assert ran(body).wavefronts == 2 * needed + needed // 4


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_waits(schedule) -> None:
    """Warps 1 and 2 wait for warp 0's arrival; the second time it is there already."""
    body = """
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra INIT;
    mbarrier.init.shared.b64 [%r3], 32;
    INIT:
    bar.sync 0;
    @%p1 bra WAIT;
    mbarrier.arrive.shared.b64 %rd4, [%r3];
    bra END;
    WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
    @!%p2 bra WAIT;
    AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
    @!%p2 bra AGAIN;
    END:
    """
    machine = run(THREAD + body, zeros(4), block=96, schedule=schedule)
    kernel = only(summary(machine.profile))
    waits = {site.text.split()[0]: site.amount for site in kernel.waits}
    assert waits["bar.sync"] == 2
    assert sum(role.waits for role in kernel.roles) == 7
    second = [site for site in kernel.waits if site.text.startswith("mbarrier")]
    assert sum(site.amount for site in second) <= 2
    assert len(second) <= 1


# Matrix multiplications.

SHAPES = [
    # instruction, arch, warps, rate, FLOP, cycles of the tensor cores, bytes read from shared memory
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, "
     "{%f0, %f1, %f2, %f3};", "sm_90a", 1, "f16", 4096, 1, 0),
    ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd1, %rd2, %p1, 1, 1, 0, 0;",
     "sm_90a", 4, "f16", 2 * 64 * 8 * 16, 4, 2 * (64 + 8) * 16),
    ("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e5m2 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, %rd2, %p1, 1, 1;",
     "sm_90a", 4, "f8", 2 * 64 * 8 * 32, 4, 8 * 32),
    ("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%f0, %f1, %f2, %f3}, %rd1, %rd2, %p1, 1, 1;",
     "sm_90a", 4, "tf32", 2 * 64 * 8 * 8, 4, 4 * (64 + 8) * 8),
]  # fmt: skip


@pytest.mark.parametrize(("line", "arch", "warps", "rate", "flops", "busy", "read"), SHAPES)
def test_multiplications_of_warps(line, arch, warps, rate, flops, busy, read) -> None:
    kernel = only(summary(counted(line, dict.fromkeys(range(warps), 1), arch)))
    assert kernel.flops == {rate: flops}
    assert kernel.cycles["tensor cores"] == busy
    assert kernel.shared_bytes == read
    assert kernel.cycles["shared memory"] == read / 128


@pytest.mark.parametrize(
    ("kind", "form", "fields", "k", "rate", "busy", "read"),
    [
        ("f16", "[%r3], %rd1, %rd2", 1 << 4 | 1 << 7 | 1 << 10, 16, "f16", 64, (128 + 128) * 32),
        ("f16", "[%r3], [%r3], %rd2", 1 << 4 | 1 << 7 | 1 << 10, 16, "f16", 64, 128 * 32),
        ("tf32", "[%r3], %rd1, %rd2", 1 << 4 | 2 << 7 | 2 << 10, 8, "tf32", 64, (128 + 128) * 32),
        ("f8f6f4", "[%r3], %rd1, %rd2", 1 << 4 | 5 << 7, 32, "f8", 64, (128 + 128) * 32),  # e2m1 in bytes
    ],
)
def test_multiplications_of_tensor_memory(kind, form, fields, k, rate, busy, read) -> None:
    """Counted from the descriptor, before the machine finds that there is no tensor memory."""
    body = (
        THREAD
        + f"""
    mov.b64 %rd1, 0;
    mov.b64 %rd2, 0;
    mov.b32 %r4, {fields | 128 // 8 << 17 | 128 // 16 << 24};
    setp.eq.u32 %p1, %r1, 99;
    setp.eq.u32 %p2, %r1, 0;
    @%p2 tcgen05.mma.cta_group::1.kind::{kind} {form}, %r4, %p1;
    """
    )
    kernel = only(summary(run(body, zeros(4)).profile))
    assert kernel.flops == {rate: 2 * 128 * 128 * k}
    assert kernel.cycles["tensor cores"] == busy
    assert kernel.cycles["shared memory"] == read / 128


# The model.


@pytest.mark.parametrize(
    ("line", "arch", "unit", "expected"),
    [
        ("ex2.approx.ftz.f32 %f1, %f2;", "sm_90a", Unit.XU, 8),  # 32 lanes, a quarter of 16 units
        ("ex2.approx.ftz.f32 %f1, %f2;", "sm_100a", Unit.XU, 8),
        ("ex2.approx.ftz.f32 %f1, %f2;", "sm_103a", Unit.XU, 4),
        ("rcp.approx.ftz.f32 %f1, %f2;", "sm_103a", Unit.XU, 8),
        ("fma.rn.f32 %f1, %f2, %f3, %f4;", "sm_90a", Unit.FMA, 1),
        ("fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;", "sm_100a", Unit.FMA, 2),
        ("mul.lo.s32 %r1, %r2, %r3;", "sm_90a", Unit.FMA, 2),
        ("add.s32 %r1, %r2, %r3;", "sm_90a", Unit.ALU, 2),
        ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;", "sm_90a", Unit.SHUFFLE, 1),
    ],
)
def test_cycles_of_an_instruction(line, arch, unit, expected) -> None:
    assert cycles(line, {0: 10}, arch)[unit.value] == pytest.approx(10 * expected)
    assert cycles(line, {0: 10}, arch)["issue"] == 20  # and `ret`


def test_warps_of_one_part_share_it() -> None:
    line = "ex2.approx.ftz.f32 %f1, %f2;"
    assert cycles(line, {0: 10, 1: 10, 2: 10, 3: 10})[Unit.XU.value] == 80
    assert cycles(line, {0: 10, 4: 10})[Unit.XU.value] == 160
    shuffle = "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;"
    assert cycles(shuffle, {0: 10, 1: 10})[Unit.SHUFFLE.value] == 20


def test_exponentials_of_an_attention_tile() -> None:
    """128 x 128 of them take 1024 cycles at 16 a cycle, as FlashAttention-4 says."""
    assert cycles("ex2.approx.ftz.f32 %f1, %f2;", dict.fromkeys(range(8), 64))[Unit.XU.value] == 1024


def test_copies_use_shared_memory() -> None:
    profile = counted("bar.sync 0;", {0: 1})
    profile.count("tensor load bytes", 1024)
    profile.count("tensor load bytes multicast", 1024)
    profile.count("bulk store bytes", 256)
    kernel = only(summary(profile))
    assert kernel.cycles["shared memory"] == (2048 + 256) / 128
    assert kernel.global_bytes == 1024 + 256
    assert kernel.global_cycles == pytest.approx((1024 + 256) * 132 * 1.755 / 4800)
    assert kernel.longest == "shared memory"


def test_cycles_per_tile() -> None:
    profile = counted("ex2.approx.ftz.f32 %f1, %f2;", {0: 10})
    profile.ctas = 2
    kernel = only(summary(profile, tiles=10))
    assert kernel.cycles[kernel.longest] == 40
    assert kernel.per_part(40) == 8
    assert only(summary(profile, tiles={"k": 5})).per_part(40) == 16
    assert only(summary(profile, tiles={"other": 5})).per_part(40) == 40


def test_an_architecture_without_rates() -> None:
    with pytest.raises(Unsupported, match="sm_80"):
        rates("sm_80")


# Roles.

ROLES = """
setp.eq.u32 %p1, %r2, 0;
setp.gt.u32 %p2, %r2, 4;
mov.u32 %r9, 0;
@%p1 bra LOAD;
@%p2 bra OTHER;
MATHS:
ex2.approx.ftz.f32 %f1, 0f00000000;
add.s32 %r9, %r9, 1;
setp.lt.u32 %p3, %r9, 20;
@%p3 bra MATHS;
setp.eq.u32 %p4, %r1, 40;   // one thread of them does a little more
@%p4 st.shared.b32 [%r3+512], %r1;
bra END;
LOAD:
shl.b32 %r4, %r1, 2;
add.s32 %r5, %r3, %r4;
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd2, %rd1, %rd2;
cp.async.ca.shared.global [%r5], [%rd2], 4;
add.s32 %r9, %r9, 1;
setp.lt.u32 %p3, %r9, 3;
@%p3 bra LOAD;
cp.async.wait_all;
bra END;
OTHER:
st.global.b32 [%rd1+2048], %r2;
add.s32 %r9, %r9, 1;
setp.lt.u32 %p3, %r9, 8;
@%p3 bra OTHER;
END:
"""


def test_roles() -> None:
    kernel = ran(ROLES, block=224)
    assert {role.name: role.warps for role in kernel.roles} == {
        "load": (0,),
        "softmax": (1, 2, 3, 4),
        "store": (5, 6),
    }
    softmax = kernel.roles[1]
    assert softmax.instructions["MUFU"] == 80
    assert softmax.longest == Unit.XU.value
    assert softmax.cycles[Unit.XU.value] == 160
    assert kernel.shared_bytes >= 3 * 128  # copied by cp.async


def test_warps_without_roles() -> None:
    kernel = ran("setp.eq.u32 %p1, %r1, 0;\n@%p1 st.global.b32 [%rd1], 1;\n" + "add.s32 %r1, %r1, 1;\n" * 40, block=128)
    (role,) = kernel.roles
    assert role.warps == (0, 1, 2, 3)


def test_roles_of_one_name_are_numbered() -> None:
    body = (
        """
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra SECOND;
    """
        + "ex2.approx.ftz.f32 %f1, 0f00000000;\n" * 40
        + "bra END;\nSECOND:\n"
    )
    kernel = ran(body + "ex2.approx.ftz.f32 %f2, 0f00000000;\n" * 40 + "END:", block=64)
    assert [role.name for role in kernel.roles] == ["softmax 1", "softmax 2"]


# Text.


def test_warps_as_text() -> None:
    assert warps_text((0, 1, 2, 3, 8, 10, 11)) == "0-3, 8, 10-11"


def test_the_table_names_everything() -> None:
    made = summary(run(THREAD + ROLES, zeros(1024), block=224, arch="sm_90a").profile, tiles=2)
    table = made.table()
    for words in ("H200 (SM90)", "2 tiles", "softmax", "1-4", "<- longest", "global bytes stored", "No measurement"):
        assert words in table
    assert "softmax" in table.split("Roles\n")[1].splitlines()[2]


def test_json() -> None:
    made = summary(run(THREAD + ROLES, zeros(1024), block=224, arch="sm_90a").profile)
    (kernel,) = json.loads(made.to_json())["kernels"]
    assert kernel["roles"][1]["warps"] == [1, 2, 3, 4]
    assert kernel["cycles"]["MUFU, conversions"] == 160
    assert kernel["issued"] == made["k"].issued


def test_comparison() -> None:
    line = "ex2.approx.ftz.f32 %f1, %f2;"
    a, b = (summary(counted(line, {0: count}), chip=H200) for count in (10, 15))
    (longest,) = [row for row in compare(a, b).splitlines() if "cycles, longest" in row]
    assert longest.split()[-3:] == ["80", "120", "1.50"]
    with pytest.raises(ValueError, match="tiles"):
        compare(a, summary(counted(line, {0: 1}), tiles=3))
    with pytest.raises(ValueError, match="no kernel"):
        compare(a, Summary(()))


def test_kernels_by_name() -> None:
    profile = Profile()
    assert summary(profile).table() == "no kernel ran"
    with pytest.raises(KeyError, match="0 kernels"):
        summary(profile)["k"]


def test_command(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("cutlass")
    file = tmp_path / "cases_of_profiles.py"
    file.write_text(
        "import torch\nfrom cutlass import cute\nfrom cutlass.cute.runtime import from_dlpack\n"
        "from simple_kernels import Affine\n"
        "def affine():\n    x, y = torch.ones(256), torch.zeros(256)\n"
        "    cute.compile(Affine(), from_dlpack(x), from_dlpack(y))(from_dlpack(x), from_dlpack(y))\n"
    )
    assert command.main([f"{file}::affine", "--arch", "sm_90a", "--profile", "--tiles", "2"]) == 0
    shown = capsys.readouterr().out
    assert "per tile in what follows" in shown
    assert "global bytes stored" in shown
    target = tmp_path / "profile.json"
    assert command.main([f"{file}::affine", "--arch", "sm_90a", "--json", str(target)]) == 0
    assert json.loads(target.read_text())["kernels"][0]["ctas"] == 2
    assert command.main([f"{file}::affine", "--arch", "sm_90a", "--profile", "--tiles", "0"]) == 2
    assert "0 tiles" in capsys.readouterr().err
