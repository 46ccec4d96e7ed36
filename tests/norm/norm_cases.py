# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernel run on the emulator."""

import emulator
from dsl_backend.norm import launch
from dsl_backend.norm.cute import host
from dsl_backend.norm.spec import NormTensors
from dsl_backend.norm.tuned import config_of
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.norm import EPS, NormCase, judge, spec_of, tensors

SMEM_BYTES = 227 * 1024


def emulate(case: NormCase, arch: str, schedule: str, seed: int = 0) -> NormTensors:
    """Compile for the architecture, run on the emulator, judge; any finding or warning raises."""
    given = tensors(case)
    spec = spec_of(case, given)
    target = from_arch(arch)
    key = host.key_of(spec, case.config or config_of(spec, target))
    assert key.config.objections(spec, SMEM_BYTES) == []
    with emulator.device(arch=arch, sms=4, schedule=schedule, seed=seed, strict=True):
        host.build(key, target)(*host.arguments_of(launch.prepared(given)), EPS)
    judge(case, tensors(case), given)
    return given
