# SPDX-License-Identifier: Apache-2.0
"""The problems of rotating queries and keys and writing the cache in one launch, of dense layers and of MLA's."""

import enum
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch

from dsl_backend import checks
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.checks import require, short
from dsl_backend.runtime.target import Target


class RopeStyle(enum.Enum):
    """Which two elements of a head are rotated together, where r elements are."""

    NEOX = "neox"  # i and i + r/2
    GPTJ = "gptj"  # 2 i and 2 i + 1


def check_norm_dtype(dtype: torch.dtype) -> None:
    checks.dtype("norm_dtype", dtype)
    require(dtype.is_floating_point, f"norm_dtype is {short(dtype)}: a floating-point dtype is needed")


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
            check_norm_dtype(self.norm_dtype)
        set_field("weight_offset", checks.number("weight_offset", self.weight_offset))
        require(not self.layer.mla, "absorbed MLA rotates a part of its own: MLARopeSpec is for it")
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


@dataclass(frozen=True, kw_only=True)
class MLARopeSpec:
    """The static facts of what one layer of absorbed MLA has in front of its attention.

    All elements of the rope parts are rotated, and the latent part is normalised.

    Attributes:
        layer: heads, sizes of the two parts, and how the cache stores them; `mla` is True.
        style: which elements form pairs.
        table_dtype: of the cosines and sines: the layer's dtype or float32.
        norm_dtype: of the weights of the latent's RMSNorm.
    """

    layer: AttentionSpec
    style: RopeStyle
    table_dtype: torch.dtype
    norm_dtype: torch.dtype

    def __post_init__(self) -> None:
        checks.instance("layer", self.layer, AttentionSpec)
        checks.member("style", self.style, RopeStyle)
        checks.dtype("table_dtype", self.table_dtype, (self.layer.dtype, torch.float32))
        check_norm_dtype(self.norm_dtype)
        require(self.layer.mla, "keys and values of their own are not absorbed MLA's: RopeSpec is for them")
        require(self.layer.page_size is not None, "packed keys have no cache: paged keys are needed")
        require(
            self.rope_dim > 0 and self.rope_dim % 2 == 0,
            f"{self.rope_dim} rope elements of keys: a positive even number is needed",
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.dtype

    @property
    def latent_dim(self) -> int:
        return self.layer.head_dim_v

    @property
    def rope_dim(self) -> int:
        return self.layer.head_dim - self.layer.head_dim_v

    def __str__(self) -> str:
        return (
            f"{self.layer}, {self.rope_dim} elements rotated in {self.style.value}'s style, "
            f"{short(self.table_dtype)} table, {self.latent_dim} normalised by {short(self.norm_dtype)} weights"
        )


class MLARopeTensors(NamedTuple):
    """The tensors of a launch for absorbed MLA. Outputs may be their inputs.

    Attributes:
        q: [tokens or more, heads_q, rope_dim]; the rope parts of queries.
        latent: [tokens or more, latent_dim]. rope: [tokens or more, rope_dim]; of keys.
        positions: [tokens] int64; a token's row of the table.
        cos_sin: [positions, rope_dim]: the cosines of a position's angles, then their sines.
        weight: [latent_dim].
        q_out, latent_out, rope_out: as q, latent and rope.
        cache: [pages, page_size, latent_dim + rope_dim].
        slots: [tokens or fewer] int64; the cache gets nothing of a token beyond the last slot, or with a negative
            one.
        scale: with an fp8 cache, one float32.
    """

    q: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    weight: torch.Tensor
    q_out: torch.Tensor
    latent_out: torch.Tensor
    rope_out: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    scale: torch.Tensor | None = None


AnySpec = RopeSpec | MLARopeSpec
AnyTensors = RopeTensors | MLARopeTensors
SpecT = TypeVar("SpecT", RopeSpec, MLARopeSpec)
TensorsT = TypeVar("TensorsT", RopeTensors, MLARopeTensors)


class RopeWrites(Generic[SpecT, TensorsT]):
    """A kernel for layers of one spec; `rope.rope_write_kv` and `rope.rope_write_mla` say what it computes."""

    def __init__(self, spec: SpecT, target: Target) -> None:
        self.spec: SpecT = spec
        self.target = target

    def prepare(self) -> None:
        """Compile what calls need; called before the first of them.

        A kernel that compiles at its first call does nothing here.
        """

    def objections(self, tensors: TensorsT) -> list[str]:
        """Why it does not take these tensors, judged by strides and by the lowest bits of addresses."""
        return []

    def __call__(self, tensors: TensorsT, eps: float) -> None:
        """Write the outputs and the cache; there is at least one token. Only fp8 caches use the scales."""
        raise NotImplementedError
