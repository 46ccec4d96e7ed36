// SPDX-License-Identifier: Apache-2.0
// Exchange among the lanes that a mask names (PTX ISA 9.2, 9.7.9.6, 9.7.13.8 to 9.7.13.11, 9.7.13.17).
//
// A handler's mask is the lanes that execute together, all of which gave the same member mask.
#pragma once

#include "floats.h"

HANDLER(bar_warp_sync) { (void)w, (void)in, (void)mask; }

// extra[0]: mode.
enum { SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX };
// n: the second source; first and last: of the lane's segment.
#define SHFL_FROM(FROM, INSIDE)                                                                                        \
    EACH {                                                                                                             \
        s32 n = b[i] & 31, segment = c[i] >> 8 & 31, first = i & segment;                                              \
        s32 last = first | ((s32)(c[i] & 31) & ~segment), from = FROM;                                                 \
        p[i] = INSIDE;                                                                                                 \
        source[i] = p[i] ? from & 31 : i;                                                                              \
        (void)n, (void)first, (void)last;                                                                              \
    }
HANDLER(shfl) {
    const u32 *a = src(w, in, 0), *b = src(w, in, 1), *c = src(w, in, 2);
    u32 t[LANES], p[LANES];
    s32 source[LANES];
    switch (in->extra[0]) {
        case SHFL_UP: SHFL_FROM(i - n, from >= last); break;
        case SHFL_DOWN: SHFL_FROM(i + n, from <= last); break;
        case SHFL_BFLY: SHFL_FROM(i ^ n, from <= last); break;
        default: SHFL_FROM(first | (n & ~segment), from <= last);
    }
    EACH t[i] = a[source[i]];
    put32(w, in, 0, t, mask);
    if (in->args[1] != ROW_SINK) put32(w, in, 1, p, mask);
}
static void put_same(const Warp *w, const Instr *in, int slot, u32 value, u32 mask) {
    u32 t[LANES];
    EACH t[i] = value;
    put32(w, in, slot, t, mask);
}
// extra[0]: mode.
enum { VOTE_ALL, VOTE_ANY, VOTE_UNI, VOTE_BALLOT };
HANDLER(vote) {
    u32 buffer[LANES], ballot = mask_of(predicate(w, in, 0, buffer)) & mask, mode = in->extra[0];
    u32 all = ballot == mask, any = ballot != 0;
    put_same(w, in, 0, mode == VOTE_ALL ? all : mode == VOTE_ANY ? any : mode == VOTE_UNI ? all | !any : ballot, mask);
}
#define MATCH(bits, T)                                                                                                 \
    HANDLER(match_any_b##bits) {                                                                                       \
        const T *a = (const T *)src(w, in, 0);                                                                         \
        u32 t[LANES];                                                                                                  \
        EACH {                                                                                                         \
            t[i] = 0;                                                                                                  \
            for (int k = 0; k < LANES; k++) t[i] |= (u32)(a[k] == a[i]) << k;                                          \
            t[i] &= mask;                                                                                              \
        }                                                                                                              \
        put32(w, in, 0, t, mask);                                                                                      \
    }                                                                                                                  \
    HANDLER(match_all_b##bits) {                                                                                       \
        const T *a = (const T *)src(w, in, 0);                                                                         \
        T first = a[__builtin_ctz(mask)];                                                                              \
        u32 same = 1;                                                                                                  \
        EACH same &= (u32)(a[i] == first) | !(mask >> i & 1);                                                          \
        put_same(w, in, 0, same ? mask : 0, mask);                                                                     \
        put_same(w, in, 1, same, mask);                                                                                \
    }
MATCH(32, u32)
MATCH(64, u64)
#define REDUCE(name, T, START, ...)                                                                                    \
    HANDLER(redux_##name) {                                                                                            \
        const T *a = (const T *)src(w, in, 0);                                                                         \
        T x = START;                                                                                                   \
        for (int i = 0; i < LANES; i++) {                                                                              \
            T y = a[i];                                                                                                \
            if (mask >> i & 1) x = __VA_ARGS__;                                                                        \
        }                                                                                                              \
        put_same(w, in, 0, (u32)x, mask);                                                                              \
    }
REDUCE(add_b32, u32, 0, x + y)
REDUCE(min_u32, u32, FULL, MIN(x, y))
REDUCE(max_u32, u32, 0, MAX(x, y))
REDUCE(min_s32, s32, INT32_MAX, MIN(x, y))
REDUCE(max_s32, s32, INT32_MIN, MAX(x, y))
REDUCE(and_b32, u32, FULL, x &y)
REDUCE(or_b32, u32, 0, x | y)
REDUCE(xor_b32, u32, 0, x ^ y)
#define REDUCE_FLOAT(name, pick)                                                                                       \
    HANDLER(redux_##name##_f32) {                                                                                      \
        const u32 *a = src(w, in, 0);                                                                                  \
        u32 kept = in->flags & ABS ? 0x7FFFFFFF : FULL, x = a[__builtin_ctz(mask)] & kept;                             \
        int nan_wins = !!(in->flags & NAN_WINS);                                                                       \
        EACH if (mask >> i & 1) x = pick##32(x, a[i] & kept, nan_wins);                                                \
        put_same(w, in, 0, is_nan32(x) ? CANONICAL : x, mask);                                                         \
    }
REDUCE_FLOAT(min, lesser)
REDUCE_FLOAT(max, greater)
HANDLER(elect) {
    u32 leader = (u32)__builtin_ctz(mask), p[LANES];
    EACH p[i] = (u32)i == leader;
    put_same(w, in, 0, leader, mask);
    put32(w, in, 1, p, mask);
}
HANDLER(activemask) { put_same(w, in, 0, mask, mask); }
