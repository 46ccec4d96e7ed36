# SPDX-License-Identifier: Apache-2.0
"""Cases of dense attention on the emulator: tiles that small problems fill, and rings that they go around."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import emulator
from dsl_backend.attention.cute import dequant
from dsl_backend.attention.cute.fake_args import fake_args, fake_dense_tensors
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check
from dsl_backend.testing.cases import CASES, FP16, FULL, Case
from dsl_backend.testing.inputs import Layout, Problem, Surroundings
from emulator.machine.profile import Profile
from emulator.profile import summary
from tests.attention.unseen import expected_of

SCHEDULES = ("eager", "lazy", "random")
SMS = 4
DEQUANT_FILE = Path(dequant.__file__).name
# Makes a planner's kernel for short or for long queries: (planner, for short ones) -> kernel.
Maker = Callable[[Planner, bool], Kernel]


def emulate(
    case: Case,
    arch: str,
    make: Maker,
    index: int,
    sms: int = SMS,
    *,
    with_lse: bool = True,
    spoil: Callable[[Problem], None] | None = None,
    nan_below: bool = False,
    **device: Any,
) -> Profile:
    """Run a case on kernels of the maker's, and judge the result; any finding or warning raises.

    Args:
        with_lse: ask for an LSE: the kernel is another one, without exponentials by polynomial.
        spoil: changes the problem's numbers first.
        nan_below: there is NaN below the windows of all of a request's rows.
    """
    problem = case.problem()
    if spoil is not None:
        spoil(problem)
    expected, magnitude = expected_of(problem, nan_below)

    def adjust(planner: Planner) -> None:
        planner.short = (*planner.short[:2], make(planner, True))
        planner.long = (*planner.long[:2], make(planner, False))

    target = replace(from_arch(arch), sm_count=sms)
    schedule = SCHEDULES[index % len(SCHEDULES)]
    with emulator.device(arch=arch, sms=sms, schedule=schedule, seed=index, strict=True, **device) as machine:
        result = check.run(problem, "cute", adjust=adjust, target=target, with_lse=with_lse)
    check.judge(result, expected, magnitude, with_lse=with_lse)
    assert machine.profile is not None
    return machine.profile


def compiled_anew(kernel: type, forward: type) -> Any:
    """A host's class of dense kernels that compiles a forward kernel each time: cached ones are of other source."""

    def build(key: Any, target: Target) -> Any:
        return toolkit.compiled(forward(key), fake_args(key, fake_dense_tensors(key)), target.arch, "")

    return type(kernel.__name__, (kernel,), {"build": staticmethod(build)})


def executed(profile: Profile, text: str) -> int:
    """How often warps executed instructions with a text in them."""
    found = 0
    for kernel in profile.kernels.values():
        counted = [text in str(instruction) for instruction in kernel.program.instrs]
        found += sum(int(counts[counted].sum()) for counts in kernel.executed.values())
    return found


def dequant_conflicts(profile: Profile) -> list[str]:
    """Where the dequantization warps' accesses to shared memory meet in a bank."""
    (kernel,) = (one for one in summary(profile).kernels if "Forward" in one.name)
    # Softmax and epilogue convert as well, and have special functions besides.
    kinds = [role.instructions.keys() for role in kernel.roles]
    assert any("conversions of pairs" in one and "MUFU" not in one for one in kinds)
    return [site.source for site in kernel.conflicts if DEQUANT_FILE in site.source]


def scratch() -> Workspace:
    return Workspace(torch.device("cpu"))


def far_apart(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """A copy whose rows are `step` elements apart: memory of which a few pages are ever touched."""
    strides = (step, *tensor.stride()[1:])
    size = step * (len(tensor) - 1) + sum((n - 1) * s for n, s in zip(tensor.shape[1:], strides[1:], strict=True))
    made = torch.empty(size + 1, dtype=tensor.dtype).as_strided(tensor.shape, strides)
    for row, one in enumerate(tensor):
        made[row] = one
    return made


def numbered(cases: Sequence[Case], quick: Collection[str]) -> pytest.MarkDecorator:
    """A test of each case and its index; `full` except for those whose ids are quick."""
    return pytest.mark.parametrize(
        ("index", "case"),
        [
            pytest.param(index, case, id=case.id, marks=() if case.id in quick else (pytest.mark.full,))
            for index, case in enumerate(cases)
        ],
    )


def served(case: Case) -> bool:
    """Whether the dense kernels of every SM are meant for a case, and the emulator for its size."""
    spec = case.spec
    return not (spec.mla or spec.kv.nvfp4 or spec.is_nvfp4_out or case.tier == "gpu")


SERVED = [case for case in CASES if served(case) and not case.fp8]
SERVED_FP8 = [case for case in CASES if served(case) and case.fp8]
# Of fp8 keys, what the cases of all kernels have not: each width of a tensor copy, and rings that go around.
FP8_CASES = (
    Case(
        id="fp8-128",
        q_lens=(1, 70),
        kv_lens=(300, 200),
        heads=(8, 2),
        dim=128,
        page=64,
        fp8=True,
        why="copies of 128 bytes, whose rows are dequantized in pairs",
    ),
    Case(id="fp8-256", q_lens=(2, 40), kv_lens=(150, 100), dim=256, dtype=FP16, fp8=True, why="two copies a row"),
    Case(id="fp8-96", q_lens=(1, 20), kv_lens=(200, 90), dim=96, page=32, fp8=True, why="copies of 32 bytes"),
    Case(id="fp8-48", q_lens=(1, 20), kv_lens=(200, 90), dim=48, fp8=True, why="copies of 16 bytes; threads idle"),
    Case(
        id="fp8-packed",
        q_lens=(18, 1, 70),
        kv_lens=(40, 7, 150),
        heads=(2, 2),
        dim=192,
        dim_v=128,
        page=None,
        fp8=True,
        around=Surroundings(layout=Layout.SEPARATE),
        why="tiles begin anywhere; keys and values of unequal widths",
    ),
    Case(id="fp8-nan", q_lens=(1, 20), kv_lens=(70, 60), fp8=True, nan_request=0, why="a NaN stays its request's"),
)
# Heads wider than 256, whose values are cut into two slices, on the tiles that a chip would get.
WIDE_CASES = (
    Case(
        id="parts",
        q_lens=(1, 2, 40),
        kv_lens=(400, 70, 60),
        heads=(4, 1),
        dim=512,
        why="each slice's parts of a range are merged, each one's whole rows are stored",
    ),
    Case(
        id="window-sinks",
        q_lens=(1, 20),
        kv_lens=(190, 90),
        heads=(2, 2),
        dim=512,
        dtype=FP16,
        page=48,
        window=(70, None),
        sinks=True,
        around=Surroundings(layout=Layout.SEPARATE),
        why="pages that are no multiple of a tile; a token's LSE is written once",
    ),
    Case(
        id="packed",
        q_lens=(18, 1, 140),
        kv_lens=(40, 7, 150),
        heads=(2, 2),
        dim=384,
        page=None,
        causality=FULL,
        why="slices of 192 columns; several query tiles of a request",
    ),
    Case(
        id="gqa-7",
        q_lens=(2, 1, 20),
        kv_lens=(300, 120, 50),
        heads=(14, 2),
        dim=512,
        softcap=5.0,
        alibi=True,
        q_gain=4.0,
        nan_request=1,
        why="rows that belong to no head beside those of seven heads; a NaN stays its request's",
    ),
    Case(
        id="wide-values",
        q_lens=(3, 40),
        kv_lens=(150, 60),
        heads=(2, 1),
        dim=256,
        dim_v=512,
        page=None,
        why="values alone are cut",
    ),
    Case(
        id="wide-keys",
        q_lens=(3, 40),
        kv_lens=(150, 60),
        heads=(2, 1),
        dim=512,
        dim_v=128,
        page=None,
        why="values are whole, queries take as much room",
    ),
    Case(id="fp8", q_lens=(2, 40), kv_lens=(200, 60), dim=384, page=32, fp8=True, why="slices are dequantized"),
)
QUICK_WIDE = ("parts", "window-sinks")
# Keys that share a ring with narrower values: more key tiles than it has places, twice over, and items of a single one.
SHARED_RING_CASES = (
    Case(
        id="packed",
        q_lens=(18, 1, 270),
        kv_lens=(220, 7, 290),
        heads=(2, 2),
        dim=192,
        dim_v=128,
        page=None,
        around=Surroundings(layout=Layout.SEPARATE),
        why="tiles begin anywhere and end in the middle; items of one tile",
    ),
    Case(
        id="paged",
        q_lens=(20, 40),
        kv_lens=(250, 60),
        heads=(4, 2),
        dim=192,
        dim_v=64,
        page=16,
        window=(130, None),
        dtype=FP16,
        why="boxes of 16 keys; the rest of the keys is wider than the values",
    ),
    Case(
        id="narrow",
        q_lens=(3, 40),
        kv_lens=(150, 260),
        heads=(3, 1),
        dim=80,
        dim_v=48,
        page=48,
        softcap=5.0,
        nan_request=0,
        why="chunks of 16 elements, where the rest alone would have those of 32; a NaN stays its request's",
    ),
    Case(
        id="equal",
        q_lens=(40, 270),
        kv_lens=(250, 290),
        heads=(2, 2),
        dim=64,
        page=32,
        around=Surroundings(layout=Layout.SEPARATE),
        why="values as wide as keys: there are no other columns",
    ),
    Case(id="full", q_lens=(5, 130), kv_lens=(700, 0), heads=(1, 1), dim=192, dim_v=128, causality=FULL, why="no keys"),
)
QUICK_SHARED_RING = ("packed", "equal")
# Values wider than 128, by pairs of blocks of 128 query rows each.
PAIR_CASES = (
    Case(
        id="ragged",
        q_lens=(40, 300, 0, 130),
        kv_lens=(40, 330, 0, 500),
        heads=(2, 1),
        dim=256,
        page=16,
        around=Surroundings(layout=Layout.SEPARATE),
        why="blocks with all of their rows, some or none; boxes of 16 keys; values behind the last key",
    ),
    Case(
        id="window-sinks",
        q_lens=(140, 20),
        kv_lens=(400, 90),
        heads=(2, 2),
        dim=256,
        dtype=FP16,
        page=48,
        window=(70, None),
        softcap=5.0,
        sinks=True,
        why="tiles that are masked at both ends; boxes of keys and of values that are not of one height",
    ),
    Case(
        id="full-alibi",
        q_lens=(150, 270),
        kv_lens=(400, 1),
        heads=(4, 2),
        dim=256,
        page=None,
        causality=FULL,
        alibi=True,
        q_gain=4.0,
        why="packed keys, which begin anywhere; O is rescaled often",
    ),
    Case(
        id="one-page",
        q_lens=(40, 270, 17),
        kv_lens=(140, 530, 0),
        heads=(2, 2),
        dim=256,
        page=128,
        why="a tile lies in one page; no keys",
    ),
    Case(
        id="per-request",
        q_lens=(140, 20, 1, 300),
        kv_lens=(400, 90, 300, 310),
        heads=(2, 1),
        dim=192,
        page=192,
        causal=(True, False, True, True),
        why="halves of 96 columns; two tiles of a half page more",
    ),
    Case(
        id="wider-values",
        q_lens=(140, 20),
        kv_lens=(400, 90),
        heads=(4, 1),
        dim=192,
        dim_v=256,
        page=32,
        window=(100, 20),
        causality=FULL,
        nan_request=1,
        why="queries are narrower than the outputs in their place; a NaN stays its request's",
    ),
    Case(
        id="160",
        q_lens=(140, 20),
        kv_lens=(300, 290),
        dim=160,
        page=64,
        scale=-0.1,
        why="halves of 80 columns, in chunks of 16; the largest score is not that of the largest product",
    ),
    Case(
        id="slices",
        q_lens=(18, 140),
        kv_lens=(150, 260),
        heads=(2, 2),
        dim=256,
        dim_v=512,
        page=None,
        why="half of a slice's columns",
    ),
)
# Each number of rows, of values' columns, of masks and scores that the kernel with swapped operands tells apart.
QUICK_SWAPPED = ("dim-64", "mqa-20", "window-sinks", "splits-large-scores", "splits-nan")
QUICK_PAIR = ("ragged", "window-sinks")
