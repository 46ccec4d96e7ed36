// SPDX-License-Identifier: Apache-2.0
// Moves, selection, byte permutation, addresses, parameters and local memory (PTX ISA 9.2, 9.7.6, 9.7.9).
#pragma once

#include "integer.h"

ONE(mov_b16, u16, u16, x)
HANDLER(mov_b32) {
    u32 t[LANES];
    memcpy(t, src(w, in, 0), sizeof t);
    put32(w, in, 0, t, mask);
}
HANDLER(mov_b64) {
    u64 t[LANES];
    memcpy(t, src(w, in, 0), sizeof t);
    put64(w, in, 0, t, mask);
}
HANDLER(mov_b128) {
    u64 t[2 * LANES];
    memcpy(t, src(w, in, 0), sizeof t);
    put128(w, in, 0, t, mask);
}
HANDLER(mov_pred) {
    u32 t[LANES], buffer[LANES];
    memcpy(t, predicate(w, in, 0, buffer), sizeof t);
    put32(w, in, 0, t, mask);
}
// Vectors. Destinations are read and written one after the other, so all sources are read first.
static const int RESULTS[] = {0, 1, 6, 7};
#define MOVE_VECTOR(name, T, put)                                                                                      \
    HANDLER(name) {                                                                                                    \
        T t[4][LANES];                                                                                                 \
        int count = (int)in->extra[0];                                                                                 \
        for (int k = 0; k < count; k++) memcpy(t[k], src(w, in, k), sizeof t[k]);                                      \
        for (int k = 0; k < count; k++) put(w, in, RESULTS[k], t[k], mask);                                            \
    }
MOVE_VECTOR(mov_vector_b32, u32, put32)
MOVE_VECTOR(mov_vector_b64, u64, put64)

// Packing: element 0 is the lowest. P is the part's type within the whole, count how many there are.
#define PACK(name, P, Whole, put, count, per_row)                                                                      \
    HANDLER(pack_##name) {                                                                                             \
        union {                                                                                                        \
            Whole whole[LANES * count * sizeof(P) / sizeof(Whole)];                                                    \
            P parts[LANES * count];                                                                                    \
        } t;                                                                                                           \
        for (int k = 0; k < count; k++) {                                                                              \
            const P *a = (const P *)src(w, in, k);                                                                     \
            EACH t.parts[i * count + k] = a[i * per_row];                                                              \
        }                                                                                                              \
        put(w, in, 0, t.whole, mask);                                                                                  \
    }
PACK(16x2, u16, u32, put32, 2, 2)
PACK(8x4, u8, u32, put32, 4, 4)
PACK(32x2, u32, u64, put64, 2, 1)
PACK(16x4, u16, u64, put64, 4, 2)
PACK(64x2, u64, u64, put128, 2, 1)
PACK(32x4, u32, u64, put128, 4, 1)
TWO(pack_8x2, u32, u32, (x & 0xFF) | (y & 0xFF) << 8)

#define UNPACK(name, P, Row, put, count)                                                                               \
    HANDLER(unpack_##name) {                                                                                           \
        P parts[LANES * count];                                                                                        \
        Row t[LANES];                                                                                                  \
        memcpy(parts, src(w, in, 0), sizeof parts);                                                                    \
        for (int k = 0; k < count; k++) {                                                                              \
            if (in->args[RESULTS[k]] == ROW_SINK) continue;                                                            \
            EACH t[i] = parts[i * count + k];                                                                          \
            put(w, in, RESULTS[k], t, mask);                                                                           \
        }                                                                                                              \
    }
UNPACK(16x2, u16, u32, put32, 2)
UNPACK(8x4, u8, u32, put32, 4)
UNPACK(32x2, u32, u32, put32, 2)
UNPACK(16x4, u16, u32, put32, 4)
UNPACK(64x2, u64, u64, put64, 2)
UNPACK(32x4, u32, u32, put32, 4)
HANDLER(unpack_8x2) {
    const u32 *a = src(w, in, 0);
    u32 low[LANES], high[LANES];
    EACH low[i] = a[i] & 0xFF, high[i] = a[i] >> 8 & 0xFF;
    put32(w, in, 0, low, mask);
    put32(w, in, 1, high, mask);
}

#define SELECT(bits, T, put)                                                                                           \
    HANDLER(selp_b##bits) {                                                                                            \
        const T *a = (const T *)src(w, in, 0), *b = (const T *)src(w, in, 1);                                          \
        u32 buffer[LANES];                                                                                             \
        const u32 *c = predicate(w, in, 2, buffer);                                                                    \
        T t[LANES];                                                                                                    \
        EACH t[i] = c[i] ? a[i] : b[i];                                                                                \
        put(w, in, 0, t, mask);                                                                                        \
    }                                                                                                                  \
    HANDLER(slct_s32_b##bits) {                                                                                        \
        const T *a = (const T *)src(w, in, 0), *b = (const T *)src(w, in, 1);                                          \
        const u32 *c = src(w, in, 2);                                                                                  \
        T t[LANES];                                                                                                    \
        EACH t[i] = (s32)c[i] >= 0 ? a[i] : b[i];                                                                      \
        put(w, in, 0, t, mask);                                                                                        \
    }                                                                                                                  \
    HANDLER(slct_f32_b##bits) {                                                                                        \
        const T *a = (const T *)src(w, in, 0), *b = (const T *)src(w, in, 1);                                          \
        const u32 *c = src(w, in, 2);                                                                                  \
        T t[LANES];                                                                                                    \
        EACH {                                                                                                         \
            u32 x = in->flags & FTZ && !(c[i] & 0x7F800000) ? 0 : c[i];                                                \
            t[i] = as_f32(x) >= 0 ? a[i] : b[i];                                                                       \
        }                                                                                                              \
        put(w, in, 0, t, mask);                                                                                        \
    }
SELECT(32, u32, put32)
SELECT(64, u64, put64)

// extra[0]: 0 selects by four nibbles, else the special modes.
enum { PRMT_F4E = 1, PRMT_B4E, PRMT_RC8, PRMT_ECL, PRMT_ECR, PRMT_RC16 };
static inline u32 permuted(u32 a, u32 b, u32 c, u32 mode) {
    u64 bytes = joined(a, b);
    u32 result = 0, n = c & 3;
    for (u32 k = 0; k < 4; k++) {
        u32 from, selector = c >> 4 * k;
        switch (mode) {
            case PRMT_F4E: from = n + k; break;
            case PRMT_B4E: from = (n - k) & 7; break;
            case PRMT_RC8: from = n; break;
            case PRMT_ECL: from = MAX(k, n); break;
            case PRMT_ECR: from = MIN(k, n); break;
            case PRMT_RC16: from = (n & 1) * 2 + (k & 1); break;
            default: from = selector & 7;
        }
        u32 byte = bytes >> 8 * from & 0xFF;
        if (!mode && selector & 8) byte = byte & 0x80 ? 0xFF : 0;
        result |= byte << 8 * k;
    }
    return result;
}
HANDLER(prmt) {
    const u32 *a = src(w, in, 0), *b = src(w, in, 1), *c = src(w, in, 2);
    u32 t[LANES], mode = in->extra[0];
    EACH t[i] = permuted(a[i], b[i], c[i], mode);
    put32(w, in, 0, t, mask);
}

// Addresses. A shared address carries the CTA's rank from bit 24 on; generic ones lie in a window of their own.
ONE64(cvta_shared, u64, x + w->shared_base)
ONE64(cvta_to_shared, u64, (x - w->shared_base) & 0xFFFFFFFF)
// The address in the space may be 32 bits wide: `mov.b32` cuts a parameter's, which is generic here.
ONE64(cvta_param, u64, w->parameter_base + (u32)(x - w->parameter_base))
ONE64(cvta_local, u64, x + w->local_base)
ONE64(cvta_to_local, u64, x - w->local_base)
static inline int in_window(u64 address, u64 base) { return address - base < 1ull << 32; }
enum { IS_GLOBAL, IS_CTA, IS_CLUSTER, IS_LOCAL, IS_PARAM };
HANDLER(isspacep) {
    const u64 *a = src64(w, in, 0);
    u32 t[LANES];
    EACH {
        int shared = in_window(a[i], w->shared_base), local = in_window(a[i], w->local_base);
        int param = a[i] - w->parameter_base < w->parameter_bytes;
        switch (in->extra[0]) {
            case IS_CTA: t[i] = shared && ((u32)a[i] & 0xFF000000) == w->window; break;
            case IS_CLUSTER: t[i] = (u32)shared; break;
            case IS_LOCAL: t[i] = (u32)local; break;
            case IS_PARAM: t[i] = (u32)param; break;
            default: t[i] = !shared && !local && !param;
        }
    }
    put32(w, in, 0, t, mask);
}
TWO(mapa_u32, u32, u32, (x & 0xFFFFFF) | y << 24)
SHIFT64(mapa_u64, u64, (x & ~0xFF000000ull) | (u64)(y << 24))
ONE(getctarank_u32, u32, u32, x >> 24)
COUNT64(getctarank_u64, u64, (u32)x >> 24)

// Loads and stores that the interpreter does itself. extra[0]: offset; extra[1]: bytes of an element, bit 8 signed,
// number of elements << 12, bits of a register << 16, bit 24: the address has 64 bits.
static inline u64 address_of(const Warp *w, const Instr *in, int slot, int lane) {
    const u32 *a = row(w, in, slot);
    return (in->extra[1] >> 24 ? ((const u64 *)a)[lane] : a[lane]) + (u64)(s64)(s32)in->extra[0];
}
static inline u64 load_bytes(const u8 *from, u32 kind) {
    u64 value = 0;
    u32 bytes = kind & 0xFF;
    memcpy(&value, from, bytes);
    if (kind >> 8 & 1) value = (u64)((s64)(value << (64 - 8 * bytes)) >> (64 - 8 * bytes));
    return value;
}
static inline void put_loaded(const Warp *w, const Instr *in, int k, int lane, u64 value) {
    u32 bits = in->extra[1] >> 16 & 0xFF, *d = row(w, in, RESULTS[k]);
    if (bits == 64)
        ((u64 *)d)[lane] = value;
    else
        d[lane] = (u32)value & low_ones(bits);
}
// Parameters; 0 if an address lies elsewhere.
static int load_parameter(Warp *w, const Instr *in, u32 mask) {
    u32 bytes = in->extra[1] & 0xFF, count = in->extra[1] >> 12 & 0xF;
    EACH {
        if (!(mask >> i & 1)) continue;
        u64 at = address_of(w, in, SOURCES, i) - w->parameter_base;
        if (at > w->parameter_bytes || bytes * count > w->parameter_bytes - at) return 0;
    }
    EACH {
        if (!(mask >> i & 1)) continue;
        const u8 *from = w->parameters + (address_of(w, in, SOURCES, i) - w->parameter_base);
        for (u32 k = 0; k < count; k++) put_loaded(w, in, (int)k, i, load_bytes(from + bytes * k, in->extra[1]));
    }
    return 1;
}
// Local memory, a stretch of it a lane, that begins at address `base`; 0 if an address lies elsewhere.
static int access_local(Warp *w, const Instr *in, u32 mask, int store, u64 base) {
    u32 bytes = in->extra[1] & 0xFF, count = in->extra[1] >> 12 & 0xF;
    int slot = store ? 6 : SOURCES;
    EACH {
        if (!(mask >> i & 1)) continue;
        u64 at = address_of(w, in, slot, i) - base;
        if (at > w->local_bytes || bytes * count > w->local_bytes - at || at % (bytes * count)) return 0;
    }
    EACH {
        if (!(mask >> i & 1)) continue;
        u8 *at = w->local + (size_t)w->local_bytes * (size_t)i + (address_of(w, in, slot, i) - base);
        for (u32 k = 0; k < count; k++, at += bytes) {
            if (!store)
                put_loaded(w, in, (int)k, i, load_bytes(at, in->extra[1]));
            else {
                const u32 *b = src(w, in, (int)k);
                u64 value = in->extra[1] >> 16 & 64 ? ((const u64 *)b)[i] : b[i];
                memcpy(at, &value, bytes);
            }
        }
    }
    return 1;
}
