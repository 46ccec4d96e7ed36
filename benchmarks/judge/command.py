# SPDX-License-Identifier: Apache-2.0
"""The command `dsl-backend judge`: one candidate, one operator, one JSON object."""

import dataclasses
import hashlib
import importlib.util
import json
import pathlib
import re
import secrets
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from dsl_backend.runtime import registry as arches
from rich.console import Console

from .. import command, facts, measured, report
from ..case import SMALLEST, TABLE, Case, select
from ..devices import floor_us
from ..runner import device_name
from .checks import Examination, Result
from .process import Failed, Limits, Process, Stopped, isolation
from .registry import judged
from .times import Row, Times, WrongError, as_json

EMULATED = ("sm_90a", "sm_100a")
# The status of a row that a provider refuses.
SKIPPED = "skipped"
# What errors name where a GPU is missing: CUDA, its maker, or the drivers that Triton looks for.
GPU_ERROR = re.compile(r"cuda|nvidia|active drivers", re.IGNORECASE)
NEEDS_GPU = (
    f"it needs a GPU, and there is none here: {' or '.join(f'--arch {arch}' for arch in EMULATED)} runs kernels in "
    f"CuTe DSL on the emulator"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to judge.

    Attributes:
        arch: run the launches on the emulator for this architecture, on a machine with a GPU too.
        seed: of sizes and inputs; by default a random one, which the result names.
        rows: a regular expression for the rows to time; by default the table on a GPU, and the smallest rows on a CPU.
        peers: comma-separated providers to time, all, or none; by default those of `bench` on a GPU, and none on a CPU.
        seconds: the time limit of each request: importing, preparing, launching.
        memory_mib: the memory limit of the candidate's process.
        gpu_memory_mib: its limit of GPU memory, where it runs on a GPU.
        least_served: the share of the trials, and of the timed rows, that it must not refuse.
    """

    arch: str | None = None
    seed: int | None = None
    rows: str | None = None
    peers: str | None = None
    seconds: float = 240.0
    memory_mib: int = 16 << 10
    gpu_memory_mib: int = 16 << 10
    least_served: float = 0.5


DEFAULTS = Options()


@dataclass
class Verdict:
    """What is said of a candidate; the JSON object has these fields.

    Attributes:
        ok: whether it is correct and nothing was found that it must not do.
        correct: whether it served at least one trial, and was right in all trials and timed rows that it served.
        error_over_budget: the largest error as a share of what is accepted.
        findings: what it did that it must not do, that it refused too much, and what the emulator found.
        ratio: the geometric mean over the rows that it served of the best peer's time divided by the candidate's.
        of_floor: the geometric mean of its times divided by the floor's.
        device: what the candidate ran on: a GPU's name, `cpu`, or the emulated architecture.
    """

    candidate: str
    sha256: str
    operator: str
    device: str
    network: str
    processes: str
    seed: int
    limits: dict[str, Any]
    least_served: float
    provider: str = ""
    correct: bool = False
    error_over_budget: float | None = None
    findings: list[str] = field(default_factory=list)
    ratio: float | None = None
    of_floor: float | None = None
    trials: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.correct and not self.findings

    @property
    def counts(self) -> dict[str, int]:
        """Of trials and of timed rows: all, and those that it refused."""
        trials = [one["status"] for one in self.trials]
        rows = [one["cells"][0]["status"] for one in self.rows]
        return {
            "trials": len(trials),
            "right": trials.count("right"),
            "refused": trials.count("refused"),
            "rows": len(rows),
            "rows_timed": rows.count("ok"),
            "rows_refused": rows.count(SKIPPED),
        }

    def as_json(self) -> dict[str, Any]:
        return {"kind": "judge", "ok": self.ok, "counts": self.counts, **dataclasses.asdict(self)}


def main(
    candidate: pathlib.Path,
    op: str,
    json_path: pathlib.Path | None = None,
    options: Options = DEFAULTS,
    console: Console | None = None,
) -> int:
    """Judges a file's provider of an operator.

    Args:
        json_path: the file for the result, one JSON object.

    Returns:
        0 if the candidate is correct and nothing was found, 1 if not, 2 if an argument is not valid.
    """
    console = console or Console()
    try:
        check_options(candidate, op, options)
    except (OSError, ValueError) as error:
        report.say(console, str(error))
        return 2
    verdict = judge(candidate.resolve(), op, options, console)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(verdict.as_json(), indent=2) + "\n")
    for line in lines(verdict):
        report.say(console, line)
    return 0 if verdict.ok else 1


def check_options(candidate: pathlib.Path, op: str, options: Options) -> None:
    """Raises OSError or ValueError: something is not valid; the message says what is accepted."""
    judged(op)
    candidate.open().close()
    if options.arch is not None and options.arch not in EMULATED:
        raise ValueError(f"arch {options.arch!r} is not emulated: choose from {', '.join(EMULATED)}")
    if options.arch is not None and importlib.util.find_spec("emulator") is None:
        raise ValueError("--arch needs the emulator, which is in the repository and not in the wheel")
    if options.arch is not None:
        arches.named(options.arch)
    if not 0 <= options.least_served <= 1:
        raise ValueError(f"least_served is {options.least_served:g}: a share from 0 to 1 is needed")
    command.check_peers(options.peers, [command.operators()[op]])
    command.check_rows(options.rows)


def judge(candidate: pathlib.Path, op: str, options: Options, console: Console) -> Verdict:
    """Runs the trials, then times the candidate if it is right and not emulated."""
    on_gpu = torch.cuda.is_available() and options.arch is None
    device = torch.device("cuda" if on_gpu else "cpu")
    limits = Limits(options.seconds, options.memory_mib << 20, options.gpu_memory_mib << 20 if on_gpu else 0)
    isolated = isolation(on_gpu)
    verdict = Verdict(
        candidate=candidate.name,
        sha256=hashlib.sha256(candidate.read_bytes()).hexdigest(),
        operator=op,
        device=f"emulated {options.arch}" if options.arch else device_name(device),
        network=isolated.network,
        processes=isolated.processes,
        seed=options.seed if options.seed is not None else secrets.randbits(32),
        limits=dataclasses.asdict(limits),
        least_served=options.least_served,
        facts=facts.gather(device),
    )
    with tempfile.TemporaryDirectory(prefix="dsl-backend-judge-") as name:
        folder = pathlib.Path(name)

        def start() -> Process:
            process = Process(folder, limits)
            try:
                verdict.provider = str(process.ask("load", op=op, file=str(candidate))["name"])
            except BaseException:
                process.stop()
                raise
            return process

        try:
            process = start()
        except (Failed, Stopped) as error:
            verdict.findings.append(f"it cannot be imported: {error}")
            verdict.findings += gpu_findings(verdict, [str(error)])
            return verdict
        examination = Examination(judged(op), start, folder, device, options.arch, verdict.seed)
        try:
            results, process = examination.run(process, lambda result: report.say(console, progress(result)))
            summarize(verdict, results)
            timing = Timing(verdict, op, options, folder, device, limits)
            if verdict.correct and options.arch is None:
                timing.candidate(process)
            verdict.findings += last_findings(process)
            # Nothing of it runs beside its peers, on the host or on a GPU.
            process.stop()
            timing.peers()
        except Stopped as error:
            # A process that was lost in the trials is among their results already.
            verdict.findings += [] if verdict.trials and not verdict.correct else [str(error)]
        except Failed as error:
            verdict.findings.append(str(error))
        finally:
            process.stop()
    verdict.findings += refusals(verdict)
    return verdict


def last_findings(process: Process) -> list[str]:
    """What is found when the candidate has answered everything that it is asked."""
    found = [str(one) for one in process.ask("findings").get("findings", ())]
    if work := process.work():
        found.append(f"it went on working after its last answer: {work}")
    return found


def gpu_findings(verdict: Verdict, errors: Sequence[str]) -> list[str]:
    """What helps a candidate that fails for want of a GPU."""
    return [NEEDS_GPU] if verdict.device == "cpu" and any(map(GPU_ERROR.search, errors)) else []


def refusals(verdict: Verdict) -> list[str]:
    """What it refused more of than a candidate may."""
    counts = verdict.counts
    return [
        f"it refused {refused} of {count} {what}; it must serve a share of {verdict.least_served:g} at least"
        for what, count, refused in (
            ("trials", counts["trials"], counts["refused"]),
            ("timed rows", counts["rows"], counts["rows_refused"]),
        )
        if count - refused < verdict.least_served * count
    ]


def summarize(verdict: Verdict, results: Sequence[Result]) -> None:
    served = [one for one in results if one.status != "refused"]
    verdict.correct = bool(served) and all(one.status == "right" for one in served)
    errors = [one.error_over_budget for one in served if one.error_over_budget is not None]
    # JSON has no infinity.
    verdict.error_over_budget = max(errors) if errors and max(errors) < torch.inf else None
    verdict.findings += dict.fromkeys(finding for one in results for finding in one.findings)
    verdict.findings += gpu_findings(verdict, [one.message for one in results if one.status == "error"])
    verdict.trials = [
        {
            **dataclasses.asdict(one),
            "error_over_budget": None if one.error_over_budget == torch.inf else one.error_over_budget,
        }
        for one in results
    ]


@dataclass
class Timing:
    """Times a candidate, and its peers when its process has ended; each in a process of its own."""

    verdict: Verdict
    op: str
    options: Options
    folder: pathlib.Path
    device: torch.device
    limits: Limits
    rows: list[Row] = field(default_factory=list)

    def candidate(self, process: Process) -> None:
        """Adds the rows to the verdict, with the candidate's times."""
        operator = command.operators()[self.op]
        for case in self.cases(operator):
            row = Row(operator, judged(self.op), case, self.folder, self.device, self.verdict.seed)
            mine = cell(self.verdict.provider, row, process)
            floor = floor_us(case, device_name(self.device))
            self.rows.append(row)
            self.verdict.rows.append({"id": case.id, "layers": row.layers, "floor_us": floor, "cells": [mine]})
            if mine["status"] in ("wrong", "error"):
                self.verdict.correct = False
                self.verdict.findings.append(f"{case.id}: {mine['message']}")

    def peers(self) -> None:
        """Adds the peers' times of the rows in which the candidate has one, and what they say of it."""
        operator = command.operators()[self.op]
        ratios, floors = [], []
        for row, said in zip(self.rows, self.verdict.rows, strict=True):
            (mine,) = said["cells"]
            if mine["status"] != "ok":
                continue
            others = [self.peer(row, name) for name in self.names(operator)]
            said["cells"] += others
            timed = [one["median_us"] for one in others if one["status"] == "ok"]
            ratios += [min(timed) / mine["median_us"]] if timed else []
            floors += [mine["median_us"] / said["floor_us"]] if said["floor_us"] else []
        self.verdict.ratio = statistics.geometric_mean(ratios) if ratios else None
        self.verdict.of_floor = statistics.geometric_mean(floors) if floors else None

    def cases(self, operator: Any) -> list[Case]:
        if self.options.rows is not None:
            found = select(operator.cases(), self.options.rows)
        else:
            group = TABLE if self.device.type == "cuda" else SMALLEST
            found = [case for case in operator.cases() if case.group == group]
        covers = judged(self.op).covers
        return [case for case in found if covers(case.problem)]

    def names(self, operator: Any) -> list[str]:
        """The names of the providers to compare with, this package's among them."""
        names = self.options.peers
        if names is None and self.device.type != "cuda":
            return []
        chosen = command.choose_providers(operator.providers([]), names, [measured.OURS] if names != "none" else [])
        return [one.name for one in chosen]

    def peer(self, row: Row, name: str) -> dict[str, Any]:
        folder = self.folder / "peers"
        folder.mkdir(exist_ok=True)
        try:
            with Process(folder, self.limits) as process:
                process.ask("load_named", op=self.op, name=name)
                return cell(name, row, process)
        except (Failed, Stopped) as error:
            return {"provider": name, "status": "error", "message": str(error)}


def cell(name: str, row: Row, process: Process) -> dict[str, Any]:
    """A provider's time in a row, or why it has none. Raises Stopped: its process has ended."""
    try:
        found = row.time(process)
    except WrongError as error:
        process.ask("end")
        return {"provider": name, "status": "wrong", "message": str(error)}
    except Failed as error:
        process.ask("end")
        return {"provider": name, "status": "error", "message": str(error)}
    if not isinstance(found, Times):
        return {"provider": name, "status": SKIPPED, "message": "; ".join(found)}
    return {"provider": name, "status": "ok", **as_json(found)}


def progress(result: Result) -> str:
    size = "" if result.error_over_budget in (None, torch.inf) else f", {result.error_over_budget:.2f} of the budget"
    return f"{result.id} ({result.why}): {result.status}{size}{f': {result.message}' if result.message else ''}"


def lines(verdict: Verdict) -> list[str]:
    """The result as text."""
    counts = verdict.counts
    failed = counts["trials"] - counts["right"] - counts["refused"]
    said = [
        f"{verdict.candidate}: {verdict.provider or 'no provider'} of {verdict.operator} on {verdict.device}, "
        f"{verdict.network}, seed {verdict.seed}",
        f"{'correct' if verdict.correct else 'NOT CORRECT'}: {counts['right']} trials right, {failed} not, "
        f"{counts['refused']} refused",
    ]
    said += [f"finding: {one}" for one in verdict.findings]
    for row in verdict.rows:
        cells = [
            f"{one['provider']} {one['median_us']:.2f} us"
            if "median_us" in one
            else f"{one['provider']} {one['status']}"
            for one in row["cells"]
        ]
        said.append(f"{row['id']}: {', '.join(cells)}")
    rows = f"{counts['rows_timed']} of {counts['rows']} rows timed, {counts['rows_refused']} refused"
    said += [rows] if verdict.rows else []
    if verdict.rows and verdict.device == "cpu":
        said.append("Times of a CPU say nothing about a GPU.")
    if verdict.ratio is not None:
        said.append(f"best peer's time / candidate's: {verdict.ratio:.2f}")
    if verdict.of_floor is not None:
        said.append(f"candidate's time / floor: {verdict.of_floor:.2f}")
    said.append("accepted" if verdict.ok else "rejected")
    return said
