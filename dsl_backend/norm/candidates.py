# SPDX-License-Identifier: Apache-2.0
"""Configurations of the CuTe DSL kernel beside the default, by name.

`dsl-backend tune norm` times them. What is faster than the default becomes a tuning record (docs/tuning.md).
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from dsl_backend.norm.configs import NormConfig, default_config, most_ctas, widest_vector
from dsl_backend.norm.spec import NormSpec
from dsl_backend.rows import ceil_div, distinct, power_of_2

# Threads of a CTA and CTAs of a row; elements of a thread; bytes of a row in each CTA of a cluster, at least.
THREADS, CLUSTERS = range(128, 513, 32), (1, 2, 4, 8, 16)
FEWEST_ELEMENTS, MOST_ELEMENTS = 16, 64
PART_BYTES = 8192


def spreads(spec: NormSpec, default: NormConfig) -> Iterator[NormConfig]:
    """Other ways to spread a row, with the default's accesses: by a power of two of threads, or exactly."""
    vector = widest_vector(spec)
    for threads, cluster in itertools.product(THREADS, CLUSTERS):
        if cluster > 1 and spec.width * spec.dtype.itemsize < cluster * PART_BYTES:
            continue
        vectors = ceil_div(spec.width // vector, threads * cluster)
        config = replace(
            default, vectors_per_thread=vectors, threads_per_row=threads, rows_per_cta=1, cluster=cluster, ctas_per_sm=1
        )
        even = threads == power_of_2(threads) or config.tile_elements == spec.width
        if even and FEWEST_ELEMENTS <= vector * vectors <= MOST_ELEMENTS:
            yield replace(config, ctas_per_sm=most_ctas(config, spec))


def named(spec: NormSpec, smem_bytes: int) -> dict[str, NormConfig]:
    """The default and what may beat it, none of them twice.

    `last` keeps lines in the caches where the default does not, and `plain` does not where it does; neither with a
    residual. Other names say threads of a CTA x CTAs x vectors of a thread.
    """
    default = default_config(spec)
    found = {
        "default": default,
        "no-pdl": replace(default, use_pdl=False),
    }
    # A residual that is written is read again soon, but not where a norm is timed alone: it would gain there.
    if not spec.residual:
        found["plain" if default.evict_last else "last"] = replace(default, evict_last=not default.evict_last)
    for config in spreads(spec, default):
        found[f"{config.threads_per_row}x{config.cluster}x{config.vectors_per_thread}"] = config
    return distinct({name: one for name, one in found.items() if not one.objections(spec, smem_bytes)})
