# SPDX-License-Identifier: Apache-2.0
"""Holds the emulator's clock against what chips did: `python -m benchmarks.clock`."""
