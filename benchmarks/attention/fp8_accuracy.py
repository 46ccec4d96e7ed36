# SPDX-License-Identifier: Apache-2.0
"""Errors of attention with products in 8 bits, by a model of its arithmetic in torch: no GPU is needed.

`python -m benchmarks.attention.fp8_accuracy [--out FILE]` prints the tables of docs/attention-fp8.md.
"""

import argparse
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from dsl_backend.testing.fp8_attention import (
    Arithmetic,
    Online,
    finished,
    merged,
    partial,
    product,
    quantized_q,
    tiles,
    to_e4m3,
)

HEAD_DIM, ROWS = 128, 16
LATENT_DIMS, LATENT_ROWS = (576, 512), 4  # of absorbed MLA: elements of a key, and of its value
LATENT_SPLIT = 4096  # keys of a row that a CTA has, about
KEYS_AT_ONCE = 1024  # of which the addends of scores are in memory
OUTLIERS = 4  # channels that are 30 times as large as others
OUTLIER_GAIN = 30.0


@dataclass(frozen=True)
class Sample:
    """Rows of one head over its keys.

    Attributes:
        q: [rows, head_dim] bfloat16.
        k, v: [keys, head_dim], e4m3 values as they are stored. Of absorbed MLA, v is the first columns of k.
        needle: a key whose weight is about a half; None if there is none.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    needle: int | None = None

    @property
    def unit(self) -> torch.Tensor:
        """What stored keys are divided by: with normal queries, scores have a variance of 1."""
        return self.k.std()


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


def normal(count: int, dim: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randn(count, dim, generator=draw, dtype=torch.float64)


def random_rows(keys: int, draw: torch.Generator, rows: int, latent: bool, gain: float = 1.0) -> Sample:
    """Normal numbers; `gain` multiplies some channels of queries, keys and values."""
    dim, dim_v = LATENT_DIMS if latent else (HEAD_DIM, HEAD_DIM)
    counts = (rows, keys) if latent else (rows, keys, keys)
    q, k, *v = drawn = [normal(count, dim, draw) for count in counts]
    for one in drawn:
        one[:, :OUTLIERS] *= gain
    if gain > 1:
        # Scores as wide as without outliers.
        q /= gain**2 * math.sqrt(OUTLIERS / dim)
    k = stored(k)
    return Sample(q.bfloat16(), k, k[:, :dim_v] if latent else stored(v[0]))


def shifted(keys: int, draw: torch.Generator, rows: int, latent: bool) -> Sample:
    """Normal numbers; those of values have a mean of 1, so that sums of P V grow with every key."""
    if latent:
        k = stored(1.0 + normal(keys, LATENT_DIMS[0], draw))
        return Sample(normal(rows, LATENT_DIMS[0], draw).bfloat16(), k, k[:, : LATENT_DIMS[1]])
    sample = random_rows(keys, draw, rows, latent)
    return replace(sample, v=stored(1.0 + normal(keys, HEAD_DIM, draw)))


def needle(keys: int, draw: torch.Generator, rows: int, latent: bool) -> Sample:
    """Normal numbers, except for one key in the middle that each query gives about half of its weight."""
    sample, place = random_rows(keys, draw, rows, latent), keys // 3
    dim = sample.q.shape[1]
    direction = torch.randn(dim, generator=draw, dtype=torch.float64)
    direction /= direction.norm()
    # The sum of e^s of normal scores is keys e^(1/2): as much for the needle. Keys are stored times `unit`.
    score = math.log(keys) + 0.5
    q = sample.q.double()
    q += (math.sqrt(score * math.sqrt(dim)) - q @ direction)[:, None] * direction
    sample.k[place] = to_e4m3(direction * math.sqrt(score * math.sqrt(dim)) * sample.unit)
    return replace(sample, q=q.bfloat16(), needle=place)


# Each takes a generator, the number of rows, and whether they are absorbed MLA's.
INPUTS: dict[str, Callable[[torch.Generator, int, bool], Sample]] = {
    "random, 4k keys": lambda draw, rows, latent: random_rows(4096, draw, rows, latent),
    "channels 30x, 4k keys": lambda draw, rows, latent: random_rows(4096, draw, rows, latent, OUTLIER_GAIN),
    "random, 64k keys": lambda draw, rows, latent: random_rows(65536, draw, rows, latent),
    "needle in 64k keys": lambda draw, rows, latent: needle(65536, draw, rows, latent),
    "needle in 128k keys": lambda draw, rows, latent: needle(131072, draw, rows, latent),
    "values' mean 1, 64k keys": lambda draw, rows, latent: shifted(65536, draw, rows, latent),
}
# SM90's kernel with heads of 128 and long queries.
OURS = Arithmetic(tile_n=192, accumulate_period=1)
# FlashAttention-3's: a scale of queries for each request and key head, an offset of 8, O rescaled with every new
# maximum, sums of P before it is rounded.
FA3 = Arithmetic(q="head", tile_n=224, rescale_threshold=0.0, rounded_sums=False, accumulate_period=0)
WIDENED = Arithmetic(
    q=None, p_offset=None, tile_n=128, rescale_threshold=8.0, rounded_sums=False, accumulator_bits=None
)
SCHEMES: dict[str, Arithmetic] = {
    "16 bits (default)": WIDENED,
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
# Of absorbed MLA: SM90 adds each key tile's sum in float32 with one row tile; with several, O of a CTA's keys is summed
# in the tensor cores' accumulators, which SM100's have in float32.
LATENT_SCHEMES: dict[str, Arithmetic] = {
    "16 bits (default)": WIDENED,
    "e4m3, SM90, up to 64 rows": Arithmetic(tile_n=64, accumulate_period=1),
    "e4m3, SM90, more rows": Arithmetic(tile_n=64, accumulate_period=0),
    "e4m3, SM100": Arithmetic(tile_n=64, accumulate_period=0, accumulator_bits=None),
}
# How much smaller a key head's keys and values are than another's, with which they may share a scale of the cache.
SMALLER = (1, 30, 1000, 30_000)
SCALES = ("tensor", "head")


def scores_of(sample: Sample, q: torch.Tensor, bits: int | None = None) -> torch.Tensor:
    """Natural scores [rows, keys]: those of normal queries and keys have a variance of 1."""
    parts = [product(q, k.T, bits) for k in sample.k.split(KEYS_AT_ONCE)]
    return torch.cat(parts, dim=-1) / sample.unit / math.sqrt(sample.q.shape[1])


def exact(sample: Sample) -> torch.Tensor:
    return torch.softmax(scores_of(sample, sample.q.double()), dim=-1) @ sample.v


def attended(scores: torch.Tensor, v: torch.Tensor, arithmetic: Arithmetic, split: int) -> Online:
    """Attention whose keys are split, into parts of so many."""
    parts = [
        partial(some, values, arithmetic, list(tiles(len(values), arithmetic.tile_n)))
        for some, values in zip(scores.split(split, -1), v.split(split), strict=True)
    ]
    return finished(*merged(parts), None)


def error_of(sample: Sample, arithmetic: Arithmetic, right: torch.Tensor, unit: float = 1.0) -> Error:
    """Of a scheme, rounded to bfloat16 at the end.

    Args:
        right: the exact output, in stored values times `unit`.
    """
    q, scale = (one[:, 0] for one in quantized_q(sample.q.double()[:, None], arithmetic.q))
    bits = None if arithmetic.q is None else arithmetic.accumulator_bits
    scores = scores_of(sample, q, bits) * scale
    split = len(sample.k) if sample.k.shape == sample.v.shape else LATENT_SPLIT
    return Error.of((attended(scores, sample.v, arithmetic, split).out * unit).bfloat16().double(), right)


def row_of(name: str, errors: Iterable[Error]) -> str:
    return f"| {name} | " + " | ".join(f"{100 * one.total:.2f} ({100 * one.row:.2f})" for one in errors) + " |"


def heading(first: str, columns: Iterable[str]) -> Iterator[str]:
    names = [first, *columns]
    yield "| " + " | ".join(names) + " |"
    yield "|---" * len(names) + "|"


def table(latent: bool = False) -> Iterator[str]:
    """Markdown: total error and worst row's of each scheme on each input."""
    yield from heading("absorbed MLA" if latent else "P and products", INPUTS)
    rows = LATENT_ROWS if latent else ROWS
    samples = [make(torch.Generator().manual_seed(seed), rows, latent) for seed, make in enumerate(INPUTS.values())]
    rights = [exact(sample) for sample in samples]
    for name, arithmetic in (LATENT_SCHEMES if latent else SCHEMES).items():
        yield row_of(name, (error_of(one, arithmetic, right) for one, right in zip(samples, rights, strict=True)))


@dataclass(frozen=True)
class ScaledSample(Sample):
    """Rows of a head whose keys are divided by a scale of the cache."""

    scale: float = 1.0

    @property
    def unit(self) -> torch.Tensor:
        return torch.tensor(1 / self.scale, dtype=torch.float64)


def scales_table() -> Iterator[str]:
    """Markdown: the error of a small head, relative to attention of its keys and values before they were stored."""
    yield from heading("scale of the cache, products", [f"{times}x smaller" for times in SMALLER])
    for shared_by in SCALES:
        for name, arithmetic in (("16 bits", WIDENED), ("e4m3", OURS)):
            errors = [stored_error(times, shared_by, arithmetic) for times in SMALLER]
            yield row_of(f"of the {shared_by}, {name}", errors)


def stored_error(times: int, shared_by: str, arithmetic: Arithmetic, keys: int = 4096) -> Error:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (normal(count, HEAD_DIM, draw) for count in (ROWS, keys, keys))
    q = (q * times).bfloat16()
    # Another head has the same numbers, `times` as large.
    scale = float(torch.maximum(k.abs().max(), v.abs().max())) / 448.0 / (times if shared_by == "head" else 1)
    k, v = k / times, v / times
    right = torch.softmax(q.double() @ k.T / math.sqrt(HEAD_DIM), -1) @ v
    return error_of(ScaledSample(q, to_e4m3(k / scale), to_e4m3(v / scale), scale=scale), arithmetic, right, scale)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention.fp8_accuracy", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=None, help="also write the table to this file")
    given = parser.parse_args()
    lines = []
    for line in chain(table(), [""], table(latent=True), [""], scales_table()):
        print(line, flush=True)
        lines.append(line)
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
