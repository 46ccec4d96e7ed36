# SPDX-License-Identifier: Apache-2.0
"""The kernels whose mutants are judged: small ones of ours, and FlashAttention-4's forward.

Sizes are the smallest in which every pipeline goes round twice: a mistake of the first lap may show in the second.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from gemm_kernels import BlackwellGemm, HopperGemm
from judge import Kernel
from pipeline_kernels import ClusterSum, CopyBarriers, CopyGroups, TmaPipeline

SM90, SM100 = "sm_90a", "sm_100a"
UNWRITTEN = 12345.0


def case(
    make: Callable[[], Any], inputs: Sequence[torch.Tensor], expected: torch.Tensor, tolerance: float
) -> Callable[[], bool]:
    """A call of a kernel: inputs, then one output of expected's shape and the inputs' type."""
    out = torch.empty(expected.shape, dtype=inputs[0].dtype)
    compiled: list[Any] = []

    def run() -> bool:
        out.fill_(UNWRITTEN)
        tensors = [from_dlpack(one, assumed_align=16) for one in (*inputs, out)]
        if not compiled:
            compiled.append(cute.compile(make(), *tensors))
        compiled[0](*tensors)
        return bool((out.double() - expected).abs().max() <= tolerance)

    return run


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def tma(arch: str) -> Kernel:
    x = random(256, 5 * 32, dtype=torch.half)
    expected = x.double().view(256, 5, 32).sum(1)
    return Kernel(f"tma pipeline {arch}", arch, case(TmaPipeline, [x], expected, 0.01))


def groups() -> Kernel:
    x = random(7, 1024)
    return Kernel("cp.async groups", SM90, case(CopyGroups, [x], x.double().sum(0), 1e-5))


def copy_barriers() -> Kernel:
    x = random(5, 256)
    return Kernel("cp.async mbarriers", SM90, case(CopyBarriers, [x], x.double().sum(0), 1e-5))


def cluster() -> Kernel:
    x = random(6, 256)
    return Kernel("cluster sum", SM90, case(ClusterSum, [x], x.double().sum(1).expand(4, 6), 1e-4), sms=4)


def gemm(name: str, arch: str, make: Callable[[], Any], m: int, n: int, sms: int) -> Kernel:
    a, b = random(m, 320, dtype=torch.half), random(n + m, 320, dtype=torch.half)[m:]
    return Kernel(name, arch, case(make, [a, b], a.double() @ b.double().T, 0.05), sms=sms)


KERNELS = {
    kernel.name: kernel
    for kernel in (
        tma(SM90),
        tma(SM100),
        gemm("gemm wgmma", SM90, HopperGemm, 128, 128, 2),
        gemm("gemm tcgen05, one CTA", SM100, lambda: BlackwellGemm(1), 128, 192, 2),
        gemm("gemm tcgen05, two CTAs", SM100, lambda: BlackwellGemm(2), 256, 192, 2),
        cluster(),
        groups(),
        copy_barriers(),
    )
}
