# SPDX-License-Identifier: Apache-2.0
"""Streamed loads and stores of RMSNorm and softmax are other instructions, and only where they are asked for."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from dsl_backend.testing import norm, softmax
from emulator.host.launch import Launch
from emulator.machine import Machine
from tests.norm import norm_cases
from tests.softmax import softmax_cases

NORM, SOFTMAX = (next(case for case in module.CASES if case.id == "streamed") for module in (norm, softmax))


@pytest.mark.parametrize(("loads", "stores"), [(True, False), (False, True)])
@pytest.mark.parametrize(
    ("case", "emulate", "kept"),
    [
        pytest.param(NORM, norm_cases.emulate, True, id="norm"),
        pytest.param(SOFTMAX, softmax_cases.emulate, False, id="softmax"),
    ],
)
def test_accesses(
    case: Any, emulate: Callable[..., object], kept: bool, loads: bool, stores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kept: some lines, those of weights, are for the next rows too."""
    seen, run = [], Machine.launch

    def launch(self: Machine, one: Launch) -> None:
        seen.append(one.ptx)
        run(self, one)

    monkeypatch.setattr(Machine, "launch", launch)
    emulate(replace(case, config=replace(case.config, stream_loads=loads, stream_stores=stores)), "sm_90a", "random")
    (ptx,) = seen
    read, written = (
        {tail.startswith(".cs") for tail in re.findall(rf"{name}\.global(\S*)", ptx)} for name in ("ld", "st")
    )
    assert written == {stores}
    assert read == ({True, False} if loads and kept else {loads})
