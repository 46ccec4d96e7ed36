# SPDX-License-Identifier: Apache-2.0
"""The emulator finds mistakes in softmax's loads that predicates leave out, and in its late dependent launches."""

from pathlib import Path

import pytest

pytest.importorskip("cutlass")

import emulator
from dsl_backend.primitives import copy
from dsl_backend.runtime import toolkit
from dsl_backend.softmax.cute import host, kernel
from dsl_backend.testing.softmax import CASES, SoftmaxCase, judge, spec_of, tensors
from emulator.errors import EmulatorError, HostError
from tests.mistakes import Mistake, spoilt

BY_ID = {case.id: case for case in CASES}
PREDICATED, STREAM, LATE = (BY_ID[name] for name in ("predicated", "predicated-stream", "late-dependents"))
FOUND = (
    (
        Mistake("loads past the end", kernel, "load_vector_if(first + offset < width,", "load_vector_if(first >= 0,"),
        PREDICATED,
    ),
    (
        Mistake("zeros past the end", copy, "mov.b32 {name}, {fill & 0xFFFFFFFF};", "mov.b32 {name}, 0;"),
        PREDICATED,
    ),
    (Mistake("16-bit infinities", kernel, "cutlass.Float32: 0xFF800000", "cutlass.Float32: 0xFF80FF80"), STREAM),
    (Mistake("predicates turned round", copy, "setp.ne.s32 inside", "setp.eq.s32 inside"), PREDICATED),
    (
        Mistake("rows read before the wait", kernel, "            dependent_launch.wait()\n", "            pass\n"),
        LATE,
    ),
)
QUICK = ("zeros past the end",)


def run(case: SoftmaxCase, made: type, schedules: tuple[str, ...] = ("lazy",)) -> None:
    """Run a case on a kernel that is compiled again, twice, the second launch on the result of the first."""
    x, out = tensors(case)
    spec = spec_of(case, x, out)
    assert case.config is not None
    key = host.key_of(spec, case.config)
    function = None
    for schedule in schedules:
        x, out = tensors(case)
        again = x.clone()
        with emulator.device(arch="sm_90a", sms=4, schedule=schedule, strict=True) as device:
            function = function or toolkit.compiled(made(key), host.fake_args(key), "sm_90a", "")
            with device.capture():
                function(x, out)
                function(out, again)
        judge(case, x, out)


@pytest.mark.rest
@pytest.mark.parametrize("case", [PREDICATED, STREAM, LATE], ids=lambda case: case.id)
def test_right_without_a_mistake(case: SoftmaxCase) -> None:
    run(case, kernel.Softmax, ("eager", "lazy", "random"))


@pytest.mark.parametrize(
    ("mistake", "case"),
    [pytest.param(*one, id=one[0].id, marks=() if one[0].id in QUICK else pytest.mark.rest) for one in FOUND],
)
def test_mistake_is_found(mistake: Mistake, case: SoftmaxCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spoilt(mistake, tmp_path)
    made = kernel.Softmax
    if mistake.module is copy:
        monkeypatch.setattr(kernel, "load_vector_if", module.load_vector_if)
    else:
        made = module.Softmax
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        run(case, made)
    assert not isinstance(raised.value, HostError), "it ran"
