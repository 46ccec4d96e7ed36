# SPDX-License-Identifier: Apache-2.0
"""Launches over blocks of rows: how many logits a program has, and programmatic dependent launches."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MIN_BLOCK, MAX_BLOCK = 512, 4096
LOGITS_OF_THREAD = 16


def block_of(vocab: int, sms: int) -> int:
    """Logits of a program: the least power of two with which one row has a program for half of the SMs at most.

    So one request's rows fill the SMs, and programs of many requests are no shorter than that needs. A CPU has no SMs.
    """
    return min(max(triton.next_power_of_2(triton.cdiv(vocab, max(sms // 2, 1))), MIN_BLOCK), MAX_BLOCK)


def warps_of(block: int) -> int:
    """Warps of a program of so many logits."""
    return block // (32 * LOGITS_OF_THREAD)


@triton.jit
def after_the_last_launch(OVERLAP: tl.constexpr):
    """Wait for the launch before; then the next one may start beside this one, and waits for it in turn.

    Before any exit: a launch whose programs end early would let the next one start beside the launch before.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
