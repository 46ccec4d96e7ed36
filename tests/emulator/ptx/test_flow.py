# SPDX-License-Identifier: Apache-2.0
"""Blocks and where paths meet, against a search over all paths."""

import random

import pytest
from snippets import kernel

from emulator.ptx import BLOCKING, Graph, graph
from emulator.ptx.flow import spinning


def flow(body: str) -> Graph:
    return graph(kernel(body))


def shape(found: Graph) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(block.start, block.stop, block.successors) for block in found.blocks]


def test_a_branch_and_its_meeting():
    found = flow("@%p1 bra A; mov.b32 %r1, 1; bra B; A: mov.b32 %r1, 2; B: ret;")
    assert shape(found) == [(0, 1, (2, 1)), (1, 3, (3,)), (3, 4, (3,)), (4, 5, ())]
    assert found.meets == (3, 3, 3, None)
    assert found.predecessors == ((), (0,), (0,), (1, 2))
    assert found.target("B") == 3


def test_a_loop():
    found = flow("A: add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 9; @%p1 bra A; ret;")
    assert shape(found) == [(0, 3, (0, 1)), (3, 4, ())]
    assert found.meets == (1, None)


def test_blocks_end_behind_what_may_block():
    found = flow("mov.b32 %r1, 1; bar.sync 0; mov.b32 %r1, 2; mbarrier.try_wait.shared.b64 %p1, [%r1], %rd1; ret;")
    assert [(block.start, block.stop, block.waits) for block in found.blocks] == [
        (0, 2, True),
        (2, 4, True),
        (4, 5, False),
    ]
    whole = graph(found.function, ends_after=())
    assert [(block.start, block.stop) for block in whole.blocks] == [(0, 5)]


def test_guarded_ends_go_on():
    found = flow("@%p1 ret; @!%p2 exit; mov.b32 %r1, 1;")
    assert shape(found) == [(0, 1, (1,)), (1, 2, (2,)), (2, 3, ())]
    assert found.meets == (None, None, None)


def test_a_branch_behind_the_last_instruction_ends():
    found = flow("@%p1 bra END; mov.b32 %r1, 1; END:")
    assert shape(found) == [(0, 1, (1,)), (1, 2, ())]
    assert found.target("END") == len(found.blocks)
    assert found.meets == (None, None)


def test_indirect_branches_have_all_their_targets():
    found = flow("brx.idx %r1, T; A: mov.b32 %r1, 1; B: ret; T: .branchtargets A, B, B;")
    assert shape(found) == [(0, 1, (1, 2)), (1, 2, (2,)), (2, 3, ())]
    assert found.meets == (2, 2, None)


def test_an_endless_loop_meets_nowhere():
    found = flow("@%p1 bra OUT; A: bra A; OUT: ret;")
    assert found.meets == (2, None, None)


TRY = "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;"


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        (f"A: {TRY} @!%p1 bra A; ret;", {0}),
        # As CuTe DSL writes it; one that counts its turns, and one that sleeps.
        (f"A: {TRY} @%p1 bra B; bra A; B: ret;", {0}),
        (f"A: {TRY} add.s32 %r2, %r2, 1; @%p1 bra B; nanosleep.u32 20; bra A; B: ret;", {0}),
        # A look, and a wait behind it.
        (f"{TRY} @%p1 bra B; A: {TRY} @!%p1 bra A; B: ret;", {2}),
        # A look in a loop that does something.
        (f"A: {TRY} st.shared.b32 [%r1], %r2; @%p1 bra A; ret;", set()),
        (f"A: st.shared.b32 [%r1], %r2; {TRY} @%p1 bra A; ret;", set()),
        (f"A: {TRY} @%p1 bra B; bar.sync 0; bra A; B: ret;", set()),
        (f"A: {TRY} selp.b32 %r2, 1, 0, %p1; B: {TRY} @!%p1 bra B; st.shared.b32 [%r1], %r2; bra A;", {2}),
        (TRY, set()),
    ],
)
def test_waits_that_their_loops_repeat(body: str, waits: set[int]):
    found = flow(body)
    assert spinning(found, lambda instr: instr.op.name in {"bra", "add", "selp", "nanosleep"}) == waits


def test_a_declaration_has_no_graph():
    found = kernel("ret;")
    object.__setattr__(found, "code", None)
    with pytest.raises(ValueError, match="no body"):
        graph(found)


def test_every_blocking_opcode_has_a_reason():
    assert all(reason for reason in BLOCKING.values())


@pytest.mark.parametrize("seed", range(40))
def test_meeting_points_of_random_graphs(seed: int):
    """A block's meeting point lies on every path to an end, and no other such block lies before it."""
    rng = random.Random(seed)
    count = rng.randint(2, 9)
    lines = []
    for block in range(count):
        kind = rng.choice(("fall", "branch", "jump", "ret"))
        target = rng.randrange(count)
        lines.append(f"L{block}: mov.b32 %r1, {block};")
        lines += {
            "fall": [],
            "branch": [f"@%p1 bra L{target};"],
            "jump": [f"bra L{target};"],
            "ret": ["@%p1 ret;" if rng.random() < 0.5 else "ret;"],
        }[kind]
    found = flow("\n".join(lines))
    total = len(found.blocks)
    ends = total

    def following(node: int) -> list[int]:
        block = found.blocks[node]
        last = (found.function.code or ())[block.stop - 1]
        stops = last.op.name == "ret" or (block.stop == len(found.function.code or ()) and last.op.name != "bra")
        stops |= block.stop == len(found.function.code or ()) and last.guard is not None
        return [*block.successors, *([ends] if stops else [])]

    def reaches_end(start: int, without: int | None) -> bool:
        seen, todo = set(), [start]
        while todo:
            node = todo.pop()
            if node in seen or node == without:
                continue
            if node == ends:
                return True
            seen.add(node)
            todo += following(node)
        return False

    for node in range(total):
        if not reaches_end(node, None):
            assert found.meets[node] is None
            continue
        every = [other for other in range(total) if other != node and not reaches_end(node, other)]
        if not every:
            assert found.meets[node] is None
            continue
        nearest = [other for other in every if all(rest == other or not reaches_end(other, rest) for rest in every)]
        assert [found.meets[node]] == nearest
