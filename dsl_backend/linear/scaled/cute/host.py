# SPDX-License-Identifier: Apache-2.0
"""Linear layers of quantised operands by the GEMMs of SM90 and SM100.

An output with computed scales may take two launches: the products in float32, and what quantises them. With a scale
for each row there is no other way. With scales of groups it is one for few rows on SM90: the streaming kernel has parts
of a group, while a CTA of the other kernel finishes whole groups, 144 of which are two rounds of 132 SMs. On SM100 it
is the only way, because a thread of the epilogue has fewer columns than a group.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import NamedTuple

from dsl_backend.gemm.configs import INVARIANT_FOR, Config, estimate_us
from dsl_backend.gemm.cost import max_ctas
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.scaled_host import build, key_of, run
from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.sm90 import scaled_configs as sm90
from dsl_backend.gemm.sm100 import scaled_configs as sm100
from dsl_backend.gemm.sm100.configs import PromotedSmallMConfig
from dsl_backend.gemm.spec import Rows
from dsl_backend.gemm.tiles import SmallMTiles
from dsl_backend.linear.scaled.kernel import Launch
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.linear.scaled.tuned import config_of, faster
from dsl_backend.quant.cute import host as quantising
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# What a launch that quantises costs besides its bytes: 64 rows of 14336 columns took 3.2 us on an H100.
QUANTISING_US = 2.5
# What the model of 16-bit GEMMs leaves out of the GEMM for few rows, by its k tile: it has 0.73 of what the persistent
# GEMM took on an H100 with 64 rows, and of 93.5 us in k tiles of 256, and 97.4 us in those of 128, 0.66 and 0.63.
# On an H200, 64 rows in k tiles of 256 took 19.2 and 33.1 us where it has 20.0 and 31.6.
FEW_ROWS = {128: 1.14, 256: 1.05}
# The same of split-K with scales of blocks: 64 rows took 34.6 and 41.1 us on an H200, of which it has 19.1 and 31.0
# (n x k of 4096 x 14336 and 7168 x 16384, clusters of two), 16 rows 26.1 of 15.6.
SPLIT_BLOCKS = 1.4
# And of tiles of more than 32 tokens with scales of blocks: 64 rows took 1.23 to 1.39 of what it has with stream-K, and
# 1.35 to 1.84 with split-K (docs/performance/scaled-linear.md).
MANY_TOKENS, MANY_BLOCKS, MANY_SPLIT_BLOCKS = 32, 1.32, 1.6
# Rows that candidates are chosen for: all numbers of tiles up to 8192 rows, since the last round of tiles decides.
PROBED_ROWS = (*range(1, 65, 7), *range(16, 513, 8), *range(544, 1025, 32), *range(1152, 8193, 128))


class Choice(NamedTuple):
    """How a layer is computed.

    Attributes:
        spec: of the products; with an output in float32 where another launch quantises it.
        config: of its kernel.
    """

    spec: ScaledLinearSpec
    config: Config


def choices(spec: ScaledLinearSpec, target: Target) -> list[Choice]:
    """All that serve a problem."""
    arch = sm100 if target.tcgen05 else sm90
    found = [Choice(spec, config) for config in arch.fitting(spec, target.smem_bytes)]
    if spec.may_be_quantised_beside:
        wide = spec.in_float32
        found += [Choice(wide, config) for config in arch.fitting(wide, target.smem_bytes)]
    return found


def estimated_us(choice: Choice, rows: int, target: Target) -> float:
    """By the cost model of 16-bit GEMMs, with the bytes and the operations of 8 bits."""
    config = choice.config
    costs = sm100.costs(config) if target.tcgen05 else sm90.costs(choice.spec, config)
    products_us = estimate_us(config, choice.spec, rows, target, costs)
    if isinstance(config, SmallMTiles):
        products_us *= few_rows_factor(choice.spec, config)
    if not choice.spec.wide:
        return products_us
    # Written and read in 4 bytes, and written in one, at what memory's stated rate gives in a microsecond.
    return products_us + QUANTISING_US + 9 * rows * choice.spec.n / (1000 * target.chips[0].memory_gb_s)


def few_rows_factor(spec: ScaledLinearSpec, config: SmallMTiles) -> float:
    """What the GEMM for few rows takes, of what the model has."""
    # On SM100 other warps than those that multiply promote.
    blocked = spec.promoted and not isinstance(config, PromotedSmallMConfig)
    if blocked and config.tile_tokens > MANY_TOKENS:
        return MANY_BLOCKS if config.stream_k else MANY_SPLIT_BLOCKS
    return SPLIT_BLOCKS if blocked and not config.stream_k else FEW_ROWS[config.tile_k]


@lru_cache(maxsize=1 << 16)
def chosen(spec: ScaledLinearSpec, rows: int, target: Target) -> Choice:
    """The best one for so many rows: of a tuning record that fits, or by the cost model."""
    found = config_of(spec, rows, target)
    return estimated_best(spec, rows, target) if found is None else Choice(*found)


@cache
def candidates(spec: ScaledLinearSpec, target: Target) -> tuple[Choice, ...]:
    """All that serve a problem for some number of rows; what is compiled before serving.

    Without a GPU these are of all usual parts of the architecture.
    """
    found = choices(spec, target)
    best: set[Choice] = set()
    for of_chip in (replace(target, chip=chip) for chip in target.chips):
        for rows in (INVARIANT_FOR,) if spec.batch_invariant else PROBED_ROWS:
            timed = [choice for choice in found if sm90.was_timed(spec, choice.config, rows)]
            # Split-K serves no problem for all rows: where SMs are spared its clusters may not run at once.
            always = [one for one in timed if not isinstance(one.config, SmallMTiles) or one.config.stream_k]
            for group in filter(None, (timed, always)):
                best.add(min(group, key=lambda choice: estimated_us(choice, rows, of_chip)))
    return tuple(choice for choice in found if choice in best)


def estimated_best(spec: ScaledLinearSpec, rows: int, target: Target) -> Choice:
    """The best candidate for so many rows by the cost model. Where SMs are spared, it is one of those for all."""
    rows = INVARIANT_FOR if spec.batch_invariant else rows
    found = candidates(spec, target.sparing(0))
    timed = (choice for choice in found if sm90.was_timed(spec, choice.config, rows))
    return min(timed, key=lambda choice: estimated_us(choice, rows, target))


def build_products(key: ScaledKey[Config], target: Target) -> Function:
    """The compiled GEMM of a key."""
    arch = sm100 if target.tcgen05 else sm90
    return build(arch.kernel(key), key, target)


@lru_cache(maxsize=1 << 16)
def functions(
    spec: ScaledLinearSpec, choice: Choice, target: Target, libraries: str
) -> tuple[Function, Function | None]:
    """Of the products, and of the quantisation where it is a launch of its own; kept by what they are linked with."""
    second = None
    if choice.spec.wide:
        assert spec.out is not None
        second = quantising.build(spec.out, target)
    return build_products(key_of(choice.spec, choice.config, spec.column_major), target), second


def precompile_spec(choice: Choice, target: Target) -> PrecompileSpec:
    """Of a choice's products."""
    key = key_of(choice.spec, choice.config, choice.spec.column_major)
    return PrecompileSpec("linear", build_products, key, target)


def recorded(spec: ScaledLinearSpec, target: Target) -> list[Choice]:
    """Those of tuning records for some number of rows."""
    ends = {rows for problem in faster(spec, target) for rows in (problem.least_rows, problem.most_rows)}
    return [Choice(*found) for rows in sorted(ends) if (found := config_of(spec, rows, target)) is not None]


def precompile_specs(spec: ScaledLinearSpec, choice: Choice, target: Target) -> Iterator[PrecompileSpec]:
    """Of a choice's products, and of the quantisation where it is a launch of its own."""
    yield precompile_spec(choice, target)
    if choice.spec.wide:
        assert spec.out is not None
        yield PrecompileSpec("linear", quantising.build, spec.out, target)


def bind(spec: ScaledLinearSpec, rows: Rows, target: Target, workspace: Workspace) -> Launch:
    """The kernels for the rows."""
    count = rows.on_host()
    return launch_of(spec, chosen(spec, count, target), count, target, workspace)


def launch_of(spec: ScaledLinearSpec, choice: Choice, rows: int, target: Target, workspace: Workspace) -> Launch:
    """A choice's kernels for the rows."""
    function, second = functions(spec, choice, target, toolkit.libraries())
    config, ctas = choice.config, max_ctas(choice.config, rows, target)
    if second is None:
        return lambda operands: run(function, config, operands, ctas, workspace)
    return partial(run_both, function, second, config, ctas, workspace)


def run_both(
    function: Function,
    second: Function,
    config: Config,
    ctas: int,
    workspace: Workspace,
    operands: ScaledOperands,
) -> None:
    """The products in float32 to scratch, behind what CTAs hand each other, and their quantisation."""
    rows, n = operands.out.shape
    handed_on = ctas * config.partials if isinstance(config, SmallMTiles) else 0
    scratch = workspace.partials(handed_on + rows * n)
    wide = scratch[handed_on : handed_on + rows * n].view(rows, n)
    run(function, config, operands._replace(out=wide, out_scale=None), ctas, workspace)
    assert operands.out_scale is not None
    quantising.quantise(second, wide, operands.out, operands.out_scale)
