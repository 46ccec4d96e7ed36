// SPDX-License-Identifier: Apache-2.0
// Floating-point arithmetic and comparison (PTX ISA 9.2, 9.7.3 to 9.7.7).
//
// A directed rounding is the processor's own: the caller sets it around the handler, so one expression serves all four.
// Formats of 16 bits are computed in double and rounded once: 53 bits hold enough for a second rounding to be harmless
// in sums, products and quotients (Figueroa, 1995); fma rounds to odd first (Boldo and Melquiond, 2008).
#pragma once

#include "integer.h"

#define CANONICAL 0x7FFFFFFFu
static inline int is_nan32(u32 x) { return (x & 0x7FFFFFFF) > 0x7F800000; }
static inline int is_nan64(u64 x) { return (x & ~(1ull << 63)) > 0x7FF0000000000000; }
static inline u32 flushed(u32 x) { return x & 0x7F800000 ? x : x & 0x80000000; }

// f16 and bf16 as float, exactly.
static inline float f16_value(u32 h) {
    u32 magnitude = (h & 0x7FFF) << 13;
    float value = as_f32(magnitude) * 0x1p112f;
    u32 bits = (h & 0x7C00) == 0x7C00 ? magnitude | 0x7F800000 : bits_f32(value);
    return as_f32(bits | (h & 0x8000) << 16);
}
static inline float bf16_value(u32 h) { return as_f32(h << 16); }

enum { AS_F32, AS_F16, AS_BF16, PACKED = 4 };  // in extra[1]: how a source of a 32-bit or half operation is stored

// n floats of a source: the row itself, or a copy with subnormals flushed.
static inline const u32 *load_f32(const Warp *w, const Instr *in, int k, u32 *buffer, int n) {
    const u32 *a = src(w, in, k);
    if (!(in->flags & FTZ)) return a;
    for (int i = 0; i < n; i++) buffer[i] = flushed(a[i]);
    return buffer;
}
static inline u32 flushed_half(u32 h, u32 stored) {
    return h & ((stored & 3) == AS_F16 ? 0x7C00 : 0x7F80) ? h : h & 0x8000;
}
// A source stored as f32, f16 or bf16, as f32; of a pair the half that begins at bit `at`.
static inline const u32 *load_as(const Warp *w, const Instr *in, int k, u32 *buffer, u32 stored, int at) {
    const u32 *a = src(w, in, k);
    if (stored == AS_F32) return load_f32(w, in, k, buffer, LANES);
    EACH buffer[i] = in->flags & FTZ ? flushed_half(a[i] >> at & 0xFFFF, stored) : a[i] >> at & 0xFFFF;
    if ((stored & 3) == AS_F16)
        EACH buffer[i] = bits_f32(f16_value(buffer[i]));
    else
        EACH buffer[i] = bits_f32(bf16_value(buffer[i]));
    return buffer;
}

// .ftz flushes what is below the smallest normal number once it is rounded to 24 bits (f16: 11), as if exponents went on
// below; so does an H200. Rounded among the subnormal numbers, which lie twice as far apart, more would come up to it.
#define SMALLEST 0x00800000u
static inline int is_tiny(double x) { return fabsf((float)(x * 0x1p64)) < 0x1p-62f; }
static inline int any_smallest(const u32 *t, int n) {
    u32 found = 0;
    for (int i = 0; i < n; i++) found |= (t[i] & 0x7FFFFFFF) == SMALLEST;
    return (int)found;
}

// What follows every arithmetic operation on f32: canonical NaN, then what the modifiers ask for.
static inline void finish_f32(const Instr *in, u32 *t, int n) {
    for (int i = 0; i < n; i++) t[i] = is_nan32(t[i]) ? CANONICAL : t[i];
    if (in->flags & FTZ)
        for (int i = 0; i < n; i++) t[i] = flushed(t[i]);
    if (in->flags & SAT)
        for (int i = 0; i < n; i++) {
            t[i] = is_nan32(t[i]) || t[i] >> 31 ? 0 : t[i];
            t[i] = t[i] > 0x3F800000 ? 0x3F800000 : t[i];
        }
}

// One definition for f32 and f32x2; x, y, z are floats.
#define FLOATS(name, ...)                                                                                              \
    static inline void lanes_##name(const Warp *w, const Instr *in, u32 *t, int n) {                                   \
        u32 buffers[3][2 * LANES];                                                                                     \
        const u32 *a = load_f32(w, in, 0, buffers[0], n), *b = load_f32(w, in, 1, buffers[1], n);                      \
        const u32 *c = load_f32(w, in, 2, buffers[2], n);                                                              \
        for (int i = 0; i < n; i++) {                                                                                  \
            float x = as_f32(a[i]), y = as_f32(b[i]), z = as_f32(c[i]);                                                \
            (void)y, (void)z;                                                                                          \
            t[i] = bits_f32(__VA_ARGS__);                                                                              \
        }                                                                                                              \
        if (in->flags & FTZ && any_smallest(t, n))                                                                     \
            for (int i = 0; i < n; i++) {                                                                              \
                double x = as_f32(a[i]), y = as_f32(b[i]), z = as_f32(c[i]);                                           \
                (void)y, (void)z;                                                                                      \
                if ((t[i] & 0x7FFFFFFF) == SMALLEST && is_tiny(__VA_ARGS__)) t[i] &= 0x80000000;                       \
            }                                                                                                          \
        finish_f32(in, t, n);                                                                                          \
    }                                                                                                                  \
    HANDLER(name##_f32) {                                                                                              \
        u32 t[LANES];                                                                                                  \
        lanes_##name(w, in, t, LANES);                                                                                 \
        put32(w, in, 0, t, mask);                                                                                      \
    }
#define FLOATS_X2(name, ...)                                                                                           \
    FLOATS(name, __VA_ARGS__)                                                                                          \
    HANDLER(name##_f32x2) {                                                                                            \
        union {                                                                                                        \
            u32 single[2 * LANES];                                                                                     \
            u64 pair[LANES];                                                                                           \
        } t;                                                                                                           \
        lanes_##name(w, in, t.single, 2 * LANES);                                                                      \
        put64(w, in, 0, t.pair, mask);                                                                                 \
    }

// 2^x in double: the series of 2^f for |f| <= 1/2, coefficients ln(2)^k / k!; what follows the last is below 2^-56.
static inline double exp2_of(double x) {
    static const double SERIES[] = {
        0x1.c3bd650fc2986p-36, 0x1.e8cac7351bb25p-32, 0x1.e4cf5158b8ecap-28, 0x1.b5253d395e7c4p-24,
        0x1.62c0223a5c824p-20, 0x1.ffcbfc588b0c7p-17, 0x1.430912f86c787p-13, 0x1.5d87fe78a6731p-10,
        0x1.3b2ab6fba4e77p-7, 0x1.c6b08d704a0c0p-5, 0x1.ebfbdff82c58fp-3, 0x1.62e42fefa39efp-1, 0x1.0000000000000p+0};
    x = x < -200 ? -200 : x;
    x = x > 200 ? 200 : x;
    // The sum's last bits are x rounded to an integer.
    double shifted = x + 0x1.8p52, f = x - (shifted - 0x1.8p52), p = 0x1.816193166d0f9p-40;
    // Unrolled, the loop over lanes around it vectorises.
#pragma GCC unroll 13
    for (int k = 0; k < 13; k++) p = p * f + SERIES[k];
    return p * as_f64((bits_f64(shifted) + 1023) << 52);
}

FLOATS_X2(add, x + y)
FLOATS_X2(sub, x - y)
FLOATS_X2(mul, x *y)
// x*y is exact. What the sum loses (Knuth) moves it to its odd neighbour.
static inline double fma_to_odd(double x, double y, double z) {
    double p = x * y, s = p + z, part = s - p, lost = (p - (s - part)) + (z - part);
    u64 bits = bits_f64(s);
    if (lost != 0 && fabs(s) < INFINITY && !(bits & 1)) bits += (lost > 0) == (s > 0) ? 1 : (u64)-1;
    return as_f64(bits);
}
FLOATS_X2(fma, _Generic(x, float: __builtin_fmaf, double: fma_to_odd)(x, y, z))
FLOATS(div, x / y)
// The quotient by way of 1/y: a number beyond 2^126 has no reciprocal.
static inline float quotient_by_reciprocal(float x, float y) {
    if (!(fabsf(y) > 0x1p126f && fabsf(y) < INFINITY)) return x / y;
    return x != x || fabsf(x) == INFINITY ? NAN : copysignf(0, x) * copysignf(1, y);
}
FLOATS(div_approx, quotient_by_reciprocal(x, y))
FLOATS(rcp, 1 / x)
FLOATS(sqrt, __builtin_sqrtf(x))
FLOATS(rsqrt, (float)(1 / __builtin_sqrt((double)x)))
FLOATS(sin, (float)sin((double)x))
FLOATS(cos, (float)cos((double)x))
FLOATS(lg2, (float)log2((double)x))
FLOATS(ex2, (float)exp2_of((double)x))
FLOATS(tanh, (float)tanh((double)x))

// abs and neg touch the sign alone, of a NaN as well.
HANDLER(abs_f32) {
    u32 buffer[LANES], t[LANES];
    const u32 *a = load_f32(w, in, 0, buffer, LANES);
    EACH t[i] = a[i] & 0x7FFFFFFF;
    put32(w, in, 0, t, mask);
}
HANDLER(neg_f32) {
    u32 buffer[LANES], t[LANES];
    const u32 *a = load_f32(w, in, 0, buffer, LANES);
    EACH t[i] = a[i] ^ 0x80000000;
    put32(w, in, 0, t, mask);
}
TWO(copysign_f32, u32, u32, (x & 0x80000000) | (y & 0x7FFFFFFF))
TO64(copysign_f64, u64, (x & 1ull << 63) | (y & ~(1ull << 63)))
ONE64(abs_f64, u64, x & ~(1ull << 63))
ONE64(neg_f64, u64, x ^ 1ull << 63)

// Integers in the order of the numbers, -0 below +0.
static inline s32 order32(u32 x) { return (s32)(x ^ ((u32)((s32)x >> 31) >> 1)); }
static inline s64 order64(u64 x) { return (s64)(x ^ ((u64)((s64)x >> 63) >> 1)); }
#define PICK(name, T, bits, nan, canonical, BETTER)                                                                    \
    static inline T name##bits(T x, T y, int nan_wins) {                                                               \
        T best = order##bits(x) BETTER order##bits(y) ? x : y;                                                         \
        int x_nan = nan(x), y_nan = nan(y);                                                                            \
        best = x_nan ? y : y_nan ? x : best;                                                                           \
        return (x_nan & y_nan) | ((x_nan | y_nan) & nan_wins) ? canonical : best;                                      \
    }
#define CANONICAL64 0x7FFFFFFFFFFFFFFFull
PICK(lesser, u32, 32, is_nan32, CANONICAL, <)
PICK(greater, u32, 32, is_nan32, CANONICAL, >)
PICK(lesser, u64, 64, is_nan64, CANONICAL64, <)
PICK(greater, u64, 64, is_nan64, CANONICAL64, >)

#define EXTREME_FLOAT(name, pick)                                                                                      \
    HANDLER(name##_f32) {                                                                                              \
        u32 buffers[2][LANES], t[LANES];                                                                               \
        const u32 *a = load_f32(w, in, 0, buffers[0], LANES), *b = load_f32(w, in, 1, buffers[1], LANES);              \
        int nan_wins = !!(in->flags & NAN_WINS);                                                                       \
        if (in->flags & XORSIGN)                                                                                       \
            EACH t[i] = xorsign32(pick##32(a[i] & 0x7FFFFFFF, b[i] & 0x7FFFFFFF, nan_wins), a[i] ^ b[i]);              \
        else                                                                                                           \
            EACH t[i] = pick##32(a[i], b[i], nan_wins);                                                                \
        put32(w, in, 0, t, mask);                                                                                      \
    }                                                                                                                  \
    HANDLER(name##3_f32) {                                                                                             \
        u32 buffers[3][LANES], t[LANES];                                                                               \
        const u32 *a = load_f32(w, in, 0, buffers[0], LANES), *b = load_f32(w, in, 1, buffers[1], LANES);              \
        const u32 *c = load_f32(w, in, 2, buffers[2], LANES);                                                          \
        int nan_wins = !!(in->flags & NAN_WINS);                                                                       \
        EACH t[i] = pick##32(pick##32(a[i], b[i], nan_wins), c[i], nan_wins);                                          \
        put32(w, in, 0, t, mask);                                                                                      \
    }                                                                                                                  \
    TO64(name##_f64, u64, pick##64(x, y, 0))                                                                           \
    HALVES(name, as_f64(in->flags & XORSIGN ? xorsign64(pick##64(bits_f64(fabs(x)), bits_f64(fabs(y)),                 \
                                                                 !!(in->flags & NAN_WINS)),                            \
                                                        bits_f64(x) ^ bits_f64(y))                                     \
                                            : pick##64(bits_f64(x), bits_f64(y), !!(in->flags & NAN_WINS))))
static inline u32 xorsign32(u32 x, u32 signs) { return is_nan32(x) ? CANONICAL : x | (signs & 0x80000000); }
static inline u64 xorsign64(u64 x, u64 signs) { return is_nan64(x) ? CANONICAL64 : x | (signs & 1ull << 63); }

// double; NaN as the processor passes it on.
#define DOUBLES(name, ...)                                                                                             \
    HANDLER(name##_f64) {                                                                                              \
        const u64 *a = src64(w, in, 0), *b = src64(w, in, 1), *c = src64(w, in, 2);                                    \
        u64 t[LANES];                                                                                                  \
        EACH {                                                                                                         \
            double x = as_f64(a[i]), y = as_f64(b[i]), z = as_f64(c[i]);                                               \
            (void)y, (void)z;                                                                                          \
            t[i] = bits_f64(__VA_ARGS__);                                                                              \
        }                                                                                                              \
        put64(w, in, 0, t, mask);                                                                                      \
    }
DOUBLES(add, x + y)
DOUBLES(sub, x - y)
DOUBLES(mul, x *y)
DOUBLES(fma, __builtin_fma(x, y, z))
DOUBLES(div, x / y)
DOUBLES(rcp, 1 / x)
DOUBLES(sqrt, __builtin_sqrt(x))
DOUBLES(rsqrt, 1 / __builtin_sqrt(x))

// Formats below 32 bits. program.py has the order of the types.
enum { U8, U16, U32, U64, S8, S16, S32, S64, F16, BF16, F32, F64, TF32, E4M3, E5M2, E2M3, E3M2, E2M1, UE8M0 };
typedef struct {
    int mantissa, bias;
    u32 largest, infinity, nan;  // codes without a sign; infinity 0 where there is none
    int bits;
} Format;
static const Format FORMATS[] = {
    [F16] = {10, 15, 0x7BFF, 0x7C00, 0x7FFF, 16}, [BF16] = {7, 127, 0x7F7F, 0x7F80, 0x7FFF, 16},
    [TF32] = {10, 127, 0x3FBFF, 0x3FC00, 0x3FFFF, 19}, [E4M3] = {3, 7, 0x7E, 0, 0x7F, 8},
    [E5M2] = {2, 15, 0x7B, 0x7C, 0x7F, 8},        [E2M3] = {3, 1, 0x1F, 0, 0x1F, 6},
    [E3M2] = {2, 3, 0x1F, 0, 0x1F, 6},            [E2M1] = {1, 1, 0x7, 0, 0x7, 4},
};

// The code of x in a format, rounded once from whatever a double holds.
static inline u32 narrow(double x, int type, int mode, int satfinite) {
    const Format f = FORMATS[type];
    u64 bits = bits_f64(x);
    u32 negative = (u32)(bits >> 63), sign = negative << (f.bits - 1);
    if (is_nan64(bits)) return f.nan;
    int lowest = 1 - f.bias;  // exponent of the smallest normal number
    int exponent = (int)(bits >> 52 & 0x7FF) - 1023, used = exponent < lowest ? lowest : exponent;
    if (exponent > f.bias + 1) used = f.bias + 2, bits = (u64)(used + 1023) << 52;
    // In units of the last bit: both the scaling and the fraction are exact.
    double scaled = as_f64(bits & ~(1ull << 63)) * as_f64((u64)(f.mantissa - used + 1023) << 52);
    double whole = __builtin_floor(scaled), rest = scaled - whole;
    u32 code = (u32)whole;
    u32 above = rest > 0, half = rest >= 0.5, beyond_half = rest > 0.5;
    u32 up = mode == RN    ? beyond_half | (half & code & 1)
             : mode == RNA ? half
             : mode == RM  ? above & negative
             : mode == RP  ? above & (negative ^ 1)
                           : 0;
    // The hidden bit adds 1 to an exponent one too small, and a carry out of the mantissa does the same.
    u32 full = code + up + ((u32)(used - lowest) << f.mantissa);
    if (full <= f.largest) return sign | full;
    int infinite = (bits_f64(x) & ~(1ull << 63)) == 0x7FF0000000000000;
    int to_infinity = infinite || mode == RN || mode == RNA || (mode == RM && negative) || (mode == RP && !negative);
    return sign | (satfinite || !to_infinity ? f.largest : f.infinity ? f.infinity : f.nan);
}

static inline u32 bf16_of(u32 x) {
    return is_nan32(x) ? 0x7FFF : (x + 0x7FFF + (x >> 16 & 1)) >> 16;
}
static inline u32 f16_of(u32 x) {
    u32 sign = x >> 16 & 0x8000, a = x & 0x7FFFFFFF;
    // Adding 1/2 puts the last bit of a subnormal f16 into the last bit of a float.
    u32 tiny = bits_f32(as_f32(a) + 0.5f) - 0x3F000000;
    u32 normal = (a + 0xC8000FFF + (a >> 13 & 1)) >> 13;
    u32 huge = a > 0x7F800000 ? 0x7FFF : sign | 0x7C00;
    return a >= 0x47800000 ? huge : sign | (a < 0x38800000 ? tiny : normal);
}

static inline double half_value(u32 code, u32 stored) {
    return (stored & 3) == AS_F16 ? (double)f16_value(code) : (double)bf16_value(code);
}
// n values of one half or two a lane; subnormals flushed where the modifier says so.
static inline void load_half(const Warp *w, const Instr *in, int k, double *out, int n) {
    const u16 *a = (const u16 *)src(w, in, k);
    int step = n == LANES ? 2 : 1;
    for (int i = 0; i < n; i++) {
        u32 h = a[i * step];
        out[i] = half_value(in->flags & FTZ ? flushed_half(h, in->extra[1]) : h, in->extra[1]);
    }
}
static inline u32 code_half(const Instr *in, double x) {
    int type = (in->extra[1] & 3) == AS_F16 ? F16 : BF16;
    u32 h = narrow(x, type, RN, 0);
    // As is_tiny: times 2^16, the smallest normal number has the exponent 17.
    if (in->flags & FTZ && (narrow(x * 0x1p16, type, RN, 0) & 0x7FFF) < 17u << FORMATS[type].mantissa) h &= 0x8000;
    if (in->flags & SAT) h = x != x || h >> 15 ? 0 : MIN(h, 0x3C00u);
    if (in->flags & RELU && x == x && h >> 15) h = 0;
    return h;
}
static inline void put_half(const Warp *w, const Instr *in, const double *r, int n, u32 mask) {
    u32 t[LANES];
    if (n == LANES)
        EACH t[i] = code_half(in, r[i]);
    else
        EACH t[i] = code_half(in, r[2 * i]) | code_half(in, r[2 * i + 1]) << 16;
    put32(w, in, 0, t, mask);
}

// One definition for f16, bf16 and pairs of them; x, y, z are doubles.
#define HALVES(name, ...)                                                                                              \
    HANDLER(name##_half) {                                                                                             \
        int n = in->extra[1] & PACKED ? 2 * LANES : LANES;                                                             \
        double a[2 * LANES], b[2 * LANES], c[2 * LANES];                                                               \
        load_half(w, in, 0, a, n), load_half(w, in, 1, b, n), load_half(w, in, 2, c, n);                               \
        for (int i = 0; i < n; i++) {                                                                                  \
            double x = a[i], y = b[i], z = c[i];                                                                       \
            (void)y, (void)z;                                                                                          \
            a[i] = __VA_ARGS__;                                                                                        \
        }                                                                                                              \
        put_half(w, in, a, n, mask);                                                                                   \
    }
HALVES(add, x + y)
HALVES(sub, x - y)
HALVES(mul, x *y)
HALVES(fma, fma_to_odd(x, y, z))
HALVES(abs, fabs(x))
HALVES(neg, -x)
HALVES(tanh, tanh(x))
HALVES(ex2, exp2_of(x))
EXTREME_FLOAT(min, lesser)
EXTREME_FLOAT(max, greater)

// A half widened, then f32 arithmetic (9.7.5).
#define MIXED(name, b_stored, ...)                                                                                     \
    HANDLER(name##_mixed) {                                                                                            \
        u32 buffers[3][LANES], t[LANES], stored = in->extra[1];                                                        \
        const u32 *a = load_as(w, in, 0, buffers[0], stored, 0), *b = load_as(w, in, 1, buffers[1], b_stored, 0);            \
        const u32 *c = load_as(w, in, 2, buffers[2], AS_F32, 0);                                                          \
        EACH {                                                                                                         \
            float x = as_f32(a[i]), y = as_f32(b[i]), z = as_f32(c[i]);                                                \
            (void)z;                                                                                                   \
            t[i] = bits_f32(__VA_ARGS__);                                                                              \
        }                                                                                                              \
        finish_f32(in, t, LANES);                                                                                      \
        put32(w, in, 0, t, mask);                                                                                      \
    }
MIXED(add, AS_F32, x + y)
MIXED(sub, AS_F32, x - y)
MIXED(fma, stored, __builtin_fmaf(x, y, z))

// Comparison. extra[0]: bits 0 and 1 how source 2 is combined (and, or, xor from 1), then what `set` writes.
enum { SET_NOTHING, SET_ONES, SET_F32, SET_F16, SET_BF16, SET_ONES16 };
static const u32 SET_VALUES[] = {1, 0xFFFFFFFF, 0x3F800000, 0x3C00, 0x3F80, 0xFFFF};
// A comparison combined with source 2.
static void combine(const Warp *w, const Instr *in, const u32 *holds, u32 *t) {
    u32 how = in->extra[0] & 3, buffer[LANES];
    const u32 *c = predicate(w, in, 2, buffer);
    if (how == 0)
        EACH t[i] = holds[i];
    else if (how == 1)
        EACH t[i] = holds[i] & c[i];
    else if (how == 2)
        EACH t[i] = holds[i] | c[i];
    else
        EACH t[i] = holds[i] ^ c[i];
}
static void compared(const Warp *w, const Instr *in, const u32 *holds, u32 mask) {
    u32 what = in->extra[0] >> 2, t[LANES], other[LANES];
    combine(w, in, holds, t);
    if (what) EACH t[i] = t[i] ? SET_VALUES[what] : 0;
    put32(w, in, 0, t, mask);
    if (in->args[1] == ROW_SINK) return;
    EACH other[i] = holds[i] ^ 1;
    combine(w, in, other, t);
    put32(w, in, 1, t, mask);
}
// Two halves: predicates for each, or two values in one register.
static void compared_pair(const Warp *w, const Instr *in, const u32 *low, const u32 *high, u32 mask) {
    u32 what = in->extra[0] >> 2, t[LANES], u[LANES];
    combine(w, in, low, t);
    combine(w, in, high, u);
    if (what) {
        EACH t[i] = (t[i] ? SET_VALUES[what] : 0) | (u[i] ? SET_VALUES[what] << 16 : 0);
        put32(w, in, 0, t, mask);
    } else {
        put32(w, in, 0, t, mask);
        if (in->args[1] != ROW_SINK) put32(w, in, 1, u, mask);
    }
}
#define COMPARE(name, T, ...)                                                                                          \
    HANDLER(name) {                                                                                                    \
        const T *a = (const T *)src(w, in, 0), *b = (const T *)src(w, in, 1);                                          \
        u32 holds[LANES];                                                                                              \
        EACH {                                                                                                         \
            T x = a[i], y = b[i];                                                                                      \
            holds[i] = __VA_ARGS__;                                                                                    \
        }                                                                                                              \
        compared(w, in, holds, mask);                                                                                  \
    }
#define COMPARE_INTEGERS(cmp, OP)                                                                                      \
    COMPARE(compare_##cmp##_u32, u32, x OP y)                                                                          \
    COMPARE(compare_##cmp##_s32, s32, x OP y)                                                                          \
    COMPARE(compare_##cmp##_s16, u32, (s16)x OP(s16) y)                                                                \
    COMPARE(compare_##cmp##_u64, u64, x OP y)                                                                          \
    COMPARE(compare_##cmp##_s64, s64, x OP y)
COMPARE_INTEGERS(eq, ==)
COMPARE_INTEGERS(ne, !=)
COMPARE_INTEGERS(lt, <)
COMPARE_INTEGERS(le, <=)
COMPARE_INTEGERS(gt, >)
COMPARE_INTEGERS(ge, >=)

#define COMPARE_FLOATS(cmp, ...)                                                                                       \
    static inline void holds_##cmp(const Warp *w, const Instr *in, u32 *holds, int at) {                               \
        u32 buffers[2][LANES], stored = in->extra[1];                                                                  \
        const u32 *a = load_as(w, in, 0, buffers[0], stored, at), *b = load_as(w, in, 1, buffers[1], stored, at);      \
        EACH {                                                                                                         \
            float x = as_f32(a[i]), y = as_f32(b[i]);                                                                  \
            holds[i] = __VA_ARGS__;                                                                                    \
        }                                                                                                              \
    }                                                                                                                  \
    HANDLER(compare_##cmp##_f32) {                                                                                     \
        u32 holds[LANES], high[LANES];                                                                                 \
        holds_##cmp(w, in, holds, 0);                                                                                  \
        if (in->extra[1] & PACKED) {                                                                                   \
            holds_##cmp(w, in, high, 16);                                                                              \
            compared_pair(w, in, holds, high, mask);                                                                   \
        } else                                                                                                         \
            compared(w, in, holds, mask);                                                                              \
    }                                                                                                                  \
    HANDLER(compare_##cmp##_f64) {                                                                                     \
        const u64 *a = src64(w, in, 0), *b = src64(w, in, 1);                                                          \
        u32 holds[LANES];                                                                                              \
        EACH {                                                                                                         \
            double x = as_f64(a[i]), y = as_f64(b[i]);                                                                 \
            holds[i] = __VA_ARGS__;                                                                                    \
        }                                                                                                              \
        compared(w, in, holds, mask);                                                                                  \
    }
#define UNORDERED ((x != x) | (y != y))
COMPARE_FLOATS(eq, x == y)
COMPARE_FLOATS(ne, (x < y) | (x > y))
COMPARE_FLOATS(lt, x < y)
COMPARE_FLOATS(le, x <= y)
COMPARE_FLOATS(gt, x > y)
COMPARE_FLOATS(ge, x >= y)
COMPARE_FLOATS(equ, (x == y) | UNORDERED)
COMPARE_FLOATS(neu, x != y)
COMPARE_FLOATS(ltu, !(x >= y))
COMPARE_FLOATS(leu, !(x > y))
COMPARE_FLOATS(gtu, !(x <= y))
COMPARE_FLOATS(geu, !(x < y))
COMPARE_FLOATS(num, !UNORDERED)
COMPARE_FLOATS(nan, UNORDERED)

// testp. extra[0]: which of the classes.
enum { FINITE, INFINITE, NUMBER, NOT_A_NUMBER, NORMAL, SUBNORMAL };
static inline u32 of_class(int what, int exponent, int top, int fraction) {
    switch (what) {
        case FINITE: return exponent != top;
        case INFINITE: return exponent == top && !fraction;
        case NUMBER: return exponent != top || !fraction;
        case NOT_A_NUMBER: return exponent == top && fraction;
        case NORMAL: return exponent != top && (exponent || !fraction);  // zero is normal
        default: return exponent == 0 && fraction;
    }
}
HANDLER(testp_f32) {
    const u32 *a = src(w, in, 0);
    u32 t[LANES];
    EACH t[i] = of_class((int)in->extra[0], a[i] >> 23 & 0xFF, 0xFF, (a[i] & 0x7FFFFF) != 0);
    put32(w, in, 0, t, mask);
}
HANDLER(testp_f64) {
    const u64 *a = src64(w, in, 0);
    u32 t[LANES];
    EACH t[i] = of_class((int)in->extra[0], (int)(a[i] >> 52 & 0x7FF), 0x7FF, (a[i] & ((1ull << 52) - 1)) != 0);
    put32(w, in, 0, t, mask);
}
