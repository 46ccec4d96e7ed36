# SPDX-License-Identifier: Apache-2.0
"""Kernels of others, unmodified, give the right values on the emulator, and its checks find nothing wrong in them.

Those for SM90 give what they gave on a chip, as far as `peer_rules` says. The chip's answers are golden_sm90.npz of
tests/emulator/golden/thirdparty, which on_chip.py makes.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cases_cutlass import EXAMPLES
from cases_cutlass_mla import CUTLASS
from peer_answers import Answers
from peer_cases import SCHEDULES, SM90, SM100
from run_case import CASES, PEERS

HERE = Path(__file__).resolve().parent
SET_UP = HERE.parents[2] / "tools/setup_peers.py"  # has the digest of the examples that it gets
LIMIT_S = 600
# By arch, so that the first of them are those that a chip is asked for.
ALL = [
    pytest.param(arch, name, marks=() if arch in case.quick else pytest.mark.full, id=f"{name}-{arch}")
    for arch in (SM90, SM100)
    for name, case in CASES.items()
    if arch in case.archs
]
ON_CHIP = [one for one in ALL if one.values[0] == SM90]
# What no chip has answered yet: the next run of on_chip.py does.
AWAITED = [one.values[1] for one in ON_CHIP if one.values[1] in CUTLASS]


@pytest.fixture(autouse=True)
def _peers_are_installed() -> None:
    if not (PEERS / ".set-up").is_file():
        pytest.skip(f"{PEERS} does not hold the kernels: `make peers` installs them")


@cache
def ran(arch: str, name: str) -> dict[str, Any]:
    """What run_case.py tells; the scope of the tests' parameters lets those of a case come one after the other."""
    command = [sys.executable, "-W", "ignore", str(HERE / "run_case.py"), arch, name, "--schedules", *SCHEDULES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert list(report["schedules"]) == list(SCHEDULES)
    return report


def skip_without_examples(name: str) -> None:
    stamp = EXAMPLES / ".set-up"
    if name in CUTLASS and not (stamp.is_file() and stamp.read_text() in SET_UP.read_text()):
        older = "does not hold CUTLASS's examples, or older ones"
        pytest.skip(f"{EXAMPLES} {older}: `make peers` gets them, where GitHub can be reached")


@pytest.mark.parametrize(("arch", "name"), ALL, scope="module")
def test_values_and_findings(arch: str, name: str) -> None:
    skip_without_examples(name)
    case = CASES[name]
    schedules = ran(arch, name)["schedules"]
    for output in case.raced:
        right = {not told["outputs"][output]["wrong"] for told in schedules.values()}
        assert right == {True, False}, f"{output}: {schedules}"
    for schedule, told in schedules.items():
        for output, verdict in told["outputs"].items():
            assert verdict["wrong"] == 0 or output in case.raced, f"{schedule}: {output}: {verdict}"
        assert told["findings"].keys() == set(case.known.get(arch, ())), (
            f"{schedule}: {told['findings']}: {told['errors']}"
        )
        assert told["instructions"] > 0, f"{schedule}: nothing was launched"


@pytest.mark.parametrize(("arch", "name"), ON_CHIP, scope="module")
def test_as_the_chip(arch: str, name: str) -> None:
    if name in AWAITED:
        pytest.skip("awaits a chip")
    report = ran(arch, name)
    assert report["inputs"] == Answers.load().cases[name].inputs, "the chip had other inputs: run on_chip.py again"
    for schedule, told in report["schedules"].items():
        assert told["chip"].keys() == told["outputs"].keys()
        for output, likeness in told["chip"].items():
            assert not likeness["wrong"], f"{schedule}: {output}: {likeness}"


def test_it_is_a_chips_file() -> None:
    answers = Answers.load()
    assert {one.values[1] for one in ON_CHIP} - set(answers.cases) == set(AWAITED)
    if answers.cases:
        assert "H200" in answers.source["gpu"] or "H100" in answers.source["gpu"]


def test_every_case_says_what_it_is() -> None:
    """docs/emulator-thirdparty.md has the first line of it, and the rest where a case has findings of its own."""
    for name, case in CASES.items():
        first, *rest = (case.make.__doc__ or "").strip().splitlines()
        assert first, name
        assert rest or not case.known, name
