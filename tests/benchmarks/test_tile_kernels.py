# SPDX-License-Identifier: Apache-2.0
"""Products and attention in other DSLs: what the DSLs make of the kernels runs on the emulator."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import benchmarks
from benchmarks import check, columns
from benchmarks.attention import tile_kernels as attention
from benchmarks.attention.problems import dense
from benchmarks.dsls import tables
from benchmarks.fastest import fastest
from benchmarks.linear import tile_kernels as linear
from benchmarks.linear.problems import Problem
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.target import from_arch
from tests import cutile_stand_in
from tests.gpu_stand_in import COMPILER
from tests.tilelang_stand_in import NVCC

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
    "plain": ("linear", Problem(m=400, n=136, k=200, gated=False)),
    "gated": ("linear", Problem(m=400, n=72, k=200)),
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
if column == "Gluon":
    from benchmarks.linear.kernels import gluon_kernel

    gluon_kernel.PLAIN = (gluon_kernel.Tile(128, 128, 3),)
    gluon_kernel.GATED = (gluon_kernel.Tile(128, 64, 3),)
sources = []
if column == "TileLang":
    from benchmarks.attention.kernels import tilelang_kernel as attention
    from benchmarks.linear.kernels import tilelang_kernel as linear
    from tests.tilelang_stand_in import Emulated

    attention.causal = Emulated(attention.causal, sources)
    linear.product, linear.swiglu = Emulated(linear.product, sources), Emulated(linear.swiglu, sources)
    attention.TILES, linear.PLAIN, linear.GATED = attention.TILES[:1], linear.PLAIN[-1:], linear.GATED[-1:]
table = benchmarks.operators()[operator]
(provider,) = (one for one in table.providers([]) if one.name == column)
inputs = table.build(problem, 2, torch.device("cpu"), 3)
for layer in inputs.layers:
    layer.out.fill_(torch.nan)
with gpu(replace(from_arch("sm_90a"), sm_count=3), emulate=True) as stand_in:
    prepared = provider.prepare(problem, inputs)
    out = prepared.view(prepared.run(1))
check.require_right(table.compared(inputs, 1, out), table.reference(problem, inputs, 1), problem.limits)
sources += [launch.compiled.asm["ptx"] for launch in stand_in.launches]
(ptx,) = sources
print(*(word for word in ("wgmma.mma_async", "cp.async.bulk.tensor") if word in ptx))
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


@pytest.mark.rest
@pytest.mark.parametrize("problem", ["plain", "gated"])
def test_gluon_on_the_emulator(problem: str, server_environment: dict[str, str]) -> None:
    """Eight tiles for three CTAs, and more steps than stages."""
    pytest.importorskip("triton.experimental.gluon._runtime", reason="this Triton has no Gluon")
    assert run(problem, "Gluon", server_environment) == [WGMMA, TMA]


@pytest.mark.full
@pytest.mark.parametrize("problem", ["plain", "gated", "attention"])
def test_helion_on_the_emulator(problem: str, server_environment: dict[str, str]) -> None:
    if importlib.util.find_spec("helion") is None:
        pytest.skip("Helion is not installed")
    assert run(problem, "Helion", server_environment) == ([WGMMA] if problem == "attention" else [WGMMA, TMA])


@pytest.mark.full
@pytest.mark.parametrize("problem", ["plain", "gated", "attention"])
def test_tilelang_on_the_emulator(problem: str, server_environment: dict[str, str]) -> None:
    if importlib.util.find_spec("tilelang") is None:
        pytest.skip("TileLang is not installed")
    if NVCC is None:
        pytest.skip("TileLang's code needs nvcc")
    assert run(problem, "TileLang", server_environment) == [WGMMA, TMA]


@pytest.mark.parametrize("name", ["plain", "gated", "attention"])
def test_cutile_as_torch_computes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged tiles of rows, columns and depth; more than one group of tiles of rows; several tiles of keys."""
    operator, problem = {
        "plain": ("linear", Problem(m=1200, n=136, k=72, gated=False)),
        "gated": ("linear", Problem(m=1200, n=72, k=136)),
        "attention": ("prefill", dense(64, 4, 2, [256, 256], [256, 256])),
    }[name]
    table = benchmarks.operators()[operator]
    (provider,) = (one for one in table.providers([]) if one.name == "cuTile")
    monkeypatch.setattr(sys.modules[provider.make.__module__], "fastest", lambda tiles, bind: tiles[-1])
    inputs = table.build(problem, 2, torch.device("cpu"), 3)
    for layer in inputs.layers:
        layer.out.fill_(torch.nan)
    with cutile_stand_in.installed():
        out = provider.prepare(problem, inputs).run(1)
    check.require_right(table.compared(inputs, 1, out), table.reference(problem, inputs, 1), problem.limits)


# The operators of each column, and the GPUs that it is not for.
COLUMNS = {
    "Gluon": ({"linear"}, "sm_100a"),
    "Helion": ({"linear", "prefill"}, None),
    "TileLang": ({"linear", "prefill"}, None),
    "cuTile": ({"linear", "prefill"}, None),
}


@pytest.mark.parametrize("column", COLUMNS)
def test_each_serves_the_tables_rows(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operators, other = COLUMNS[column]
    for table in tables.TABLES:
        if table.operator not in CASES:
            continue
        operator = benchmarks.operators()[table.operator]
        found = [one for one in operator.providers([]) if one.name == column]
        assert bool(found) == (column in table.peers) == (table.operator in operators)
        for provider in found:
            words = ("installed", "CUDA device")
            assert any(word in reason for reason in provider.objections(CASES[table.operator]) for word in words)
            module = sys.modules[provider.make.__module__]
            with monkeypatch.context() as patch:
                for name in ("missing", "missing_gluon", "missing_tilelang", "missing_cutile"):
                    patch.setattr(module, name, lambda *_: [], raising=False)
                patch.setattr(targets, "at_hand", lambda *_: from_arch("sm_90a"))
                rows = [case.problem for case in operator.cases() if case.group in table.groups]
                assert rows
                assert not any(provider.objections(row) for row in rows)
                if other is not None:
                    patch.setattr(targets, "at_hand", lambda *_: from_arch(other))
                    assert provider.objections(rows[0])


def test_attention_says_what_it_does_not_serve() -> None:
    said = attention.layout_objections(dense(256, 4, 2, [100, 200], [100, 300], window_left=64))
    for word in ("one length", "context", "window", "multiples of 128 tokens", "heads of 64 and 128"):
        assert any(word in reason for reason in said)


def test_a_linear_layer_says_what_it_does_not_serve() -> None:
    assert linear.uneven(Problem(m=3, n=12, k=20)) == ["serves multiples of 8 for n and k"]
    assert not linear.uneven(Problem(m=3, n=16, k=24))


class Event:
    """A clock that launches advance."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


def test_the_fastest_is_chosen_of_those_that_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def bind(cost: float) -> Callable[[], None]:
        def launch() -> None:
            if not cost:
                raise MemoryError("too much shared memory")
            Event.now += cost

        return launch

    assert fastest([0.0, 3.0, 1.0, 2.0], bind) == 1.0
    assert fastest([0.0], bind) == 0.0
    with pytest.raises(MemoryError, match="shared memory"):
        fastest([0.0, 0.0], bind)


def test_a_package_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tilelang").mkdir()
    (tmp_path / "tilelang" / "__init__.py").write_text("raise ImportError('no symbol\\n  of that name')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tilelang", raising=False)
    columns.broken.cache_clear()
    monkeypatch.setattr(columns, "needs_gpu", lambda: ["needs a CUDA device"])
    assert columns.missing_tilelang() == ["needs a CUDA device"]
    monkeypatch.setattr(columns, "needs_gpu", list)
    assert columns.missing_tilelang() == ["tilelang cannot be imported: ImportError: no symbol of that name"]
    columns.broken.cache_clear()
    assert columns.broken("json") == ()
