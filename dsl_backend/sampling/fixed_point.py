# SPDX-License-Identifier: Apache-2.0
"""The fixed-point format of probabilities, and the other constants of the sampler's definition.

A token's probability before normalization, exp((max x - x) / -T) for its logit x and the temperature T, is an integer
here. It is computed by one subtraction and one product in float32 and integer operations. The order of integer
additions does not matter, so every kernel on every device finds the same masses and draws the same token, bit for bit:

1. scale = EXPONENT_SCALE / T in float32, once for a row;
2. exponent = floor(min((reference - x) * scale, MAX_EXPONENT)): how far x lies below a reference logit, in base 2 with
   FRACTION_BITS fraction bits; MAX_EXPONENT for NaN, and 0 for an x above the reference;
3. mantissa = 2**MANTISSA_BITS * 2**-f for the exponent's fraction f, a polynomial by Horner's rule:
   h = EXP2_COEFFICIENTS[i] + ((F * h) >> 32), where F = 2**32 - 1 - (f as a 32-bit fraction);
4. mass = mantissa >> (the exponent's integer part), in units of 2**-MANTISSA_BITS; the same in units of 2**-PROB_BITS
   is called prob.

Both never grow with the exponent, and are exactly 1 at the reference. The relative error is below 1.3e-7 by the
polynomial, and below 1.4e-7 for each power of two of the distance by float32; or the absolute error is below a unit.

Blocks. A block is BLOCK adjacent logits of a row. Its masses are relative to a reference of its own, its largest logit,
and a weight says what the reference is in the row: the prob of the block's maximum below the row's. A sum of the
block's first masses counts floor(sum * weight / 2**MANTISSA_BITS) in the row. So a block is summed before the row's
maximum is known, and a row is read once.
"""

FRACTION_BITS = 24
EXPONENT_SCALE = 24204406.0  # round(log2(e) * 2**24), a float32
# From 41 * 2**24 on a prob is 0; the integer part stays below 64.
MAX_EXPONENT = 63.0 * 2**24
MANTISSA_BITS = 29
PROB_BITS = 40
# 2**g on [0, 1] in units of 2**-28: 1 + g plus g(1 - g) times a weighted fit, so that both ends are exact and the
# function is continuous at each power of two. The first one is such that F = 2**32 - 1 gives 2**29 in spite of the
# truncations. The relative error is 1.2e-7; tests/sampling checks all 2**24 fractions.
EXP2_COEFFICIENTS = (268435461, 186066502, 64467264, 14983712, 2413502, 504476)
BLOCK = 512

# A sum of probabilities stays below 2**62: their products are computed in halves of 31 bits.
MAX_VOCAB = 1 << 21
# 1 - top_p is a multiple of 2**-31 in float32.
TOP_P_BITS = 31

# A row with a lower temperature is greedy; vLLM's _SAMPLING_EPS.
GREEDY_TEMPERATURE = 1e-5
# Higher ones count as this one, which gives all finite logits of usual size the same probability.
MAX_TEMPERATURE = 1e30
# The reference of a row with an infinite logit: float32's largest number.
MAX_LOGIT = 3.4028234663852886e38

# Philox 4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). The key is the seed, and the
# counter is (low word of the position, high word, PHILOX_STREAM, round). The first two words of the result give 62
# bits. Round 0 draws; later ones draw again where top-p removes a token.
PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
PHILOX_STREAM = 0x5A3D
