// SPDX-License-Identifier: Apache-2.0
// Integer arithmetic, logic and shifts (PTX ISA 9.2, 9.7.1, 9.7.2, 9.7.8).
#pragma once

#include "rows.h"

// x, y, z: the sources as T; the result as R, zero-extended into its row.
#define ONE(name, T, R, ...)                                                                                           \
    HANDLER(name) {                                                                                                    \
        const u32 *a = src(w, in, 0);                                                                                  \
        u32 t[LANES];                                                                                                  \
        EACH {                                                                                                         \
            T x = (T)a[i];                                                                                             \
            t[i] = (R)(__VA_ARGS__);                                                                                   \
        }                                                                                                              \
        put32(w, in, 0, t, mask);                                                                                      \
    }
#define TWO(name, T, R, ...)                                                                                           \
    HANDLER(name) {                                                                                                    \
        const u32 *a = src(w, in, 0), *b = src(w, in, 1);                                                              \
        u32 t[LANES];                                                                                                  \
        EACH {                                                                                                         \
            T x = (T)a[i], y = (T)b[i];                                                                                \
            t[i] = (R)(__VA_ARGS__);                                                                                   \
        }                                                                                                              \
        put32(w, in, 0, t, mask);                                                                                      \
    }
#define THREE(name, T, R, ...)                                                                                         \
    HANDLER(name) {                                                                                                    \
        const u32 *a = src(w, in, 0), *b = src(w, in, 1), *c = src(w, in, 2);                                          \
        u32 t[LANES];                                                                                                  \
        EACH {                                                                                                         \
            T x = (T)a[i], y = (T)b[i], z = (T)c[i];                                                                   \
            t[i] = (R)(__VA_ARGS__);                                                                                   \
        }                                                                                                              \
        put32(w, in, 0, t, mask);                                                                                      \
    }
// The same on 64 bits; Y and Z say how wide the rows of the other sources are, D that of the result.
#define WIDE(name, X, Y, Z, D, put, ...)                                                                               \
    HANDLER(name) {                                                                                                    \
        const X *a = (const X *)src(w, in, 0);                                                                         \
        const Y *b = (const Y *)src(w, in, 1);                                                                         \
        const Z *c = (const Z *)src(w, in, 2);                                                                         \
        D t[LANES];                                                                                                    \
        EACH {                                                                                                         \
            X x = a[i];                                                                                                \
            Y y = b[i];                                                                                                \
            Z z = c[i];                                                                                                \
            (void)y, (void)z;                                                                                          \
            t[i] = (D)(__VA_ARGS__);                                                                                   \
        }                                                                                                              \
        put(w, in, 0, t, mask);                                                                                        \
    }
#define TWO64(name, T, ...) WIDE(name, T, T, u32, u64, put64, __VA_ARGS__)
#define THREE64(name, T, ...) WIDE(name, T, T, T, u64, put64, __VA_ARGS__)
#define TO64(name, T, ...) WIDE(name, T, T, u64, u64, put64, __VA_ARGS__)
#define ONE64(name, T, ...) WIDE(name, T, u32, u32, u64, put64, __VA_ARGS__)
#define SHIFT64(name, T, ...) WIDE(name, T, u32, u32, u64, put64, __VA_ARGS__)
#define COUNT64(name, T, ...) WIDE(name, T, u32, u32, u32, put32, __VA_ARGS__)

static inline u32 sat_s32(s64 x) { return (u32)(s32)(x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x); }
static inline u32 halves(u32 low, u32 high) { return (low & 0xFFFF) | high << 16; }
#define MIN(x, y) ((x) < (y) ? (x) : (y))
#define MAX(x, y) ((x) > (y) ? (x) : (y))
#define HI32(x, y) ((s64)(x) * (y) >> 32)
#define HI32U(x, y) ((u64)(x) * (y) >> 32)
#define HI64(x, y) (s64)((s128)(x) * (y) >> 64)
#define HI64U(x, y) (u64)((u128)(x) * (y) >> 64)

TWO(add_b16, u16, u16, x + y)
TWO(add_b32, u32, u32, x + y)
TO64(add_b64, u64, x + y)
TWO(add_sat_s32, s32, u32, sat_s32((s64)x + y))
TWO(add_x2, u32, u32, halves(x + y, (x >> 16) + (y >> 16)))
TWO(sub_b16, u16, u16, x - y)
TWO(sub_b32, u32, u32, x - y)
TO64(sub_b64, u64, x - y)
TWO(sub_sat_s32, s32, u32, sat_s32((s64)x - y))

TWO(mul_lo_b16, u16, u16, (u32)x *y)
TWO(mul_lo_b32, u32, u32, x *y)
TO64(mul_lo_b64, u64, x *y)
TWO(mul_hi_u16, u16, u16, (u32)x *y >> 16)
TWO(mul_hi_s16, s16, u16, (s32)x *y >> 16)
TWO(mul_hi_u32, u32, u32, HI32U(x, y))
TWO(mul_hi_s32, s32, u32, HI32(x, y))
TO64(mul_hi_u64, u64, HI64U(x, y))
TO64(mul_hi_s64, s64, HI64(x, y))
TWO(mul_wide_u16, u16, u32, (u32)x *y)
TWO(mul_wide_s16, s16, u32, (s32)x *y)
WIDE(mul_wide_u32, u32, u32, u32, u64, put64, (u64)x *y)
WIDE(mul_wide_s32, s32, s32, u32, u64, put64, (s64)x *y)
THREE(mad_lo_b16, u16, u16, (u32)x *y + z)
THREE(mad_lo_b32, u32, u32, x *y + z)
THREE64(mad_lo_b64, u64, x *y + z)
THREE(mad_hi_u16, u16, u16, ((u32)x * y >> 16) + z)
THREE(mad_hi_s16, s16, u16, ((s32)x * y >> 16) + z)
THREE(mad_hi_u32, u32, u32, HI32U(x, y) + z)
THREE(mad_hi_s32, s32, u32, HI32(x, y) + z)
THREE(mad_hi_sat_s32, s32, u32, sat_s32(HI32(x, y) + z))
THREE64(mad_hi_u64, u64, HI64U(x, y) + z)
THREE64(mad_hi_s64, s64, HI64(x, y) + z)
THREE(mad_wide_u16, u32, u32, (x & 0xFFFF) * (y & 0xFFFF) + z)
THREE(mad_wide_s16, u32, u32, (u32)((s16)x * (s16)y) + z)
WIDE(mad_wide_u32, u32, u32, u64, u64, put64, (u64)x *y + z)
WIDE(mad_wide_s32, s32, s32, u64, u64, put64, (u64)((s64)x * y) + z)

// The lower 24 bits of each source; hi is bits 16 to 47 of the product.
#define LOW24(x) ((x) & 0xFFFFFF)
#define LOW24S(x) ((s32)((u32)(x) << 8) >> 8)
TWO(mul24_lo_u32, u32, u32, (u64)LOW24(x) * LOW24(y))
TWO(mul24_lo_s32, s32, u32, (s64)LOW24S(x) * LOW24S(y))
TWO(mul24_hi_u32, u32, u32, (u64)LOW24(x) * LOW24(y) >> 16)
TWO(mul24_hi_s32, s32, u32, (s64)LOW24S(x) * LOW24S(y) >> 16)
THREE(mad24_lo_u32, u32, u32, (u64)LOW24(x) * LOW24(y) + z)
THREE(mad24_lo_s32, s32, u32, (s64)LOW24S(x) * LOW24S(y) + z)
THREE(mad24_hi_u32, u32, u32, ((u64)LOW24(x) * LOW24(y) >> 16) + z)
THREE(mad24_hi_s32, s32, u32, ((s64)LOW24S(x) * LOW24S(y) >> 16) + z)
THREE(mad24_hi_sat_s32, s32, u32, sat_s32((s64)(s32)((s64)LOW24S(x) * LOW24S(y) >> 16) + z))

THREE(sad_u16, u16, u16, z + (x > y ? x - y : y - x))
THREE(sad_s16, s16, u16, z + (x > y ? x - y : y - x))
THREE(sad_u32, u32, u32, z + (x > y ? x - y : y - x))
THREE(sad_s32, s32, u32, (u32)z + (x > y ? (u32)x - (u32)y : (u32)y - (u32)x))
THREE64(sad_u64, u64, z + (x > y ? x - y : y - x))
THREE64(sad_s64, s64, (u64)z + (x > y ? (u64)x - (u64)y : (u64)y - (u64)x))

ONE(abs_s16, s16, u16, x < 0 ? -x : x)
ONE(abs_s32, s32, u32, x < 0 ? 0 - (u32)x : (u32)x)
ONE64(abs_s64, s64, x < 0 ? 0 - (u64)x : (u64)x)
ONE(neg_s16, u16, u16, -x)
ONE(neg_s32, u32, u32, 0 - x)
ONE64(neg_s64, u64, 0 - x)

#define EXTREME(name, OP)                                                                                              \
    TWO(name##_u16, u16, u16, OP(x, y))                                                                                \
    TWO(name##_s16, s16, u16, OP(x, y))                                                                                \
    TWO(name##_u32, u32, u32, OP(x, y))                                                                                \
    TWO(name##_s32, s32, u32, OP(x, y))                                                                                \
    TO64(name##_u64, u64, OP(x, y))                                                                                    \
    TO64(name##_s64, s64, OP(x, y))                                                                                    \
    TWO(name##_u16x2, u32, u32, halves(OP((u16)x, (u16)y), OP(x >> 16, y >> 16)))                                      \
    TWO(name##_s16x2, u32, u32, halves((u32)OP((s16)x, (s16)y), (u32)OP((s16)(x >> 16), (s16)(y >> 16))))              \
    TWO(name##_relu_s32, s32, u32, MAX(OP(x, y), 0))                                                                   \
    TWO(name##_relu_s16x2, u32, u32,                                                                                   \
        halves((u32)MAX(OP((s16)x, (s16)y), 0), (u32)MAX(OP((s16)(x >> 16), (s16)(y >> 16)), 0)))
EXTREME(min, MIN)
EXTREME(max, MAX)

ONE(popc_b32, u32, u32, __builtin_popcount(x))
COUNT64(popc_b64, u64, __builtin_popcountll(x))
static inline u32 clz32(u32 x) { return x ? (u32)__builtin_clz(x) : 32; }
static inline u32 clz64(u64 x) { return x ? (u32)__builtin_clzll(x) : 64; }
ONE(clz_b32, u32, u32, clz32(x))
COUNT64(clz_b64, u64, clz64(x))
// The place of the highest bit that is not the sign's; all ones where there is none (as 31 or 63 minus clz gives).
ONE(bfind_u32, u32, u32, 31 - clz32(x))
ONE(bfind_s32, u32, u32, 31 - clz32(x ^ (u32)((s32)x >> 31)))
COUNT64(bfind_u64, u64, 63 - clz64(x))
COUNT64(bfind_s64, u64, 63 - clz64(x ^ (u64)((s64)x >> 63)))
ONE(bfind_shiftamt_u32, u32, u32, x ? clz32(x) : NONE)
ONE(bfind_shiftamt_s32, u32, u32, x ^ (u32)((s32)x >> 31) ? clz32(x ^ (u32)((s32)x >> 31)) : NONE)
COUNT64(bfind_shiftamt_u64, u64, x ? clz64(x) : NONE)
COUNT64(bfind_shiftamt_s64, u64, x ^ (u64)((s64)x >> 63) ? clz64(x ^ (u64)((s64)x >> 63)) : NONE)

static inline u32 brev32(u32 x) {
    x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
    x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
    x = (x >> 4 & 0x0F0F0F0F) | (x & 0x0F0F0F0F) << 4;
    return __builtin_bswap32(x);
}
ONE(brev_b32, u32, u32, brev32(x))
ONE64(brev_b64, u64, (u64)brev32((u32)x) << 32 | brev32((u32)(x >> 32)))

// The offset-th set bit from `base` on, upwards or downwards.
static inline u32 find_nth_set(u32 bits, u32 base, s32 offset) {
    if (base > 31) return NONE;
    if (offset == 0) return bits >> base & 1 ? base : NONE;
    s32 step = offset > 0 ? 1 : -1;
    u32 left = offset > 0 ? (u32)offset : 0 - (u32)offset;
    for (s32 at = (s32)base; at >= 0 && at < 32; at += step)
        if (bits >> at & 1 && --left == 0) return (u32)at;
    return NONE;
}
THREE(fns_b32, u32, u32, find_nth_set(x, y, (s32)z))

// Places and lengths of fields are 0 to 255. Of what is beyond, an H200 takes the lower 8 bits where registers have 32
// bits, as the ISA has it, but all of it where they have 64.
// Bits from `at` on, `count` of them, each clamped to the register; a signed field repeats its highest bit.
static inline u64 extract(u64 x, u64 at, u64 count, int width, int is_signed) {
    if (count == 0) return 0;
    u64 last = MIN(at + count - 1, (u64)width - 1);
    u64 sign = is_signed && x >> last & 1 ? ~0ull : 0;
    if (at >= (u64)width) return sign;
    u64 kept = last - at + 1;
    u64 field = x >> at;
    return kept >= 64 ? field : (field & ((1ull << kept) - 1)) | sign << kept;
}
THREE(bfe_u32, u32, u32, extract(x, (u8)y, (u8)z, 32, 0))
THREE(bfe_s32, u32, u32, extract(x, (u8)y, (u8)z, 32, 1))
WIDE(bfe_u64, u64, u32, u32, u64, put64, extract(x, y, z, 64, 0))
WIDE(bfe_s64, u64, u32, u32, u64, put64, extract(x, y, z, 64, 1))

static inline u64 insert(u64 field, u64 into, u64 at, u64 count, int width) {
    if (count == 0 || at >= (u64)width) return into;
    count = MIN(count, (u64)width - at);
    u64 ones = count >= 64 ? ~0ull : (1ull << count) - 1;
    return (into & ~(ones << at)) | (field & ones) << at;
}
HANDLER(bfi_b32) {
    const u32 *a = src(w, in, 0), *b = src(w, in, 1), *c = src(w, in, 2), *d = src(w, in, 3);
    u32 t[LANES];
    EACH t[i] = (u32)insert(a[i], b[i], (u8)c[i], (u8)d[i], 32);
    put32(w, in, 0, t, mask);
}
HANDLER(bfi_b64) {
    const u64 *a = src64(w, in, 0), *b = src64(w, in, 1);
    const u32 *c = src(w, in, 2), *d = src(w, in, 3);
    u64 t[LANES];
    EACH t[i] = insert(a[i], b[i], c[i], d[i], 64);
    put64(w, in, 0, t, mask);
}

static inline u32 low_ones(u32 count) { return count >= 32 ? FULL : (1u << count) - 1; }
static inline u32 extend(u32 x, u32 count, int is_signed) {
    if (count == 0) return 0;
    if (count >= 32) return x;
    return is_signed ? (u32)((s32)(x << (32 - count)) >> (32 - count)) : x & low_ones(count);
}
TWO(szext_clamp_u32, u32, u32, extend(x, y, 0))
TWO(szext_clamp_s32, u32, u32, extend(x, y, 1))
TWO(szext_wrap_u32, u32, u32, extend(x, y & 31, 0))
TWO(szext_wrap_s32, u32, u32, extend(x, y & 31, 1))
TWO(bmsk_clamp, u32, u32, x >= 32 ? 0 : low_ones(y) << x)
TWO(bmsk_wrap, u32, u32, low_ones(y & 31) << (x & 31))

// Four products of bytes, or two of halves and bytes. extra[0]: bit 0 the first operand is signed, bit 1 the second,
// bit 2 the upper bytes of the second.
HANDLER(dp4a) {
    const u32 *a = src(w, in, 0), *b = src(w, in, 1), *c = src(w, in, 2);
    u32 t[LANES], kind = in->extra[0];
    EACH {
        u32 sum = c[i];
        for (int k = 0; k < 32; k += 8) {
            s32 x = kind & 1 ? (s8)(a[i] >> k) : (u8)(a[i] >> k), y = kind & 2 ? (s8)(b[i] >> k) : (u8)(b[i] >> k);
            sum += (u32)(x * y);
        }
        t[i] = sum;
    }
    put32(w, in, 0, t, mask);
}
HANDLER(dp2a) {
    const u32 *a = src(w, in, 0), *b = src(w, in, 1), *c = src(w, in, 2);
    u32 t[LANES], kind = in->extra[0];
    EACH {
        u32 sum = c[i], bytes = kind & 4 ? b[i] >> 16 : b[i];
        for (int k = 0; k < 2; k++) {
            s32 x = kind & 1 ? (s16)(a[i] >> 16 * k) : (u16)(a[i] >> 16 * k);
            s32 y = kind & 2 ? (s8)(bytes >> 8 * k) : (u8)(bytes >> 8 * k);
            sum += (u32)(x * y);
        }
        t[i] = sum;
    }
    put32(w, in, 0, t, mask);
}

// Division by zero is left open by the ISA: all ones here, and a fault. 64-bit lanes one after the other.
#define DIVIDE(name, T, R, put, QUOTIENT)                                                                              \
    HANDLER(name) {                                                                                                    \
        typedef R Rows;                                                                                                \
        const Rows *a = (const Rows *)src(w, in, 0), *b = (const Rows *)src(w, in, 1);                                 \
        Rows t[LANES];                                                                                                 \
        u32 zero = 0;                                                                                                  \
        EACH {                                                                                                         \
            T x = (T)a[i], y = (T)b[i];                                                                                \
            zero |= (u32)(y == 0) << i;                                                                                \
            t[i] = y == 0 ? (Rows)MAX_OF(T) : (Rows)(QUOTIENT);                                                        \
        }                                                                                                              \
        zero &= mask & w->init[in->args[SOURCES + 1]];                                                                 \
        if (zero) report(w, in, SLOT_DIVISION, in->args[SOURCES + 1], zero, DIVISION);                                 \
        put(w, in, 0, t, mask);                                                                                        \
    }
#define MAX_OF(T) (sizeof(T) == 2 ? 0xFFFFu : ~(u64)0)
#define NEGATIVE_ONE(y) ((y) == -1)
DIVIDE(div_u16, u16, u32, put32, (u16)(x / y))
DIVIDE(div_s16, s16, u32, put32, (u16)(x / y))
DIVIDE(div_u32, u32, u32, put32, x / y)
DIVIDE(div_s32, s32, u32, put32, NEGATIVE_ONE(y) ? 0 - (u32)x : (u32)(x / y))
DIVIDE(div_u64, u64, u64, put64, x / y)
DIVIDE(div_s64, s64, u64, put64, NEGATIVE_ONE(y) ? 0 - (u64)x : (u64)(x / y))
DIVIDE(rem_u16, u16, u32, put32, (u16)(x % y))
DIVIDE(rem_s16, s16, u32, put32, (u16)(x % y))
DIVIDE(rem_u32, u32, u32, put32, x % y)
DIVIDE(rem_s32, s32, u32, put32, NEGATIVE_ONE(y) ? 0 : (u32)(x % y))
DIVIDE(rem_u64, u64, u64, put64, x % y)
DIVIDE(rem_s64, s64, u64, put64, NEGATIVE_ONE(y) ? 0 : (u64)(x % y))

// Extended precision: the carry is source 3 and destination 1, a row as a predicate's. k: what comes in. A difference
// adds the complement, and what it leaves is that sum's carry, the opposite of a borrow (seen on an H200): it matters
// where a chain has both sums and differences.
#define CARRY(name, T, put, VALUE, OUT)                                                                                \
    HANDLER(name) {                                                                                                    \
        const T *a = (const T *)src(w, in, 0), *b = (const T *)src(w, in, 1), *c = (const T *)src(w, in, 2);           \
        const u32 *carry = src(w, in, 3);                                                                              \
        T t[LANES];                                                                                                    \
        u32 out[LANES];                                                                                                \
        EACH {                                                                                                         \
            T x = a[i], y = b[i], z = c[i], k = carry[i];                                                              \
            (void)z;                                                                                                   \
            T value = VALUE;                                                                                           \
            out[i] = OUT;                                                                                              \
            t[i] = value;                                                                                              \
        }                                                                                                              \
        put(w, in, 0, t, mask);                                                                                        \
        put32(w, in, 1, out, mask);                                                                                    \
    }
#define CARRIES(T, put, WIDER, bits, HIGH)                                                                             \
    CARRY(addc_b##bits, T, put, x + y + k, (u32)(((WIDER)x + y + k) >> bits))                                          \
    CARRY(subc_b##bits, T, put, x + (T)~y + k, (u32)(((WIDER)x + (T)~y + k) >> bits))                                      \
    CARRY(madc_lo_b##bits, T, put, x *y + z + k, (u32)(((WIDER)(T)(x * y) + z + k) >> bits))                           \
    CARRY(madc_hi_u##bits, T, put, (T)((WIDER)x * y >> bits) + z + k,                                                  \
          (u32)(((WIDER)(T)((WIDER)x * y >> bits) + z + k) >> bits))                                                   \
    CARRY(madc_hi_s##bits, T, put, (T)HIGH(x, y) + z + k, (u32)(((WIDER)(T)HIGH(x, y) + z + k) >> bits))
#define SIGNED_HIGH32(x, y) HI32((s32)(x), (s32)(y))
#define SIGNED_HIGH64(x, y) HI64((s64)(x), (s64)(y))
CARRIES(u32, put32, u64, 32, SIGNED_HIGH32)
CARRIES(u64, put64, u128, 64, SIGNED_HIGH64)

#define LOGIC(name, ...)                                                                                               \
    TWO(name##_b32, u32, u32, __VA_ARGS__)                                                                             \
    TO64(name##_b64, u64, __VA_ARGS__)                                                                                 \
    HANDLER(name##_pred) {                                                                                             \
        u32 buffers[2][LANES], t[LANES];                                                                               \
        const u32 *a = predicate(w, in, 0, buffers[0]), *b = predicate(w, in, 1, buffers[1]);                          \
        EACH {                                                                                                         \
            u32 x = a[i], y = b[i];                                                                                    \
            t[i] = __VA_ARGS__;                                                                                        \
        }                                                                                                              \
        put32(w, in, 0, t, mask);                                                                                      \
    }
LOGIC(and, x &y)
LOGIC(or, x | y)
LOGIC(xor, x ^ y)
ONE(not_b16, u16, u16, ~x)
ONE(not_b32, u32, u32, ~x)
ONE64(not_b64, u64, ~x)
HANDLER(not_pred) {
    u32 buffer[LANES], t[LANES];
    const u32 *a = predicate(w, in, 0, buffer);
    EACH t[i] = a[i] ^ 1;
    put32(w, in, 0, t, mask);
}
ONE(cnot_b32, u32, u32, x == 0)
ONE64(cnot_b64, u64, x == 0)

// extra[0]: a result bit for each of the eight combinations of the sources' bits.
static inline void lop3_lanes(const Warp *w, const Instr *in, u32 *t) {
    const u32 *a = src(w, in, 0), *b = src(w, in, 1), *c = src(w, in, 2);
    memset(t, 0, 4 * LANES);
    for (int k = 0; k < 8; k++) {
        if (!(in->extra[0] >> k & 1)) continue;
        u32 x = k & 4 ? 0 : FULL, y = k & 2 ? 0 : FULL, z = k & 1 ? 0 : FULL;
        EACH t[i] |= (a[i] ^ x) & (b[i] ^ y) & (c[i] ^ z);
    }
}
HANDLER(lop3) {
    u32 t[LANES];
    lop3_lanes(w, in, t);
    put32(w, in, 0, t, mask);
}
// extra[1]: 0 or, 1 and.
HANDLER(lop3_pred) {
    u32 t[LANES], p[LANES], buffer[LANES];
    const u32 *q = predicate(w, in, 3, buffer);
    lop3_lanes(w, in, t);
    EACH p[i] = in->extra[1] ? (t[i] != 0) & q[i] : (t[i] != 0) | q[i];
    put32(w, in, 0, t, mask);
    put32(w, in, 1, p, mask);
}

// Funnel shifts of y:x; shift amounts beyond the width are clamped unless they wrap.
static inline u64 joined(u32 low, u32 high) { return (u64)high << 32 | low; }
THREE(shf_l_clamp, u32, u32, (joined(x, y) << MIN(z, 32u)) >> 32)
THREE(shf_l_wrap, u32, u32, (joined(x, y) << (z & 31)) >> 32)
THREE(shf_r_clamp, u32, u32, joined(x, y) >> MIN(z, 32u))
THREE(shf_r_wrap, u32, u32, joined(x, y) >> (z & 31))
TWO(shl_b16, u32, u16, y > 15 ? 0 : x << y)
TWO(shl_b32, u32, u32, y > 31 ? 0 : x << y)
SHIFT64(shl_b64, u64, y > 63 ? 0 : x << y)
TWO(shr_u16, u32, u16, y > 15 ? 0 : x >> y)
TWO(shr_s16, u32, u16, (s16)x >> MIN(y, 15u))
TWO(shr_u32, u32, u32, y > 31 ? 0 : x >> y)
TWO(shr_s32, u32, u32, (s32)x >> MIN(y, 31u))
SHIFT64(shr_u64, u64, y > 63 ? 0 : x >> y)
SHIFT64(shr_s64, s64, x >> MIN(y, 63u))
