# SPDX-License-Identifier: Apache-2.0
"""The SM100 kernel of absorbed MLA for one layer spec."""

from dsl_backend.attention.cute.host import LatentKernel, fake_args, latent_rows_of
from dsl_backend.attention.cute.mla import LatentKey
from dsl_backend.attention.cute.sm100.mla_configs import PairConfig, default_latent_config
from dsl_backend.attention.cute.sm100.mla_kernel import LatentForward
from dsl_backend.attention.cute.sm100.two_cta_mla import LatentPair
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target


def build(key: LatentKey, target: Target) -> Function:
    """The compiled function: (q, q_rope, keys, *what LayerKernel.bind adds)."""
    kernel = LatentPair(key) if isinstance(key.config, PairConfig) else LatentForward(key)
    return compile_kernel(kernel, fake_args(key, *latent_rows_of(key)), key=key, target=target)


class Latent(LatentKernel):
    """Absorbed MLA, row tile by row tile; see latent.py."""

    build = staticmethod(build)
    default = staticmethod(default_latent_config)


class LatentSplitKV(Latent):
    """The same where key ranges are cut into equal shares."""

    split = True
