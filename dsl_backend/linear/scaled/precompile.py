# SPDX-License-Identifier: Apache-2.0
"""Which CuTe DSL kernels a linear layer of quantised operands needs, for compiling them before it is served."""

from collections.abc import Iterator, Sequence

from dsl_backend.linear.scaled import dispatch
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target

OTHERS = ("triton", "reference")


def precompile_specs_of(
    spec: ScaledLinearSpec, target: Target, kernel: str | None = None, ranges: Sequence[tuple[int, int]] | None = None
) -> Iterator[PrecompileSpec]:
    """The kernels of a layer; none where Triton's or the reference serves.

    Args:
        kernel: the name of the kernel that serves; None is the best that does.
        ranges: (least, most) rows that it serves, of which some are looked at; None is any number of rows.
    """
    if dispatch.choose(spec, target, kernel).name in OTHERS:
        return
    # Imports CuTe DSL.
    from dsl_backend.linear.scaled.cute import host

    if ranges is None:
        choices = [*host.candidates(spec, target), *host.recorded(spec, target)]
    else:
        probed = {rows for least, most in ranges for rows in (least, most, *host.PROBED_ROWS) if least <= rows <= most}
        choices = [host.chosen(spec, rows, target) for rows in sorted(probed)]
    yield from dict.fromkeys(one for choice in choices for one in host.precompile_specs(spec, choice, target))
