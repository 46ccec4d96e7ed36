# SPDX-License-Identifier: Apache-2.0
"""Tile schedulers: one warp finds the next work tile of its CTA from the lengths on the device."""
