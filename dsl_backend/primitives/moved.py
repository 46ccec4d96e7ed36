# SPDX-License-Identifier: Apache-2.0
"""Names that CuTe DSL 4.8 has in other modules than 4.6 and 4.7, whose places it will drop."""

try:
    from cutlass.memory import SmemAllocator
    from cutlass.tensor_utils import LayoutEnum
except ImportError:
    from cutlass.utils import LayoutEnum, SmemAllocator

__all__ = ["LayoutEnum", "SmemAllocator"]
