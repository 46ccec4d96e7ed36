# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernel run on the emulator beside the definition."""

import torch

import emulator
from dsl_backend.runtime.target import from_arch
from dsl_backend.sampling import reference
from dsl_backend.sampling.cute import host
from dsl_backend.sampling.cute.args import SampleArgs
from dsl_backend.testing.sampling import UNWRITTEN, SamplingCase, tensors


def emulate(case: SamplingCase, arch: str, schedule: str, seed: int = 0) -> None:
    """Compile for the architecture, run on the emulator, compare; any finding or warning raises."""
    x, parameters = tensors(case)
    target = from_arch(arch)
    assert case.config.objections(case.spec, target) == []
    before = x.clone()
    tokens = torch.full((len(x),), UNWRITTEN, dtype=case.spec.token_dtype)
    with emulator.device(arch=arch, sms=4, schedule=schedule, seed=seed, strict=True):
        function = host.build(host.key_of(case.spec, case.config, case.k_dtype), target)
        function(*SampleArgs(logits=x, **vars(parameters), tokens=tokens))
    assert torch.equal(x.view(torch.uint8), before.view(torch.uint8)), "logits were changed"
    expected, _ = reference.sample(x, parameters)
    assert tokens.tolist() == expected.tolist(), case
