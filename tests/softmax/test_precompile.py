# SPDX-License-Identifier: Apache-2.0
"""The kernels that are compiled for a model ahead of time are those that its logits get."""

import pytest
import torch

from dsl_backend import rows
from dsl_backend.runtime import model
from dsl_backend.runtime import target as targets
from dsl_backend.softmax import precompile
from dsl_backend.softmax.configs import default_config
from dsl_backend.softmax.spec import SoftmaxSpec

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

CONFIG = {"num_attention_heads": 8, "hidden_size": 1024, "dtype": "bfloat16"}


@pytest.mark.parametrize("vocab", [1, 1000, 50257, 128256, 151936])
def test_logits_get_a_kernel_of_the_list(vocab: int) -> None:
    from dsl_backend.softmax.cute import host

    target = targets.from_arch("sm_90a")
    listed = [one.key for one in precompile.precompile_specs(model.shape_of(CONFIG | {"vocab_size": vocab}), target)]
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.empty(2, vocab, dtype=dtype)
        vector = rows.common_vector(logits, torch.empty_like(logits))
        for log in (False, True):
            spec = SoftmaxSpec(width=vocab, dtype=dtype, out_dtype=dtype, log=log, vector=vector)
            assert {host.key_of(spec, default_config(spec, chip)) for chip in target.chips} <= set(listed)


def test_a_model_in_float32_has_half_of_them() -> None:
    shape = model.shape_of(CONFIG | {"vocab_size": 1000, "dtype": "float32"})
    assert len(list(precompile.precompile_specs(shape, targets.from_arch("sm_100a")))) == 2


def test_other_gpus_have_none() -> None:
    assert (
        list(precompile.precompile_specs(model.shape_of(CONFIG | {"vocab_size": 1000}), targets.from_arch("sm_80")))
        == []
    )
