# SPDX-License-Identifier: Apache-2.0
"""What a verified step costs the host: how many launches of torch are around those of the sampler and the verifier."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("vllm")

from dsl_backend.sampling.spec import Parameters, Sampled
from dsl_backend.sampling.verification import Drafts, Verified
from dsl_backend.vllm_plugin.sampler import v1_verification
from dsl_backend.vllm_plugin.sampler.v1_verification import DSLRejectionSampler
from tests.vllm_plugin.test_sampler import some_logits
from tests.vllm_plugin.test_sampler_verification import COUNTS, DRAFTS, ROWS, v1_metadata, v1_runner, v1_step

# Operators that make views. Others launch a kernel on a GPU, which takes 5 us of the host.
VIEWS = {"slice", "view", "alias", "detach", "select", "expand", "unsqueeze", "as_strided"}
# The most launches. Before they were counted (2026-11-27) there were 11, 14 and 15.
MOST = {"greedy": 3, "sampled": 9, "seeded": 10}


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def steps() -> dict[str, Any]:
    greedy = {"all_greedy": True, "temperature": None, "top_p": None, "top_k": None}
    return {"greedy": v1_step(**greedy, generators={}), "sampled": v1_step(generators={}), "seeded": v1_step()}


def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Those of each kind of step, of a sampler and a verifier that launch nothing."""
    runner: Any = v1_runner()
    rejection, tokens = runner.rejection_sampler, torch.zeros(ROWS, dtype=torch.int64)
    verified = Verified(torch.zeros(len(COUNTS), DRAFTS + 1, dtype=torch.int32), torch.ones(len(COUNTS)).int())
    monkeypatch.setattr(rejection.sampler.rows, "draw", lambda *_, **__: Sampled(tokens))
    monkeypatch.setattr(rejection.verifier, "verify", lambda *_: verified)
    logits, metadata, found = some_logits(ROWS), v1_metadata(tokens.int()), {}
    for name, step in steps().items():
        rejection(metadata, None, logits, step)
        with Launches() as counted:
            rejection(metadata, None, logits, step)
        found[name] = counted.names
    return found


def test_a_verified_step_has_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches(monkeypatch)
    assert {name: names for name, names in found.items() if len(names) > MOST[name]} == {}


def drafts_in_new_memory(patch: pytest.MonkeyPatch) -> None:
    def drafts(self: DSLRejectionSampler, metadata: Any, rows: int, distributions: Any) -> Drafts:
        inputs = torch.full_like(self.row_ids[:rows], -1)
        inputs.index_copy_(0, (metadata.target_logits_indices + 1).long(), metadata.draft_token_ids.int())
        return Drafts(inputs=inputs, cu_rows=torch.nn.functional.pad(metadata.cu_num_sampled_tokens, (1, 0)))

    patch.setattr(DSLRejectionSampler, "drafts", drafts)


def greedy_steps_copy_parameters(patch: pytest.MonkeyPatch) -> None:
    views = v1_verification.first

    def copies(parameters: Parameters, rows: int) -> Parameters:
        return dataclasses.replace(views(parameters, rows), seeds=parameters.seeds[:rows].clone())

    patch.setattr(v1_verification, "first", copies)


def counts_are_taken_each_time(patch: pytest.MonkeyPatch) -> None:
    take = DSLRejectionSampler.take_counts

    def forgetful(self: DSLRejectionSampler, metadata: Any) -> None:
        self.counts = []
        take(self, metadata)

    patch.setattr(DSLRejectionSampler, "take_counts", forgetful)


@pytest.mark.parametrize(
    ("mistake", "seen_in"),
    [
        (drafts_in_new_memory, {"greedy", "sampled", "seeded"}),
        (greedy_steps_copy_parameters, {"greedy"}),
        (counts_are_taken_each_time, {"greedy", "sampled", "seeded"}),
    ],
)
def test_mistakes_are_seen(
    mistake: Callable[[pytest.MonkeyPatch], None], seen_in: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    found = launches(monkeypatch)
    assert seen_in <= {name for name, names in found.items() if len(names) > MOST[name]}, found
