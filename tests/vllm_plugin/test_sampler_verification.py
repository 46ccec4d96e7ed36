# SPDX-License-Identifier: Apache-2.0
"""vLLM's rejection samplers with drafts verified by what this package's sampler draws."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.rejection_sampler import RejectionSampler as RejectionSamplerV1
from vllm.v1.sample.sampler import Sampler as SamplerV1
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler as RejectionSamplerV2

from dsl_backend import log
from dsl_backend.sampling import reference
from dsl_backend.sampling import verification_reference as definition
from dsl_backend.sampling.spec import Parameters, Sampled
from dsl_backend.sampling.verification import Distributions, Drafts, Known, VerificationSpec
from dsl_backend.vllm_plugin.sampler import replace as sampler
from dsl_backend.vllm_plugin.sampler import v1_verification, v2_verification
from dsl_backend.vllm_plugin.sampler.replace import V1, V2
from dsl_backend.vllm_plugin.sampler.row_sampler import Returned, RowSampler
from tests.vllm_plugin.test_sampler import (
    MOST,
    VOCAB,
    Runner,
    add_request,
    assert_likeliest,
    some_logits,
    speculation,
    step,
    v2_sampler,
)

DRAFTS = 3
# Drafts of each request; one has none.
COUNTS = [2, 0, 3, 1]
CU_ROWS = np.cumsum([0, *(count + 1 for count in COUNTS)])
ROWS = int(CU_ROWS[-1])
REQUEST = np.repeat(np.arange(len(COUNTS)), np.array(COUNTS) + 1)
LOCAL = np.concatenate([np.arange(count + 1) for count in COUNTS])


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in test_sampler.py."""
    log.info_once.cache_clear()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with torch._dynamo.config.patch(disable=True):
        yield


def some_drafts(tokens: torch.Tensor) -> torch.Tensor:
    """Inputs [rows]: the drafts are the tokens that are drawn, except for the last draft of the third request."""
    inputs = tokens.roll(1).int()
    inputs[CU_ROWS[3] - 1] = (tokens[CU_ROWS[3] - 2] + 1) % VOCAB
    return inputs


def v1_runner(mode: str = "raw_logprobs", **changes: Any) -> Runner:
    own = SamplerV1(logprobs_mode=mode)  # type: ignore[arg-type]
    config = speculation(**changes)
    runner = Runner(own, speculative_config=config)
    runner.rejection_sampler = RejectionSamplerV1(own, config, torch.device("cpu"))
    sampler.decide(runner, V1)
    runner.positions = torch.arange(100) * 7
    return runner


def v1_metadata(inputs: torch.Tensor, counts: list[int] = COUNTS) -> SpecDecodeMetadata:
    """As the runner makes it. The requests have ROWS rows in all."""
    made = SpecDecodeMetadata.make_dummy([[0] * count for count in counts], torch.device("cpu"))
    cu_rows = np.cumsum([0, *(count + 1 for count in counts)])
    made.target_logits_indices = torch.tensor([r for r in range(ROWS) if r + 1 not in cu_rows], dtype=torch.int32)
    made.bonus_logits_indices = torch.from_numpy(cu_rows[1:] - 1).int()
    made.logits_indices = torch.arange(ROWS, dtype=torch.int32) + 2
    made.draft_token_ids = inputs[made.target_logits_indices + 1]
    return made


def v1_parameters(metadata: Any, requests: torch.Tensor) -> Parameters:
    seeds = torch.tensor([100 + row for row in range(len(COUNTS))])
    return Parameters(
        seeds=seeds[requests],
        positions=(torch.arange(ROWS) + 2) * 7,
        temperature=metadata.temperature[requests],
        top_k=metadata.top_k[requests],
        top_p=metadata.top_p[requests],
    )


def v1_step(**changes: Any) -> Any:
    usual: dict[str, Any] = {
        "generators": {row: torch.Generator().manual_seed(100 + row) for row in range(len(COUNTS))},
        "logitsprocs": LogitsProcessors(),
        "output_token_ids": [[] for _ in COUNTS],
        "spec_token_ids": [[0] * count for count in COUNTS],
    }
    return step(len(COUNTS), **usual | changes)


REQUESTS = torch.from_numpy(REQUEST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_v1_is_the_definition(dtype: torch.dtype) -> None:
    runner, metadata = v1_runner(), v1_step()
    logits = some_logits(ROWS).to(dtype)
    drawn = reference.sample(logits, v1_parameters(metadata, REQUESTS))[0]
    inputs = some_drafts(drawn)
    found = runner.rejection_sampler(v1_metadata(inputs), None, logits.clone(), metadata).sampled_token_ids
    assert found.dtype == torch.int32
    assert (found >= 0).sum(-1).tolist() == [3, 1, 3, 2]
    for request, first in enumerate(CU_ROWS[:-1]):
        given = found[request][found[request] >= 0].tolist()
        assert given == drawn[first : first + len(given)].tolist()


def test_v1_all_greedy() -> None:
    runner, metadata = v1_runner(), v1_step(all_greedy=True, temperature=None, top_p=None, top_k=None)
    logits = some_logits(ROWS)
    best = logits.argmax(-1)
    found = runner.rejection_sampler(v1_metadata(some_drafts(best)), None, logits.clone(), metadata).sampled_token_ids
    assert (found >= 0).sum(-1).tolist() == [3, 1, 3, 2]
    assert found[0].tolist() == [*best[:3].tolist(), -1]


def test_v1_steps_with_other_numbers_of_drafts() -> None:
    """What depends on these numbers alone is kept from step to step."""
    runner, logits, found = v1_runner(), some_logits(ROWS), []
    for counts in (COUNTS, COUNTS[::-1], COUNTS[::-1], COUNTS):
        given = v1_metadata(some_drafts(logits.argmax(-1)), counts), None, logits
        found.append(runner.rejection_sampler(*given, v1_step()).sampled_token_ids)
        assert found[-1].equal(v1_runner().rejection_sampler(*given, v1_step()).sampled_token_ids)
    assert not found[0].equal(found[1])


def assert_no_logprobs(rows: RowSampler) -> None:
    """Log-probabilities of whole rows, which nobody has asked for, are not computed."""
    assert {kind for _, _, kind in rows.plans} == {Returned.NOTHING, Returned.LIKELIEST}


def test_v1_ratio() -> None:
    runner, metadata = v1_runner(draft_sample_method="probabilistic"), v1_step()
    logits = some_logits(ROWS)
    parameters = v1_parameters(metadata, REQUESTS)
    tokens, _ = reference.sample(logits, parameters)
    inputs = some_drafts(tokens)
    made = v1_metadata(inputs)
    probs = (some_logits(len(made.draft_token_ids), 5) + logits[made.target_logits_indices]).softmax(-1)
    index = torch.arange(ROWS) - REQUESTS
    expected, _ = definition.verify(
        Sampled(tokens),
        parameters,
        Drafts(
            inputs=inputs,
            cu_rows=torch.from_numpy(CU_ROWS).int(),
            distributions=Distributions(values=probs, index=index),
        ),
        VerificationSpec(max_drafts=DRAFTS, vocab=VOCAB, known=Known.PROBABILITIES),
        logits,
    )
    found = runner.rejection_sampler(made, probs, logits.clone(), metadata).sampled_token_ids
    assert found.tolist() == expected.tolist()
    assert_no_logprobs(runner.sampler.rows)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_v1_logprobs(mode: str) -> None:
    """Of each token: before processing, or those that it was drawn with."""
    runner, metadata = v1_runner(mode), v1_step(max_num_logprobs=2)
    logits = some_logits(ROWS)
    tokens, logprobs = reference.sample(logits, v1_parameters(metadata, REQUESTS))
    output = runner.rejection_sampler(v1_metadata(some_drafts(tokens)), None, logits.clone(), metadata)
    values = logits.log_softmax(-1) if mode == "raw_logprobs" else logprobs
    ranks = output.logprobs_tensors.selected_token_ranks.view(len(COUNTS), -1)
    ids = output.logprobs_tensors.logprob_token_ids.view(len(COUNTS), ranks.shape[1], 3)
    kept = output.sampled_token_ids >= 0
    found = output.logprobs_tensors.logprobs[:, 0].view(kept.shape)
    for request, first in enumerate(CU_ROWS[:-1]):
        n = int(kept[request].sum())
        rows = torch.arange(first, first + n)
        chosen = values[rows, tokens[rows]]
        torch.testing.assert_close(found[request, :n], chosen, rtol=1e-5, atol=1e-5)
        assert ids[request, :n, 0].tolist() == tokens[rows].tolist()
        assert ranks[request, :n].tolist() == (values[rows] >= chosen.unsqueeze(1)).sum(-1).tolist()
        assert ids[request, :n, 1:].tolist() == values[rows].topk(2).indices.tolist()


def test_v1_processing_is_that_of_each_rows_text() -> None:
    """Penalties and bad words see the drafts before a row; a minimum length ends within the drafts."""
    runner = v1_runner()
    drafts = [[7, 8], [], [9, 9, 10], [11]]
    outputs = [[1, 2], [3], [4, 5], [6]]
    minimum = MinTokensLogitsProcessor(None, torch.device("cpu"), False)  # type: ignore[arg-type]
    minimum.min_toks = {2: (4, outputs[2], {50}, False)}
    metadata = v1_step(
        no_penalties=False,
        prompt_token_ids=torch.full((len(COUNTS), 2), 20),
        presence_penalties=torch.full((len(COUNTS),), 0.5),
        frequency_penalties=torch.full((len(COUNTS),), 0.25),
        repetition_penalties=torch.full((len(COUNTS),), 1.5),
        output_token_ids=outputs,
        # VLLM's list goes on past the batch.
        spec_token_ids=[*drafts, [3]],
        bad_words_token_ids={2: [[9, 30], [4, 5, 31]]},
        allowed_token_ids_mask=torch.zeros(len(COUNTS), VOCAB, dtype=torch.bool).index_fill(
            1, torch.tensor([60]), True
        ),
        logitsprocs=LogitsProcessors([minimum]),
    )
    logits = some_logits(ROWS)
    found = runner.rejection_sampler.processed(logits, metadata, v1_metadata(torch.zeros(ROWS, dtype=torch.int32)))
    for row, (request, local) in enumerate(zip(REQUEST, LOCAL, strict=True)):
        text = outputs[request] + drafts[request][:local]
        expected = logits[row].clone()
        for token in {20, *text}:
            expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
        for token in set(text):
            expected[token] -= 0.5 + 0.25 * text.count(token)
        expected[60] = -torch.inf
        if request == 2:
            if text[-1] == 9:
                expected[30] = -torch.inf
            if text[-2:] == [4, 5]:
                expected[31] = -torch.inf
            if len(text) < 4:
                expected[50] = -torch.inf
        torch.testing.assert_close(found[row], expected, msg=f"row {row}")


def test_v1_leaves_logits_as_they_are() -> None:
    runner = v1_runner()
    logits = some_logits(ROWS)
    assert runner.rejection_sampler.processed(logits, v1_step(), v1_metadata(torch.zeros(ROWS).int())) is logits


# What a grammar allows in each row: vLLM masks logits before they are sampled.


def grammatical(logits: torch.Tensor) -> torch.Tensor:
    """All but a few tokens of each row are masked, among them the likeliest one."""
    allowed = torch.rand(logits.shape, generator=torch.Generator().manual_seed(3)) < 0.1
    return logits.masked_fill(~allowed.scatter(1, logits.argmax(-1, keepdim=True), False), -torch.inf)


def assert_grammatical(masked: torch.Tensor, tokens: torch.Tensor, counts: list[int]) -> None:
    for request, first in enumerate(CU_ROWS[:-1]):
        for place in range(counts[request]):
            assert masked[first + place, tokens[request, place]] > -torch.inf, (request, place)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_v1_grammar(method: str) -> None:
    """Drafts that a grammar forbids are not accepted, whatever their own probabilities are."""
    runner, metadata = v1_runner(draft_sample_method=method), v1_step()
    logits = some_logits(ROWS)
    masked, forbidden = grammatical(logits), logits.argmax(-1)
    drawn = reference.sample(masked, v1_parameters(metadata, REQUESTS))[0]
    for inputs, least in ((some_drafts(drawn), 3), (forbidden.roll(1).int(), 1)):
        made = v1_metadata(inputs)
        probs = None
        if method == "probabilistic":
            probs = torch.full((len(made.draft_token_ids), VOCAB), 1e-3)
            probs.scatter_(1, made.draft_token_ids.long().unsqueeze(1), 0.8)
        found = runner.rejection_sampler(made, probs, masked.clone(), metadata).sampled_token_ids
        counts = (found >= 0).sum(-1).tolist()
        assert_grammatical(masked, found, counts)
        assert max(counts) >= least if method == "greedy" else True
        assert least > 1 or counts == [1] * len(COUNTS)


# V2.

V2_REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": -7},
    {"temperature": 1.5, "top_p": 0.5, "seed": 2**62},
    {"temperature": 0.9, "top_k": 30, "seed": 4},
]
SLOTS = MOST - 1 - np.arange(len(COUNTS))


def v2_rejection_sampler(
    monkeypatch: pytest.MonkeyPatch, draft_logits: torch.Tensor | None = None, mode: str = "raw_logprobs"
) -> Any:
    own = v2_sampler(monkeypatch, logprobs_mode=mode)
    config = speculation(draft_sample_method="greedy" if draft_logits is None else "probabilistic")
    runner = Runner(own, speculative_config=config)
    runner.rejection_sampler = RejectionSamplerV2.__new__(RejectionSamplerV2)
    runner.rejection_sampler.sampler = own
    runner.speculator = SimpleNamespace(draft_logits=draft_logits)
    sampler.decide(runner, V2)
    assert isinstance(runner.rejection_sampler, v2_verification.DSLRejectionSampler)
    for number, request in enumerate(V2_REQUESTS):
        add_request(own, number, SamplingParams(**request, logprobs=2))
    own.sampling_states.apply_staged_writes()
    return runner.rejection_sampler


def v2_parameters() -> Parameters:
    def of(name: str, off: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([V2_REQUESTS[request].get(name, off) for request in REQUEST], dtype=dtype)

    return Parameters(
        seeds=of("seed", 0, torch.int64),
        positions=torch.arange(ROWS) + 5,
        temperature=of("temperature", 1.0),
        top_k=of("top_k", 0, torch.int32),
        top_p=of("top_p", 1.0),
    )


def v2_verify(
    own: Any,
    logits: torch.Tensor,
    inputs: torch.Tensor,
    draft_logits: torch.Tensor | None,
    verified: torch.Tensor | None = None,
) -> Any:
    slots = torch.from_numpy(SLOTS).int()
    facts = {
        "logits": logits,
        "draft_logits": draft_logits,
        "draft_sampled": inputs,
        "pos": torch.arange(ROWS) + 5,
        "cu_num_logits": torch.from_numpy(CU_ROWS).int(),
        "idx_mapping": slots,
        "idx_mapping_np": SLOTS.astype(np.int32),
        "expanded_idx_mapping": slots[REQUESTS],
        "expanded_local_pos": torch.from_numpy(LOCAL).int(),
        "seq_lens_upper_bound_np": np.full(len(COUNTS), 50),
    }
    if not v2_verification.VERIFY_NAMES:
        return own.verify(facts, inputs if verified is None else verified)
    facts["verify_draft_sampled"] = inputs if verified is None else verified
    return own._verify(*(facts[name] for name in v2_verification.VERIFY_NAMES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_v2_is_the_definition(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    own = v2_rejection_sampler(monkeypatch)
    logits = some_logits(ROWS).to(dtype)
    drawn = reference.sample(logits, v2_parameters())[0]
    inputs = some_drafts(drawn)
    # The only draft of the last request is right, and must not be accepted.
    verified = inputs.clone()
    verified[-1] = -1
    _, tokens, counts = v2_verify(own, logits, inputs, None, verified)
    assert tokens.dtype == torch.int64
    assert counts.tolist() == [3, 1, 3, 1]
    for request, first in enumerate(CU_ROWS[:-1]):
        n = int(counts[request])
        assert tokens[request, :n].tolist() == drawn[first : first + n].tolist()
    kept = tokens.clone()
    v2_verify(own, -logits, inputs, None)
    assert torch.equal(tokens, kept), "vLLM reads the tokens of a step while the next one draws"


def test_v2_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_logits = 0.3 * some_logits(MOST * DRAFTS, 9).view(MOST, DRAFTS, VOCAB)[..., :150].contiguous()
    own = v2_rejection_sampler(monkeypatch, draft_logits)
    parameters = v2_parameters()
    index = torch.from_numpy(SLOTS[REQUEST] * DRAFTS + LOCAL)
    distributions = Distributions(values=draft_logits.view(-1, 150), index=index)
    spec = VerificationSpec(max_drafts=DRAFTS, vocab=VOCAB, known=Known.LOGITS)
    generator = torch.Generator().manual_seed(0)
    accepted = 0
    for turn in range(10):
        logits = some_logits(ROWS, turn) * 0.3
        tokens, _ = reference.sample(logits, parameters)
        drafts = Drafts(
            inputs=torch.randint(0, 150, (ROWS,), generator=generator, dtype=torch.int32),
            cu_rows=torch.from_numpy(CU_ROWS).int(),
            distributions=distributions,
        )
        expected, counts = definition.verify(Sampled(tokens), parameters, drafts, spec, logits)
        _, found, found_counts = v2_verify(own, logits, drafts.inputs, draft_logits)
        assert torch.equal(found, expected)
        assert torch.equal(found_counts, counts)
        accepted += int((counts > 1).sum())
    assert accepted > 0
    assert_no_logprobs(own.sampler.rows)


def test_v2_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this mode vLLM takes its log-probabilities from what is returned first."""
    own = v2_rejection_sampler(monkeypatch, mode="processed_logprobs")
    logits = some_logits(ROWS)
    tokens, logprobs = reference.sample(logits, v2_parameters())
    values, *_ = v2_verify(own, logits, some_drafts(tokens), None)
    torch.testing.assert_close(values, logprobs, rtol=1e-5, atol=1e-5)


def test_v2_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    own = v2_rejection_sampler(monkeypatch)
    logits = some_logits(ROWS)
    masked, forbidden = grammatical(logits), logits.argmax(-1)
    drawn = reference.sample(masked, v2_parameters())[0]
    for inputs, expected in ((some_drafts(drawn), [3, 1, 3, 2]), (forbidden.roll(1).int(), [1] * len(COUNTS))):
        _, tokens, counts = v2_verify(own, masked.clone(), inputs, None)
        assert counts.tolist() == expected
        assert_grammatical(masked, tokens, expected)


class OfEachRowsText:
    """In the place of vLLM's processors, which run on GPUs: penalties, a bad word, a bias and allowed tokens."""

    bad, bias, forbidden = (9, 30), {40: 2.5}, 60

    def apply(self, logits: torch.Tensor, step: Any) -> torch.Tensor:
        for row, local in enumerate(step.expanded_local_pos.tolist()):
            # The drafts before this row's token.
            text = step.input_ids[row - local + 1 : row + 1].tolist()
            self.change(logits[row], text)
        return logits

    def change(self, row: torch.Tensor, text: list[int]) -> None:
        for token in text:
            row[token] -= 3.0
        if text[-1:] == [self.bad[0]]:
            row[self.bad[1]] = -torch.inf
        for token, bias in self.bias.items():
            row[token] += bias
        row[self.forbidden] = -torch.inf


@pytest.mark.parametrize("known", [Known.TOKENS, Known.LOGITS])
def test_v2_processing_is_that_of_each_rows_text(monkeypatch: pytest.MonkeyPatch, known: Known) -> None:
    """The V2 runner's processors get the drafts before each row, and tokens are drawn from what they return."""
    draft_logits = None if known is Known.TOKENS else some_logits(MOST * DRAFTS, 9).view(MOST, DRAFTS, VOCAB)
    own = v2_rejection_sampler(monkeypatch, draft_logits)
    if not hasattr(own.sampler, "logits_processors"):
        pytest.skip("this vLLM has no list of processors")
    processor = OfEachRowsText()
    own.sampler.logits_processors = [processor]
    own.sampler.needs_logits_processing[SLOTS] = True
    logits = some_logits(ROWS) * 0.2
    logits[:, OfEachRowsText.forbidden] = 9
    inputs = torch.zeros(ROWS, dtype=torch.int32)
    inputs[CU_ROWS[2] + 1 : CU_ROWS[2] + 4] = torch.tensor([9, 9, 10])
    inputs[CU_ROWS[0] + 1 : CU_ROWS[0] + 3] = torch.tensor([7, 8])
    processed = logits.clone()
    for row, local in enumerate(LOCAL):
        processor.change(processed[row], inputs[row - local + 1 : row + 1].tolist())
    parameters = v2_parameters()
    drawn = Sampled(reference.sample(processed, parameters)[0])
    distributions = None
    if draft_logits is not None:
        index = torch.from_numpy(SLOTS[REQUEST] * DRAFTS + LOCAL)
        distributions = Distributions(values=draft_logits.view(-1, VOCAB), index=index)
    drafts = Drafts(inputs=inputs, cu_rows=torch.from_numpy(CU_ROWS).int(), distributions=distributions)
    spec = VerificationSpec(max_drafts=DRAFTS, vocab=VOCAB, known=known)
    expected, expected_counts = definition.verify(drawn, parameters, drafts, spec, processed)
    values, tokens, counts = v2_verify(own, logits.clone(), inputs, draft_logits)
    torch.testing.assert_close(values, processed)
    assert torch.equal(counts, expected_counts)
    assert torch.equal(tokens, expected)


@pytest.mark.skipif(not v2_verification.LOGPROBS_NAMES, reason="this vLLM passes rows in another way")
def test_v2_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each row, from the launch that draws: the tokens that are returned are those that were drawn."""
    own = v2_rejection_sampler(monkeypatch)
    logits = some_logits(ROWS)
    drawn = reference.sample(logits, v2_parameters())[0]
    values, tokens, counts = v2_verify(own, logits, some_drafts(drawn), None)
    assert values is logits
    found = own._get_logprobs_tensors(tokens, counts, values, torch.from_numpy(CU_ROWS), CU_ROWS, 2)
    assert_likeliest(logits, drawn, found, "raw_logprobs", 2)
    assert found.cu_num_generated_tokens == CU_ROWS.tolist()


# Which engines get it.


def test_another_rejection_sampler_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(SamplerV1(), speculative_config=speculation())
    runner.rejection_sampler = type("Foreign", (RejectionSamplerV1,), {})(runner.sampler)
    sampler.decide(runner, V1)
    assert type(runner.sampler) is SamplerV1, "both or none: seeds must agree"
    assert v1_verification.reasons_against(runner) == ["Foreign is not a known rejection sampler"]


def test_many_rows_are_drawn_in_parts() -> None:
    whole, parts = (RowSampler(rows, torch.device("cpu"), logprobs=True) for rows in (ROWS, 3))
    logits, ids = some_logits(ROWS), torch.arange(ROWS)
    k = torch.full((ROWS,), 20, dtype=torch.int32)
    expected = whole.draw(logits, ids, ids, logprobs=True, top_k=k, top_p=None)
    found = parts.draw(logits, ids, ids, logprobs=True, top_k=k, top_p=None)
    assert torch.equal(found.tokens, expected.tokens)
    assert found.logprobs is not None
    assert expected.logprobs is not None
    assert torch.equal(found.logprobs, expected.logprobs)
