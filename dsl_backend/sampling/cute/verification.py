# SPDX-License-Identifier: Apache-2.0
"""Verification of drafts whose tokens alone are known, for SM90 and SM100: a warp for each request.

Lanes compare drafts with the tokens that were drawn for their rows, and a ballot finds the first one that differs. The
kernel is short, and most of its time is its launch: it is launched while the sampler runs (programmatic dependent
launch), and waits for it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives import dependent_launch

WARP = 32
WARPS = 4
NO_TOKEN = -1
NUMERIC = {"int32": cutlass.Int32, "int64": cutlass.Int64}


class VerifyArgs(NamedTuple):
    """The tensors of a launch: torch's on the host, CuTe's in the kernel.

    The compiled function takes them one by one, for the reason that `args.SampleArgs` has.

    Attributes:
        sampled: int32 or int64 [rows], the tokens that were drawn.
        inputs: int32 or int64 [rows].
        cu_rows: int32 [requests + 1].
        tokens: int32 or int64 [requests, max_drafts + 1]; an output.
        counts: int32 [requests]; an output.
    """

    sampled: Any
    inputs: Any
    cu_rows: Any
    tokens: Any
    counts: Any


@dataclass(frozen=True, kw_only=True)
class VerifyKey:
    """All that the kernel's code depends on: type names of the sampled tokens, of the inputs, and of the results."""

    sampled_dtype: str
    input_dtype: str
    token_dtype: str


class AcceptDrafts:
    """Writes tokens [requests, max_drafts + 1] and counts [requests]."""

    def __init__(self, key: VerifyKey):
        self.token_type = NUMERIC[key.token_dtype]

    @cute.jit
    def __call__(self, stream, *tensors):
        args = VerifyArgs(*tensors)
        self.kernel(args).launch(
            grid=(cute.ceil_div(args.counts.shape[0], WARPS), 1, 1),
            block=(WARPS * WARP, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, args: VerifyArgs):
        dependent_launch.wait()
        request = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        if request < args.counts.shape[0]:
            self.verify(args, request)

    @cute.jit
    def verify(self, args: VerifyArgs, request):
        """Verify the drafts of one request, by one warp."""
        width = args.tokens.shape[1]
        lane = cute.arch.lane_idx()
        first = args.cu_rows[request]
        # -1 for a request without rows.
        num_drafts = cutlass.min(args.cu_rows[request + 1] - first, width) - 1
        num_accepted = num_drafts
        for base in cutlass.range(0, width, WARP, unroll=1):
            step = base + lane
            sampled = cutlass.Int64(NO_TOKEN)
            if step <= num_drafts:
                sampled = cutlass.Int64(args.sampled[first + step])
            differs = cutlass.Boolean(False)
            if step < num_drafts:
                differs = cutlass.Int64(args.inputs[first + step + 1]) != sampled
            lanes = cutlass.Uint32(cute.arch.vote_ballot_sync(differs))
            if lanes != 0 and num_accepted == num_drafts:
                num_accepted = base + cutlass.Int32(cute.arch.popc((lanes & (~lanes + 1)) - 1))
            # An accepted draft is the token that was drawn.
            token = sampled if step <= num_accepted else cutlass.Int64(NO_TOKEN)
            if step < width:
                args.tokens[request, step] = self.token_type(token)
        if lane == 0:
            args.counts[request] = num_accepted + 1
