// SPDX-License-Identifier: Apache-2.0
// Which bits of registers are defined, for instructions that have a source with undefined ones (PTX ISA 9.2, 5.2: a
// register that was never written has no value).
//
// Compilers compute with what was never written: the result of a load that a predicate switched off is converted,
// scaled and put into vectors, and only then a select or a guard throws it away. So an undefined bit is passed on, and
// the fault is in its use: `uses` of Flow here, guards and branches in core.c, all operands of traps in warp.py.
//
// `init` of a register's first row says in which lanes all its bits are defined. Where they are not, `known`, laid out
// like the rows, has the bits that are. Only instructions with an undefined source come here.
#pragma once

#include "convert.h"
#include "gather.h"

// How undefined bits go through an operation.
enum {
    WHOLE,  // one makes the whole result undefined
    ACROSS,  // and in all lanes that take part
    BITS,  // moved as bits are: the operation itself is run on them
    LOGIC,  // bit by bit
    AND,  // bit by bit, but for a defined bit that decides
    OR,
    COMPARE,  // as WHOLE, but for a defined predicate that decides the combination
    ELEMENTS_32,  // as WHOLE within each element of a vector, or in the one that there is
    ELEMENTS_16,
    FROM_PAIR,  // into two elements: from two sources, from one's halves, and to halves
    FROM_HALVES,
    TO_HALVES,
};
typedef struct {
    u8 how;
    u8 uses;  // a bit a source: those that must be defined
    u8 controls;  // of BITS, a bit a source: those that say what moves where
    u8 copies;  // and does nothing else
} Flow;

static const struct {
    const char *name;
    Flow flow;
} FLOWS[] = {
    {"mov_", {BITS, 0, 0, 1}},
    {"pack_", {BITS, 0, 0, 1}},
    {"unpack_", {BITS, 0, 0, 1}},
    {"brev_", {BITS, 0, 0}},
    {"convert_integer", {BITS, 0, 0}},
    {"selp_", {BITS, 0, 1 << 2}},
    {"slct_", {BITS, 0, 1 << 2}},
    {"prmt", {BITS, 0, 1 << 2}},
    {"shl_", {BITS, 0, 1 << 1}},
    {"shr_", {BITS, 0, 1 << 1}},
    {"szext_", {BITS, 0, 1 << 1}},
    {"shf_", {BITS, 0, 1 << 2}},
    {"bfe_", {BITS, 0, 1 << 1 | 1 << 2}},
    {"bfi_", {BITS, 0, 1 << 2 | 1 << 3}},
    {"shfl", {BITS, 1 << 3, 1 << 1 | 1 << 2}},
    {"lop3_pred", {WHOLE, 0, 0}},
    {"lop3", {LOGIC, 0, 0}},
    {"and_", {AND, 0, 0}},
    {"or_", {OR, 0, 0}},
    {"xor_", {LOGIC, 0, 0}},
    {"not_", {LOGIC, 0, 0}},
    {"compare_", {COMPARE, 0, 0}},
    {"convert_pair", {FROM_PAIR, 0, 0}},
    {"convert_halves", {FROM_HALVES, 0, 0}},
    {"convert_widen", {TO_HALVES, 0, 0}},
    // One lane's source is every lane's result.
    {"vote", {WHOLE, 0xF, 0}},
    {"match_", {WHOLE, 0xF, 0}},
    // Threads whose rows lie beyond a tensor's end reduce with the others of their warp, and throw the result away.
    {"redux_", {ACROSS, 0xE, 0}},
    {"elect", {WHOLE, 0xF, 0}},
    {"bar_warp_sync", {WHOLE, 0xF, 0}},
    {"div_u", {WHOLE, 1 << 1, 0}},
    {"div_s", {WHOLE, 1 << 1, 0}},
    {"rem_", {WHOLE, 1 << 1, 0}},
};
static int ends_with(const char *name, const char *end) {
    size_t length = strlen(name), tail = strlen(end);
    return length >= tail && !strcmp(name + length - tail, end);
}
static Flow flow_of(const char *name) {
    for (size_t i = 0; i < sizeof FLOWS / sizeof *FLOWS; i++)
        if (!strncmp(name, FLOWS[i].name, strlen(FLOWS[i].name))) return FLOWS[i].flow;
    if (ends_with(name, "f32x2")) return (Flow){ELEMENTS_32, 0, 0};
    return (Flow){ends_with(name, "x2") || ends_with(name, "_half") ? ELEMENTS_16 : WHOLE, 0, 0};
}

enum { SPAN = 4, WORDS = SPAN * LANES };
// A register's words a lane; those of a lane are next to each other.
static inline int span_of(const Warp *w, u32 of) { return MAX(w->widths[of] / 32, 1); }

// The undefined bits of a register, laid out as its rows are.
static void undefined_bits(const Warp *w, u32 of, u32 *out) {
    int span = span_of(w, of);
    const u32 *known = w->known + LANES * (size_t)of;
    u32 kept = low_ones(w->widths[of]);
    for (int k = 0; k < span * LANES; k++) out[k] = w->init[of] >> k / span & 1 ? 0 : ~known[k] & kept;
}

// What an instruction leaves undefined.
typedef struct {
    u32 lanes;  // in which it is everything
    u32 bits[4][WORDS];  // of each destination
} Undefined;

// On the undefined bits in place of the sources that are moved.
static void run_on_bits(Warp *w, const Instr *in, Flow flow, Handler *run, u32 mask, Undefined *found) {
    enum { FIRST = ROW_SINK + SPAN };
    _Alignas(64) u32 scratch[(FIRST + SLOTS * SPAN) * LANES] = {0};
    Instr on_bits = *in;
    for (int slot = 0; slot < SLOTS; slot++)
        if (in->args[slot] != ROW_SINK) on_bits.args[slot] = (u32)(FIRST + SPAN * slot);
    for (int k = 0; k < 4; k++) {
        u32 of = in->args[SOURCES + k], *bits = scratch + LANES * (FIRST + SPAN * (SOURCES + k));
        if ((flow.controls | flow.uses) >> k & 1) {
            memcpy(bits, src(w, in, k), 4 * LANES * (size_t)span_of(w, of));
        } else {
            undefined_bits(w, of, bits);
            on_bits.flags &= (u16)~(NOT_SOURCE << k);
            // What a lane that does not take part would give is undefined (9.7.9.6).
            if (in->flags & GATHERS) EACH bits[i] |= mask >> i & 1 ? 0 : FULL;
        }
    }
    u32 *rows = w->rows;
    w->rows = scratch;
    run(w, &on_bits, FULL);
    w->rows = rows;
    for (int k = 0; k < 4; k++) memcpy(found->bits[k], scratch + LANES * (FIRST + SPAN * RESULTS[k]), 4 * WORDS);
    // A shuffle's predicate follows from what controls it.
    if (in->flags & GATHERS) memset(found->bits[1], 0, 4 * WORDS);
}


static void logic(const Warp *w, const Instr *in, int how, Undefined *found) {
    u32 bits[WORDS], *all = found->bits[0];
    int count = span_of(w, in->args[0]) * LANES;
    for (int k = 0; k < 3; k++) {
        undefined_bits(w, in->args[SOURCES + k], bits);
        // Absent sources have the rows of zeros and are shorter.
        int given = span_of(w, in->args[SOURCES + k]) * LANES;
        for (int n = 0; n < MIN(count, given); n++) all[n] |= bits[n];
    }
    if (how == LOGIC) return;
    for (int k = 0; k < 2; k++) {
        u32 turned = (in->flags & NOT_SOURCE << k ? FULL : 0) ^ (how == OR ? FULL : 0);
        const u32 *value = src(w, in, k);
        undefined_bits(w, in->args[SOURCES + k], bits);
        // Decided: and by a defined 0, or by a defined 1.
        for (int n = 0; n < count; n++) all[n] &= bits[n] | (value[n] ^ turned);
    }
}

static u32 decided(const Warp *w, const Instr *in) {
    u32 buffer[LANES], how = in->extra[0] & 3, holds = mask_of(predicate(w, in, 2, buffer)), of = in->args[SOURCES + 2];
    return w->init[of] & (how == 1 ? ~holds : how == 2 ? holds : 0);
}

static void elements(const Warp *w, const Instr *in, int bits, Undefined *found) {
    u32 of_source[WORDS], *all = found->bits[0], low = low_ones((u32)bits);
    int count = span_of(w, in->args[0]) * LANES;
    for (int k = 0; k < 3; k++) {
        if (in->args[SOURCES + k] == ROW_ZERO) continue;
        undefined_bits(w, in->args[SOURCES + k], of_source);
        for (int n = 0; n < count; n++)
            all[n] |= (of_source[n] & low ? low : 0) | (of_source[n] & ~low ? ~low : 0);
    }
}

static void convert_two(const Warp *w, const Instr *in, int how, Undefined *found) {
    u32 a[WORDS], b[WORDS];
    int bits = how == TO_HALVES ? 16 : place_bits(RESULT_TYPE(in));
    int half = how == FROM_HALVES ? 16 : place_bits(SOURCE_TYPE(in));
    undefined_bits(w, in->args[SOURCES], a);
    undefined_bits(w, in->args[SOURCES + 1], b);
    EACH {
        u32 high = how == FROM_PAIR ? a[i] : a[i] >> half, low = how == FROM_PAIR ? b[i] : a[i] & low_ones((u32)half);
        found->bits[0][i] = (high ? low_ones((u32)bits) << bits : 0) | (low ? low_ones((u32)bits) : 0);
    }
}

// Before an instruction with an undefined source is executed: what it leaves undefined.
static void find_undefined(Warp *w, const Instr *in, Flow flow, Handler *run, u32 mask, Undefined *found) {
    u32 some = 0, control = 0;
    for (int k = 0; k < 4; k++) {
        u32 missing = ~w->init[in->args[SOURCES + k]];
        if (!(flow.uses >> k & 1)) some |= missing;
        if (flow.controls >> k & 1) control |= missing;
    }
    memset(found, 0, sizeof *found);
    switch (flow.how) {
        case BITS:
            if (run == op_convert_integer && in->flags & SAT) {
                found->lanes = some;
                break;
            }
            run_on_bits(w, in, flow, run, mask, found);
            found->lanes = control;
            break;
        case LOGIC:
        case AND:
        case OR: logic(w, in, flow.how, found); break;
        case ACROSS: found->lanes = some & mask ? FULL : 0; break;
        case COMPARE: found->lanes = some & ~decided(w, in); break;
        case ELEMENTS_32: elements(w, in, 32, found); break;
        case ELEMENTS_16: elements(w, in, 16, found); break;
        case FROM_PAIR:
        case FROM_HALVES:
        case TO_HALVES: convert_two(w, in, flow.how, found); break;
        default: found->lanes = some;
    }
}

// After it.
static void mark_undefined(Warp *w, const Instr *in, u32 mask, const Undefined *found) {
    for (int k = 0; k < 4; k++) {
        u32 of = in->args[RESULTS[k]], whole = 0;
        if (of == ROW_SINK) continue;
        int span = span_of(w, of);
        u32 *known = w->known + LANES * (size_t)of;
        EACH {
            if (!(mask >> i & 1)) continue;
            u32 any = 0;
            for (int n = i * span; n < (i + 1) * span; n++) {
                u32 bits = found->lanes >> i & 1 ? FULL : found->bits[k][n];
                known[n] = ~bits;
                any |= bits;
            }
            whole |= (u32)!any << i;
        }
        w->init[of] = (w->init[of] & ~mask) | (whole & mask);
    }
}
