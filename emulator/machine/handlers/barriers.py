# SPDX-License-Identifier: Apache-2.0
"""Barriers: of a CTA, of a cluster, and mbarriers (PTX ISA 9.2, 9.7.13.1 to 9.7.13.4 and 9.7.13.15)."""

from functools import partial
from typing import NamedTuple

import numpy as np

from emulator.core.program import RANK_SHIFT, SHARED_BASE
from emulator.core.warp import lanes_of
from emulator.errors import Unsupported
from emulator.machine.access import touch_shared
from emulator.machine.barriers import MAX_COUNT, BarrierMisuse, MBarrier, NamedBarrier
from emulator.machine.clocks import Clock, Knowledge
from emulator.machine.cluster import OFFSET, Cta
from emulator.machine.findings import Kind
from emulator.machine.handlers.memory import mask_of
from emulator.machine.handlers.registry import executes
from emulator.machine.runner import Abort, Runner, Wait
from emulator.ptx.ir import Address, Instr, Operand

WARP = 32
MBARRIER_BYTES = 8
NAMED_BARRIERS = 16


def together(runner: Runner, instr: Instr) -> None:
    """Ends the launch unless all lanes of the warp that have not ended execute a barrier's instruction at once.

    A warp arrives as a whole (9.7.13.1): with `bar` and `.aligned` what happens else is undefined.

    Raises:
        Unsupported: an instruction that lets lanes arrive one after the other, where they do.
    """
    missing = runner.warp.live & ~runner.mask
    if not missing:
        return
    message = f"{instr.op.name} is executed by lanes {runner.mask:#010x} without lanes {missing:#010x} of their warp"
    if instr.op.name.startswith("barrier") and not instr.op["aligned"]:
        raise Unsupported(f"{message}, on line {instr.line}: warps are emulated that arrive as a whole")
    runner.report(Kind.ALIGNED, message)
    raise Abort


def named(runner: Runner, instr: Instr) -> tuple[NamedBarrier, int, bool]:
    """The barrier, how many threads take part, and whether these are all that there are."""
    number = instr["id"]
    assert number is not None
    index = runner.warp.uniform(number)
    if index >= NAMED_BARRIERS:
        raise BarrierMisuse(f"barrier {index}: a CTA has {NAMED_BARRIERS}")
    threads = instr["threads"]
    if threads is None:
        return runner.cta.barrier(index), runner.cta.threads, True
    count = runner.warp.uniform(threads)
    if count == 0 or count % WARP:
        raise BarrierMisuse(f"barrier {index} for {count} threads: a positive multiple of {WARP} is possible")
    if count > runner.run.warps * WARP:
        raise BarrierMisuse(f"barrier {index} for {count} threads: the CTA has {runner.run.warps * WARP}")
    return runner.cta.barrier(index), count, False


def arrive(runner: Runner, instr: Instr) -> tuple[NamedBarrier, int]:
    together(runner, instr)
    barrier, threads, everyone = named(runner, instr)
    barrier.follow(runner.clock.history)
    target = barrier.arrive(runner.clock, WARP, threads, everyone=everyone)
    runner.run.progress += 1
    return barrier, target


@executes("bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync")
def execute_sync(runner: Runner, instr: Instr) -> Wait:
    barrier, target = arrive(runner, instr)
    return Wait(f"waits at {barrier}", lambda: barrier.round >= target, partial(acquire_released, runner, barrier))


@executes("bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive")
def execute_arrive(runner: Runner, instr: Instr) -> None:
    arrive(runner, instr)


@executes("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red")
def execute_red(runner: Runner, instr: Instr) -> Wait:
    """The predicates of all threads, reduced: the barrier's votes are kept until the round is complete."""
    together(runner, instr)
    barrier, threads, everyone = named(runner, instr)
    source, to = instr["a"], instr["d"]
    assert source is not None
    assert to is not None
    op = instr.op["op"]
    votes = runner.run.votes.setdefault((id(barrier), barrier.round + 1), [])
    votes.append((runner.warp.pred(source), runner.mask))
    barrier.follow(runner.clock.history)
    target = barrier.arrive(runner.clock, WARP, threads, everyone=everyone)
    runner.run.progress += 1
    mask = runner.mask

    def then() -> None:
        acquire_released(runner, barrier)
        if op == "popc":
            runner.warp.put32(to, sum(holds.bit_count() for holds, _ in votes), mask)
            return
        result = all(holds == of for holds, of in votes) if op == "and" else any(holds for holds, _ in votes)
        runner.warp.put_pred(to, mask if result else 0, mask)

    return Wait(f"waits at {barrier}", lambda: barrier.round >= target, then)


TARGET, AHEAD = "cluster target", "cluster arrivals ahead of waits"
ARRIVAL = "cluster arrival"  # index of the latest


@executes("barrier.cluster.arrive")
def execute_cluster_arrive(runner: Runner, instr: Instr) -> Wait | None:
    """A warp that arrives again before it has waited, waits first, and has one wait too many to its credit."""
    together(runner, instr)
    barrier = runner.cta.cluster.barrier
    earlier = runner.state.get(TARGET)
    if not isinstance(earlier, int):
        arrive_at_cluster(runner, instr)
        return None
    # FlashAttention-4 does it where it sets up a pipeline between the halves of a barrier.
    runner.report(Kind.BARRIER, f"{barrier}: {runner.name} arrives again without having waited", warning=True)
    ahead = runner.state.get(AHEAD)
    if ahead is None:
        runner.at_end.append(partial(check_cluster_waits, runner))
    runner.state[AHEAD] = (ahead if isinstance(ahead, int) else 0) + 1
    return Wait(
        f"arrives again at {barrier}", lambda: barrier.round >= earlier, partial(arrive_at_cluster, runner, instr)
    )


def arrive_at_cluster(runner: Runner, instr: Instr) -> None:
    cluster = runner.cta.cluster
    clock = releasing(runner, instr)
    if clock is None and runner.fence is not None:
        cluster.barrier.hand(runner.fence)
    if ARRIVAL not in runner.state:
        runner.at_end.append(partial(check_cluster_end, runner))
    runner.state[ARRIVAL] = runner.index
    cluster.barrier.follow(runner.clock.history)
    runner.state[TARGET] = cluster.barrier.arrive(clock, WARP, cluster.threads, everyone=True)
    runner.run.progress += 1


def check_cluster_end(runner: Runner) -> None:
    """At a warp's end: it has waited where it arrived last. Without that its CTA may end while others still use it."""
    index = runner.state[ARRIVAL]
    if TARGET in runner.state and isinstance(index, int):
        message = f"{runner.name} ends without a wait at the cluster's barrier, where it has arrived"
        runner.report(Kind.UNFINISHED, message, index=index, warning=True)


def check_cluster_waits(runner: Runner) -> None:
    """At a warp's end: what it arrived more often is made up for by waits."""
    if runner.state[AHEAD]:
        barrier = runner.cta.cluster.barrier
        runner.report(Kind.BARRIER, f"{barrier}: {runner.name} has arrived more often than it has waited")


@executes("barrier.cluster.wait")
def execute_cluster_wait(runner: Runner, instr: Instr) -> Wait | None:
    together(runner, instr)
    barrier = runner.cta.cluster.barrier
    target, ahead = runner.state.pop(TARGET, None), runner.state.get(AHEAD)
    if isinstance(target, int):
        then = partial(acquire_released, runner, barrier)
        return Wait(f"waits at {barrier}", lambda: barrier.round >= target, then)
    if not isinstance(ahead, int) or not ahead:
        raise BarrierMisuse(f"{barrier}: {runner.name} waits without having arrived")
    runner.state[AHEAD] = ahead - 1
    return None


def acquire_released(runner: Runner, barrier: NamedBarrier) -> None:
    runner.clock.acquire(barrier.released)
    runner.clock.follow(barrier.history)


# mbarriers.


def locate(runner: Runner, address: int) -> tuple[Cta, int]:
    """The CTA and the offset of a shared address, or of a generic one that points to shared memory."""
    address &= SHARED_BASE - 1
    rank = address >> RANK_SHIFT
    ctas = runner.cta.cluster.ctas
    if rank >= len(ctas):
        raise BarrierMisuse(f"an mbarrier at shared address {address:#x}: the cluster has {len(ctas)} CTAs")
    return ctas[rank], address & OFFSET


def mbarrier(runner: Runner, address: int, *, index: int | None = None) -> MBarrier:
    """The mbarrier at an address; its initialisation must be ordered before its use."""
    cta, offset = locate(runner, address)
    barrier = cta.mbarriers.get(offset)
    if barrier is None:
        raise BarrierMisuse(f"{cta.name} has no mbarrier at shared address {offset:#x}: it was never initialised")
    if cta is not runner.cta and all(other.done for other in cta.runners):
        raise BarrierMisuse(f"{barrier} is used after {cta.name} has ended")
    component, clock = barrier.made
    if runner.clock.knows.seen[component] < clock:
        runner.report(
            Kind.RACE, f"{barrier.name} is used, and nothing orders its initialisation before that", index=index
        )
        runner.clock.knows.learn(component, clock)
    return barrier


def each(runner: Runner, operand: Operand | None) -> list[tuple[int, int]]:
    """Distinct addresses of the lanes, with the lanes' mask for each."""
    assert isinstance(operand, Address)
    addresses = runner.warp.address(operand)
    lanes = runner.lanes
    first = int(addresses[lanes[0]])
    if (addresses[lanes] == first).all():
        return [(first, runner.mask)]
    found: dict[int, int] = {}
    for lane in lanes:
        found[int(addresses[lane])] = found.get(int(addresses[lane]), 0) | 1 << int(lane)
    return list(found.items())


@executes("mbarrier.init")
def execute_init(runner: Runner, instr: Instr) -> None:
    count = instr["count"]
    assert count is not None
    for address, mask in each(runner, instr["mbar"]):
        cta, offset = locate(runner, address)
        cta.shared.check(np.array([offset]), MBARRIER_BYTES)
        if mask & mask - 1:
            # FlashAttention-4 does it where it needs no election: harmless as long as they agree.
            counts = np.unique(runner.warp.u32(count)[lanes_of(mask)])
            agreeing = "" if counts.size == 1 else f", for {counts.min()} to {counts.max()} arrivals"
            message = f"lanes {mask:#010x} initialise the same mbarrier {offset:#x} of {cta.name}{agreeing}"
            runner.report(Kind.BARRIER, message, warning=not agreeing)
        before = cta.mbarriers.get(offset)
        if before is not None:
            raise BarrierMisuse(f"{before} is initialised again without mbarrier.inval")
        words = np.array([offset >> 2, (offset >> 2) + 1])
        touch_shared(runner, cta, words, 0xF, write=True)
        name = f"mbarrier {offset:#x} of {cta.name}"
        made = MBarrier(name, runner.clock.components, runner.warp.uniform(count, mask))
        made.made = runner.clock.stamp
        cta.mbarriers[offset] = made
        made_by(runner).append(made)
    runner.run.progress += 1


def made_by(runner: Runner) -> list[MBarrier]:
    """The mbarriers that a warp has initialised and not announced."""
    found = runner.state.setdefault("mbarriers", [])
    assert isinstance(found, list)
    return found


def announce(runner: Runner) -> None:
    """fence.mbarrier_init."""
    for barrier in made_by(runner):
        barrier.announced = True
    made_by(runner).clear()


def signalled(runner: Runner, address: int) -> MBarrier:
    """An mbarrier that the async proxy signals. It has to see the initialisation: a write by the generic proxy."""
    barrier = mbarrier(runner, address)
    component, clock = barrier.made
    if not barrier.announced and runner.clock.knows.fenced[component] < clock:
        message = f"{barrier.name}: neither fence.mbarrier_init nor fence.proxy.async follows its initialisation"
        runner.report(Kind.PROXY, message, warning=True)
    return barrier


@executes("mbarrier.inval")
def execute_inval(runner: Runner, instr: Instr) -> None:
    for address, _ in each(runner, instr["mbar"]):
        cta, offset = locate(runner, address)
        barrier = mbarrier(runner, address)
        if not barrier.is_idle:
            raise BarrierMisuse(f"{barrier} is invalidated in the middle of a phase")
        del cta.mbarriers[offset]
        cta.shared.shadow.forget(np.array([offset >> 2, (offset >> 2) + 1]))


# The opaque state of an arrival: the phase that it arrived at; of one that does not complete that, a flag and the
# arrivals that were missing before it, too.
STATE_PHASE = (1 << 40) - 1
STATE_PENDING, STATE_HAS_PENDING = 40, 1 << 63


def put_state(runner: Runner, instr: Instr, phase: int, mask: int) -> None:
    to = instr["state"]
    if to is not None:
        runner.warp.put64(to, phase, mask)


def put_pending(runner: Runner, instr: Instr, barrier: MBarrier, mask: int, times: int) -> None:
    """The states of lanes that are about to arrive, one after the other, without completing the phase."""
    to = instr["state"]
    if to is None:
        return
    before = barrier.pending - times * (np.cumsum(lanes_of(mask)) - 1)
    state = np.uint64(STATE_HAS_PENDING | barrier.phase) | before.astype(np.uint64) << np.uint64(STATE_PENDING)
    runner.warp.put64(to, state, mask)


@executes("mbarrier.arrive", "mbarrier.arrive.noComplete", "mbarrier.arrive_drop", "mbarrier.arrive_drop.noComplete")
def execute_mbarrier_arrive(runner: Runner, instr: Instr) -> None:
    count = instr["count"]
    times = 1 if count is None else runner.warp.uniform(count)
    drop = "drop" in instr.op.name
    for address, mask in each(runner, instr["mbar"]):
        barrier = mbarrier(runner, address)
        arrivals = times * mask.bit_count()
        if "noComplete" in instr.op.text:
            if arrivals >= barrier.pending:
                raise BarrierMisuse(f"{barrier}: {arrivals} arrivals that may not complete the phase")
            put_pending(runner, instr, barrier, mask, times)
        if drop:
            barrier.expected -= arrivals
        phase = arrive_each(runner, instr, barrier, times, mask.bit_count())
        if "noComplete" not in instr.op.text:
            put_state(runner, instr, phase, mask)
    runner.run.profile.count("mbarrier arrivals", runner.count)
    runner.run.progress += 1


def arrive_each(runner: Runner, instr: Instr, barrier: MBarrier, times: int, threads: int) -> int:
    """Each thread arrives on its own: a phase may be complete in their midst. Returns the last one's phase."""
    clock = releasing(runner, instr)
    while threads * times > barrier.pending >= times > 0:
        now = barrier.pending // times
        arrive_once(runner, barrier, clock, now * times)
        threads -= now
    return arrive_once(runner, barrier, clock, threads * times)


def arrive_once(runner: Runner, barrier: MBarrier, clock: Clock | None, count: int) -> int:
    """A relaxed arrival hands on what fences in front of it have; returns the phase that was arrived at."""
    if clock is None:
        barrier.hand(runner.clock.handed_tensor())
        if runner.fence is not None:
            barrier.hand(runner.fence)
    runner.clock.count_event()
    return barrier.arrive(clock, runner.clock.history, count)


def releasing(runner: Runner, instr: Instr) -> Clock | None:
    """The clock whose knowledge an arrival releases; None for a relaxed one."""
    return None if instr.op["sem"] == "relaxed" else runner.clock


@executes("mbarrier.arrive.expect_tx", "mbarrier.arrive_drop.expect_tx")
def execute_arrive_expect(runner: Runner, instr: Instr) -> None:
    count = instr["bytes"]
    assert count is not None
    amount = runner.warp.uniform(count)
    for address, mask in each(runner, instr["mbar"]):
        barrier = mbarrier(runner, address)
        barrier.expect(amount * mask.bit_count())
        if "drop" in instr.op.name:
            barrier.expected -= mask.bit_count()
        put_state(runner, instr, arrive_each(runner, instr, barrier, 1, mask.bit_count()), mask)
    runner.run.progress += 1


@executes("mbarrier.expect_tx")
def execute_expect(runner: Runner, instr: Instr) -> None:
    count = instr["bytes"]
    assert count is not None
    for address, mask in each(runner, instr["mbar"]):
        mbarrier(runner, address).expect(runner.warp.uniform(count) * mask.bit_count())
    runner.run.progress += 1


@executes("mbarrier.complete_tx")
def execute_complete(runner: Runner, instr: Instr) -> None:
    count = instr["bytes"]
    assert count is not None
    for address, mask in each(runner, instr["mbar"]):
        barrier = mbarrier(runner, address)
        runner.clock.count_event()
        barrier.complete_bytes(runner.warp.uniform(count) * mask.bit_count(), runner.clock.history, runner)
    runner.run.progress += 1


class Awaited(NamedTuple):
    """A barrier that lanes wait for, by a phase's parity or by the state of an arrival at it."""

    barrier: MBarrier
    parity: int | None
    state: int | None
    mask: int

    @property
    def is_complete(self) -> bool:
        if self.state is not None:
            return self.barrier.phase > self.state & STATE_PHASE
        assert self.parity is not None
        return self.barrier.is_complete(self.parity)

    @property
    def phase(self) -> int:
        """Number of the phase."""
        if self.state is not None:
            return self.state & STATE_PHASE
        return self.barrier.phase - self.is_complete

    def is_known(self, runner: Runner) -> bool:
        """Whether a warp can tell that the phase is complete."""
        knows = runner.clock.knows
        return bool(knows.seen[self.barrier.component] >= self.phase) or (
            self.is_complete and self.barrier.is_known(knows, runner)
        )


def awaited(runner: Runner, instr: Instr) -> list[Awaited]:
    by_parity = "parity" in instr.op.name
    operand = instr["phase" if by_parity else "state"]
    assert operand is not None
    found = []
    for address, mask in each(runner, instr["mbar"]):
        value = runner.warp.uniform(operand, mask)
        parity, state = (value, None) if by_parity else (None, value)
        found.append(Awaited(mbarrier(runner, address), parity, state, mask))
    return found


def observe(runner: Runner, instr: Instr, barrier: MBarrier) -> None:
    """A wait has found a phase complete; a relaxed one leaves it to a fence to acquire."""
    if instr.op["sem"] != "relaxed":
        runner.clock.acquire(barrier.released)
        return
    if runner.unfenced is None:
        runner.unfenced = Knowledge.none(runner.clock.components)
    runner.unfenced.join(barrier.released)


PEEKS = "waits that were not repeated"


def comes_too_early(runner: Runner, pending: list[Awaited]) -> bool:
    """Whether a wait that no loop repeats finds nothing, however long the phase has been complete.

    Such a wait is a look at the barrier, and a kernel may not build upon it: a GPU that is slower at something finds
    the phase incomplete. So it finds a phase that the warp knows to be complete by other means, and no other one; but
    the same look a second time waits, since it may be repeated in a loop that `Program.spinning` does not see.
    """
    # A clock's launch is to take the way that a GPU takes when all is in time.
    if runner.trace is not None or runner.index in runner.run.program.spinning:
        return False
    unknown = tuple((one.barrier.component, one.phase) for one in pending if not one.is_known(runner))
    peeks = runner.state.setdefault(PEEKS, {})
    assert isinstance(peeks, dict)
    if not unknown or peeks.get(runner.index) == unknown:
        return False
    if runner.run.tasks.is_random:
        return runner.run.tasks.gives_up() or not all(one.is_complete for one in pending)
    peeks[runner.index] = unknown
    return True


@executes("mbarrier.try_wait", "mbarrier.try_wait.parity", "mbarrier.test_wait", "mbarrier.test_wait.parity")
def execute_wait(runner: Runner, instr: Instr) -> Wait | None:
    """`try_wait` suspends until the phase is complete or, when nothing else can continue, until time is up."""
    to = instr["p"]
    assert to is not None
    everyone, pending, index = runner.mask, awaited(runner, instr), runner.index

    def finish(limit: bool) -> None:
        holds = 0
        for one in pending:
            if one.is_complete:
                holds |= one.mask
                observe(runner, instr, one.barrier)
                if one.parity is not None:
                    one.barrier.order.answer(runner.clock, one.phase, partial(runner.report, Kind.PHASE, index=index))
        runner.warp.put_pred(to, holds, everyone)
        runner.run.profile.count("mbarrier waits that expired", int(limit))

    if comes_too_early(runner, pending):
        runner.warp.put_pred(to, 0, everyone)
        runner.run.profile.count("mbarrier waits that expired")
        return None
    if "test_wait" in instr.op.name:
        # Does not suspend; others get their turn all the same, since it stands in loops.
        polled = iter((False, True))
        return Wait(f"polls {pending[0].barrier}", lambda: next(polled, True), partial(finish, False))
    runner.run.profile.count("mbarrier waits")
    if not all(one.is_complete for one in pending) and runner.run.tasks.gives_up():
        # The time limit is the system's own: kernels have to come back.
        finish(True)
        return None
    waiting = f"waits for {'; '.join(str(one.barrier) for one in pending)}"
    if len(pending) == 1:
        # Asked again at every turn: the usual case without a loop.
        (one,) = pending
        return Wait(waiting, lambda: one.is_complete, partial(finish, False), partial(finish, True))
    return Wait(waiting, lambda: all(one.is_complete for one in pending), partial(finish, False), partial(finish, True))


@executes("mbarrier.pending_count")
def execute_pending(runner: Runner, instr: Instr) -> None:
    """Only the state of an arrival that does not complete its phase has a count."""
    state, to = instr["state"], instr["count"]
    assert state is not None
    assert to is not None
    values = runner.warp.u64(state)
    without = runner.mask & mask_of(np.flatnonzero(values < STATE_HAS_PENDING))
    if without:
        message = f"lanes {without:#010x} ask for the pending count of a state that is not of a .noComplete arrival"
        runner.report(Kind.BARRIER, message)
    runner.warp.put32(to, (values >> np.uint64(STATE_PENDING)).astype(np.uint32) & np.uint32(MAX_COUNT))
