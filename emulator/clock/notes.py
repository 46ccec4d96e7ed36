# SPDX-License-Identifier: Apache-2.0
"""What an instruction asks of the machine, taken down before it executes: events for the replay (replay.h).

A note decodes operands and nothing else: whether the instruction may do what it asks is the machine's business.
"""

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from emulator.core.program import RANK_SHIFT
from emulator.machine.access import by_space
from emulator.machine.banks import wavefronts
from emulator.machine.cluster import OFFSET
from emulator.machine.handlers.barriers import STATE_PHASE, each, mbarrier
from emulator.machine.handlers.copies import present
from emulator.machine.handlers.issue import distinct
from emulator.machine.handlers.memory import items, space_of
from emulator.machine.handlers.tensor_maps import tensor_map
from emulator.machine.tcgen05 import KINDS, InstructionDescriptor
from emulator.machine.watch import MATRIX_ROW, RATE_OF_KIND, matrices_of
from emulator.ptx.ir import BITS, Address, Imm, Instr, Operand, TensorAddress, Vec

if TYPE_CHECKING:
    from emulator.machine.runner import Runner

# In the order of replay.h.
SHARED, GLOBAL, BAR, CLUSTER, INIT, ARRIVE, WAIT, LOAD, TARGET, STORE, CP_ASYNC, CP_ARRIVE = range(12)
MMA, COMMIT, TENSOR_MOVE, DISTANT = range(12, 16)
NOWHERE, OTHER_SM = -1, -2  # in place of a region: what L2 has, such as parameters; shared memory of the cluster
SECTOR, LINE, WARP = 32, 128, 32
WRITES = 1
SHARED_WINDOW = (1 << 60) - 1
MMA_CYCLE_BYTES = 128  # that tensor cores take from shared memory in a cycle


class Note(NamedTuple):
    """An event: three numbers whose meaning its kind gives."""

    kind: int
    a: int = 0
    b: int = 0
    c: int = 0


Noter: TypeAlias = "Callable[[Runner, Instr], list[Note]]"
NOTERS: dict[str, Noter] = {}


def noter_of(instr: Instr) -> "Noter | None":
    return NOTERS.get(instr.op.form.id)


def _notes(*forms: str) -> Callable[[Noter], Noter]:
    def register(noter: Noter) -> Noter:
        for form in forms:
            NOTERS[form] = noter
        return noter

    return register


def region_of(runner: "Runner", address: int) -> int:
    """The launch's region that an address is in: its place among them by address; NOWHERE without one."""
    regions = runner.run.launch.regions
    place = bisect_right(regions, address, key=lambda region: region.address) - 1
    return place if place >= 0 and address < regions[place].end else NOWHERE


# Loads and stores.


def _size(instr: Instr, operand: Operand | None) -> int:
    assert operand is not None
    return BITS[instr.op["type"] or ""] // 8 * len(items(operand))


def _shared(runner: "Runner", addresses: NDArray[np.int64], lanes: NDArray[np.int64], size: int) -> list[Note]:
    addresses = addresses & SHARED_WINDOW
    own = addresses >> RANK_SHIFT == runner.cta.rank
    found = [] if own.all() else [Note(DISTANT, size * int((~own).sum()))]
    return [*found, Note(SHARED, wavefronts(addresses[own], size, lanes[own]).needed)] if own.any() else found


def _global(runner: "Runner", addresses: NDArray[np.int64], size: int, *, writes: bool) -> list[Note]:
    sectors = np.unique(addresses // SECTOR)
    if size > SECTOR or (addresses % SECTOR + size > SECTOR).any():
        sectors = np.unique((addresses[:, None] + np.arange(0, size, 4)) // SECTOR)
    lines = np.unique(sectors // (LINE // SECTOR)).size
    passes = max(lines, -(-size * addresses.size // LINE))
    return [Note(GLOBAL, region_of(runner, int(addresses[0])), SECTOR * sectors.size, int(writes) | passes << 8)]


def _access(runner: "Runner", instr: Instr, size: int, *, writes: bool) -> list[Note]:
    address = instr["a"]
    assert isinstance(address, Address)
    addresses = runner.warp.address(address)[runner.lanes]
    space = space_of(instr)
    parts = by_space(addresses) if space is None else [(space, np.arange(addresses.size), addresses)]
    found: list[Note] = []
    for where, places, some in parts:
        if where == "shared":
            found += _shared(runner, some, runner.lanes[places], size)
        elif where == "global":
            found += _global(runner, some, size, writes=writes)
    return found


@_notes("ld", "ld#nc")
def _load(runner: "Runner", instr: Instr) -> list[Note]:
    return _access(runner, instr, _size(instr, instr["d"]), writes=False)


@_notes("st")
def _store(runner: "Runner", instr: Instr) -> list[Note]:
    return _access(runner, instr, _size(instr, instr["b"]), writes=True)


@_notes("atom", "red")
def _atomic(runner: "Runner", instr: Instr) -> list[Note]:
    """An atomic operation is done in L2, and its result comes back; a reduction is a store."""
    return _access(runner, instr, _size(instr, instr["b"]), writes=instr.op.name == "red")


@_notes("ldmatrix", "stmatrix")
def _matrices(runner: "Runner", instr: Instr) -> list[Note]:
    address = instr["a"]
    assert isinstance(address, Address)
    lanes = runner.lanes[: 8 * matrices_of(instr)]
    return _shared(runner, runner.warp.address(address)[lanes], lanes, MATRIX_ROW)


# Barriers.


@_notes(*(f"{name}.{what}" for name in ("bar", "bar.cta", "barrier", "barrier.cta") for what in ("sync", "arrive")))
@_notes("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red")
def _barrier(runner: "Runner", instr: Instr) -> list[Note]:
    number, threads = instr["id"], instr["threads"]
    assert number is not None
    count = runner.cta.threads if threads is None else runner.warp.uniform(threads)
    return [Note(BAR, runner.warp.uniform(number), count, int(not instr.op.name.endswith("arrive")))]


@_notes("barrier.cluster.arrive", "barrier.cluster.wait")
def _cluster_barrier(runner: "Runner", instr: Instr) -> list[Note]:
    return [Note(CLUSTER, int(instr.op.name.endswith("wait")))]


def _key(address: int) -> int:
    """An mbarrier: the rank of its CTA and its offset there."""
    return address & SHARED_WINDOW


@_notes("mbarrier.init")
def _init(runner: "Runner", instr: Instr) -> list[Note]:
    count = instr["count"]
    assert count is not None
    return [Note(INIT, _key(at), runner.warp.uniform(count, mask)) for at, mask in each(runner, instr["mbar"])]


@_notes("mbarrier.arrive", "mbarrier.arrive.noComplete", "mbarrier.arrive_drop", "mbarrier.arrive_drop.noComplete")
def _arrive(runner: "Runner", instr: Instr) -> list[Note]:
    count = instr["count"]
    times = 1 if count is None else runner.warp.uniform(count)
    return [Note(ARRIVE, _key(at), times * mask.bit_count()) for at, mask in each(runner, instr["mbar"])]


@_notes("mbarrier.arrive.expect_tx", "mbarrier.arrive_drop.expect_tx", "mbarrier.expect_tx", "mbarrier.complete_tx")
def _expect(runner: "Runner", instr: Instr) -> list[Note]:
    count = instr["bytes"]
    assert count is not None
    amount = runner.warp.uniform(count) & 0xFFFFFFFF
    arrives, completes = "arrive" in instr.op.name, "complete" in instr.op.name
    return [
        Note(ARRIVE, _key(at), mask.bit_count() * arrives, amount * mask.bit_count() * (-1 if completes else 1))
        for at, mask in each(runner, instr["mbar"])
    ]


@_notes("mbarrier.try_wait", "mbarrier.try_wait.parity", "mbarrier.test_wait", "mbarrier.test_wait.parity")
def _wait(runner: "Runner", instr: Instr) -> list[Note]:
    """The phase whose end is waited for. Lanes that wait for several barriers wait for the first of them."""
    by_parity = "parity" in instr.op.name
    operand = instr["phase" if by_parity else "state"]
    assert operand is not None
    at, mask = each(runner, instr["mbar"])[0]
    value, barrier = runner.warp.uniform(operand, mask), mbarrier(runner, at)
    if not by_parity:
        return [Note(WAIT, _key(at), value & STATE_PHASE)]
    return [Note(WAIT, _key(at), barrier.phase - 1 if barrier.is_complete(value) else barrier.phase)]


@_notes("cp.async.mbarrier.arrive")
def _copies_arrive(runner: "Runner", instr: Instr) -> list[Note]:
    counted = int(instr.op["noinc"] is not None)
    return [Note(CP_ARRIVE, _key(at), mask.bit_count(), counted) for at, mask in each(runner, instr["mbar"])]


# Copies.


@_notes("cp.async", "cp.async#ignore")
def _copy(runner: "Runner", instr: Instr) -> list[Note]:
    source, size = instr["a"], instr["size"]
    assert isinstance(source, Address)
    assert isinstance(size, Imm)
    ((_, region, sectors, passes),) = _global(
        runner, runner.warp.address(source)[runner.lanes], size.value, writes=False
    )
    return [Note(CP_ASYNC, region, sectors, passes >> 8)]


def _targets(runner: "Runner", region: int, size: int, at: int, to: int, mask: int | None) -> list[Note]:
    """A load into shared memory: a target is a CTA and its mbarrier."""
    own = (_key(to) >> RANK_SHIFT) if mask is None else 0
    ranks = [own] if mask is None else [rank for rank in range(16) if mask >> rank & 1]
    return [
        Note(LOAD, region, size),
        *(Note(TARGET, rank, _key(at) if mask is None else rank << RANK_SHIFT | at & OFFSET) for rank in ranks),
    ]


@_notes("cp.async.bulk.tensor#load")
def _tensor_load(runner: "Runner", instr: Instr) -> list[Note]:
    address = instr["map"]
    assert isinstance(address, TensorAddress)
    multicast = instr.op["multicast"] is not None
    roles = present(instr, "d", "mbar", *(["mask"] if multicast else []))
    found: list[Note] = []
    for at, to, signal, *mask in dict.fromkeys(
        row[: 3 + multicast] for row in distinct(runner, address.map, *roles, *address.coordinates)
    ):
        tensor = tensor_map(runner, at)
        region = region_of(runner, tensor.address)
        found += _targets(runner, region, tensor.box_bytes, signal, to, mask[0] & 0xFFFF if mask else None)
    return found


@_notes("cp.async.bulk.tensor#store", "cp.reduce.async.bulk.tensor")
def _tensor_store(runner: "Runner", instr: Instr) -> list[Note]:
    address = instr["map"]
    assert isinstance(address, TensorAddress)
    rows = distinct(runner, address.map, *present(instr, "a"), *address.coordinates)
    maps = [tensor_map(runner, row[0]) for row in rows]
    return [Note(STORE, region_of(runner, tensor.address), tensor.box_bytes) for tensor in maps]


@_notes("cp.async.bulk#load")
def _bulk_load(runner: "Runner", instr: Instr) -> list[Note]:
    multicast = instr.op["multicast"] is not None
    roles = present(instr, "d", "a", "size", "mbar", *(["mask"] if multicast else []))
    found: list[Note] = []
    for to, source, size, at, *mask in distinct(runner, *roles):
        found += _targets(runner, region_of(runner, source), size, at, to, mask[0] & 0xFFFF if mask else None)
    return found


@_notes("cp.async.bulk#store", "cp.reduce.async.bulk#store")
def _bulk_store(runner: "Runner", instr: Instr) -> list[Note]:
    return [Note(STORE, region_of(runner, to), size) for to, size in distinct(runner, *present(instr, "d", "size"))]


@_notes("cp.async.bulk#cluster", "cp.reduce.async.bulk#cluster")
def _bulk_cluster(runner: "Runner", instr: Instr) -> list[Note]:
    found: list[Note] = []
    for to, size, at in distinct(runner, *present(instr, "d", "size", "mbar")):
        found += _targets(runner, OTHER_SM, size, at, to, None)
    return found


@_notes("st.async", "red.async")
def _store_async(runner: "Runner", instr: Instr) -> list[Note]:
    size = _size(instr, instr["b"])
    return [
        note
        for at, mask in each(runner, instr["mbar"])
        for note in _targets(runner, OTHER_SM, size * mask.bit_count(), at, at, None)
    ]


@_notes("clusterlaunchcontrol.try_cancel")
def _cancel(runner: "Runner", instr: Instr) -> list[Note]:
    ranks = len(runner.cta.cluster.ctas)
    mask = (1 << ranks) - 1 if instr.op["multicast"] else None
    roles = present(instr, "d", "mbar")
    return [note for to, at in distinct(runner, *roles) for note in _targets(runner, OTHER_SM, 16, at, to, mask)]


# tcgen05.


@lru_cache(maxsize=1024)
def mma_cycles(kind: str, bits: int, *, pair: bool, a_in_tensor_memory: bool) -> tuple[int, int]:
    """(Interval, latency) of a tcgen05.mma in cycles.

    The laws of microbench-blackwell's tables (umma_throughput/tput_results_max.csv, umma_latency/fit_results.csv): N/2
    cycles for 128 rows of one CTA or 256 of a pair, or what shared memory takes for the operands at 128 bytes a cycle;
    a chain takes 116 cycles beyond its intervals with A in tensor memory, 140 without, 34 more for a pair.
    """
    found = InstructionDescriptor.of(kind, bits)
    ctas = 2 if pair else 1
    rows = found.m // ctas
    rate = {"f16": 16, "tf32": 8, "f8": 32, "i8": 32, "f4": 64}[RATE_OF_KIND[kind]]
    work = found.n / 2 * (found.k / rate) * (1 if rows > 64 else 1 if not pair else 0.5)
    width = KINDS[kind].container or {16: 16, 8: 32, 32: 8, 64: 4}[rate]
    a_bytes = 0 if a_in_tensor_memory else rows * found.k * width // 8
    b_bytes = found.n * found.k * width // 8 // ctas
    latency = (116 if a_in_tensor_memory else 140) + (34 if pair else 0)
    return round(max(work, (a_bytes + b_bytes) / MMA_CYCLE_BYTES)), latency


@_notes("tcgen05.mma#ss", "tcgen05.mma#ts", "tcgen05.mma#scaled_ss", "tcgen05.mma#scaled_ts")
def _multiply(runner: "Runner", instr: Instr) -> list[Note]:
    operand = instr["idesc"]
    assert operand is not None
    pair = instr.op["group"] == "cta_group::2"
    kind = (instr.op["kind"] or "").removeprefix("kind::")
    bits = runner.warp.uniform(operand) & 0xFFFFFFFF
    cycles, latency = mma_cycles(kind, bits, pair=pair, a_in_tensor_memory=instr.op.form.id.endswith("ts"))
    return [Note(MMA, cycles, latency, int(pair))]


@_notes("tcgen05.cp")
def _copy_to_tensor(runner: "Runner", instr: Instr) -> list[Note]:
    rows, bits = (int(part) for part in (instr.op["shape"] or "").removesuffix("b").split("x"))
    return [Note(MMA, max(1, rows * bits // 8 // MMA_CYCLE_BYTES), 0, int(instr.op["group"] == "cta_group::2"))]


@_notes("tcgen05.commit")
def _commit(runner: "Runner", instr: Instr) -> list[Note]:
    ((at, mask), *_) = each(runner, instr["mbar"])
    if not instr.op["multicast"]:
        return [Note(COMMIT, _key(at), 1)]
    operand = instr["mask"]
    assert operand is not None
    ranks = runner.warp.uniform(operand, mask) & 0xFFFF
    return [Note(COMMIT, rank << RANK_SHIFT | at & OFFSET, 1) for rank in range(16) if ranks >> rank & 1]


@_notes("tcgen05.ld", "tcgen05.ld.red", "tcgen05.st")
def _move_tensor(runner: "Runner", instr: Instr) -> list[Note]:
    operand = instr["b"] if instr.op.name == "tcgen05.st" else instr["d"]
    count = len(operand.items) if isinstance(operand, Vec) else 1
    return [Note(TENSOR_MOVE, 4 * WARP * count)]
