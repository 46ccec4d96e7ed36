# SPDX-License-Identifier: Apache-2.0
"""Softmax and RMSNorm in Gluon, Helion, TileLang and cuTile: Gluon's on the emulator, Helion's in its interpreter."""

import importlib.util
import subprocess
import sys

import pytest

import benchmarks
from benchmarks import row_tiles
from tests.gpu_stand_in import COMPILER

COLUMNS = ("Gluon", "Helion", "TileLang", "cuTile")
# Rows of one operator through a column, each compared with float64. A process of its own: others interpret Triton.
RUN = """
import contextlib
import sys
from dataclasses import replace

import torch

import benchmarks
from benchmarks import check
from benchmarks.norm import problems as norm
from benchmarks.softmax import problems as softmax
from dsl_backend.runtime.target import from_arch

operator, column = sys.argv[1:]
if operator == "softmax":
    made = [softmax.Problem(rows=3, width=width, log=log) for width, log in ((40, False), (1000, True))]
else:
    made = [norm.Problem(rows=3, width=width, residual=width > 500) for width in (40, 1000)]
(provider,) = (one for one in benchmarks.operators()[operator].providers([]) if one.name == column)
table = benchmarks.operators()[operator]
device = contextlib.nullcontext()
if column == "Gluon":
    from tests.gpu_stand_in import gpu
for problem in made:
    inputs = table.build(problem, 2, torch.device("cpu"), 3)
    if column == "Gluon":
        device = gpu(replace(from_arch("sm_90a"), sm_count=3), emulate=True)
    with device:
        out = provider.make(problem, inputs)(1)
    check.require_right(table.compared(inputs, 1, out), table.reference(problem, inputs, 1), problem.limits)
    if operator == "norm" and problem.residual:
        layer = inputs.layers[1]
        assert torch.equal(layer.residual_out, layer.x + layer.residual)
    print("right")
"""


def run(operator: str, column: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", RUN, operator, column]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.stdout.split() == ["right", "right"], found.stderr


@pytest.mark.rest
@pytest.mark.parametrize("operator", ["softmax", "norm"])
def test_gluon_on_the_emulator(operator: str, server_environment: dict[str, str]) -> None:
    pytest.importorskip("triton.experimental.gluon._runtime", reason="this Triton has no Gluon")
    if COMPILER is None:
        pytest.skip("Triton needs a C compiler")
    run(operator, "Gluon", server_environment)


@pytest.mark.rest
@pytest.mark.parametrize("operator", ["softmax", "norm"])
def test_helion_in_its_interpreter(operator: str, server_environment: dict[str, str]) -> None:
    if importlib.util.find_spec("helion") is None:
        pytest.skip("Helion is not installed")
    run(operator, "Helion", server_environment | {"HELION_INTERPRET": "1"})


@pytest.mark.parametrize("operator", ["softmax", "norm"])
def test_each_says_what_it_does_not_serve(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = benchmarks.operators()[operator]
    columns = {one.name: one for one in table.providers([])}
    assert list(columns)[-len(COLUMNS) :] == list(COLUMNS)
    cases = {case.group: case.problem for case in table.cases()}
    grid, odd, wide = (cases[group] for group in ("grid", "odd", "logprobs" if operator == "softmax" else "wide"))
    module = sys.modules[columns["Gluon"].make.__module__]
    for name in ("missing", "missing_gluon", "missing_tilelang", "missing_cutile"):
        monkeypatch.setattr(module, name, lambda *_: [])
    assert not any(columns[name].objections(grid) for name in COLUMNS)
    assert {name for name in COLUMNS if columns[name].objections(wide)} == {"Gluon", "TileLang", "cuTile"}
    assert columns["TileLang"].objections(odd)[-1] == f"serves multiples of {row_tiles.TILELANG_MULTIPLE} columns"
    if operator == "norm":
        assert all(columns[name].objections(cases["fp8"]) == ["has no 8-bit output"] for name in COLUMNS)


@pytest.mark.parametrize("width", [1, 256, 257, 4096, 32768, 65536])
def test_a_thread_has_at_most_64_elements(width: int) -> None:
    block, threads = row_tiles.block_of(width), 32 * row_tiles.warps_of(width)
    assert width <= block <= 64 * threads
    assert threads <= 1024
    assert block >= 8 * 32
