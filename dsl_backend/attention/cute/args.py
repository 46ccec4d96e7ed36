# SPDX-License-Identifier: Apache-2.0
"""What a launch of an attention kernel takes: named tuples, each spelled once, which go whole from host to kernel.

On the host they hold torch's tensors, or CuTe DSL's fake ones while a kernel is compiled; in a kernel CuTe's. A number
in a fake tuple is one of CuTe DSL's types: a Python number would be compiled in.

Tensors that a launch may lack, and `out`, are arguments of their own: CuTe DSL (4.8) takes the stream of a launch from
the device of such a tensor, and warns of a tuple that holds nothing but None.
"""

from typing import NamedTuple

import cutlass
from cutlass import cute


class DenseTensors(NamedTuple):
    """Keys and values are paged, (pages, page_size, head_kv, dim), or packed, (total_k, head_kv, dim)."""

    q: cute.Tensor  # (total_q, head_q, head_dim)
    k: cute.Tensor
    v: cute.Tensor


class Nvfp4Tensors(NamedTuple):
    """Of an NVFP4 cache: bytes of elements, (pages, page_size, head_kv, dim / 2), and scales of 16 keys in a row."""

    q: cute.Tensor  # (total_q, head_q, head_dim)
    k: cute.Tensor
    v: cute.Tensor
    k_scales: cute.Tensor  # (pages, page_size / 16, head_kv, dim)
    v_scales: cute.Tensor


class MlaTensors(NamedTuple):
    """Absorbed MLA: values are the first `latent` elements of the keys."""

    q: cute.Tensor  # (total_q, head_q, latent)
    q_rope: cute.Tensor  # (total_q, head_q, rope)
    k: cute.Tensor  # (pages, page_size, 1, latent + rope)


class DenseLoads(NamedTuple):
    """TMA atoms of a kernel, each with the tensor that it copies from.

    Attributes:
        k_step, v_step: steps from a page to the next in mK and mV, where a box has all columns of a page.
    """

    tma_atom_q: cute.CopyAtom
    mQ: cute.Tensor
    tma_atom_k: cute.CopyAtom
    mK: cute.Tensor
    tma_atom_v: cute.CopyAtom
    mV: cute.Tensor
    k_step: cutlass.Int32 | None = None
    v_step: cutlass.Int32 | None = None


class DenseKeyLoads(NamedTuple):
    """Of a kernel whose warps load the queries: the queries as they are, and the TMA atoms of K and V."""

    mQ: cute.Tensor  # (total_q, head_q, head_dim)
    tma_atom_k: cute.CopyAtom
    mK: cute.Tensor
    tma_atom_v: cute.CopyAtom
    mV: cute.Tensor


class Nvfp4Loads(NamedTuple):
    """As DenseLoads, with those of the scales."""

    tma_atom_q: cute.CopyAtom
    mQ: cute.Tensor
    tma_atom_k: cute.CopyAtom
    mK: cute.Tensor
    tma_atom_v: cute.CopyAtom
    mV: cute.Tensor
    tma_atom_k_scales: cute.CopyAtom
    mKScales: cute.Tensor
    tma_atom_v_scales: cute.CopyAtom
    mVScales: cute.Tensor


class MlaLoads(NamedTuple):
    """As DenseLoads; the queries' latent and rope parts are copied each by its own atom."""

    tma_atom_q: cute.CopyAtom
    mQ: cute.Tensor
    tma_atom_q_rope: cute.CopyAtom
    mQRope: cute.Tensor
    tma_atom_k: cute.CopyAtom
    mK: cute.Tensor


class MlaKeyLoads(NamedTuple):
    """Of a kernel whose MMA warps load the queries: the queries as they are, and the keys' TMA atom."""

    mQ: cute.Tensor  # (total_q, head_q, latent)
    mQRope: cute.Tensor  # (total_q, head_q, rope)
    tma_atom_k: cute.CopyAtom
    mK: cute.Tensor


class TiledMmas(NamedTuple):
    """The matrix products of a kernel: S = Q K^T and O += P V."""

    qk: cute.TiledMma
    pv: cute.TiledMma


class MlaTiledMmas(NamedTuple):
    """As TiledMmas; P comes from registers, or from shared memory where the other warpgroup made it."""

    qk: cute.TiledMma
    pv: cute.TiledMma
    pv_shared: cute.TiledMma


class Outputs(NamedTuple):
    """Where results go: to `out` and `lse`, or where a key range is split to `partials`.

    Attributes:
        lse: natural logarithm of the softmax's denominator, float32; None if it is not needed.
        partials: float32; None where key ranges are not split.
        fold_workspace: float32, where a CTA keeps the splits that it has combined; None without fixed splits.
    """

    out: cute.Tensor  # (total_q, head_q, head_dim_v)
    lse: cute.Tensor | None  # (total_q, head_q)
    partials: cute.Tensor | None
    fold_workspace: cute.Tensor | None = None


def int32s(count: int) -> list[cutlass.Int32]:
    """Numbers of a fake tuple."""
    return [cutlass.Int32(1)] * count
