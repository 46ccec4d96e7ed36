# SPDX-License-Identifier: Apache-2.0
"""Compares the work of SM100's grouped GEMMs with quack's and CUTLASS's, or by format, counted in the emulator.

`python -m benchmarks.experts.model` runs both products of two experts with 128 rows each, k = 1024 in bfloat16: one
tile of 128 x 256 accumulators for each of two CTAs. It prints the work of a CTA. CUTLASS's example of grouped products,
which `tools/setup_peers.py` gets, neither gathers nor scatters rows, so it stands beside the second product alone.
Nothing here is a measurement: the cycles come from the emulator's model, which uses public rates.

With `--formats` it prints that of dsl's kernels for weights in bfloat16, MXFP8, MXFP4 and NVFP4.
"""

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module

import torch

from ..counted import CHILD, Kernel, answer, in_child, pretend, profiled
from ..linear.model import amounts

MODULE = "benchmarks.experts.model"
ARCH = "sm_100a"
SMS = 2
EXPERTS, ROWS, COLUMNS, K = 2, 128, 256, 1024
# Of dsl's kernels, by the formats of their weights.
FORMATS = ("bf16", "mxfp8", "mxfp4", "nvfp4")
PRODUCTS = ("first", "second")
# Which product of whose kernels stands beside dsl's.
PEERS = (("first", "quack"), ("second", "quack"), ("second", "cutlass"))
TITLES = {"first": "gather and SwiGLU", "second": "scatter"}
MOST_WRONG = 0.005  # of a result in bfloat16
BF16 = torch.bfloat16
# What `amounts` calls the role with most instructions; the warps that gather may be that here.
EPILOGUE, BUSIEST = "the epilogue's warps", "the role with most"


def matrices(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape) * K**-0.5).to(BF16)


def ours(product: str) -> None:
    """A layer; of the first product the accumulators are gate and up."""
    from dsl_backend.experts.args import ExpertsOperands
    from dsl_backend.experts.configs import ExpertsConfig
    from dsl_backend.experts.cute import host
    from dsl_backend.experts.spec import ExpertsSpec
    from dsl_backend.gemm.sm100.configs import GemmConfig
    from dsl_backend.runtime.target import from_arch
    from dsl_backend.runtime.workspace import Workspace

    hidden, width = (K, COLUMNS // 2) if product == "first" else (COLUMNS, K)
    spec = ExpertsSpec(num_experts=EXPERTS, hidden_size=hidden, intermediate_size=width, topk=1, dtype=BF16)
    tiles = GemmConfig(box_n=COLUMNS // 2, stages=4)
    config = ExpertsConfig(first=tiles, second=tiles)
    tokens = EXPERTS * ROWS
    operands = ExpertsOperands(
        x=torch.randn(tokens, hidden).to(BF16),
        w13=matrices(EXPERTS, 2 * width, hidden),
        w2=matrices(EXPERTS, hidden, width),
        topk_weights=torch.ones(tokens, 1),
        topk_ids=(torch.arange(tokens, dtype=torch.int32) % EXPERTS)[:, None].contiguous(),
        w13_bias=None,
        w2_bias=None,
        expert_map=None,
        out=torch.empty(tokens, hidden, dtype=BF16),
    )
    function = host.build(host.key_of(spec, config), from_arch(ARCH))
    host.run(function, spec, config, operands, (1, SMS, SMS), Workspace(torch.device("cpu")))


def in_format(name: str, product: str) -> None:
    """The same of weights in a format."""
    if name == "bf16":
        ours(product)
        return
    from dsl_backend.experts.block_scaled_configs import GroupedBlockScaledConfig
    from dsl_backend.experts.configs import ExpertsConfig
    from dsl_backend.experts.cute import block_scaled_host as host
    from dsl_backend.quant.format import scaled_format
    from dsl_backend.runtime.target import from_arch
    from dsl_backend.runtime.workspace import Workspace
    from dsl_backend.testing.experts import ExpertsCase, tensors

    hidden, width = (K, COLUMNS // 2) if product == "first" else (COLUMNS, K)
    tokens = EXPERTS * ROWS
    case = ExpertsCase(
        tokens=tokens, num_experts=EXPERTS, hidden=hidden, width=width, topk=1, dtype=BF16, weight=scaled_format(name)
    )
    given = tensors(case, "cpu")
    given.topk_ids.copy_((torch.arange(tokens, dtype=torch.int32) % EXPERTS)[:, None])
    tiles = GroupedBlockScaledConfig()
    config = ExpertsConfig(first=tiles, second=tiles)
    function = host.build(host.key_of(case.spec, config), from_arch(ARCH))
    host.run(function, case.spec, config, given, (1, SMS, SMS), Workspace(torch.device("cpu")))


def cutlass() -> None:
    """Runs CUTLASS's kernel; needs a process of its own. Rows lie in order. Raises AssertionError where it is wrong."""
    pretend(ARCH)
    cases = import_module("cases_cutlass_more")
    tile = (ROWS, COLUMNS)
    x, weights = torch.randn(EXPERTS, ROWS, K).to(BF16), matrices(EXPERTS, COLUMNS, K)
    out = torch.full((EXPERTS, ROWS, COLUMNS), torch.nan, dtype=BF16)
    kernel = cases.grouped_kernel(ARCH, "SMEM", tile)
    cases.launch_grouped(kernel, list(zip(x, weights, out, strict=True)), tile, SMS)
    exact = x.double() @ weights.double().mT
    wrong = float((out.double() - exact).norm() / exact.norm())
    assert wrong < MOST_WRONG, f"the result is {wrong:.3g} from the product"


def theirs(product: str) -> None:
    """Runs quack's kernel; needs a process of its own. Gate and up rows alternate; the second product's rows lie in
    order on both sides.
    """
    pretend(ARCH)
    chosen = import_module("cases_quack").config(ARCH, tile_m=ROWS, tile_n=COLUMNS)
    interface = import_module("quack.gemm_interface")
    tokens = EXPERTS * ROWS
    x, weights = torch.randn(tokens, K).to(BF16), matrices(EXPERTS, COLUMNS, K).mT
    starts = torch.arange(EXPERTS + 1, dtype=torch.int32) * ROWS
    if product == "first":
        order = torch.arange(tokens, dtype=torch.int32).view(ROWS, EXPERTS).T.reshape(-1).contiguous()
        facts = {"cu_seqlens_m": starts, "A_idx": order, "store_preact": False, "config": chosen}
        interface.gemm_act(x, weights, activation="swiglu", **facts)
    else:
        out = torch.empty(tokens, COLUMNS, dtype=BF16)
        interface.gemm_tuned.fn(x, weights, out, cu_seqlens_m=starts, config=chosen)


def product_of(kernels: list[Kernel], product: str) -> Kernel:
    """One of a layer's two products: the first one has twice the FLOPs. A peer has one kernel."""
    flops = {id(one): sum(sum(role["flops"].values()) for role in one["roles"]) for one in kernels}
    by_flops = sorted(kernels, key=lambda one: -flops[id(one)])
    return by_flops[0 if product == "first" or len(by_flops) == 1 or not flops[id(by_flops[1])] else 1]


def table() -> Iterator[str]:
    """The lines of a Markdown table."""
    found = {
        (provider, product): amounts([product_of(in_child(MODULE, f"{provider}-{product}"), product)])
        for provider, product in [*(("dsl", product) for product in PRODUCTS), *((peer, of) for of, peer in PEERS)]
    }
    heads = [f"{TITLES[product]}, dsl / {peer}" for product, peer in PEERS]
    yield f"| a tile of {ROWS} x {COLUMNS} accumulators, of one CTA | {' | ratio | '.join(heads)} | ratio |"
    yield f"| --- |{' ---: |' * (2 * len(heads))}"
    for what in found["dsl", "first"]:
        if not any(amount.get(what) for amount in found.values()):
            continue
        cells = []
        for product, peer in PEERS:
            mine, other = (found[provider, product].get(what, 0.0) for provider in ("dsl", peer))
            cells += [f"{mine:,.0f} / {other:,.0f}", f"{mine / other:.2f}" if other else ""]
        yield f"| {what.replace(EPILOGUE, BUSIEST)} | {' | '.join(cells)} |"


def formats_table() -> Iterator[str]:
    """The same of dsl's kernels by format."""
    found = {
        (name, product): amounts([product_of(in_child(MODULE, f"{name}-{product}"), product)])
        for product in PRODUCTS
        for name in FORMATS
    }
    heads = [f"{product} product, {name}" for product in PRODUCTS for name in FORMATS]
    yield f"| a tile of {ROWS} x {COLUMNS} accumulators, of one CTA | {' | '.join(heads)} |"
    yield f"| --- |{' ---: |' * len(heads)}"
    for what in found["bf16", "first"]:
        cells = [f"{found[name, product].get(what, 0.0):,.0f}" for product in PRODUCTS for name in FORMATS]
        # The role with most of weights in bfloat16 is not the epilogue.
        if set(cells) != {"0"} and "in the epilogue" not in what:
            yield f"| {what.replace(EPILOGUE, BUSIEST)} | {' | '.join(cells)} |"


def main() -> int:
    names = [f"{provider}-{product}" for provider in ("dsl", *FORMATS) for product in PRODUCTS]
    names += [f"{peer}-{product}" for product, peer in PEERS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", action="store_true", help="compare dsl's kernels for weights of different formats")
    parser.add_argument(CHILD, nargs=1, choices=names, metavar="PROVIDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        provider, product = options.child[0].split("-")
        if provider in FORMATS:
            return answer(profiled(lambda: in_format(provider, product), ARCH, SMS))
        if provider == "cutlass":
            return answer(profiled(cutlass, ARCH, SMS))
        run = ours if provider == "dsl" else theirs
        # quack's matrix products read what cp.async wrote, without a proxy fence that the emulator sees.
        return answer(profiled(lambda: run(product), ARCH, SMS, keep_findings=provider == "quack"))
    for line in formats_table() if options.formats else table():
        sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
