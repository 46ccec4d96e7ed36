# SPDX-License-Identifier: Apache-2.0
"""What `dsl-backend compile` and `dsl-backend cache` do and print."""

import contextlib
import datetime
import json
import pathlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from dsl_backend import envs
from dsl_backend.errors import InvalidInput
from dsl_backend.experts import dispatch as experts
from dsl_backend.runtime import cache, key, model, precompile, toolkit
from dsl_backend.runtime import family as families
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.cache import Entry
from dsl_backend.runtime.compile_process import Result
from dsl_backend.runtime.dispatch import check_name
from dsl_backend.runtime.precompile import Outcome, PrecompileSpec

Say = Callable[[str], None]

# The states of an entry.
CURRENT, STALE, BROKEN = "current", "stale", "broken"


def compile_model(
    config: pathlib.Path,
    arches: Sequence[str],
    *,
    tensor_parallel: int,
    expert_parallel: int = 1,
    dtype: str | None,
    kv_cache_dtype: str = "auto",
    experts_kernel: str | None = None,
    only: Sequence[str],
    jobs: int | None,
    as_json: bool,
    say: Say,
) -> int:
    """Compile all kernels of a model. Returns the exit status: 1 if one failed or was not kept, or without CuTe DSL.

    Raises:
        InvalidInput: the model, an architecture, a family or an environment variable is not accepted, or nothing can be
            kept here.
    """
    if wrong := envs.problems():
        raise InvalidInput("; ".join(wrong))
    if kv_cache_dtype not in ("auto", *model.KV_CACHE_DTYPES):
        accepted = ", ".join(["auto", *model.KV_CACHE_DTYPES])
        raise InvalidInput(f"--kv-cache-dtype {kv_cache_dtype} is not served: use one of {accepted}")
    check_name(experts.OPERATION, experts.TABLE, experts_kernel)
    read = model.read(config, tensor_parallel=tensor_parallel, dtype=dtype)
    shape = replace(read, kv_cache_dtype=kv_cache_dtype, expert_parallel=expert_parallel, experts_kernel=experts_kernel)
    chips = [compilable(arch) for arch in arches]
    todo = [spec for chip in chips for spec in families.precompile_specs(shape, chip, only)]
    if toolkit.missing():
        typer.echo(f"dsl-backend: nothing is compiled: {'; '.join(toolkit.missing())}", err=True)
        return 1
    others = [
        {"family": one.name, "arch": chip.arch, "why": why}
        for chip in chips
        for one in families.chosen(only)
        for why in families.served_by_others(one, shape, chip)
    ]
    if not as_json:
        for one in others:
            say(f"no CuTe DSL kernel: {one['family']} on {one['arch']}: {one['why']}")
    outcomes = followed(todo, jobs, quiet=as_json)
    if as_json:
        kernels = [facts_of(outcome) for outcome in outcomes]
        say(json.dumps({"folder": str(cache.folder()), "kernels": kernels, "without": others}, indent=2))
    elif not todo:
        say(f"nothing to compile: no operator has a CuTe DSL kernel for this model on {', '.join(arches)}")
    else:
        say(f"{len(outcomes)} kernels: {summary(outcomes)}")
    bad = [outcome for outcome in outcomes if outcome.result in (Result.FAILED, Result.UNKEPT)]
    for outcome in bad if not as_json else ():
        say(f"{outcome.result.value}: {outcome.spec}: {outcome.error}")
    return 1 if bad else 0


def summary(outcomes: Sequence[Outcome]) -> str:
    """The number of specs with each result, and the size of their files."""
    counts = {result: sum(one.result is result for one in outcomes) for result in Result}
    size = sum(outcome.size_bytes for outcome in outcomes)
    done = ", ".join(f"{count} {result.value}" for result, count in counts.items() if count)
    return f"{done or 'none compiled'}; {size / 1024:.0f} KiB in {cache.folder()}"


def compilable(arch: str) -> targets.Target:
    target = targets.from_arch(arch)
    if target.is_cpu:
        raise InvalidInput("arch 'cpu' has no compiled kernels: use a name such as sm_90a")
    return target


def followed(todo: Sequence[PrecompileSpec], jobs: int | None, *, quiet: bool) -> list[Outcome]:
    """All outcomes, with a progress bar on standard error.

    Raises:
        KeyboardInterrupt: Ctrl-C; the message has the progress, and the processes that compile have ended.
    """
    if not todo:
        return []
    bar = Progress(
        TextColumn("compiling"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        # Takes the rest of the line.
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        console=Console(stderr=True),
        expand=True,
        disable=quiet,
    )
    outcomes: list[Outcome] = []
    try:
        with bar, contextlib.closing(cast("Generator[Outcome]", precompile.run(todo, jobs))) as running:
            task = bar.add_task("", total=len(todo))
            for outcome in running:
                outcomes.append(outcome)
                bar.update(task, advance=1, description=str(outcome.spec))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{len(outcomes)} of {len(todo)} kernels: {summary(outcomes)}") from None
    return outcomes


def facts_of(outcome: Outcome) -> dict[str, Any]:
    return {
        "family": outcome.spec.family,
        "key": key.stable(outcome.spec.key),
        "arch": outcome.spec.target.arch,
        "result": outcome.result.value,
        "seconds": round(outcome.seconds, 3),
        "size_bytes": outcome.size_bytes,
        "error": outcome.error,
    }


def opened() -> cache.DiskCache | None:
    """The existing cache; None if there is none. Raises InvalidInput: it is not private."""
    try:
        return cache.existing()
    except cache.Rejected as reason:
        raise InvalidInput(f"the cache {cache.folder()} is not used: {reason}") from None


def judged(entry: Entry | str) -> tuple[str, str]:
    """The state of an entry for this installation, and the reason if it is not current."""
    if isinstance(entry, str):
        return BROKEN, entry
    parts = entry.parts
    if parts.get("format") != key.FORMAT:
        return STALE, f"format {parts.get('format')}, now {key.FORMAT}"
    now = list(toolkit.versions())
    if parts.get("toolkit") != now:
        then = [version for version in parts.get("toolkit", []) if version not in now]
        return STALE, f"made with {', '.join(then) or 'fewer wheels'}"
    if not key.is_current(parts.get("sources", {})):
        return STALE, "made from other sources"
    return CURRENT, ""


def list_cache(*, as_json: bool, say: Say) -> int:
    """Print all entries. Returns the exit status."""
    disk = opened()
    found = [] if disk is None else list(disk.entries())
    rows = [(path, entry, *judged(entry)) for path, entry in found]
    total = sum(cache.size_of(path) for path, *_ in rows)
    if as_json:
        kernels = [described(path, entry, state, why) for path, entry, state, why in rows]
        say(json.dumps({"folder": str(cache.folder()), "size_bytes": total, "kernels": kernels}, indent=2))
        return 0
    lines = [listed(path, entry, f"{state}: {why}" if why else state) for path, entry, state, why in rows]
    head = ("KiB", "seconds", "made", "arch", "state", "kernel")
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)] if lines else []
    for line in [head, *lines] if lines else []:
        # The last column is not padded: a key may be long.
        columns = [text.ljust(width) for text, width in zip(line[:-1], widths, strict=False)]
        say("  ".join([*columns, line[-1]]))
    say(f"{len(rows)} kernels, {total / 1024:.0f} KiB in {cache.folder()}")
    return 0


def listed(path: pathlib.Path, entry: Entry | str, state: str) -> tuple[str, ...]:
    """The columns of an entry."""
    if isinstance(entry, str):
        return (f"{cache.size_of(path) / 1024:.0f}", "", "", "", state, path.name)
    made = datetime.datetime.fromtimestamp(entry.made).strftime("%Y-%m-%d %H:%M")
    size, seconds = f"{entry.size_bytes / 1024:.0f}", f"{entry.compile_s:.2f}"
    return (size, seconds, made, entry.arch, state, f"{entry.kernel} {entry.parts.get('key')}")


def described(path: pathlib.Path, entry: Entry | str, state: str, why: str) -> dict[str, Any]:
    said: dict[str, Any] = {"file": path.name, "state": state, "why": why or None}
    if isinstance(entry, Entry):
        said |= {"parts": dict(entry.parts), "size_bytes": entry.size_bytes}
        said |= {"compile_s": entry.compile_s, "made": entry.made}
    return said


def clear_cache(*, only_stale: bool, as_json: bool, say: Say) -> int:
    """Remove entries. Returns the exit status: 1 if one could not be removed."""
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
    """Compare every entry with its checksum. Returns the exit status: 1 if one is broken."""
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
