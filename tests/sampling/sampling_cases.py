# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernel run on the emulator beside the definition."""

import torch

import emulator
from dsl_backend.runtime.target import from_arch
from dsl_backend.sampling.cute import host
from dsl_backend.testing.sampling import SamplingCase, args_of, assert_defined, tensors, unwritten


def emulate(case: SamplingCase, arch: str, schedule: str, seed: int = 0) -> None:
    """Compile for the architecture, run on the emulator, compare; any finding or warning raises."""
    x, parameters = tensors(case)
    target = from_arch(arch)
    assert case.config.objections(case.spec, target) == []
    before = x.clone()
    out = unwritten(case.spec, len(x), x.device)
    with emulator.device(arch=arch, sms=4, schedule=schedule, seed=seed, strict=True):
        function = host.build(host.key_of(case.spec, case.config, case.k_dtype), target)
        function(*args_of(case, x, parameters, out).tensors)
    assert torch.equal(x.view(torch.uint8), before.view(torch.uint8)), "logits were changed"
    assert_defined(case, x, parameters, out)
