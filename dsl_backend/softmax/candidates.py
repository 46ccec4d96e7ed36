# SPDX-License-Identifier: Apache-2.0
"""Configurations of the CuTe DSL kernel beside the default, by name, and an estimate that ranks them.

No dispatch chooses them. `benchmarks.softmax.sweep` times them, and what it finds becomes a default.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from dsl_backend.rows import MAX_CLUSTER, WARP, ceil_div, ctas_per_sm, distinct
from dsl_backend.softmax.configs import MAX_THREADS, SoftmaxConfig, default_config, widest_vector
from dsl_backend.softmax.spec import SoftmaxSpec

FEWEST_ELEMENTS, MOST_ELEMENTS = 8, 64  # of a thread
FEWEST_THREADS = 2 * WARP
# Threads and bytes of a CTA in a cluster, at least.
PART_THREADS, PART_BYTES = 4 * WARP, 4096
# Registers are given to threads by so many.
REGISTER_UNIT = 8
# Rows of a warp each: up to so many bytes of input, with so many rows in a CTA.
WARP_BYTES, WARP_ROWS = 6144, (1, 4)
# Bytes that an SM has in flight when half of its time goes into latencies: by the clock of an H200.
HALF_RATE_BYTES = 24 * 1024
# What the estimate adds for exponentials that are computed twice, and for each doubling of a cluster.
RECOMPUTED, DOUBLED = 0.06, 0.01
# Of `named`: the best spreads in all, and of one size of the cluster.
RANKED, ALIKE = 9, 3


def estimate(config: SoftmaxConfig, spec: SoftmaxSpec) -> float:
    """The time of a row, relative to that of a row whose CTAs share it evenly and wait for no latency.

    The CTA with the most vectors holds up its cluster, so that what a row is short of its tile counts as read.
    """
    fill = spec.width / config.tile_elements
    held = config.threads * config.vectors_per_thread * config.vector * spec.dtype.itemsize
    waiting = HALF_RATE_BYTES / (whole_ctas(config, spec) * held * fill)
    return (1 + waiting) * (1 + RECOMPUTED * config.recompute) * (1 + DOUBLED * math.log2(config.cluster)) / fill


def spreads(spec: SoftmaxSpec, smem_bytes: int) -> Iterator[SoftmaxConfig]:
    """All ways to spread a row over whole warps of a CTA or of a cluster."""
    vector = widest_vector(spec)
    clusters = [1 << power for power in range(MAX_CLUSTER.bit_length())]
    clusters = [one for one in clusters if one == 1 or spec.width * spec.dtype.itemsize >= one * PART_BYTES]
    for threads, cluster in itertools.product(range(FEWEST_THREADS, MAX_THREADS + 1, WARP), clusters):
        vectors = ceil_div(spec.width // vector, threads * cluster)
        if not FEWEST_ELEMENTS <= vector * vectors <= MOST_ELEMENTS or (cluster > 1 and threads < PART_THREADS):
            continue
        held = SoftmaxConfig(
            vector=vector,
            vectors_per_thread=vectors,
            threads_per_row=threads,
            rows_per_cta=1,
            cluster=cluster,
            use_pdl=True,
        )
        kept, again = whole_ctas(held, spec), whole_ctas(replace(held, recompute=True), spec)
        found = [replace(held, ctas_per_sm=kept)]
        # Exponentials are computed twice only if more CTAs fit.
        found += [replace(held, recompute=True, ctas_per_sm=again)] if again > kept else []
        yield from (config for config in found if not config.objections(spec, smem_bytes))


def whole_ctas(config: SoftmaxConfig, spec: SoftmaxSpec) -> int:
    """The CTAs on an SM that registers and threads allow. Threads get whole units of registers.

    Rows that end within a tile take a unit more where exponentials are held.
    """
    more = config.tile_elements > spec.width and not config.recompute
    units = ceil_div(config.registers(spec), REGISTER_UNIT) + more
    return ctas_per_sm(REGISTER_UNIT * units, config.threads)


def ranked(spec: SoftmaxSpec, smem_bytes: int) -> list[SoftmaxConfig]:
    """The spreads with the shortest estimates, at most RANKED of them and ALIKE of one size of the cluster."""
    found: list[SoftmaxConfig] = []
    for config in sorted(spreads(spec, smem_bytes), key=lambda one: estimate(one, spec)):
        if len(found) < RANKED and sum(one.cluster == config.cluster for one in found) < ALIKE:
            found.append(config)
    return found


def warps(spec: SoftmaxSpec) -> Iterator[SoftmaxConfig]:
    """A warp for each row: no barrier."""
    if spec.width * spec.dtype.itemsize > WARP_BYTES:
        return
    vector = widest_vector(spec)
    vectors = ceil_div(spec.width // vector, WARP)
    for rows in WARP_ROWS:
        yield SoftmaxConfig(
            vector=vector, vectors_per_thread=vectors, threads_per_row=WARP, rows_per_cta=rows, use_pdl=True
        )


def predicated(config: SoftmaxConfig, spec: SoftmaxSpec) -> SoftmaxConfig:
    """The same with loads that are left out past a row's end, where there are such and the width of a load allows."""
    left_out = replace(config, predicated=True)
    return left_out if config.tile_elements != spec.width and not left_out.unpredicated(spec) else config


def named(spec: SoftmaxSpec, smem_bytes: int) -> dict[str, SoftmaxConfig]:
    """The default and what may beat it, none of them twice.

    A name says threads of a row in a CTA x CTAs of it x vectors of a thread, with `r` if exponentials are computed
    twice, and in front of it the rows of a CTA if these are several.
    """
    default = default_config(spec)
    found = {
        "default": default,
        "no-pdl": replace(default, use_pdl=False),
        "late": replace(default, late_dependents=True),
        "predicated": predicated(default, spec),
    }
    for config in (*warps(spec), *ranked(spec, smem_bytes)):
        found[name_of(config)] = predicated(config, spec)
    return distinct({name: one for name, one in found.items() if not one.objections(spec, smem_bytes)})


def name_of(config: SoftmaxConfig) -> str:
    rows = f"{config.rows_per_cta}*" if config.rows_per_cta > 1 else ""
    again = "r" if config.recompute else ""
    return f"{rows}{config.threads_per_row}x{config.cluster}x{config.vectors_per_thread}{again}"
