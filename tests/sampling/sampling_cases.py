# SPDX-License-Identifier: Apache-2.0
"""Sampling problems, and the CuTe DSL kernel run on the emulator beside the definition."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch

import emulator
from dsl_backend.runtime.target import from_arch
from dsl_backend.sampling import reference
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.sm90 import launch
from dsl_backend.sampling.spec import Parameters, SamplingSpec

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN, INF = float("nan"), float("inf")
UNWRITTEN = -7
FEW = 20
# What each stands for: one block; two, single logits; four; sixteen, of which most have nothing. Little room for
# candidates, so that small vocabularies exceed it.
ONE = (F32, torch.int64, ClusterConfig(cluster=1, threads=64, vector=4, loads=2, room=64))
TWO = (F16, torch.int32, ClusterConfig(cluster=2, threads=64, vector=1, loads=4, room=64))
FOUR = (BF16, torch.int64, ClusterConfig(cluster=4, threads=32, vector=2, loads=1, room=64))
SIXTEEN = (F32, torch.int64, ClusterConfig(cluster=16, threads=128, vector=2, loads=1, room=64))
KINDS = (ONE, TWO, FOUR, SIXTEEN)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of logits with parameters of their own.

    Attributes:
        kind: dtype of logits, of tokens, and how the kernel runs.
        rows: of each the logits' distribution (`logits_of`), temperature, top-k, top-p, min-p.
        pad: logits between rows.
        why: what this case alone would find.
    """

    id: str
    why: str
    kind: tuple[torch.dtype, torch.dtype, ClusterConfig] = ONE
    vocab: int
    rows: tuple[tuple[str, float, int, float, float], ...]
    pad: int = 0
    k_dtype: torch.dtype = field(default=torch.int32)

    @property
    def config(self) -> ClusterConfig:
        return self.kind[2]


def logits_of(distribution: str, vocab: int, generator: torch.Generator) -> torch.Tensor:
    x = 3 * torch.randn(vocab, generator=generator)
    last = vocab - 1
    if distribution == "spread":
        return x
    made: dict[str, Any] = {
        "ties": lambda: x.round(),
        "equal": lambda: x * 0 - 2,
        "zeros": lambda: torch.where(x > 0, 0.0, -0.0),
        "nan": lambda: x.where(x > 0, NAN),
        "all-nan": lambda: x * NAN,
        "dead": lambda: x * 0 - INF,
        "few": lambda: torch.full((vocab,), -INF).index_copy(0, torch.arange(vocab)[-3:], x[-3:]),
        "masked": lambda: x.where(x > 3, -INF),
        "one": lambda: torch.full((vocab,), -INF).index_fill(0, torch.tensor([last]), -5.0),
        "inf": lambda: x.index_fill(0, torch.tensor([last // 2, last]), INF),
        "huge": lambda: x * 1e37,
        "tiny": lambda: x * 1e-39,
        "peaked": lambda: x.index_fill(0, torch.tensor([last // 3]), 40.0),
        "sorted": lambda: x.sort().values,
        "steep": lambda: torch.arange(vocab) * -0.5,
    }
    found: torch.Tensor = made[distribution]()
    return found


DISTRIBUTIONS = (
    *("spread", "ties", "equal", "zeros", "nan", "all-nan", "dead"),
    *("few", "masked", "one", "inf", "huge", "tiny", "peaked", "sorted", "steep"),
)


def problem(case: Case, seed: int) -> tuple[torch.Tensor, Parameters]:
    """Logits [rows, vocab] in a buffer with gaps of large ones, and the parameters."""
    generator = torch.Generator().manual_seed(seed)
    count = len(case.rows)
    buffer = torch.full((count, case.vocab + case.pad), 6e4 if case.kind[0] is F16 else 9e9, dtype=case.kind[0])
    x = buffer[:, : case.vocab]
    for row, (distribution, *_) in zip(x, case.rows, strict=True):
        row.copy_(logits_of(distribution, case.vocab, generator))
    _, temperature, top_k, top_p, min_p = zip(*case.rows, strict=True)
    rows = Parameters(
        seeds=torch.randint(-(2**62), 2**62, (count,), generator=generator),
        positions=torch.randint(0, 2**40, (count,), generator=generator),
        temperature=torch.tensor(temperature, dtype=F32),
        top_k=torch.tensor(top_k, dtype=case.k_dtype),
        top_p=torch.tensor(top_p, dtype=F32),
        min_p=torch.tensor(min_p, dtype=F32),
    )
    return x, rows


def emulate(case: Case, arch: str, schedule: str, seed: int = 0) -> None:
    """Compile for the architecture, run on the emulator, compare; any finding or warning raises."""
    dtype, token_dtype, config = case.kind
    x, rows = problem(case, seed)
    spec = SamplingSpec(vocab=case.vocab, dtype=dtype, token_dtype=token_dtype)
    target = from_arch(arch)
    assert config.objections(spec, target) == []
    before = x.clone()
    tokens = torch.full((len(x),), UNWRITTEN, dtype=token_dtype)
    with emulator.device(arch=arch, sms=4, schedule=schedule, seed=seed, strict=True):
        function = launch.build(launch.key_of(spec, config, case.k_dtype), target)
        function(x, *vars(rows).values(), tokens)
    assert torch.equal(x.view(torch.uint8), before.view(torch.uint8)), "logits were changed"
    expected, _ = reference.sample(x, rows)
    assert tokens.tolist() == expected.tolist(), case


def row(distribution: str = "spread", t: float = 0.8, k: int = 0, p: float = 1.0, m: float = 0.0):
    return distribution, t, k, p, m


# A token tells little of the mask that it was drawn by, unless what is kept is about equally likely; and one draw tells
# little.
FILTERS = (
    *(row(), row(t=0), row(t=3, p=0.9), row(t=9, p=0.5)),
    *4 * (row(t=9, k=5), row(t=5, k=20, p=0.8), row(t=3, m=0.05)),
    *3 * (row(t=5, k=40, p=0.95, m=0.02),),
)
CASES = (
    Case(id="filters", vocab=600, rows=FILTERS, why="every path, one block"),
    Case(id="filters-2", kind=TWO, vocab=601, rows=FILTERS, why="clusters, an odd row, 16 bits, 32-bit tokens"),
    Case(id="filters-4", kind=FOUR, vocab=1000, rows=FILTERS, why="ties of bfloat16 over four blocks", pad=6),
    Case(
        id="filters-16",
        kind=SIXTEEN,
        vocab=1500,
        rows=(*2 * (row(t=9, k=5), row(t=5, k=20, p=0.8), row(t=3, m=0.05)), row(t=0)),
        why="the largest cluster",
    ),
    Case(id="whole-16", kind=SIXTEEN, vocab=1500, rows=(row(), row(p=0.9)), why="its whole rows, which take a minute"),
    Case(id="narrow-16", kind=SIXTEEN, vocab=6, rows=(row(k=5), row(k=20, p=0.8)), why="most blocks have no logit"),
    Case(
        id="single",
        kind=TWO,
        vocab=1,
        rows=(row(), row("nan"), row("dead"), row("inf", k=1, p=0.0, m=1.0), row(t=0)),
        why="a vocabulary of one",
    ),
    Case(
        id="many-candidates",
        vocab=400,
        rows=(row("equal", k=5, p=0.5), row("ties", k=30, p=0.7), row("zeros", k=3), row("equal", t=0), row(m=1e-9)),
        why="ties exceed the room: rows are looked at again",
    ),
    Case(
        id="wide-k",
        kind=FOUR,
        vocab=600,
        rows=(row(k=300), row("ties", k=400, p=0.6), row("sorted", k=599), row("huge", k=300), row("tiny", k=300)),
        why="more than a group each: radix select",
    ),
    Case(
        id="not-numbers",
        kind=TWO,
        vocab=300,
        rows=(
            *(row(name, k=5, p=0.9) for name in ("nan", "all-nan", "dead", "masked", "one", "inf")),
            *(row(name, p=0.9) for name in ("nan", "all-nan", "dead", "masked", "one", "inf")),
            row("few", k=50),
            row("few", t=0.0),
        ),
        why="NaN and infinities by candidates and by the whole row",
    ),
    Case(
        id="out-of-range",
        vocab=300,
        rows=(
            row(t=NAN),
            row(t=-1.0),
            row(t=INF, k=9),
            row(t=1e-5, k=9),
            row(k=-3, p=NAN, m=NAN),
            row(k=2**31 - 1, p=-1.0, m=-1.0),
            row(p=0.0),
            row(k=4, p=0.0),
            row(k=300, m=2.0),
            row("peaked", k=50, p=0.3),
        ),
        k_dtype=torch.int64,
        why="parameters whose values are none",
    ),
    Case(
        id="scales",
        vocab=300,
        rows=(row("huge", k=5), row("tiny", p=0.5), row("steep", k=8, p=0.99), row("tiny", t=1e-4, k=5), row("huge")),
        why="quotients that overflow, and those below the smallest normal number",
    ),
)


def random_case(seed: int) -> Case:
    """A small problem of any kind; the same for the same seed."""
    draw = random.Random(seed)
    # Sixteen blocks run slowly: not among the first, which every change is tested with.
    kind = KINDS[seed % 3] if seed < FEW else KINDS[seed % len(KINDS)]
    vector = kind[2].vector
    vocab = vector * draw.choice((draw.randint(1, 20), draw.randint(1, 800 // vector)))

    def any_row() -> tuple[str, float, int, float, float]:
        distribution = draw.choice(DISTRIBUTIONS) if draw.random() < 0.5 else "spread"
        return row(
            distribution,
            t=draw.choice((0.0, 1.0, 0.5, 3.0, 10.0, 30.0)),
            k=draw.choice((0, 0, draw.randint(1, 10), draw.randint(1, 80), draw.randint(1, vocab))),
            p=draw.choice((1.0, 1.0, 0.9, 0.999, draw.random(), draw.random() ** 4)),
            m=draw.choice((0.0, 0.0, draw.random() ** 3)),
        )

    return Case(
        id=f"fuzz-{seed}",
        why="unforeseen combinations",
        kind=kind,
        vocab=vocab,
        rows=tuple(any_row() for _ in range(draw.randint(1, 3))),
        pad=vector * draw.choice((0, 3)),
    )
