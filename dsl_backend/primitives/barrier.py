# SPDX-License-Identifier: Apache-2.0
"""Barriers of a CTA."""

from cutlass import cute


def cta_barrier():
    """Synchronize all threads of the CTA.

    Lanes that left a loop early reconverge first: bar.sync counts whole warps.
    """
    cute.arch.sync_warp()
    cute.arch.sync_threads()
