# SPDX-License-Identifier: Apache-2.0
"""The command `dsl-backend judge`: one candidate, one operator, one JSON object."""

import dataclasses
import hashlib
import importlib.util
import json
import pathlib
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
    """

    arch: str | None = None
    seed: int | None = None
    rows: str | None = None
    peers: str | None = None
    seconds: float = 240.0
    memory_mib: int = 16 << 10
    gpu_memory_mib: int = 16 << 10


DEFAULTS = Options()


@dataclass
class Verdict:
    """What is said of a candidate; the JSON object has these fields.

    Attributes:
        ok: whether it is correct and nothing was found that it must not do.
        correct: whether it served at least one trial, and every one that it served was right.
        error_over_budget: the largest error as a share of what is accepted.
        findings: what it did that it must not do, and what the emulator found.
        ratio: the geometric mean over the timed rows of the best peer's time divided by the candidate's.
        of_floor: the geometric mean of its times divided by the floor's.
        device: what the candidate ran on: a GPU's name, `cpu`, or the emulated architecture.
    """

    candidate: str
    sha256: str
    operator: str
    device: str
    network: str
    seed: int
    limits: dict[str, Any]
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

    def as_json(self) -> dict[str, Any]:
        return {"kind": "judge", "ok": self.ok, **dataclasses.asdict(self)}


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
    command.check_peers(options.peers, [command.operators()[op]])
    command.check_rows(options.rows)


def judge(candidate: pathlib.Path, op: str, options: Options, console: Console) -> Verdict:
    """Runs the trials, then times the candidate if it is right and not emulated."""
    on_gpu = torch.cuda.is_available() and options.arch is None
    device = torch.device("cuda" if on_gpu else "cpu")
    limits = Limits(options.seconds, options.memory_mib << 20, options.gpu_memory_mib << 20 if on_gpu else 0)
    verdict = Verdict(
        candidate=candidate.name,
        sha256=hashlib.sha256(candidate.read_bytes()).hexdigest(),
        operator=op,
        device=f"emulated {options.arch}" if options.arch else device_name(device),
        network=isolation()[1],
        seed=options.seed if options.seed is not None else secrets.randbits(32),
        limits=dataclasses.asdict(limits),
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
            return verdict
        examination = Examination(judged(op), start, folder, device, options.arch, verdict.seed)
        try:
            results, process = examination.run(process, lambda result: report.say(console, progress(result)))
            summarize(verdict, results)
            if verdict.correct and options.arch is None:
                Timing(verdict, op, options, folder, device, limits).run(process)
            verdict.findings += [str(one) for one in process.ask("findings").get("findings", ())]
        except Stopped as error:
            # A process that was lost in the trials is among their results already.
            verdict.findings += [] if verdict.trials and not verdict.correct else [str(error)]
        except Failed as error:
            verdict.findings.append(str(error))
        finally:
            process.stop()
    return verdict


def summarize(verdict: Verdict, results: Sequence[Result]) -> None:
    served = [one for one in results if one.status != "refused"]
    verdict.correct = bool(served) and all(one.status == "right" for one in served)
    errors = [one.error_over_budget for one in served if one.error_over_budget is not None]
    # JSON has no infinity.
    verdict.error_over_budget = max(errors) if errors and max(errors) < torch.inf else None
    verdict.findings += dict.fromkeys(finding for one in results for finding in one.findings)
    verdict.trials = [
        {
            **dataclasses.asdict(one),
            "error_over_budget": None if one.error_over_budget == torch.inf else one.error_over_budget,
        }
        for one in results
    ]


@dataclass
class Timing:
    """Times a candidate and its peers, each in a process of its own."""

    verdict: Verdict
    op: str
    options: Options
    folder: pathlib.Path
    device: torch.device
    limits: Limits

    def run(self, process: Process) -> None:
        """Adds the rows to the verdict."""
        operator = command.operators()[self.op]
        ratios, floors = [], []
        for case in self.cases(operator):
            row = Row(operator, judged(self.op), case, self.folder, self.device, self.verdict.seed)
            cells = [cell(self.verdict.provider, row, process)]
            if "median_us" in cells[0]:
                cells += [self.peer(row, name) for name in self.peers(operator)]
            floor = floor_us(case, device_name(self.device))
            self.verdict.rows.append({"id": case.id, "layers": row.layers, "floor_us": floor, "cells": cells})
            mine, *others = [one.get("median_us") for one in cells]
            timed = [one for one in others if one]
            if cells[0]["status"] == "wrong":
                self.verdict.correct = False
                self.verdict.findings.append(cells[0]["message"])
            if mine:
                ratios += [min(timed) / mine] if timed else []
                floors += [mine / floor] if floor else []
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

    def peers(self, operator: Any) -> list[str]:
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
        return {"provider": name, "status": "skipped", "message": "; ".join(found)}
    return {"provider": name, "status": "ok", **as_json(found)}


def progress(result: Result) -> str:
    size = "" if result.error_over_budget in (None, torch.inf) else f", {result.error_over_budget:.2f} of the budget"
    return f"{result.id} ({result.why}): {result.status}{size}{f': {result.message}' if result.message else ''}"


def lines(verdict: Verdict) -> list[str]:
    """The result as text."""
    counts = {status: sum(one["status"] == status for one in verdict.trials) for status in ("right", "refused")}
    failed = len(verdict.trials) - sum(counts.values())
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
    if verdict.rows and verdict.device == "cpu":
        said.append("Times of a CPU say nothing about a GPU.")
    if verdict.ratio is not None:
        said.append(f"best peer's time / candidate's: {verdict.ratio:.2f}")
    if verdict.of_floor is not None:
        said.append(f"candidate's time / floor: {verdict.of_floor:.2f}")
    said.append("accepted" if verdict.ok else "rejected")
    return said
