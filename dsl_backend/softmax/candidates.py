# SPDX-License-Identifier: Apache-2.0
"""Configurations of the CuTe DSL kernel beside the default, by name.

`dsl-backend tune softmax` times them. What is faster than the default becomes a tuning record (docs/tuning.md).
"""

from collections.abc import Iterator
from dataclasses import replace

from dsl_backend.rows import WARP, ceil_div, distinct
from dsl_backend.runtime.chip import Chip
from dsl_backend.runtime.target import Target
from dsl_backend.softmax.configs import (
    SoftmaxConfig,
    default_config,
    estimate,
    most_ctas,
    predicated,
    spreads,
    widest_vector,
)
from dsl_backend.softmax.spec import SoftmaxSpec

# Rows of a warp each: up to so many bytes of input, with so many rows in a CTA.
WARP_BYTES, WARP_ROWS = 6144, (1, 4)
# Of `named`: the best spreads in all, and of one size of the cluster.
RANKED, ALIKE = 9, 3


def ranked(spec: SoftmaxSpec, chip: Chip) -> list[SoftmaxConfig]:
    """The spreads with the shortest estimates, at most RANKED of them and ALIKE of one size of the cluster."""
    found: list[SoftmaxConfig] = []
    for config in sorted(spreads(spec, least_cluster=1), key=lambda one: estimate(one, spec, chip)):
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
        config = SoftmaxConfig(
            vector=vector, vectors_per_thread=vectors, threads_per_row=WARP, rows_per_cta=rows, use_pdl=True
        )
        yield replace(predicated(config, spec), late_dependents=True)


def named(spec: SoftmaxSpec, target: Target) -> dict[str, SoftmaxConfig]:
    """The default and what may beat it, none of them twice.

    `more` reserves registers for as many CTAs on an SM as may fit: a row of one CTA leaves that to the compiler.
    `early` or `late` let the next launch start at another time than the default, `last` keeps lines in the caches where
    the default does not, and `plain` does not where it does.
    Other names say threads of a row in a CTA x CTAs of it x vectors of a thread, with `r` if exponentials are computed
    twice, and in front of it the rows of a CTA if these are several.
    """
    chip = target.chips[0]
    default = default_config(spec, chip)
    found = {
        "default": default,
        "no-pdl": replace(default, use_pdl=False, late_dependents=False),
        "early" if default.late_dependents else "late": replace(default, late_dependents=not default.late_dependents),
        "predicated": predicated(default, spec),
        "more": replace(default, ctas_per_sm=max(default.ctas_per_sm, most_ctas(default, spec))),
        "plain" if default.evict_last else "last": replace(default, evict_last=not default.evict_last),
    }
    for config in (*warps(spec), *ranked(spec, chip)):
        found[name_of(config)] = config
    return distinct({name: one for name, one in found.items() if not one.objections(spec, target.smem_bytes)})


def name_of(config: SoftmaxConfig) -> str:
    rows = f"{config.rows_per_cta}*" if config.rows_per_cta > 1 else ""
    again = "r" if config.recompute else ""
    return f"{rows}{config.threads_per_row}x{config.cluster}x{config.vectors_per_thread}{again}"
