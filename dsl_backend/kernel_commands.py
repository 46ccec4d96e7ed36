# SPDX-License-Identifier: Apache-2.0
"""What `dsl-backend compile` and `dsl-backend cache` do and print."""

import datetime
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from dsl_backend import families
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import cache, key, model, precompile, toolkit
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.cache import Entry
from dsl_backend.runtime.precompile import Outcome, Result, Unit

Say = Callable[[str], None]

# What verifying an entry finds.
CURRENT, STALE, BROKEN = "current", "stale", "broken"


def compile_model(
    config: pathlib.Path,
    arches: Sequence[str],
    *,
    tensor_parallel: int,
    dtype: str | None,
    only: Sequence[str],
    jobs: int | None,
    as_json: bool,
    say: Say,
) -> int:
    """Compile all that a model needs; the exit status, 1 where a kernel failed or was not kept.

    Raises:
        InvalidInput: the model, an architecture or a family is not accepted, or nothing can be compiled or kept here.
    """
    families.load_units()
    shape = model.read(config, tensor_parallel=tensor_parallel, dtype=dtype)
    todo = [unit for arch in arches for unit in precompile.units(shape, compilable(arch), only)]
    outcomes = followed(todo, jobs, quiet=as_json)
    bad = [outcome for outcome in outcomes if outcome.result in (Result.FAILED, Result.UNKEPT)]
    if as_json:
        say(
            json.dumps(
                {"folder": str(cache.folder()), "kernels": [facts_of(outcome) for outcome in outcomes]}, indent=2
            )
        )
    elif not todo:
        say(f"nothing to compile: no operator has a CuTe DSL kernel for this model on {', '.join(arches)}")
    else:
        counts = {result: sum(one.result is result for one in outcomes) for result in Result}
        size = sum(outcome.size_bytes for outcome in outcomes)
        done = ", ".join(f"{count} {result.value}" for result, count in counts.items() if count)
        say(f"{len(outcomes)} kernels: {done}; {size / 1024:.0f} KiB in {cache.folder()}")
        for outcome in bad:
            say(f"{outcome.result.value}: {outcome.unit}: {outcome.error}")
    return 1 if bad else 0


def compilable(arch: str) -> targets.Target:
    target = targets.from_arch(arch)
    if target.is_cpu:
        raise InvalidInput("arch 'cpu' has no compiled kernels: use a name such as sm_90a")
    return target


def followed(todo: Sequence[Unit], jobs: int | None, *, quiet: bool) -> list[Outcome]:
    """All outcomes, with a bar on standard error while they come."""
    if not todo:
        return []
    bar = Progress(
        TextColumn("compiling"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        # Takes what is left of the line, and no more.
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        console=Console(stderr=True),
        expand=True,
        disable=quiet,
    )
    outcomes = []
    with bar:
        task = bar.add_task("", total=len(todo))
        for outcome in precompile.run(todo, jobs):
            outcomes.append(outcome)
            bar.update(task, advance=1, description=str(outcome.unit))
    return outcomes


def facts_of(outcome: Outcome) -> dict[str, Any]:
    return {
        "family": outcome.unit.family,
        "key": key.stable(outcome.unit.key),
        "arch": outcome.unit.target.arch,
        "result": outcome.result.value,
        "seconds": round(outcome.seconds, 3),
        "size_bytes": outcome.size_bytes,
        "error": outcome.error,
    }


def opened() -> cache.DiskCache | None:
    """The cache that is there.

    Raises:
        InvalidInput: it is not private.
    """
    try:
        return cache.existing()
    except cache.Rejected as reason:
        raise InvalidInput(f"the cache {cache.folder()} is not used: {reason}") from None


def judged(entry: Entry | str) -> tuple[str, str]:
    """Whether an entry can still be found by this installation, and why not."""
    if isinstance(entry, str):
        return BROKEN, entry
    parts = entry.parts
    if parts.get("format") != key.FORMAT:
        return STALE, f"format {parts.get('format')}, now {key.FORMAT}"
    now = list(toolkit.versions())
    if parts.get("toolkit") != now:
        then = [version for version in parts.get("toolkit", []) if version not in now]
        return STALE, f"made with {', '.join(then) or 'fewer wheels'}"
    ours = key.sources_of(key.PACKAGE).fingerprint
    if parts.get("sources", {}).get(key.PACKAGE) != ours:
        return STALE, "made from other sources"
    return CURRENT, ""


def list_cache(*, as_json: bool, say: Say) -> int:
    """Print all entries; the exit status."""
    disk = opened()
    found = [] if disk is None else list(disk.entries())
    rows = [(path, entry, *judged(entry)) for path, entry in found]
    total = sum(cache.size_of(path) for path, *_ in rows)
    if as_json:
        kernels = [described(path, entry, state, why) for path, entry, state, why in rows]
        say(json.dumps({"folder": str(cache.folder()), "size_bytes": total, "kernels": kernels}, indent=2))
        return 0
    table = Table(header_style="bold")
    for column in ("kernel", "key", "arch", "KiB", "compile s", "made", "state"):
        table.add_column(column, overflow="fold", justify="right" if column in ("KiB", "compile s") else "left")
    for path, entry, state, why in rows:
        shown = f"{state}: {why}" if why else state
        if isinstance(entry, str):
            table.add_row(escape(path.name), "", "", f"{cache.size_of(path) / 1024:.0f}", "", "", escape(shown))
            continue
        made = datetime.datetime.fromtimestamp(entry.made).strftime("%Y-%m-%d %H:%M")
        size, seconds = f"{entry.size_bytes / 1024:.0f}", f"{entry.compile_s:.2f}"
        text = escape(str(entry.parts.get("key")))
        table.add_row(escape(entry.kernel), text, entry.arch, size, seconds, made, escape(shown))
    if rows:
        Console().print(table)
    say(f"{len(rows)} kernels, {total / 1024:.0f} KiB in {cache.folder()}")
    return 0


def described(path: pathlib.Path, entry: Entry | str, state: str, why: str) -> dict[str, Any]:
    said: dict[str, Any] = {"file": path.name, "state": state, "why": why or None}
    if isinstance(entry, Entry):
        said |= {"parts": dict(entry.parts), "size_bytes": entry.size_bytes}
        said |= {"compile_s": entry.compile_s, "made": entry.made}
    return said


def clear_cache(*, only_stale: bool, as_json: bool, say: Say) -> int:
    """Remove entries; the exit status, 1 where one could not be removed."""
    disk = opened()
    cleared = cache.Cleared(0, {})
    if disk is not None:
        stale = frozenset(path for path, entry in disk.entries() if judged(entry)[0] != CURRENT) if only_stale else None
        cleared = disk.clear(stale)
    left = {path.name: why for path, why in cleared.left.items()}
    if as_json:
        say(json.dumps({"folder": str(cache.folder()), "removed": cleared.removed, "left": left}))
    else:
        for name, why in left.items():
            say(f"not removed: {name}: {why}")
        say(f"{cleared.removed} kernels removed")
    return 1 if left else 0


def verify_cache(*, as_json: bool, say: Say) -> int:
    """Read every entry and compare it with its checksum; the exit status, 1 where one is broken."""
    disk = opened()
    found = [] if disk is None else [(path, *judged(entry)) for path, entry in disk.entries()]
    counts = {state: sum(one == state for _, one, _ in found) for state in (CURRENT, STALE, BROKEN)}
    broken = {path.name: why for path, state, why in found if state == BROKEN}
    if as_json:
        say(json.dumps({"folder": str(cache.folder()), **counts, "broken_files": broken}, indent=2))
    else:
        for name, why in broken.items():
            say(f"broken: {name}: {why}")
        say(", ".join(f"{count} {state}" for state, count in counts.items()) + f" in {cache.folder()}")
    return 1 if broken else 0
