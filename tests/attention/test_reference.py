# SPDX-License-Identifier: Apache-2.0
"""The reference against its definition, written a second time: loops over scalars, and torch's own attention."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from dsl_backend.attention import reference
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.testing.cases import BF16, COMBINATIONS, DTYPES, FP8, FP16, FULL, SCORES, Case, mla
from dsl_backend.testing.inputs import K_SCALE, V_SCALE, Layout, Problem, Surroundings


def key_row(problem: Problem, rows: torch.Tensor, request: int, token: int, head: int) -> list[float]:
    """One key or value, found by following the batch's tables by hand."""
    batch, page = problem.batch, problem.spec.page_size
    if page is None:
        assert batch.kv_start_loc is not None
        return rows[int(batch.kv_start_loc[request]) + token, head].float().tolist()
    assert batch.block_table is not None
    return rows[int(batch.block_table[request, token // page]), token % page, head].float().tolist()


def by_scalars(problem: Problem, request: int, query: int, head: int) -> tuple[list[float], float]:
    """Output and log-sum-exp of one query and head: Python floats, one key after another."""
    spec, batch = problem.spec, problem.batch
    q_len, kv_len = problem.q_lens[request], problem.kv_lens[request]
    q = problem.q[sum(problem.q_lens[:request]) + query, head].float().tolist()
    position = kv_len - q_len + query
    causal = spec.causality is Causality.CAUSAL
    if spec.causality is Causality.PER_REQUEST:
        assert batch.causal is not None
        causal = bool(batch.causal[request])
    head_kv = head // (spec.heads_q // spec.heads_kv)
    k_scale = 1.0 if problem.k_scale is None else float(problem.k_scale)
    v_scale = 1.0 if problem.v_scale is None else float(problem.v_scale)
    scores: list[float] = []
    values: list[list[float]] = []
    for j in range(kv_len):
        if causal and j > position:
            continue
        if spec.window_left is not None and j < position - spec.window_left:
            continue
        if spec.window_right is not None and j > position + spec.window_right:
            continue
        key = key_row(problem, problem.keys, request, j, head_kv)
        score = spec.scale * sum(a * b * k_scale for a, b in zip(q, key, strict=True))
        if spec.softcap:
            score = spec.softcap * math.tanh(score / spec.softcap)
        if problem.alibi_slopes is not None:
            score -= float(problem.alibi_slopes[head]) * abs(position - j)
        scores.append(score)
        values.append([v * v_scale for v in key_row(problem, problem.values, request, j, head_kv)])
    logits = scores if problem.sinks is None else [*scores, float(problem.sinks[head])]
    if not logits:
        return [0.0] * spec.head_dim_v, -math.inf
    top = max(logits)
    total = sum(math.exp(s - top) for s in logits)
    weights = [math.exp(s - top) / total for s in scores]
    out = [sum(w * v[d] for w, v in zip(weights, values, strict=True)) for d in range(spec.head_dim_v)]
    return out, top + math.log(total)


# Small enough for loops over scalars, odd enough to go wrong: groups of three, several requests, all features.
TINY: dict[str, Any] = {"heads": (3, 1), "dim": 5, "dtype": torch.float32, "page": 4}
SCALAR_CASES = [
    Case(id="causal", q_lens=(1, 3, 6), kv_lens=(7, 5, 6), **TINY),
    Case(id="groups", q_lens=(1, 3), kv_lens=(7, 5), **{**TINY, "heads": (6, 2)}),
    Case(id="full", q_lens=(1, 3), kv_lens=(7, 5), causality=FULL, **TINY),
    Case(id="per-request", q_lens=(4, 3), kv_lens=(7, 5), causal=(False, True), **TINY),
    Case(id="per-request-window", q_lens=(4, 3), kv_lens=(7, 5), causal=(False, True), window=(2, 1), **TINY),
    Case(id="window", q_lens=(1, 6), kv_lens=(9, 8), window=(2, None), **TINY),
    Case(id="window-0", q_lens=(1, 6), kv_lens=(9, 8), window=(0, None), **TINY),
    Case(id="window-both", q_lens=(3, 6), kv_lens=(9, 8), window=(2, 1), causality=FULL, **TINY),
    Case(id="window-right", q_lens=(3, 6), kv_lens=(9, 8), window=(None, 1), causality=FULL, **TINY),
    Case(id="softcap", q_lens=(1, 4), kv_lens=(9, 6), softcap=1.5, q_gain=3.0, **TINY),
    Case(id="sinks", q_lens=(1, 4), kv_lens=(9, 6), sinks=True, **TINY),
    Case(id="sinks-no-keys", q_lens=(1, 2), kv_lens=(0, 3), sinks=True, causality=FULL, **TINY),
    Case(id="alibi", q_lens=(1, 4), kv_lens=(9, 6), alibi=True, **TINY),
    Case(id="alibi-full", q_lens=(2, 4), kv_lens=(9, 6), alibi=True, causality=FULL, **TINY),
    Case(id="no-keys", q_lens=(2, 3), kv_lens=(0, 4), causality=FULL, **TINY),
    Case(id="negative-positions", q_lens=(5, 3), kv_lens=(2, 0), **TINY),
    Case(id="padding", q_lens=(0, 2, 0), kv_lens=(0, 5, 3), **TINY),
    Case(id="dims-differ", q_lens=(1, 3), kv_lens=(6, 3), **TINY, dim_v=3),
    Case(id="packed", q_lens=(2, 3, 1), kv_lens=(6, 3, 4), **{**TINY, "page": None}),
    Case(id="cross", q_lens=(5,), kv_lens=(2,), causality=FULL, **{**TINY, "page": None}),
    Case(id="heads-first", q_lens=(2, 3), kv_lens=(6, 3), around=Surroundings(layout=Layout.HEADS_FIRST), **TINY),
    Case(id="padded", q_lens=(2, 3), kv_lens=(6, 3), around=Surroundings(layout=Layout.PADDED), **TINY),
    Case(id="fp8", q_lens=(1, 3), kv_lens=(6, 3), fp8=True, **{**TINY, "dtype": BF16}),
    mla(3, (7, 4), id="latent", q_lens=(1, 3), kv_lens=(6, 3), dtype=torch.float32, page=4),
    Case(
        id="everything",
        q_lens=(1, 3, 4),
        kv_lens=(6, 9, 4),
        causal=(True, False, True),
        window=(3, 1),
        softcap=2.0,
        sinks=True,
        alibi=True,
        fp8=True,
        q_gain=2.0,
        **{**TINY, "dtype": FP16},
    ),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in SCALAR_CASES])
def test_scalars(case: Case) -> None:
    problem = case.problem()
    expected = problem.expected()
    row = 0
    for request, q_len in enumerate(case.q_lens):
        for query, head in itertools.product(range(q_len), range(case.heads[0])):
            out, lse = by_scalars(problem, request, query, head)
            where = f"{request=} {query=} {head=}"
            assert expected.out[row + query, head].tolist() == pytest.approx(out, rel=1e-6, abs=1e-9), where
            assert float(expected.lse[row + query, head]) == pytest.approx(lse, rel=1e-6, abs=1e-9), where
        row += q_len
    assert (expected.out[row:] == 0).all(), "rows of no request are 0"
    assert (expected.lse[row:] == -math.inf).all(), "rows of no request have lse -inf"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)])
def test_against_torch(heads: tuple[int, int], causal: bool) -> None:
    """What torch computes itself in float64; its causal mask starts at the top left, so lengths are equal there."""
    q_len, kv_len = (37, 37) if causal else (11, 37)
    case = Case(
        q_lens=(5, q_len),
        kv_lens=(5, kv_len),
        heads=heads,
        causality=Causality.CAUSAL if causal else FULL,
        page=None,
        dtype=torch.float32,
    )
    problem = case.problem()
    out, _ = reference.attention(
        problem.spec, problem.batch, problem.q, problem.keys, problem.values, compute_dtype=torch.float64
    )
    ours = out[5 : 5 + q_len]
    theirs = scaled_dot_product_attention(
        problem.q[5 : 5 + q_len].double().transpose(0, 1)[None],
        problem.keys[5 : 5 + kv_len].double().transpose(0, 1)[None],
        problem.values[5 : 5 + kv_len].double().transpose(0, 1)[None],
        is_causal=causal,
        enable_gqa=True,
    )[0].transpose(0, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_window_is_a_mask() -> None:
    """The same through torch's attention with a mask made of the spec's sentence on windows."""
    case = Case(q_lens=(9,), kv_lens=(30,), window=(7, 3), causality=FULL, page=None, dtype=torch.float32)
    problem = case.problem()
    out, _ = reference.attention(
        problem.spec, problem.batch, problem.q, problem.keys, problem.values, compute_dtype=torch.float64
    )
    mask = torch.tensor([[21 + i - 7 <= j <= 21 + i + 3 for j in range(30)] for i in range(9)])
    theirs = scaled_dot_product_attention(
        problem.q[:9].double().transpose(0, 1)[None],
        problem.keys[:30].double().transpose(0, 1)[None],
        problem.values[:30].double().transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=True,
    )[0].transpose(0, 1)
    torch.testing.assert_close(out[:9], theirs, rtol=1e-12, atol=1e-12)


def test_lse_merges_two_halves() -> None:
    """Attention over two ranges of keys, weighted by their lse, is attention over both: what lse is for."""
    case = Case(q_lens=(6,), kv_lens=(40,), causality=FULL, page=None, dtype=torch.float32)
    whole = case.problem()
    spec = whole.spec

    def part(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = Batch(
            query_start_loc=torch.tensor([0, 6], dtype=torch.int32),
            seq_lens=torch.tensor([last - first], dtype=torch.int32),
            num_tokens=6,
            max_query_len=6,
            max_seq_len=40,
            kv_start_loc=torch.tensor([first, last], dtype=torch.int32),
        )
        return reference.attention(spec, batch, whole.q[:6], whole.keys, whole.values, compute_dtype=torch.float64)

    (out, lse), (out_a, lse_a), (out_b, lse_b) = part(0, 40), part(0, 13), part(13, 40)
    torch.testing.assert_close(lse, torch.logaddexp(lse_a, lse_b))
    merged = out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None]
    torch.testing.assert_close(out, merged)


def test_garbage_does_not_matter() -> None:
    """Two problems with the same data and other garbage around it have the same results."""
    case = Case(q_lens=(3, 1), kv_lens=(21, 5))
    one, other = case.problem(), case.problem()
    mine = torch.zeros(one.keys.shape[:2], dtype=torch.bool)
    assert one.batch.block_table is not None
    for request, kv_len in enumerate(case.kv_lens):
        for token in range(kv_len):
            mine[int(one.batch.block_table[request, token // 16]), token % 16] = True
    assert other.keys[~mine].isnan().any(), "there is no garbage"
    other.keys[~mine] = 1.0
    other.values[~mine] = 1.0
    other.q[4:] = 1.0
    assert torch.equal(one.expected().out, other.expected().out)


def test_nan_stays_in_its_request() -> None:
    problem = Case(q_lens=(2, 2, 2), kv_lens=(5, 6, 7), nan_request=1).problem()
    expected = problem.expected()
    wrong = expected.out.isnan().any(-1)
    assert wrong.nonzero().tolist() == [[2, 0]], "row 2 is the request's first, head 0 the one with NaN"


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_compute_dtypes_agree(dtype: torch.dtype) -> None:
    """The cases with unusual scores can be computed naively too: finite wherever the oracle is."""
    for case in (case for case in (*SCORES, *COMBINATIONS, *DTYPES) if case.dtype is dtype):
        expected = case.problem().expected()
        finite = expected.out.isfinite()
        assert expected.naive[finite].isfinite().all(), case.id
        assert expected.naive.dtype == dtype


@dataclass
class Cache:
    keys: torch.Tensor
    values: torch.Tensor


def write(rows: torch.Tensor, slots: list[int], dtype: torch.dtype, scale: float | None = None) -> Cache:
    """Write rows [tokens, 1, dim] into caches of 2 pages of 4 tokens, prefilled with 7."""
    cache = Cache(*(torch.full((2, 4, 1, rows.shape[-1]), 7.0).to(dtype) for _ in range(2)))
    scales = (None, None) if scale is None else (torch.tensor([scale]), torch.tensor([scale * 2]))
    reference.write_kv(rows, rows, cache.keys, cache.values, torch.tensor(slots), *scales)
    return cache


def test_write_kv_places_rows() -> None:
    rows = torch.arange(8.0).view(4, 1, 2).to(BF16)
    cache = write(rows, [5, -1, 0], BF16)
    assert cache.keys[1, 1, 0].tolist() == [0.0, 1.0]
    assert cache.keys[0, 0, 0].tolist() == [4.0, 5.0]
    assert torch.equal(cache.keys, cache.values)
    untouched = [(page, token) for page in range(2) for token in range(4) if (page, token) not in ((1, 1), (0, 0))]
    assert all((cache.keys[where] == 7).all() for where in untouched), "slot -1 and row 3 were to be left out"


def test_write_kv_fp8() -> None:
    """e4m3 has 3 bits of mantissa, saturates at 448, and its smallest number is 2^-9."""
    exact = torch.tensor([[[1.0, -1.0, 1.0625, 1.1875, 448.0, 463.0, 1e4, -1e4, math.inf, -math.inf, 2**-9, 2**-11]]])
    stored = write(exact, [2], FP8, scale=1.0).keys[0, 2, 0].float().tolist()
    assert stored == [1.0, -1.0, 1.0, 1.25, 448.0, 448.0, 448.0, -448.0, 448.0, -448.0, 2**-9, 0.0]
    assert write(torch.full((1, 1, 2), math.nan), [2], FP8, scale=1.0).keys[0, 2].float().isnan().all()


def test_write_kv_divides_by_the_scale() -> None:
    cache = write(torch.full((1, 1, 2), 3.0), [0], FP8, scale=0.5)
    assert cache.keys[0, 0].float().flatten().tolist() == [6.0, 6.0]
    assert cache.values[0, 0].float().flatten().tolist() == [3.0, 3.0], "values have a scale of their own"


def test_scales_are_for_fp8_alone() -> None:
    """A 16-bit cache holds real values, whatever scale a layer has: neither writing nor reading applies it."""
    problem = Case(q_lens=(1, 2), kv_lens=(9, 5)).problem()
    plain = reference.attention(problem.spec, problem.batch, problem.q, problem.keys, problem.values)
    scale = torch.tensor([3.0])
    scaled = reference.attention(
        problem.spec, problem.batch, problem.q, problem.keys, problem.values, k_scale=scale, v_scale=scale
    )
    assert torch.equal(plain[0], scaled[0])
    rows = torch.full((1, 1, 2), 3.0).to(BF16)
    assert write(rows, [0], BF16, scale=0.5).keys[0, 0].flatten().tolist() == [3.0, 3.0]


def test_fp8_round_trip() -> None:
    """What is written with a scale is read back with it: relative error at most half a step of 3 bits."""
    rows = torch.randn(8, 1, 16)
    cache = write(rows, list(range(8)), FP8, scale=K_SCALE)
    read = cache.keys.float().flatten(0, 1) * K_SCALE
    assert ((read - rows).abs() <= rows.abs() / 16 + K_SCALE * 2**-10).all()
    assert not torch.equal(cache.keys.float(), cache.values.float()), f"scales {K_SCALE} and {V_SCALE} differ"


def test_write_then_attend() -> None:
    """Keys that were written one step after another are the keys that attention sees."""
    random = torch.Generator().manual_seed(3)
    spec = AttentionSpec(
        heads_q=2,
        heads_kv=1,
        head_dim=8,
        head_dim_v=8,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        page_size=4,
        scale=0.3,
    )
    key, value, q = (torch.randn(6, h, 8, generator=random) for h in (1, 1, 2))
    cache = torch.full((5, 4, 1, 16), math.nan)
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    slots = torch.tensor([12, 13, 14, 15, 4, 5])
    out = torch.cat([torch.zeros(0, 2, 8)])
    for step in range(6):
        now = slice(step, step + 1)
        reference.write_kv(key[now], value[now], cache[..., :8], cache[..., 8:], slots[now])
        batch = Batch(
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([step + 1], dtype=torch.int32),
            num_tokens=1,
            max_query_len=1,
            max_seq_len=6,
            block_table=table,
        )
        out = torch.cat([out, reference.attention(spec, batch, q[now], cache[..., :8], cache[..., 8:])[0]])
    theirs = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        is_causal=True,
        scale=0.3,
        enable_gqa=True,
    )[0].transpose(0, 1)
    torch.testing.assert_close(out, theirs)
