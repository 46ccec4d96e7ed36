# SPDX-License-Identifier: Apache-2.0
"""Compares the work of SM100's GEMM of NVFP4 and MXFP8 with CUTLASS's, counted in the emulator.

`python -m benchmarks.scaled_linear.model` runs this package's kernel and the blockscaled example of CUTLASS's CuTe DSL,
which `tools/setup_peers.py` gets, on the same operands: one tile of 256 x 256 accumulators of two CTAs
(cta_group::2), with an output in bfloat16. The difference between two lengths of k is the work of a stage, the
remainder that of a tile. Both results are compared with float64. Nothing here is a measurement: cycles come from the
emulator's model, which uses public rates.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from dsl_backend.quant.format import NVFP4, ScaledFormat, scaled_format
from dsl_backend.quant.reference import Quantized, mma_dequantized, mma_quantized

from ..counted import CHILD, Kernel, answer, executed, in_child, main_kernel, pretend, profiled

MODULE = "benchmarks.scaled_linear.model"
ARCH = "sm_100a"
SMS = 2
ROWS = COLUMNS = 256
# Bytes of k in a stage of both kernels, and the stages of the shorter and the longer run.
STAGE_BYTES, STAGES = 128, (8, 16)
PROVIDERS = ("dsl", "cutlass")
FORMATS = ("nvfp4", "mxfp8")
EXAMPLE = "cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py"
MOST_WRONG = 0.005  # of a result in bfloat16


class Tensors(NamedTuple):
    """x [m, k], weight [n, k], and out [m, n]."""

    x: Quantized
    weight: Quantized
    out: torch.Tensor


def tensors(kind: ScaledFormat, stages: int) -> Tensors:
    """Random operands. NVFP4's scales of whole matrices are 1."""
    generator = torch.Generator().manual_seed(1)
    k = stages * STAGE_BYTES * kind.packed
    spread = 2.0 ** (torch.arange(k) // 16 % 7 - 3)
    x, weight = (mma_quantized(torch.randn(rows, k, generator=generator) * spread, kind) for rows in (ROWS, COLUMNS))
    return Tensors(x, weight, torch.full((ROWS, COLUMNS), torch.nan, dtype=torch.bfloat16))


def check(given: Tensors) -> None:
    """Raises AssertionError where a result is wrong: then its counts mean nothing."""
    exact = mma_dequantized(given.x) @ mma_dequantized(given.weight).T
    wrong = float((given.out.double() - exact).norm() / exact.norm())
    assert wrong < MOST_WRONG, f"the result is {wrong:.3g} from the product"


def k_of(kind: ScaledFormat, matrix: Quantized) -> int:
    return matrix.values.shape[1] * kind.packed


def ours(kind: ScaledFormat, given: Tensors) -> None:
    from dsl_backend.gemm import scaled_host
    from dsl_backend.gemm.scaled import ScaledOperands
    from dsl_backend.gemm.sm100 import scaled_configs
    from dsl_backend.gemm.sm100.configs import BlockScaledConfig
    from dsl_backend.linear.scaled.spec import ScaledLinearSpec
    from dsl_backend.runtime.target import from_arch
    from dsl_backend.runtime.workspace import Workspace

    x, weight, out = given
    spec = ScaledLinearSpec(n=COLUMNS, k=k_of(kind, x), x=kind, weight=kind)
    config = BlockScaledConfig(box_n=128, stages=4, two_cta=True)
    key = scaled_host.key_of(spec, config, spec.column_major)
    function = scaled_host.build(scaled_configs.kernel(key), key, from_arch(ARCH))
    alpha = torch.ones(1) if kind == NVFP4 else None
    operands = ScaledOperands(x.values, x.scale, weight.values, weight.scale, None, out, alpha=alpha)
    scaled_host.run(function, config, operands, SMS, Workspace(torch.device("cpu")))


def theirs(kind: ScaledFormat, given: Tensors) -> None:
    """Runs CUTLASS's kernel; needs a process of its own."""
    pretend(ARCH)
    cases = import_module("cases_cutlass")
    module = cases.example(EXAMPLE)
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    element, scale = cutlass.Float8E4M3FN, cutlass.Float8E8M0FNU
    if kind == NVFP4:
        element, scale = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN
    x, weight, out = given
    gemm = module.Sm100BlockScaledPersistentDenseGemmKernel(kind.block_columns, (256, 256), (2, 1))
    compiled = module.scaled_mm(
        gemm, element, element, cutlass.BFloat16, scale, "k", "k", "n", SMS // 2, cases.stream()
    )

    def pointer(tensor: torch.Tensor, dtype: Any, alignment: int = 16) -> Any:
        return make_ptr(dtype, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=alignment)

    compiled(
        pointer(x.values, element),
        pointer(weight.values, element),
        pointer(x.scale, scale, 32),
        pointer(weight.scale, scale, 32),
        pointer(out, cutlass.BFloat16),
        (ROWS, COLUMNS, k_of(kind, x), 1),
        cases.stream(),
    )


def role_of(kernel: Kernel, kind: str) -> dict[str, Any] | None:
    """The role whose warps execute most instructions of a class."""
    found: list[dict[str, Any]] = [role for role in kernel["roles"] if role["instructions"].get(kind, 0)]
    return max(found, key=lambda role: role["instructions"][kind], default=None)


def amounts(kernels: list[Kernel]) -> dict[str, float]:
    """The amounts of work of one CTA."""
    main = main_kernel(kernels)
    of_all: dict[str, float] = {
        "warp instructions": main["issued"],
        "mbarrier instructions": executed(main, "mbarrier"),
        "barriers and fences": executed(main, "barriers, fences"),
    }
    found = {what: amount / main["ctas"] for what, amount in of_all.items()}
    return found | {f"cycles: {unit}": cycles for unit, cycles in main["cycles"].items() if cycles}


def rows_of(provider: str, form: str) -> dict[str, tuple[float, float]]:
    """For each amount: of a stage, and of the remainder of a tile."""
    short, long = (amounts(in_child(MODULE, provider, form, str(stages))) for stages in STAGES)
    few, many = STAGES
    each = {what: (long.get(what, 0.0) - amount) / (many - few) for what, amount in short.items()}
    return {what: (stage, short[what] - few * stage) for what, stage in each.items()}


def table() -> Iterator[str]:
    """The lines of a Markdown table."""
    yield "| a CTA | " + " | ".join(f"{form}, a stage | {form}, a tile" for form in FORMATS) + " |"
    yield "| --- |" + " ---: |" * (2 * len(FORMATS))
    found = {form: [rows_of(provider, form) for provider in PROVIDERS] for form in FORMATS}
    for what in found[FORMATS[0]][0]:
        cells = []
        for own, other in found.values():
            for mine, their in zip(own.get(what, (0.0, 0.0)), other.get(what, (0.0, 0.0)), strict=True):
                ratio = f" ({mine / their:.2f})" if their > 0 else ""
                cells.append(f"{mine:,.0f} / {their:,.0f}{ratio}")
        yield f"| {what} | " + " | ".join(cells) + " |"


def child(provider: str, form: str, stages: str) -> int:
    """Runs one kernel and prints its profile."""
    kind = scaled_format(form)
    given = tensors(kind, int(stages))
    known = (given.x.values, given.x.scale, given.weight.values, given.weight.scale, given.out)
    found = profiled(partial(ours if provider == "dsl" else theirs, kind, given), ARCH, SMS, known)
    check(given)
    return answer(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(CHILD, nargs=3, metavar=("PROVIDER", "FORMAT", "STAGES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(*options.child)
    for line in table():
        sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
