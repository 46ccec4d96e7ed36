# SPDX-License-Identifier: Apache-2.0
"""Decode steps as CUDA graphs: thousands of replays have the bits of the same kernels launched one by one."""

from collections.abc import Callable

import pytest
import torch

from tests.primitives.replayed_steps import REAL, TINY, Sizes, Step, dense_step, latent_step, replay, unseen

REPLAYS = 10_000
STEPS = pytest.mark.parametrize("build", [dense_step, latent_step])
Build = Callable[[int, Sizes, torch.device], Step]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
@STEPS
def test_replays_have_the_bits_of_single_launches(build: Build, rows: int, device: torch.device) -> None:
    step = build(rows, REAL, device)
    expected = step.one_by_one()
    assert replay(step, expected, REPLAYS) == 0
    assert unseen(step, expected) == []


@STEPS
def test_a_missing_launch_is_seen(build: Build) -> None:
    """By the references on a CPU: the comparison itself."""
    step = build(3, TINY, torch.device("cpu"))
    expected = step.one_by_one()
    assert replay(step, expected, 2) == 0
    assert unseen(step, expected) == []
