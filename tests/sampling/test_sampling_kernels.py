# SPDX-License-Identifier: Apache-2.0
"""Kernels draw the tokens of the definition in every batch; bad arguments are refused."""

import pytest
import torch

pytest.importorskip("triton")

from dsl_backend.errors import InvalidInput
from dsl_backend.sampling import reference
from dsl_backend.sampling.api import LogprobsMode, Parameters, SamplingSpec, plan, run
from dsl_backend.testing.sampling import assert_likeliest
from tests.sampling.distribution import ALONG, AT_ONCE, BLOCKS_VOCAB, BY_BLOCKS, SETTINGS, VOCAB, assert_fair

ROWS = 9
KERNELS = ["triton", pytest.param("cute", marks=pytest.mark.gpu)]


def problem(vocab: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, Parameters]:
    """Rows of ties, of equal logits, of NaN, -inf and inf; greedy rows and filters out of range among them."""
    x = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    x[3], x[4], x[5], x[6], x[7, 0] = x[3].round(), 0, float("nan"), float("-inf"), float("inf")
    rows = Parameters(
        seeds=torch.arange(ROWS, device=device) - 4,
        positions=torch.arange(ROWS, device=device) * 7 + 2**33,
        temperature=torch.tensor([0.8, 0, 1.3, 0.7, 1, 1, 1, 1, 2.0], device=device),
        top_k=torch.tensor([50, 3, 0, 5, 20, 4, 3, 9, 9999], dtype=torch.int32, device=device),
        top_p=torch.tensor([0.9, 0.9, 0.5, 0.8, 0.7, 0.9, 0.9, 1.5, 0.0], device=device),
        min_p=torch.tensor([0.01, 0, 0, 0.1, 0, 0, 0, -1, float("nan")], device=device),
    )
    return x.to(device, dtype), rows


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("vocab", [1, 2, 300, 777, pytest.param(151_936, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_is_the_definition(vocab: int, dtype: torch.dtype, kernel: str, device: torch.device) -> None:
    x, rows = problem(vocab, dtype, device)
    tokens, _ = reference.sample(x, rows)
    assert torch.equal(run(plan(SamplingSpec(vocab=vocab, dtype=dtype), ROWS, device, kernel), x, rows).tokens, tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "cute"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("along", ALONG)
def test_draws_have_the_exact_distribution(along: str, name: str, kernel: str, device: torch.device) -> None:
    """Five million of one row. Without a GPU the definition is drawn from, whose tokens the kernels give."""
    sampler = plan(SamplingSpec(vocab=VOCAB), AT_ONCE[VOCAB], device, kernel)
    assert_fair(name, along, 5_000_000, device, lambda rows, drawn: run(sampler, rows, drawn).tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "cute"])
@pytest.mark.parametrize("name", BY_BLOCKS)
def test_draws_from_several_blocks_have_the_exact_distribution(name: str, kernel: str, device: torch.device) -> None:
    sampler = plan(SamplingSpec(vocab=BLOCKS_VOCAB), AT_ONCE[BLOCKS_VOCAB], device, kernel)
    assert_fair(name, "seeds", 5_000_000, device, lambda rows, drawn: run(sampler, rows, drawn).tokens, BLOCKS_VOCAB)


@pytest.mark.parametrize("vocab", [1, 2, 300, 777])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    mode = LogprobsMode.PROCESSED_LOGPROBS
    spec = SamplingSpec(vocab=vocab, dtype=dtype, logprobs=True, logprobs_mode=mode, num_logprobs=min(3, vocab))
    x, rows = problem(vocab, dtype, device)
    tokens, logprobs = reference.sample(x, rows)
    found = run(plan(spec, ROWS, device, "triton"), x, rows)
    assert found.logprobs is not None
    assert found.top_logprobs is not None
    assert torch.equal(found.tokens, tokens)
    assert torch.equal(found.logprobs.isfinite(), logprobs.isfinite())
    torch.testing.assert_close(found.logprobs, logprobs, rtol=1e-5, atol=1e-5)
    expected = torch.cat([logprobs.gather(1, tokens.unsqueeze(1)), logprobs.sort(descending=True).values], 1)
    torch.testing.assert_close(found.top_logprobs, expected[:, : 1 + spec.num_logprobs])


@pytest.mark.parametrize("kernel", ["reference", *KERNELS])
@pytest.mark.parametrize("mode", [LogprobsMode.RAW_LOGPROBS, LogprobsMode.RAW_LOGITS])
@pytest.mark.parametrize("vocab", [1, 300])
def test_the_likeliest_of_raw_logits(vocab: int, mode: LogprobsMode, kernel: str, device: torch.device) -> None:
    """As many as a step asks for, with the order and ties of the definition; rows of -inf and NaN among them."""
    spec = SamplingSpec(vocab=vocab, dtype=torch.bfloat16, logprobs_mode=mode, num_logprobs=min(20, vocab))
    x, rows = problem(vocab, torch.bfloat16, device)
    for asked in (0, min(7, vocab)):
        found = run(plan(spec, ROWS, device, kernel), x, rows, num_logprobs=asked)
        assert found.top_ids is not None
        assert found.top_ids.shape == (ROWS, 1 + asked)
        assert_likeliest(x, found, spec)
    with pytest.raises(InvalidInput, match=f"num_logprobs is 300: an integer from 0 to {min(20, vocab)} is needed"):
        run(plan(spec, ROWS, device, kernel), x, rows, num_logprobs=300)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_token_depends_on_its_row_alone(kernel: str, device: torch.device) -> None:
    x, rows = problem(300, torch.float32, device)
    sampler = plan(SamplingSpec(vocab=300), 2 * ROWS, device, kernel)
    expected = run(sampler, x, rows).tokens.clone()
    order = torch.tensor([8, 0, 3, 3, 1, 2], device=device)
    some = Parameters(**{name: value[order] for name, value in vars(rows).items()})
    wide = torch.full((len(order), 400), 9.0, device=device)
    wide[:, :300] = x[order]
    assert torch.equal(run(sampler, wide[:, :300], some).tokens, expected[order])
    assert run(sampler, x[:0], Parameters(**{n: v[:0] for n, v in vars(rows).items()})).tokens.shape == (0,)


def test_arguments_that_do_not_fit_are_refused(device: torch.device) -> None:
    x, rows = problem(300, torch.float32, device)
    with pytest.raises(InvalidInput, match="9 rows exceed the plan's max_rows, 8"):
        run(plan(SamplingSpec(vocab=300), 8, device, "triton"), x, rows)
    sampler = plan(SamplingSpec(vocab=300), ROWS, device, "triton")
    with pytest.raises(InvalidInput, match=r"logits are float16 \(9, 300\): float32 \[rows, 300\] is needed"):
        run(sampler, x.half(), rows)
    with pytest.raises(InvalidInput, match=r"seeds is int64 \(9,\): contiguous \[8\] of int64 is needed"):
        run(sampler, x[:8], rows)
    with pytest.raises(InvalidInput, match=r"vocab is 0: an integer from 1 to 2097152 is needed"):
        SamplingSpec(vocab=0)
