# SPDX-License-Identifier: Apache-2.0
"""The rows of the softmax benchmark: the default group, and further groups, selected by a regular expression."""

import torch

from ..case import TABLE, Case, case_of
from .problems import Problem

K = 1024
F32, BF16 = torch.float32, torch.bfloat16
# Logits of a decode step of two vocabularies, and matrices from narrow to wide.
MAIN = ((64, 128256), (256, 151936), (4 * K, 8 * K), (32 * K, 4 * K), (32 * K, 32 * K))
GRID_ROWS = tuple(512 * 2**i for i in range(7))
GRID_WIDTHS = (4 * K, 8 * K, 16 * K, 32 * K)
NARROW = (8, 64, 128, 256, 512, 1000, 1024, 2048)
VOCABULARIES = (32 * K, 128256, 151936, 256 * K)


def case(problem: Problem, group: str = TABLE, axis: str | None = None) -> Case[Problem]:
    return case_of(f"{problem.rows}x{problem.width}", problem, group, axis)


def cases() -> list[Case[Problem]]:
    found = [case(Problem(rows=rows, width=width)) for rows, width in MAIN]
    found += [case(Problem(rows=rows, width=width), "grid", "rows") for rows in GRID_ROWS for width in GRID_WIDTHS]
    found += [case(Problem(rows=rows, width=width, dtype=F32, out_dtype=F32), "f32") for rows, width in MAIN[:4]]
    found += [case(Problem(rows=rows, width=width, log=True), "log") for rows, width in MAIN[:4]]
    found += [
        case(Problem(rows=rows, width=width, dtype=F32, out_dtype=F32, log=True), "logprobs", "width")
        for rows in (1, 16, 256)
        for width in VOCABULARIES
    ]
    found += [case(Problem(rows=64 * K, width=width), "narrow", "width") for width in NARROW]
    # Rows whose start is not aligned to 16 bytes.
    found += [case(Problem(rows=rows, width=width), "odd") for rows, width in ((4 * K, 4099), (64, 128257))]
    # Widths just above what threads and waves hold evenly.
    found += [case(Problem(rows=rows, width=width), "uneven") for rows, width in ((64, 201088), (1000, 12344))]
    found += [case(Problem(rows=rows, width=width), "tiny") for rows, width in ((3, 40), (2, 4099))]
    return found
