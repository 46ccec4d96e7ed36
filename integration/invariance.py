# SPDX-License-Identifier: Apache-2.0
"""Batch invariance as it is served: bitwise the same log-probabilities of one request, whatever surrounds it.

    python -m integration.invariance [--graphs | --modules] [--backend BACKEND] [--config JSON] [MODEL ...]

It runs small random-normal models with VLLM_BATCH_INVARIANT=1 and compares one request in several situations with the
same request alone, whose prompt is one chunk. On a GPU vLLM makes everything but attention invariant. On a CPU it does
not: there products are computed row by row. `--modules` names the first module whose output has other bits.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from integration import models, module_bits, offline
from integration.environment import device
from integration.models import MODELS, VOCABULARY, Model
from integration.offline import Answer, Job, Outcome

CHECKED = ("llama", "deepseek_v2")
OTHERS = 63
END_OF_LOG = 3000  # characters
THIS = f"integration.{Path(__file__).stem}"  # not __name__, which is __main__ for the command


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Tokens.

    Attributes:
        prompt: the prompt of the compared request; one more than whole pages have, so that one token is not cached.
        whole: a chunk that holds it.
        chunks: shorter chunks.
        longest_other: the longest prompt of the other requests.
        answer: generated tokens.
    """

    prompt: int
    whole: int
    chunks: tuple[int, ...]
    longest_other: int
    answer: int


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What surrounds the request.

    Attributes:
        chunk: tokens of a step (max_num_batched_tokens).
        batched: whether others run at the same time.
        cached: tokens of the prompt that are in the prefix cache.
    """

    id: str
    chunk: int
    batched: bool = False
    cached: int = 0
    engine: dict[str, Any] = field(default_factory=dict)


def sizes() -> Sizes:
    if device().cuda:
        return Sizes(prompt=9089, whole=16384, chunks=(512, 8192), longest_other=1500, answer=16)
    return Sizes(prompt=641, whole=2048, chunks=(64, 512), longest_other=24, answer=6)


def model(name: str) -> Model:
    """A model with room for the prompt."""
    whole = sizes().whole
    more: dict[str, Any] = {"max_position_embeddings": whole}
    rope = MODELS[name].config.get("rope_parameters")
    if isinstance(rope, dict) and "original_max_position_embeddings" in rope:
        # vLLM 0.26 takes the room from these two, and not from the line above.
        more["rope_parameters"] = rope | {"factor": whole / rope["original_max_position_embeddings"]}
    return MODELS[name].changed(**more)


def situations() -> list[Situation]:
    """The situations; the first is the one that the others are compared with."""
    given = sizes()
    return [
        Situation(id="alone", chunk=given.whole),
        Situation(id=f"batch of {OTHERS + 1}", chunk=given.whole, batched=True),
        Situation(id="part of the prefix cached", chunk=given.whole, cached=given.prompt // 3),
        Situation(id="whole prefix cached", chunk=given.whole, cached=given.prompt),
        *(Situation(id=f"chunks of {chunk}", chunk=chunk) for chunk in given.chunks),
        Situation(id=f"chunks of {given.chunks[0]}, batch of {OTHERS + 1}", chunk=given.chunks[0], batched=True),
    ]


def prompts() -> list[tuple[int, ...]]:
    """The compared request's prompt, and those of the others."""
    numbers, given = random.Random(26), sizes()
    lengths = [given.prompt, *(numbers.randint(1, given.longest_other) for _ in range(OTHERS))]
    return [tuple(numbers.randrange(6, VOCABULARY) for _ in range(length)) for length in lengths]


def job(
    folder: Path,
    situation: Situation,
    patches: Sequence[str] = (),
    engine: Mapping[str, Any] | None = None,
    backend: str = "dsl",
) -> Job:
    """The request in a situation; it is the first of the job's prompts.

    Args:
        patches: mistakes to make, see `offline.Job`.
        engine: further arguments of vllm.LLM.
    """
    mine, *others = prompts()
    asked = (mine, *others) if situation.batched else (mine,)
    # Asked for log-probabilities of the prompt, vLLM would compute all of it again.
    sampling = ({"prompt_logprobs": None if situation.cached else 1, "logprobs": 20},)
    here = device()
    given = {
        "max_model_len": sizes().whole,
        "max_num_seqs": OTHERS + 1,
        "max_num_batched_tokens": situation.chunk,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": bool(situation.cached),
        "kv_cache_memory_bytes": 512 << 20,
    }
    return Job(
        model=str(folder),
        backend=backend,
        dtype=here.dtypes[0],
        prompts=asked,
        max_tokens=sizes().answer,
        engine=given | dict(engine or {}),
        sampling=(*sampling, *({"prompt_logprobs": None, "logprobs": None} for _ in asked[1:])),
        before=(mine[: situation.cached],) if situation.cached else (),
        patches=(*([] if here.cuda else [f"{THIS}:{row_by_row.__name__}"]), *patches),
    )


def run(jobs: Sequence[Job]) -> list[Outcome]:
    return offline.run(jobs, VLLM_BATCH_INVARIANT="1")


def difference(answer: Answer, alone: Answer) -> str | None:
    """The first log-probability that is not the same number; None if all are the same."""
    for position, (mine, expected) in enumerate(zip(answer.prompt_logprobs, alone.prompt_logprobs, strict=False)):
        if mine != expected:
            return f"prompt token {position + 1}: {mine!r}, alone {expected!r}"
    for step, (mine_of, expected_of) in enumerate(zip(answer.logprobs, alone.logprobs, strict=True)):
        if mine_of != expected_of:
            token = next(token for token in expected_of if mine_of.get(token) != expected_of[token])
            return f"generated token {step}, id {token}: {mine_of.get(token)!r}, alone {expected_of[token]!r}"
    return None


def row_by_row() -> None:
    """Makes matrix products on a CPU row by row: for other numbers of rows, BLAS adds in other orders."""
    from vllm.model_executor.determinism import batch_invariant
    from vllm.model_executor.layers import utils

    # vLLM would install Triton kernels, which are no kernels here.
    batch_invariant.enable_batch_invariant_mode = lambda: None
    # Not oneDNN's or vLLM's own products.
    utils.dispatch_cpu_unquantized_gemm = plain_linear
    for name, function in {"mm": mm, "bmm": bmm, "mm.out": mm_out, "bmm.out": bmm_out, "addmm": addmm}.items():
        LIBRARY.impl(name, function, "CPU", allow_override=True)


LIBRARY: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # its overrides end with it


def plain_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def mm_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    columns = b.t()
    for row in range(a.shape[0]):
        out[row] = torch.mv(columns, a[row])
    return out


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return mm_out(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    return beta * bias + alpha * mm(a, b)


def bmm_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    for index in range(a.shape[0]):
        mm_out(a[index], b[index], out=out[index])
    return out


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return bmm_out(a, b, out=a.new_empty(a.shape[0], a.shape[1], b.shape[2]))


def splits_follow_the_batch() -> None:
    """A mistake: the number of splits of a request's keys depends on the batch.

    On a GPU the ordinary kernels serve instead of the batch-invariant ones.
    """
    from dsl_backend.attention import plan, reference

    make = plan.Planner.__init__
    whole, bind = reference.product_pv, reference.ReferenceKernel.bind
    requests = 1

    def ordinary(planner: Any, spec: Any, *rest: Any, **named: Any) -> None:
        make(planner, replace(spec, batch_invariant=False), *rest, **named)

    def remember(kernel: Any, batch: Any, *rest: Any) -> Any:
        nonlocal requests
        requests = batch.num_requests
        return bind(kernel, batch, *rest)

    def split(probs: torch.Tensor, values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        cut = probs.shape[-1] // requests
        first = whole(probs[..., :cut], values[..., :cut, :], keep[:, :cut])
        return first + whole(probs[..., cut:], values[..., cut:, :], keep[:, cut:])

    for owner, name, changed in (
        (plan.Planner, "__init__", ordinary),
        (reference.ReferenceKernel, "bind", remember),
        (reference, "product_pv", split),
    ):
        setattr(owner, name, changed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(CHECKED), metavar="MODEL", help=f"default: {CHECKED}")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--graphs", action="store_true", help="with torch.compile and CUDA graphs")
    how.add_argument("--modules", action="store_true", help="name the first module whose output has other bits")
    parser.add_argument("--config", type=json.loads, default={}, metavar="JSON", help='options, {"norms": "vllm"}')
    parser.add_argument("--backend", default="dsl", help="another one shows what vLLM's own layers do (default: dsl)")
    options = parser.parse_args()
    keys: list[tuple[str, Situation]] = []
    jobs: list[Job] = []
    engine: dict[str, Any] = {"enforce_eager": False} if options.graphs else {}
    engine |= {"additional_config": {"dsl": options.config}} if options.config else {}
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        for name in options.models:
            path = models.write(model(name), folder / name)
            for situation in situations():
                keys.append((name, situation))
                patches = (f"{module_bits.__name__}:{module_bits.record.__name__}",) if options.modules else ()
                one = job(path, situation, patches, engine=engine, backend=options.backend)
                jobs.append(module_bits.recorded(one, folder / f"{len(jobs)}.pt"))
        outcomes = run(jobs)
        failed = sum(
            not reported(name, situations_of, options.modules)
            for name, situations_of in itertools.groupby(zip(keys, jobs, outcomes, strict=True), lambda one: one[0][0])
        )
    return 1 if failed else 0


def reported(name: str, ran: Iterable[tuple[tuple[str, Situation], Job, Outcome]], modules: bool) -> bool:
    """Print what a model's situations have in common with the first one; whether all of them ran and are the same."""
    (_, alone_job, alone), *others = ran
    if alone.given is None:
        print(f"{name}, alone: the engine failed:\n{alone.log[-END_OF_LOG:]}")
        return False
    same = True
    for (_, situation), one, outcome in others:
        if outcome.given is None:
            print(f"{name}, {situation.id}: the engine failed:\n{outcome.log[-END_OF_LOG:]}")
            same = False
            continue
        answer = outcome.answers[0]
        found = difference(answer, alone.answers[0])
        same = same and found is None
        compared = f"{len(answer.prompt_logprobs)} prompt tokens, {len(answer.tokens)} generated"
        print(f"{name}, {situation.id} ({answer.cached_tokens} tokens cached; {compared}): {found or 'the same bits'}")
        if modules:
            recorded = (module_bits.load(Path(job.environment[module_bits.FILE_VARIABLE])) for job in (one, alone_job))
            print(f"    {module_bits.first_difference(*recorded)}")
    return same


if __name__ == "__main__":
    sys.exit(main())
