# SPDX-License-Identifier: Apache-2.0
"""RMSNorm problems as test cases: their tensors, their oracle, random ones."""

import random
from dataclasses import dataclass
from typing import Any

import torch

from dsl_backend.norm import api, launch, reference
from dsl_backend.norm.configs import NormConfig
from dsl_backend.norm.spec import FP8, NormSpec, NormTensors, Scaling
from dsl_backend.quant.format import GROUP
from dsl_backend.rows import ceil_div
from dsl_backend.runtime import target as targets
from dsl_backend.testing.numerics import assert_rounded_once

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SENTINEL = 77.0
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class NormCase:
    """A matrix, what is done with it, and how it lies in memory.

    Attributes:
        weight_dtype: x's by default; `no_weight` for none.
        in_place: x receives out and the residual receives the sum, as vLLM has it.
        config: instead of the one that the width would get.
        pad, pad_out: elements between rows of inputs and outputs.
        offset: elements that inputs begin after an aligned address.
        special: rows get NaN, infinities, zeros, and magnitudes whose squares are none of float32.
        why: what this case alone would find.
        seed: of the numbers.
    """

    id: str
    why: str
    rows: int
    width: int
    dtype: torch.dtype = BF16
    out_dtype: torch.dtype | None = None
    weight_dtype: torch.dtype | None = None
    no_weight: bool = False
    residual: bool = False
    in_place: bool = False
    weight_offset: float = 0.0
    scaling: Scaling = Scaling.NONE
    config: NormConfig | None = None
    pad: int = 0
    pad_out: int = 0
    offset: int = 0
    special: bool = False
    seed: int = 1

    @property
    def to(self) -> torch.dtype:
        return FP8 if self.scaling is not Scaling.NONE else self.out_dtype or self.dtype


def spread(width: int, cluster: int = 1, threads: int = 32, rows: int = 1, **more: Any) -> NormConfig:
    """A row of this width over so many CTAs and threads, with two elements for each access."""
    fields = {
        "vector": 2,
        "vectors_per_thread": ceil_div(width, 2 * threads * cluster),
        "threads_per_row": threads,
        "rows_per_cta": rows,
        "cluster": cluster,
    }
    return NormConfig(**{**fields, **more})


def matrix(case: NormCase, numbers: torch.Tensor | None, dtype: torch.dtype, pad: int, offset: int) -> torch.Tensor:
    """[rows, width] in a buffer of sentinels with gaps; sentinels too where there are no numbers."""
    stride = case.width + pad
    buffer = torch.full((offset + case.rows * stride,), SENTINEL).to(dtype)
    view = buffer[offset:].view(case.rows, stride)[:, : case.width]
    if numbers is not None:
        view.copy_(numbers)
    return view


def tensors(case: NormCase, device: torch.device | str = "cpu") -> NormTensors:
    """The tensors of a call, with the strides that they have there."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    # Rows of different magnitudes, so that a factor of another row is wrong.
    numbers = (normal(case.rows, case.width) * 2.0 ** (torch.arange(case.rows) % 5 - 2).unsqueeze(1)).to(case.dtype)
    if case.special:
        plant(numbers)
    added = normal(case.rows, case.width).to(case.dtype)
    # A weight is near 1 with its offset, and the last one is larger: a scale has to see it.
    weights = normal(case.width) / 8 + 1 - case.weight_offset
    weights[-1] += 7.0
    x = matrix(case, numbers, case.dtype, case.pad, case.offset)
    residual = matrix(case, added, case.dtype, case.pad, case.offset) if case.residual else None
    found = NormTensors(
        x=x,
        residual=residual,
        weight=None if case.no_weight else weights.to(case.weight_dtype or case.dtype),
        scale=torch.tensor([0.037]) if case.scaling is Scaling.TENSOR else None,
        out=x if case.in_place else matrix(case, None, case.to, case.pad_out, 0),
        residual_out=residual if case.in_place or residual is None else matrix(case, None, case.dtype, case.pad_out, 0),
        scale_out=scales_of(case),
    )
    return on_device(found, device)


def scales_of(case: NormCase) -> torch.Tensor | None:
    """What receives computed scales: sentinels. Those of groups are column-major, with a gap between columns."""
    if case.scaling is Scaling.TOKEN:
        return torch.full((case.rows,), SENTINEL)
    if case.scaling is Scaling.GROUP:
        return torch.full((case.width // GROUP, case.rows + 3), SENTINEL).t()[: case.rows]
    return None


def on_device(found: NormTensors, device: torch.device | str) -> NormTensors:
    """The same strides and aliases in copies on a device."""
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in moved:
            base = tensor if tensor._base is None else tensor._base
            copy = base.detach().clone().to(device)
            moved[id(tensor)] = copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return moved[id(tensor)]

    return NormTensors(*map(move, found))  # type: ignore[arg-type]


def plant(x: torch.Tensor) -> None:
    """One kind of trouble a row, as often as there are rows."""
    # Triton's interpreter rounds what bfloat16 cannot hold to its largest number, where a GPU makes it infinite.
    edge = min(torch.finfo(x.dtype).max, torch.finfo(BF16).max)
    last = x.shape[1] - 1
    kinds = (
        lambda row: row[last:].fill_(torch.nan),
        lambda row: row[:1].fill_(torch.inf),
        lambda row: row.fill_(0.0),
        lambda row: row.fill_(edge),
        lambda row: row[last // 2 :].fill_(-torch.inf),
        lambda row: row.fill_(1e-6),
        lambda row: row[:1].fill_(-edge),
        lambda row: row.fill_(torch.nan),
    )
    for index, row in enumerate(x):
        kinds[index % len(kinds)](row)


def truncates(kernel: str | None, device: torch.device | str) -> bool:
    """Whether float32 becomes bfloat16 by truncation: in Triton's interpreter (3.9), where a GPU rounds."""
    return kernel == "triton" and torch.device(device).type == "cpu"


def judge(case: NormCase, before: NormTensors, after: NormTensors, *, truncated: bool = False) -> None:
    """Raises AssertionError where an output is wrong, or something beside the outputs was written.

    Args:
        truncated: results in bfloat16 are.
    """
    spec, source = spec_of(case, before), before
    if after.residual_out is not None and before.residual is not None:
        found, right = after.residual_out, reference.exact(before, spec, EPS).residual_out
        # A NaN has many bit patterns.
        wrong = (found != right) & ~(found.isnan() & right.isnan())
        if truncated and case.dtype == BF16:
            wrong &= (found.float() - right.float()).abs() > torch.finfo(BF16).eps * right.float().abs()
        assert not wrong.any(), f"{case.id}: residual_out differs first at {wrong.nonzero()[0].tolist()}"
        # The sum that is stored is the one that is normalised.
        source = before._replace(x=found, residual=None)
    exact, single = (reference.exact(source, spec, EPS, dtype) for dtype in (torch.float64, F32))
    values, values_single = exact.values, single.values.double()
    overflows = exact.residual_out.float().square().sum(-1).isinf()
    if after.scale_out is not None and exact.scale_out is not None and single.scale_out is not None:
        computed = (after.scale_out, exact.scale_out, single.scale_out)
        found, right, rough = (one.reshape(case.rows, -1) for one in computed)
        scales = torch.where(overflows.unsqueeze(1), rough.double(), right)
        assert_rounded_once(found, scales, rough, what=f"{case.id}: scale_out")
        # The output fits the scale that was written.
        ratio = (right / found.double()).repeat_interleave(case.width // right.shape[1], 1)
        values = torch.where(overflows.unsqueeze(1), values, values * ratio)
    # What float32 makes of squares that overflow is defined.
    values = torch.where(overflows.unsqueeze(1), values_single, values)
    assert_rounded_once(after.out, values, values_single, truncated=truncated, what=case.id)
    same = (after.out, after.residual_out, after.scale_out)
    for name, old, new in zip(NormTensors._fields, before, after, strict=True):
        if old is None or new is None:
            continue
        written = any(new is one for one in same)
        old_whole, new_whole = (one if one._base is None else one._base for one in (old, new))
        kept = torch.ones_like(bits(old_whole), dtype=torch.bool)
        if written:
            kept.as_strided(new.shape, new.stride(), new.storage_offset()).fill_(False)
        assert (bits(new_whole) == bits(old_whole))[kept].all(), f"{case.id}: {name} was written where it is no output"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, so that NaN equals itself."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def check_norm(case: NormCase, kernel: str | None, device: torch.device | str) -> None:
    """Raises AssertionError where the kernel's result is wrong, as it is called, or with the case's own config."""
    before, given = tensors(case), tensors(case, device)
    out = api.rms_norm(
        given.x,
        given.weight,
        given.out,
        residual=given.residual,
        residual_out=given.residual_out,
        eps=EPS,
        weight_offset=case.weight_offset,
        scale=given.scale,
        scale_out=given.scale_out,
        kernel=kernel,
    )
    assert out is given.out
    judge(case, before, on_device(given, "cpu"), truncated=truncates(kernel, device))
    if kernel == "cute" and case.config is not None:
        given = tensors(case, device)
        launch_as_configured(case, given)
        judge(case, before, on_device(given, "cpu"))


def launch_as_configured(case: NormCase, given: NormTensors) -> None:
    """The CuTe DSL kernel of the case's config."""
    # Imported here: the rest of this module serves machines without the CuTe DSL.
    from dsl_backend.norm.cute import host

    assert case.config is not None
    function = host.build(host.key_of(spec_of(case, given), case.config), targets.detect(given.x.device))
    function(*host.arguments_of(launch.prepared(given)), EPS)


def spec_of(case: NormCase, given: NormTensors) -> NormSpec:
    return launch.spec_of(launch.prepared(given), case.weight_offset)


TOKEN, TENSOR, BY_GROUP = Scaling.TOKEN, Scaling.TENSOR, Scaling.GROUP
CASES = [
    # --- levels, at the widths that the defaults give them ---
    NormCase(id="thread", rows=130, width=1, why="a thread for each row, one element; a second CTA with few rows"),
    NormCase(id="thread-vector", rows=5, width=8, why="a thread for each row, one whole access"),
    NormCase(id="lanes-31", rows=7, width=31, dtype=F32, why="part of a warp, single elements, one column missing"),
    NormCase(id="lanes-33", rows=20, width=33, residual=True, why="one column more than 32; a second CTA"),
    NormCase(id="head", rows=9, width=128, residual=True, in_place=True, why="a head's norm, several rows a warp"),
    NormCase(id="warp", rows=6, width=1000, residual=True, why="a warp for each row, ragged, whole accesses"),
    NormCase(id="block", rows=2, width=4096, residual=True, in_place=True, why="warps add through shared memory"),
    NormCase(id="block-ragged", rows=2, width=4096 + 3, dtype=F16, why="the same, single elements, ragged"),
    NormCase(id="cluster-default", rows=1, width=20000, residual=True, scaling=TOKEN, why="a width's own cluster"),
    # --- clusters at widths that the emulator finishes ---
    NormCase(id="cluster-2", rows=3, width=250, config=spread(250, 2), why="the smallest cluster, ragged"),
    NormCase(
        id="cluster-4-token",
        rows=2,
        width=4 * 64 * 4,
        residual=True,
        in_place=False,
        scaling=TOKEN,
        config=spread(1024, 4, 64),
        why="no column outside; sums and maxima of 8 warps",
    ),
    NormCase(
        id="cluster-16",
        rows=2,
        width=2000,
        dtype=F16,
        out_dtype=F32,
        config=spread(2000, 16, 128),
        why="64 slots: a lane adds two; CTAs without a column",
    ),
    NormCase(
        id="overlap",
        rows=3,
        width=768,
        residual=True,
        config=spread(768, 2, 64, ctas_per_sm=3, use_pdl=True),
        why="launches overlap; no column outside",
    ),
    # --- priorities of caches ---
    NormCase(
        id="evict-last",
        rows=3,
        width=1000,
        residual=True,
        scaling=TOKEN,
        config=spread(1000, 1, 96, vector=8, vectors_per_thread=2, evict_last=True),
        why="three warps; loads with a priority, ragged, x and residual",
    ),
    NormCase(
        id="evict-last-special",
        rows=9,
        width=304,
        dtype=F16,
        no_weight=True,
        config=spread(304, 2, 32, vector=8, vectors_per_thread=1, evict_last=True),
        special=True,
        why="a cluster, NaN and infinities without a weight",
    ),
    NormCase(id="evict-last-default", rows=2, width=8192, in_place=True, why="a width's own priority, in place"),
    NormCase(id="eight-ctas", rows=1, width=32768, why="the eight CTAs that this width gets by itself"),
    # --- types ---
    NormCase(id="bf16-f32", rows=3, width=264, out_dtype=F32, why="wider output"),
    NormCase(id="f32-bf16", rows=3, width=264, dtype=F32, out_dtype=BF16, residual=True, why="narrower output"),
    NormCase(id="f32-weight", rows=3, width=264, weight_dtype=F32, why="a weight that is wider than x"),
    NormCase(id="no-weight", rows=3, width=264, no_weight=True, residual=True, why="no weight"),
    NormCase(id="gemma", rows=3, width=264, weight_offset=1.0, residual=True, why="1 + weight in float32"),
    # --- 8-bit outputs ---
    NormCase(id="e4m3-tensor", rows=3, width=264, scaling=TENSOR, why="a given scale; saturation"),
    NormCase(id="e4m3-token", rows=5, width=264, scaling=TOKEN, residual=True, in_place=False, why="a scale a row"),
    NormCase(id="e4m3-odd", rows=5, width=33, dtype=F32, scaling=TOKEN, why="single bytes stored"),
    NormCase(id="e4m3-pairs", rows=3, width=66, scaling=TENSOR, pad=2, pad_out=2, why="two bytes stored"),
    NormCase(id="e4m3-gemma", rows=2, width=2048, scaling=TOKEN, weight_offset=1.0, no_weight=False, why="all of it"),
    NormCase(id="e4m3-bare", rows=2, width=512, scaling=TOKEN, no_weight=True, why="a scale of the row itself"),
    NormCase(id="e4m3-groups", rows=9, width=640, scaling=BY_GROUP, residual=True, in_place=False, why="DeepSeek's"),
    NormCase(id="e4m3-groups-f32", rows=3, width=256, dtype=F32, scaling=BY_GROUP, why="a group is a whole warp"),
    NormCase(
        id="e4m3-groups-cluster",
        rows=2,
        width=2048,
        scaling=BY_GROUP,
        weight_offset=1.0,
        config=spread(2048, 4, 32, vector=8, vectors_per_thread=2),
        why="a cluster; half a warp has a group",
    ),
    # --- memory ---
    NormCase(id="strides", rows=5, width=96, pad=8, pad_out=24, residual=True, why="rows apart, aligned"),
    NormCase(id="odd-strides", rows=5, width=96, pad=3, pad_out=1, residual=True, why="rows apart, not aligned"),
    NormCase(id="offset", rows=5, width=96, dtype=F32, offset=2, residual=True, why="aligned to half an access"),
    # --- values ---
    NormCase(id="special", rows=16, width=70, special=True, why="NaN, infinities, zeros, squares that overflow"),
    NormCase(id="special-f32", rows=9, width=70, dtype=F32, residual=True, special=True, why="the same of float32"),
    NormCase(id="special-token", rows=9, width=70, scaling=TOKEN, special=True, why="scales of such rows"),
    NormCase(id="special-groups", rows=9, width=384, scaling=BY_GROUP, special=True, why="NaN of one group of a row"),
    NormCase(id="special-tensor", rows=9, width=70, scaling=TENSOR, special=True, why="a scale beside them"),
    NormCase(
        id="special-cluster",
        rows=9,
        width=300,
        scaling=TOKEN,
        config=spread(300, 2),
        special=True,
        why="across CTAs",
    ),
]

# Interpreted, a block of 16384 elements is one numpy call.
WIDE = (
    NormCase(id="held-most", rows=2, width=16384, residual=True, scaling=TOKEN, why="the widest that Triton holds"),
    NormCase(id="looped", rows=2, width=16384 + 9, residual=True, in_place=True, why="its loop, ragged, in place"),
    NormCase(id="looped-groups", rows=3, width=20096, scaling=BY_GROUP, why="groups across its tiles"),
    NormCase(id="looped-token", rows=9, width=20000, scaling=TOKEN, special=True, why="states across its tiles"),
    NormCase(id="widest", rows=1, width=300001, why="near what the registers of a cluster hold, and odd"),
    NormCase(
        id="real-decode", rows=67, width=4096, residual=True, in_place=True, why="a step of an 8B model, as served"
    ),
)


def random_case(seed: int, widest: int = 700) -> NormCase:
    """A problem of any kind; the same for the same seed."""
    draw = random.Random(seed)
    dtype, out_dtype, weight_dtype = (draw.choice((F32, F16, BF16)) for _ in range(3))
    width = draw.choice((draw.randint(1, 40), draw.randint(1, widest), 8 * draw.randint(1, widest // 7)))
    scaling = draw.choice((Scaling.NONE, Scaling.NONE, TENSOR, TOKEN))
    if scaling is TOKEN and width > 2 * GROUP and draw.random() < 0.5:
        # Rows are aligned then, and the configuration is the default.
        scaling, width = BY_GROUP, width // GROUP * GROUP
    residual, no_weight = draw.random() < 0.6, draw.random() < 0.15
    in_place = scaling is Scaling.NONE and draw.random() < 0.4
    config = None
    # A vector divides the width and whatever the strides turn out to be: with a config of its own rows are not padded.
    if draw.random() < 0.6 and width % 2 == 0 and scaling is not BY_GROUP:
        cluster = draw.choice((1, 1, 2, 4))
        threads = draw.choice((32, 64, 128)) if cluster > 1 else draw.choice((2, 8, 16, 32, 64))
        beside = 1 if cluster > 1 else max(1, 32 // threads) * draw.choice((1, 2))
        config = spread(width, cluster, threads, beside, use_pdl=draw.random() < 0.5)
        if config.vectors_per_thread > 16:
            config = None
    padded = config is None and scaling is not BY_GROUP and draw.random() < 0.4
    return NormCase(
        id=f"fuzz-{seed}",
        why="unforeseen combinations",
        rows=draw.randint(1, 12),
        width=width,
        dtype=dtype,
        out_dtype=dtype if in_place else out_dtype,
        weight_dtype=weight_dtype,
        no_weight=no_weight,
        residual=residual,
        in_place=in_place,
        weight_offset=1.0 if draw.random() < 0.3 and not no_weight else 0.0,
        scaling=scaling,
        config=config,
        pad=draw.randint(0, 16) if padded else 0,
        pad_out=draw.randint(0, 16) if padded else 0,
        offset=draw.randint(0, 3) if padded else 0,
        special=draw.random() < 0.2,
        seed=seed,
    )
