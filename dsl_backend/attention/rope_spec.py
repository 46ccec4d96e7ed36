# SPDX-License-Identifier: Apache-2.0
"""The problem of rotating queries and keys and writing keys and values to the cache in one launch, and its tensors."""

import enum
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from dsl_backend import checks
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.checks import require, short
from dsl_backend.runtime.target import Target


class RopeStyle(enum.Enum):
    """Which two elements of a head are rotated together, where r elements are."""

    NEOX = "neox"  # i and i + r/2
    GPTJ = "gptj"  # 2 i and 2 i + 1


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """The static facts of one layer's queries and keys: all that dispatch decides by and kernels are compiled for.

    Attributes:
        layer: heads, their sizes, and how the cache stores keys and values.
        rotary_dim: elements at the beginning of a head that are rotated; the others are left as they are.
        style: which of them form pairs.
        table_dtype: of the cosines and sines: the layer's dtype or float32.
        norm_dtype: of the weights of the RMSNorm of each query and key head; None where there is none.
        weight_offset: added to these weights; 1 for Gemma.
    """

    layer: AttentionSpec
    rotary_dim: int
    style: RopeStyle
    table_dtype: torch.dtype
    norm_dtype: torch.dtype | None = None
    weight_offset: float = 0.0

    def __post_init__(self) -> None:
        set_field = partial(object.__setattr__, self)  # the class is frozen
        checks.instance("layer", self.layer, AttentionSpec)
        set_field("rotary_dim", checks.integer("rotary_dim", self.rotary_dim, 2))
        checks.member("style", self.style, RopeStyle)
        checks.dtype("table_dtype", self.table_dtype, (self.layer.dtype, torch.float32))
        if self.norm_dtype is not None:
            checks.dtype("norm_dtype", self.norm_dtype)
        set_field("weight_offset", checks.number("weight_offset", self.weight_offset))
        require(not self.layer.mla, "absorbed MLA rotates a part of its own: keys and values of their own are needed")
        require(self.layer.page_size is not None, "packed keys have no cache: paged keys are needed")
        dim = self.layer.head_dim
        require(
            self.rotary_dim % 2 == 0 and self.rotary_dim <= dim,
            f"rotary_dim is {self.rotary_dim}: an even number up to the head size, {dim}, is needed",
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.dtype

    def __str__(self) -> str:
        norm = "" if self.norm_dtype is None else f", normalised by {short(self.norm_dtype)} weights"
        norm += f" + {self.weight_offset:g}" if self.norm_dtype is not None and self.weight_offset else ""
        return (
            f"{self.layer}, {self.rotary_dim} elements rotated in {self.style.value}'s style, "
            f"{short(self.table_dtype)} table{norm}"
        )


class RopeTensors(NamedTuple):
    """The tensors of a launch.

    Attributes:
        q: [tokens or more, heads_q, head_dim].
        key: [tokens or more, heads_kv, head_dim]. value: the same with head_dim_v.
        positions: [tokens] int64; a token's row of the table.
        cos_sin: [positions, rotary_dim]: the cosines of a position's angles, then their sines.
        q_weight, k_weight: [head_dim]; None without a norm.
        q_out: as q; may be q itself.
        key_cache, value_cache: [pages, page_size, heads_kv, dim].
        slots: [tokens or fewer] int64; a token beyond the last slot, or with a negative one, is not written.
        k_scale, v_scale: with an fp8 cache, one float32 each, or [heads_kv].
    """

    q: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    q_out: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slots: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class RopeWrites:
    """A kernel for layers of one spec; `rope.rope_write_kv` says what it computes."""

    def __init__(self, spec: RopeSpec, target: Target) -> None:
        self.spec, self.target = spec, target

    def prepare(self) -> None:
        """Compile what calls need; called before the first of them.

        A kernel that compiles at its first call does nothing here.
        """

    def objections(self, tensors: RopeTensors) -> list[str]:
        """Why it does not take these tensors, judged by strides and by the lowest bits of addresses."""
        return []

    def __call__(self, tensors: RopeTensors, eps: float) -> None:
        """Write q_out and the caches; there is at least one token. Only fp8 caches use the scales."""
        raise NotImplementedError
