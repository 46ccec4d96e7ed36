# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernel run on the emulator."""

import torch

import emulator
from dsl_backend.runtime.target import from_arch
from dsl_backend.softmax.cute import host
from dsl_backend.softmax.tuned import config_of
from dsl_backend.testing.softmax import SoftmaxCase, judge, spec_of, tensors

SMEM_BYTES = 227 * 1024


def emulate(case: SoftmaxCase, arch: str, schedule: str, seed: int = 0) -> torch.Tensor:
    """Compile for the architecture, run on the emulator, judge; any finding or warning raises."""
    x, out = tensors(case)
    before = x.clone()
    spec = spec_of(case, x, out)
    target = from_arch(arch)
    key = host.key_of(spec, case.config or config_of(spec, target))
    assert key.config.objections(spec, SMEM_BYTES) == []
    with emulator.device(arch=arch, sms=4, schedule=schedule, seed=seed, strict=True):
        host.build(key, target)(x, out)
    assert torch.equal(x.nan_to_num(), before.nan_to_num()), "x was changed"
    judge(case, x, out)
    return out
