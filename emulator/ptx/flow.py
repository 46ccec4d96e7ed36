# SPDX-License-Identifier: Apache-2.0
"""Basic blocks, successors and where paths meet again."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from emulator.ptx.ir import Function, Instr, Label

# Opcodes behind which a warp may not go on at once. A block ends with one, so that the rest of a warp's program begins
# with a block whenever somebody else runs.
BLOCKING: Mapping[str, str] = {
    **dict.fromkeys(
        ("bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync"), "waits for other warps of the CTA (9.7.13.1)"
    ),
    **dict.fromkeys(
        ("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red"), "waits for other warps of the CTA (9.7.13.1)"
    ),
    "barrier.cluster.wait": "waits for the other CTAs of the cluster (9.7.13.3)",
    "mbarrier.try_wait": "may suspend the thread until the phase ends or time is up (9.7.13.15.16)",
    "mbarrier.try_wait.parity": "may suspend the thread until the phase ends or time is up (9.7.13.15.16)",
    "mbarrier.test_wait": "does not suspend, but is polled in loops: others have to get their turn",
    "mbarrier.test_wait.parity": "does not suspend, but is polled in loops: others have to get their turn",
    "cp.async.wait_group": "waits for copies of the thread (9.7.9.25.3.3)",
    "cp.async.wait_all": "waits for copies of the thread (9.7.9.25.3.3)",
    "cp.async.bulk.wait_group": "waits for bulk copies of the thread (9.7.9.25.5.2)",
    "wgmma.wait_group": "waits for the warpgroup's MMAs (9.7.15.7.3)",
    "tcgen05.alloc": "waits until columns are free (9.7.16.7.1)",
    "tcgen05.wait::ld": "waits for the thread's loads from tensor memory (9.7.16.8.5)",
    "tcgen05.wait::st": "waits for the thread's stores to tensor memory (9.7.16.8.5)",
    "griddepcontrol.wait": "waits for the grids before this one (9.7.13.13)",
    "setmaxnreg": "an increase waits until registers are free (9.7.19.5)",
    "nanosleep": "gives others their turn (9.7.19.2)",
}
# Opcodes that wait for the lanes of their own warp that a mask names (9.7.9.6, 9.7.13.2, 9.7.13.8 to 9.7.13.11). Lanes
# meet at labels already, so a block does not end here by default.
GATHERING: Mapping[str, str] = dict.fromkeys(
    ("bar.warp.sync", "shfl.sync", "vote.sync", "match.any.sync", "match.all.sync", "redux.sync", "elect.sync"),
    "waits for the lanes in its mask",
)
ENDS = frozenset({"ret", "exit", "trap"})
BRANCHES = frozenset({"bra", "brx.idx"})


@dataclass(frozen=True)
class Block:
    """Instructions that run one after the other.

    Attributes:
        start, stop: indices into the function's code.
        successors: blocks that may come next; the one behind it comes last. None of them: the thread ends or returns.
        waits: the last instruction may block.
    """

    index: int
    start: int
    stop: int
    successors: tuple[int, ...]
    waits: bool = False


@dataclass(frozen=True)
class Graph:
    """A function's blocks; the first is where it begins."""

    function: Function
    blocks: tuple[Block, ...]
    starts: Mapping[int, int] = field(repr=False)

    def instrs(self, block: Block) -> tuple[Instr, ...]:
        code = self.function.code or ()
        return code[block.start : block.stop]

    def target(self, label: str) -> int:
        """The block that a label stands before; len(blocks) behind the last instruction."""
        return self.starts[self.function.labels[label]]

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.blocks]
        for block in self.blocks:
            for successor in block.successors:
                found[successor].append(block.index)
        return tuple(map(tuple, found))

    @cached_property
    def meets(self) -> tuple[int | None, ...]:
        """For each block the first one on every path from it to an end: its immediate post-dominator.

        None: the paths only meet where the thread ends, or there is no end.
        """
        return _post_dominators(self)


def graph(function: Function, ends_after: Collection[str] = frozenset(BLOCKING)) -> Graph:
    """Blocks split at labels, behind branches, and behind the opcodes named."""
    code = function.code
    if code is None:
        raise ValueError(f"{function.name} has no body")
    cuts = {0, *function.labels.values()}
    splitting = BRANCHES | ENDS | {"call"} | set(ends_after)
    cuts |= {at + 1 for at, instr in enumerate(code) if instr.op.name in splitting}
    starts = sorted(cut for cut in cuts if cut < len(code))
    number = {start: index for index, start in enumerate(starts)} | {len(code): len(starts)}
    blocks = []
    for index, start in enumerate(starts):
        stop = starts[index + 1] if index + 1 < len(starts) else len(code)
        last = code[stop - 1]
        follow = [target for target in _successors(function, last, stop, number) if target < len(starts)]
        blocks.append(Block(index, start, stop, tuple(follow), last.op.name in ends_after))
    return Graph(function, tuple(blocks), number)


def spinning(flow: Graph, is_quiet: Callable[[Instr], bool]) -> frozenset[int]:
    """Instructions that may block and are reached again with nothing done in between: waits that are repeated.

    Args:
        flow: with its blocks ended behind whatever may block.
        is_quiet: whether nothing but registers comes of an instruction.
    """
    code = flow.function.code or ()
    loud = [
        sum(not is_quiet(instr) for instr in flow.instrs(block)[: -1 if block.waits else None]) for block in flow.blocks
    ]
    found = set()
    for home in (block for block in flow.blocks if block.waits and not loud[block.index]):
        left, seen = list(home.successors), set(home.successors)
        while left and home.index not in seen:
            block = flow.blocks[left.pop()]
            if loud[block.index] or (block.waits and not is_quiet(code[block.stop - 1])):
                continue
            left += [one for one in block.successors if one not in seen]
            seen.update(block.successors)
        if home.index in seen:
            found.add(home.stop - 1)
    return frozenset(found)


def _successors(function: Function, last: Instr, behind: int, number: Mapping[int, int]) -> list[int]:
    """Blocks behind a block's last instruction, each once; len(blocks) stands for the end of the function."""
    found: list[int] = []
    if last.op.name == "bra":
        target = last["target"]
        assert isinstance(target, Label)
        found.append(number[function.labels[target.name]])
    elif last.op.name == "brx.idx":
        table = last["targets"]
        assert isinstance(table, Label)
        found += (number[function.labels[name]] for name in function.tables[table.name])
    if last.guard is not None or last.op.name not in BRANCHES | ENDS:
        found.append(number[behind])
    return list(dict.fromkeys(found))


def _post_dominators(flow: Graph) -> tuple[int | None, ...]:
    """Cooper, Harvey, Kennedy: "A Simple, Fast Dominance Algorithm" (2001), on the reversed graph.

    One virtual node behind all ends makes them meet.
    """
    blocks, end = flow.blocks, len(flow.blocks)
    leaving = {block.index for block in blocks if _may_end(flow, block)}
    before = [*flow.predecessors, tuple(leaving)]
    order = _postorder(before, end)
    rank = {node: position for position, node in enumerate(order)}
    parent: dict[int, int] = {end: end}

    def meet(a: int, b: int) -> int:
        while a != b:
            while rank[a] < rank[b]:
                a = parent[a]
            while rank[b] < rank[a]:
                b = parent[b]
        return a

    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            after = [*blocks[node].successors, *((end,) if node in leaving else ())]
            known = [successor for successor in after if successor in parent]
            new = known[0]
            for successor in known[1:]:
                new = meet(new, successor)
            if parent.get(node) != new:
                parent[node] = new
                changed = True
    found = (parent.get(index, end) for index in range(end))
    return tuple(None if node == end else node for node in found)


def _may_end(flow: Graph, block: Block) -> bool:
    """Whether a thread may end or return behind this block."""
    code = flow.function.code or ()
    last = code[block.stop - 1]
    falls = block.stop == len(code) and (last.guard is not None or last.op.name not in BRANCHES | ENDS)
    to_end = (
        last.op.name == "bra"
        and isinstance(last["target"], Label)
        and flow.target(last["target"].name) == len(flow.blocks)
    )
    return last.op.name in ENDS or falls or to_end


def _postorder(edges: list[tuple[int, ...]], root: int) -> list[int]:
    """Nodes that can be reached from the root, each behind all that are reached through it first."""
    seen, order = {root}, []
    stack = [(root, iter(edges[root]))]
    while stack:
        node, rest = stack[-1]
        for successor in rest:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(edges[successor])))
                break
        else:
            order.append(node)
            stack.pop()
    return order
