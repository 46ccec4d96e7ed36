// SPDX-License-Identifier: Apache-2.0
// Conversions between types (PTX ISA 9.2, 9.7.9.21, 9.7.9.22).
//
// extra[0]: type of the result, type of the source << 8, bits of the destination register << 16, and bit 24 where the
// source's register has 64 bits. extra[1]: rounding to an integer, from 1: to nearest, to zero, down, up.
#pragma once

#include "floats.h"

#define RESULT_TYPE(in) ((in)->extra[0] & 0xFF)
#define SOURCE_TYPE(in) ((in)->extra[0] >> 8 & 0xFF)
#define RESULT_BITS(in) ((in)->extra[0] >> 16 & 0xFF)
#define ROUNDING_OF(in) (((in)->flags & ROUNDING) >> 4)

static const int WIDTH[] = {8, 16, 32, 64, 8, 16, 32, 64, 16, 16, 32, 64};
static inline int is_signed(u32 type) { return type >= S8 && type <= S64; }

// A source's low 32 bits, whatever register it is in.
static inline const u32 *low_words(const Warp *w, const Instr *in, u32 *buffer) {
    const u32 *a = src(w, in, 0);
    if (!(in->extra[0] >> 24)) return a;
    EACH buffer[i] = a[2 * i];
    return buffer;
}
static void load_integers(const Warp *w, const Instr *in, s64 *out) {
    u32 buffer[LANES];
    const u32 *a = low_words(w, in, buffer);
    switch (SOURCE_TYPE(in)) {
        case U8: EACH out[i] = (u8)a[i]; break;
        case S8: EACH out[i] = (s8)a[i]; break;
        case U16: EACH out[i] = (u16)a[i]; break;
        case S16: EACH out[i] = (s16)a[i]; break;
        case U32: EACH out[i] = a[i]; break;
        case S32: EACH out[i] = (s32)a[i]; break;
        default: memcpy(out, src64(w, in, 0), 8 * LANES);
    }
}
// Integers of the result's type, extended to the register as its sign says.
static void put_integers(const Warp *w, const Instr *in, s64 *values, u32 mask) {
    u32 type = RESULT_TYPE(in), bits = RESULT_BITS(in), t[LANES];
    int unused = 64 - WIDTH[type];
    if (is_signed(type))
        EACH values[i] = (s64)((u64)values[i] << unused) >> unused;
    else
        EACH values[i] = (s64)((u64)values[i] << unused >> unused);
    if (bits == 64) {
        put64(w, in, 0, (const u64 *)values, mask);
        return;
    }
    u32 kept = low_ones(bits);
    EACH t[i] = (u32)values[i] & kept;
    put32(w, in, 0, t, mask);
}
static inline s64 highest(u32 type) {
    int value_bits = WIDTH[type] - is_signed(type);
    return (s64)(value_bits == 64 ? ~0ull : (1ull << value_bits) - 1);
}
static inline s64 lowest_of(u32 type) { return is_signed(type) ? (s64)(~0ull << (WIDTH[type] - 1)) : 0; }

HANDLER(convert_integer) {
    u32 from = SOURCE_TYPE(in), to = RESULT_TYPE(in);
    s64 values[LANES];
    load_integers(w, in, values);
    if (in->flags & SAT) {
        s128 low = lowest_of(to), high = to == U64 ? (s128)~0ull : highest(to);
        EACH {
            s128 value = from == U64 ? (s128)(u64)values[i] : (s128)values[i];
            values[i] = (s64)(value < low ? low : value > high ? high : value);
        }
    }
    put_integers(w, in, values, mask);
}

static void load_doubles(const Warp *w, const Instr *in, double *out) {
    u32 buffer[LANES], type = SOURCE_TYPE(in);
    const u32 *a = low_words(w, in, buffer);
    // To f16 an H200 flushes nothing, which shows where such a number is rounded up or down.
    int flushes = in->flags & FTZ && RESULT_TYPE(in) != F16;
    if (type == F32)
        EACH out[i] = (double)as_f32(flushes ? flushed(a[i]) : a[i]);
    else if (type == F16)
        EACH out[i] = (double)f16_value(a[i]);
    else if (type == BF16)
        EACH out[i] = (double)bf16_value(a[i]);
    else
        memcpy(out, src64(w, in, 0), 8 * LANES);
}
// A NaN of f64 in a format of `bits` bits: it becomes quiet, and keeps its sign and what there is room for (seen on an
// H200).
static inline u32 narrow_nan(double x, int mantissa, int bits) {
    u64 code = bits_f64(x) | 1ull << 51;
    u32 payload = (u32)(code >> (52 - mantissa)) & low_ones((u32)mantissa);
    return (u32)(code >> 63) << (bits - 1) | (low_ones((u32)(bits - 1 - mantissa)) << mantissa) | payload;
}
static void put_doubles(const Warp *w, const Instr *in, const double *values, u32 mask) {
    u32 type = RESULT_TYPE(in), t[LANES];
    u32 mode = ROUNDING_OF(in);
    if (type == F64) {
        u64 wide[LANES];
        EACH {
            double x = values[i];
            if (in->flags & SAT) x = x > 1 ? 1 : x > 0 ? x : 0;
            wide[i] = bits_f64(x);
        }
        put64(w, in, 0, wide, mask);
        return;
    }
    if (type == F32) {
        EACH t[i] = bits_f32((float)values[i]);
        if (in->flags & FTZ) EACH t[i] &= is_tiny(values[i]) ? 0x80000000 : FULL;
        finish_f32(in, t, LANES);
    } else
        EACH {
            double x = values[i];
            if (in->flags & SAT) x = x > 1 ? 1 : x > 0 ? x : 0;
            if (in->flags & RELU && signbit(x) && x == x) x = 0;
            t[i] = narrow(x, (int)type, (int)mode, !!(in->flags & SATFINITE));
        }
    if (SOURCE_TYPE(in) == F64 && !(in->flags & SAT))
        EACH if (values[i] != values[i]) t[i] = narrow_nan(values[i], type == F32 ? 23 : FORMATS[type].mantissa, WIDTH[type]);
    put32(w, in, 0, t, mask);
}
// A double that rounds like the integer: bits that do not fit leave a trace in the last one.
static inline double sticky_double(u64 x) {
    if (!(x >> 53)) return (double)x;
    return (double)(x >> 11 | ((x & 0x7FF) != 0)) * 2048;
}
HANDLER(convert_to_float) {
    u32 from = SOURCE_TYPE(in), to = RESULT_TYPE(in), t[LANES];
    s64 a[LANES];
    double values[LANES];
    load_integers(w, in, a);
    if (to == F32) {
        if (from == U64)
            EACH t[i] = bits_f32((float)(u64)a[i]);
        else
            EACH t[i] = bits_f32((float)a[i]);
        finish_f32(in, t, LANES);
        put32(w, in, 0, t, mask);
        return;
    }
    if (to == F64)
        EACH values[i] = from == U64 ? (double)(u64)a[i] : (double)a[i];
    else
        EACH values[i] = from != U64 && a[i] < 0 ? -sticky_double(0 - (u64)a[i]) : sticky_double((u64)a[i]);
    put_doubles(w, in, values, mask);
}

static void round_to_integers(double *values, u32 how) {
    switch (how) {
        case 1: EACH values[i] = __builtin_roundeven(values[i]); break;
        case 2: EACH values[i] = __builtin_trunc(values[i]); break;
        case 3: EACH values[i] = __builtin_floor(values[i]); break;
        case 4: EACH values[i] = __builtin_ceil(values[i]); break;
        default: break;
    }
}
// Out of range becomes the nearest value; NaN becomes 0, or the highest bit alone if either side has 64 bits.
HANDLER(convert_to_integer) {
    u32 from = SOURCE_TYPE(in), to = RESULT_TYPE(in);
    double values[LANES], low = (double)lowest_of(to), beyond = ldexp(1, WIDTH[to] - is_signed(to));
    s64 out[LANES], top = highest(to), nan = from == F64 || WIDTH[to] == 64 ? (s64)(1ull << (WIDTH[to] - 1)) : 0;
    load_doubles(w, in, values);
    round_to_integers(values, in->extra[1]);
    EACH {
        double x = values[i];
        if (x != x)
            out[i] = nan;
        else if (x >= beyond)
            out[i] = top;
        else if (x < low)
            out[i] = lowest_of(to);
        else
            out[i] = x >= 0x1p63 ? (s64)(u64)x : (s64)x;
    }
    put_integers(w, in, out, mask);
}
HANDLER(convert_float) {
    double values[LANES];
    load_doubles(w, in, values);
    round_to_integers(values, in->extra[1]);
    put_doubles(w, in, values, mask);
}
HANDLER(convert_f32_bf16) {
    const u32 *a = src(w, in, 0);
    u32 t[LANES];
    EACH t[i] = is_nan32(a[i] << 16) ? CANONICAL : a[i] << 16;
    put32(w, in, 0, t, mask);
}

// To formats below 32 bits, of which some hold two in a register. extra[1], bit 0: to nearest, ties away from zero.
static inline u32 narrow_as(const Instr *in, double x) {
    u32 type = RESULT_TYPE(in);
    int mode = in->extra[1] & 1 ? RNA : (int)ROUNDING_OF(in), satfinite = !!(in->flags & SATFINITE);
    if (in->flags & RELU && signbit(x) && x == x) x = 0;
    if (type == TF32) return narrow(x, TF32, mode, satfinite) << 13;
    if (type != UE8M0) return narrow(x, (int)type, mode, satfinite);
    // A power of two without a sign.
    if (x != x) return 0xFF;
    int power;
    double magnitude = fabs(x), fraction = frexp(magnitude, &power);  // fraction in [1/2, 1)
    int code = magnitude == 0 ? 0 : magnitude == INFINITY ? 255 : power - 1 + 127 + (mode == RP && fraction > 0.5);
    return (u32)(code < 0 ? 0 : code > 254 ? (satfinite ? 254 : 255) : code);
}
static inline int place_bits(u32 type) { return type == F16 || type == BF16 ? 16 : type == E2M1 ? 4 : 8; }
HANDLER(convert_narrow) {
    const u32 *a = src(w, in, 0);
    u32 t[LANES];
    EACH t[i] = narrow_as(in, (double)as_f32(a[i]));
    // With .rna an H200 cuts a NaN's lower bits off, which may leave an infinity; else NaN is canonical.
    if (RESULT_TYPE(in) == TF32 && in->extra[1] & 1)
        EACH t[i] = is_nan32(a[i]) ? a[i] & 0xFFFFE000 : t[i];
    put32(w, in, 0, t, mask);
}
// Two floats; the first becomes the upper half.
HANDLER(convert_pair) {
    const u32 *a = src(w, in, 0), *b = src(w, in, 1);
    u32 t[LANES], type = RESULT_TYPE(in);
    int plain = !(in->flags & (ROUNDING | RELU | SATFINITE)), bits = place_bits(type);
    if (plain && type == BF16)
        EACH t[i] = bf16_of(a[i]) << 16 | bf16_of(b[i]);
    else if (plain && type == F16)
        EACH t[i] = f16_of(a[i]) << 16 | f16_of(b[i]);
    else
        EACH t[i] = narrow_as(in, (double)as_f32(a[i])) << bits | narrow_as(in, (double)as_f32(b[i]));
    put32(w, in, 0, t, mask);
}
HANDLER(convert_halves) {
    const u32 *a = src(w, in, 0);
    u32 t[LANES], stored = SOURCE_TYPE(in) == F16 ? AS_F16 : AS_BF16;
    int bits = place_bits(RESULT_TYPE(in));
    EACH t[i] = narrow_as(in, half_value(a[i] >> 16, stored)) << bits |
                narrow_as(in, half_value(a[i] & 0xFFFF, stored));
    put32(w, in, 0, t, mask);
}
static double value_of(u32 code, u32 type) {
    if (type == UE8M0) return code == 0xFF ? NAN : ldexp(1, (int)code - 127);
    const Format *f = &FORMATS[type];
    u32 magnitude = code & low_ones((u32)f->bits - 1), fraction = magnitude & low_ones((u32)f->mantissa);
    int power = (int)(magnitude >> f->mantissa);
    if (magnitude > f->largest) return f->infinity == magnitude ? (code >> (f->bits - 1) ? -INFINITY : INFINITY) : NAN;
    double value = power ? ldexp(1u << f->mantissa | fraction, power - f->bias - f->mantissa)
                         : ldexp(fraction, 1 - f->bias - f->mantissa);
    return code >> (f->bits - 1) & 1 ? -value : value;
}
HANDLER(convert_widen) {
    const u32 *a = src(w, in, 0);
    u32 t[LANES], from = SOURCE_TYPE(in), ones;
    int bits = place_bits(from), to = (int)RESULT_TYPE(in);
    ones = from == E2M1 ? 0xF : from == E2M3 || from == E3M2 ? 0x3F : 0xFF;
    EACH {
        t[i] = 0;
        for (int k = 0; k < 2; k++) {
            double x = value_of(a[i] >> bits * k & ones, from);
            if (in->flags & RELU && signbit(x) && x == x) x = 0;
            t[i] |= narrow(x, to, RN, !!(in->flags & SATFINITE)) << 16 * k;
        }
    }
    put32(w, in, 0, t, mask);
}

// cvt.pack: two integers saturated, above them the lower bits of a third. extra[0]: bits, extra[1]: signed.
HANDLER(convert_pack) {
    const u32 *a = src(w, in, 0), *b = src(w, in, 1), *c = src(w, in, 2);
    u32 t[LANES], bits = in->extra[0], ones = low_ones(bits);
    s32 high = (s32)(in->extra[1] ? ones >> 1 : ones), low = in->extra[1] ? -high - 1 : 0;
    EACH {
        s32 x = (s32)a[i], y = (s32)b[i];
        x = MIN(MAX(x, low), high), y = MIN(MAX(y, low), high);
        t[i] = ((u32)x & ones) << bits | ((u32)y & ones) | (bits == 16 ? 0 : c[i] << 2 * bits);
    }
    put32(w, in, 0, t, mask);
}
