# SPDX-License-Identifier: Apache-2.0
"""What a kernel runs on: warps, memories, barriers, copy and matrix engines, and the checks on all of them."""

from emulator.machine.machine import Machine

__all__ = ["Machine"]
