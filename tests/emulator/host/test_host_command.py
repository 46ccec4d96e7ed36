# SPDX-License-Identifier: Apache-2.0
"""`python -m emulator FILE::CASE`."""

import re

import pytest
from host_machines import AffineMachine

from emulator import __main__ as command
from emulator.clock.chips import CHIPS
from emulator.host import device

CASES = """
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from simple_kernels import Affine

def affine():
    x, y = torch.ones(8), torch.zeros(8)
    cute.compile(Affine(), from_dlpack(x), from_dlpack(y))(from_dlpack(x), from_dlpack(y))
    assert y.sum() == 24

def wrong():
    raise AssertionError("a value")

number = 1
"""


@pytest.fixture
def machine(monkeypatch):
    made = AffineMachine()
    monkeypatch.setattr(device, "default_machine", lambda *_: made)
    return made


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cases_of_the_command.py"
    path.write_text(CASES)
    return path


def test_a_case_runs(file, machine, capsys) -> None:
    pytest.importorskip("cutlass")
    assert command.main([f"{file}::affine", "--arch", "sm_90a"]) == 0
    assert capsys.readouterr().out == f"{file}::affine: 1 launches on sm_90a, 0 findings\n"
    assert machine.last.arch == "sm_90a"


def test_findings_are_shown(file, machine, capsys) -> None:
    pytest.importorskip("cutlass")
    machine.findings = ["a race"]
    assert command.main([f"{file}::affine"]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == ["a race"]


def test_the_help_names_every_chip_of_the_clock() -> None:
    assert {*re.findall(r"\b[GBH]+[0-9]+\b", command.parser().format_help())} == {*CHIPS}


def test_a_case_that_fails(file, machine) -> None:
    pytest.importorskip("cutlass")
    with pytest.raises(AssertionError, match="a value"):
        command.main([f"{file}::wrong"])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("{file}::missing", "has no function missing"),
        ("{file}::number", "has no function number"),
        ("{file}", "is not FILE::CASE"),
        ("{file}::", "is not FILE::CASE"),
        ("{file}x::affine", "there is no Python file"),
    ],
)
def test_a_case_that_there_is_not(case, words, file, machine, capsys) -> None:
    assert command.main([case.format(file=file)]) == 2
    assert words in capsys.readouterr().err
