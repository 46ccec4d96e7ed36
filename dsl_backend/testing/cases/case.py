# SPDX-License-Identifier: Apache-2.0
"""What a case of attention is: one problem, by value, with the reason for it."""

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from dsl_backend.attention.spec import AttentionSpec, Causality
from dsl_backend.quant.format import NVFP4, NVFP4_KV, TENSOR_SCALED
from dsl_backend.testing.inputs import Problem, Surroundings, make_problem

BF16, FP16, FP8, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
FULL, CAUSAL, PER_REQUEST = Causality.FULL, Causality.CAUSAL, Causality.PER_REQUEST

# Every length where a tile of 16, 32, 64 or 128 keys begins or ends.
EDGES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@dataclass(frozen=True)
class Case:
    """One problem, by value: its repr rebuilds it.

    Attributes:
        id: of the test; empty for the problems of a fuzzer.
        why: what would break without it.
        q_lens, kv_lens: tokens of each request; (0, 0) is padding.
        heads: query and key/value heads.
        dim: of a head's queries and keys; dim_v of its values where it differs.
        fp8: keys and values are stored as fp8, of fp8_dtype; nvfp4: as NVFP4.
        fp8_q: queries arrive in e4m3; fp8_out: outputs are stored in it; nvfp4_out: in NVFP4.
        scales_by_head: each key head has scales of its own; scales_by_request: each request.
        window: keys visible before and after a position.
        causal: of each request, and then Causality.PER_REQUEST.
        scale: of q·k; 1 / sqrt(dim) by default.
        q_gain: multiplies q, for cases whose feature shows at large scores only.
        nan_request: index of a request with a NaN in its first query's first head.
        split_q: absorbed MLA's q comes in two parts.
        batch_invariant: `AttentionSpec.batch_invariant`.
        programs: split the keys over that many programs, by single key tiles if need be; None: as the kernel likes.
        tile: query rows and keys of the kernels' tiles; None: as the kernel likes.
        seed: of the numbers.
    """

    id: str = ""
    q_lens: tuple[int, ...] = ()
    kv_lens: tuple[int, ...] = ()
    _: KW_ONLY
    why: str = ""
    tier: str = "smoke"
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    dim_v: int | None = None
    dtype: torch.dtype = BF16
    fp8: bool = False
    fp8_dtype: torch.dtype = FP8
    nvfp4: bool = False
    fp8_q: bool = False
    fp8_out: bool = False
    nvfp4_out: bool = False
    scales_by_head: bool = False
    scales_by_request: bool = False
    page: int | None = 16
    scale: float | None = None
    causality: Causality = CAUSAL
    causal: tuple[bool, ...] | None = None
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    mla: bool = False
    q_gain: float = 1.0
    nan_request: int | None = None
    split_q: bool = False
    batch_invariant: bool = False
    programs: int | None = None
    tile: tuple[int, int] | None = None
    around: Surroundings = field(default_factory=Surroundings)
    seed: int = 0

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            heads_q=self.heads[0],
            heads_kv=self.heads[1],
            head_dim=self.dim,
            head_dim_v=self.dim if self.dim_v is None else self.dim_v,
            dtype=self.dtype,
            kv_dtype=NVFP4_KV.dtype if self.nvfp4 else self.fp8_dtype if self.fp8 else self.dtype,
            page_size=self.page,
            scale=1 / math.sqrt(self.dim) if self.scale is None else self.scale,
            causality=self.causality if self.causal is None else PER_REQUEST,
            window_left=self.window[0],
            window_right=self.window[1],
            softcap=self.softcap,
            sinks=self.sinks,
            alibi=self.alibi,
            mla=self.mla,
            batch_invariant=self.batch_invariant,
            scales_by_request=self.scales_by_request,
            q_dtype=FP8 if self.fp8_q else None,
            out_format=NVFP4 if self.nvfp4_out else TENSOR_SCALED if self.fp8_out else None,
        )

    def problem(self, device: torch.device | str = "cpu") -> Problem:
        problem = make_problem(
            self.spec,
            self.q_lens,
            self.kv_lens,
            seed=self.seed,
            device=device,
            causal=self.causal,
            around=self.around,
            scales_by_head=self.scales_by_head,
        )
        if self.q_gain != 1.0:
            problem.q.mul_(self.q_gain)
        if self.nan_request is not None:
            first = sum(self.q_lens[: self.nan_request])
            problem.q[first : first + 1, :1].copy_(torch.tensor(math.nan))
        return problem


# Absorbed MLA with DeepSeek's row: the latent and the rope part.
MLA: dict[str, Any] = {"dim": 576, "dim_v": 512, "mla": True}


def mla(heads: int, dims: tuple[int, int] = (576, 512), **facts: Any) -> Case:
    """A case of absorbed MLA."""
    return Case(heads=(heads, 1), dim=dims[0], dim_v=dims[1], mla=True, **facts)


DECODE = (1, 1, 1, 1)
