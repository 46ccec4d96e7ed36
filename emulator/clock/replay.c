// SPDX-License-Identifier: Apache-2.0
// Replays the traces of a kernel's warps on the clock of one SM, or of those of a cluster.
//
// Warps issue in order, one instruction a cycle on each of four schedulers, once the registers that they read are there
// and the unit is free. Whatever works beside the warps - tensor cores, copies, memories - is a server that is busy and
// then free: when work is done is known when it is issued. A barrier completes when the last part of its phase does.
#include "replay.h"

enum { SCHEDULERS = 4, NAMED = 16, MBARRIERS = 256, PHASES = 8, GROUPS = 64, OPERATIONS = 1024, MOST_WARPS = 64 };
enum { OTHER_SM = -2 };  // in place of a region, as notes.py has it
enum Block { RUNS, ON_BAR, ON_CLUSTER, BEFORE_CLUSTER, ON_MBARRIER, ON_WGMMA, ENDED };
// Each operand is evaluated once.
#define MAX(a, b) ({ __typeof__(a) x_ = (a); __typeof__(b) y_ = (b); x_ > y_ ? x_ : y_; })
#define MIN(a, b) ({ __typeof__(a) x_ = (a); __typeof__(b) y_ = (b); x_ < y_ ? x_ : y_; })
#define EXPORT __attribute__((visibility("default")))

typedef struct Warp Warp;
typedef struct Cta Cta;
typedef struct Cluster Cluster;

typedef struct {
    u64 read[GROUPS], written[GROUPS];  // of committed groups, when all up to it are done
    u64 open_read, open_written;
    u32 committed;
} Groups;

typedef struct {
    u64 offset, when, done[PHASES];
    s64 expected, pending, bytes;
    u64 phase;  // the current one, from 1; 0 where there is no barrier
} MBarrier;

typedef struct {
    u64 when;
    s64 arrived;
} Barrier;

typedef struct {
    u64 issued[4], when[OPERATIONS], done[OPERATIONS], begun;
    u8 parts[OPERATIONS];
} Warpgroup;

struct Warp {
    const Trace *trace;
    Cta *cta;
    u64 at, event, ready, since;
    u64 *registers;  // when each row can be read
    u8 *by;  // and what it waits for until then
    u64 order;
    u64 target;  // of the barrier that it is blocked on
    u64 round;  // of the cluster's barrier, at which it arrived last
    MBarrier *barrier;
    Groups bulk, copies;
    u64 group_ends[GROUPS], groups, matrix_issued;
    u64 tensor_done, mma_done;
    u32 number, scheduler, block_id;
    u8 reason, block;
};

typedef struct {
    Warp *warps[MOST_WARPS], *last;
    u32 count;
    u64 next;
    double free[PARTITION_UNITS], tensor_free;
} Scheduler;

typedef struct {
    Scheduler schedulers[SCHEDULERS];
    double lsu, tensor, copies, port, sent, received, l2, hbm;  // sent: to other SMs' shared memory
    double *owed;  // of each region: what of an access the next one misses
} Sm;

struct Cta {
    Cluster *cluster;
    Sm *sm;
    Warp *warps;
    Warpgroup *groups;
    MBarrier barriers[MBARRIERS];
    Barrier named[NAMED];
    u32 rank, released;  // whether it has let the next launch start
};

struct Cluster {
    Cta *ctas;
    Barrier barrier;
    u64 round, round_done[PHASES];
    u32 launch, live, slot, holding;  // holding: CTAs that have not let the next launch start
};

typedef struct {
    Problem *p;
    Sm *sms;
    Cluster *clusters;
    u64 now, order;
    u32 next_launch, live;
} Sim;

static double constant(const Sim *s, int which) { return s->p->constants[which]; }
static u64 after(double time) { return (u64)(time + 0.999999); }

static void segment(Sim *s, const Cta *cta, u32 warp, u64 start, u64 stop, u8 reason, u8 engine, u32 index) {
    Problem *p = s->p;
    if (stop - start < p->shortest || p->segment_count >= p->segment_room) return;
    u16 where = (u16)((cta->cluster->slot * p->members + cta->rank) * p->warps + warp);
    p->segments[p->segment_count++] = (Segment){start, stop, index, where, reason, engine};
}
static void busy(Sim *s, const Cta *cta, u8 engine, double start, double cycles, u32 index) {
    if (cta->rank == 0) s->p->engines[engine] += cycles;
    if (engine == TENSOR_CORES || engine == COPY_ENGINE)
        segment(s, cta, 0, (u64)start, after(start + cycles), 0, engine, index);
}

// Memory.

// A server takes work in the order in which it is asked: returns when it has done it.
static double serve(double *free, double from, double cycles) {
    *free = MAX(*free, from) + cycles;
    return *free;
}

// When bytes of global memory have come, or have been taken: by the SM's port, its part of L2 and of HBM.
static double global_memory(Sim *s, Cta *cta, double from, s64 region, double bytes, int stores, u32 index) {
    Sm *sm = cta->sm;
    const double missing = region < 0 ? 0 : s->p->missing[region];
    double done = serve(&sm->port, from, bytes / constant(s, C_PORT_BYTES));
    done = MAX(done, serve(&sm->l2, from, bytes / constant(s, C_L2_BYTES)));
    busy(s, cta, L2_PORT, from, bytes / constant(s, C_PORT_BYTES), index);
    if (stores) {
        const double kept = region < 0 ? 1 : s->p->kept[region];
        double cycles = constant(s, C_STORE_COST) * kept * bytes / constant(s, C_HBM_BYTES);
        serve(&sm->hbm, from, cycles);
        busy(s, cta, HBM, from, cycles, index);
        return done;
    }
    if (missing <= 0) return done + constant(s, C_L2_LATENCY);
    busy(s, cta, HBM, from, missing * bytes / constant(s, C_HBM_BYTES), index);
    done = MAX(done, serve(&sm->hbm, from, missing * bytes / constant(s, C_HBM_BYTES)));
    sm->owed[region] += missing;
    if (sm->owed[region] < 1 - 1e-9) return done + constant(s, C_L2_LATENCY);
    sm->owed[region] -= 1;
    return done + constant(s, C_HBM_LATENCY);
}

static double shared_memory(Sim *s, Cta *cta, double from, double wavefronts, u32 index) {
    busy(s, cta, SHARED_MEMORY, from, wavefronts, index);
    return serve(&cta->sm->lsu, from, wavefronts);
}

// Warps.

static void settle(Sim *s, Warp *w, u64 from, u8 reason);

static void wake(Sim *s, Warp *w, u64 when) {
    w->block = RUNS;
    settle(s, w, MAX(when, s->now + 1), w->reason);
}
static void block(Warp *w, u8 how, u8 reason) {
    w->block = how;
    w->reason = reason;
    w->ready = NEVER;
}
#define EACH_WARP(cta, w) for (Warp *w = (cta)->warps; w < (cta)->warps + s->p->warps; w++)

static void start_cluster(Sim *s, Cluster *cluster, u64 when);

// A CTA lets the next launch start: the first of its warps counts.
static void release(Sim *s, Cta *cta, u64 when) {
    Cluster *cluster = cta->cluster;
    if (cta->released) return;
    cta->released = 1;
    cluster->holding--;
    s->p->releases[cluster->launch] = MAX(s->p->releases[cluster->launch], when);
}

static void end_warp(Sim *s, Warp *w, u64 when) {
    Cluster *cluster = w->cta->cluster;
    u64 *end = &s->p->ends[cluster->launch];
    w->block = ENDED;
    w->ready = NEVER;
    *end = MAX(*end, when);
    if (--cluster->live) return;
    if (cluster->holding) s->p->releases[cluster->launch] = *end;
    s->live--;
    start_cluster(s, cluster, s->p->ends[cluster->launch] + (u64)constant(s, C_DISPATCH));
}

// The next instruction: instructions that cost nothing are done, and it is known when the first other one may issue.
static void settle(Sim *s, Warp *w, u64 from, u8 reason) {
    const Problem *p = s->p;
    for (;; w->at++) {
        if (w->at >= w->trace->count) {
            end_warp(s, w, from);
            return;
        }
        u32 entry = w->trace->entries[w->at];
        const Static *in = p->instrs + (entry & INDEX);
        const u32 *rows = p->rows + in->rows;
        u64 ready = from;
        u8 why = reason;
        for (u32 i = 0; i < in->sources; i++)
            if (w->registers[rows[i]] > ready) ready = w->registers[rows[i]], why = w->by[rows[i]];
        if (in->kind != FREE) {
            Scheduler *mine = &w->cta->sm->schedulers[w->scheduler];
            w->ready = ready;
            w->reason = why;
            mine->next = MIN(mine->next, ready);
            return;
        }
        if (!(entry & NOT_TAKEN))
            for (u32 i = 0; i < in->results; i++) {
                u32 row = rows[in->sources + i];
                w->registers[row] = ready == from ? 0 : ready, w->by[row] = why;
            }
    }
}

static const Event *next_event(Warp *w, u32 index) {
    const Trace *trace = w->trace;
    if (w->event >= trace->event_count || trace->events[w->event].index != index) return NULL;
    return trace->events + w->event++;
}

// Barriers.

static MBarrier *mbarrier(Cta *cta, u64 offset) {
    u32 place = (u32)(offset >> 3) % MBARRIERS;
    while (cta->barriers[place].phase && cta->barriers[place].offset != offset) place = (place + 1) % MBARRIERS;
    MBarrier *found = &cta->barriers[place];
    if (!found->phase) *found = (MBarrier){.offset = offset, .phase = 1, .expected = 1, .pending = 1};
    return found;
}
static Cta *owner(Warp *w, s64 key, const Problem *p) {
    return w->cta->cluster->ctas + (u64)(key >> 24) % p->members;
}
static MBarrier *mbarrier_at(Sim *s, Warp *w, s64 key) { return mbarrier(owner(w, key, s->p), (u64)key & 0xFFFFFF); }

static void contribute(Sim *s, Cluster *cluster, MBarrier *b, s64 arrivals, s64 bytes, u64 when) {
    b->bytes += bytes;
    do {
        s64 some = MIN(arrivals, b->pending);
        arrivals -= some;
        b->pending -= some;
        b->when = MAX(b->when, when);
        if (b->pending || b->bytes) break;
        b->done[b->phase % PHASES] = b->when;
        b->phase++;
        b->pending = b->expected;
        b->when = 0;
    } while (arrivals > 0);
    for (u32 rank = 0; rank < s->p->members; rank++)
        EACH_WARP(&cluster->ctas[rank], w)
            if (w->block == ON_MBARRIER && w->barrier == b && b->phase > w->target)
                wake(s, w, b->done[w->target % PHASES] + (u64)constant(s, C_MBARRIER_WAKE));
}

static void wait_mbarrier(Sim *s, Warp *w, const Event *e, u64 t) {
    MBarrier *b = mbarrier_at(s, w, e->a);
    u64 target = (u64)e->b;
    if (b->phase > target) {
        u64 done = target + PHASES >= b->phase ? b->done[target % PHASES] : 0;
        u64 wake = done > t ? done + (u64)constant(s, C_MBARRIER_WAKE) : 0;
        settle(s, w, MAX(t + 1, wake), MBARRIER);
        return;
    }
    w->barrier = b;
    w->target = target;
    block(w, ON_MBARRIER, MBARRIER);
}

static void cta_barrier(Sim *s, Warp *w, const Event *e, u64 t) {
    Barrier *b = &w->cta->named[e->a % NAMED];
    b->arrived += 32;
    b->when = MAX(b->when, t);
    u32 id = (u32)e->a;
    int waits = e->c != 0;
    if (b->arrived >= e->b) {
        u64 done = b->when + (u64)constant(s, C_BARRIER);
        *b = (Barrier){0, 0};
        EACH_WARP(w->cta, other) if (other->block == ON_BAR && other->block_id == id) wake(s, other, done);
        settle(s, w, waits ? done : t + 1, CTA_BARRIER);
    } else if (waits) {
        w->block_id = id;
        block(w, ON_BAR, CTA_BARRIER);
    } else
        settle(s, w, t + 1, ISSUED);
}

static void arrive_at_cluster(Sim *s, Warp *w, u64 t) {
    Cluster *c = w->cta->cluster;
    w->round = c->round + 1;
    c->barrier.arrived++;
    c->barrier.when = MAX(c->barrier.when, t);
    if (c->barrier.arrived < c->live) return;
    c->round++;
    u64 done = c->round_done[c->round % PHASES] = c->barrier.when + (u64)constant(s, C_CLUSTER_BARRIER);
    c->barrier = (Barrier){0, 0};
    for (u32 rank = 0; rank < s->p->members; rank++)
        EACH_WARP(&c->ctas[rank], other) {
            if (other->block == BEFORE_CLUSTER) {
                other->block = RUNS;
                arrive_at_cluster(s, other, done);
                wake(s, other, done + 1);
            } else if (other->block == ON_CLUSTER)
                wake(s, other, done);
        }
}

// A warp that arrives again before it has waited, waits first, as it does on the emulator: FlashAttention-4's latent
// kernel arrives twice in front of two waits. By a mere count a round could end without its slowest warp, the one that
// initialises mbarriers.
static void cluster_barrier(Sim *s, Warp *w, const Event *e, u64 t) {
    const Cluster *c = w->cta->cluster;
    const int waits = e->a != 0;
    if (c->round < w->round) {
        block(w, waits ? ON_CLUSTER : BEFORE_CLUSTER, CLUSTER_BARRIER);
        return;
    }
    u64 done = c->round_done[w->round % PHASES];
    if (waits) {
        settle(s, w, MAX(t + 1, done), CLUSTER_BARRIER);
        return;
    }
    u64 from = MAX(t, done);
    arrive_at_cluster(s, w, from);
    settle(s, w, from + 1, s->p->instrs[e->index].fences ? GLOBAL_LOAD : ISSUED);
}

// Asynchronous work.

static void commit(Groups *g) {
    u32 now = g->committed++ % GROUPS, before = (now + GROUPS - 1) % GROUPS;
    g->read[now] = MAX(g->open_read, g->read[before]);
    g->written[now] = MAX(g->open_written, g->written[before]);
    g->open_read = g->open_written = 0;
}
static u64 group_done(const Groups *g, s32 pending, int reads) {
    if ((s64)g->committed <= pending) return 0;
    u32 last = (g->committed - 1 - (u32)pending) % GROUPS;
    return reads ? g->read[last] : g->written[last];
}

static u64 matrix_done(const Warpgroup *g, u64 number) { return number ? g->done[number % OPERATIONS] : 0; }

// A warp's part of a wgmma: it begins once all four warps have issued theirs.
static void issue_wgmma(Sim *s, Warp *w, const Static *in, u32 index, u64 t) {
    Warpgroup *g = &w->cta->groups[w->number / 4];
    u64 number = ++w->matrix_issued, place = number % OPERATIONS;
    if (!g->parts[place]) g->when[place] = 0;
    g->when[place] = MAX(g->when[place], t);
    if (++g->parts[place] < 4) return;
    g->parts[place] = 0;
    g->begun = number;
    double start = MAX(w->cta->sm->tensor, (double)g->when[place]);
    w->cta->sm->tensor = start + in->value;
    g->done[place] = after(start + in->value + constant(s, C_WGMMA_LATENCY));
    busy(s, w->cta, TENSOR_CORES, start, in->value, index);
    Warp *first = w->cta->warps + w->number / 4 * 4;
    for (Warp *other = first; other < first + 4; other++)
        if (other->block == ON_WGMMA && other->target <= number) wake(s, other, matrix_done(g, other->target));
}
static void wait_wgmma(Sim *s, Warp *w, s32 pending, u64 t) {
    Warpgroup *g = &w->cta->groups[w->number / 4];
    u64 needed = (s64)w->groups > pending ? w->group_ends[(w->groups - (u64)pending) % GROUPS] : 0;
    if (g->begun >= needed) {
        settle(s, w, MAX(t + 1, matrix_done(g, needed)), MATRIX);
        return;
    }
    w->target = needed;
    block(w, ON_WGMMA, MATRIX);
}

// A load, and its targets behind it; returns the event behind those, of another load of the same instruction.
static const Event *bulk_load(Sim *s, Warp *w, const Event *e, u64 t) {
    Sm *sm = w->cta->sm;
    int within = e->a == OTHER_SM;
    double *server = within ? &sm->sent : &sm->copies;
    double start = MAX(*server, (double)t + constant(s, C_TMA_ISSUE));
    double cycles = (double)e->b / constant(s, within ? C_DISTANT_BYTES : C_PORT_BYTES);
    *server = start + cycles;
    double done = within ? start + cycles + constant(s, C_DISTANT_LATENCY)
                         : global_memory(s, w->cta, start, e->a, (double)e->b, 0, e->index);
    done += s->p->instrs[e->index].value;
    busy(s, w->cta, COPY_ENGINE, start, cycles, e->index);
    const Event *to = e;
    while (to->more) {
        to = next_event(w, e->index);
        if (to->kind != E_TARGET) return to;
        Cta *cta = w->cta->cluster->ctas + (u64)to->a % s->p->members;
        double arrived = done;
        // What another SM gets of a multicast takes its port.
        double *into = within ? &cta->sm->received : &cta->sm->port;
        if (cta != w->cta) arrived = MAX(done, serve(into, start, cycles) + done - start - cycles);
        contribute(s, cta->cluster, mbarrier_at(s, w, to->b), 0, -e->b, after(arrived));
    }
    return NULL;
}

static void bulk_store(Sim *s, Warp *w, const Event *e, u64 t) {
    double start = (double)t + constant(s, C_TMA_ISSUE);
    double read = shared_memory(s, w->cta, start, (double)e->b / constant(s, C_SHARED_BYTES), e->index);
    double done = global_memory(s, w->cta, read, e->a, (double)e->b, 1, e->index);
    w->bulk.open_read = MAX(w->bulk.open_read, after(done));
    w->bulk.open_written = MAX(w->bulk.open_written, after(done + constant(s, C_STORE_LATENCY)));
}

static void move_tensor(Sim *s, Warp *w, const Event *e, u64 t) {
    double *port = &w->cta->sm->schedulers[w->number % SCHEDULERS].tensor_free;
    double done = serve(port, (double)t, (double)e->a / constant(s, C_TENSOR_MOVE_BYTES));
    w->tensor_done = MAX(w->tensor_done, after(done + constant(s, C_TENSOR_MOVE_LATENCY)));
}

static void multiply(Sim *s, Warp *w, const Event *e, u64 t) {
    Cluster *c = w->cta->cluster;
    Cta *peer = e->c && s->p->members > 1 ? c->ctas + (w->cta->rank ^ 1) : w->cta;
    double start = MAX(MAX(w->cta->sm->tensor, peer->sm->tensor), (double)t);
    w->cta->sm->tensor = peer->sm->tensor = start + (double)e->a;
    w->mma_done = MAX(w->mma_done, after(start + (double)(e->a + e->b)));
    busy(s, w->cta, TENSOR_CORES, start, (double)e->a, e->index);
}

// When the result of an access can be used.
static u64 access_memory(Sim *s, Warp *w, const Event *e, u64 t) {
    double from = (double)t, done = from;
    for (;; e = next_event(w, e->index)) {
        if (e->kind == E_SHARED)
            done = MAX(done, shared_memory(s, w->cta, from, (double)e->a, e->index) + constant(s, C_SHARED_LATENCY));
        else if (e->kind == E_DISTANT)
            done = MAX(done, from + constant(s, C_DISTANT_LATENCY));
        else {
            double sent = shared_memory(s, w->cta, from, (double)(e->c >> 8), e->index);
            done = MAX(done, global_memory(s, w->cta, sent, e->a, (double)e->b, e->c & 1, e->index));
        }
        if (!e->more) return after(done);
    }
}

static void copy_async(Sim *s, Warp *w, const Event *e, u64 t) {
    double sent = shared_memory(s, w->cta, (double)t, (double)e->c, e->index);
    u64 done = after(global_memory(s, w->cta, sent, e->a, (double)e->b, 0, e->index));
    w->copies.open_read = MAX(w->copies.open_read, done);
    w->copies.open_written = MAX(w->copies.open_written, done);
}
static u64 copies_so_far(const Groups *g) {
    u64 done = g->open_written;
    return g->committed ? MAX(done, g->written[(g->committed - 1) % GROUPS]) : done;
}

static void arrive_mbarriers(Sim *s, Warp *w, const Event *e, u64 t) {
    for (;; e = next_event(w, e->index)) {
        int own = owner(w, e->a, s->p) == w->cta;
        u64 when = t + (u64)constant(s, own ? C_MBARRIER_ARRIVE : C_DISTANT_ARRIVE);
        MBarrier *b = mbarrier_at(s, w, e->a);
        if (e->kind == E_CP_ARRIVE) {
            when = MAX(when, copies_so_far(&w->copies));
            if (!e->c) b->pending += e->b;
        } else if (e->kind == E_COMMIT)
            when = MAX(t, w->mma_done) + (u64)constant(s, C_COMMIT_LATENCY);
        contribute(s, w->cta->cluster, b, e->b, e->kind == E_ARRIVE ? e->c : 0, when);
        if (!e->more) return;
    }
}

// What an event says; the registers that it writes are there at the time that is returned.
static u64 by_event(Sim *s, Warp *w, const Event *e, u64 t) {
    switch (e->kind) {
        case E_SHARED:
        case E_DISTANT:
        case E_GLOBAL: return access_memory(s, w, e, t);
        case E_INIT: {
            for (;; e = next_event(w, e->index)) {
                MBarrier *b = mbarrier_at(s, w, e->a);
                *b = (MBarrier){.offset = b->offset, .phase = 1, .expected = e->b, .pending = e->b};
                if (!e->more) return t;
            }
        }
        case E_ARRIVE:
        case E_CP_ARRIVE:
        case E_COMMIT: arrive_mbarriers(s, w, e, t); return t;
        case E_LOAD:
            while (e) e = bulk_load(s, w, e, t);
            return t;
        case E_STORE:
            for (;; e = next_event(w, e->index)) {
                bulk_store(s, w, e, t);
                if (!e->more) return t;
            }
        case E_CP_ASYNC: copy_async(s, w, e, t); return t;
        case E_MMA: multiply(s, w, e, t); return t;
        case E_TENSOR_MOVE: move_tensor(s, w, e, t); return t;
        default: return t;
    }
}

static void execute(Sim *s, Warp *w, const Static *in, u32 index, u64 t) {
    u64 fence = in->fences ? (u64)constant(s, C_GPU_FENCE) : 0, next = t + fence + 1, ready = t + fence + in->latency;
    const Event *e = in->kind == BY_EVENT ? next_event(w, index) : NULL;
    if (e && e->kind == E_BAR) { cta_barrier(s, w, e, t); return; }
    if (e && e->kind == E_CLUSTER) { cluster_barrier(s, w, e, t + fence); return; }
    if (e && e->kind == E_WAIT) { wait_mbarrier(s, w, e, t); return; }
    if (e) {
        u64 done = fence + by_event(s, w, e, e->kind == E_ARRIVE ? t + fence : t);
        if (s->p->flags[index]) done = MAX(done, s->p->flags_from + (u64)constant(s, C_L2_LATENCY));
        ready = MAX(ready, done);
    }
    u8 reason = fence ? GLOBAL_LOAD : ISSUED;
    switch (in->kind) {
        case BRANCH: next = t + (u64)constant(s, C_BRANCH), reason = FETCH; break;
        case EXIT: w->at = w->trace->count; break;
        case WGMMA: issue_wgmma(s, w, in, index, t); break;
        case WGMMA_COMMIT: w->group_ends[++w->groups % GROUPS] = w->matrix_issued; break;
        case WGMMA_WAIT: wait_wgmma(s, w, in->value, t); return;
        case BULK_COMMIT: commit(&w->bulk); break;
        case CP_COMMIT: commit(&w->copies); break;
        case BULK_WAIT:
        case BULK_WAIT_READ: next = MAX(next, group_done(&w->bulk, in->value, in->kind == BULK_WAIT_READ)), reason = COPIES; break;
        case CP_WAIT: next = MAX(next, in->value < 0 ? copies_so_far(&w->copies) : group_done(&w->copies, in->value, 0)), reason = COPIES; break;
        case TENSOR_WAIT: next = MAX(next, w->tensor_done), reason = TENSOR_MEMORY; break;
        case LAUNCH_WAIT: next = MAX(next, s->p->before_ends), reason = LAUNCH; break;
        case LAUNCH_NEXT: release(s, w->cta, t); break;
        default: break;
    }
    const u32 *results = s->p->rows + in->rows + in->sources;
    for (u32 i = 0; i < in->results; i++) w->registers[results[i]] = ready, w->by[results[i]] = in->reason;
    settle(s, w, next, reason);
}

// False where the unit is not free: the warp tries again when it is.
static int issue(Sim *s, Scheduler *q, Warp *w, u64 t) {
    u32 entry = w->trace->entries[w->at], index = entry & INDEX;
    const Static *in = s->p->instrs + index;
    double *lsu = &w->cta->sm->lsu;
    if (!(entry & NOT_TAKEN)) {
        double free = in->unit == LSU ? *lsu - constant(s, C_LSU_QUEUE) : q->free[in->unit];
        if (free > (double)t) {
            w->ready = after(free);
            w->reason = UNIT_BUSY;
            return 0;
        }
    }
    u64 *stalls = s->p->stalls + ((u64)(w->cta->rank * s->p->warps + w->number) * s->p->instr_count + index) * REASONS;
    if (t > w->since) {
        u64 ready = MAX(w->ready, w->since);
        stalls[w->reason] += ready - w->since;
        stalls[NOT_PICKED] += t - ready;
        segment(s, w->cta, w->number, w->since, t, t - ready > ready - w->since ? NOT_PICKED : w->reason, NO_ENGINE, index);
    }
    stalls[ISSUED]++;
    w->since = t + 1;
    w->at++;
    if (w->cta->rank == 0) s->p->engines[ISSUE] += 1.0 / SCHEDULERS;
    if (entry & NOT_TAKEN) {
        settle(s, w, t + 1, ISSUED);
        return 1;
    }
    if (in->unit == LSU)
        shared_memory(s, w->cta, (double)t, in->busy, index);
    else if (in->unit)
        q->free[in->unit] = MAX(q->free[in->unit], (double)t) + in->busy;
    s->p->stamps[index] = t;
    execute(s, w, in, index, t);
    return 1;
}

// The warp that a scheduler issues from: the one that it issued from last if it can, else the oldest or the youngest.
static int schedule(Sim *s, Scheduler *q, u64 t) {
    const int youngest = constant(s, C_YOUNGEST_FIRST) > 0;
    for (;;) {
        Warp *best = NULL;
        u64 next = NEVER;
        for (u32 i = 0; i < q->count; i++) {
            Warp *w = q->warps[i];
            if (w->ready > t)
                next = MIN(next, w->ready);
            else if (!best || w == q->last || (best != q->last && (w->order > best->order) == youngest))
                best = w;
        }
        q->next = next;
        if (!best) return 0;
        if (!issue(s, q, best, t)) continue;
        q->last = best;
        q->next = t + 1;
        return 1;
    }
}

// Starting.

static void start_warp(Sim *s, Cta *cta, u32 number, const Trace *trace, u64 when) {
    Warp *w = cta->warps + number;
    u64 *registers = w->registers;
    u8 *by = w->by;
    u32 scheduler = w->scheduler;
    memset(w, 0, sizeof *w);
    memset(registers, 0, sizeof(u64) * s->p->row_count);
    *w = (Warp){.trace = trace, .cta = cta, .number = number, .scheduler = scheduler, .registers = registers, .by = by};
    w->since = when;
    w->order = s->order++;
    settle(s, w, when, LAUNCH);
}

static void start_cluster(Sim *s, Cluster *cluster, u64 when) {
    const Problem *p = s->p;
    if (s->next_launch >= p->launch_count) return;
    u32 launch = cluster->launch = s->next_launch++, of = p->launches[launch];
    cluster->live = p->members * p->warps;
    cluster->holding = p->members;
    cluster->barrier = (Barrier){0, 0};
    cluster->round = 0;
    memset(cluster->round_done, 0, sizeof cluster->round_done);
    s->live++;
    for (u32 rank = 0; rank < p->members; rank++) {
        Cta *cta = cluster->ctas + rank;
        cta->released = 0;
        memset(cta->barriers, 0, sizeof cta->barriers);
        memset(cta->named, 0, sizeof cta->named);
        memset(cta->groups, 0, sizeof(Warpgroup) * ((p->warps + 3) / 4));
    }
    for (u32 rank = 0; rank < p->members; rank++)
        for (u32 i = 0; i < p->warps; i++)
            start_warp(s, cluster->ctas + rank, i, p->traces + (of * p->members + rank) * p->warps + i, when);
}

static void place_warp(Sim *s, Cta *cta, u32 number, u32 turn) {
    Warp *w = cta->warps + number;
    w->scheduler = (turn + number) % SCHEDULERS;
    Scheduler *q = &cta->sm->schedulers[w->scheduler];
    if (q->count < MOST_WARPS) q->warps[q->count++] = w;
    w->ready = NEVER;
    w->block = ENDED;
    w->registers = calloc(s->p->row_count, sizeof(u64));
    w->by = calloc(s->p->row_count, 1);
}

static void make(Sim *s) {
    const Problem *p = s->p;
    s->sms = calloc(p->members, sizeof(Sm));
    for (u32 rank = 0; rank < p->members; rank++) s->sms[rank].owed = calloc(p->region_count + 1, sizeof(double));
    s->clusters = calloc(p->slots, sizeof(Cluster));
    for (u32 slot = 0; slot < p->slots; slot++) {
        Cluster *cluster = s->clusters + slot;
        cluster->slot = slot;
        cluster->ctas = calloc(p->members, sizeof(Cta));
        for (u32 rank = 0; rank < p->members; rank++) {
            Cta *cta = cluster->ctas + rank;
            *cta = (Cta){.cluster = cluster, .sm = s->sms + rank, .rank = rank};
            cta->warps = calloc(p->warps, sizeof(Warp));
            cta->groups = calloc((p->warps + 3) / 4, sizeof(Warpgroup));
            for (u32 i = 0; i < p->warps; i++) place_warp(s, cta, i, slot * p->warps);
        }
    }
}

static void discard(Sim *s) {
    const Problem *p = s->p;
    for (u32 slot = 0; slot < p->slots; slot++) {
        for (u32 rank = 0; rank < p->members; rank++) {
            Cta *cta = s->clusters[slot].ctas + rank;
            for (u32 i = 0; i < p->warps; i++) free(cta->warps[i].registers), free(cta->warps[i].by);
            free(cta->warps), free(cta->groups);
        }
        free(s->clusters[slot].ctas);
    }
    for (u32 rank = 0; rank < p->members; rank++) free(s->sms[rank].owed);
    free(s->clusters), free(s->sms);
}

// Puts the instructions of whole blocks in another order, as an assembler would: order[i] is what comes at place i.
EXPORT void clock_reorder(u32 *trace, u64 count, const u32 *order, const u32 *stops) {
    for (u64 i = 0; i < count;) {
        u32 first = trace[i] & INDEX, stop = stops[first];
        u64 length = stop > first ? stop - first : 1, n = 1;
        while (n < length && i + n < count && (trace[i + n] & INDEX) == first + n) n++;
        if (n == length && length > 1) {
            u32 *copy = malloc(length * sizeof(u32));
            memcpy(copy, trace + i, length * sizeof(u32));
            for (u64 k = 0; k < length; k++) trace[i + k] = copy[order[first + k] - first];
            free(copy);
        }
        i += n;
    }
}

EXPORT u32 clock_sizes(u32 which) {
    const u32 sizes[] = {sizeof(Static), sizeof(Event), sizeof(Trace), sizeof(Segment), sizeof(Problem), CONSTANTS, REASONS, ENGINES};
    return sizes[which];
}

// Runs all launches; returns the cycle in which the last one ends, or 0 if warps wait for each other for ever.
EXPORT u64 clock_replay(Problem *p) {
    Sim s = {.p = p};
    u64 last = 0;
    make(&s);
    for (u32 slot = 0; slot < p->slots; slot++) start_cluster(&s, s.clusters + slot, 0);
    while (s.live) {
        u64 next = NEVER;
        for (u32 rank = 0; rank < p->members; rank++)
            for (u32 i = 0; i < SCHEDULERS; i++) {
                Scheduler *q = &s.sms[rank].schedulers[i];
                if (q->next <= s.now) schedule(&s, q, s.now);
                next = MIN(next, q->next);
            }
        // A warp that was woken by a scheduler behind its own goes on in this cycle's next round.
        for (u32 rank = 0; rank < p->members; rank++)
            for (u32 i = 0; i < SCHEDULERS; i++) next = MIN(next, s.sms[rank].schedulers[i].next);
        if (next == NEVER) break;
        s.now = MAX(next, s.now + 1);
    }
    for (u32 i = 0; i < p->launch_count; i++) last = MAX(last, p->ends[i]);
    // What was stored goes on to HBM behind the kernel, and keeps the next one from it.
    last = MAX(last, after(s.sms[0].hbm));
    if (s.live) last = 0;
    discard(&s);
    return last;
}
