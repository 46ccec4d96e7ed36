// SPDX-License-Identifier: Apache-2.0
// What the replay and Python share: instructions as the clock sees them, traces, events, the problem and its results.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t s32;
typedef int64_t s64;

#define NEVER (~(u64)0)
// Bits of an entry of a trace, as rows.h of the interpreter has them.
#define NOT_TAKEN 0x80000000u
#define INDEX 0x3FFFFFFFu

// What an instruction does to the machine; tables.py has the same order.
enum Kind {
    PLAIN, FREE, BRANCH, EXIT, WGMMA, WGMMA_COMMIT, WGMMA_WAIT, BULK_COMMIT, BULK_WAIT, BULK_WAIT_READ, CP_COMMIT,
    CP_WAIT, TENSOR_WAIT, LAUNCH_WAIT, LAUNCH_NEXT, BY_EVENT, KINDS
};
// Units that a scheduler has for itself; those from SHARED_UNITS on are the SM's.
enum Unit { NO_UNIT, ALU, FMA, XU, FP64, MMA, PARTITION_UNITS, LSU = PARTITION_UNITS, UNITS };
// What a warp waits for; report.py has the same order.
enum Reason {
    ISSUED, ARITHMETIC, SPECIAL, SHARED_LOAD, GLOBAL_LOAD, UNIT_BUSY, NOT_PICKED, CTA_BARRIER, CLUSTER_BARRIER, MBARRIER,
    MATRIX, COPIES, TENSOR_MEMORY, FETCH, LAUNCH, REASONS
};
enum EventKind {
    E_SHARED, E_GLOBAL, E_BAR, E_CLUSTER, E_INIT, E_ARRIVE, E_WAIT, E_LOAD, E_TARGET, E_STORE, E_CP_ASYNC, E_CP_ARRIVE,
    E_MMA, E_COMMIT, E_TENSOR_MOVE, E_DISTANT, EVENT_KINDS
};
// chips.py has the same order.
enum Constant {
    C_BRANCH, C_SHARED_LATENCY, C_SHUFFLE_LATENCY, C_LSU_QUEUE, C_L2_LATENCY, C_HBM_LATENCY, C_TMA_ISSUE,
    C_PORT_BYTES, C_L2_BYTES, C_HBM_BYTES, C_SHARED_BYTES, C_BARRIER, C_CLUSTER_BARRIER, C_MBARRIER_ARRIVE,
    C_MBARRIER_WAKE, C_WGMMA_LATENCY, C_STORE_LATENCY, C_DISTANT_LATENCY, C_DISPATCH, C_TENSOR_MOVE_BYTES,
    C_TENSOR_MOVE_LATENCY, C_COMMIT_LATENCY, C_STORE_COST, C_DISTANT_ARRIVE, C_DISTANT_BYTES, C_GPU_FENCE, C_YOUNGEST_FIRST,
    CONSTANTS
};

typedef struct {
    u8 kind, unit, reason, sources, results;
    u8 fences;  // whether the assembler puts a fence of the GPU's scope in front of it, or it is one
    u16 busy, latency;  // cycles of the unit; until the result can be used
    u32 rows;  // the first of its sources, then results, in `rows`
    s32 value;  // of a wait, what may be pending; of a wgmma, cycles of the tensor cores; of a load by the copy engine
                // or an asynchronous store, cycles beyond those of an ordinary access
} Static;

typedef struct {
    u32 index;
    u16 kind, more;  // events of the same instruction that follow
    s64 a, b, c;
} Event;

typedef struct {
    const u32 *entries;
    const Event *events;
    u64 count, event_count;
} Trace;

typedef struct {
    u64 start, stop;
    u32 index;
    u16 where;  // SM, CTA and warp: row of the timeline
    u8 reason, engine;
} Segment;

typedef struct {
    const double *constants;
    const Static *instrs;
    const u32 *rows;
    const Trace *traces;  // [class][member][warp]
    const u32 *launches;  // class of each cluster, in the order in which they start
    const double *missing;  // of each region, the part of its bytes that comes from HBM
    const double *kept;  // of each region, the part of the stored bytes that goes to HBM
    u64 *ends;  // [launches]
    u64 *releases;  // [launches] when each of its CTAs has let the next launch start, or has ended
    u64 *stalls;  // [members * warps][instructions][REASONS] cycles
    double *engines;  // [ENGINES] busy cycles of the first SM
    Segment *segments;
    u64 *stamps;  // [instructions] the last cycle in which each was issued
    const u8 *flags;  // [instructions] whether it loads a flag that another CTA sets
    u64 segment_count, segment_room, shortest;  // waits from so many cycles on are kept
    u64 flags_from;  // the cycle from which on flags are set
    u64 before_ends;  // the cycle from which on griddepcontrol.wait returns
    u32 instr_count, row_count, members, warps, launch_count, slots, region_count, pad;
} Problem;

enum Engine { NO_ENGINE, TENSOR_CORES, COPY_ENGINE, SHARED_MEMORY, L2_PORT, HBM, ISSUE, ENGINES };
