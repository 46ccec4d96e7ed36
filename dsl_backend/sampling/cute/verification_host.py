# SPDX-License-Identifier: Apache-2.0
"""Keys, compiled functions and launches of the CuTe DSL kernel that verifies drafts."""

from typing import Any

import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.checks import short
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target
from dsl_backend.sampling.cute.verification import NUMERIC, AcceptDrafts, VerifyArgs, VerifyKey
from dsl_backend.sampling.spec import Parameters, Sampled
from dsl_backend.sampling.verification_spec import Drafts, VerificationSpec, Verified


def key_of(
    spec: VerificationSpec, sampled_dtype: torch.dtype = torch.int64, input_dtype: torch.dtype = torch.int32
) -> VerifyKey:
    """The kernel of a problem. It serves any number of drafts."""
    return VerifyKey(
        sampled_dtype=short(sampled_dtype), input_dtype=short(input_dtype), token_dtype=short(spec.token_dtype)
    )


def fake_args(key: VerifyKey) -> tuple[Any, ...]:
    rows, requests, width = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def vector(dtype: Any, length: Any) -> Any:
        return make_fake_tensor(dtype, (length,), (1,), assumed_align=dtype.width // 8)

    token = NUMERIC[key.token_dtype]
    args = VerifyArgs(
        sampled=vector(NUMERIC[key.sampled_dtype], rows),
        inputs=vector(NUMERIC[key.input_dtype], rows),
        cu_rows=vector(Int32, cute.sym_int()),
        tokens=make_fake_tensor(token, (requests, width), (cute.sym_int(), 1), assumed_align=token.width // 8),
        counts=vector(Int32, requests),
    )
    return make_fake_stream(use_tvm_ffi_env_stream=True), *args


def build(key: VerifyKey, target: Target) -> Function:
    """The compiled function of VerifyArgs, one by one."""
    return compile_kernel(AcceptDrafts(key), fake_args(key), key=key, target=target)


class CuteVerifier:
    """Verification of tokens on a CUDA device of SM90 or SM100.

    The kernel of the sampler's default types, and of vLLM's, is compiled here; others at their first launch.
    """

    def __init__(
        self, spec: VerificationSpec, target: Target, max_requests: int, max_rows: int, device: torch.device
    ) -> None:
        self.spec, self.target = spec, target
        self.functions: dict[VerifyKey, Function] = {}
        self.function(key_of(spec))

    def function(self, key: VerifyKey) -> Function:
        function = self.functions.get(key)
        if function is None:
            function = self.functions[key] = build(key, self.target)
        return function

    def launch(
        self, drawn: Sampled, parameters: Parameters, drafts: Drafts, logits: torch.Tensor | None, out: Verified
    ) -> None:
        key = key_of(self.spec, drawn.tokens.dtype, drafts.inputs.dtype)
        self.function(key)(*VerifyArgs(drawn.tokens, drafts.inputs, drafts.cu_rows, out.tokens, out.counts))
