# SPDX-License-Identifier: Apache-2.0
"""The numbers that every path of the sampler computes with.

A token's weight exp(z - max z) is an integer, computed from its logit by one float32 subtraction and integers alone.
Integer sums do not depend on their order, so that every path on every device finds the same masks and draws the same
token, bit for bit:

1. v = floor(min(max z - z, FARTHEST) * 2**DISTANCE_BITS), the distance from the largest logit;
2. t = (v * LOG2E) >> 32, the same in base 2, with DISTANCE_BITS - 1 fraction bits;
3. h = 2**31 * 2**-f for t's fraction f, a polynomial by Horner's rule: h = COEFFICIENTS[i] - ((F * h) >> 32);
4. weight = (h << (WEIGHT_BITS - 31)) >> (t's whole part).

It is within 1e-7 of exp(z - max z), relative, or within 2**-WEIGHT_BITS of it, absolute; it never grows with the
distance, and is 2**WEIGHT_BITS exactly at the largest logit.
"""

DISTANCE_BITS = 25
FRACTION_BITS = DISTANCE_BITS - 1
# Weights are 0 from 41 * ln(2) = 28.5 on; the distance has 30 bits then.
FARTHEST = 31.0
LOG2E = 3098164009  # round(log2(e) * 2**31)
WEIGHT_BITS = 40
# 2**-f on [0, 1] in units of 2**-31, signs alternating: f(1 - f) times a Chebyshev fit, added to 1 - f/2, so that both
# ends are exact and octaves join. Relative error 8e-9; tests/sampling looks at all 2**24 fractions.
COEFFICIENTS = (2147483648, 1488522189, 515880104, 119172786, 20581130, 2743242, 235160)

# Sums of weights stay below 2**62, as their products in 31-bit halves need.
LARGEST_VOCAB = 1 << 21
# Top-p is taken as a multiple of 2**-31: 1 - p in float32 is one.
SHARE_BITS = 31

# As vLLM's _SAMPLING_EPS: below it a row is greedy.
LEAST_TEMPERATURE = 1e-5

# Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011): Philox 4x32-10. The counter is
# (position low, position high, STREAM, 0), the key is the seed; words 0 and 1 give the 62 bits of a draw.
PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
STREAM = 0x5A3D
