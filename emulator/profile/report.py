# SPDX-License-Identifier: Apache-2.0
"""Summaries as text for people."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import PurePath
from typing import TYPE_CHECKING

from emulator.profile.classes import FREE, Class, Unit

if TYPE_CHECKING:
    from emulator.profile.summary import KernelSummary, Role, Site, Summary

MODEL = "A model: lower bounds from public rates, work that never waits. No measurement."
WIDTH = 100  # of kernels' names; those of CuTe DSL say all arguments' types


def columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table; the first `left` columns begin on the left, numbers end on the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def number(value: float) -> str:
    """1234567 as 1,234,567; small ones with a digit behind the point."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def warps_text(numbers: Sequence[int]) -> str:
    """0-3, 8."""
    parts = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        group = [one for _, one in run]
        parts.append(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]))
    return ", ".join(parts)


def unit_of_account(kernel: "KernelSummary") -> str:
    return "tile" if kernel.tiles else "CTA"


def kernel_text(kernel: "KernelSummary", sites: int) -> str:
    tiles = f", {kernel.tiles} tiles" if kernel.tiles else ""
    parts = [
        f"{cut(kernel.name, WIDTH)}\n  {kernel.arch}, rates of {kernel.chip}; {kernel.ctas} CTAs{tiles}; per "
        f"{unit_of_account(kernel)} in what follows",
        "Roles\n" + roles_table(kernel),
        "Warp instructions by class\n" + classes_table(kernel),
        "Amounts\n" + amounts_table(kernel),
        f"Cycles of one SM. {MODEL}\n" + cycles_table(kernel),
    ]
    for title, found, what in (
        ("Bank conflicts", kernel.conflicts, "extra wavefronts"),
        ("Waits that were not ready at once (in this schedule)", kernel.waits, "waits"),
    ):
        if found:
            parts.append(f"{title}\n" + sites_table(found[:sites], what))
    return "\n\n".join(parts)


def roles_table(kernel: "KernelSummary") -> str:
    rows = [["role", "warps", "instructions", "waits", "not ready", "longest", "cycles"]]
    rows += [
        [
            role.name,
            warps_text(role.warps),
            number(role.issued / kernel.parts),
            number(role.waits / kernel.parts),
            number(role.blocked / kernel.parts),
            role.longest,
            number(kernel.per_part(role.cycles[role.longest])),
        ]
        for role in kernel.roles
    ]
    return columns(rows, left=2)


def classes_table(kernel: "KernelSummary") -> str:
    rows = [["class", "all", *(role.name for role in kernel.roles)]]
    for kind in kernel.executed:
        every = [kernel.executed, *(role.instructions for role in kernel.roles)]
        rows.append([kind, *(number(one.get(kind, 0) / kernel.parts) for one in every)])
    issued = [kernel.issued, *(role.issued for role in kernel.roles)]
    rows.append(["all but the free ones", *(number(one / kernel.parts) for one in issued)])
    return columns(rows)


def amounts(kernel: "KernelSummary") -> dict[str, float]:
    """Per tile or CTA, by name."""
    found: dict[str, float] = {
        "warp instructions": kernel.issued,
        "MUFU instructions": kernel.executed.get(Class.MUFU.value, 0),
        **{f"matrix FLOP, {rate}": flops for rate, flops in kernel.flops.items()},
        "shared memory bytes": kernel.shared_bytes,
        "shared memory wavefronts of warps": kernel.wavefronts,
        "of these by bank conflicts": kernel.wavefronts - kernel.least_wavefronts,
        "global memory bytes": kernel.global_bytes,
    }
    return {name: amount / kernel.parts for name, amount in found.items()}


def amounts_table(kernel: "KernelSummary") -> str:
    found = {**amounts(kernel), **{name: count / kernel.parts for name, count in kernel.events.items()}}
    return columns([[name, number(amount)] for name, amount in found.items() if amount])


def cycles_table(kernel: "KernelSummary") -> str:
    rows = [["unit", "all", *(role.name for role in kernel.roles)]]
    for unit in Unit:
        every: list[KernelSummary | Role] = [kernel, *kernel.roles]
        if not any(one.cycles[unit.value] for one in every):
            continue
        cells = [number(kernel.per_part(one.cycles[unit.value])) for one in every]
        rows.append([unit.value + (" <- longest" if unit.value == kernel.longest else ""), *cells])
    beyond = number(kernel.per_part(kernel.global_cycles))
    rows.append(["global memory, if no cache helped", beyond, *([""] * len(kernel.roles))])
    return columns(rows)


def sites_table(found: "Sequence[Site]", what: str) -> str:
    rows = [["PTX line", "instruction", "source", "executed", what]]
    rows += [
        [str(site.line), cut(site.text, 60), short(site.source), number(site.times), number(site.amount)]
        for site in found
    ]
    return columns(rows, left=3)


def short(source: str) -> str:
    """A place in the source without folders: kernel.py:12."""
    first = source.partition(", ")[0]
    return PurePath(first).name


def compare(a: "Summary", b: "Summary") -> str:
    """Two summaries side by side, per tile where both know their tiles; ratios are of b to a.

    With one kernel each they are compared whatever their names; else those of one name.

    Raises:
        ValueError: no kernel is in both.
    """
    if len(a.kernels) == len(b.kernels) == 1:
        pairs = [(a.kernels[0], b.kernels[0])]
    else:
        others = {kernel.name: kernel for kernel in b.kernels}
        pairs = [(kernel, others[kernel.name]) for kernel in a.kernels if kernel.name in others]
    if not pairs:
        raise ValueError("no kernel is in both summaries")
    return "\n\n".join(_compared(one, other) for one, other in pairs)


def _compared(a: "KernelSummary", b: "KernelSummary") -> str:
    if bool(a.tiles) != bool(b.tiles):
        raise ValueError(f"tiles of only one of {a.name} and {b.name} are known")
    rows = [["", "a", "b", "b / a"]]
    for of_a, of_b in ((amounts(a), amounts(b)), (_cycles(a), _cycles(b)), (_classes(a), _classes(b))):
        for name in dict.fromkeys((*of_a, *of_b)):
            one, other = of_a.get(name, 0.0), of_b.get(name, 0.0)
            if one or other:
                rows.append([name, number(one), number(other), f"{other / one:.2f}" if one else "new"])
    head = "\n".join(
        f"{letter}: {cut(one.name, WIDTH)} ({one.chip}, longest {one.longest})" for letter, one in (("a", a), ("b", b))
    )
    return f"{head}\nPer {unit_of_account(a)}. {MODEL}\n{columns(rows)}"


def _cycles(kernel: "KernelSummary") -> dict[str, float]:
    found = {f"cycles, {unit}": kernel.per_part(cycles) for unit, cycles in kernel.cycles.items()}
    return found | {"cycles, longest": kernel.per_part(kernel.cycles[kernel.longest])}


def _classes(kernel: "KernelSummary") -> Mapping[str, float]:
    free = {kind.value for kind in FREE}
    return {f"instructions, {k}": n / kernel.parts for k, n in kernel.executed.items() if k not in free}
