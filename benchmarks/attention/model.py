# SPDX-License-Identifier: Apache-2.0
"""Compares the work of the SM100 kernels with FlashAttention-4's, counted in the emulator.

`python -m benchmarks.attention.model` runs each kernel twice, over few and over many keys. The difference is the cost
of a tile of 128 keys, by warp role; the rest is the cost of a work tile. Nothing here is a measurement: the cycles come
from the emulator's model, which uses public rates.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module

from ..counted import CHILD, Kernel, answer, executed, in_child, main_kernel, pretend, profiled

MODULE = "benchmarks.attention.model"
TILE = 128
ARCH = "sm_100a"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One request.

    Attributes:
        queries: tokens.
        heads: query heads and key heads.
        dims: elements of a key row and of a value row.
        keys: few and many; full tiles of 96 as well as of 128.
        rows: query rows of a work tile's matrix products, to which a tile's cost applies.
        absorbed: MLA, whose values are a part of its keys.
        e4m3: products in 8 bits. FlashAttention-4's queries are e4m3, ours are quantized by the kernel.
    """

    queries: int
    heads: tuple[int, int]
    dims: tuple[int, int]
    keys: tuple[int, int] = (768, 1536)
    absorbed: bool = False
    e4m3: bool = False

    @property
    def tiles(self) -> int:
        """The number of tiles of 128 keys by which the two runs differ."""
        return (self.keys[1] - self.keys[0]) // TILE


SHAPES = {
    "prefill hd64": Shape(queries=256, heads=(1, 1), dims=(64, 64)),
    "prefill hd96": Shape(queries=256, heads=(1, 1), dims=(96, 96)),
    "prefill hd128": Shape(queries=256, heads=(1, 1), dims=(128, 128)),
    "prefill (192,128)": Shape(queries=256, heads=(1, 1), dims=(192, 128)),
    "prefill hd256": Shape(queries=256, heads=(1, 1), dims=(256, 256)),
    "prefill e4m3 hd64": Shape(queries=256, heads=(1, 1), dims=(64, 64), e4m3=True),
    "prefill e4m3 hd128": Shape(queries=256, heads=(1, 1), dims=(128, 128), e4m3=True),
    "prefill e4m3 (192,128)": Shape(queries=256, heads=(1, 1), dims=(192, 128), e4m3=True),
    "decode hd128, 8 heads a key": Shape(queries=1, heads=(8, 1), dims=(128, 128)),
    "MLA decode, 128 heads": Shape(queries=1, heads=(128, 1), dims=(576, 512), absorbed=True),
}
PROVIDERS = ("dsl", "FA4")


# A role's name by its tasks. In FlashAttention-4's kernel for heads of 256 other warps store the output.
ROLES = {
    "softmax": "softmax warp",
    "softmax + store": "softmax warp",
    "epilogue + store": "correction warp",
    "correction + store": "correction warp",
    "mma": "MMA warp",
    "load": "load warp",
}
SMS = 4


def ours(shape: Shape, keys: int) -> None:
    """Runs this package's kernel without LSE, as a server does."""
    import torch
    from dsl_backend.attention import api
    from dsl_backend.attention.plan import Planner
    from dsl_backend.runtime.target import from_arch
    from dsl_backend.runtime.workspace import Workspace
    from dsl_backend.testing.cases import FULL, Case, mla

    short = shape.queries == 1
    if shape.absorbed:
        case = mla(shape.heads[0], q_lens=(shape.queries,), kv_lens=(keys,), page=TILE)
    else:
        case = Case(
            id="",
            q_lens=(shape.queries,),
            kv_lens=(keys,),
            heads=shape.heads,
            dim=shape.dims[0],
            dim_v=shape.dims[1],
            page=TILE if short else None,
            causality=FULL,
            fp8=shape.e4m3,
        )
    problem, kernel = case.problem(), "cute-fp8" if shape.e4m3 else "cute"
    target = replace(from_arch(ARCH), sm_count=SMS)
    plan = Planner(problem.spec, target, Workspace(torch.device("cpu")), kernel).plan(problem.batch)
    out = torch.empty(problem.q.shape[0], problem.spec.heads_q, problem.spec.head_dim_v, dtype=problem.spec.dtype)
    api.run(plan, problem.q, problem.keys, problem.values, out=out, lse=None, **problem.extras)


def theirs(shape: Shape, keys: int) -> None:
    """Runs FlashAttention-4's kernel; needs a process of its own."""
    pretend(ARCH)
    import torch

    cases = import_module("cases_flash")
    dtype = torch.float8_e4m3fn if shape.e4m3 else torch.bfloat16
    problem = cases.Attention((shape.queries,), (keys,), *shape.heads, shape.dims, dtype=dtype, absorbed=shape.absorbed)
    cases.attention(ARCH, problem).run()


def amounts(kernels: list[Kernel]) -> dict[str, float]:
    """Warp instructions per warp of each role; and, for all warps of all CTAs, work and modelled cycles."""
    from emulator.profile.summary import charged

    main = main_kernel(kernels)
    found = {}
    for role in main["roles"]:
        found[ROLES.get(role["name"], role["name"])] = charged(role["instructions"]) / len(role["warps"])
    found["all warps"] = main["issued"]
    found["MUFU"] = executed(main, "MUFU")
    found["KB of shared memory"] = main["shared_bytes"] / 1024
    for unit, cycles in main["cycles"].items():
        found[f"cycles: {unit}"] = cycles * main["ctas"]
    return found


def costs(provider: str, name: str) -> dict[str, tuple[float, float]]:
    """For each amount, its share of a tile of 128 keys and of a work tile."""
    shape = SHAPES[name]
    few, many = (amounts(in_child(MODULE, provider, name, str(keys))) for keys in shape.keys)
    found = {}
    for what, amount in many.items():
        before = few.get(what, 0.0)
        tile = (amount - before) / shape.tiles
        found[what] = tile, before - tile * shape.keys[0] / TILE
    return found


def table(name: str) -> Iterator[str]:
    """The lines of a Markdown table."""
    ours, theirs = (costs(provider, name) for provider in PROVIDERS)
    yield f"| {name} | dsl | FA4 | ratio | work tile: dsl | FA4 |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for what, (tile, item) in ours.items():
        other, other_item = theirs.get(what, (0.0, 0.0))
        if tile >= 0.5 or other >= 0.5:
            ratio = f"{tile / other:.2f}" if other else ""
            yield f"| {what} | {tile:.0f} | {other:.0f} | {ratio} | {item:.0f} | {other_item:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(CHILD, nargs=3, metavar=("PROVIDER", "SHAPE", "KEYS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        provider, name, keys = options.child
        run = ours if provider == "dsl" else theirs
        return answer(profiled(lambda: run(SHAPES[name], int(keys)), ARCH, SMS))
    for name in options.shapes:
        for line in table(name):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
