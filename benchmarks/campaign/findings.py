# SPDX-License-Identifier: Apache-2.0
"""What came out of a step, in few lines: losses first."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.command import number
from ..held_out.summary import TOLERATED
from ..measured import Record, compare, is_ours, measured, tally
from ..report import microseconds
from .execution import Campaign, Run

# A remote terminal that keeps the last 12,000 characters of a command has all of a summary.
MOST_CHARACTERS = 11_000
# Characters of a line, and lines of the end of a log, of a step that failed or has no table.
WIDTH = 150
TAIL_LINES = 8
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Kernels of a step that are named.
KERNELS = 12
OURS = "dsl"
# Configurations of a sweep beside the chosen one.
RIVALS = 2
# What pytest and compute-sanitizer say of what is wrong.
WRONG = re.compile(
    r"^(FAILED|ERROR) |^E  |^=+ (Error|Warning|Fatal|Program hit|Invalid|.*hazard)|RACECHECK SUMMARY|ERROR SUMMARY"
)


@dataclass(frozen=True)
class Finding:
    """A step's part of the summary.

    Attributes:
        head: the step, how it ended, what it shows.
        lines: the most important first.
        file: where the rest is.
    """

    head: str
    lines: list[str]
    file: str


def of_run(run: Run, out: Path) -> Finding:
    """What a step found, by its JSON file and its log."""
    step = run.step
    log = log_lines(out / f"{step.name}.log")
    records = json_records(out / f"{step.name}.jsonl") if step.json_is_written else []
    lines = [cut(line) for line in lines_of(records)]
    if step.is_pytest:
        lines += [] if log and " passed" in log[-1] else ["no test passed"]
        lines += [cut(line) for line in log if WRONG.search(line)] + log[-1:]
    elif run.outcome != "ok" or not lines:
        lines += [cut(line) for line in log[-TAIL_LINES:]]
    lines = list(dict.fromkeys(lines)) or ["it printed nothing"]
    head = f"== {step.name}: {run.outcome}, {run.seconds:.0f} s; {step.shows}"
    return Finding(cut(head), lines, f"{step.name}.log")


def log_lines(path: Path) -> list[str]:
    """The lines of a log, without empty ones and colours."""
    text = ESCAPES.sub("", path.read_text(errors="replace")) if path.exists() else ""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def json_records(path: Path) -> list[Record]:
    """The objects on the lines of a file; what is none, such as a last line that was not finished, is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [found for line in lines if (found := parsed(line)) is not None]


def parsed(line: str) -> Record | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def lines_of(records: Sequence[Record]) -> Iterator[str]:
    """Lines about the records of a bench, of engines, of a step's profile, or of a sweep."""
    rows = [one for one in records if one.get("kind") == "row"]
    yield from of_rows(rows)
    yield from of_engines(records)
    for one in records:
        if one.get("kind") == "parts":
            yield from (" ".join(cell or "-" for cell in row) for row in one["rows"])
    yield from of_hosts([one for one in records if one.get("kind") == "host"])
    yield from of_profiles([one for one in records if one.get("kind") == "step"])
    yield from of_sweep([one for one in records if "kind" not in one and {"row", "us", "chosen"} <= one.keys()])


def of_rows(rows: Sequence[Record]) -> Iterator[str]:
    """What of ours is wrong; each operator's ratios; the rows, the lowest ratio first; who ran nowhere and why."""
    for row in rows:
        for cell in row["cells"]:
            if is_ours(cell["provider"]) and cell["status"] in ("wrong", "error"):
                yield f"{cell['status'].upper()} {row['operator']} {row['id']} {cell['provider']}: {cell['message']}"
    for operator in dict.fromkeys(row["operator"] for row in rows):
        of_operator = [row for row in rows if row["operator"] == operator]
        ratios = [ratio_of(row) for row in of_operator]
        found = tally(of_operator)
        if found is None:
            yield f"{operator}: {len(of_operator)} rows, none with a time of ours and of a peer"
            continue
        yield (
            f"{operator}: {found.rows} of {len(of_operator)} rows compared, geometric mean {found.middle:.3f}x, lowest "
            f"{found.lowest:.2f}x, {sum(one < 1 for one in ratios)} below 1, "
            f"{sum(one < TOLERATED for one in ratios)} below {TOLERATED}"
        )
    yield from map(row_line, sorted(rows, key=ratio_of))
    yield from absent(rows)


def ratio_of(row: Record) -> float:
    """The fastest peer's time divided by ours; infinite where there is none."""
    found = compare(row)
    return float("inf") if found is None else found.ratio


def row_line(row: Record) -> str:
    """A row: our time, and each other column's time divided by it."""
    cells = measured(row)
    ours = next((cell for cell in cells if is_ours(cell["provider"])), None)
    if ours is None:
        return f"     - {row['id']}: no time of ours"
    own, found = ours["median_us"], compare(row)
    ratio = f"{found.ratio:5.2f}x" if found else "     -"
    others = [f"{cell['provider']} {cell['median_us'] / own:.2f}" for cell in cells if cell is not ours]
    floor = f", {own / row['floor_us']:.2f} of floor" if row.get("floor_us") else ""
    return f"{ratio} {row['id']}: {microseconds(own)} us{floor}{': ' if others else ''}{', '.join(others)}"


def absent(rows: Sequence[Record]) -> Iterator[str]:
    """Columns that have no time in any row, and the first reason."""
    cells = [cell for row in rows for cell in row["cells"]]
    timed = {cell["provider"] for cell in cells if "median_us" in cell}
    for name in dict.fromkeys(cell["provider"] for cell in cells):
        if name not in timed:
            why = next((cell["message"] for cell in cells if cell["provider"] == name and cell.get("message")), "")
            yield f"no time of {name}: {why}"


def of_engines(records: Sequence[Record]) -> Iterator[str]:
    """What failed; the rates, the lowest ratio first; the seconds to start."""
    rates: dict[tuple[str, str], dict[str, float]] = {}
    for one in records:
        if one.get("kind") == "error":
            yield f"ERROR {one['model']} {one['backend']} {one.get('scenario') or ''}: {one['message']}"
        elif one.get("kind") == "result":
            rates.setdefault((one["model"], one["scenario"]), {})[one["backend"]] = one["value"]
    found = []
    for (model, scenario), of_backend in rates.items():
        own = next((value for name, value in of_backend.items() if name.lower() == OURS), None)
        others = {name: value for name, value in of_backend.items() if name.lower() != OURS}
        ratio = own / max(others.values()) if own and others else None
        shown = ", ".join(f"{name} {number(value)}" for name, value in of_backend.items())
        text = f"{model} {scenario}: {shown} tokens/s"
        found.append((float("inf") if ratio is None else ratio, text))
    yield from (f"{ratio:5.2f}x {text}" if ratio < float("inf") else f"     - {text}" for ratio, text in sorted(found))
    starts = [f"{one['backend']} {one['ready_s']:.0f} s" for one in records if one.get("kind") == "engine"]
    if starts:
        yield f"start: {', '.join(starts)}"


def of_hosts(hosts: Sequence[Record]) -> Iterator[str]:
    """Each backend's step on the host, by package; then the longest functions of ours."""
    for one in hosts:
        packages = ", ".join(f"{name} {us:.0f}" for name, us in one["packages"].items())
        entered = f"{one['entered_us']:.0f} with what it calls" if one["calls"] else "nothing of ours"
        yield f"{one['backend']}: a step {one['step_us']:.0f} us on the host: {packages}; {entered}"
    for one in hosts:
        for span in one["spans"][:KERNELS]:
            yield f"{one['backend']}: {span['us']:7.1f} us, {span['calls']:g} calls: {span['name']}"


def of_profiles(profiles: Sequence[Record]) -> Iterator[str]:
    """Each backend's step beside its floor, then its kernels, the longest first."""
    for one in profiles:
        floor = "" if one.get("floor_us") is None else f", weights are read in {one['floor_us']:.0f}"
        yield f"{one['backend']}: a step {one['step_us']:.0f} us, kernels {one['busy_us']:.0f} of them{floor}"
    for rank in range(KERNELS):
        for one in profiles:
            if rank < len(one["kernels"]):
                kernel: dict[str, Any] = one["kernels"][rank]
                each = kernel["us"] / kernel["launches"]
                name = kernel["name"][:90]
                yield f"{one['backend']}: {kernel['us']:7.1f} us, {kernel['launches']:g} of {each:.2f}: {name}"


def of_sweep(lines: Sequence[Record]) -> Iterator[str]:
    """Of each row what is chosen, and the fastest of the others by what they differ in; the largest loss first."""
    found = []
    for row in dict.fromkeys(one["row"] for one in lines):
        of_row = [one for one in lines if one["row"] == row]
        chosen = next((one for one in of_row if one["chosen"]), None)
        if chosen is None:
            continue
        others = sorted((one for one in of_row if one is not chosen), key=lambda one: float(one["us"]))
        ratios = [f"{one['us'] / chosen['us']:.2f} {difference(one, chosen)}" for one in others[:RIVALS]]
        text = f"{row}: {microseconds(chosen['us'])} us; {'; '.join(ratios)}"
        found.append((others[0]["us"] / chosen["us"] if others else 1.0, text))
    yield from (f"{ratio:5.2f}x {text}" for ratio, text in sorted(found))


def difference(line: Record, chosen: Record) -> str:
    """What a line of a sweep has otherwise than the one that is chosen."""
    return " ".join(f"{k}={v}" for k, v in line.items() if k not in ("us", "chosen") and chosen.get(k) != v)


def summary(campaign: Campaign, most: int | None = MOST_CHARACTERS) -> str:
    """How many steps succeeded, which did not, which were left out; then what each one found.

    Args:
        most: characters; each step gets its lines in turn, the most important first. None: all lines.
    """
    # What failed comes first.
    runs = sorted(campaign.runs, key=lambda run: run.outcome == "ok")
    found = [of_run(run, campaign.out) for run in runs]
    good = sum(run.outcome == "ok" for run in runs)
    head = [f"{good} of {len(runs) + len(campaign.left)} steps succeeded; logs and JSON: {campaign.out}"]
    if bad := [f"{run.step.name} ({run.outcome})" for run in runs if run.outcome != "ok"]:
        head.append(f"Not: {', '.join(bad)}")
    if campaign.left:
        head.append(f"Left out: {', '.join(f'{step.name} ({why})' for step, why in campaign.left)}")
    heads = [[one.head] for one in found]
    kept = shared([one.lines for one in found], None if most is None else most - length(head, *heads) - len(found) * 40)
    parts = [*head]
    for one, lines in zip(found, kept, strict=True):
        parts += [one.head, *lines]
        if len(lines) < len(one.lines):
            parts.append(f"  ... {len(one.lines) - len(lines)} more lines: summary.txt")
    text = "\n".join(parts) + "\n"
    return text if most is None else text[:most]


def length(*parts: Sequence[str]) -> int:
    return sum(len(line) + 1 for lines in parts for line in lines)


def shared(sections: Sequence[list[str]], room: int | None) -> list[list[str]]:
    """The first lines of each section, which take a line in turn until there is no room for the next one."""
    if room is None:
        return [list(lines) for lines in sections]
    kept: list[list[str]] = [[] for _ in sections]
    for rank in range(max(map(len, sections), default=0)):
        for lines, mine in zip(sections, kept, strict=True):
            if rank >= len(lines):
                continue
            room -= len(lines[rank]) + 1
            if room < 0:
                return kept
            mine.append(lines[rank])
    return kept
