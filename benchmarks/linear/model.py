# SPDX-License-Identifier: Apache-2.0
"""Compares the work of SM100's GEMMs with quack's, counted in the emulator.

`python -m benchmarks.linear.model` runs both kernels with SwiGLU once, on one tile of 256 x 256 accumulators of two
CTAs (cta_group::2) with k = 1024 in bfloat16, and prints the work of a CTA. With `--few` it is a product of 16 rows
with 512 rows of weights, k = 4096, half of them for each of two CTAs: the kernel that streams weights beside quack's
GEMM. Nothing here is a measurement: the cycles come from the emulator's model, which uses public rates.
"""

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module

import torch

from ..counted import CHILD, Kernel, answer, executed, in_child, main_kernel, pretend, profiled

MODULE = "benchmarks.linear.model"
ARCH = "sm_100a"
SMS = 2
ROWS, COLUMNS, K = 256, 128, 1024
FEW_ROWS, FEW_N, FEW_K = 16, 512, 4096
PROVIDERS = ("dsl", "quack")
FEW = "few"


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    """Random x [m, k] and gate and up weights [2 n, k]. The order of the weight rows does not change the work."""
    x, weight = torch.randn(ROWS, K), torch.randn(2 * COLUMNS, K) * K**-0.5
    return x.bfloat16(), weight.bfloat16()


def ours() -> None:
    from dsl_backend.gemm import host
    from dsl_backend.gemm.activation import Swiglu
    from dsl_backend.gemm.args import GemmOperands
    from dsl_backend.gemm.sm100.configs import GemmConfig
    from dsl_backend.gemm.spec import Dtypes, GemmSpec
    from dsl_backend.runtime.target import from_arch
    from dsl_backend.runtime.workspace import Workspace

    spec = GemmSpec(n=COLUMNS, k=K, dtypes=Dtypes.of(torch.bfloat16), activation=Swiglu())
    config = GemmConfig(box_n=128, stages=6, two_cta=True)
    function = host.build(host.key_of(spec, config), from_arch(ARCH))
    x, weight = operands()
    out = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
    host.run(function, config, GemmOperands(x, weight, None, None, out), SMS, Workspace(torch.device("cpu")))


def theirs() -> None:
    """Runs quack's kernel; needs a process of its own. Gate and up rows alternate; only the final output is stored."""
    pretend(ARCH)
    chosen = import_module("cases_quack").config(ARCH, tile_m=256, tile_n=256, cluster_m=2)
    x, weight = operands()
    gemm_act = import_module("quack.gemm_interface").gemm_act
    gemm_act(x, weight.mT, activation="swiglu", store_preact=False, config=chosen)


def few_operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random x [m, k] and weight [n, k], and an output."""
    x, weight = torch.randn(FEW_ROWS, FEW_K), torch.randn(FEW_N, FEW_K) * FEW_K**-0.5
    return x.bfloat16(), weight.bfloat16(), torch.empty(FEW_ROWS, FEW_N, dtype=torch.bfloat16)


def ours_few() -> None:
    from dsl_backend.gemm import host
    from dsl_backend.gemm.args import GemmOperands
    from dsl_backend.gemm.sm100.configs import SmallMConfig
    from dsl_backend.gemm.spec import Dtypes, GemmSpec
    from dsl_backend.runtime.target import from_arch
    from dsl_backend.runtime.workspace import Workspace

    spec = GemmSpec(n=FEW_N, k=FEW_K, dtypes=Dtypes.of(torch.bfloat16))
    config = SmallMConfig(tokens=FEW_ROWS, stages=6)
    function = host.build(host.key_of(spec, config), from_arch(ARCH))
    x, weight, out = few_operands()
    host.run(function, config, GemmOperands(x, weight, None, None, out), SMS, Workspace(torch.device("cpu")))


def theirs_few() -> None:
    """Runs quack's kernel; needs a process of its own."""
    pretend(ARCH)
    chosen = import_module("cases_quack").config(ARCH, tile_m=128, tile_n=FEW_N // SMS)
    x, weight, out = few_operands()
    import_module("quack.gemm_interface").gemm_tuned.fn(x, weight.mT, out, config=chosen)


RUNS = {"dsl": ours, "quack": theirs, f"dsl-{FEW}": ours_few, f"quack-{FEW}": theirs_few}


def amounts(kernels: list[Kernel]) -> dict[str, float]:
    """The amounts of work of one CTA."""
    from emulator.profile.summary import charged

    main = main_kernel(kernels)
    epilogue = max(main["roles"], key=lambda role: charged(role["instructions"]))
    of_all = {
        "warp instructions": main["issued"],
        "of these in the epilogue's warps": charged(epilogue["instructions"]),
        "MUFU instructions": executed(main, "MUFU"),
        "FP32 instructions": executed(main, "FP32") + executed(main, "FP32 packed (f32x2)"),
        "of these packed": executed(main, "FP32 packed (f32x2)"),
        "mbarrier instructions": executed(main, "mbarrier"),
        "barriers and fences": executed(main, "barriers, fences"),
    }
    found = {what: amount / main["ctas"] for what, amount in of_all.items()}
    found["cycles: MUFU, conversions, in the epilogue"] = epilogue["cycles"]["MUFU, conversions"]
    return found | {f"cycles: {unit}": cycles for unit, cycles in main["cycles"].items() if cycles}


def table(few: bool) -> Iterator[str]:
    """The lines of a Markdown table."""
    ending, what_of = (f"-{FEW}", "16 rows x 256 rows of weights") if few else ("", "a tile of 256 x 256 accumulators")
    ours, theirs = (amounts(in_child(MODULE, provider + ending)) for provider in PROVIDERS)
    yield f"| {what_of}, of one CTA | dsl | quack | ratio |"
    yield "| --- | ---: | ---: | ---: |"
    for what, amount in ours.items():
        other = theirs.get(what, 0.0)
        ratio = f"{amount / other:.2f}" if other else ""
        yield f"| {what} | {amount:,.0f} | {other:,.0f} | {ratio} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(CHILD, nargs=1, choices=RUNS, metavar="PROVIDER", help=argparse.SUPPRESS)
    parser.add_argument("--few", action="store_true", help="few rows, by the kernel that streams weights")
    options = parser.parse_args()
    if options.child:
        return answer(profiled(RUNS[options.child[0]], ARCH, SMS))
    for line in table(options.few):
        sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
