# SPDX-License-Identifier: Apache-2.0
"""The rows of the RMSNorm benchmark: the default group, and further groups, selected by a regular expression."""

import torch
from dsl_backend.norm.spec import Scaling

from ..case import TABLE, Case, case_of
from .problems import Problem

K = 1024
# A step's norms with residual: decode with few requests, decode with many, prefill, of usual hidden sizes.
MAIN = ((1, 4 * K), (16, 8 * K), (256, 4 * K), (4 * K, 4 * K), (16 * K, 8 * K))
GRID_ROWS = tuple(512 * 2**i for i in range(7))
GRID_WIDTHS = (4 * K, 8 * K, 16 * K, 32 * K)
NARROW = (64, 128, 256, 512, 1024, 2048)
# Hidden sizes that no power of two of threads fills: a row is spread exactly.
EXACT_WIDTHS, EXACT_ROWS = (4608, 5120, 6656, 7168), (64, 4 * K)
WIDE = (64 * K, 128 * K, 256 * K)


def case(problem: Problem, group: str = TABLE, axis: str | None = None) -> Case[Problem]:
    return case_of(f"{problem.rows}x{problem.width}", problem, group, axis)


def cases() -> list[Case[Problem]]:
    found = [case(Problem(rows=rows, width=width, residual=True)) for rows, width in MAIN]
    found += [case(Problem(rows=rows, width=width), "grid", "rows") for rows in GRID_ROWS for width in GRID_WIDTHS]
    found += [case(Problem(rows=4 * K, width=width), "wide", "width") for width in WIDE]
    found += [case(Problem(rows=rows, width=width), "exact") for rows in EXACT_ROWS for width in EXACT_WIDTHS]
    # Norms of heads.
    found += [case(Problem(rows=64 * K, width=width), "narrow", "width") for width in NARROW]
    for group, scaling in (
        ("fp8", Scaling.TOKEN),
        ("fp8-tensor", Scaling.TENSOR),
        ("fp8-group", Scaling.GROUP),
    ):
        found += [case(Problem(rows=m, width=n, residual=True, scaling=scaling), group) for m, n in MAIN]
    found += [
        case(Problem(rows=rows, width=width, dtype=torch.float32, residual=True), "f32") for rows, width in MAIN[2:]
    ]
    # Rows whose start is not aligned to 16 bytes.
    found += [case(Problem(rows=rows, width=width), "odd") for rows, width in ((4 * K, 4099), (64, 8193))]
    found += [case(Problem(rows=rows, width=width, residual=True), "tiny") for rows, width in ((3, 40), (2, 4099))]
    return found
