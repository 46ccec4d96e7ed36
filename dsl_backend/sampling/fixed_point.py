# SPDX-License-Identifier: Apache-2.0
"""The fixed-point format of probabilities, and the other constants of the sampler's definition.

A token's probability before normalization, exp((max x - x) / -T) for its logit x and the temperature T, is an integer
here. It is computed in float32 by operations that IEEE 754 defines, each rounded once to the nearest, ties to even. The
order of integer additions does not matter, so every kernel on every device finds the same masses and draws the same
token, bit for bit:

1. scale = EXPONENT_SCALE / T in float32, once for a row;
2. exponent = (reference - x) * scale, of the difference in float32 and not rounded again: how far x lies below a
   reference logit, in base 2; 0 for an x above the reference, and MAX_EXPONENT for NaN and for more than that;
3. exponent = -(n + f) for the nearest integer n, the even one of two, and f from -1/2 to 1/2, which is rounded to a
   float32: one fma(x - reference, scale, constant) finds n, and fma(x - reference, scale, -n) f;
4. 2**f is a polynomial by Horner's rule: h = fma(f, h, EXP2_COEFFICIENTS[i]);
5. mass = h * 2**n in units of 2**-MANTISSA_BITS, without its fraction. The same in units of 2**-PROB_BITS, which has
   more bits, is called prob.

Both never grow with the exponent, and are exactly 1 at the reference. The relative error is below 2e-7 by the
polynomial, and below 1.4e-7 for each power of two of the distance by float32; or the absolute error is
below a unit.

Blocks. A block is BLOCK adjacent logits of a row. Its masses are relative to a reference of its own, its largest logit,
and a weight says what the reference is in the row: the prob of the block's maximum below the row's. A sum of the
block's first masses counts floor(sum * weight / 2**MANTISSA_BITS) in the row. So a block is summed before the row's
maximum is known, and a row is read once.
"""

EXPONENT_SCALE = 1.44269502162933349609375  # log2(e) as a float32
# From 41 on a prob is 0.
MAX_EXPONENT = 62.0
MANTISSA_BITS = 29
PROB_BITS = 40
# 2**f on [-1/2, 1/2]: a weighted fit that is exact at 0, and continuous at each power of two. All are float32. The
# relative error is 1.7e-7; tests/sampling checks all multiples of 2**-23.
EXP2_COEFFICIENTS = (
    *(1.0, 0.6931470036506653, 0.24022242426872253),
    *(0.05550733581185341, 0.009671512991189957, 0.001326472731307149),
)
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
