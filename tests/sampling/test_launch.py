# SPDX-License-Identifier: Apache-2.0
"""The host side of the CuTe DSL sampler: strides, vectors, which kernels a plan compiles, parameters that are off."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import emulator
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.family import precompile_specs
from dsl_backend.runtime.target import Target, detect, from_arch
from dsl_backend.sampling import api, reference, verification
from dsl_backend.sampling import precompile as sampling_precompile
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.cute import host
from dsl_backend.sampling.cute.kernel import SampleKey
from dsl_backend.sampling.cute.verification import VerifyKey
from dsl_backend.sampling.plan import SamplingPlan
from dsl_backend.sampling.spec import LogprobsMode, Parameters, SamplingSpec, buffers
from dsl_backend.sampling.verification import Known
from dsl_backend.testing.sampling import CASES, FINISHED, assert_kept, tensors, unwritten
from dsl_backend.testing.verification import random_step

H200 = from_arch("sm_90a")
F16 = torch.float16


@pytest.mark.parametrize(
    ("logits", "vector"),
    [
        (torch.zeros(3, 8), 4),
        (torch.zeros(3, 8, dtype=torch.bfloat16), 8),
        (torch.zeros(3, 9)[:, :8], 1),
        (torch.zeros(3, 10)[:, :8], 2),
        (torch.zeros(3, 12)[:, 2:10], 2),
        (torch.zeros(3, 7), 1),
        (torch.zeros(1, 8).expand(3, 8), 4),
        (torch.zeros(1, 8).as_strided((1, 8), (3, 1)), 4),
    ],
)
def test_vectors(logits: torch.Tensor, vector: int) -> None:
    assert host.common_vector(host.with_expected_strides(logits)) == vector


def test_single_logits_may_have_any_stride() -> None:
    column = torch.zeros(3, 8)[:, 2:3]
    assert host.with_expected_strides(column).stride() == (8, 1)
    assert host.with_expected_strides(torch.zeros(28).as_strided((4, 1), (2, 7))).stride() == (2, 1)


def test_a_plan_compiles_what_it_launches() -> None:
    """On the emulator, whose functions come from memory the second time."""
    spec = SamplingSpec(vocab=300)
    device = torch.device("cpu")
    x = 3 * torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    rows = Parameters(seeds=torch.arange(2), positions=torch.arange(2))
    with emulator.device(arch="sm_90a", sms=4, strict=True) as emulated:
        plan = SamplingPlan(spec, H200, 2, device, "cute")
        kernel = plan.kernel
        assert isinstance(kernel, host.CuteSampler)
        compiled = dict(kernel.functions)
        kernel.launch(x, rows, plan.results)
        top_k = Parameters(**{**vars(rows), "top_k": torch.tensor([7, 0], dtype=torch.int32)})
        second = plan.results.rows(1)
        first = plan.results.tokens.clone()
        kernel.launch(x[:1], Parameters(**{n: None if v is None else v[:1] for n, v in vars(top_k).items()}), second)
        assert emulated.launches == 2
    assert kernel.functions == compiled
    assert first.tolist() == reference.sample(x, rows)[0].tolist()
    assert second.tokens.tolist() == reference.sample(x, top_k)[0].tolist()[:1]


def test_a_choice_is_made_once_for_all_that_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch gets the function that it would get without the others."""
    built: list[SampleKey] = []
    launched: list[SampleKey] = []

    def build(key: SampleKey, target: Target) -> Callable[..., None]:
        built.append(key)
        return lambda *tensors: launched.append(key)

    monkeypatch.setattr(host, "build", build)
    spec, device, rows = SamplingSpec(vocab=32768, kept=True), torch.device("cpu"), (1, 40, 200)
    kernel = host.CuteSampler(spec, H200, max(rows), device)
    ints = [torch.zeros(max(rows), dtype=dtype) for dtype in (torch.int32, torch.int64)]
    cases = [
        (count, apart, top_p, top_k, keeps)
        for keeps in (False, True)
        for count in rows
        for apart in (False, True)
        for top_p in (False, True)
        for top_k in (None, *ints)
    ]
    near, wide = torch.zeros(max(rows), spec.vocab), torch.zeros(max(rows), spec.vocab + 1)
    expected = []
    out = buffers(spec, max(rows), device)

    def launch_all() -> None:
        for count, apart, top_p, top_k, keeps in cases:
            parameters = Parameters(
                seeds=ints[1][:count],
                positions=ints[1][:count],
                top_k=None if top_k is None else top_k[:count],
                top_p=torch.ones(count) if top_p else None,
            )
            results = out.rows(count) if keeps else out.rows(count)._replace(kept=None)
            kernel.launch(wide[:count, : spec.vocab] if apart else near[:count], parameters, results)

    for count, apart, top_p, top_k, keeps in cases:
        # Rows of 32769 logits begin at any address; of a single row the stride does not matter.
        vector = 1 if apart and count > 1 else 4
        asked = replace(spec, kept=keeps)
        config = ClusterConfig.default(asked, H200, count, vector, top_p and top_k is None)
        # A second launch would not return what top-p keeps.
        assert not (keeps and config.finish_cluster)
        expected.append(host.key_of(asked, config, torch.int32 if top_k is None else top_k.dtype))
    launch_all()
    monkeypatch.delattr(host, "key_of")
    launch_all()
    assert launched == 2 * expected
    assert len(set(expected)) > 4
    assert len(built) == len(set(built))


def test_a_second_launch_has_its_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where top-p is alone and the configuration asks for it; other launches of the plan have none."""
    _, _, finished = FINISHED

    def default(spec: SamplingSpec, target: Target, rows: int, vector: int, top_p_alone: bool = False) -> ClusterConfig:
        return finished if top_p_alone else replace(finished, finish_cluster=0)

    monkeypatch.setattr(ClusterConfig, "default", default)
    case = next(case for case in CASES if case.id == "finished")
    x, parameters = tensors(case)
    assert case.config == finished
    alone = replace(parameters, top_k=None, min_p=None)
    with emulator.device(arch="sm_90a", sms=4, schedule="eager", strict=True) as emulated:
        kernel = host.CuteSampler(case.spec, H200, len(x), x.device)
        out = buffers(case.spec, len(x), x.device)
        for given, launches in ((alone, 2), (parameters, 1)):
            out.tokens.fill_(-7)
            before = emulated.launches
            kernel.launch(x, given, out)
            assert emulated.launches - before == launches
            assert out.tokens.tolist() == reference.sample(x, parameters)[0].tolist()


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.full)])
def test_log_probabilities_of_rows(arch: str) -> None:
    """The kernel draws, Triton's launches over blocks write the log-probabilities and rank them; the rows are two."""
    pytest.importorskip("triton")
    case = next(case for case in CASES if case.id == "filters")
    x, parameters = tensors(replace(case, rows=case.rows[5:7], vocab=300))
    mode = LogprobsMode.PROCESSED_LOGPROBS
    spec = SamplingSpec(vocab=300, logprobs=True, logprobs_mode=mode, num_logprobs=2)
    out = unwritten(spec, len(x), x.device)
    with emulator.device(arch=arch, sms=4, schedule="eager", strict=True) as emulated:
        kernel = SamplingPlan(spec, from_arch(arch), len(x), x.device).kernel
        assert isinstance(kernel, host.CuteSampler)
        assert kernel.processed is not None
        # Triton's interpreter has no dependent launches.
        sums = kernel.processed.logprobs
        sums.options["OVERLAP"], sums.later = False, sums.options
        kernel.launch(x, parameters, out)
        assert emulated.launches == 1
    tokens, logprobs = reference.sample(x, parameters)
    assert out.logprobs is not None
    assert out.top_ids is not None
    assert out.token_ranks is not None
    assert torch.equal(out.tokens, tokens)
    assert torch.equal(out.logprobs.isfinite(), logprobs.isfinite())
    torch.testing.assert_close(out.logprobs, logprobs, rtol=1e-5, atol=1e-5)
    ids, _, ranks = reference.likeliest(logprobs, logprobs, tokens, 2)
    assert torch.equal(out.top_ids.long(), ids)
    assert torch.equal(out.token_ranks.long(), ranks)


@pytest.mark.parametrize(
    ("known", "filters"),
    [
        (Known.LOGITS, ("top_k", "top_p")),
        (Known.LOGITS, ("top_p",)),
        (Known.PROBABILITIES, ("top_k", "top_p", "min_p")),
    ],
)
def test_the_ratio_test_behind_what_filters_keep(
    known: Known, filters: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of the definition, with no launch that looks for what they keep; many logits are ties."""
    pytest.importorskip("triton")
    from dsl_backend.sampling.triton import verification_host

    device = torch.device("cpu")
    step = random_step(2, known, 600, device, filters=filters)
    step = replace(step, logits=step.logits.round())
    rows = len(step.logits)
    monkeypatch.setattr(verification_host.TritonVerifier, "filter", lambda *_: pytest.fail("looks for it again"))
    with emulator.device(arch="sm_90a", sms=4, schedule="random", strict=True):
        sampler = SamplingPlan(SamplingSpec(vocab=600, kept=True), H200, rows, device, "cute")
        drawn = api.run(sampler, step.logits, step.parameters, kept=True)
    step = replace(step, drawn=drawn)
    assert drawn.kept is not None
    assert_kept(step.logits, step.parameters, drawn.kept)
    verifier = verification.plan(step.spec, step.drafts.requests, rows, device, "triton")
    found = verification.run(verifier, *step.given, step.logits)
    tokens, counts = step.expected()
    assert torch.equal(found.tokens.long(), tokens)
    assert torch.equal(found.counts, counts)


@pytest.mark.parametrize(
    ("known", "dtype"), [(Known.LOGITS, torch.float32), (Known.LOGITS, torch.bfloat16), (Known.PROBABILITIES, F16)]
)
def test_the_ratio_test_without_filters_sums_no_row_again(
    known: Known, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of the definition; with rows of infinite logits and NaN, greedy ones, and the largest temperature."""
    pytest.importorskip("triton")
    from dsl_backend.sampling.triton import verification_host

    device = torch.device("cpu")
    step = random_step(3, known, 1100, device, filters=())
    logits, temperature = step.logits.to(dtype), step.parameters.temperature
    assert temperature is not None
    logits[4, 3::7] = torch.nan
    logits[9, 600] = torch.inf
    logits[10, :512] = -torch.inf
    logits[18] = torch.nan
    temperature[3], temperature[12], temperature[13], temperature[24] = torch.inf, 1e-5, 0.0, 40.0
    step = replace(step, logits=logits)
    summed: list[tuple[Any, ...]] = []
    sum_rows = verification_host.TritonVerifier.sum_rows

    def recorded(self: verification_host.TritonVerifier, *given: Any) -> None:
        summed.append(given[3:])
        sum_rows(self, *given)

    monkeypatch.setattr(verification_host.TritonVerifier, "sum_rows", recorded)
    with emulator.device(arch="sm_90a", sms=4, schedule="random", strict=True):
        spec = SamplingSpec(vocab=1100, dtype=dtype, kept=True)
        sampler = SamplingPlan(spec, H200, len(logits), device, "cute")
        drawn = api.run(sampler, logits, step.parameters, kept=True)
    step = replace(step, drawn=drawn)
    assert drawn.kept is not None
    assert_kept(logits, step.parameters, drawn.kept)
    verifier = verification.plan(step.spec, step.drafts.requests, len(logits), device, "triton")
    found = verification.run(verifier, *step.given, logits)
    tokens, counts = step.expected()
    assert torch.equal(found.tokens.long(), tokens)
    assert torch.equal(found.counts, counts)
    # Drafts alone.
    assert summed == ([(1, False)] if known is Known.LOGITS else [])


def test_what_filters_keep_is_returned_where_a_step_asks_for_it() -> None:
    """By a kernel of its own, also without filters."""
    device = torch.device("cpu")
    x = 3 * torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    rows = Parameters(seeds=torch.arange(2), positions=torch.arange(2))
    filtered = replace(rows, min_p=torch.tensor([0.0, 0.1]))
    with emulator.device(arch="sm_90a", sms=4, strict=True):
        plan = SamplingPlan(SamplingSpec(vocab=300, kept=True), H200, 2, device, "cute")
        assert isinstance(plan.kernel, host.CuteSampler)
        compiled = dict(plan.kernel.functions)
        assert {key.keeps for key in compiled} == {False, True}
        assert api.run(plan, x, filtered).kept is None
        assert api.run(plan, x, rows).kept is None
        whole = api.run(plan, x, rows, kept=True).kept
        assert whole is not None
        assert_kept(x, rows, whole)
        kept = api.run(plan, x, filtered, kept=True).kept
    assert plan.kernel.functions == compiled
    assert kept is not None
    assert_kept(x, filtered, kept)
    unasked = SamplingPlan(SamplingSpec(vocab=300), detect(device), 2, device, "reference")
    with pytest.raises(InvalidInput, match=r"a plan of a spec with kept=True is needed"):
        api.run(unasked, x, filtered, kept=True)


def test_precompile_specs_of_a_model() -> None:
    from dsl_backend.runtime.model import ModelShape

    shape = ModelShape(dtype="bfloat16", hidden_size=64, heads_q=1, heads_kv=1, head_dim=64, vocab_size=151936)
    keys = [one.key for one in precompile_specs(shape, H200, ["sampling"])]
    verification = [key for key in keys if isinstance(key, VerifyKey)]
    for keeps in (False, True):
        found = {key.config.cluster for key in keys if isinstance(key, SampleKey) and key.keeps == keeps}
        assert found == {1, 2, 4, 8, 16}
    assert {key.token_dtype for key in verification} == {"int64", "int32"}
    assert list(sampling_precompile.precompile_specs(shape, from_arch("sm_120"))) == []
