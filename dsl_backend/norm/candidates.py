# SPDX-License-Identifier: Apache-2.0
"""Configurations of the CuTe DSL kernel beside the default, by name.

No dispatch chooses them. `benchmarks.norm.sweep` times them, and what it finds becomes a default.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from dsl_backend.norm.configs import NormConfig, default_config, most_ctas, widest_vector
from dsl_backend.norm.spec import NormSpec
from dsl_backend.rows import ceil_div, distinct

# Threads of a CTA and CTAs of a row, and elements of a thread, of rows that are read twice.
THREADS, CLUSTERS = (128, 256, 512, 1024), (1, 2, 4)
FEWEST_ELEMENTS, MOST_ELEMENTS = 16, 64


def spreads(spec: NormSpec, smem_bytes: int) -> Iterator[NormConfig]:
    """Ways to spread a row that is read twice. Where it is, the L1 cache is to have it, so that clusters are small."""
    vector = widest_vector(spec)
    for threads, cluster in itertools.product(THREADS, CLUSTERS):
        vectors = ceil_div(spec.width // vector, threads * cluster)
        config = NormConfig(
            vector=vector,
            vectors_per_thread=vectors,
            threads_per_row=threads,
            rows_per_cta=1,
            cluster=cluster,
            use_pdl=True,
            reread=True,
        )
        if FEWEST_ELEMENTS <= vector * vectors <= MOST_ELEMENTS and not config.objections(spec, smem_bytes):
            yield replace(config, ctas_per_sm=most_ctas(config, spec))


def named(spec: NormSpec, smem_bytes: int) -> dict[str, NormConfig]:
    """The default and what may beat it, none of them twice.

    `last` keeps lines in the caches; `twice` reads rows a second time, by threads of a CTA x CTAs x vectors of a
    thread, and `twice-last` with priorities of the caches as well.
    """
    default = default_config(spec)
    found = {
        "default": default,
        "no-pdl": replace(default, use_pdl=False),
        "last": replace(default, evict_last=True),
    }
    for config in spreads(spec, smem_bytes):
        size = f"{config.threads_per_row}x{config.cluster}x{config.vectors_per_thread}"
        found[f"twice-{size}"] = config
        found[f"twice-last-{size}"] = replace(config, evict_last=True)
    return distinct({name: one for name, one in found.items() if not one.objections(spec, smem_bytes)})
