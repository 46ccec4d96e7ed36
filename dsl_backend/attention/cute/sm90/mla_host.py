# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernels of absorbed MLA for one layer spec."""

from dsl_backend.attention.cute.fake_args import fake_args, fake_mla_tensors
from dsl_backend.attention.cute.host import MlaKernel
from dsl_backend.attention.cute.mla import Fp8MlaKey, MlaKey
from dsl_backend.attention.cute.sm90.mla_configs import default_mla_config
from dsl_backend.attention.cute.sm90.mla_fp8_configs import default_fp8_mla_config
from dsl_backend.attention.cute.sm90.mla_fp8_kernel import Fp8MlaForward
from dsl_backend.attention.cute.sm90.mla_kernel import MlaForward
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target


def build(key: MlaKey, target: Target) -> Function:
    """The compiled function: (q, q_rope, keys, *what LayerKernel.bind adds)."""
    return compile_kernel(MlaForward(key), fake_args(key, fake_mla_tensors(key)), key=key, target=target)


class Mla(MlaKernel):
    """Absorbed MLA, row tile by row tile; see mla.py."""

    build = staticmethod(build)
    default = staticmethod(default_mla_config)


class MlaSplitKV(Mla):
    """The same, with balanced split-KV."""

    split = True


def build_fp8(key: Fp8MlaKey, target: Target) -> Function:
    """The compiled function of the kernel with e4m3 products; it takes the same."""
    return compile_kernel(Fp8MlaForward(key), fake_args(key, fake_mla_tensors(key)), key=key, target=target)


class Fp8Mla(MlaKernel):
    """Absorbed MLA with e4m3 products, row tile by row tile; see mla_fp8_kernel.py."""

    build = staticmethod(build_fp8)
    key_type = Fp8MlaKey
    default = staticmethod(default_fp8_mla_config)


class Fp8MlaSplitKV(Fp8Mla):
    """The same, with balanced split-KV."""

    split = True
