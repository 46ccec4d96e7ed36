# SPDX-License-Identifier: Apache-2.0
"""Errors of attention with products in 8 bits, by a model of its arithmetic in torch: no GPU is needed.

`python -m benchmarks.attention.fp8_accuracy [--out FILE]` prints the table of docs/attention-fp8.md.
"""

import argparse
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from dsl_backend.testing.fp8_attention import Arithmetic, online, product, quantized_q, to_e4m3

HEAD_DIM, ROWS = 128, 16
KEYS_AT_ONCE = 1024  # of which the addends of scores are in memory
OUTLIERS = 4  # channels that are 30 times as large as others
OUTLIER_GAIN = 30.0


@dataclass(frozen=True)
class Sample:
    """Rows of one head over its keys.

    Attributes:
        q: [rows, head_dim] bfloat16.
        k, v: [keys, head_dim], e4m3 values as they are stored.
        needle: a key whose weight is about a half; None if there is none.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    needle: int | None = None


@dataclass(frozen=True)
class Error:
    """Relative to the norm of the exact result: of all rows, and of the worst row."""

    total: float
    row: float

    @classmethod
    def of(cls, out: torch.Tensor, exact: torch.Tensor) -> "Error":
        error = (out - exact).norm(dim=-1)
        return cls(float(error.norm() / exact.norm()), float((error / exact.norm(dim=-1)).max()))


def stored(values: torch.Tensor) -> torch.Tensor:
    """Values as a cache stores them, with a scale of their own that maps the largest to 448."""
    return to_e4m3(values / (values.abs().max() / 448.0))


def random_rows(keys: int, draw: torch.Generator, rows: int, gain: float = 1.0) -> Sample:
    """Normal numbers; `gain` multiplies some channels of queries, keys and values."""
    q, k, v = (torch.randn(count, HEAD_DIM, generator=draw, dtype=torch.float64) for count in (rows, keys, keys))
    for one in (q, k, v):
        one[:, :OUTLIERS] *= gain
    if gain > 1:
        # Scores as wide as without outliers.
        q /= gain**2 * math.sqrt(OUTLIERS / HEAD_DIM)
    return Sample(q.bfloat16(), stored(k), stored(v))


def shifted(keys: int, draw: torch.Generator, rows: int) -> Sample:
    """Normal numbers; those of values have a mean of 1, so that sums of P V grow with every key."""
    sample = random_rows(keys, draw, rows)
    return replace(sample, v=stored(1.0 + torch.randn(keys, HEAD_DIM, generator=draw, dtype=torch.float64)))


def needle(keys: int, draw: torch.Generator, rows: int) -> Sample:
    """Normal numbers, except for one key in the middle that each query gives about half of its weight."""
    sample, place = random_rows(keys, draw, rows), keys // 3
    direction = torch.randn(HEAD_DIM, generator=draw, dtype=torch.float64)
    direction /= direction.norm()
    # The sum of e^s of normal scores is keys e^(1/2): as much for the needle. Keys are stored times `unit`.
    unit = sample.k.std()
    score = math.log(keys) + 0.5
    q = sample.q.double()
    q += (math.sqrt(score * math.sqrt(HEAD_DIM)) - q @ direction)[:, None] * direction
    sample.k[place] = to_e4m3(direction * math.sqrt(score * math.sqrt(HEAD_DIM)) * unit)
    return replace(sample, q=q.bfloat16(), needle=place)


INPUTS: dict[str, Callable[[torch.Generator, int], Sample]] = {
    "random, 4k keys": lambda draw, rows: random_rows(4096, draw, rows),
    "channels 30x, 4k keys": lambda draw, rows: random_rows(4096, draw, rows, OUTLIER_GAIN),
    "random, 64k keys": lambda draw, rows: random_rows(65536, draw, rows),
    "needle in 64k keys": lambda draw, rows: needle(65536, draw, rows),
    "needle in 128k keys": lambda draw, rows: needle(131072, draw, rows),
    "values' mean 1, 64k keys": lambda draw, rows: shifted(65536, draw, rows),
}
# SM90's kernel with heads of 128 and long queries.
OURS = Arithmetic(tile_n=192, accumulate_period=1)
# FlashAttention-3's: a scale of queries for each request and key head, an offset of 8, O rescaled with every new
# maximum, sums of P before it is rounded.
FA3 = Arithmetic(q="head", tile_n=224, rescale_threshold=0.0, rounded_sums=False, accumulate_period=0)
SCHEMES: dict[str, Arithmetic] = {
    "16 bits (default)": Arithmetic(
        q=None, p_offset=None, tile_n=128, rescale_threshold=8.0, rounded_sums=False, accumulator_bits=None
    ),
    "e4m3": OURS,
    "e4m3 for P and values alone": replace(OURS, q=None),
    "e4m3 for queries and keys alone": replace(OURS, p_offset=None, rescale_threshold=8.0, rounded_sums=False),
    "e4m3, one scale of queries": replace(OURS, q="tensor"),
    "e4m3, offset 4": replace(OURS, p_offset=4.0, rescale_threshold=4.8),
    "e4m3, sums of unrounded P": replace(OURS, rounded_sums=False),
    "e4m3, 4 tiles of 64 to float32": replace(OURS, tile_n=64, accumulate_period=4),
    "e4m3, one accumulator": replace(OURS, accumulate_period=0),
    "FA3's": FA3,
    "FA3's, 4 tiles of 128 to float32": replace(FA3, tile_n=128, accumulate_period=4),
}


def scores_of(sample: Sample, q: torch.Tensor, bits: int | None = None) -> torch.Tensor:
    """Natural scores [rows, keys]: those of normal queries and keys have a variance of 1."""
    parts = [product(q, k.T, bits) for k in sample.k.split(KEYS_AT_ONCE)]
    return torch.cat(parts, dim=-1) / sample.k.std() / math.sqrt(HEAD_DIM)


def exact(sample: Sample) -> torch.Tensor:
    return torch.softmax(scores_of(sample, sample.q.double()), dim=-1) @ sample.v


def error_of(sample: Sample, arithmetic: Arithmetic, right: torch.Tensor) -> Error:
    """Of a scheme, rounded to bfloat16 at the end."""
    q, scale = (one[:, 0] for one in quantized_q(sample.q.double()[:, None], arithmetic.q))
    bits = None if arithmetic.q is None else arithmetic.accumulator_bits
    scores = scores_of(sample, q, bits) * scale
    return Error.of(online(scores, sample.v, arithmetic).out.bfloat16().double(), right)


def table() -> Iterator[str]:
    """Markdown: total error and worst row's of each scheme on each input."""
    yield "| P and products | " + " | ".join(INPUTS) + " |"
    yield "|---" * (len(INPUTS) + 1) + "|"
    samples = [make(torch.Generator().manual_seed(seed), ROWS) for seed, make in enumerate(INPUTS.values())]
    rights = [exact(sample) for sample in samples]
    for name, arithmetic in SCHEMES.items():
        errors = [error_of(sample, arithmetic, right) for sample, right in zip(samples, rights, strict=True)]
        yield f"| {name} | " + " | ".join(f"{100 * one.total:.2f} ({100 * one.row:.2f})" for one in errors) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention.fp8_accuracy", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=None, help="also write the table to this file")
    given = parser.parse_args()
    lines = []
    for line in table():
        print(line, flush=True)
        lines.append(line)
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
