# SPDX-License-Identifier: Apache-2.0
"""Lines of a benchmark that nobody ran: every provider does a known share of what the ceiling allows."""

from typing import Any

import benchmarks
from benchmarks import runner, timing
from benchmarks.case import Case, select
from benchmarks.check import Error
from benchmarks.devices import floor_us
from benchmarks.report import to_json

Record = dict[str, Any]
DEVICE = "NVIDIA H200"
LAUNCH_US = 2.0
# Of the ceiling, once a launch is paid for.
SHARES = {"dsl": 0.9, "FA3": 0.85, "TRITON_ATTN": 0.5, "quack": 0.88, "torch": 0.6, "torch.compile": 0.7, "Triton": 0.8}


def environment(**changes: object) -> Record:
    facts: Record = {
        "kind": "environment",
        "date": "2026-01-02T03:04:05+00:00",
        "device": DEVICE,
        "driver": "580.1",
        "commit": "0123456789abcdef",
        "modified": False,
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "vllm": None},
        "page_size": 16,
        "seconds": 0.3,
        "flush": False,
    }
    return facts | changes


def cell(case: Case, name: str, device: str) -> runner.Cell:
    if name not in SHARES:
        return runner.Cell(provider=name, status="skipped", message=f"{name} is not installed")
    floor = floor_us(case, device) or floor_us(case, DEVICE)
    assert floor is not None
    median = LAUNCH_US + floor / SHARES[name]
    time = timing.Summary(median, 0.99 * median, 1.01 * median, 100)
    return runner.Cell(provider=name, status="ok", time=time, error=Error(1e-3, 2e-3), launch_us=30 * SHARES[name])


def row(operator: str, case: Case, device: str = DEVICE) -> Record:
    found = benchmarks.operators()[operator]
    names = [provider.name for provider in found.providers([])]
    cells = tuple(cell(case, name, device) for name in names)
    return to_json(
        runner.Row(case=case, floor_us=floor_us(case, device), layers=1, cells=cells), operator, found.unit, "dsl"
    )


def records(*operators: str, device: str = DEVICE) -> list[Record]:
    """A run of all rows that a report has pictures of."""
    rows = [
        row(operator, case, device)
        for operator in operators
        for case in select(benchmarks.operators()[operator].cases(), None, with_sweeps=True)
    ]
    return [environment(device=device), *rows]
