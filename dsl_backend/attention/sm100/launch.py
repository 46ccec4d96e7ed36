# SPDX-License-Identifier: Apache-2.0
"""From a layer's spec and tensors to the SM100 kernels; SM90's launches, with kernels of their own."""

from dsl_backend.attention.sm90 import launch as sm90
from dsl_backend.attention.sm100.configs import default_config, default_split_config
from dsl_backend.attention.sm100.forward import Forward, ForwardKey
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target


def build(key: ForwardKey, target: Target) -> Function:
    """The compiled function: (q, keys, values, *shared_args, blocks, rows)."""
    return compile_kernel(Forward(key), sm90.fake_args(key, *sm90.rows_of(key)), key=key, target=target)


class Prefill(sm90.Prefill):
    """Attention of long queries."""

    build = staticmethod(build)
    key_type = ForwardKey
    default = staticmethod(default_config)


class SplitKV(Prefill):
    """Attention of short queries, whose key ranges are cut into equal shares."""

    default = staticmethod(default_split_config)
    split = True
