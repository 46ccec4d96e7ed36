# SPDX-License-Identifier: Apache-2.0
"""The emulator finds mistakes in the source of the online softmax: conditional rescale, and 2^x on the FMA units."""

from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from dsl_backend.attention.cute import softmax
from dsl_backend.attention.cute.sm90 import dense_kernel as sm90_kernel
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig as Sm90Config
from dsl_backend.attention.cute.sm90.dense_host import Prefill as Sm90Prefill
from dsl_backend.attention.cute.sm100 import dense_kernel as sm100_kernel
from dsl_backend.attention.cute.sm100 import dense_softmax
from dsl_backend.attention.cute.sm100.dense_configs import DenseConfig as Sm100Config
from dsl_backend.attention.cute.sm100.dense_host import Prefill as Sm100Prefill
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.primitives import math
from dsl_backend.testing.cases import Case
from emulator.errors import EmulatorError, HostError
from tests.attention.emulated import compiled_anew, emulate, scratch
from tests.mistakes import Mistake, spoilt

# Scores that grow by more than 2^8 from tile to tile, in some rows.
CASE = Case(q_lens=(40,), kv_lens=(150,), heads=(1, 1), dim=64, page=16, q_gain=8.0)
RESCALE = (
    Mistake("O is never rescaled", softmax, "acc_scale[row] if moves else 1.0", "1.0 if moves else 1.0"),
    Mistake("the reference never moves", softmax, "tile_max if moves else", "row_max_prev if moves else"),
    Mistake("P of the maximum before", softmax, "self.row_max[row] = row_max\n", "self.row_max[row] = row_max_prev\n"),
)
EMULATION = (
    Mistake("an exponent in the wrong bits", math, "shl.b32 n, {$r1}, 23", "shl.b32 n, {$r1}, 22"),
    Mistake("an integer too large", math, "add_pair(rounded, (-ROUND_TO_INT", "add_pair(rounded, (1 - ROUND_TO_INT"),
)
QUICK = ("O is never rescaled", "an exponent in the wrong bits")


def run(arch: str) -> None:
    """The case, on a kernel compiled anew, since cached ones were compiled from other source."""
    prefill, kernel, config = {
        "sm_90a": (Sm90Prefill, sm90_kernel, Sm90Config(groups=1, tile_n=32, stages=2)),
        "sm_100a": (Sm100Prefill, sm100_kernel, Sm100Config(tile_n=32, ex2_emulation=8)),
    }[arch]

    fresh_class = compiled_anew(prefill, kernel.DenseForward)

    def make(planner: Planner, short: bool) -> Kernel:
        made: Kernel = fresh_class(planner.spec, planner.target, scratch(), config)
        return made

    emulate(CASE, arch, make, 0, sms=1, with_lse=False)


@pytest.mark.rest
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_right_without_a_mistake(arch: str) -> None:
    run(arch)


@pytest.mark.parametrize(
    ("arch", "mistake"),
    [
        pytest.param(arch, one, id=one.id, marks=() if one.id in QUICK else pytest.mark.rest)
        for arch, mistakes in (("sm_90a", RESCALE), ("sm_100a", EMULATION))
        for one in mistakes
    ],
)
def test_mistake_is_found(arch: str, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spoilt(mistake, tmp_path)
    if mistake.module is softmax:
        monkeypatch.setattr(softmax.OnlineSoftmax, "online_softmax", module.OnlineSoftmax.online_softmax)
    else:
        monkeypatch.setattr(dense_softmax, "ex2_emulation_pair", module.ex2_emulation_pair)
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        run(arch)
    assert not isinstance(raised.value, HostError), "it ran"
