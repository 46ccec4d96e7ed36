# SPDX-License-Identifier: Apache-2.0
"""How caches, activations and weights are stored: the storage types that dispatch, kernels and the plugin use."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from dsl_backend.errors import InvalidInput


@dataclass(frozen=True)
class KVFormat:
    """A storage type of keys and values.

    A stored fp8 value is the real value divided by a scale; `api.check_scales` says what a scale may be. float8_e4m3fn
    has NaN and no infinity, float8_e5m2 has both. Infinities and what is too large are stored as the largest number.

    NVFP4 stores two e2m1 in a byte, the first in its low bits, and a scale in e4m3 for each 16 elements of a row; a
    real value is the element times the scale of its block times the scale of the tensor or of the head. A block with a
    NaN has the scale NaN. Keys and values are tensors [pages, page_size, heads_kv, width(dim)] of bytes. A page of one
    of them is dense, and the elements of all its rows come before the scales of all its rows, both in the order of the
    tensor's strides: `parts` has the two. This is vLLM's layout of a page, the scales of values in order, as
    FlashInfer's FA2 reads them.

    Attributes:
        name: of the torch dtype, without the module.
    """

    name: str

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.name)
        return found

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the tensor."""
        return self.dtype.itemsize

    def width(self, dim: int) -> int:
        """Elements of the tensor for a row of `dim`: with NVFP4 bytes, of elements and of scales."""
        return dim // 2 + dim // KV_BLOCK if self.nvfp4 else dim

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row."""
        return self.width(dim) * self.itemsize

    def parts(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """NVFP4's elements [pages, page_size, heads_kv, dim / 2] and scales [..., dim / 16] of a tensor, as bytes."""
        pages = pages.view(torch.uint8)
        count, tokens, heads, width = pages.shape
        elements = width // 9 * 8
        page, token, head = (int(stride) for stride in pages.stride()[:3])

        def part(columns: int, first: int) -> torch.Tensor:
            strides = (page, token * columns // width, head * columns // width, 1)
            return pages.as_strided((count, tokens, heads, columns), strides, pages.storage_offset() + first)

        return part(elements, 0), part(width - elements, tokens * heads * elements)

    def page_objection(self, pages: torch.Tensor) -> str | None:
        """Why a tensor of keys or values of this format has no pages that `parts` can take; None where it has."""
        if not self.nvfp4:
            return None
        _, tokens, heads, width = pages.shape
        page, token, head = pages.stride()[:3]
        tokens_first = (heads == 1 or head == width) and (tokens == 1 or token == heads * width)
        heads_first = (tokens == 1 or token == width) and (heads == 1 or head == tokens * width)
        if (tokens_first or heads_first) and page >= tokens * heads * width:
            return None
        return (
            f"has strides {pages.stride()}: dense pages of {tokens} tokens, {heads} heads and {width} bytes are "
            f"needed, tokens or heads outermost"
        )

    @property
    def fp8(self) -> bool:
        """Whether values have scales and are dequantized as they are read."""
        return self in FP8

    @cached_property
    def nvfp4(self) -> bool:
        return self == NVFP4_KV

    @property
    def quantized(self) -> bool:
        """Whether values have scales, of the tensor or of a head, and are dequantized as they are read."""
        return self.fp8 or self.nvfp4

    @property
    def largest(self) -> float:
        """The largest number; larger ones saturate at it where they are stored as fp8 or NVFP4."""
        return E2M1_MAX * torch.finfo(E4M3.dtype).max if self.nvfp4 else torch.finfo(self.dtype).max

    def __str__(self) -> str:
        return "nvfp4" if self.nvfp4 else self.name


E4M3, E5M2 = KVFormat("float8_e4m3fn"), KVFormat("float8_e5m2")
FP8 = (E4M3, E5M2)
# Elements of a row that share a scale.
KV_BLOCK = 16
NVFP4_KV = KVFormat("float4_e2m1fn_x2")


def format_of(dtype: torch.dtype) -> KVFormat:
    """The format of a cache of this dtype."""
    return KVFormat(str(dtype).removeprefix("torch."))


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype in FP8_DTYPES


FP8_DTYPES = tuple(kind.dtype for kind in FP8)


# Columns that share a scale of an activation, and rows and columns of a block of a weight: DeepSeek's.
GROUP = 128
# The largest e2m1, and rows whose swizzled scales lie together.
E2M1_MAX, SWIZZLED_ROWS = 6.0, 128


@dataclass(frozen=True, kw_only=True)
class ScaledFormat:
    """How a quantised matrix [rows, columns] is stored: a value is the stored element times its scale.

    Attributes:
        name: in operators' schemas; see `scaled_format`.
        values: dtype of the elements.
        scales: float32, or float8_e8m0fnu: powers of two, stored as their exponent plus 127 in a byte.
        block_rows, block_columns: of the block that shares a scale; None is all of them. The last block of a row or a
            column may be smaller.
        packed: elements in one of `values`, the first in its low bits; the matrix has so many times fewer columns.
        swizzled: scales lie as SM100's matrix products take them, see `quant.reference.swizzled`.
        tiled: elements and scales lie together in tiles, see `quant.mxfp4_tiles`; they are multiplied with 16 bits.
    """

    name: str
    values: torch.dtype
    scales: torch.dtype = torch.float32
    block_rows: int | None
    block_columns: int | None
    packed: int = 1
    swizzled: bool = False
    tiled: bool = False

    @property
    def blocked(self) -> bool:
        """Whether a row has several scales: products must be scaled before they are summed."""
        return self.block_columns is not None

    @property
    def one_scale(self) -> bool:
        """Whether all elements share one scale; that of an output is given."""
        return not self.blocked and self.block_rows is None

    @property
    def largest(self) -> float:
        return E2M1_MAX if self.packed > 1 else torch.finfo(self.values).max

    def pads_columns(self, columns: int) -> bool:
        """Whether swizzled scales have padding behind the blocks of a row."""
        assert self.block_columns is not None
        return -(-columns // self.block_columns) % 4 != 0

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of the scales of a matrix: [1], [rows], or [blocks of rows, blocks of columns].

        Swizzled ones are padded: rows to 128s, blocks of columns to fours.
        """
        if self.swizzled:
            assert self.block_columns is not None
            return -(-rows // SWIZZLED_ROWS) * SWIZZLED_ROWS, -(-columns // (4 * self.block_columns)) * 4
        if self.block_columns is not None:
            return -(-rows // (self.block_rows or max(1, rows))), -(-columns // self.block_columns)
        return (1,) if self.block_rows is None else (-(-rows // self.block_rows),)

    def __str__(self) -> str:
        return self.name


TENSOR_SCALED = ScaledFormat(name="e4m3-tensor", values=E4M3.dtype, block_rows=None, block_columns=None)
# By token of an activation, by output channel of a weight.
ROW_SCALED = ScaledFormat(name="e4m3-row", values=E4M3.dtype, block_rows=1, block_columns=None)
GROUP_SCALED = ScaledFormat(name="e4m3-1x128", values=E4M3.dtype, block_rows=1, block_columns=GROUP)
BLOCK_SCALED = ScaledFormat(name="e4m3-128x128", values=E4M3.dtype, block_rows=GROUP, block_columns=GROUP)
# The same with scales that are powers of two.
GROUP_SCALED_E8M0 = replace(GROUP_SCALED, name="e4m3-1x128-e8m0", scales=torch.float8_e8m0fnu)
BLOCK_SCALED_E8M0 = replace(BLOCK_SCALED, name="e4m3-128x128-e8m0", scales=torch.float8_e8m0fnu)
# What SM100's matrix products scale themselves: OCP's MXFP8 with a scale for 32 columns, MXFP4 with such a scale and
# two elements of e2m1 in a byte, and NVIDIA's NVFP4, e2m1 with a scale for 16 columns, to which belongs one float32
# scale of the whole matrix.
MXFP8 = ScaledFormat(
    name="mxfp8", values=E4M3.dtype, scales=torch.float8_e8m0fnu, block_rows=1, block_columns=32, swizzled=True
)
MXFP4 = replace(MXFP8, name="mxfp4", values=torch.uint8, packed=2)
# MXFP4 under activations in 16 bits: eight elements in a word.
MXFP4_TILED = ScaledFormat(
    name="mxfp4-tiled",
    values=torch.int32,
    scales=torch.float8_e8m0fnu,
    block_rows=1,
    block_columns=32,
    packed=8,
    tiled=True,
)
NVFP4 = ScaledFormat(
    name="nvfp4", values=torch.uint8, scales=E4M3.dtype, block_rows=1, block_columns=16, packed=2, swizzled=True
)
SCALED_FORMATS = {
    kind.name: kind
    for kind in (
        TENSOR_SCALED,
        ROW_SCALED,
        GROUP_SCALED,
        BLOCK_SCALED,
        GROUP_SCALED_E8M0,
        BLOCK_SCALED_E8M0,
        MXFP8,
        MXFP4,
        MXFP4_TILED,
        NVFP4,
    )
}


def scaled_format(name: str) -> ScaledFormat:
    """The format of a name. Raises InvalidInput: there is none."""
    if name not in SCALED_FORMATS:
        raise InvalidInput(f"format {name!r} is not one of {', '.join(SCALED_FORMATS)}")
    return SCALED_FORMATS[name]
