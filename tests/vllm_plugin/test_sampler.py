# SPDX-License-Identifier: Apache-2.0
"""vLLM's own samplers with our draw inside: which engines get it, what comes out, and what it never does."""

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler as SamplerV1
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2
from vllm.v1.worker.gpu.states import RequestState

from dsl_backend import log
from dsl_backend.runtime.target import from_arch
from dsl_backend.sampling import reference
from dsl_backend.sampling.reference import ReferenceSampler
from dsl_backend.sampling.spec import LogprobsMode, Parameters
from dsl_backend.vllm_plugin import compat
from dsl_backend.vllm_plugin.enum_members import ensure_member
from dsl_backend.vllm_plugin.sampler import replace as sampler
from dsl_backend.vllm_plugin.sampler import row_sampler
from dsl_backend.vllm_plugin.sampler import v1 as sampler_v1
from dsl_backend.vllm_plugin.sampler import v2 as sampler_v2
from dsl_backend.vllm_plugin.sampler.replace import V1, V2
from dsl_backend.vllm_plugin.sampler.row_sampler import Likeliest, Returned, likeliest_of

VOCAB, MOST = 200, 16
CPU = torch.device("cpu")


class Runner:
    """As much of a model runner as its sampler sees."""

    def __init__(self, own: Any, **changes: Any) -> None:
        model = {"logprobs_mode": own.logprobs_mode, "get_vocab_size": lambda: VOCAB, "dtype": torch.float32}
        config = {
            "speculative_config": None,
            "additional_config": {"dsl": {"logprobs": "dsl"}},
            "attention_config": SimpleNamespace(backend=ensure_member()),
        }
        self.sampler: Any = own
        self.device, self.max_num_reqs = CPU, MOST
        self.positions = torch.arange(100)
        self.query_start_loc = SimpleNamespace(gpu=torch.arange(MOST + 1, dtype=torch.int32))
        self.input_batch = SimpleNamespace(logitsprocs=LogitsProcessors([min_p()]))
        for names in (model, config):
            names |= {name: changes.pop(name) for name in list(changes) if name in names}
        model |= changes.pop("model", {})
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(**model), **config)
        self.__dict__ |= changes

    def _sample(self, *args: Any) -> Any:
        return self.sampler(*args)

    sample = _dummy_sampler_run = _sample


def min_p(values: torch.Tensor | None = None) -> MinPLogitsProcessor:
    """VLLM's processor as it is after a step's update."""
    processor = MinPLogitsProcessor(
        SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=MOST)), CPU, is_pin_memory=False
    )
    if values is not None:
        processor.min_p_count, processor.min_p = int((values > 0).sum()), values.unsqueeze(1)
    return processor


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is logged once in a process is logged once in every test; vLLM compiles no helpers, which takes a minute."""
    log.info_once.cache_clear()
    # The reference draws: kernels are compared with it elsewhere, and Triton's interpreter is slow.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with torch._dynamo.config.patch(disable=True):
        yield


# Which engines get it.


def taken_over(module: str, own: Any, **changes: Any) -> bool:
    runner = Runner(own, **changes)
    sampler.decide(runner, module)
    return type(runner.sampler).__name__ == "DSLSampler"


def v2_sampler(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """VLLM's own, on a CPU."""

    class HostBuffer:
        """In the place of memory that a GPU and the host share."""

        def __init__(self, size: Any, dtype: torch.dtype) -> None:
            self.cpu = torch.zeros(size, dtype=dtype)
            self.np = self.cpu.numpy()
            # 0.26 has a tensor there, later versions a method.
            self.uva = self.view if hasattr(buffer_utils, "NonUvaBuffer") else self.cpu

        def view(self, n: int | None = None) -> torch.Tensor:
            return self.cpu[:n]

    monkeypatch.setattr(buffer_utils, "UvaBuffer", HostBuffer)
    requests = RequestState(MOST, 64, 64, 0, VOCAB, CPU)
    if "vllm_config" in inspect.signature(SamplerV2.__init__).parameters:
        options["vllm_config"] = VllmConfig()
    return SamplerV2(max_num_reqs=MOST, vocab_size=VOCAB, device=CPU, req_states=requests, **options)


@pytest.fixture(params=[V1, V2], ids=["V1", "V2"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Callable[..., Any]]:
    """A runner's module, and a function that makes its sampler."""
    if request.param == V1:
        return V1, SamplerV1
    return V2, lambda **options: v2_sampler(monkeypatch, **options)


def test_an_ordinary_engine(made: Any) -> None:
    module, make = made
    assert taken_over(module, make())
    assert taken_over(module, make(logprobs_mode="processed_logprobs"))
    assert taken_over(module, make(), backend_per_kind={"full": ensure_member()})


def test_another_backend(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    module, make = made
    for backend in (None, SimpleNamespace(name="FLASH_ATTN")):
        assert not taken_over(module, make(), attention_config=SimpleNamespace(backend=backend))
    mixed = SimpleNamespace(backend=None, backend_per_kind={"sliding_window": ensure_member()})
    assert taken_over(module, make(), attention_config=mixed)
    assert "vLLM's own sampler" not in caplog.text


def test_the_switch(made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    module, make = made
    monkeypatch.setenv("DSL_BACKEND_SAMPLER", "0")
    with caplog.at_level(logging.INFO):
        assert not taken_over(module, make())
    assert "vLLM's own sampler draws the tokens: DSL_BACKEND_SAMPLER is off" in caplog.text


def speculation(**changes: Any) -> SimpleNamespace:
    """As much of vLLM's speculative config as is read."""
    usual = {"num_speculative_tokens": 3, "rejection_sample_method": "standard", "draft_sample_method": "greedy"}
    return SimpleNamespace(**usual | changes)


class Foreign(SamplerV1):
    """Of somebody else's."""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speculative_config": speculation(rejection_sample_method="block")}, "rejection_sample_method block"),
        ({"speculative_config": speculation(rejection_sample_method="synthetic")}, "rejection_sample_method synthetic"),
        ({"speculative_config": speculation(rejection_sample_method="fly")}, "rejection_sample_method fly"),
        ({"speculative_config": speculation(enable_adaptive_verification=True)}, "enable_adaptive_verification"),
        ({"speculative_config": speculation(num_speculative_tokens=129)}, "max_drafts is 129"),
        ({"model": {"use_fp64_gumbel": True}}, "use_fp64_gumbel"),
        ({"logprobs_mode": "processed_logits"}, "processed_logits returns"),
        ({"model": {"return_sampling_mask": True}}, "return_sampling_mask"),
        ({"batch_sharder": object()}, "enable_batch_sharded_sampling"),
        ({"get_vocab_size": lambda: 2**21 + 1}, "2097153"),
    ],
)
def test_what_keeps_vllms(made: Any, changes: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture) -> None:
    module, make = made
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert not taken_over(module, make(), **changes)
    lines = [record.getMessage() for record in caplog.records if "vLLM's own sampler" in record.getMessage()]
    assert len(lines) == 1, "said once"
    assert says in lines[0]


def test_what_keeps_v1s() -> None:
    assert not taken_over(V1, Foreign())
    late = LogitBiasLogitsProcessor(None, CPU, False)
    processors = SimpleNamespace(argmax_invariant=[min_p(), late])
    runner = Runner(SamplerV1(), input_batch=SimpleNamespace(logitsprocs=processors))
    assert sampler_v1.reasons_against(runner) == [
        "logits processor LogitBiasLogitsProcessor runs after the temperature"
    ]


def test_what_keeps_v2s(monkeypatch: pytest.MonkeyPatch) -> None:
    own = v2_sampler(monkeypatch)
    own.__class__ = type("GPUWatermarkSampler", (SamplerV2,), {})
    assert not taken_over(V2, own)


# How it gets there.


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runner is decided on before its first use of the sampler, and once."""
    decided = []
    monkeypatch.setattr(sampler, "decide", lambda runner, module: decided.append(module))

    class GPUModelRunner(Runner):
        pass

    module = ModuleType(V1)
    module.GPUModelRunner = GPUModelRunner  # type: ignore[attr-defined]
    monkeypatch.setitem(sampler.sys.modules, V1, module)
    monkeypatch.delitem(sampler.sys.modules, V2, raising=False)
    sampler.install()
    once = GPUModelRunner._sample
    sampler.install()
    assert GPUModelRunner._sample is once, "a second layer wraps nothing again"
    assert decided == []
    own = SimpleNamespace(logprobs_mode="raw_logprobs")
    for _ in range(2):
        runner = GPUModelRunner(own)
        runner.sampler = lambda *args: args
        assert runner._dummy_sampler_run(1) == (1,)
        assert runner._sample(2, 3) == (2, 3)
    assert decided == [V1, V1]


def test_install_where_a_method_is_gone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A later vLLM serves on, with its own sampler."""
    module = ModuleType(V1)
    module.GPUModelRunner = type("GPUModelRunner", (), {"_sample": lambda self: None})  # type: ignore[attr-defined]
    monkeypatch.setitem(sampler.sys.modules, V1, module)
    sampler.install()
    assert "no _dummy_sampler_run" in caplog.text
    assert not hasattr(module.GPUModelRunner._sample, "wrapped_by_dsl")


def test_the_methods_are_vllms() -> None:
    import importlib

    for module, methods in sampler.USERS.items():
        runner_class = importlib.import_module(module).GPUModelRunner
        for name in methods:
            source = inspect.getsource(getattr(runner_class, name))
            assert "self.sampler(" in source, f"{module}.{name} does not use the sampler"


# V1: what comes out.


def adopted(mode: str = "raw_logprobs") -> Runner:
    runner = Runner(SamplerV1(logprobs_mode=mode))  # type: ignore[arg-type]
    sampler.decide(runner, V1)
    return runner


def step(rows: int, **changes: Any) -> SamplingMetadata:
    """A step of rows with all filters, with seeds for all but the last; the first row is greedy, and has no filter."""
    numbers = torch.Generator().manual_seed(3)
    temperature = torch.rand(rows, generator=numbers) + 0.3
    top_p = torch.rand(rows, generator=numbers) * 0.5 + 0.5
    top_k = torch.randint(1, VOCAB + 1, (rows,), generator=numbers, dtype=torch.int32)
    least = torch.rand(rows, generator=numbers) * 0.9
    temperature[0], top_p[0], top_k[0], least[0] = 0.0, 1.0, VOCAB, 0.0
    facts: dict[str, Any] = {
        "temperature": temperature,
        "all_greedy": False,
        "all_random": False,
        "top_p": top_p,
        "top_k": top_k,
        "generators": {row: torch.Generator().manual_seed(100 + row) for row in range(rows - 1)},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": torch.zeros(rows),
        "presence_penalties": torch.zeros(rows),
        "repetition_penalties": torch.ones(rows),
        "output_token_ids": [],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors([min_p(least)]),
    }
    return SamplingMetadata(**facts | changes)


def some_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def by_definition(logits: torch.Tensor, metadata: SamplingMetadata, positions: torch.Tensor) -> torch.Tensor:
    """Tokens of the rows with seeds; 0 seeds for the others."""
    rows = len(logits)
    seeds = torch.tensor([100 + row for row in range(rows - 1)] + [0])
    processor = metadata.logitsprocs.argmax_invariant[0]
    parameters = Parameters(
        seeds=seeds,
        positions=positions,
        temperature=metadata.temperature,
        top_k=metadata.top_k,
        top_p=metadata.top_p,
        min_p=processor.min_p.view(-1),  # type: ignore[attr-defined]
    )
    return reference.sample(logits, parameters)[0]


def tokens_of(runner: Runner, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    return runner.sampler.sample(logits.clone(), metadata)[0].clone()


def test_v1_tokens_are_those_of_the_definition() -> None:
    runner = adopted()
    runner.positions = torch.arange(100) * 7
    for turn in range(3):
        logits = some_logits(8, turn)
        metadata = step(8)
        tokens = tokens_of(runner, logits, metadata)
        assert torch.equal(tokens[:-1], by_definition(logits, metadata, torch.arange(8) * 7)[:-1])
        assert tokens[0] == logits[0].argmax()


def test_v1_positions_are_the_last_tokens() -> None:
    """Of queries of several tokens, as vLLM lays them out."""
    runner = adopted()
    runner.query_start_loc.gpu = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    runner.positions = torch.tensor([5, 6, 7, 50, 0, 1, 2, 3, 4])
    assert compat.last_positions(runner, 3).tolist() == [7, 50, 4]
    assert compat.last_positions(runner, 2).dtype == torch.int64


def test_v1_alone_and_among_others() -> None:
    """A request with a seed draws the same token in whichever row it is, and whatever is beside it."""
    runner = adopted()
    logits = some_logits(8)
    among = tokens_of(runner, logits, step(8))
    full = step(8)
    for row in range(1, 7):
        runner.positions = torch.full((100,), row)
        alone = step(
            8,
            temperature=full.temperature[row : row + 1],  # type: ignore[index]
            top_p=full.top_p[row : row + 1],  # type: ignore[index]
            top_k=full.top_k[row : row + 1],  # type: ignore[index]
            generators={0: torch.Generator().manual_seed(100 + row)},
            all_random=True,
            logitsprocs=LogitsProcessors([min_p(full.logitsprocs.argmax_invariant[0].min_p[row])]),  # type: ignore[attr-defined]
        )
        assert tokens_of(runner, logits[row : row + 1], alone) == among[row]


def test_v1_without_a_seed() -> None:
    """Random at every step, by torch's generator of the device, which is the same on all ranks."""
    runner = adopted()
    flat = torch.zeros(MOST, VOCAB)
    metadata = step(MOST, generators={}, temperature=torch.ones(MOST), top_p=None, top_k=None, all_random=True)
    metadata.logitsprocs = LogitsProcessors([min_p()])
    torch.manual_seed(0)
    first, second = tokens_of(runner, flat, metadata), tokens_of(runner, flat, metadata)
    assert len(set(first.tolist())) > MOST // 2
    assert (first == second).sum() < MOST // 2
    torch.manual_seed(0)
    assert torch.equal(tokens_of(runner, flat, metadata), first)


def test_v1_sends_seeds_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = adopted()
    sent: list[dict[int, int]] = []
    send = runner.sampler.seeds.send
    monkeypatch.setattr(runner.sampler.seeds, "send", lambda seeds: (sent.append(seeds), send(seeds)))
    logits = some_logits(4)
    metadata = step(4)
    for _ in range(3):
        tokens_of(runner, logits, metadata)
    assert len(sent) == 1
    # The request of row 0 ends and the last one takes its row, as vLLM's batches are condensed.
    metadata.generators[0] = metadata.generators.pop(2)
    moved = tokens_of(runner, logits, metadata)
    assert sent[1:] == [{0: 102, 1: 101}]
    runner.positions = torch.arange(100)
    metadata.generators = {0: torch.Generator().manual_seed(102), 1: torch.Generator().manual_seed(101)}
    assert torch.equal(tokens_of(runner, logits, metadata)[:2], moved[:2])
    assert len(sent) == 2


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -1, -(2**63)])
def test_v1_seeds_of_any_size(seed: int) -> None:
    generators: dict[int, Any] = {0: torch.Generator().manual_seed(seed)}
    (value,) = compat.seeds_of(generators).values()
    assert -(2**63) <= value < 2**63
    # As vLLM's runner does with the token of an unfinished prompt.
    generators[0].set_offset(generators[0].get_offset() - 4)
    assert compat.seeds_of(generators) == {0: value}


def test_v1_all_greedy_is_vllms() -> None:
    runner = adopted()
    runner.sampler.rows = None
    logits = some_logits(3)
    metadata = step(3, all_greedy=True, temperature=None)
    assert torch.equal(tokens_of(runner, logits, metadata), logits.argmax(-1))


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs"])
@pytest.mark.parametrize("asked", [0, 3, -1])
def test_v1_logprobs_are_vllms(mode: str, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that vLLM's own sampler gives for the same tokens, from the same logits."""
    logits, rows = some_logits(6), 6
    runner = adopted(mode)
    theirs = SamplerV1(logprobs_mode=mode)  # type: ignore[arg-type]
    ours = runner.sampler(logits.clone(), step(rows, max_num_logprobs=asked))
    drawn = ours.sampled_token_ids.view(-1).long()
    # Its draw is another: the tokens of ours, and its own masks.
    forward = theirs.topk_topp_sampler.forward
    monkeypatch.setattr(theirs.topk_topp_sampler, "forward", lambda *args: (drawn.clone(), forward(*args)[1]))
    monkeypatch.setattr(theirs, "greedy_sample", lambda logits: drawn.clone())
    expected = theirs(logits.clone(), step(rows, max_num_logprobs=asked)).logprobs_tensors
    found = ours.logprobs_tensors
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    if asked >= 0:
        assert found.logprobs.isfinite()[:, 0].all()
        assert torch.equal(found.selected_token_ranks, expected.selected_token_ranks)
        # Beyond what the filters leave, any id is as good as another.
        finite = expected.logprobs.isfinite()
        assert torch.equal(found.logprob_token_ids[finite], expected.logprob_token_ids[finite])


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
def test_v1_16_bits_are_not_copied(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, and the likeliest with the lower id first of equal ones, from the model's logits as they are."""
    runner = adopted(mode)
    seen = []
    run = row_sampler.api.run

    def seeing(plan: Any, logits: torch.Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(logits)
        return run(plan, logits, *rest, **options)

    monkeypatch.setattr(row_sampler.api, "run", seeing)
    logits = some_logits(6).to(torch.bfloat16)
    ours = runner.sampler(logits, step(6, max_num_logprobs=5))
    assert seen[-1] is logits
    assert ours.sampled_token_ids.dtype == torch.int32
    # The last row has no seed.
    assert torch.equal(ours.sampled_token_ids[:-1], runner.sampler(logits, step(6)).sampled_token_ids[:-1])
    assert_likeliest(logits, ours.sampled_token_ids.view(-1), ours.logprobs_tensors, mode)
    kept = [tensor.clone() for tensor in ours.logprobs_tensors[:3]]
    runner.sampler(-logits, step(6, max_num_logprobs=5))
    assert all(map(torch.equal, kept, ours.logprobs_tensors[:3])), "vLLM reads them while the next step draws"


def assert_likeliest(logits: torch.Tensor, tokens: torch.Tensor, found: Any, mode: str, count: int = 5) -> None:
    """VLLM's log-probabilities of the tokens and of the likeliest ones, and the tokens' ranks."""
    values = logits.float() if mode == "raw_logits" else logits.float().log_softmax(-1)
    chosen = tokens.long().unsqueeze(1)
    ids = torch.cat([chosen, logits.float().sort(descending=True, stable=True).indices[:, :count]], 1)
    assert torch.equal(found.logprob_token_ids.long(), ids)
    torch.testing.assert_close(found.logprobs, values.gather(1, ids), rtol=1e-5, atol=1e-5)
    assert found.selected_token_ranks.dtype == torch.int64
    assert torch.equal(found.selected_token_ranks, (values >= values.gather(1, chosen)).sum(-1))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_logprobs": 21},
        {"max_num_logprobs": 2, "logprob_token_ids": {0: [3, 4]}},
        {"max_num_logprobs": 2, "bad_words_token_ids": {0: [[3]]}, "output_token_ids": [[1]] * 4},
        {"max_num_logprobs": 2, "allowed_token_ids_mask": torch.zeros(4, VOCAB, dtype=torch.bool)},
        {"all_greedy": True, "temperature": None},
    ],
)
def test_v1_what_vllm_still_returns(changes: dict[str, Any]) -> None:
    """More than the engine allows, log-probabilities of given tokens, logits that it changes, all greedy."""
    runner = adopted()
    assert not runner.sampler.draws_from_given(step(4, **changes))
    assert runner.sampler.draws_from_given(step(4, max_num_logprobs=2))
    output = runner.sampler(some_logits(4), step(4, **changes))
    assert (output.logprobs_tensors is None) == ("max_num_logprobs" not in changes)


def test_what_may_be_asked_for() -> None:
    config = Runner(SimpleNamespace(logprobs_mode="")).vllm_config
    assert likeliest_of("raw_logprobs", config, CPU) == Likeliest(LogprobsMode.RAW_LOGPROBS, 20)
    assert likeliest_of("processed_logprobs", config, CPU) is None
    for allowed, count in ((-1, 128), (500, 128), (3, 3)):
        config.model_config.max_logprobs = allowed
        assert likeliest_of("raw_logits", config, CPU) == Likeliest(LogprobsMode.RAW_LOGITS, count)
    for served_by in ("measured", "vllm"):
        config.additional_config = {"dsl": {"logprobs": served_by}}
        assert likeliest_of("raw_logprobs", config, CPU) is None


def test_triton_leaves_them_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sampler.targets, "detect", lambda device: from_arch("sm_80"))
    assert likeliest_of("raw_logprobs", Runner(SimpleNamespace(logprobs_mode="")).vllm_config, CPU) is None


def test_v1_leaves_what_it_hands_out() -> None:
    """The next step overwrites nothing that vLLM may still read."""
    runner = adopted("processed_logprobs")
    first = runner.sampler(some_logits(4, 1), step(4, max_num_logprobs=-1))
    kept = first.sampled_token_ids.clone(), first.logprobs_tensors.logprobs.clone()
    runner.sampler(some_logits(4, 2), step(4, max_num_logprobs=-1))
    assert torch.equal(first.sampled_token_ids, kept[0])
    assert torch.equal(first.logprobs_tensors.logprobs, kept[1])


# V2: what comes out.


def adopted_v2(monkeypatch: pytest.MonkeyPatch, requests: list[SamplingParams], mode: str = "raw_logprobs") -> Any:
    """VLLM's sampler, taken over, that knows some requests: number n is in slot MOST - 1 - n."""
    runner = Runner(v2_sampler(monkeypatch, logprobs_mode=mode))
    sampler.decide(runner, V2)
    own = runner.sampler
    for number, request in enumerate(requests):
        add_request(own, number, request)
    own.sampling_states.apply_staged_writes()
    return own


def add_request(own: Any, number: int, request: SamplingParams) -> None:
    request.update_from_generation_config({}, None)
    # 0.26 wants the prompt's length too.
    length = [1] if "prompt_len" in inspect.signature(own.add_request).parameters else []
    own.add_request(MOST - 1 - number, *length, request)


def v2_step(own: Any, logits: torch.Tensor, numbers: list[int], positions: list[int], **options: Any) -> Any:
    """The arguments of vLLM's own call, of the requests of some numbers in that order."""
    slots = [MOST - 1 - number for number in numbers]
    facts = {
        "logits": logits,
        "expanded_idx_mapping": torch.tensor(slots, dtype=torch.int32),
        "idx_mapping": torch.tensor(slots, dtype=torch.int32),
        "idx_mapping_np": np.array(slots, dtype=np.int32),
        "pos": torch.tensor(positions),
        "input_ids": torch.zeros(len(slots), dtype=torch.int32),
        "expanded_local_pos": torch.zeros(len(slots), dtype=torch.int32),
        "seq_lens_upper_bound_np": np.array(positions) + 1,
    }
    names = [name for name in sampler_v2.NAMES if name != "return_logprobs"]
    return own.sample(*(facts[name] for name in names), **options)


REQUESTS = [
    {"temperature": 0.0},
    {"temperature": 1.5, "top_k": 100, "top_p": 0.99, "min_p": 0.3, "seed": 5},
    {"temperature": 1.0, "seed": -7},
    {"temperature": 1.5, "top_p": 0.5, "seed": 2**62},
    {"temperature": 0.9, "top_k": 3},
]


def params() -> list[SamplingParams]:
    return [SamplingParams(**request) for request in REQUESTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_v2_tokens_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    own = adopted_v2(monkeypatch, params())
    numbers = [3, 0, 2, 1]
    chosen = [REQUESTS[number] for number in numbers]
    for turn in range(5):
        positions = [9 + turn, 8, 7 * turn, 6]
        logits = some_logits(4, turn).to(dtype)
        before = logits.clone()
        tokens, returned = v2_step(own, logits, numbers, positions)
        parameters = Parameters(
            seeds=torch.tensor([one.get("seed", 0) for one in chosen]),
            positions=torch.tensor(positions),
            temperature=torch.tensor([one["temperature"] for one in chosen]),
            top_k=torch.tensor([one.get("top_k", 0) for one in chosen]),
            top_p=torch.tensor([one.get("top_p", 1.0) for one in chosen]),
            min_p=torch.tensor([one.get("min_p", 0.0) for one in chosen]),
        )
        assert torch.equal(tokens, reference.sample(before, parameters)[0])
        assert tokens[1] == before[1].argmax()
        assert torch.equal(logits, before)
        assert torch.equal(returned, before)


def test_v2_alone_and_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    own = adopted_v2(monkeypatch, params())
    logits = some_logits(5)
    among, _ = v2_step(own, logits, [0, 1, 2, 3, 4], [3, 4, 5, 6, 7])
    kept = among.clone()
    for number in range(5):
        alone, _ = v2_step(own, logits[number : number + 1], [number], [3 + number])
        assert alone == among[number]
    v2_step(own, -logits, [4, 3, 2, 1, 0], [0] * 5)
    assert torch.equal(among, kept), "vLLM reads the tokens of a step while the next one draws"


def test_v2_processed_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what vLLM takes the log-softmax of: it changes nothing."""
    own = adopted_v2(monkeypatch, params(), "processed_logprobs")
    logits = some_logits(3)
    tokens, scores = v2_step(own, logits, [1, 2, 0], [3, 4, 5], return_logprobs=True)
    assert scores.isfinite().gather(1, tokens.unsqueeze(1)).all()
    left = scores.isfinite().sum(-1)
    assert left[0] < 100
    assert left[1:].tolist() == [VOCAB, VOCAB]
    torch.testing.assert_close(scores.log_softmax(-1), scores, rtol=1e-5, atol=1e-5)
    assert torch.equal(v2_step(own, logits, [1, 2, 0], [3, 4, 5])[0], tokens)


@pytest.mark.skipif(not hasattr(SamplerV2, "get_logprobs_dims"), reason="this vLLM has no such method")
@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
def test_v2_likeliest(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the launch that draws; vLLM's own, which needs a GPU, is not called."""
    own = adopted_v2(monkeypatch, [SamplingParams(**one, logprobs=5) for one in REQUESTS], mode)
    slots = torch.tensor([MOST - 1 - number for number in (3, 1, 0)], dtype=torch.int32)
    batch = SimpleNamespace(
        num_reqs=3,
        idx_mapping=slots,
        idx_mapping_np=slots.numpy(),
        expanded_idx_mapping=slots,
        expanded_local_pos=torch.zeros(3, dtype=torch.int32),
        cu_num_logits=torch.arange(4, dtype=torch.int32),
        cu_num_logits_np=np.arange(4),
        positions=torch.arange(3),
        input_ids=torch.zeros(3, dtype=torch.int32),
        logits_indices=torch.arange(3),
        seq_lens=torch.ones(3, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.ones(3, dtype=torch.int32),
    )
    module = importlib.import_module(SamplerV2.__module__)
    monkeypatch.setattr(module, "get_num_sampled_and_rejected", lambda counts, *rest: (counts, counts * 0))
    monkeypatch.setattr(module, "compute_topk_scores", None)
    logits = some_logits(3).to(torch.bfloat16)
    output = own(logits, batch)
    assert_likeliest(logits, output.sampled_token_ids.view(-1), output.logprobs_tensors, mode)
    assert output.logprobs_tensors.cu_num_generated_tokens is None
    kept = [tensor.clone() for tensor in output.logprobs_tensors[:3]]
    own(-logits, batch)
    assert all(map(torch.equal, kept, output.logprobs_tensors[:3])), "vLLM reads them while the next step draws"
    # The kernel returns no more than an engine allows, and logits that vLLM changes are not the model's.
    assert own.likeliest_of_step(batch.idx_mapping_np) == 5
    assert own.get_logprobs_dims(batch.idx_mapping_np) == (5, 0)
    own.needs_logits_processing[slots[1]] = True
    assert own.likeliest_of_step(batch.idx_mapping_np) is None
    assert own.likeliest_of_step(batch.idx_mapping_np[:1]) == 5
    add_request(own, 3, SamplingParams(logprobs=21))
    assert own.likeliest_of_step(batch.idx_mapping_np[:1]) is None


def test_v2_needs_no_copy_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temperature and filters alone are no reason for vLLM to process logits."""
    own = adopted_v2(monkeypatch, params())
    logits = some_logits(5).to(torch.bfloat16)
    _, returned = v2_step(own, logits, [0, 1, 2, 3, 4], [0] * 5)
    assert returned.data_ptr() == logits.data_ptr()


class Launches(TorchDispatchMode):
    """The operators of torch that a step runs beside the kernel's launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def all_greedy_are_drawn_as_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sampler_v2, "all_greedy", lambda temperatures: False)


def one_greedy_is_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sampler_v2, "all_greedy", lambda temperatures: not temperatures.all())


def tokens_stay_in_the_buffers(patch: pytest.MonkeyPatch) -> None:
    run = row_sampler.api.run
    patch.setattr(row_sampler.api, "run", lambda *given, new_tokens=False, kept=False: run(*given, kept=kept))


def greedy_steps_of_v2(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is wrong with steps in which all, and some, requests are greedy."""
    own = adopted_v2(monkeypatch, [*params(), SamplingParams(temperature=0.0)])
    logits, wrong = some_logits(6), []
    v2_step(own, logits, [0, 1, 2, 3, 4, 5], [0] * 6)  # makes the plans
    with Launches() as counted:
        tokens, _ = v2_step(own, logits[:2], [0, 5], [3, 4])
    if "index" in counted.names:
        wrong.append("looks up")
    kept = tokens.clone()
    v2_step(own, -logits[:2], [0, 5], [3, 4])
    if not torch.equal(tokens, kept):
        wrong.append("overwrites what vLLM still reads")
    if not torch.equal(tokens, logits[:2].argmax(-1)):
        wrong.append("greedy tokens")
    for position in range(8):
        alone, _ = v2_step(own, logits[1:2], [2], [position])
        if not torch.equal(v2_step(own, logits[:2], [0, 2], [3, position])[0][1:], alone):
            return [*wrong, "others' tokens"]
    return wrong


def test_v2_greedy_steps_look_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert greedy_steps_of_v2(monkeypatch) == []


@pytest.mark.parametrize(
    ("mistake", "seen"),
    [
        (all_greedy_are_drawn_as_others, "looks up"),
        (one_greedy_is_enough, "others' tokens"),
        (tokens_stay_in_the_buffers, "overwrites what vLLM still reads"),
    ],
)
def test_v2_mistakes_of_greedy_steps_are_seen(mistake: Any, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    assert seen in greedy_steps_of_v2(monkeypatch)


def test_v2_asks_once_where_vllm_finds_the_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not whether our kernel could find them too, in a step with log-probabilities."""
    own = adopted_v2(monkeypatch, [SamplingParams(logprobs=5)])
    own.rows.likeliest = None
    monkeypatch.setattr(SamplerV2, "get_logprobs_dims", None, raising=False)
    assert own.likeliest_of_step(np.array([MOST - 1])) is None


def test_greedy_rows_in_parts() -> None:
    """Of a step with more rows than a launch has."""
    rows = row_sampler.RowSampler(2, torch.device("cpu"))
    logits = some_logits(5)
    parameters = rows.greedy_parameters(torch.zeros(5, dtype=torch.int64))
    assert torch.equal(rows.draw(logits, **vars(parameters)).tokens, logits.argmax(-1))


def test_v2_second_dummy_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM 0.33 adds requests that use every filter after a first run, and runs the same rows again.

    Penalties, logit bias and bad words are left out: vLLM applies them with Triton kernels, which need a GPU.
    """
    own = adopted_v2(monkeypatch, [])
    logits = some_logits(4)
    v2_step(own, logits, [0, 1, 2, 3], [0] * 4)
    plans = dict(own.rows.plans)
    for number in range(4):
        add_request(own, number, SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.1))
    own.sampling_states.apply_staged_writes()
    tokens, _ = v2_step(own, logits, [0, 1, 2, 3], [0] * 4)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    assert own.rows.plans == plans, "the first run made all plans"
    # Such a request stays in the states until a real one takes its slot.
    add_request(own, 0, SamplingParams(temperature=0.0))
    own.sampling_states.apply_staged_writes()
    assert v2_step(own, logits[:1], [0], [0])[0] == logits[0].argmax()


# What it never does.


class NoHostReads(TorchDispatchMode):
    """Refuses what would wait for a GPU: values, or shapes that depend on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "item", "repeat_interleave")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.WAITS, f"{func} waits for the device"
        indices = args[1] if name == "index" else ()
        assert all(index is None or index.dtype != torch.bool for index in indices), "a mask as an index waits"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition may read values, which no kernel on a GPU does."""
    launch = ReferenceSampler.launch

    def unwatched(self: ReferenceSampler, *args: Any) -> None:
        with _disable_current_modes():
            launch(self, *args)

    monkeypatch.setattr(ReferenceSampler, "launch", unwatched)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_v1_reads_nothing_on_the_host() -> None:
    runner = adopted("processed_logprobs")
    metadata = step(6, max_num_logprobs=2)
    logits = some_logits(6)
    tokens_of(runner, logits, metadata)
    with NoHostReads():
        tokens_of(runner, logits, metadata)
        with pytest.raises(AssertionError, match="waits"):
            bool(logits.sum() > 0)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_v2_reads_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    own = adopted_v2(monkeypatch, params())
    logits = some_logits(5)
    v2_step(own, logits, [0, 1, 2, 3, 4], [0] * 5)
    with NoHostReads():
        v2_step(own, logits, [0, 1, 2, 3, 4], [1] * 5)


def test_all_plans_are_made_at_the_first_step(made: Any) -> None:
    """That is while vLLM warms up; whatever a batch asks for later compiles nothing."""
    module, make = made
    kinds = {"processed_logprobs": Returned.ALL_LOGPROBS, "raw_logprobs": Returned.LIKELIEST}
    for mode, kind in kinds.items():
        runner = Runner(make(logprobs_mode=mode))
        sampler.decide(runner, module)
        rows = runner.sampler.rows
        zero = torch.zeros(2, dtype=torch.int64)
        rows.draw(some_logits(2).to(torch.bfloat16), zero, zero)
        dtypes = (torch.bfloat16, torch.float32)
        assert set(rows.plans) == {(VOCAB, dtype, one) for dtype in dtypes for one in (Returned.NOTHING, kind)}


def test_three_kinds_of_batches(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels see the same parameters in all batches, except for those that say how often a row is read."""
    module, make = made
    runner = Runner(make())
    sampler.decide(runner, module)
    rows = runner.sampler.rows
    logits, zero = some_logits(2), torch.zeros(2, dtype=torch.int64)
    rows.draw(logits, zero, zero)
    seen = []
    plan = rows.plan(logits, Returned.NOTHING)
    launch = plan.kernel.launch
    monkeypatch.setattr(
        plan.kernel, "launch", lambda logits, given, out: (seen.append(given), launch(logits, given, out))
    )
    half = torch.full((2,), 0.5)
    k = torch.full((2,), 3, dtype=torch.int32)
    for filters in ({}, {"temperature": half}, {"top_p": half, "top_k": None}, {"top_k": k}, {"min_p": half}):
        rows.draw(logits, zero, zero, **filters)
    names = [{name for name, tensor in vars(given).items() if tensor is not None} for given in seen]
    always, bounds = {"seeds", "positions", "temperature"}, {"top_p", "top_k", "min_p"}
    assert names == [always] * 2 + [always | {"top_p"}] + [always | bounds] * 2
