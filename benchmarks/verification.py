# SPDX-License-Identifier: Apache-2.0
"""The benchmark of verifying drafts: a token for each row of logits, and which drafts are accepted.

By default drafts are the likeliest tokens of their rows, and nothing is known of the distributions that they were drawn
from, as with n-grams and greedy drafters. In the rows of the group `ratio` drafts are drawn from known logits, and
verified by the ratio of probabilities. The column `plain` samples the same rows and verifies nothing: what verification
costs is the difference.
"""

import importlib
from dataclasses import dataclass, replace

import torch
from dsl_backend.providers import Launch, Limits, Run, provider
from dsl_backend.runtime import target as targets
from dsl_backend.sampling import api, dispatch, verification, verification_dispatch, verification_reference
from dsl_backend.sampling import reference as definition
from dsl_backend.sampling.spec import Parameters, Sampled, SamplingSpec
from dsl_backend.sampling.verification_spec import NO_TOKEN, Distributions, Drafts, Known, VerificationSpec, Verified

from .case import SMALLEST, TABLE, Case, case_of
from .check import EXACT
from .columns import missing, own_triton, reasons
from .operator import RowsOperator
from .sampling import problems
from .sampling.problems import FILTERS, NEAR

VLLM_UTILS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
VLLM_FILTERS = "vllm.v1.sample.ops.topk_topp_sampler"
DRAFTS = 5
# Drafts that are verified by the ratio of probabilities.
RATIO = "ratio"
LLAMA = 128256


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Verifying `drafts` drafts of each request. A request has one row of bfloat16 logits more than drafts.

    Attributes:
        known: LOGITS of the drafts, bfloat16, or their TOKENS alone.
    """

    requests: int
    drafts: int
    vocab: int
    filters: str
    temperature: float
    known: Known = Known.TOKENS

    @property
    def rows(self) -> int:
        return self.requests * (self.drafts + 1)

    @property
    def traffic_bytes(self) -> int:
        """Every logit is read once, those of drafts as well."""
        drafted = 0 if self.known is Known.TOKENS else self.requests * self.drafts
        return self.rows * (2 * self.vocab + 8) + drafted * 2 * self.vocab

    @property
    def parameters(self) -> dict[str, object]:
        names = ("requests", "drafts", "vocab", "filters", "temperature")
        return {name: getattr(self, name) for name in names} | {"known": self.known.value}

    @property
    def limits(self) -> Limits:
        return EXACT

    @property
    def specs(self) -> tuple[SamplingSpec, VerificationSpec]:
        by_ratio = self.known is Known.LOGITS
        drawn = SamplingSpec(vocab=self.vocab, dtype=torch.bfloat16, kept=by_ratio)
        draft_dtype = torch.bfloat16 if by_ratio else torch.float32
        return drawn, VerificationSpec(
            max_drafts=self.drafts, vocab=self.vocab, known=self.known, draft_dtype=draft_dtype
        )


@dataclass(frozen=True)
class Layer:
    """Logits [rows, vocab] bfloat16; `drafts` has the drafts and the first row of each request.

    Attributes:
        draft_logits: [requests, drafts, vocab] bfloat16, before the temperature; None where tokens alone are known.
    """

    logits: torch.Tensor
    parameters: Parameters
    drafts: Drafts
    draft_logits: torch.Tensor | None = None


@dataclass(frozen=True)
class Inputs:
    """Some layers; `compared` has the requests whose tokens are checked."""

    problem: Problem
    layers: tuple[Layer, ...]
    compared: torch.Tensor


def build(problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
    of_rows = problems.Problem(rows=problem.rows, vocab=problem.vocab, filters=problem.filters)
    drawn = problems.build(of_rows, layers, device, seed)
    rows = problem.drafts + 1
    made = []
    generator = torch.Generator(device).manual_seed(seed)
    for layer in drawn.layers:
        logits = layer.logits.bfloat16()
        cu_rows = torch.arange(0, problem.rows + 1, rows, dtype=torch.int32, device=device)
        temperature = torch.full((problem.rows,), problem.temperature, device=device)
        parameters = replace(layer.parameters, temperature=temperature)
        # The draft of a row is the input of the next one.
        if problem.known is Known.TOKENS:
            made.append(Layer(logits, parameters, Drafts(inputs=logits.argmax(-1).roll(1), cu_rows=cu_rows)))
            continue
        by_request = logits.view(problem.requests, rows, problem.vocab)[:, : problem.drafts]
        noise = torch.empty(by_request.shape, device=device).normal_(0, 1, generator=generator)
        draft_logits = (by_request + noise).bfloat16()
        chances = (draft_logits.float() / problem.temperature).softmax(-1).flatten(0, 1)
        inputs = torch.zeros(problem.requests, rows, dtype=torch.int64, device=device)
        inputs[:, 1:] = torch.multinomial(chances, 1, generator=generator).view(problem.requests, problem.drafts)
        drafts = Drafts(
            inputs=inputs.flatten(),
            cu_rows=cu_rows,
            distributions=distributions_of(draft_logits, torch.arange(problem.requests, device=device)),
        )
        made.append(Layer(logits, parameters, drafts, draft_logits))
    return Inputs(problem, tuple(made), (drawn.compared // rows).unique())


def distributions_of(draft_logits: torch.Tensor, requests: torch.Tensor) -> Distributions:
    """Those of some requests' rows.

    Args:
        draft_logits: [all requests, drafts, vocab].
        requests: which ones, int64.
    """
    drafts = draft_logits.shape[1]
    # Of a request's last row it is not read.
    step = torch.arange(drafts + 1, device=requests.device).clamp(max=drafts - 1)
    return Distributions(values=draft_logits.flatten(0, 1), index=(requests.unsqueeze(1) * drafts + step).flatten())


def compared_rows(inputs: Inputs) -> torch.Tensor:
    """The rows of the compared requests: [requests compared * (drafts + 1)]."""
    step = torch.arange(inputs.problem.drafts + 1, device=inputs.compared.device)
    return (inputs.compared.unsqueeze(1) * len(step) + step).flatten()


def verdict(inputs: Inputs, index: int, tokens: torch.Tensor) -> torch.Tensor:
    """[requests, 1]: 0 for a compared request whose tokens are not possible, else 1.

    Args:
        tokens: [requests, drafts + 1], -1 behind a request's last one.
    """
    problem, layer, chosen = inputs.problem, inputs.layers[index], compared_rows(inputs)
    shape = (len(inputs.compared), problem.drafts + 1)
    wide = problems.some_of(layer.parameters, chosen)
    if wide.top_p is not None:
        wide = replace(wide, top_p=(wide.top_p + NEAR).clamp(max=1))
    kept = definition.filter_mask(layer.logits[chosen], wide)
    found = tokens[inputs.compared].long()
    there = found >= 0
    counts = there.sum(-1)
    step = torch.arange(shape[1], device=tokens.device)
    is_kept = kept.gather(1, found.clamp(0, problem.vocab - 1).view(-1, 1)).view(shape) & (found < problem.vocab)
    is_draft = layer.drafts.inputs[chosen].view(shape).roll(-1, 1) == found
    first, accepted = step < counts.unsqueeze(1), step < counts.unsqueeze(1) - 1
    right = (counts > 0) & (there == first).all(-1) & (is_kept | ~first).all(-1) & (is_draft | ~accepted).all(-1)
    judged = torch.ones(problem.requests, 1, dtype=torch.float64, device=tokens.device)
    judged[inputs.compared, 0] = right.double()
    return judged


def only_exact(inputs: Inputs, layer: Layer, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens of this package, with none for a compared request whose tokens are not the definition's."""
    chosen, width = compared_rows(inputs), inputs.problem.drafts + 1
    parameters = problems.some_of(layer.parameters, chosen)
    logits = layer.logits[chosen]
    drawn = Sampled(definition.sample(logits, parameters)[0])
    cu_rows = torch.arange(0, len(chosen) + 1, width, dtype=torch.int32, device=tokens.device)
    known = None if layer.draft_logits is None else distributions_of(layer.draft_logits, inputs.compared)
    drafts = Drafts(inputs=layer.drafts.inputs[chosen], cu_rows=cu_rows, distributions=known)
    expected, _ = verification_reference.verify(drawn, parameters, drafts, inputs.problem.specs[1], logits)
    marked = tokens.clone()
    marked[inputs.compared] = marked[inputs.compared].where(
        (expected == tokens[inputs.compared]).all(-1, True), NO_TOKEN
    )
    return marked


def objections(problem: Problem, kernel: str | None = None) -> list[str]:
    target, (drawn, verified) = targets.detect(), problem.specs
    return reasons(lambda: dispatch.choose(drawn, target, kernel)) + reasons(
        lambda: verification_dispatch.choose(verified, target, kernel)
    )


def ours(problem: Problem, inputs: Inputs, kernel: str | None = None) -> Launch:
    """`api.run` and `verification.run`, with plans for each layer, because a plan has one buffer for results.

    Args:
        kernel: a name from both dispatch tables; by default the kernels that dispatch chooses.
    """
    device, (drawn, verified) = inputs.compared.device, problem.specs
    samplers = [api.plan(drawn, problem.rows, device, kernel) for _ in inputs.layers]
    verifiers = [verification.plan(verified, problem.requests, problem.rows, device, kernel) for _ in inputs.layers]
    for one in verifiers:
        one.results.tokens.fill_(NO_TOKEN)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        rows = api.run(samplers[index], layer.logits, layer.parameters, kept=drawn.kept)
        return verification.run(verifiers[index], rows, layer.parameters, layer.drafts, layer.logits).tokens

    def view(tokens: torch.Tensor) -> torch.Tensor:
        written = [one.results.tokens.data_ptr() for one in verifiers].index(tokens.data_ptr())
        return only_exact(inputs, inputs.layers[written], tokens)

    return Launch(run, view)


def plain_objections(problem: Problem) -> list[str]:
    return objections(problem)


@provider("verification", name="plain", objections=plain_objections, package="dsl-backend")
def plain(problem: Problem, inputs: Inputs) -> Launch:
    """Samples the rows and verifies nothing; the check verifies its tokens by the definition, as tokens alone."""
    drawn = problem.specs[0]
    rule = VerificationSpec(max_drafts=problem.drafts, vocab=problem.vocab)
    plans = [api.plan(drawn, problem.rows, inputs.compared.device) for _ in inputs.layers]

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        return api.run(plans[index], layer.logits, layer.parameters).tokens

    def view(tokens: torch.Tensor) -> torch.Tensor:
        index = [one.results.tokens.data_ptr() for one in plans].index(tokens.data_ptr())
        layer = inputs.layers[index]
        drafts = replace(layer.drafts, distributions=None)
        return Verified(*verification_reference.verify(Sampled(tokens), layer.parameters, drafts, rule)).tokens

    return Launch(run, view)


def vllm_objections(problem: Problem) -> list[str]:
    return missing("vllm")


@provider("verification", name="vLLM", objections=vllm_objections, package="vllm")
def vllm(problem: Problem, inputs: Inputs) -> Run | Launch:
    """The rejection sampler of vLLM's second model runner, behind what that runner does to the logits.

    Logits that nothing changes are read as they are; the others are copied to float32, divided and filtered.
    """
    rejection_sample = importlib.import_module(VLLM_UTILS).rejection_sample
    apply = importlib.import_module(VLLM_FILTERS).apply_top_k_top_p
    device, rows = inputs.compared.device, problem.drafts + 1
    request = torch.arange(problem.requests, dtype=torch.int32, device=device)
    of_row, position = request.repeat_interleave(rows), torch.arange(rows, dtype=torch.int32, device=device)
    position = position.repeat(problem.requests)
    temperature = torch.full((problem.requests,), problem.temperature, device=device)

    def run(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer = inputs.layers[index]
        logits, given = layer.logits, layer.parameters
        if problem.temperature != 1:
            logits = logits.float().div_(problem.temperature)
        if given.top_k is not None or given.top_p is not None:
            logits = apply(logits.float(), given.top_k, given.top_p)
        tokens, counts = rejection_sample(
            logits,
            layer.draft_logits,
            layer.drafts.inputs,
            layer.drafts.cu_rows,
            given.positions,
            request,
            of_row,
            position,
            temperature,
            given.seeds,
            problem.drafts,
        )
        return tokens, counts

    def view(result: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, counts = result
        return tokens.where(position.view(problem.requests, rows) < counts.unsqueeze(1), NO_TOKEN)

    return Launch(run, view)  # type: ignore[arg-type]  # only `view` reads the result


own_triton("verification", ours, objections, "sampling/triton/verification.py", default=False)


def case(problem: Problem, group: str = TABLE) -> Case[Problem]:
    name = f"{problem.filters}-t{problem.temperature:g}-{problem.requests}x{problem.drafts}x{problem.vocab}"
    is_ratio = problem.known is not Known.TOKENS and group != RATIO
    return case_of(f"{RATIO}-{name}" if is_ratio else name, problem, group)


def cases() -> list[Case[Problem]]:
    table = [
        ("none", 1.0, Known.TOKENS),
        ("none", 0.8, Known.TOKENS),
        ("k+p", 0.8, Known.TOKENS),
        ("none", 0.8, Known.LOGITS),
        ("k+p", 0.8, Known.LOGITS),
    ]
    found = [
        case(
            Problem(requests=requests, drafts=DRAFTS, vocab=LLAMA, filters=filters, temperature=warm, known=known),
            TABLE if known is Known.TOKENS else RATIO,
        )
        for filters, warm, known in table
        for requests in (1, 16, 64, 128)
    ]
    small = [
        Problem(requests=2, drafts=2, vocab=300, filters=filters, temperature=0.8, known=known)
        for known in (Known.TOKENS, Known.LOGITS)
        for filters in FILTERS
        if filters != "min-p"
    ]
    return found + [case(problem, SMALLEST) for problem in small]


def poison(inputs: Inputs) -> None:
    """Nothing: results lie in a provider's own buffers, where this package's have no token at first."""


def operators() -> dict[str, RowsOperator]:
    """Draws a token for each row of logits and accepts drafts."""
    operator = RowsOperator(
        name="verification",
        unit="TB/s",
        cases=cases,
        make=ours,
        objections=objections,
        build=build,
        reference=problems.reference,
        poison=poison,
        compared=verdict,
    )
    return {operator.name: operator}
