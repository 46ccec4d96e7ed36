# SPDX-License-Identifier: Apache-2.0
"""Softmax problems as test cases: their tensors, their oracle, random ones."""

import random
from dataclasses import dataclass, replace

import torch

from dsl_backend.rows import ceil_div, common_vector, with_expected_strides
from dsl_backend.runtime import target as targets
from dsl_backend.softmax import api, reference
from dsl_backend.softmax.configs import SoftmaxConfig
from dsl_backend.softmax.spec import SoftmaxSpec
from dsl_backend.testing.numerics import assert_within_budget

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SENTINEL = 77.0


@dataclass(frozen=True, kw_only=True)
class SoftmaxCase:
    """A matrix and how it lies in memory.

    Attributes:
        config: instead of the one that the width would get.
        pad, pad_out: elements between rows of input and output.
        offset: elements that the input begins after an aligned address.
        special: rows get NaN, infinities and the largest magnitudes.
        why: what this case alone would find.
        seed: of the numbers.
    """

    id: str
    why: str
    rows: int
    width: int
    dtype: torch.dtype = BF16
    out_dtype: torch.dtype | None = None
    log: bool = False
    config: SoftmaxConfig | None = None
    pad: int = 0
    pad_out: int = 0
    offset: int = 0
    special: bool = False
    seed: int = 1

    @property
    def to(self) -> torch.dtype:
        return self.out_dtype or self.dtype


def spread(width: int, cluster: int = 1, threads: int = 32, rows: int = 1, **more: object) -> SoftmaxConfig:
    """A row of this width over so many CTAs and threads, with two elements for each access."""
    vectors_per_thread = ceil_div(width, 2 * threads * cluster)
    fields = {
        "vector": 2,
        "vectors_per_thread": vectors_per_thread,
        "threads_per_row": threads,
        "rows_per_cta": rows,
        "cluster": cluster,
    }
    return SoftmaxConfig(**{**fields, **more})  # type: ignore[arg-type]


def tensors(case: SoftmaxCase, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """X and an output full of sentinels, each [rows, width] in a buffer with gaps."""
    generator = torch.Generator().manual_seed(case.seed)
    # Far below 0, so that a 0 or a sentinel that gets into a row outweighs all of it.
    numbers = (4 * torch.randn(case.rows, case.width, generator=generator) - 30).to(case.dtype)
    if case.special:
        plant(numbers)
    stride = case.width + case.pad
    buffer = torch.full((case.offset + case.rows * stride,), SENTINEL, dtype=case.dtype, device=device)
    x = buffer[case.offset :].view(case.rows, stride)[:, : case.width]
    x.copy_(numbers)
    out = torch.full((case.rows, case.width + case.pad_out), SENTINEL, dtype=case.to, device=device)
    return x, out[:, : case.width]


def plant(x: torch.Tensor) -> None:
    """One kind of trouble a row, as often as there are rows."""
    info = torch.finfo(x.dtype)
    # Triton's interpreter rounds what bfloat16 cannot hold to its largest number, where a GPU makes it infinite.
    edge = min(info.max, torch.finfo(BF16).max)
    last = x.shape[1] - 1
    kinds = (
        lambda row: row.fill_(-torch.inf),
        lambda row: row[last:].fill_(torch.nan),
        lambda row: row[:1].fill_(torch.inf),
        lambda row: row[: last // 2].fill_(-torch.inf),
        lambda row: row[1:].fill_(-torch.inf),
        lambda row: row.fill_(info.min),
        lambda row: row[:1].fill_(edge),
        lambda row: row[last // 2 :].fill_(-edge),
        lambda row: row.fill_(torch.nan),
    )
    for index, row in enumerate(x):
        kinds[index % len(kinds)](row)


def judge(case: SoftmaxCase, x: torch.Tensor, out: torch.Tensor) -> None:
    """The output's error fits, and nothing beside it was written."""
    exact = reference.exact(x, log=case.log)
    # What float32 and the output's type cannot hold is an infinity there: log-probabilities of the largest magnitudes.
    rounded = exact.to(F32).to(case.to).double()
    exact = torch.where(rounded.isinf(), rounded, exact)
    naive = reference.exact(x.to(case.to), log=case.log, dtype=case.to)
    assert_within_budget(out, exact, naive, what=case.id)
    whole = out.as_strided((case.rows, case.width + case.pad_out), (case.width + case.pad_out, 1))
    assert (whole[:, case.width :] == SENTINEL).all(), f"{case.id}: elements between rows were written"


def check_softmax(case: SoftmaxCase, kernel: str | None, device: torch.device | str) -> None:
    """Raises AssertionError where the kernel's result is wrong, as it is called, or with the case's own config."""
    x, out = tensors(case, device)
    before = x.clone()
    assert api.softmax(x, out, log=case.log, kernel=kernel) is out
    if kernel == "cute" and case.config is not None:
        judge_on_host(case, before, out)
        out.fill_(SENTINEL)
        launch_as_configured(case, x, out)
    assert torch.equal(x.nan_to_num(), before.nan_to_num()), f"{case.id}: x was changed"
    judge_on_host(case, before, out)


def judge_on_host(case: SoftmaxCase, x: torch.Tensor, out: torch.Tensor) -> None:
    """With the same budget wherever the kernel ran. out: of `tensors`, with what lies between its rows."""
    assert out._base is not None
    judge(case, x.cpu(), out._base.cpu()[:, : case.width])


def launch_as_configured(case: SoftmaxCase, x: torch.Tensor, out: torch.Tensor) -> None:
    """The CuTe DSL kernel of the case's config."""
    # Imported here: the rest of this module serves machines without the CuTe DSL.
    from dsl_backend.softmax.cute import host

    assert case.config is not None
    function = host.build(host.key_of(spec_of(case, x, out), case.config), targets.detect(x.device))
    function(with_expected_strides(x), with_expected_strides(out))


def spec_of(case: SoftmaxCase, x: torch.Tensor, out: torch.Tensor) -> SoftmaxSpec:
    vector = common_vector(x, out)
    return SoftmaxSpec(width=case.width, dtype=case.dtype, out_dtype=case.to, log=case.log, vector=vector)


CASES = [
    # --- levels, at the widths that the defaults give them ---
    SoftmaxCase(id="thread", rows=130, width=1, why="a thread for each row, one element; a second CTA with few rows"),
    SoftmaxCase(id="thread-vector", rows=5, width=8, why="a thread for each row, one whole access"),
    SoftmaxCase(id="two", rows=9, width=2, dtype=F16, why="the narrowest row with a sum"),
    SoftmaxCase(id="lanes-31", rows=7, width=31, dtype=F32, why="part of a warp, single elements, one column missing"),
    SoftmaxCase(id="lanes-33", rows=20, width=33, why="one column more than 32; a second CTA"),
    SoftmaxCase(id="warp", rows=6, width=1000, log=True, why="a warp for each row, ragged, whole accesses"),
    SoftmaxCase(id="block", rows=2, width=2048, dtype=F32, why="warps merge through shared memory, no column outside"),
    SoftmaxCase(id="block-ragged", rows=2, width=4096 + 3, dtype=F16, why="the same, single elements, ragged"),
    # --- a cluster, and the loop, at widths that the emulator finishes ---
    SoftmaxCase(id="cluster-2", rows=3, width=250, config=spread(250, 2), why="the smallest cluster, ragged"),
    SoftmaxCase(
        id="cluster-4",
        rows=2,
        width=4 * 64 * 4,
        dtype=F32,
        config=spread(1024, 4, 64),
        why="no column outside; 8 slots",
    ),
    SoftmaxCase(
        id="cluster-overlap",
        rows=3,
        width=768,
        config=spread(768, 2, 64, ctas_per_sm=3, use_pdl=True),
        why="16-bit maxima two at a time, no column outside; launches overlap",
    ),
    SoftmaxCase(id="two-vectors", rows=2, width=4096, dtype=BF16, why="16 elements a thread in one CTA"),
    SoftmaxCase(id="two-vectors-cluster", rows=1, width=16384, dtype=BF16, why="the same in a cluster of four"),
    SoftmaxCase(
        id="overlap-special",
        rows=9,
        width=300,
        dtype=F16,
        config=spread(300, 1, 64, use_pdl=True),
        special=True,
        why="float16 maxima two at a time beside NaN and infinities",
    ),
    SoftmaxCase(
        id="recompute",
        rows=3,
        width=1030,
        config=spread(1030, 2, 64, recompute=True, ctas_per_sm=2),
        why="exponentials from the input once more, ragged",
    ),
    SoftmaxCase(
        id="recompute-log",
        rows=3,
        width=512,
        dtype=F32,
        log=True,
        config=spread(512, 1, 64, recompute=True),
        special=True,
        why="the same of float32; NaN and infinities",
    ),
    SoftmaxCase(
        id="cluster-8", rows=2, width=1000, log=True, config=spread(1000, 8), why="the largest portable cluster"
    ),
    SoftmaxCase(
        id="cluster-16",
        rows=2,
        width=2000,
        dtype=F16,
        out_dtype=F32,
        config=spread(2000, 16, 96 + 32),
        why="64 slots: a lane merges two; CTAs without a column",
    ),
    SoftmaxCase(id="cluster-default", rows=2, width=20000, why="the cluster that a width gets by itself"),
    SoftmaxCase(
        id="cluster-default-f32", rows=2, width=16700, dtype=F32, why="the same of float32, which is held; ragged"
    ),
    SoftmaxCase(id="cluster-default-even", rows=1, width=18432, why="six warps of a CTA that hold a row exactly"),
    SoftmaxCase(
        id="cluster-default-log", rows=1, width=16424, log=True, why="a vocabulary's spread: five warps of two CTAs"
    ),
    SoftmaxCase(id="block-default", rows=2, width=4200, dtype=F32, why="a CTA of its own: nothing loaded past the end"),
    SoftmaxCase(
        id="stream",
        rows=5,
        width=500,
        config=spread(500, 1, 16, 2, vectors_per_thread=2, two_pass=True),
        why="the loop: eight tiles, the last one ragged; several rows for each CTA, one missing",
    ),
    SoftmaxCase(
        id="stream-exact",
        rows=2,
        width=512,
        dtype=F32,
        config=spread(512, 1, 64, vectors_per_thread=1, two_pass=True),
        why="the loop over whole tiles",
    ),
    SoftmaxCase(
        id="stream-cluster",
        rows=2,
        width=998,
        log=True,
        config=spread(998, 4, vectors_per_thread=1, two_pass=True),
        why="loop and cluster",
    ),
    # --- loads that predicates leave out, threads that are no power of two, late dependent launches ---
    SoftmaxCase(
        id="predicated",
        rows=3,
        width=1030,
        config=spread(1030, 2, 96, predicated=True, recompute=True),
        why="three warps of a CTA; vectors past the end are not loaded",
    ),
    SoftmaxCase(
        id="predicated-special",
        rows=9,
        width=300,
        dtype=F16,
        log=True,
        config=spread(300, 1, 160, predicated=True),
        special=True,
        why="float16: nothing past the end beside NaN and infinities",
    ),
    SoftmaxCase(
        id="predicated-stream",
        rows=3,
        width=500,
        dtype=F32,
        config=spread(500, vectors_per_thread=3, two_pass=True, predicated=True, late_dependents=True, use_pdl=True),
        why="float32, two words a load, in the loop; the next launch may start when the row is read",
    ),
    SoftmaxCase(
        id="late-dependents",
        rows=3,
        width=768,
        config=spread(768, 2, 64, ctas_per_sm=3, use_pdl=True, late_dependents=True),
        why="a cluster that lets the next launch start behind its merge",
    ),
    SoftmaxCase(
        id="evict-last",
        rows=3,
        width=1000,
        config=spread(1000, 2, 32, vector=8, vectors_per_thread=2, evict_last=True),
        why="loads with a priority, ragged; a cluster",
    ),
    # --- types ---
    SoftmaxCase(id="bf16-f32", rows=3, width=264, out_dtype=F32, why="wider output: two stores for a load's type"),
    SoftmaxCase(id="f32-bf16", rows=3, width=264, dtype=F32, out_dtype=BF16, why="narrower output"),
    SoftmaxCase(id="f16-bf16", rows=3, width=264, dtype=F16, out_dtype=BF16, log=True, why="16-bit types mixed"),
    # --- memory ---
    SoftmaxCase(id="strides", rows=5, width=96, pad=8, pad_out=24, why="rows apart, aligned: whole accesses"),
    SoftmaxCase(id="odd-strides", rows=5, width=96, pad=3, pad_out=1, why="rows apart, not aligned: single elements"),
    SoftmaxCase(id="offset", rows=5, width=96, dtype=F32, offset=2, why="aligned to half an access"),
    # --- values ---
    SoftmaxCase(
        id="special-warp", rows=10, width=70, dtype=F32, special=True, why="NaN, infinities, largest magnitudes"
    ),
    SoftmaxCase(id="special-log", rows=9, width=70, log=True, special=True, why="the same as logarithms"),
    SoftmaxCase(id="special-block", rows=9, width=300, config=spread(300, 1, 64), special=True, why="across warps"),
    SoftmaxCase(
        id="special-cluster", rows=9, width=300, dtype=F32, config=spread(300, 2), special=True, why="across CTAs"
    ),
    SoftmaxCase(
        id="special-stream",
        rows=9,
        width=300,
        log=True,
        config=spread(300, 1, 32, vectors_per_thread=1, two_pass=True),
        special=True,
        why="across tiles",
    ),
]

# Interpreted, a block of 16384 elements is one numpy call.
WIDE = (
    SoftmaxCase(id="held-most", rows=2, width=16384, dtype=F32, why="the widest row that a Triton program holds"),
    SoftmaxCase(id="looped", rows=2, width=16384 + 9, log=True, why="its loop, ragged"),
    SoftmaxCase(id="looped-special", rows=9, width=20000, special=True, why="states across its tiles"),
    SoftmaxCase(id="vocabulary", rows=2, width=151936, dtype=F32, why="a vocabulary"),
    SoftmaxCase(id="past-a-cluster", rows=1, width=300001, why="wider than 262144, and odd"),
)


def random_case(seed: int, widest: int = 700) -> SoftmaxCase:
    """A problem of any kind; the same for the same seed."""
    draw = random.Random(seed)
    dtype, out_dtype = draw.choice((F32, F16, BF16)), draw.choice((F32, F16, BF16))
    width = draw.choice((draw.randint(1, 40), draw.randint(1, widest), 8 * draw.randint(1, widest // 7)))
    rows = draw.randint(1, 12)
    config = None
    # A vector divides the width and whatever the strides turn out to be: with a config of its own rows are not padded.
    if draw.random() < 0.6 and width % 2 == 0:
        cluster = draw.choice((1, 1, 2, 4))
        threads = draw.choice((32, 64, 128)) if cluster > 1 else draw.choice((2, 8, 16, 32, 64))
        two_pass = draw.random() < 0.3
        beside = 1 if cluster > 1 else max(1, 32 // threads) * draw.choice((1, 2))
        config = spread(width, cluster, threads, beside, two_pass=two_pass)
        if two_pass:
            config = spread(
                width,
                cluster,
                threads,
                beside,
                two_pass=True,
                vectors_per_thread=draw.randint(1, config.vectors_per_thread),
            )
        if config.vectors_per_thread > 32:
            config = None
    padded = config is None and draw.random() < 0.4
    if config is not None and seed % 3 == 0:
        config = replace(config, predicated=True, late_dependents=config.use_pdl)
    return SoftmaxCase(
        id=f"fuzz-{seed}",
        why="unforeseen combinations",
        rows=rows,
        width=width,
        dtype=dtype,
        out_dtype=out_dtype,
        log=draw.random() < 0.4,
        config=config,
        pad=draw.randint(0, 16) if padded else 0,
        pad_out=draw.randint(0, 16) if padded else 0,
        offset=draw.randint(0, 3) if padded else 0,
        special=draw.random() < 0.2,
        seed=seed,
    )
