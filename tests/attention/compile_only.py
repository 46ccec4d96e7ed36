# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels for a GPU that is not there: `python -m tests.attention.compile_only sm_90 [ID ...]`.

Tensors lie on the CPU, and launches end in a stand-in for CUDA's driver (tests/gpu_stand_in.py). One line of JSON comes
out for each compiled kernel, or for a case that does not compile.

It takes a process of its own, in which Triton does not interpret: both are decided when kernels are defined.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dsl_backend.attention import rope
from dsl_backend.attention.plan import Part, Planner
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.runtime import registry
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check, mla_rope_writes, rope_writes
from dsl_backend.testing.cases import FP16, Case, mla
from dsl_backend.testing.kv_writes import WriteCase
from dsl_backend.testing.mla_rope_writes import EPS, MLARopeCase
from dsl_backend.testing.rope_writes import RopeCase
from tests.gpu_stand_in import gpu

BYTE_LOAD = re.compile(r"ld\.global\S*b8 ")
ARCHS = tuple(arch.name for arch in registry.ARCHS if arch.triton_tested)
# Launches both kernels of a plan: the second request is short enough for the decode kernel, whose tile is then as large
# as it gets. Decode steps get the smallest tile.
MIXED: dict[str, Any] = {"q_lens": (64, 1), "kv_lens": (64, 70), "heads": (8, 2)}
STEP: dict[str, Any] = {"q_lens": (1, 1), "kv_lens": (64, 70), "heads": (32, 8)}
INVARIANT: dict[str, Any] = {**MIXED, "batch_invariant": True}
DRAFTS: dict[str, Any] = {"q_lens": (4, 4), "kv_lens": (64, 70)}

ATTENTION: tuple[Case, ...] = (
    Case(id="dense-64", dim=64, **MIXED, why="the smallest head"),
    Case(id="dense-64-step", dim=64, **STEP, why="twice as many keys a tile as other heads"),
    Case(id="dense-80", dim=80, **MIXED, why="two blocks of a head: the sizes beside powers of two"),
    Case(id="dense-96-step", dim=96, **STEP, why="one padded block"),
    Case(id="dense-128", dim=128, **MIXED, why="the size that most models have"),
    Case(id="dense-128-step", dim=128, **STEP, why="the same at a decode step"),
    Case(id="dense-256", dim=256, **MIXED, why="the largest that two tiles in flight are meant for"),
    Case(id="dense-256-step", dim=256, **STEP, why="the same at a decode step"),
    Case(id="dense-512", dim=512, **MIXED, why="the largest head: least room"),
    Case(id="dense-512-step", dim=512, **STEP, why="the same at a decode step"),
    Case(id="mla-prefill", q_lens=(64,), kv_lens=(64,), heads=(4, 4), dim=192, dim_v=128, page=None, why="packed keys"),
    Case(id="window", dim=128, window=(100, None), **MIXED, why="two bounds of a mask"),
    Case(
        id="softcap-sinks", dim=64, softcap=5.0, sinks=True, **MIXED, why="modified scores, and a sink in both kernels"
    ),
    Case(id="alibi", dim=128, alibi=True, **MIXED, why="slopes in registers beside the largest tile"),
    Case(id="per-request", dim=64, causal=(True, False), **MIXED, why="a mask that is known at run time"),
    Case(id="fp8", dim=128, fp8=True, **MIXED, why="widened keys; bytes where e4m3 has no instruction"),
    Case(id="fp8-step", dim=128, fp8=True, **STEP, why="the same at a decode step"),
    Case(id="fp8-256", dim=256, fp8=True, **MIXED, why="the largest fp8 tiles"),
    Case(
        id="fp8-queries",
        dim=128,
        fp8=True,
        fp8_q=True,
        fp8_out=True,
        scales_by_request=True,
        **MIXED,
        why="converted queries and outputs; bytes where e4m3 has no instruction; scales of each request",
    ),
    Case(id="nvfp4", dim=128, nvfp4=True, **MIXED, why="elements of 4 bits and scales of blocks"),
    Case(id="nvfp4-outputs", dim=80, nvfp4_out=True, **MIXED, why="blocks of outputs, in two parts of a row"),
    Case(id="nvfp4-step", dim=128, nvfp4=True, **STEP, why="the same at a decode step"),
    Case(id="fp8-80", dim=80, fp8=True, **MIXED, why="a padded fp8 block"),
    mla(16, id="mla-16", q_lens=(1, 1), kv_lens=(64, 70), why="DeepSeek-V2-Lite's heads"),
    mla(128, id="mla-128", q_lens=(1, 1), kv_lens=(64, 70), why="DeepSeek-V3's heads: the largest tile"),
    mla(16, id="mla-16-fp8", fp8=True, q_lens=(1, 1), kv_lens=(64, 70), why="a widened latent beside the stored one"),
    mla(128, id="mla-128-fp8", fp8=True, q_lens=(1, 1), kv_lens=(64, 70), why="the same, largest tile"),
    mla(8, id="mla-drafts", **DRAFTS, why="the tile between the two"),
    mla(8, id="mla-drafts-fp8", fp8=True, **DRAFTS, why="the tile between the two, widened"),
    Case(id="invariant-128", dim=128, **INVARIANT, why="one kernel for all queries: two accumulators"),
    Case(id="invariant-80", dim=80, window=(100, None), sinks=True, **INVARIANT, why="two blocks of each accumulator"),
    Case(id="invariant-256-fp8", dim=256, fp8=True, **INVARIANT, why="two accumulators of the largest rows"),
    Case(id="invariant-512", dim=512, **INVARIANT, why="the largest head"),
    mla(128, id="invariant-mla", batch_invariant=True, q_lens=(1, 1), kv_lens=(64, 70), why="two latent accumulators"),
    mla(16, (320, 256), id="mla-320", q_lens=(1, 1), kv_lens=(64, 70), why="a smaller latent"),
)
WRITES: tuple[WriteCase, ...] = (
    WriteCase(id="write", why="a copy"),
    WriteCase(id="write-fp8", fp8=True, why="rounding to e4m3, in bits where there is no instruction"),
    WriteCase(id="write-nvfp4", nvfp4=True, why="rounding to e2m1, and scales of blocks"),
    WriteCase(id="write-mla", heads=1, dim=512, dim_v=64, mla=True, why="the widest row"),
)
ROPES: tuple[RopeCase | MLARopeCase, ...] = (
    RopeCase(id="rope", why="no norm"),
    RopeCase(id="rope-norm-fp8", norm=True, fp8=True, why="both norms, and rounding to e4m3"),
    MLARopeCase(id="rope-mla", why="latents and rope parts in one launch"),
    MLARopeCase(id="rope-mla-fp8", fp8=True, why="the same, rounded to e4m3"),
)
AnyCase = Case | WriteCase | RopeCase | MLARopeCase


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What became of one kernel of a case.

    Attributes:
        kernel: its name, with the tile where it has one.
        shared, predicted: bytes of shared memory of a program, as compiled and as its configuration says.
        programs: that must be resident on an SM side by side.
        tensor_columns: of tensor memory.
        byte_loads: instructions that load single bytes.
        seconds: of compilation; nearly none where Triton's cache had it.
        error: why the case does not compile; empty where it does.
    """

    case: str
    kernel: str = ""
    shared: int = 0
    predicted: int | None = None
    programs: int = 1
    tensor_columns: int = 0
    byte_loads: int = 0
    seconds: float = 0.0
    error: str = ""


def tile_of(part: Part, batch: Batch, spec: AttentionSpec, target: Target) -> dict[str, Any]:
    """What the configuration of a part's kernel says."""
    kernel: Any = part.kernel
    config = kernel.config
    if callable(config):
        config = config(min(part.max_seqlen_q, batch.max_query_len))
    return {
        "name": f"{config.block_m}x{config.block_n} {config.num_warps}w {config.num_stages}s",
        "predicted": config.smem_bytes(spec, target),
        "programs": config.programs_per_sm,
    }


def attention(case: Case, target: Target) -> Iterator[Compiled]:
    """Compile all that a case's plan launches."""
    problem = case.problem()
    planner = Planner(problem.spec, target, Workspace(problem.device), "triton")
    plan = planner.plan(problem.batch)
    for part in plan.parts:
        tile = tile_of(part, problem.batch, problem.spec, target)
        with gpu(target) as stand_in:
            check.launch(replace(plan, parts=(part,)), problem, check.empty_result(problem), split_q=case.split_q)
        for name, kernel, seconds in stand_in.calls:
            attends = name != "combine_kernel"  # it has no tiles
            yield Compiled(
                case=case.id,
                kernel=f"{name} {tile['name']}" if attends else name,
                shared=kernel.metadata.shared,
                predicted=tile["predicted"] if attends else None,
                programs=tile["programs"] if attends else 1,
                tensor_columns=getattr(kernel.metadata, "tmem_size", 0) or 0,
                byte_loads=len(BYTE_LOAD.findall(kernel.asm["ptx"])),
                seconds=seconds,
            )


def write(case: WriteCase, target: Target) -> Iterator[Compiled]:
    """Compile a write."""
    from dsl_backend.attention.triton.write_kv import write_kv

    rows = torch.zeros(case.tokens, case.heads, case.dim, dtype=case.dtype)
    rows_v = torch.zeros(case.tokens, case.heads, case.dim_v, dtype=case.dtype)
    kv = case.spec.kv
    widths = kv.width(case.dim), kv.width(case.dim_v)
    cache = torch.zeros(case.pages, case.page, case.heads, sum(widths), dtype=case.spec.kv_dtype)
    slots = torch.zeros(case.tokens, dtype=torch.int64)
    scales = (torch.ones(1), torch.ones(1)) if case.fp8 or case.nvfp4 else (None, None)
    with gpu(target) as stand_in:
        write_kv(target, rows, rows_v, *cache.split(widths, dim=-1), slots, *scales)
    for name, kernel, seconds in stand_in.calls:
        yield Compiled(case=case.id, kernel=name, shared=kernel.metadata.shared, seconds=seconds)


def rotate(case: RopeCase | MLARopeCase, target: Target) -> Iterator[Compiled]:
    """Compile a rotation with its cache write."""
    made = mla_rope_writes if isinstance(case, MLARopeCase) else rope_writes
    writer = rope.RopeWriter(case.spec, lambda: target, "triton")
    with gpu(target) as stand_in:
        writer(made.build(case, "cpu"), EPS)
    for name, kernel, seconds in stand_in.calls:
        yield Compiled(case=case.id, kernel=name, shared=kernel.metadata.shared, seconds=seconds)


def compiled(case: AnyCase, target: Target) -> Iterator[Compiled]:
    """Compile all kernels of a case."""
    if isinstance(case, Case):
        return attention(case, target)
    return write(case, target) if isinstance(case, WriteCase) else rotate(case, target)


def served(case: AnyCase, target: Target) -> AnyCase:
    """The case in a dtype that the target has."""
    return case if target.native_bf16 else replace(case, dtype=FP16)


def compile_case(case: AnyCase, target: Target) -> list[Compiled]:
    """All kernels of a case; one record with an error where one does not compile."""
    adapted = served(case, target)
    try:
        return list(compiled(adapted, target))
    except Exception as error:  # Triton and ptxas raise what they like
        return [Compiled(case=case.id, error=f"{type(error).__name__}: {error}"[:2000])]


def main(arguments: Sequence[str]) -> None:
    arch, *ids = arguments
    target = from_arch(arch)
    cases: list[AnyCase] = [*ATTENTION, *WRITES, *ROPES]
    unknown = set(ids) - {case.id for case in cases}
    if unknown:
        sys.exit(f"no case {', '.join(sorted(unknown))}: choose from {', '.join(case.id for case in cases)}")
    for case in (case for case in cases if not ids or case.id in ids):
        for compiled in compile_case(case, target):
            print(json.dumps(asdict(compiled)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
