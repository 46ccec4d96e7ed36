// SPDX-License-Identifier: Apache-2.0
// Runs the ordinary instructions of one warp until something that only the machine can do (PTX ISA 9.2, section 9).
//
// Every lane has a program counter. The lanes with the lowest one run; where they reach a higher one that others wait
// at, the lanes join. Instructions that gather lanes park those that are early.

#include <fenv.h>

#include "moves.h"
#include "undefined.h"

// Codes of what is done here rather than by a handler; behind them come the handlers' own.
enum {
    TRAP,
    BRANCH,
    BRANCH_TABLE,
    END,
    LOAD_PARAMETER,
    LOAD_LOCAL,
    STORE_LOCAL,
    LOAD_GENERIC,
    STORE_GENERIC,
    CONTROLS
};
static const char *const CONTROL_NAMES[CONTROLS] = {
    "trap",       "branch",      "branch_table", "end",          "load_param",
    "load_local", "store_local", "load_generic", "store_generic"};
enum { STOP_TRAP, STOP_DONE, STOP_LIMIT, STOP_STUCK };

#define EXPORT __attribute__((visibility("default")))
#define MAX_OPERATIONS 1024
extern const Operation *const __start_operations[];
extern const Operation *const __stop_operations[];
static Handler *handlers[MAX_OPERATIONS];
static Flow flows[MAX_OPERATIONS];

__attribute__((constructor)) static void list_handlers(void) {
    for (size_t i = 0; i < (size_t)(__stop_operations - __start_operations); i++) {
        handlers[i] = __start_operations[i]->run;
        flows[i] = flow_of(__start_operations[i]->name);
    }
}
// The name of an operation; NULL behind the last.
EXPORT const char *core_operation(u32 code) {
    if (code < CONTROLS) return CONTROL_NAMES[code];
    code -= CONTROLS;
    return code < (size_t)(__stop_operations - __start_operations) ? __start_operations[code]->name : NULL;
}
EXPORT u32 core_sizes(u32 which) { return which ? sizeof(Warp) : sizeof(Instr); }

static u32 lanes_at(const Warp *w, u32 at) {
    u32 lanes = 0;
    EACH lanes |= (u32)(w->pc[i] == at) << i;
    return lanes;
}
static void set_pc(Warp *w, u32 lanes, u32 at) { EACH w->pc[i] = lanes >> i & 1 ? at : w->pc[i]; }

// The lanes with the lowest program counter among some; the next higher one is where they meet others.
static u32 lowest_group(const Warp *w, u32 lanes, u32 *at, u32 *meet) {
    u32 low = NONE, next = NONE;
    EACH {
        u32 pc = lanes >> i & 1 ? w->pc[i] : NONE;
        low = MIN(low, pc);
    }
    u32 group = lanes_at(w, low) & lanes;
    EACH {
        u32 pc = (lanes & ~group) >> i & 1 ? w->pc[i] : NONE;
        next = MIN(next, pc);
    }
    *at = low, *meet = next;
    return group;
}

static inline int stores(const Instr *in) { return in->code == STORE_LOCAL || in->code == STORE_GENERIC; }
static inline int is_destination(const Instr *in, int slot) {
    return slot < SOURCES || slot == 7 || (slot == 6 && !stores(in));
}
// Of some lanes, those in which a register's low bytes are not wholly defined; 0: all of its bytes.
static u32 undefined_lanes(const Warp *w, u32 of, u32 lanes, u32 bytes) {
    u32 missing = lanes & ~w->init[of], found = 0;
    if (!missing || !bytes || bytes > 4 || 8 * bytes >= w->widths[of]) return missing;
    const u32 *known = w->known + LANES * (size_t)of;
    int span = span_of(w, of);
    EACH found |= (u32)(missing >> i & 1 && ~known[i * span] & low_ones(8 * bytes)) << i;
    return found;
}
// Registers that were never written, or that asynchronous work owns or reads.
static void check_row(Warp *w, const Instr *in, int slot, u32 of, u32 mask, int reads) {
    int busy = w->busy[of], free = is_destination(in, slot) ? BUSY_COPY : BUSY_READ;
    if (busy && busy != free) report(w, in, slot, of, mask, BUSY);
    if (!reads) return;
    // Of a value that is stored, as many bytes as are stored are used.
    u32 missing = undefined_lanes(w, of, mask, stores(in) && slot < 6 ? in->extra[1] & 0xFF : 0);
    if (missing) report(w, in, slot, of, missing, UNWRITTEN);
}
// A copy of what a load brings is as little there as that itself, until something else is written to it.
static void follow_copies(Warp *w, const Instr *in) {
    int copies = 0;
    if (in->code >= CONTROLS && flows[in->code - CONTROLS].copies)
        for (int k = 0; k < 4; k++) copies |= w->busy[in->args[SOURCES + k]] >= BUSY_LOAD;
    for (int slot = 0; slot < SLOTS; slot++) {
        u32 of = in->args[slot];
        int busy = w->busy[of];
        if (of != ROW_SINK && is_destination(in, slot) && (!busy || busy == BUSY_COPY))
            w->busy[of] = copies ? BUSY_COPY : 0;
    }
}
static void check_rows(Warp *w, const Instr *in, u32 mask) {
    // What is done here - branches, loads, stores - uses all that it reads.
    u32 uses = in->code >= CONTROLS ? flows[in->code - CONTROLS].uses : 0xF;
    for (int slot = 0; slot < SLOTS; slot++) {
        int is_source = slot >= SOURCES && slot < SOURCES + 4, is_use = is_source && uses >> (slot - SOURCES) & 1;
        check_row(w, in, slot, in->args[slot], mask, is_use || (slot == 6 && stores(in)));
    }
    if (w->any_busy) follow_copies(w, in);
}
// The lanes in which every source is defined.
static inline u32 defined(const Warp *w, const Instr *in) {
    const u32 *args = in->args;
    return w->init[args[2]] & w->init[args[3]] & w->init[args[4]] & w->init[args[5]];
}
static inline void check(Warp *w, const Instr *in, u32 mask) {
    if ((mask & ~defined(w, in)) | w->any_busy) check_rows(w, in, mask);
}
static inline void written(Warp *w, const Instr *in, u32 mask) {
    w->init[in->args[0]] |= mask;
    w->init[in->args[1]] |= mask;
    w->init[in->args[6]] |= mask;
    w->init[in->args[7]] |= mask;
}

// The clocks count instructions.
static void tick(Warp *w, u64 now) {
    u64 *clock = (u64 *)(w->rows + LANES * (ROW_CLOCK + 2));
    EACH clock[i] = now;
    for (int half = 0; half < 2; half++)
        EACH w->rows[LANES * (ROW_CLOCK + half) + i] = (u32)(now >> 32 * half);
}

static inline void run_handler(Warp *w, const Instr *in, u32 mask) {
    static const int MODES[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    Handler *run = handlers[in->code - CONTROLS];
    if (in->flags & ROUNDING) {
        fesetround(MODES[ROUNDING_OF(in)]);
        run(w, in, mask);
        fesetround(FE_TONEAREST);
    } else
        run(w, in, mask);
}
static __attribute__((noinline)) void execute_undefined(Warp *w, const Instr *in, u32 mask) {
    u32 of = in->code - CONTROLS;
    Undefined found;
    find_undefined(w, in, flows[of], handlers[of], mask, &found);
    run_handler(w, in, mask);
    mark_undefined(w, in, mask, &found);
}
static inline void execute(Warp *w, const Instr *in, u32 mask) {
    run_handler(w, in, mask);
    written(w, in, mask);
}

static void check_members(Warp *w, const Instr *in, u32 members, u32 same, u32 pool) {
    // Lanes that a block never had are in the masks of kernels that do not count their threads; nobody waits for them.
    u32 bad = (same & ~members) | (members & w->born & ~w->live) | (members & pool & ~same);
    if (bad) report(w, in, SLOT_MEMBERS, in->args[in->extra[1]], bad, MEMBERS);
}
// Executes a gathering instruction for every set of lanes that is complete; returns the lanes that are done.
static u32 gather(Warp *w, const Instr *in, u32 pool) {
    const u32 *members = row(w, in, (int)in->extra[1]);
    u32 done = 0;
    for (u32 rest = pool, same; rest; rest &= ~same) {
        u32 named = members[__builtin_ctz(rest)];
        same = 0;
        EACH same |= (u32)(members[i] == named) << i;
        same &= rest;
        if (named & w->live & ~pool) continue;
        check_members(w, in, named, same, pool);
        // A shuffle can read lanes that take no part.
        if (same == FULL && defined(w, in) == FULL)
            execute(w, in, same);
        else
            execute_undefined(w, in, same);
        done |= same;
    }
    return done;
}
// A set of lanes that gathers, some of which may have to wait; returns whether all go on together.
static int arrive(Warp *w, const Instr *in, u32 active, u32 mask, u32 at) {
    u32 early = w->parked ? w->parked & lanes_at(w, at) : 0, done = gather(w, in, mask | early);
    if (done) count(w, at);
    if (done == active) return 1;
    u32 waiting = (mask | early) & ~done;
    set_pc(w, (active | early) & ~waiting, at + 1);
    set_pc(w, waiting, at);
    w->parked = (w->parked & ~early) | waiting;
    return 0;
}

// Everyone who can run is parked: those who wait only for lanes that have ended go on.
static int release_parked(Warp *w) {
    for (u32 rest = w->parked, at, next, group; rest; rest &= ~group) {
        group = lowest_group(w, rest, &at, &next);
        u32 done = gather(w, w->code + at, group);
        if (!done) continue;
        count(w, at);
        w->parked &= ~done;
        set_pc(w, done, at + 1);
        return 1;
    }
    return 0;
}

// Nobody can go on, and some wait to elect one of them: they elect without the others, which is a fault. Kernels do it
// that elect a lane and let it make a copy, for which CuTe DSL elects a lane once more, of all.
static int elect_without_the_others(Warp *w) {
    for (u32 rest = w->parked, at, next, group; rest; rest &= ~group) {
        group = lowest_group(w, rest, &at, &next);
        const Instr *in = w->code + at;
        if (in->code < CONTROLS || handlers[in->code - CONTROLS] != op_elect) continue;
        u32 named = row(w, in, (int)in->extra[1])[__builtin_ctz(group)];
        report(w, in, SLOT_MEMBERS, in->args[in->extra[1]], named & w->live & ~group, MEMBERS);
        execute(w, in, group);
        count(w, at);
        w->parked &= ~group;
        set_pc(w, group, at + 1);
        return 1;
    }
    return 0;
}

// A load or store that may be of memory that only the machine has: 0.
static int access(Warp *w, const Instr *in, u32 mask) {
    switch (in->code) {
        case LOAD_PARAMETER: return load_parameter(w, in, mask);
        case LOAD_LOCAL: return access_local(w, in, mask, 0, 0);
        case STORE_LOCAL: return access_local(w, in, mask, 1, 0);
        case LOAD_GENERIC: return access_local(w, in, mask, 0, w->local_base) || load_parameter(w, in, mask);
        case STORE_GENERIC: return access_local(w, in, mask, 1, w->local_base);
        default: return 0;
    }
}

static int stop(Warp *w, int reason, u32 active, u32 at, u32 mask) {
    set_pc(w, active, at);
    w->active = active, w->at = at, w->mask = mask;
    return reason;
}

static int interpret(Warp *w, u64 limit) {
    const Instr *const code = w->code;
    const u64 last = w->executed + limit;
    u64 now = w->executed;
    for (;;) {
        u32 at, meet, active = lowest_group(w, w->live & ~w->parked, &at, &meet);
        w->executed = now;
        if (!active) {
            if (!w->live) return stop(w, STOP_DONE, 0, w->code_count, 0);
            if (release_parked(w) || elect_without_the_others(w)) continue;
            lowest_group(w, w->parked, &at, &meet);
            return stop(w, STOP_STUCK, 0, at, w->parked);
        }
        // Until others are met, or the lanes part.
        for (;;) {
            if (at >= meet) break;
            if (now == last) return w->executed = now, stop(w, STOP_LIMIT, active, at, active);
            now++;
            const Instr *in = code + at;
            u32 mask = active;
            if (in->guard != NONE) {
                u32 holds = mask_of(w->rows + LANES * (size_t)in->guard);
                if ((active & ~w->init[in->guard]) | w->any_busy) check_row(w, in, SLOT_GUARD, in->guard, active, 1);
                mask &= in->flags & GUARD_NOT ? ~holds : holds;
                if (!mask) {
                    if (w->trace) w->trace[w->traced++] = at | NOT_TAKEN;
                    at++;
                    continue;
                }
            }
            if (in->code >= CONTROLS) {
                u32 missing = mask & ~defined(w, in);
                if (missing | w->any_busy) check_rows(w, in, mask);
                if (in->flags & CLOCK) tick(w, now);
                if (in->flags & GATHERS) {
                    if (!arrive(w, in, active, mask, at)) goto parted;
                } else {
                    count(w, at);
                    if (missing)
                        execute_undefined(w, in, mask);
                    else
                        execute(w, in, mask);
                }
                at++;
                continue;
            }
            if (in->code == BRANCH) {
                count(w, at);
                if (mask == active) {
                    at = in->extra[0];
                    continue;
                }
                set_pc(w, mask, in->extra[0]);
                set_pc(w, active & ~mask, at + 1);
                goto parted;
            }
            if (in->code == END) {
                count(w, at);
                w->live &= ~mask;
                set_pc(w, active & ~mask, at + 1);
                goto parted;
            }
            if (in->code == BRANCH_TABLE) {
                check(w, in, mask);
                const u32 *index = src(w, in, 0);
                int outside = 0;
                EACH outside |= mask >> i & 1 && index[i] >= in->extra[1];
                if (outside) return w->executed = now - 1, stop(w, STOP_TRAP, active, at, mask);
                count(w, at);
                EACH if (mask >> i & 1) w->pc[i] = w->tables[in->extra[0] + index[i]];
                set_pc(w, active & ~mask, at + 1);
                goto parted;
            }
            if (in->code != TRAP) {
                // Before the checks: what the machine does itself it checks itself.
                if (access(w, in, mask)) {
                    check(w, in, mask);
                    if (stores(in))
                        check_rows(w, in, mask);
                    else
                        written(w, in, mask);
                    count(w, at);
                    at++;
                    continue;
                }
            }
            return w->executed = now - 1, stop(w, STOP_TRAP, active, at, mask);
        }
        set_pc(w, active, at);
    parted:;
    }
}

// Runs until an instruction that only the machine can do, the end, or `limit` instructions.
EXPORT int core_run(Warp *w, u64 limit) {
    fenv_t outside;
    fegetenv(&outside);
    fesetenv(FE_DFL_ENV);
    u32 any = 0;
    for (u32 i = 0; i < w->row_count; i++) any |= w->busy[i];
    w->any_busy = any != 0;
    int reason = interpret(w, limit);
    fesetenv(&outside);
    return reason;
}
// The instruction that the warp stopped before is done for the lanes it stopped for.
EXPORT void core_advance(Warp *w) {
    if (w->mask) count(w, w->at);
    set_pc(w, w->active, w->at + 1);
    w->executed++;
    w->active = w->mask = 0;
}
