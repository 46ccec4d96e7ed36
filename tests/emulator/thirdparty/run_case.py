# SPDX-License-Identifier: Apache-2.0
"""Run a case of others' kernels on the emulator and print what came out as one line of JSON.

    python run_case.py ARCH CASE --schedules eager lazy random
    python run_case.py --list

It is a process of its own since torch is made to believe in a GPU (benchmarks/clock/stand_in.py), and since the
packages must be on no other path. The kernels are compiled once; each schedule then gets a device of its own.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
# Threads of torch and BLAS only get into each other's way here; read when they are loaded.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  after the number of threads
from cases_cutlass_mla import CUTLASS  # noqa: E402  with those of the other files
from cases_flash import FLASH  # noqa: E402
from cases_quack import QUACK  # noqa: E402
from peer_answers import FILE, Answers  # noqa: E402
from peer_budgets import judge  # noqa: E402
from peer_cases import SCHEDULES, SM90, Case, Problem  # noqa: E402
from peer_rules import compare, rule_of  # noqa: E402

import emulator  # noqa: E402
from benchmarks.clock.stand_in import PEERS, SMS, pretend  # noqa: E402
from emulator.host.launch import Launch  # noqa: E402
from emulator.machine import Machine  # noqa: E402

CASES: dict[str, Case] = {**FLASH, **QUACK, **CUTLASS}


class TimedMachine(Machine):
    """Knows how long its launches took, by the clock and of CPU time; the first one's translation included."""

    seconds = 0.0
    cpu_seconds = 0.0

    def launch(self, launch: Launch) -> None:
        started = time.perf_counter(), time.process_time()
        try:
            super().launch(launch)
        finally:
            self.seconds += time.perf_counter() - started[0]
            self.cpu_seconds += time.process_time() - started[1]


def run(arch: str, case: Case, schedules: list[str], answers: Answers) -> dict[str, Any]:
    torch.manual_seed(0)
    problem: Problem | None = None
    report: dict[str, Any] = {"case": case.name, "arch": arch, "schedules": {}}
    for schedule in schedules:
        machine = TimedMachine(arch, SMS, schedule, seed=1)
        with emulator.device(arch, sms=SMS, schedule=schedule, keep_findings=True, machine=machine):
            problem = problem or case.make(arch)
            outputs = problem.run()
        report["schedules"][schedule] = told(machine, problem, outputs)
        if arch == SM90 and case.name in answers.cases:
            report["inputs"] = problem.digest()
            report["schedules"][schedule]["chip"] = beside(case.name, problem, outputs, answers)
    return report


def told(machine: TimedMachine, problem: Problem, outputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    assert outputs.keys() == problem.expected.keys(), f"{sorted(outputs)} where {sorted(problem.expected)} is right"
    verdicts = {name: asdict(judge(outputs[name], problem.expected[name])) for name in outputs}
    instructions = sum(int(count.sum()) for one in machine.profile.kernels.values() for count in one.executed.values())
    return {
        "outputs": verdicts,
        "findings": Counter(one.kind.name for one in machine.findings if not one.warning),
        "warnings": Counter(one.kind.name for one in machine.findings if one.warning),
        "errors": [str(one) for one in machine.findings if not one.warning][:20],
        "kernels": sorted(machine.profile.kernels),
        "instructions": instructions,
        "seconds": round(machine.seconds, 3),
        "instructions_per_second": round(instructions / max(machine.seconds, 1e-9)),
        "instructions_per_cpu_second": round(instructions / max(machine.cpu_seconds, 1e-9)),
    }


def beside(name: str, problem: Problem, outputs: dict[str, torch.Tensor], answers: Answers) -> dict[str, Any]:
    """How like a chip's outputs these are, by name."""
    likeness = {}
    for key, chip in answers.cases[name].outputs.items():
        expected = problem.expected[key]
        found = compare(outputs[key], chip, rule_of(name, key), expected.magnitude, expected.absolute)
        likeness[key] = asdict(found)
    return likeness


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a case of others' kernels on the emulator.")
    parser.add_argument("arch", nargs="?", choices=("sm_90a", "sm_100a"))
    parser.add_argument("case", nargs="?", choices=CASES)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--answers", type=Path, default=FILE, help="a chip's, to compare with; see on_chip.py")
    parser.add_argument("--list", action="store_true", help="print the cases")
    options = parser.parse_args()
    if options.list:
        for name, case in CASES.items():
            sys.stdout.write(f"{' '.join([name, *case.archs])}\n")
        return
    if options.arch is None or options.case is None:
        parser.error("an arch and a case")
    pretend(options.arch, PEERS)
    report = run(options.arch, CASES[options.case], options.schedules, Answers.load(options.answers))
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
