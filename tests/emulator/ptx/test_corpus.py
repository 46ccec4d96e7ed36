# SPDX-License-Identifier: Apache-2.0
"""Real PTX: kernels of ours as the DSL compiles them here, for chips that are not here; and how fast it is read."""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest
from snippets import text

from emulator.ptx import Module, graph, parse, show

CORPUS = Path(__file__).parents[1] / "corpus.py"


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Module]:
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("nvidia-cutlass-dsl is not installed")
    out = tmp_path_factory.mktemp("corpus")
    command = [sys.executable, str(CORPUS), "one", str(out), "own", request.param]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CORPUS.parents[2], timeout=300)
    modules = [parse(file.read_text()) for file in sorted(out.rglob("*.ptx")) if file.stat().st_size]
    assert modules, done.stderr[-2000:]
    assert {module.target[0] for module in modules} == {request.param}
    return modules


def test_kernels_of_ours_are_read(compiled: list[Module]):
    opcodes = {
        instr.op.name for module in compiled for kernel in module.entries.values() for instr in kernel.code or ()
    }
    assert len(compiled) == 2
    assert {
        "shfl.sync",
        "ex2",
        "bar.sync",
        "mbarrier.init",
        "mbarrier.try_wait.parity",
        "elect.sync",
        "cp.async.bulk.tensor",
        "fence.mbarrier_init",
    } <= opcodes
    for module in compiled:
        assert parse(show(module)) == module
        (kernel,) = module.entries.values()
        assert kernel.directives["reqntid"] == (128, 1, 1)
        assert kernel.param_bytes
        assert sum(len(graph(kernel).instrs(block)) for block in graph(kernel).blocks) == len(kernel.code or ())


def test_places_in_the_source_are_those_of_the_kernel(compiled: list[Module]):
    places = {
        module.where(instr).split(":")[0].rsplit("/")[-1]
        for module in compiled
        for kernel in module.entries.values()
        for instr in kernel.code or ()
    }
    assert {"warp_kernels.py", "tma_kernels.py"} <= places


def test_a_kernel_as_long_as_an_attention_kernel_is_read_in_two_seconds():
    """FlashAttention-4's forward has 4000 to 9000 instructions."""
    lines = (
        "fma.rn.ftz.f32 %f{0}, %f{1}, 0f3F800000, %f{2};",
        "ld.shared.v4.b32 {{%r1{0}, %r2{0}, %r3{0}, %r4{0}}}, [%r{1}+{0}];",
        "{{ .reg .pred P; L: mbarrier.try_wait.parity.shared.b64 P, [%r{0}], 0; @P bra.uni D; bra.uni L; D: }}",
        ".loc 1 {0} {1}\n setp.lt.s32 %p{0}, %r{1}, %r{2}; @%p{0} ret;",
    )
    body = "\n".join(line.format(n % 8, (n + 1) % 8, (n + 2) % 8) for n in range(2000) for line in lines)
    source = text(body, before='.file 1 "a.py"')
    start = time.perf_counter()
    module = parse(source)
    flow = graph(module.entries["k"])
    assert len(flow.meets) == len(flow.blocks) > 8000
    assert len(module.entries["k"].code or ()) == 14000
    assert time.perf_counter() - start < 2 * slowness()


def slowness() -> float:
    """How much slower than usual this machine is right now: 1 or more."""
    start = time.perf_counter()
    sum(hash(str(n)) & 1 for n in range(200_000))
    return max(1.0, (time.perf_counter() - start) / 0.05)
