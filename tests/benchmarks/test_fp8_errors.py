# SPDX-License-Identifier: Apache-2.0
"""The measured errors of kernels over e4m3 caches: the exact result and the cache are those of the model's inputs."""

import pytest
import torch

from benchmarks.attention.fp8_accuracy import (
    INPUTS,
    SCALES,
    WIDENED,
    attended,
    exact,
    random_rows,
    scores_of,
    stored_error,
)
from benchmarks.attention.fp8_errors import ROWS, Stored, cell, ours


def stored(name: str, latent: bool = False) -> Stored:
    return Stored.of(INPUTS[name](torch.Generator().manual_seed(0), ROWS, latent), torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "latent"),
    [("random, 4k keys", False), ("channels 30x, 4k keys", False), ("channels 30x, 4k keys", True)],
)
def test_the_reference_is_exact_but_for_its_output(name: str, latent: bool) -> None:
    given = stored(name, latent)
    assert given.latent == latent
    total, row = (float(part) for part in cell(ours("reference"), given).rstrip(")").split(" ("))
    assert 0.1 < total < 0.2
    assert total < row < 0.4


def test_why_a_kernel_has_no_error_is_said() -> None:
    assert cell(ours("cute-fp8"), stored("random, 4k keys")).startswith("Unsupported: ")


def test_a_scale_of_the_tensor_is_enough_until_heads_differ_by_thousands() -> None:
    """The model: e4m3 has normal numbers over 15 powers of two, and a head's own numbers need a few of them."""
    errors = {
        (times, by): stored_error(times, by, WIDENED, keys=512).total for times in (1, 30, 30_000) for by in SCALES
    }
    assert errors[1, "tensor"] == errors[1, "head"]
    assert errors[30, "tensor"] < 1.1 * errors[30, "head"]
    assert errors[30_000, "tensor"] > 2 * errors[30_000, "head"]


def test_the_model_of_mla_splits_keys() -> None:
    """Both ways to sum agree where sums are exact."""
    sample = random_rows(512, torch.Generator().manual_seed(0), 2, latent=True)
    assert sample.v.data_ptr() == sample.k.data_ptr()
    right = exact(sample)
    whole, split = (attended(scores_of(sample, sample.q.double()), sample.v, WIDENED, keys).out for keys in (512, 128))
    assert (whole - right).norm() < 1e-2 * right.norm()
    assert (split - whole).norm() < 1e-3 * right.norm()
