# SPDX-License-Identifier: Apache-2.0
"""The case of docs/emulator-clock.md's picture, for `python -m emulator`; run it from the root of a checkout."""

from benchmarks.clock.problems import run_of
from emulator.clock.chips import CHIPS


def prefill() -> None:
    """16 prompts of 1024 tokens, 32 heads of queries and 8 of keys, on Hopper."""
    run_of("prefill", "hd128-h32x8-16x1k", CHIPS["H200"], ours=True)()
