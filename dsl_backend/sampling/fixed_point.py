# SPDX-License-Identifier: Apache-2.0
"""The fixed-point format of probabilities, and the other constants of the sampler's definition.

z is a logit divided by the temperature. A token's probability before normalization, exp(z - max z), is an integer here.
It is computed from z by one float32 subtraction and integer operations. The order of integer additions does not matter,
so every kernel on every device finds the same masks and draws the same token, bit for bit:

1. distance = floor(min(max z - z, MAX_DISTANCE) * 2**DISTANCE_BITS);
2. t = (distance * LOG2_E) >> 32, the same in base 2, with DISTANCE_BITS - 1 fraction bits;
3. h = 2**31 * 2**-f for t's fraction f, a polynomial by Horner's rule: h = EXP2_COEFFICIENTS[i] - ((F * h) >> 32),
   where F is f as a 32-bit fraction;
4. prob = (h << (PROB_BITS - 31)) >> (t's integer part).

`prob` is in units of 2**-PROB_BITS. Its relative error is below 1e-7, or its absolute error below one unit. It never
grows with the distance, and it is exactly 1 at the maximum.
"""

DISTANCE_BITS = 25
FRACTION_BITS = DISTANCE_BITS - 1
# prob is 0 from 41 * ln(2) = 28.5 on. A distance of 31 has 30 bits.
MAX_DISTANCE = 31.0
LOG2_E = 3098164009  # round(log2(e) * 2**31)
PROB_BITS = 40
# 2**-f on [0, 1] in units of 2**-31, signs alternating: f(1 - f) times a Chebyshev fit, added to 1 - f/2, so that both
# ends are exact and the function is continuous at each power of two. The relative error is 8e-9; tests/sampling checks
# all 2**24 fractions.
EXP2_COEFFICIENTS = (2147483648, 1488522189, 515880104, 119172786, 20581130, 2743242, 235160)

# A sum of probabilities stays below 2**62: their products are computed in halves of 31 bits.
MAX_VOCAB = 1 << 21
# 1 - top_p is a multiple of 2**-31 in float32.
TOP_P_BITS = 31

# A row with a lower temperature is greedy; vLLM's _SAMPLING_EPS.
GREEDY_TEMPERATURE = 1e-5

# Philox 4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). The key is the seed, and the
# counter is (low word of the position, high word, PHILOX_STREAM, 0). The first two words of the result give 62 bits.
PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
PHILOX_STREAM = 0x5A3D
