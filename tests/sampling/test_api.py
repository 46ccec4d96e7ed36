# SPDX-License-Identifier: Apache-2.0
"""The sampler's API: errors name the argument and what is needed."""

import re
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.sampling.api import LogprobsMode, Parameters, SamplingPlan, SamplingSpec, plan, run

SPEC = SamplingSpec(vocab=64)
ROWS = 4
RAW = LogprobsMode.RAW_LOGPROBS
LOGITS = torch.zeros(ROWS, 64)
PARAMETERS = Parameters(
    seeds=torch.zeros(ROWS, dtype=torch.int64),
    positions=torch.zeros(ROWS, dtype=torch.int64),
    top_p=torch.ones(ROWS),
)


def sampler() -> SamplingPlan:
    return plan(SPEC, ROWS, torch.device("cpu"), "reference")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"vocab": True}, "vocab is True: an integer from 1 to 2097152 is needed"),
        ({"vocab": 2.5}, "vocab is 2.5: an integer"),
        ({"vocab": "64"}, "vocab is '64': an integer"),
        ({"dtype": "float32"}, "dtype is 'float32': a torch.dtype is needed"),
        ({"dtype": torch.float64}, "dtype is float64: one of float32, bfloat16, float16 is needed"),
        ({"token_dtype": torch.int16}, "token_dtype is int16: one of int64, int32 is needed"),
        ({"logprobs": 1}, "logprobs is 1: True or False is needed"),
        ({"num_logprobs": 65, "logprobs_mode": RAW}, "num_logprobs is 65: an integer from 0 to 64 is needed"),
        ({"num_logprobs": None}, "num_logprobs is None: an integer from 0"),
        ({"num_logprobs": 3}, "num_logprobs is 3: a logprobs_mode is needed with it"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode is 'raw_logprobs': "),
        ({"logprobs_mode": LogprobsMode.PROCESSED_LOGPROBS}, "logprobs=True is needed with it"),
    ],
)
def test_spec_refuses(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        replace(SPEC, **facts)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"spec": None}, "spec is None: a SamplingSpec is needed"),
        ({"max_rows": 0}, "max_rows is 0: an integer from 1"),
        ({"max_rows": 4.0}, "max_rows is 4.0: an integer from 1"),
        ({"device": None}, "device is None: a torch.device or its name, such as cuda:0 or cpu, is needed"),
        ({"device": "gpu"}, "device is 'gpu': a torch.device or its name"),
        ({"device": "meta"}, "device meta is not supported: use a CUDA device or the CPU"),
        ({"kernel": 1}, "kernel is 1: a name from the dispatch table or None is needed"),
        ({"kernel": "fast"}, "has no kernel 'fast': choose one of cute, triton, reference"),
    ],
)
def test_plan_refuses(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"spec": SPEC, "max_rows": ROWS, "device": "cpu", "kernel": "reference", **changed}
    with pytest.raises(InvalidInput, match=re.escape(message)):
        plan(**arguments)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), "cuda:99"])
def test_a_gpu_that_is_not_there(device: torch.device | str) -> None:
    if torch.cuda.is_available() and str(device) != "cuda:99":
        pytest.skip("there is one")
    with pytest.raises(InvalidInput, match=f"device {device}.* is not there: .*; there are [0-9]+ CUDA devices"):
        plan(SPEC, ROWS, device)


@pytest.mark.parametrize(
    ("logits", "rows", "message"),
    [
        (LOGITS.tolist(), PARAMETERS, "logits is a list: a tensor is needed"),
        (None, PARAMETERS, "logits is None: a tensor is needed"),
        (LOGITS, None, "parameters is None: a Parameters is needed"),
        (LOGITS.clone().requires_grad_(), PARAMETERS, "logits requires a gradient, and there is no backward"),
        (LOGITS.half(), PARAMETERS, "logits are float16 (4, 64): float32 [rows, 64] is needed"),
        (LOGITS, replace(PARAMETERS, seeds=None), "seeds is None: a tensor is needed"),
        (LOGITS, replace(PARAMETERS, positions=None), "positions is None: a tensor is needed"),
        (LOGITS, replace(PARAMETERS, top_p=0.9), "top_p is a float: a tensor is needed"),
        (LOGITS, replace(PARAMETERS, top_k=[3] * ROWS), "top_k is a list: a tensor is needed"),
        (
            LOGITS,
            replace(PARAMETERS, top_k=torch.ones(ROWS)),
            "top_k is float32 (4,): contiguous [4] of int32 or int64 is needed",
        ),
        (LOGITS, replace(PARAMETERS, min_p=torch.ones(ROWS, requires_grad=True)), "min_p requires a gradient"),
    ],
)
def test_run_refuses(logits: Any, rows: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        run(sampler(), logits, rows)


def test_what_is_accepted() -> None:
    assert SamplingSpec(vocab=numpy.int64(64)) == SPEC
    assert run(plan(SPEC, numpy.int32(ROWS), "cpu", "reference"), LOGITS, PARAMETERS).tokens.shape == (ROWS,)  # type: ignore[arg-type]
    with torch.no_grad():
        run(sampler(), LOGITS.clone().requires_grad_(), PARAMETERS)
    with pytest.raises(InvalidInput, match="plan is 'plan': a SamplingPlan is needed"):
        run("plan", LOGITS, PARAMETERS)  # type: ignore[arg-type]


def test_new_tokens_are_kept() -> None:
    own, logits = sampler(), torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(1))
    shared, kept = run(own, logits, PARAMETERS).tokens, run(own, logits, PARAMETERS, new_tokens=True).tokens
    expected = kept.clone()
    assert torch.equal(shared, expected)
    run(own, -logits, PARAMETERS)
    assert torch.equal(kept, expected)
    assert not torch.equal(shared, expected)
    with pytest.raises(InvalidInput, match="new_tokens is 1: True or False is needed"):
        run(own, logits, PARAMETERS, new_tokens=1)  # type: ignore[arg-type]
