# SPDX-License-Identifier: Apache-2.0
"""Products and attention in Helion: what Triton makes of the kernels runs on the emulator."""

import importlib.util
import subprocess
import sys

import pytest

import benchmarks
from benchmarks.attention.problems import dense
from benchmarks.linear.problems import Problem
from tests.gpu_stand_in import COMPILER

CASES = {"linear": Problem(m=140, n=136, k=136), "prefill": dense(64, 4, 2, [256], [256])}
# One problem through a column, compared with float64. A process of its own: others interpret Triton.
RUN = """
import sys
from dataclasses import replace
from unittest import mock

import torch

import benchmarks
from benchmarks import check
from benchmarks.attention.problems import dense
from benchmarks.linear.problems import Problem
from dsl_backend.runtime.target import from_arch
from tests.gpu_stand_in import gpu

name, column = sys.argv[1:]
operator, problem = {
    "plain": ("linear", Problem(m=140, n=136, k=136, gated=False)),
    "gated": ("linear", Problem(m=140, n=72, k=136)),
    "attention": ("prefill", dense(64, 4, 2, [256, 256], [256, 256])),
}[name]


def with_one_configuration(function, configs):
    return made(function, config=configs[-1])


if column == "Helion":
    import helion
    from helion.autotuner.config_spec import ConfigSpec

    # Tensors are on the CPU, for which Helion makes no descriptors; and nothing is timed.
    made, known = helion.kernel, ConfigSpec.supports_config_key
    helion.kernel = with_one_configuration
    ConfigSpec.supports_config_key = lambda self, key: key == "host_tensor_descriptors" or known(self, key)
table = benchmarks.operators()[operator]
(provider,) = (one for one in table.providers([]) if one.name == column)
inputs = table.build(problem, 2, torch.device("cpu"), 3)
for layer in inputs.layers:
    layer.out.fill_(torch.nan)
with gpu(replace(from_arch("sm_90a"), sm_count=3), emulate=True) as stand_in:
    prepared = provider.prepare(problem, inputs)
    out = prepared.view(prepared.run(1))
check.require_right(table.compared(inputs, 1, out), table.reference(problem, inputs, 1), problem.limits)
(launch,) = stand_in.launches
print(*(word for word in ("wgmma.mma_async", "cp.async.bulk.tensor") if word in launch.compiled.asm["ptx"]))
"""
WGMMA, TMA = "wgmma.mma_async", "cp.async.bulk.tensor"


def run(problem: str, column: str, environment: dict[str, str]) -> list[str]:
    """The instructions that the kernel has, of those that are looked for."""
    if COMPILER is None:
        pytest.skip("Triton needs a C compiler")
    command = [sys.executable, "-c", RUN, problem, column]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


@pytest.mark.full
@pytest.mark.parametrize("problem", ["plain", "gated", "attention"])
def test_helion_on_the_emulator(problem: str, server_environment: dict[str, str]) -> None:
    if importlib.util.find_spec("helion") is None:
        pytest.skip("Helion is not installed")
    assert run(problem, "Helion", server_environment) == ([WGMMA] if problem == "attention" else [WGMMA, TMA])


@pytest.mark.parametrize("column", ["Helion"])
def test_each_says_what_it_does_not_serve(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, group in (("linear", "plain"), ("prefill", "lengths")):
        table = benchmarks.operators()[name]
        (provider,) = (one for one in table.providers([]) if one.name == column)
        module = sys.modules[provider.make.__module__]
        assert any("installed" in reason or "CUDA device" in reason for reason in provider.objections(CASES[name]))
        monkeypatch.setattr(module, "missing", lambda *_: [])
        assert not any(provider.objections(case.problem) for case in table.cases() if case.group == group)
    said = provider.objections(dense(256, 4, 2, [100, 200], [100, 300], window_left=64))
    for word in ("one length", "context", "window", "multiples of 128 tokens", "heads of 64 and 128"):
        assert any(word in reason for reason in said)
