# SPDX-License-Identifier: Apache-2.0
"""Launch the Triton kernels of every operator on a GPU that is not there.

    python -m tests.triton_launches run sm_90a [ID ...]     launches, and on the emulator, results
    python -m tests.triton_launches serve sm_90a [ID ...]   what is compiled before a served model's steps, and in them

Prints one line of JSON for each case. It takes a process of its own (tests/gpu_stand_in.py).
"""

import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from dsl_backend.attention import api as attention
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.attention.triton.warm_up import caches, operands_of
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear.scaled.eager import How, outputs
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.quant.format import GROUP_SCALED, ROW_SCALED, ScaledFormat
from dsl_backend.quant.reference import Quantized, dequantized, scales_of
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.sampling import verification
from dsl_backend.sampling.spec import Parameters, Sampled, kept_buffers
from dsl_backend.sampling.verification import Distributions, Drafts, Known
from dsl_backend.testing import experts, fuzz, linear, norm, sampling, scaled, softmax
from dsl_backend.testing.cases import FP16, Case, mla
from dsl_backend.testing.kv_writes import WriteCase
from dsl_backend.testing.verification import random_step
from dsl_backend.vllm_plugin.sampler import row_sampler
from dsl_backend.vllm_plugin.sampler.verification import Verifier, returns_kept
from tests.gpu_stand_in import counting, gpu

CPU = torch.device("cpu")
# Of the emulated GPU: few, so that programs process several work tiles.
SMS = 4
# Both kernels of a plan: requests of one tile and of several, one without queries, one of a decode step.
MIXED: dict[str, Any] = {"q_lens": (64, 1, 0, 17), "kv_lens": (64, 70, 5, 33), "heads": (4, 2)}
E5M2 = torch.float8_e5m2


def verify_drafts(known: Known, filters: tuple[str, ...] = ()) -> None:
    """Rows of two blocks, and fewer requests with the same plan."""
    step = random_step(0, known, 1100, CPU, filters=filters)
    plan = verification.plan(step.spec, step.drafts.requests, step.drawn.tokens.shape[0], CPU, "triton")
    for each in (step, step.first(3)):
        found = verification.run(plan, *each.given, each.logits)
        tokens, counts = each.expected()
        assert torch.equal(found.tokens.long(), tokens)
        assert torch.equal(found.counts, counts)


@triton.jit
def is_last_unordered(arrivals, request, programs):
    """`verification.is_last`, without the order of what programs store and load."""
    tl.debug_barrier()
    last = tl.atomic_add(arrivals + request, 1, sem="relaxed", scope="gpu") == programs - 1
    if last:
        tl.store(arrivals + request, 0)
    return last


def verify_drafts_unordered() -> None:
    from dsl_backend.sampling.triton import verification as kernels

    with mock.patch.object(kernels, "is_last", is_last_unordered):
        verify_drafts(Known.LOGITS)


def sample_with_logprobs() -> None:
    """And the likeliest tokens: another specialization, and the kernel of ranks; rows of two blocks."""
    case = replace(sampling.CASES[0], rows=sampling.CASES[0].rows[1:7], vocab=700)
    logits, parameters = sampling.tensors(case)
    mode = sampling.api.LogprobsMode.PROCESSED_LOGPROBS
    spec = replace(case.spec, logprobs=True, logprobs_mode=mode, num_logprobs=2)
    plan = sampling.api.plan(spec, len(logits), CPU, "triton")
    found = sampling.api.run(plan, logits, parameters)
    tokens, logprobs = sampling.reference.sample(logits, parameters)
    assert torch.equal(found.tokens, tokens)
    assert found.logprobs is not None
    torch.testing.assert_close(found.logprobs, logprobs, rtol=1e-5, atol=1e-5)


def activate(kind: ScaledFormat) -> None:
    """SwiGLU and the next quantisation behind somebody's product."""
    from dsl_backend.linear.scaled.triton import activated

    both = torch.randn(5, 2 * 1408, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    how = How(torch.bfloat16, Swiglu(), out_kind=kind)
    out, scale = outputs(both, 1408, how, None)
    activated.launch(both, Swiglu(), False, kind, out, scale, targets.detect())
    assert scale is not None
    gate, up = both.float().chunk(2, 1)
    exact = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(scale, scales_of(exact, kind), rtol=1e-5, atol=0)
    found = dequantized(Quantized(out, scale, kind), torch.float32)
    torch.testing.assert_close(found, exact, rtol=2**-4 + 1e-4, atol=1e-3)


# Each checks its results.
CASES: Mapping[str, Any] = {
    "dense": Case(dim=64, **MIXED),
    "dense-fp16": Case(dim=128, dtype=FP16, softcap=5.0, sinks=True, **MIXED),
    "dense-80": Case(dim=80, window=(20, None), alibi=True, **MIXED),
    "dense-fp8": Case(dim=64, fp8=True, **MIXED),
    "dense-e5m2": Case(dim=64, fp8=True, fp8_dtype=E5M2, scales_by_head=True, **MIXED),
    "dense-per-request": Case(dim=64, causal=(True, False, True, False), **MIXED),
    "packed": Case(q_lens=(20, 3), kv_lens=(40, 3), heads=(2, 2), dim=192, dim_v=128, page=None),
    "batch-invariant": Case(dim=64, batch_invariant=True, **MIXED),
    "mla": mla(16, (288, 256), q_lens=(1, 3), kv_lens=(64, 70)),
    "write": WriteCase(fused=True),
    "write-fp8": WriteCase(fp8=True, scales_by_head=True, gain=60.0),
    "write-e5m2": WriteCase(fp8=True, fp8_dtype=E5M2),
    "linear": linear.CASES["all"],
    "linear-plain": linear.CASES["plain"],
    "linear-tiles": linear.CASES["tiles"],
    "scaled-linear": scaled.CASES["to-tokens"],
    "scaled-linear-plain": scaled.CASES["channels"],
    "scaled-linear-blocks": scaled.CASES["to-groups"],
    "scaled-linear-deep": replace(scaled.CASES["deep"], rows=64, n=64),
    "scaled-linear-powers": scaled.CASES["to-powers"],
    "activated-rows": partial(activate, ROW_SCALED),
    "activated-groups": partial(activate, GROUP_SCALED),
    "experts": experts.CASES["gpt-oss"],
    "experts-mapped": experts.CASES["mapped"],
    "softmax": next(case for case in softmax.CASES if case.id == "warp"),
    "softmax-f32": next(case for case in softmax.CASES if case.id == "block"),
    "norm": norm.NormCase(id="token", rows=5, width=1000, residual=True, scaling=norm.TOKEN, why=""),
    "norm-wide": norm.NormCase(id="wide", rows=2, width=20000, residual=True, in_place=True, why=""),
    "sampling": replace(sampling.CASES[0], rows=sampling.CASES[0].rows[:6]),
    "logprobs": sample_with_logprobs,
    "drafts": partial(verify_drafts, Known.TOKENS),
    "drafts-logits": partial(verify_drafts, Known.LOGITS),
    "drafts-probabilities": partial(verify_drafts, Known.PROBABILITIES),
    "drafts-filtered": partial(verify_drafts, Known.LOGITS, ("top_p",)),
}
# With a mistake in a kernel, which the emulator has to find.
MISTAKES: Mapping[str, Any] = {"drafts-unordered": verify_drafts_unordered}


@dataclass(frozen=True)
class Ran:
    """What became of a case: the kernels that it launched; error is empty where all went well."""

    case: str
    kernels: tuple[str, ...] = ()
    error: str = ""


def run(name: str, target: Target) -> Ran:
    """Launch a case's kernels; where there is an emulator of the target, check the results."""
    case: Any = {**CASES, **MISTAKES}[name]
    emulate = target.known is not None and target.known.name == "sm_90a"
    try:
        with gpu(replace(target, sm_count=SMS) if emulate else target, emulate=emulate) as stand_in:
            try:
                case() if callable(case) else fuzz.check(case, "triton", "cpu")
            except AssertionError:
                if emulate:  # else nothing was computed
                    raise
        return Ran(name, tuple(launch.kernel for launch in stand_in.launches))
    except Exception:  # Triton, ptxas and the emulator raise what they like
        return Ran(name, error=traceback.format_exc()[-2000:])


LAYERS: Mapping[str, Case] = {
    "dense": Case(heads=(8, 2), dim=128),
    "dense-fp8": Case(heads=(8, 2), dim=128, fp8=True),
    "dense-72": Case(heads=(8, 2), dim=72),
    "dense-88": Case(heads=(3, 1), dim=88),
    "dense-80-window": Case(heads=(8, 2), dim=80, window=(100, None), sinks=True),
    "dense-alibi": Case(heads=(8, 2), dim=128, alibi=True),
    "dense-invariant": Case(heads=(8, 2), dim=128, batch_invariant=True),
    "mla": mla(16, page=64),
    "mla-fp8": mla(16, page=64, fp8=True),
    "mla-prefill": Case(heads=(16, 16), dim=192, dim_v=128, page=None),
}
STEPS = 60
# Runs up to where an engine serves, and goes on with its steps.
Engine = Callable[[Target], Iterator[None]]


def serve_attention(spec: AttentionSpec, target: Target) -> Iterator[None]:
    """Prepare as vLLM's metadata builders do; then steps of all sizes, lengths and widths of page tables."""
    draw = random.Random(0)
    lse, sinks = spec.mla or spec.page_size is None, spec.dtype if spec.sinks else None
    planner = Planner(spec, target, Workspace(CPU), "triton")
    planner.prepare(lse, sinks)
    write = attention.writer(spec, CPU, "triton")
    if spec.page_size is not None:
        write.prepare()
    yield
    # Rows of queries alone, and beside keys and values.
    own, of_values = spec.heads_q * spec.head_dim, spec.heads_kv * (spec.head_dim + spec.head_dim_v)
    for _ in range(STEPS):
        lengths = [draw.choice((0, 1, 1, 1, 2, 5, draw.randint(1, 300))) for _ in range(draw.randint(1, 40))]
        tokens, requests = max(1, sum(lengths)), len(lengths)
        operands = next(operands_of(spec, CPU, lse, sinks))
        rows = torch.empty(tokens, draw.choice((own, own + of_values)), dtype=spec.dtype)
        operands = operands._replace(
            q=rows[:, :own].unflatten(1, (spec.heads_q, spec.head_dim)),
            out=torch.empty(tokens, spec.heads_q, spec.head_dim_v, dtype=spec.dtype),
        )
        starts, paged = torch.zeros(requests + 1, dtype=torch.int32), spec.page_size is not None
        if paged:
            slots, scale = torch.zeros(tokens, dtype=torch.int64), operands.k_scale
            written = [torch.empty(tokens, spec.heads_kv, dim, dtype=spec.dtype) for dim in spec.written_dims]
            write(*written, *caches(spec, CPU), slots, scale, scale)
        else:
            operands = operands._replace(
                keys=torch.empty(tokens, spec.heads_kv, spec.head_dim, dtype=spec.dtype),
                values=torch.empty(tokens, spec.heads_kv, spec.head_dim_v, dtype=spec.dtype),
            )
        if lse:  # vLLM's prefill has the heads first
            shape = (tokens, spec.heads_q) if paged else (spec.heads_q, tokens)
            operands = operands._replace(lse=torch.empty(shape) if paged else torch.empty(shape).t())
        table = torch.zeros(requests, draw.randint(1, 70), dtype=torch.int32)
        batch = Batch(
            query_start_loc=starts,
            seq_lens=starts[:requests],
            num_tokens=tokens,
            max_query_len=max(lengths),
            max_seq_len=draw.randint(1, 5000),
            block_table=table if paged else None,
            kv_start_loc=None if paged else starts,
        )
        planner.plan(batch).launch(operands)


def serve_linear(target: Target) -> Iterator[None]:
    """Prepare as vLLM's warm-up does; then steps of all numbers of tokens."""
    from dsl_backend.linear.triton import gemm

    case = linear.LinearCase(rows=1, n=136, k=72, activation=linear.Swiglu(), bias=True)
    spec = LinearSpec(n=case.n, k=case.k, dtypes=Dtypes.of(case.dtype), activation=case.activation, bias=case.bias)
    gemm.prepare(spec, target)
    yield
    for rows in (*range(1, 140), 512, 1000):
        linear.api.linear(*linear.tensors(replace(case, rows=rows), "cpu"), activation=case.activation, kernel="triton")


def serve_experts(name: str, target: Target) -> Iterator[None]:
    """Prepare as vLLM's warm-up does; then steps of all numbers of tokens."""
    from dsl_backend.experts.triton import kernels

    case = experts.CASES[name]
    kernels.prepare(case.spec, target)
    yield
    plan = experts.api.plan(case.spec, CPU, kernel="triton")
    for tokens in (*range(1, 20), *range(20, 400, 23), 1000):
        given = experts.tensors(replace(case, tokens=tokens, padding=0.0, pad_x=0, pad_out=0, special=False), "cpu")
        biases = {"w13_bias": given.w13_bias, "w2_bias": given.w2_bias}
        experts.api.run(plan, *given[:5], **biases, expert_map=given.expert_map, out=given.out)


def serve_sampling(target: Target) -> Iterator[None]:
    """Draw a first step, as vLLM's profiling does; then steps with all combinations of filters."""
    draw, vocab = random.Random(0), 1003
    sampler = row_sampler.RowSampler(64, CPU, logprobs=True)
    with mock.patch.object(row_sampler.api, "plan", partial(sampling.api.plan, kernel="triton")):
        for step in range(STEPS):
            rows = draw.randint(1, 64) if step else 64
            # The vocabulary is padded.
            logits = torch.empty(rows, 1024)[:, :vocab]
            ids = torch.zeros(rows, dtype=torch.int64)
            neutral = sampler.off(rows)
            given = {name: value for name, value in neutral.items() if draw.random() < 0.5} if step else {}
            sampler.draw(logits, ids, ids, logprobs=draw.random() < 0.5, **given)
            if not step:
                yield


def serve_drafts(known: Known, target: Target) -> Iterator[None]:
    """Prepare as vLLM's runners do; then steps with and without filters, behind the sampler that serves them."""
    draw, vocab, drafts = random.Random(0), 1003, 4
    speculation = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=drafts))
    verifier = Verifier(SimpleNamespace(device=CPU, max_num_reqs=64, vllm_config=speculation), torch.int64)
    values = torch.empty(64 * drafts, vocab)
    verifier.prepare(vocab, torch.bfloat16, values[:1], known)
    yield
    kept = returns_kept(vocab, torch.bfloat16, CPU)
    for _ in range(STEPS):
        requests = draw.randint(1, 64)
        cu_rows = torch.tensor([0, *(draw.randint(0, 1 + drafts) for _ in range(requests))]).cumsum(0).int()
        rows = int(cu_rows[-1])
        # The vocabulary is padded, but where vLLM has processed the logits.
        logits = draw.choice((torch.empty(rows, 1024, dtype=torch.bfloat16)[:, :vocab], torch.empty(rows, vocab)))
        ids, ones = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
        filters = draw.choice(({}, {"top_p": ones}, {"top_k": ids.int()}, {"top_k": ids.int(), "top_p": ones}))
        verifier.verify(
            Sampled(ids, kept=kept_buffers(rows, CPU) if kept else None),
            Parameters(seeds=ids, positions=ids, temperature=ones, **filters),
            Drafts(inputs=ids.int(), cu_rows=cu_rows, distributions=Distributions(values=values, index=ids)),
            known,
            logits,
        )


ENGINES: Mapping[str, Engine] = {
    **{name: partial(serve_attention, case.spec) for name, case in LAYERS.items()},
    "linear": serve_linear,
    "experts": partial(serve_experts, "gpt-oss"),
    "experts-mapped": partial(serve_experts, "mapped"),
    "sampling": serve_sampling,
    "drafts-logits": partial(serve_drafts, Known.LOGITS),
    "drafts-probabilities": partial(serve_drafts, Known.PROBABILITIES),
}


@dataclass(frozen=True)
class Served:
    """What an engine compiles before it serves, and while it does."""

    case: str
    before: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    error: str = ""


def serve(name: str, target: Target) -> Served:
    try:
        with counting(target) as compiled:
            engine = ENGINES[name](target)
            next(engine)
            before = len(compiled)
            for _ in engine:
                pass
        names = tuple(one.kernel.rpartition(".")[2] for one in compiled)
        return Served(name, names[:before], names[before:])
    except Exception:
        return Served(name, error=traceback.format_exc()[-2000:])


def main(arguments: Sequence[str]) -> None:
    mode, arch, *names = arguments
    known, does = {"run": (CASES, run), "serve": (ENGINES, serve)}[mode]
    if unknown := set(names) - {*known, *MISTAKES}:
        sys.exit(f"no case {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    for name in names or known:
        sys.stdout.write(json.dumps(asdict(does(name, from_arch(arch)))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
