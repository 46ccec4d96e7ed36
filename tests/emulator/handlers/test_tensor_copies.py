# SPDX-License-Identifier: Apache-2.0
"""Tensor copies on the machine: data, barriers, groups, and what is found when a wait or a fence is missing."""

import numpy as np
import pytest
from map_bytes import map_of
from ptx_kernels import SCHEDULES, errors, kinds, run, zeros

from emulator.errors import Unsupported
from emulator.host.tensor_map import Element, decode, encode
from emulator.machine import Machine
from emulator.machine.findings import Kind

# p0 is a map; lane 0 of each warp has %p1. Bytes 0 to 1023 of shared memory are free, mbarriers lie behind.
START = """
mov.u32 %r1, %tid.x;
and.b32 %r2, %r1, 31;
setp.eq.u32 %p1, %r2, 0;
setp.eq.u32 %p3, %r1, 0;
mov.b32 %r3, shared;
add.s32 %r4, %r3, 8192;          // an mbarrier
mov.b64 %rd1, p0;
shl.b32 %r6, %r1, 2;
add.s32 %r7, %r3, %r6;           // the thread's word of shared memory
"""
INIT = """
@%p3 mbarrier.init.shared.b64 [%r4], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
"""
EXPECT = "@%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], {bytes};\n"
LOAD = (
    "@%p3 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[%r3], [%rd1, {{{x}, {y}}}], [%r4];\n"
)
WAIT = """
again:
mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0;
@!%p2 bra again;
"""
# Each thread takes its word to an array: parameter p1.
OUT = """
ld.param.b64 %rd2, [p1];
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd4, %rd2, %rd3;
ld.shared.b32 %r9, [%r7];
st.global.b32 [%rd4], %r9;
"""


def a_matrix(rows: int = 16, columns: int = 16) -> "np.ndarray":
    found = zeros(rows * columns)
    found[:] = np.arange(1, rows * columns + 1)
    return found.reshape(rows, columns)


def load(
    body: str, *, schedule: str = "lazy", source: "np.ndarray | None" = None, out: int = 64, **more
) -> "tuple[Machine, np.ndarray]":
    source = a_matrix() if source is None else source
    result = zeros(out)
    tensor = map_of(source, (8, 8), Element.U32)
    return run(START + body, encode(tensor), result, source, block=64, schedule=schedule, **more), result


def test_maps() -> None:
    tensor = map_of(zeros(64 * 32 * 16).reshape(64, 32, 16), (4, 8, 16), Element.U32, 32)
    # CuTe DSL does not write the upper half.
    assert decode(encode(tensor)[:64].ljust(128, b"\xee")) == tensor


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_load(schedule: str) -> None:
    source = a_matrix()
    machine, out = load(
        INIT + EXPECT.format(bytes=256) + LOAD.format(x=4, y=8) + WAIT + OUT, source=source, schedule=schedule
    )
    assert not errors(machine)
    assert (out.reshape(8, 8) == source[8:16, 4:12]).all()
    events = machine.profile.kernels["k"].events
    assert (events["tensor loads"], events["tensor load bytes"]) == (1, 256)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_zeros_where_a_box_is_out_of_bounds(schedule: str) -> None:
    source = a_matrix()
    machine, out = load(
        INIT + EXPECT.format(bytes=256) + LOAD.format(x=12, y=-5) + WAIT + OUT, source=source, schedule=schedule
    )
    assert not errors(machine)
    wanted = np.zeros((8, 8), np.uint32)
    wanted[5:, :4] = source[:3, 12:]
    assert (out.reshape(8, 8) == wanted).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_load_without_a_wait(schedule: str) -> None:
    machine, _ = load(INIT + EXPECT.format(bytes=256) + LOAD.format(x=0, y=0) + OUT, schedule=schedule)
    assert set(kinds(machine)) & {Kind.RACE, Kind.UNINITIALISED}


@pytest.mark.parametrize("size", [128, 512])
def test_a_wrong_count_of_bytes(size: int) -> None:
    machine, _ = load(INIT + EXPECT.format(bytes=size) + LOAD.format(x=0, y=0) + WAIT + OUT)
    assert Kind.DEADLOCK in kinds(machine)


def test_a_load_over_what_is_being_read() -> None:
    """Words that another warp has read, with and without a barrier in between."""
    write = "st.shared.b32 [%r7], %r1;\nfence.proxy.async;\nbar.sync 0;\n"
    write += "xor.b32 %r8, %r6, 128;\nadd.s32 %r8, %r3, %r8;\nld.shared.b32 %r9, [%r8];\n"
    rest = EXPECT.format(bytes=256) + LOAD.format(x=0, y=0) + WAIT + OUT
    assert not errors(load(INIT + write + "bar.sync 0;\n" + rest)[0])
    assert kinds(load(INIT + write + rest)[0]) == [Kind.RACE]
    unfenced = write.replace("fence.proxy.async;\n", "")
    assert kinds(load(INIT + unfenced + "bar.sync 0;\n" + rest)[0]) == [Kind.PROXY]


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_global_memory_that_the_kernel_wrote(fenced: bool, schedule: str) -> None:
    write = "ld.param.b64 %rd5, [p2];\n@%p3 st.global.b32 [%rd5], 77;\n" + ("fence.proxy.async;\n" if fenced else "")
    machine, out = load(write + INIT + EXPECT.format(bytes=256) + LOAD.format(x=0, y=0) + WAIT + OUT, schedule=schedule)
    assert kinds(machine) == ([] if fenced else [Kind.PROXY])
    assert out[0] == 77


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (LOAD.format(x=0, y=0), Kind.BARRIER),
        (INIT + LOAD.format(x=0, y=0).replace("[%r3]", "[%r3+64]"), Kind.ALIGNMENT),
        (INIT + LOAD.format(x=0, y=0).replace("[%r3]", "[%r3+65408]") + WAIT, Kind.BOUNDS),
        (INIT + LOAD.format(x=1, y=0), Kind.COPY),
        (INIT + "add.s64 %rd1, %rd1, 32;\n" + LOAD.format(x=0, y=0), Kind.ALIGNMENT),
        ("@%p3 mbarrier.init.shared.b64 [%r4], 1;\nsetp.eq.u32 %p3, %r1, 32;\n" + LOAD.format(x=0, y=0), Kind.RACE),
        (INIT + EXPECT.format(bytes=256) + LOAD.format(x=0, y=0), Kind.UNFINISHED),
    ],
)
def test_loads_that_may_not_be(body: str, kind: Kind) -> None:
    assert kind in [finding.kind for finding in errors(load(body)[0])]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rounding_to_tf32(schedule: str) -> None:
    source = zeros(64, np.float32).reshape(8, 8)
    source[:] = np.arange(64).reshape(8, 8) / 7 + 1
    out = zeros(64)
    tensor = map_of(source, (8, 8), Element.F32, tf32=True)
    body = START + INIT + EXPECT.format(bytes=256) + LOAD.format(x=0, y=0) + WAIT + OUT
    assert not errors(run(body, encode(tensor), out, source, block=64, schedule=schedule))
    assert (out & 0x1FFF == 0).all()
    assert np.abs(out.view(np.float32) / source.ravel() - 1).max() < 2**-11 * 1.01


# Stores. Every thread fills its word; the box is 8 x 8 words.
FILL = "add.s32 %r8, %r1, 1;\nst.shared.b32 [%r7], %r8;\n"
FENCE = "fence.proxy.async.shared::cta;\n"
SYNC = "bar.sync 0;\n"
STORE = "@%p3 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {{{x}, {y}}}], [%r3{plus}];\n"
COMMIT = "@%p3 cp.async.bulk.commit_group;\n"
AWAIT = "@%p3 cp.async.bulk.wait_group{read} {left};\n"


def store(body: str, schedule: str = "lazy", rows: int = 16, columns: int = 16) -> "tuple[Machine, np.ndarray]":
    target = zeros(rows * columns).reshape(rows, columns)
    machine = run(START + body, encode(map_of(target, (8, 8), Element.U32)), target, block=64, schedule=schedule)
    return machine, target


def at(x: int, y: int, plus: int = 0) -> str:
    return STORE.format(x=x, y=y, plus=f"+{plus}" if plus else "")


@pytest.mark.parametrize("read", ["", ".read"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_store(schedule: str, read: str) -> None:
    machine, target = store(FILL + FENCE + SYNC + at(4, 12) + COMMIT + AWAIT.format(read=read, left=0), schedule)
    assert not errors(machine)
    wanted = np.zeros((16, 16), np.uint32)
    wanted[12:, 4:12] = np.arange(1, 65).reshape(8, 8)[:4]
    assert (target == wanted).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (FILL + SYNC + at(0, 0) + COMMIT + AWAIT.format(read="", left=0), Kind.PROXY),
        (FILL + FENCE + at(0, 0) + COMMIT + AWAIT.format(read="", left=0), Kind.RACE),
        (FILL + FENCE + SYNC + at(0, 0) + AWAIT.format(read="", left=0), Kind.UNFINISHED),
        (FILL + FENCE + SYNC + at(0, 0) + COMMIT, Kind.UNFINISHED),
        (FILL + FENCE + SYNC + at(0, 0) + COMMIT + AWAIT.format(read="", left=1), Kind.UNFINISHED),
        (FENCE + SYNC + at(0, 0) + COMMIT + AWAIT.format(read="", left=0), Kind.UNINITIALISED),
        (FILL + FENCE + SYNC + at(-4, 0) + COMMIT, Kind.COPY),
    ],
)
def test_stores_that_lack_something(schedule: str, body: str, kind: Kind) -> None:
    assert kind in kinds(store(body, schedule)[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("left", "clean"), [(0, True), (1, False)])
def test_shared_memory_that_a_store_still_reads(schedule: str, left: int, clean: bool) -> None:
    """Two groups; then the second one's memory is written again."""
    body = FILL + "st.shared.b32 [%r7+1024], %r8;\n" + FENCE + SYNC + at(0, 0) + COMMIT + at(8, 8, 1024) + COMMIT
    body += AWAIT.format(read=".read", left=left) + SYNC
    again = body + "st.shared.b32 [%r7+1024], 0;\n" + SYNC + AWAIT.format(read="", left=0)
    assert kinds(store(again, schedule)[0]) == ([] if clean else [Kind.RACE])
    # The first one's memory is free in both cases.
    again = body + "st.shared.b32 [%r7], 0;\n" + SYNC + AWAIT.format(read="", left=0)
    machine, target = store(again, schedule)
    assert not errors(machine)
    assert (target[:8, :8].ravel() == np.arange(1, 65)).all()
    assert (target[8:, 8:].ravel() == np.arange(1, 65)).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("read", "clean"), [("", True), (".read", False)])
def test_reading_back_what_was_stored(schedule: str, read: str, clean: bool) -> None:
    body = FILL + FENCE + SYNC + at(0, 0) + COMMIT + AWAIT.format(read=read, left=0) + SYNC
    body += "ld.param.b64 %rd2, [p1];\nld.global.b32 %r9, [%rd2];\n"
    assert kinds(store(body, schedule)[0]) == ([] if clean else [Kind.RACE])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_wait_for_reads_leaves_the_writes_to_wait_for(schedule: str) -> None:
    body = FILL + FENCE + SYNC + at(0, 0) + COMMIT + AWAIT.format(read=".read", left=0)
    body += AWAIT.format(read="", left=0) + SYNC + "ld.param.b64 %rd2, [p1];\nld.global.b32 %r9, [%rd2];\n"
    machine, target = store(body + "setp.ne.u32 %p4, %r9, 1;\n@%p4 trap;\n", schedule)
    assert not errors(machine)
    assert target[0, 0] == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_groups_are_the_threads_that_commit(schedule: str) -> None:
    """Lane 0 issues the copy; lane 1 commits, and waits for nothing."""
    others = (COMMIT + AWAIT.format(read="", left=0)).replace("%p3", "%p4")
    body = "setp.eq.u32 %p4, %r1, 1;\n" + FILL + FENCE + SYNC + at(0, 0) + others
    machine, _ = store(body, schedule)
    assert kinds(machine) == [Kind.UNFINISHED]
    assert "never committed" in errors(machine)[0].message


def test_a_store_over_what_was_read_needs_no_fence() -> None:
    """Threads read the target; what is stored into it came by a load, so that nothing else needs a fence either."""
    target, out = a_matrix(8, 8), zeros(64)
    before = target.copy().ravel()
    read = (
        "ld.param.b64 %rd5, [p2];\nmul.wide.u32 %rd6, %r1, 4;\nadd.s64 %rd6, %rd5, %rd6;\nld.global.b32 %r9, [%rd6];\n"
    )
    read += (
        "ld.param.b64 %rd5, [p1];\nmul.wide.u32 %rd6, %r1, 4;\nadd.s64 %rd6, %rd5, %rd6;\nst.global.b32 [%rd6], %r9;\n"
    )
    body = START + INIT + EXPECT.format(bytes=256) + LOAD.format(x=0, y=4) + WAIT + read
    rest = at(0, 0) + COMMIT + AWAIT.format(read="", left=0)
    tensor = encode(map_of(target, (8, 8), Element.U32))
    assert not errors(run(body + SYNC + rest, tensor, out, target, block=64))
    assert (out == before).all()
    assert (target.ravel() == [*before[32:], *[0] * 32]).all()
    assert kinds(run(body + rest, tensor, out, target, block=64)) == [Kind.RACE]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("who", ["@%p3 ", "@%p4 "])
def test_a_warp_reduces_once(schedule: str, who: str) -> None:
    """Four CTAs add; within a CTA one thread or one whole warp does."""
    target = zeros(64, np.float32).reshape(8, 8)
    body = START + "setp.lt.u32 %p4, %r1, 32;\ncvt.rn.f32.u32 %f1, %r1;\nst.shared.f32 [%r7], %f1;\n" + FENCE + SYNC
    body += "@%p3 cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd1, {0, 0}], [%r3];\n"
    body = (body + COMMIT + AWAIT.format(read="", left=0)).replace("@%p3 ", who)
    machine = run(body, encode(map_of(target, (8, 8), Element.F32)), target, block=64, grid=4, schedule=schedule)
    assert not errors(machine)
    assert (target.ravel() == 4 * np.arange(64)).all()


def test_stores_of_two_ctas_to_one_place() -> None:
    target = zeros(64).reshape(8, 8)
    body = START + FILL + FENCE + SYNC + at(0, 0) + COMMIT + AWAIT.format(read="", left=0)
    assert kinds(run(body, encode(map_of(target, (8, 8), Element.U32)), target, block=64, grid=2)) == [Kind.RACE]


# Clusters. The rank of the CTA is %r20; every one has an mbarrier.
CLUSTER = (
    START
    + "mov.u32 %r20, %cluster_ctarank;\n"
    + INIT
    + "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    + "setp.eq.u32 %p5, %r20, 0;\nand.pred %p5, %p5, %p3;\n"
)
END = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
OUT_OF_CLUSTER = OUT.replace("mul.wide.u32 %rd3, %r1, 4", "mad.lo.s32 %r10, %r20, 64, %r1;\nmul.wide.u32 %rd3, %r10, 4")
MULTICAST = (
    "@%p5 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster{group} "
    "[%r3], [%rd1, {{0, 0}}], [{mbar}], {mask};\n"
)


def multicast(body: str, schedule: str = "lazy", cluster: int = 2) -> "tuple[Machine, np.ndarray, np.ndarray]":
    source, out = a_matrix(), zeros(64 * cluster)
    tensor = map_of(source, (8, 8), Element.U32)
    machine = run(
        CLUSTER + body, encode(tensor), out, source, block=64, grid=cluster, cluster=cluster, schedule=schedule
    )
    return machine, out.reshape(cluster, 8, 8), source[:8, :8]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_multicast(schedule: str) -> None:
    body = EXPECT.format(bytes=256) + MULTICAST.format(group="", mbar="%r4", mask=3) + WAIT + OUT_OF_CLUSTER + END
    machine, out, wanted = multicast(body, schedule)
    assert not errors(machine)
    assert (out == wanted).all()
    assert machine.profile.kernels["k"].events["tensor load bytes multicast"] == 256


@pytest.mark.parametrize("mask", [0, 4])
def test_multicast_to_nobody(mask: int) -> None:
    assert kinds(multicast(MULTICAST.format(group="", mbar="%r4", mask=mask) + END)[0]) == [Kind.COPY]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_pair_of_a_destination(schedule: str) -> None:
    """Of four CTAs the odd ones' bytes complete on the even ones' mbarriers, and the even ones tell them."""
    leader = "and.b32 %r21, %r20, 1;\nsetp.eq.u32 %p6, %r21, 0;\nand.pred %p7, %p6, %p3;\n"
    expect = EXPECT.format(bytes=512).replace("%p3", "%p7")
    wait = "@!%p6 bra after;\n" + WAIT + "after:\n"
    body = leader + expect + MULTICAST.format(group=".cta_group::2", mbar="%r4", mask=15) + wait + END + OUT_OF_CLUSTER
    machine, out, wanted = multicast(body, schedule, cluster=4)
    assert not errors(machine)
    assert (out == wanted).all()


def test_an_mbarrier_of_the_wrong_cta() -> None:
    other = "mapa.shared::cluster.u32 %r22, %r4, 1;\n"
    single = "@%p5" + LOAD.format(x=0, y=0)[4:].replace("[%r4]", "[%r22]")
    assert kinds(multicast(other + single + END)[0]) == [Kind.BARRIER]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_rows_at_a_time(schedule: str) -> None:
    """Rows 3, 1, 9 (out of bounds) and 0 come, and go to rows 0 to 3 of another matrix, the last one left out."""
    source, target = a_matrix(8, 32), a_matrix(3, 32)
    before = target.copy()
    body = START + INIT + EXPECT.format(bytes=512) + LOAD.replace("tile", "tile::gather4").format(x="0, 3, 1", y="9, 0")
    body += (
        WAIT
        + FENCE
        + "mov.b64 %rd1, p1;\n"
        + at(0, 0).replace("tile", "tile::scatter4").replace("{0, 0}", "{0, 0, 1, 2, 3}")
    )
    body += COMMIT + AWAIT.format(read="", left=0)
    maps = [encode(map_of(array, (32, 1), Element.U32)) for array in (source, target)]
    machine = run(body, *maps, source, target, block=64, schedule=schedule)
    assert not errors(machine)
    assert (target[:2] == source[[3, 1]]).all()
    assert (target[2] == 0).all()
    assert (before[2] != 0).all()


def test_maps_in_global_memory() -> None:
    source, result = a_matrix(), zeros(64)
    stored = zeros(128, np.uint8)
    stored[:] = np.frombuffer(encode(map_of(source, (8, 8), Element.U32)), np.uint8)
    body = START + "ld.param.b64 %rd1, [p0];\n" + INIT + EXPECT.format(bytes=256) + LOAD.format(x=0, y=0) + WAIT + OUT
    assert not errors(run(body, stored, result, source, block=64))
    assert (result.reshape(8, 8) == source[:8, :8]).all()


@pytest.mark.parametrize("swizzle", ["0", "1"])
@pytest.mark.parametrize("space", ["shared::cta", "global"])
def test_maps_that_the_kernel_changes(space: str, swizzle: str) -> None:
    """A map of another matrix in tf32 becomes one of rows 2 to 9 of the source, every second one, 12 columns."""
    source, other, result = a_matrix(), a_matrix(4, 4), zeros(64)
    stored, target = zeros(128, np.uint8), zeros(128, np.uint8)
    stored[:] = np.frombuffer(encode(map_of(other, (4, 4), Element.F32, tf32=True)), np.uint8)
    # Parameters: the map, where it is copied to, the result, the source.
    body = START + "ld.param.b64 %rd1, [p1];\nld.param.b64 %rd10, [p0];\nld.param.b64 %rd11, [p3];\n"
    body += "setp.lt.u32 %p4, %r1, 32;\n@!%p4 bra behind;\nmul.wide.u32 %rd12, %r1, 4;\nadd.s64 %rd13, %rd10, %rd12;\n"
    body += "ld.global.b32 %r9, [%rd13];\nst.shared.b32 [%r7+1024], %r9;\nadd.s64 %rd11, %rd11, 128;\n"
    copy = (
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd1], [%r8], 128;\n"
    )
    body += "add.s32 %r8, %r3, 1024;\nbar.warp.sync -1;\n" + ("" if space == "shared::cta" else copy)
    at = "[%r8]" if space == "shared::cta" else "[%rd1]"
    for field, kind, operands in (
        ("global_address", "b64", "%rd11"),
        ("global_dim", "b32", "0, 12"),
        ("global_dim", "b32", "1, 4"),
        ("global_stride", "b64", "0, 128"),
        ("box_dim", "b32", "0, 8"),
        ("box_dim", "b32", "1, 8"),
        ("rank", "b32", "1"),
        ("element_stride", "b32", "1, 1"),
        ("elemtype", "b32", "2"),
        ("interleave_layout", "b32", "0"),
        ("swizzle_mode", "b32", swizzle),
        ("fill_mode", "b32", "0"),
    ):
        body += f"@%p3 tensormap.replace.tile.{field}.{space}.b1024.{kind} {at}, {operands};\n"
    body += "bar.warp.sync -1;\n" + (copy if space == "shared::cta" else "")
    body += "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;\nbehind:\n"
    # With the pattern of 32 bytes, that is: with the halves of rows 4 to 7 of the box exchanged.
    first = 4 if swizzle == "1" else 0
    rest = EXPECT.format(bytes=256) + LOAD.format(x=4, y=-first) + WAIT + OUT.replace("[p1]", "[p2]")
    machine = run(body + INIT + rest, stored, target, result, source, other, block=64)
    assert not errors(machine)
    wanted = np.zeros((8, 8), np.uint32)
    wanted[first : first + 4] = np.roll(source[2:10:2, 4:12], first, axis=1)
    assert (result.reshape(8, 8) == wanted).all()


@pytest.mark.parametrize(
    ("field", "value"), [("elemtype", 12), ("interleave_layout", 1), ("swizzle_mode", 4), ("fill_mode", 1)]
)
def test_fields_of_maps_that_nobody_knows(field: str, value: int) -> None:
    line = f"@%p3 tensormap.replace.tile.{field}.shared::cta.b1024.b32 [%r3], {value};\n"
    with pytest.raises(Unsupported, match=f"{field} by {value}"):
        load("@%p3 st.shared.b32 [%r3], 1;\n" + line)


def test_the_last_chunk_of_a_tensor() -> None:
    """A store writes 16 bytes where some of them are in bounds; what lies behind the tensor's memory is nobody's."""
    target = zeros(6)
    tensor = map_of(target.reshape(1, 6), (8, 8), Element.U32)
    body = START + FILL + FENCE + SYNC + at(0, 0) + COMMIT + AWAIT.format(read="", left=0)
    assert not errors(run(body, encode(tensor), target, block=64))
    assert target.tolist() == [1, 2, 3, 4, 5, 6]
