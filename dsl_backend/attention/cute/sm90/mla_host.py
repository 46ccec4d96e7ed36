# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernel of absorbed MLA for one layer spec."""

from dsl_backend.attention.cute.fake_args import fake_args, fake_mla_tensors
from dsl_backend.attention.cute.host import MlaKernel
from dsl_backend.attention.cute.mla import MlaKey
from dsl_backend.attention.cute.sm90.mla_configs import default_mla_config
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
