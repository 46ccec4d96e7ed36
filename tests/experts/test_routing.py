# SPDX-License-Identifier: Apache-2.0
"""The routing kernels on the emulator, against torch's sort."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream
from experts_cases import SMS, TARGET

import emulator
from dsl_backend.experts import reference
from dsl_backend.experts.configs import ExpertsConfig
from dsl_backend.experts.cute import host
from dsl_backend.experts.cute.args import ExpertsArgs
from dsl_backend.experts.cute.key import Slots
from dsl_backend.experts.cute.routing import Routing
from dsl_backend.gemm.sm90.configs import GemmConfig
from dsl_backend.runtime.compile import compile_kernel
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.experts import ExpertsCase, tensors

TILE_M = 64


@dataclass(frozen=True)
class RoutingKey:
    num_experts: int
    ids_dtype: torch.dtype
    mapped: bool
    topk: int
    shared: int


class RoutingAlone:
    """The routing of a layer, without its products."""

    def __init__(self, key: RoutingKey):
        self.routing = Routing(Slots(key.num_experts, key.topk, key.shared), TILE_M)

    @cute.jit
    def __call__(self, x: cute.Tensor, args: ExpertsArgs, stream: Any) -> None:
        self.routing.launch(args, stream)


def check_routing(case: ExpertsCase, ctas: int, schedule: str) -> None:
    """Of a case, by so many CTAs."""
    given, spec = tensors(case, "cpu"), case.spec
    tiles = GemmConfig(tile_m=TILE_M, box_n=16, stages=2, pingpong=True)
    config = ExpertsConfig(first=tiles, second=tiles)
    key = RoutingKey(case.num_experts, case.ids_dtype, case.mapped, case.topk, case.shared)
    workspace = Workspace(torch.device("cpu"))
    scratch = host.scratch_of(spec, config, case.tokens, ctas, workspace)
    with emulator.device(arch="sm_90a", sms=SMS, schedule=schedule, strict=True):
        fake = host.fake_args(host.key_of(spec, config))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        function = compile_kernel(RoutingAlone(key), (fake.operands.x, fake, stream), key=key, target=TARGET)
        function(given.x, ExpertsArgs(given, scratch, ctas, 1, 1))
    of_shared = torch.arange(case.num_experts, spec.all_experts).expand(case.tokens, case.shared)
    ids = torch.cat((reference.local_ids(spec, given), of_shared), 1).flatten()
    found = ids[ids >= 0]
    order = torch.where(ids < 0, spec.all_experts, ids).sort(stable=True).indices[: len(found)]
    assert torch.equal(scratch.pairs[: len(found)].long(), order)
    wanted: list[list[int]] = []
    first = 0
    for expert, count in enumerate(found.bincount(minlength=spec.all_experts).tolist()):
        wanted += [[expert, first + start, min(TILE_M, count - start), 0] for start in range(0, count, TILE_M)]
        first += count
    assert len(wanted) <= len(scratch.tiles)
    assert scratch.tile_count.tolist() == [len(wanted), sum(record[2] for record in wanted)]
    assert scratch.tiles[: len(wanted)].tolist() == wanted


CASE = ExpertsCase(tokens=500, num_experts=6, hidden=8, width=8, topk=3, padding=0.1)
CASES = {
    "one-cta": (CASE, 1),
    "several": (CASE, 5),
    "mapped": (replace(CASE, mapped=True, ids_dtype=torch.int64, topk=4), 3),
    "more-experts-than-threads-of-a-warp": (replace(CASE, num_experts=200, topk=16, tokens=40), 1),
    "all-experts": (replace(CASE, num_experts=512, topk=2, routing="zipf"), 2),
    "one-expert": (replace(CASE, num_experts=1, topk=1), 1),
    "one-pair": (replace(CASE, tokens=1, topk=1, padding=0.0), 1),
    "fewer-pairs-than-ctas": (replace(CASE, tokens=2, topk=1), 4),
    "shared": (replace(CASE, shared=2), 3),
    "shared-alone": (replace(CASE, shared=1, padding=1.0, mapped=True), 1),
    "nothing": (replace(CASE, padding=1.0), 2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "several" else (pytest.mark.rest,)) for name in CASES]
)
def test_rows_and_work_tiles(name: str) -> None:
    case, ctas = CASES[name]
    check_routing(case, ctas, "random")
