# SPDX-License-Identifier: Apache-2.0
"""The emulator finds mistakes in the source of stream-K's fixup and of the epilogue."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from gemm_cases import CASES, emulate

from dsl_backend.gemm import epilogue, host, small_m
from dsl_backend.runtime import toolkit
from emulator.errors import EmulatorError, HostError
from tests.attention.mistakes import Mistake, spoilt

# A tile of several shares, with SwiGLU.
(CASE,) = (one for one in CASES if one.id == "small-m" and one.arch == "sm_90a")
BARRIER = "        cute.arch.barrier(barrier_id=WARPGROUP_BARRIER + group, number_of_threads=WARPGROUP)\n"
THREAD_0 = "        if thread == 0"
RESET = 'cute.arch.store(flag, cutlass.Int32({}), sem="relaxed"'
MISTAKES = (
    Mistake("a flag before all partial sums are stored", small_m, BARRIER + THREAD_0, THREAD_0),
    Mistake("a flag without release", small_m, 'Int32(1), sem="release"', 'Int32(1), sem="relaxed"'),
    Mistake("partial sums before their flag", small_m, "while stored == 0", "while stored != 0"),
    Mistake("a flag that stays set", small_m, RESET.format(0), RESET.format(1)),
    Mistake("the sigmoid of ups", epilogue, "using.sigmoids(gates, self.alpha)", "using.sigmoids(ups, self.alpha)"),
)
QUICK = ("a flag without release",)


@pytest.fixture(autouse=True)
def _compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached kernels have other source."""

    def compile_kernel(kernel: Any, arguments: Any, *, key: Any, target: Any) -> Any:
        return toolkit.compiled(kernel, arguments, target.arch, "")

    monkeypatch.setattr(host, "compile_kernel", compile_kernel)


def run() -> None:
    for schedule in ("lazy", "random"):
        emulate(CASE, schedule, seed=1)


@pytest.mark.rest
def test_right_without_a_mistake() -> None:
    run()


@pytest.mark.parametrize(
    "mistake", [pytest.param(one, id=one.id, marks=() if one.id in QUICK else pytest.mark.rest) for one in MISTAKES]
)
def test_mistake_is_found(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spoilt(mistake, tmp_path)
    if mistake.module is small_m:
        for name in ("store_partials", "add_partials"):
            monkeypatch.setattr(small_m.SmallMGemmBase, name, getattr(module.SmallMGemmBase, name))
    else:
        monkeypatch.setattr(small_m, "epilogue_of", module.epilogue_of)
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        run()
    assert not isinstance(raised.value, HostError), "it ran"
