# SPDX-License-Identifier: Apache-2.0
"""PTX as text becomes a typed module: `parse(text)`; what is not in the tables of forms is refused, all at once."""

from emulator.ptx.errors import PtxError, Refusal, Refused
from emulator.ptx.parser import parse

__all__ = ["PtxError", "Refusal", "Refused", "parse"]
