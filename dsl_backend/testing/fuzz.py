# SPDX-License-Identifier: Apache-2.0
"""Random problems against the oracle: `dsl-backend verify --families decode --problems 300 --seed 1`.

A problem follows from the family, the seed and its index alone. Triton compiles once a layer spec; `specs` bounds how
many there are.
"""

import dataclasses
import enum
import random
from collections.abc import Iterator

import torch

from dsl_backend.testing import (
    experts,
    mla_rope_writes,
    norm,
    rope_writes,
    sampling,
    scaled,
    softmax,
    verification,
    weight_only,
)
from dsl_backend.testing.cases.case import BF16, CAUSAL, E5M2, FP8, FP16, FULL, Case
from dsl_backend.testing.experts import ExpertsCase, check_experts
from dsl_backend.testing.inputs import Layout, Surroundings
from dsl_backend.testing.kv_writes import WriteCase
from dsl_backend.testing.linear import LinearCase, check_linear, random_case
from dsl_backend.testing.mla_rope_writes import MLARopeCase
from dsl_backend.testing.norm import NormCase
from dsl_backend.testing.rope_writes import RopeCase
from dsl_backend.testing.sampling import SamplingCase
from dsl_backend.testing.scaled import ScaledCase
from dsl_backend.testing.softmax import SoftmaxCase
from dsl_backend.testing.verification import VerificationCase
from dsl_backend.testing.weight_only import WeightOnlyCase

Problem = (
    Case
    | WriteCase
    | RopeCase
    | MLARopeCase
    | LinearCase
    | ScaledCase
    | WeightOnlyCase
    | ExpertsCase
    | NormCase
    | SoftmaxCase
    | SamplingCase
    | VerificationCase
)
# Random layers of experts by family, which is by the format of the weights: 16 bits, e4m3, the formats whose scales
# SM100 multiplies with, and MXFP4 under 16 bits.
EXPERTS = {
    "experts": experts.random_layer,
    "scaled_experts": experts.random_scaled_case,
    "block_scaled_experts": experts.random_block_scaled_case,
    "weight_only_experts": experts.random_weight_only_case,
}
FAMILIES = (
    *("decode", "prefill", "mla", "write_kv", "rope_write_kv", "rope_write_mla"),
    *("linear", "scaled_linear", "weight_only_linear", *EXPERTS, "norm", "softmax", "sampling", "verification"),
)
DIMS = (64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 160, 192, 200, 248, 256, 512)
PAGES = (16, 32, 48, 64, 128, 528)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 12)
LATENT_DIMS = ((576, 512), (320, 256), (288, 256))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large problems get.

    Attributes:
        kv: longest key range, in tokens.
        q: longest query of prefill, in tokens.
        requests: most requests of a batch.
        heads_kv: key/value heads to draw from.
        heads_mla: query heads of absorbed MLA to draw from.
        scores: most scores (heads · queries · keys) of one request, for the oracle's memory.
        linear: rows and columns of a linear layer, about.
        experts: tokens and columns of experts, about.
        row: elements of a norm or softmax, logits of a vocabulary.
    """

    kv: int
    q: int
    requests: int
    heads_kv: tuple[int, ...]
    heads_mla: tuple[int, ...]
    scores: float
    linear: int
    experts: int
    row: int


TINY = Sizes(
    kv=90, q=40, requests=4, heads_kv=(1, 2), heads_mla=(8, 16, 20), scores=1e6, linear=150, experts=120, row=300
)
REAL = Sizes(
    kv=9000,
    q=1500,
    requests=24,
    heads_kv=(1, 2, 4, 8),
    heads_mla=(8, 12, 16, 32, 64, 128),
    scores=1e8,
    linear=5000,
    experts=1500,
    row=40_000,
)


def length(draw: random.Random, longest: int) -> int:
    """1 to longest, small ones as often as large ones, and often next to a multiple of 16."""
    value = int(2 ** draw.uniform(0, (longest + 1).bit_length() - 1))
    if draw.random() < 0.4:
        value = round(value / 16) * 16 + draw.choice((-1, 0, 1))
    return max(1, min(value, longest))


def layer(family: str, draw: random.Random, sizes: Sizes) -> Case:
    """The facts of a random layer, as a case without requests."""
    case = Case(
        q_lens=(),
        kv_lens=(),
        dtype=draw.choice((BF16, FP16)),
        fp8=draw.random() < 0.3,
        page=draw.choice(PAGES),
        causality=draw.choice((CAUSAL, CAUSAL, CAUSAL, FULL)),
    )
    if family == "mla":
        dim, dim_v = draw.choice(LATENT_DIMS)
        return dataclasses.replace(
            case,
            heads=(draw.choice(sizes.heads_mla), 1),
            dim=dim,
            dim_v=dim_v,
            mla=True,
            causality=CAUSAL,
            split_q=draw.random() < 0.5,
            fp8_dtype=draw.choice((FP8, E5M2)),
        )
    heads_kv = draw.choice(sizes.heads_kv)
    dim = draw.choice(DIMS)
    packed = family == "prefill" and draw.random() < 0.25
    both = packed and draw.random() < 0.3
    window = (
        draw.choice((None, 0, 1, 15, 16, 31, 99, 200, 5000)),
        draw.choice((None, None, 0, 3, 17)) if case.causality is FULL else None,
    )
    case = dataclasses.replace(
        case,
        heads=(heads_kv * draw.choice(GROUPS), heads_kv),
        dim=192 if both else dim,
        dim_v=128 if both else None,
        page=None if packed else case.page,
        window=window if draw.random() < 0.45 else (None, None),
        softcap=draw.choice((2.0, 15.0, 50.0)) if draw.random() < 0.25 else 0.0,
        sinks=draw.random() < 0.25,
        alibi=draw.random() < 0.2,
        tile=draw.choice(((16, 32), (32, 16), (32, 64))) if draw.random() < 0.2 else None,
        # Drawn anew for every problem of the layer; here it says that it is to be drawn.
        causal=() if draw.random() < 0.15 else None,
        fp8_dtype=draw.choice((FP8, E5M2)),
        scales_by_head=draw.random() < 0.5,
        # Last, so that the other facts of a seed are those of earlier versions.
        fp8_out=draw.random() < 0.15,
    )
    columns = case.heads[0] * case.spec.head_dim_v
    fits = not case.fp8_out and case.spec.head_dim_v % 16 == 0 and columns % 64 == 0
    return dataclasses.replace(case, nvfp4_out=draw.random() < 0.15 and fits)


# Share of requests whose queries are no decode; MLA's kernels for those also serve short pieces of prompts.
LONG = {"decode": 0.0, "prefill": 0.7, "mla": 0.2}


def longest_decode(layer: Case) -> int:
    """The longest query that is drawn as a decode with drafts."""
    return 8 if layer.mla else min(16, max(1, 64 // (layer.heads[0] // layer.heads[1])))


def attention_family(case: Case) -> str:
    """The family of whose problems a case is one."""
    if case.mla:
        return "mla"
    return "decode" if max(case.q_lens, default=0) <= longest_decode(case) else "prefill"


def requests(family: str, layer: Case, draw: random.Random, sizes: Sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query and key lengths of a random batch."""
    q_lens, kv_lens = [], []
    longest_short = longest_decode(layer)
    speculative = draw.random() < 0.4
    for _ in range(draw.randint(0 if draw.random() < 0.05 else 1, sizes.requests)):
        kind = draw.random()
        kv_len = length(draw, sizes.kv)
        short = draw.randint(1, longest_short) if speculative else 1
        if kind >= LONG[family]:
            q_len = min(short, kv_len)
        else:
            q_len = length(draw, sizes.q)
            kv_len = q_len if kind < 0.4 * LONG[family] else min(sizes.kv, q_len + kv_len)
        while layer.heads[0] * q_len * kv_len > sizes.scores:
            kv_len = max(1, kv_len // 2)
            q_len = min(q_len, kv_len)
        odd = draw.random()
        if odd < 0.05:
            q_len, kv_len = 0, 0
        elif odd < 0.08:
            q_len = 0
        elif odd < 0.12:
            kv_len = draw.randint(0, q_len)
        q_lens.append(q_len)
        kv_lens.append(kv_len)
    return tuple(q_lens), tuple(kv_lens)


def attention_case(family: str, layer: Case, draw: random.Random, sizes: Sizes) -> Case:
    """A random problem of a layer."""
    q_lens, kv_lens = requests(family, layer, draw, sizes)
    layout = draw.choice((Layout.SIDE_BY_SIDE, Layout.SIDE_BY_SIDE, *Layout))
    around = Surroundings(
        layout=layout,
        padding_tokens=draw.choice((0, 0, 1, 20)),
        spare_rows=draw.choice((0, 3)),
        spare_pages=draw.randint(1, 9),
        fused_q=draw.random() < 0.5,
        sinks_dtype=draw.choice((torch.float32, torch.float32, layer.dtype)),
        max_query_len=draw.choice((0, 0, 0, sizes.q)),
        max_seq_len=draw.choice((0, 0, sizes.kv * 2)),
    )
    return dataclasses.replace(
        layer,
        q_lens=q_lens,
        kv_lens=kv_lens,
        causal=None if layer.causal is None else tuple(draw.random() < 0.5 for _ in q_lens),
        q_gain=draw.choice((1.0, 1.0, 0.3, 4.0)),
        nan_request=draw.choice([i for i, n in enumerate(q_lens) if n] or [None]) if draw.random() < 0.1 else None,
        programs=draw.randint(1, 40) if family != "prefill" and draw.random() < 0.4 else None,
        around=around,
        seed=draw.randrange(2**31),
    )


def write_case(draw: random.Random, sizes: Sizes) -> WriteCase:
    """A random write."""
    latent = draw.random() < 0.25
    dim = draw.choice(DIMS)
    dim, dim_v = draw.choice(((512, 64), (256, 64), (256, 32))) if latent else (dim, draw.choice((dim, dim, 128)))
    tokens = length(draw, sizes.kv)
    page = draw.choice(PAGES)
    return WriteCase(
        tokens=tokens,
        padding_tokens=draw.choice((0, 0, 1, 9)),
        skipped=draw.choice((0, 0, 1, tokens // 2)),
        pages=-(-tokens // page) + draw.randint(0, 5),
        heads=1 if latent else draw.choice((1, 2, 3, 8)),
        dim=dim,
        dim_v=dim_v,
        dtype=draw.choice((BF16, FP16)),
        fp8=draw.random() < 0.5,
        page=page,
        layout=draw.choice(tuple(Layout)),
        mla=latent,
        fused=draw.random() < 0.5,
        gain=draw.choice((1.0, 1.0, 1e-3, 30.0)),
        specials=draw.random() < 0.3,
        seed=draw.randrange(2**31),
        fp8_dtype=draw.choice((FP8, E5M2)),
        scales_by_head=draw.random() < 0.5,
    )


def problem(family: str, seed: int, index: int, sizes: Sizes, specs: int) -> Problem:
    """Problem `index` of a seed; its layer is one of `specs`."""
    draw = random.Random(f"{family} {seed} {index}")
    if family == "write_kv":
        return write_case(draw, sizes)
    if family == "rope_write_kv":
        return rope_writes.random_case(draw, length(draw, sizes.kv))
    if family == "rope_write_mla":
        return mla_rope_writes.random_case(draw, length(draw, sizes.kv))
    if family == "norm":
        return norm.random_case(draw.randrange(2**31), sizes.row)
    if family == "softmax":
        return softmax.random_case(draw.randrange(2**31), sizes.row)
    if family == "sampling":
        return sampling.random_case(draw.randrange(2**31), sizes.row)
    if family == "verification":
        return verification.random_case(draw.randrange(2**31), sizes.row)
    shared = random.Random(f"{family} {seed} layer {index % specs}")
    if family == "linear":
        return random_case(draw, sizes.linear, facts=shared)
    if family == "scaled_linear":
        return scaled.random_case(draw, sizes.linear, facts=shared)
    if family == "weight_only_linear":
        # As many problems for the kernel of few rows as for the other one.
        rows, seed = draw.choice((64, sizes.linear)), draw.randrange(2**31)
        return weight_only.random_case(seed, sizes.linear, sizes.linear, rows, facts=shared)
    if family in EXPERTS:
        case = EXPERTS[family](draw, sizes.experts, facts=shared)
        return case if case.weight is None else experts.few_experts(case, shared)
    facts = layer(family, shared, sizes)
    return attention_case(family, facts, draw, sizes)


def problems(family: str, count: int, seed: int, sizes: Sizes, specs: int) -> Iterator[Problem]:
    """The first `count` problems of a seed."""
    return (problem(family, seed, index, sizes, specs) for index in range(count))


def source(value: object) -> str:
    """Python that rebuilds a case: the fields that differ from their defaults."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if type(value) is tuple:
        return f"({''.join(f'{source(one)}, ' for one in value)})"
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    arguments = []
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if given != default:
            arguments.append(f"{field.name}={source(given)}")
    return f"{type(value).__name__}({', '.join(arguments)})"


def check(case: Problem, kernel: str, device: str) -> None:
    """Raises AssertionError where the kernel's result is wrong."""
    # Imported here: Triton must not be imported before `verify` has decided whether it interprets.
    from dsl_backend.testing import check, kv_writes

    if isinstance(case, LinearCase):
        check_linear(case, None if kernel == "auto" else kernel, device)
    elif isinstance(case, ScaledCase):
        scaled.check_scaled(case, None if kernel == "auto" else kernel, device)
    elif isinstance(case, WeightOnlyCase):
        weight_only.check_weight_only(case, None if kernel == "auto" else kernel, device)
    elif isinstance(case, ExpertsCase):
        check_experts(case, None if kernel == "auto" else kernel, device)
    elif isinstance(case, NormCase):
        norm.check_norm(case, kernel, device)
    elif isinstance(case, SoftmaxCase):
        softmax.check_softmax(case, kernel, device)
    elif isinstance(case, SamplingCase):
        sampling.check_sampling(case, kernel, device)
    elif isinstance(case, VerificationCase):
        verification.check_verification(case, kernel, device)
    elif isinstance(case, RopeCase):
        rope_writes.check_rope(case, kernel, device)
    elif isinstance(case, MLARopeCase):
        mla_rope_writes.check_mla_rope(case, kernel, device)
    elif isinstance(case, WriteCase):
        kv_writes.check_write(case, kernel, device)
    else:
        check.check_case(case, kernel, device)
