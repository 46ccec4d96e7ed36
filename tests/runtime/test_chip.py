# SPDX-License-Identifier: Apache-2.0
"""What GPUs say of themselves, and what is planned for a target without one."""

import ctypes
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsl_backend.runtime import chip, registry
from dsl_backend.runtime.chip import Chip
from dsl_backend.runtime.target import detect, from_arch

# What the driver of an H100 (SXM) answers.
H100 = {chip.SM_COUNT: 132, chip.MEMORY_CLOCK_KHZ: 2619000, chip.MEMORY_BUS_BITS: 5120, chip.CLOCK_KHZ: 1980000}
ALL = H100 | {chip.L2_BYTES: 50 << 20}


def driver(answers: dict[int, int], status: int = 0) -> Any:
    def attribute(value: Any, number: int, device: Any) -> int:
        value._obj.value = answers.get(number, -1)
        return 0 if number in answers else 1

    return SimpleNamespace(
        cuInit=lambda flags: status, cuDeviceGet=lambda device, index: 0, cuDeviceGetAttribute=attribute
    )


@pytest.mark.parametrize(
    ("answers", "status", "found"),
    [
        (ALL, 0, Chip(sm_count=132, memory_gb_s=3352, clock_mhz=1980, l2_bytes=50 << 20)),
        (H100, 0, None),
        (ALL, 100, None),
    ],
    ids=["an-h100", "no-l2", "no-driver"],
)
def test_of_device(answers: dict[int, int], status: int, found: Chip | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver(answers, status))
    assert chip.of_device(0) == found


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert chip.of_device(0) is None


def test_chips_of_a_target() -> None:
    """Of its GPU; without one, the usual parts of its architecture."""
    h200, h100 = from_arch("sm_90a").chips
    assert h100.memory_gb_s < h200.memory_gb_s
    assert not h100.is_like(h200)
    assert dataclasses.replace(from_arch("sm_90a"), chip=h100).chips == (h100,)
    assert from_arch("cpu").chips == ()


def test_usual_parts_are_those_of_their_architecture() -> None:
    """CuTe DSL kernels are chosen by estimates, which need a chip."""
    for arch in registry.ARCHS:
        assert all(one.sm_count == arch.sm_count for one in arch.chips)
        assert arch.kernel_arch is None or arch.chips


@pytest.mark.gpu
def test_the_gpu_here_says_what_it_is() -> None:
    found = detect(torch.device("cuda"))
    assert found.chip is not None
    assert found.chip.sm_count == found.sm_count
    assert 100 < found.chip.memory_gb_s < 20000
    assert 500 < found.chip.clock_mhz < 4000


ROOT = Path(__file__).parents[2]


def test_chips_are_what_drivers_said() -> None:
    """What is chosen, tuned and recorded for a GPU holds where its driver says the same: files of runs have that."""
    lines = (line for file in sorted((ROOT / "docs/data").glob("*.jsonl")) for line in file.read_text().splitlines())
    facts = (one for one in map(json.loads, lines) if isinstance(one.get("chip"), dict))
    said = {(one["device"], Chip(**one["chip"])) for one in facts}
    assert {device for device, _ in said} >= {"NVIDIA H100 80GB HBM3", "NVIDIA H200"}
    assert {chip for _, chip in said} == set(from_arch("sm_90a").chips)


@pytest.mark.parametrize("file", sorted(ROOT.glob("dsl_backend/**/tuned.json")), ids=lambda file: file.parent.name)
def test_records_are_of_a_known_chip(file: Path) -> None:
    """A record whose chip is no GPU's is never used."""
    for record in json.loads(file.read_text())["records"]:
        chip = record["chip"] and Chip(**record["chip"])
        known = from_arch(record["arch"]).chips
        assert chip is None or any(chip.is_like(one) for one in known), record
