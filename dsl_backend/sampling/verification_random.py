# SPDX-License-Identifier: Apache-2.0
"""Where the ratio test's random numbers come from: the sampler's generator, at counters that no position has."""

# Positions are below 2**31.
RATIO_TEST = 1 << 62
RESIDUAL = 1 << 61
