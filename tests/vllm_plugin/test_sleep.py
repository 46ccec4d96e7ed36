# SPDX-License-Identifier: Apache-2.0
"""Sleep frees memory that kernels' counters lie in: they are zeroed before the first step behind it."""

import gc
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig

from dsl_backend.vllm_plugin import compat
from dsl_backend.vllm_plugin.dense import DSLMetadataBuilder
from dsl_backend.vllm_plugin.hooks import Stage, install_hooks
from tests.vllm_plugin.conftest import make_step
from tests.vllm_plugin.test_dense import PAGE, make_builder


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """VLLM's allocator, with a wake_up that needs no GPU."""
    cumem = pytest.importorskip("vllm.device_allocator.cumem")
    # A step zeroes the counters of all workspaces that there are, and those of inference mode cannot be, here.
    gc.collect()
    monkeypatch.setattr(cumem.CuMemAllocator, "wake_up", lambda self, tags=None: tags)
    return cumem.CuMemAllocator


def step(builder: DSLMetadataBuilder) -> None:
    builder.build(0, make_step((1, 3), (5, 9), PAGE).common)


def test_counters_are_zeroed_before_the_first_step(allocator: Any, plain_config: VllmConfig) -> None:
    install_hooks(Stage.FIRST_LAYER)
    builders = [make_builder(plain_config, torch.bfloat16) for _ in range(2)]
    flags = [builder.planners.workspace.flags(2) for builder in builders]
    for own in flags:
        own.fill_(7)
    step(builders[0])
    assert [own.tolist() for own in flags] == [[7, 7], [7, 7]], "no step zeroes what kernels leave each other"
    # A server wakes its weights first: counters may have no memory yet.
    assert allocator.wake_up(None, ["weights"]) == ["weights"], "the allocator's own answer"
    assert [own.tolist() for own in flags] == [[7, 7], [7, 7]]
    for builder in builders:
        step(builder)
    assert [own.tolist() for own in flags] == [[0, 0], [0, 0]]


def test_waking_is_watched_once(allocator: Any) -> None:
    for _ in range(2):
        compat.watch_sleep()
    before = compat.wakes()
    allocator.wake_up(None)
    assert compat.wakes() == before + 1
