# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernels of dense attention for one layer spec."""

from typing import Any

from dsl_backend.attention.cute.fake_args import fake_args, fake_dense_tensors
from dsl_backend.attention.cute.host import Alignment, DenseKernel, FewOrManyRows, ManyRows
from dsl_backend.attention.cute.sizes import widened_tokens
from dsl_backend.attention.cute.sm90.dense_configs import default_config, default_split_config
from dsl_backend.attention.cute.sm90.dense_kernel import DenseForward, DenseKey
from dsl_backend.attention.cute.sm90.fp8_configs import default_fp8_config
from dsl_backend.attention.cute.sm90.fp8_kernel import Fp8Forward, Fp8Key
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.attention.variants import SM90_DECODE, SM90_FP8_DECODE, SM90_FP8_PREFILL, SM90_PREFILL
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


def build(key: DenseKey | Fp8Key, target: Target) -> Function:
    """The compiled function, which takes the operands of DenseForward.__call__."""
    kernel = Fp8Forward(key) if isinstance(key, Fp8Key) else DenseForward(key)
    return compile_kernel(kernel, fake_args(key, fake_dense_tensors(key)), key=key, target=target)


class Dense(DenseKernel):
    """See dense_kernel.py."""

    build = staticmethod(build)
    key_type = DenseKey
    exact_pairs = DenseForward.exact_pairs
    late_claims = DenseForward.late_claims

    def __init__(self, spec: AttentionSpec, target: Target, workspace: Workspace, config: Any = None) -> None:
        super().__init__(spec, target, workspace, config)
        self.alignment = Alignment(head_steps=DenseForward(self.key(False, None)).page_boxes)


class SplitKV(Dense):
    """Attention of short queries: split-KV, with an even share of the key tiles for each CTA.

    With the tiles of long queries, also that of prompts whose query tiles are too few for the SMs.
    """

    default = staticmethod(default_split_config)
    variants = staticmethod(SM90_DECODE)
    split = True


class Prefill(Dense):
    """Attention of long queries. Batches with a query of LONG_QUERY tokens or more, or for which an estimate says so,
    have a kernel of their own.
    """

    default = staticmethod(default_config)
    variants = staticmethod(SM90_PREFILL)
    extend_type = SplitKV
    estimates_other = True


class Fp8SplitKV(ManyRows):
    """Short queries of many rows with e4m3 products."""

    build = staticmethod(build)
    key_type = Fp8Key
    default = staticmethod(default_fp8_config)
    variants = staticmethod(SM90_FP8_DECODE)


class Fp8Prefill(DenseKernel):
    """Attention of long queries with e4m3 products. The longest, of FP8_LONG_QUERY tokens or more, have another one."""

    build = staticmethod(build)
    key_type = Fp8Key
    default = staticmethod(default_fp8_config)
    variants = staticmethod(SM90_FP8_PREFILL)
    extend_type = Fp8SplitKV
    takes_short_queries = False


class WidenedOrFp8SplitKV(FewOrManyRows, SplitKV):
    """Short queries of layers whose long ones have e4m3 products."""

    variants = staticmethod(SM90_FP8_DECODE)
    other_type = Fp8SplitKV


def fp8_decode(spec: AttentionSpec, target: Target, workspace: Workspace) -> DenseKernel:
    """The kernel for short queries: where the heads of one token are many rows, for these alone."""
    return (WidenedOrFp8SplitKV if widened_tokens(spec.group) else Fp8SplitKV)(spec, target, workspace)
