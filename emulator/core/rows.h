// SPDX-License-Identifier: Apache-2.0
// What every part of the interpreter shares: the state of a warp, encoded instructions, rows of registers.
//
// A register of up to 32 bits is a row u32[32], zero-extended, one element a lane; one of 64 bits is u64[32] over two
// rows, one of 128 bits u64[32][2] over four. Handlers compute all lanes, which vectorises, into an array of their own
// and then keep the lanes of the mask: a destination may be a source as well.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef unsigned __int128 u128;
typedef __int128 s128;

enum { LANES = 32, SOURCES = 2, SLOTS = 8, MAX_FAULTS = 512 };
#define FULL 0xFFFFFFFFu
#define NONE 0xFFFFFFFFu
#define EACH for (int i = 0; i < LANES; i++)

// program.py has the same numbers.
enum {
    GUARD_NOT = 1 << 0,
    FTZ = 1 << 1,
    SAT = 1 << 2,
    RELU = 1 << 3,
    ROUNDING = 3 << 4,  // RN, RZ, RM, RP
    NOT_SOURCE = 1 << 6,  // four bits, one a source: a negated predicate
    CLOCK = 1 << 10,
    NAN_WINS = 1 << 11,
    XORSIGN = 1 << 12,
    ABS = 1 << 13,
    SATFINITE = 1 << 14,
    GATHERS = 1 << 15,
};
enum { RN, RZ, RM, RP, RNA };
// What asynchronous work does with a register, as in warp.py: reads it; loads into it; or loaded what was copied to it.
enum { BUSY_READ = 2, BUSY_LOAD, BUSY_COPY };
enum { ROW_ZERO = 0, ROW_SINK = 1, ROW_CLOCK = 5 };
#define NOT_TAKEN 0x80000000u

// args: rows. 0, 1, 6, 7 are destinations, 2 to 5 sources; what is absent is the row of zeros or the sink.
typedef struct {
    u16 code;
    u16 flags;
    u32 guard;
    u32 args[SLOTS];
    u32 extra[2];
} Instr;

enum { UNWRITTEN, BUSY, MEMBERS, DIVISION };
enum { SLOT_GUARD = 8, SLOT_MEMBERS = 9, SLOT_DIVISION = 10 };
typedef struct {
    u32 index, row, lanes, kind;
} Fault;

// warp.py has the same fields.
typedef struct {
    u32 *rows;
    u32 *init;
    u8 *busy;
    u32 *counts;
    const Instr *code;
    const u32 *tables;
    const u8 *parameters;
    u8 *local;
    u16 *faulted;  // per instruction, a bit per slot that was reported
    u32 *known;  // defined bits of what is not wholly defined: undefined.h
    const u8 *widths;  // at a register's first row, its bits
    u32 *trace;  // of every instruction that was issued its index, and NOT_TAKEN where its guard held for no lane; or NULL
    u64 traced;
    u64 parameter_base, shared_base, local_base, executed;
    u32 row_count, code_count, parameter_bytes, local_bytes, window;
    u32 born;  // lanes that there were at the beginning
    u32 live, parked, active, at, mask;
    u32 fault_count, any_busy;
    u32 pc[LANES];
    Fault faults[MAX_FAULTS];
} Warp;

typedef void Handler(Warp *w, const Instr *in, u32 mask);
typedef struct {
    const char *name;
    Handler *run;
} Operation;

// A handler announces itself: the loader gathers the pointers of the section `operations`.
#define HANDLER(name)                                                                                                  \
    static void op_##name(Warp *w, const Instr *in, u32 mask);                                                         \
    static const Operation operation_##name = {#name, op_##name};                                                      \
    static const Operation *const listed_##name __attribute__((section("operations"), used)) = &operation_##name;      \
    static void op_##name(Warp *w __attribute__((unused)), const Instr *in, u32 mask)

static inline u32 *row(const Warp *w, const Instr *in, int slot) { return w->rows + LANES * (size_t)in->args[slot]; }
static inline const u32 *src(const Warp *w, const Instr *in, int k) { return row(w, in, SOURCES + k); }
static inline const u64 *src64(const Warp *w, const Instr *in, int k) { return (const u64 *)src(w, in, k); }

static inline void put32(const Warp *w, const Instr *in, int slot, const u32 *t, u32 mask) {
    u32 *d = row(w, in, slot);
    if (mask == FULL)
        memcpy(d, t, 4 * LANES);
    else
        EACH d[i] = mask >> i & 1 ? t[i] : d[i];
}

static inline void put64(const Warp *w, const Instr *in, int slot, const u64 *t, u32 mask) {
    u64 *d = (u64 *)row(w, in, slot);
    if (mask == FULL)
        memcpy(d, t, 8 * LANES);
    else
        EACH d[i] = mask >> i & 1 ? t[i] : d[i];
}

static inline void put128(const Warp *w, const Instr *in, int slot, const u64 *t, u32 mask) {
    u64 *d = (u64 *)row(w, in, slot);
    for (int i = 0; i < LANES; i++)
        if (mask >> i & 1) d[2 * i] = t[2 * i], d[2 * i + 1] = t[2 * i + 1];
}

// The lanes whose predicate holds.
static inline u32 mask_of(const u32 *predicate) {
    u32 mask = 0;
    EACH mask |= (predicate[i] & 1) << i;
    return mask;
}

// A predicate source: 0 or 1, turned around where the instruction says `!p`.
static inline const u32 *predicate(const Warp *w, const Instr *in, int k, u32 *buffer) {
    const u32 *p = src(w, in, k);
    if (!(in->flags & NOT_SOURCE << k)) return p;
    EACH buffer[i] = p[i] ^ 1;
    return buffer;
}

static inline float as_f32(u32 x) {
    float f;
    memcpy(&f, &x, 4);
    return f;
}
static inline u32 bits_f32(float f) {
    u32 x;
    memcpy(&x, &f, 4);
    return x;
}
static inline double as_f64(u64 x) {
    double f;
    memcpy(&f, &x, 8);
    return f;
}
static inline u64 bits_f64(double f) {
    u64 x;
    memcpy(&x, &f, 8);
    return x;
}

// An instruction was executed.
static inline void count(Warp *w, u32 at) {
    w->counts[at]++;
    if (w->trace) w->trace[w->traced++] = at;
}

// Each instruction and slot is reported once.
static void report(Warp *w, const Instr *in, int slot, u32 of, u32 lanes, u32 kind) {
    u32 index = (u32)(in - w->code);
    if (w->faulted[index] >> slot & 1) return;
    w->faulted[index] |= (u16)(1 << slot);
    if (w->fault_count < MAX_FAULTS) w->faults[w->fault_count] = (Fault){index, of, lanes, kind};
    w->fault_count++;
}
