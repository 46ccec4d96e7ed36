# SPDX-License-Identifier: Apache-2.0
"""How a cache stores keys and values: the list of storage types that dispatch, kernels and the plugin use."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVFormat:
    """A storage type of keys and values.

    A stored fp8 value is the real value divided by a scale; `api.check_scales` says what a scale may be. float8_e4m3fn
    has NaN and no infinity, float8_e5m2 has both. Infinities and what is too large are stored as the largest number.

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
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def fp8(self) -> bool:
        """Whether values have scales and are dequantized as they are read."""
        return self in FP8

    @property
    def largest(self) -> float:
        """The largest number; larger ones saturate at it where they are stored as fp8."""
        return torch.finfo(self.dtype).max


E4M3, E5M2 = KVFormat("float8_e4m3fn"), KVFormat("float8_e5m2")
FP8 = (E4M3, E5M2)


def format_of(dtype: torch.dtype) -> KVFormat:
    """The format of a cache of this dtype."""
    return KVFormat(str(dtype).removeprefix("torch."))


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype in FP8_DTYPES


FP8_DTYPES = tuple(kind.dtype for kind in FP8)
