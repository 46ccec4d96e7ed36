# SPDX-License-Identifier: Apache-2.0
"""The sum over a token's experts on the emulator: what belongs to no expert counts for nothing, NaN included."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

import emulator
from dsl_backend.experts.cute import combine
from dsl_backend.experts.cute.key import Slots
from dsl_backend.experts.cute.routing import flat
from dsl_backend.gemm.host import matrix, vector
from dsl_backend.runtime import toolkit
from tests.mistakes import Mistake, spoilt

# Columns end within a warp of the second CTA.
TOKENS, HIDDEN, EXPERTS = 5, combine.THREADS * combine.VECTOR + 72, 6
SLOTS = Slots(EXPERTS, topk=3, shared=1)
SHARED_WEIGHT = 0.5


class Launched:
    """The kernel alone, with all of its operands as arguments."""

    def __init__(self, module: ModuleType):
        self.combine = module.Combine(SLOTS, weighted=True, shared_weight=SHARED_WEIGHT)

    @cute.jit
    def __call__(self, ids, mMap, weights, made, out, stream):
        grid = (out.shape[0], cute.ceil_div(out.shape[1], combine.THREADS * combine.VECTOR), 1)
        self.combine.kernel(flat(ids), mMap, flat(weights), made, out).launch(
            grid=grid, block=(combine.THREADS, 1, 1), stream=stream
        )


def check(module: ModuleType, *, mapped: bool) -> None:
    """Raises AssertionError where a sum is wrong; all numbers are exact."""
    generator = torch.Generator().manual_seed(1)
    known = 2 * EXPERTS if mapped else EXPERTS
    ids = torch.randint(0, known, (TOKENS, SLOTS.topk), dtype=torch.int32, generator=generator)
    ids[0, 1], ids[1, 2], ids[3] = -1, known, -1
    # Experts of another rank are -1, or behind this rank's.
    expert_map = torch.tensor([*range(EXPERTS), -1, EXPERTS, -1, EXPERTS + 3, -1, -1], dtype=torch.int32)
    local = torch.where((ids >= 0) & (ids < known), ids, known)
    of_each = torch.cat((expert_map, torch.tensor([-1]))) if mapped else torch.arange(known + 1)
    exists = (of_each[local] >= 0) & (of_each[local] < EXPERTS)
    assert exists.any()
    assert not exists.all()
    weights = 2.0 ** torch.randint(-2, 3, ids.shape, generator=generator)
    made = torch.randint(-8, 9, (TOKENS, SLOTS.of_token, HIDDEN), generator=generator).to(torch.bfloat16)
    right = (made.float()[:, : SLOTS.topk] * (weights * exists)[:, :, None]).sum(1)
    right += SHARED_WEIGHT * made.float()[:, SLOTS.topk]
    weights[~exists] = torch.nan
    made[:, : SLOTS.topk][~exists] = torch.nan
    out = torch.full((TOKENS, HIDDEN + 8), 7.0, dtype=torch.bfloat16)
    rows, pairs, hidden = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8)
    fakes = (
        make_fake_tensor(Int32, (rows, SLOTS.topk), (SLOTS.topk, 1), assumed_align=4),
        vector(Int32, cute.sym_int()) if mapped else None,
        make_fake_tensor(Float32, (rows, SLOTS.topk), (SLOTS.topk, 1), assumed_align=4),
        matrix(torch.bfloat16, pairs, hidden),
        matrix(torch.bfloat16, rows, hidden),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    with emulator.device("sm_90a", sms=2, schedule="lazy", seed=1, strict=True):
        function = toolkit.compiled(Launched(module), fakes, "sm_90a", "")
        function(ids, expert_map if mapped else None, weights, made.view(-1, HIDDEN), out[:, :HIDDEN])
    assert torch.equal(out[:, :HIDDEN], right.to(torch.bfloat16))
    assert (out[:, HIDDEN:] == 7.0).all()


@pytest.mark.parametrize("mapped", [False, True])
def test_what_belongs_to_no_expert_does_not_count(mapped: bool) -> None:
    check(combine, mapped=mapped)


@pytest.mark.rest
@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(one, id=one.id)
        for one in (
            Mistake("weights of no expert", combine, "if exists[slot] else", "if slot >= 0 else"),
            Mistake("rows of no expert", combine, "inside and exists[slot]", "inside"),
            Mistake("columns behind the last", combine, "        if inside:", "        if column >= 0:"),
        )
    ],
)
def test_mistake_is_found(mistake: Mistake, tmp_path: Path) -> None:
    with pytest.raises((emulator.EmulatorError, AssertionError)):
        check(spoilt(mistake, tmp_path), mapped=True)
