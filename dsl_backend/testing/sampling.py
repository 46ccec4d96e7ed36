# SPDX-License-Identifier: Apache-2.0
"""Test cases of sampling, and random ones. The tokens have to be the definition's, bit for bit."""

import random
from dataclasses import dataclass
from typing import Any

import torch

from dsl_backend.errors import Unsupported
from dsl_backend.runtime import target as targets
from dsl_backend.sampling import api, fixed_point, reference, verification_reference
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.cute.args import SampleArgs
from dsl_backend.sampling.spec import Kept, LogprobsMode, Parameters, Sampled, SamplingSpec, buffers

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN, INF = float("nan"), float("inf")
UNWRITTEN = -7
FEW = 20
# One CTA; two CTAs that load single logits; four; sixteen, most of which have no logit. Few candidates fit, so that
# small vocabularies exceed them.
ONE = (
    F32,
    torch.int64,
    ClusterConfig(
        cluster=1, threads=64, vector=4, blocks_ahead=0, reread_blocks=2, reread_backward=True, max_candidates=64
    ),
)
TWO = (F16, torch.int32, ClusterConfig(cluster=2, threads=64, vector=1, max_candidates=64))
FOUR = (BF16, torch.int64, ClusterConfig(cluster=4, threads=32, vector=2, max_candidates=64))
SIXTEEN = (F32, torch.int64, ClusterConfig(cluster=16, threads=128, vector=2, blocks_ahead=0, max_candidates=64))
KINDS = (ONE, TWO, FOUR, SIXTEEN)
# For top-p alone: bounds of lanes; and a second launch, with one CTA and with two before it.
BOUNDED = (F32, torch.int64, ClusterConfig(cluster=1, threads=64, vector=4, max_candidates=64, lane_bound_blocks=64))
FINISHED = (
    F32,
    torch.int64,
    ClusterConfig(cluster=1, threads=64, vector=4, max_candidates=64, lane_bound_blocks=64, finish_cluster=4),
)
FINISHED_TWO = (BF16, torch.int32, ClusterConfig(cluster=2, threads=64, vector=1, max_candidates=64, finish_cluster=2))
TOP_P_KINDS = (BOUNDED, FINISHED, FINISHED_TWO)


@dataclass(frozen=True, kw_only=True)
class SamplingCase:
    """Rows of logits with parameters of their own.

    Attributes:
        kind: dtype of logits, of tokens, and how the kernel runs.
        rows: of each the logits' distribution (`logits_of`), temperature, top-k, top-p, min-p.
        pad: logits between rows.
        logprobs: the mode of log-probabilities and how many of the likeliest tokens to return.
        why: what this case alone would find.
        seed: of the logits.
        kept: what the filters keep is returned too.
    """

    id: str
    why: str
    kind: tuple[torch.dtype, torch.dtype, ClusterConfig] = ONE
    vocab: int
    rows: tuple[tuple[str, float, int, float, float], ...]
    pad: int = 0
    k_dtype: torch.dtype = torch.int32
    logprobs: tuple[LogprobsMode, int] | None = None
    seed: int = 1
    kept: bool = False

    @property
    def config(self) -> ClusterConfig:
        return self.kind[2]

    @property
    def spec(self) -> SamplingSpec:
        mode, count = self.logprobs or (None, 0)
        return SamplingSpec(
            vocab=self.vocab,
            dtype=self.kind[0],
            token_dtype=self.kind[1],
            logprobs_mode=mode,
            num_logprobs=count,
            kept=self.kept,
        )


def apart(vocab: int) -> torch.Tensor:
    """The largest logit alone in its block. By a weight and masses the later blocks have more than by probabilities."""
    x = torch.full((vocab,), -2.234375)
    x[: fixed_point.BLOCK], x[-1], x[0] = -INF, -1.796875, 0.0
    return x


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
        "apart": lambda: apart(vocab),
    }
    found: torch.Tensor = made[distribution]()
    return found


DISTRIBUTIONS = (
    *("spread", "ties", "equal", "zeros", "nan", "all-nan", "dead"),
    *("few", "masked", "one", "inf", "huge", "tiny", "peaked", "sorted", "steep"),
)


def tensors(case: SamplingCase, device: torch.device | str = "cpu") -> tuple[torch.Tensor, Parameters]:
    """Logits [rows, vocab] in a buffer with large logits between the rows, and the parameters."""
    generator = torch.Generator().manual_seed(case.seed)
    count, dtype = len(case.rows), case.spec.dtype
    buffer = torch.full((count, case.vocab + case.pad), 6e4 if dtype is F16 else 9e9, dtype=dtype, device=device)
    x = buffer[:, : case.vocab]
    for row, (distribution, *_) in zip(x, case.rows, strict=True):
        row.copy_(logits_of(distribution, case.vocab, generator).to(dtype))
    _, temperature, top_k, top_p, min_p = zip(*case.rows, strict=True)
    rows = Parameters(
        seeds=torch.randint(-(2**62), 2**62, (count,), generator=generator).to(device),
        positions=torch.randint(0, 2**40, (count,), generator=generator).to(device),
        temperature=torch.tensor(temperature, dtype=F32, device=device),
        top_k=torch.tensor(top_k, dtype=case.k_dtype, device=device),
        top_p=torch.tensor(top_p, dtype=F32, device=device),
        min_p=torch.tensor(min_p, dtype=F32, device=device),
    )
    return x, rows


def check_sampling(case: SamplingCase, kernel: str | None, device: torch.device | str) -> None:
    """Raise AssertionError where a token is not the definition's, with the default config or with the case's own."""
    x, parameters = tensors(case, device)
    if kernel == "triton" and targets.detect(x.device).interpreted and has_subnormal(x):
        raise Unsupported(case.id, {"triton": ["its interpreter misreads subnormal numbers of bfloat16"]})
    before = x.clone()
    plan = api.plan(case.spec, len(x), x.device, kernel)
    assert_defined(case, x, parameters, api.run(plan, x, parameters, kept=case.kept))
    if kernel == "cute":
        assert_defined(case, x, parameters, launch_as_configured(case, x, parameters))
    assert torch.equal(x.view(torch.uint8), before.view(torch.uint8)), "logits were changed"


def assert_defined(case: SamplingCase, x: torch.Tensor, parameters: Parameters, out: Sampled) -> None:
    """Raise AssertionError where results are not the definition's."""
    expected = reference.sample(x, parameters)[0].tolist()
    assert out.tokens.tolist() == expected, f"{case}: {out.tokens.tolist()} where {expected} is right"
    if case.logprobs is not None:
        assert_likeliest(x, out, case.spec)
    if out.kept is not None:
        assert_kept(x, parameters, out.kept)


def assert_kept(x: torch.Tensor, parameters: Parameters, kept: Kept) -> None:
    """Raise AssertionError where probabilities by what the filters keep are not the definition's.

    The scale as well: it may differ by little, and no probability then. Greedy rows have none.
    """
    prob, prob_sum = verification_reference.kept_probs(x, parameters)
    normals = torch.where(prob_sum > 0, verification_reference.normals_of(prob_sum), 0).squeeze(1)
    expected = verification_reference.normalized(prob, prob_sum)
    found = probs_by(x, parameters, kept)
    _, greedy = reference.temperatures_of(parameters.temperature, x)
    for row in (~greedy).nonzero().flatten().tolist():
        wrong = (found[row] != expected[row]).nonzero().flatten().tolist()
        assert not wrong, f"row {row}: probabilities of {len(wrong)} tokens, the first {wrong[0]}"
        assert kept.normals[row] == normals[row], f"row {row}: a scale of {kept.normals[row]} where {normals[row]} is"


def probs_by(x: torch.Tensor, parameters: Parameters, kept: Kept) -> torch.Tensor:
    """Probabilities in units of 2**-40, int64 [rows, vocab], of rows that are not greedy, by what the filters keep."""
    x = reference.canonical(x)
    usual, _ = reference.temperatures_of(parameters.temperature, x)
    references, scale = kept.references.unsqueeze(1), reference.scale_of(usual).unsqueeze(1)
    prob = reference.probs(reference.exponents(x, references, scale))
    bits = (x + 0.0).view(torch.int32).long() & 0xFFFFFFFF
    keys = torch.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 1 << 31)
    pivots, ids = kept.pivots.unsqueeze(1), torch.arange(x.shape[1], device=x.device)
    keeps = (keys > pivots) | ((keys == pivots) & (ids >= kept.tie_ids.unsqueeze(1)))
    keeps &= prob >= kept.min_probs.unsqueeze(1)
    return reference.multiply_high(prob * keeps, kept.normals.unsqueeze(1))


def assert_likeliest(x: torch.Tensor, out: Sampled, spec: SamplingSpec) -> None:
    """Raise AssertionError where the likeliest tokens, ranks or values of raw logits are not the definition's."""
    assert spec.logprobs_mode is not None, "the spec asks for them"
    assert out.top_ids is not None, "the spec asks for them"
    assert out.top_logprobs is not None, "the spec asks for them"
    assert out.token_ranks is not None, "the spec asks for them"
    values = reference.raw_values(x, spec.logprobs_mode)
    ids, values, ranks = reference.likeliest(reference.canonical(x), values, out.tokens, out.top_ids.shape[1] - 1)
    assert out.top_ids.tolist() == ids.tolist(), f"{out.top_ids.tolist()} where {ids.tolist()} is right"
    assert out.token_ranks.tolist() == ranks.tolist(), f"{out.token_ranks.tolist()} where {ranks.tolist()} is right"
    torch.testing.assert_close(out.top_logprobs, values, rtol=1e-5, atol=1e-5)


def has_subnormal(x: torch.Tensor) -> bool:
    """Of bfloat16."""
    return x.dtype is BF16 and bool(((x != 0) & (x.abs() < torch.finfo(BF16).tiny)).any())


def unwritten(spec: SamplingSpec, rows: int, device: torch.device) -> Sampled:
    """Buffers of what no kernel writes."""
    return buffers(spec, rows, device).map(lambda tensor: tensor.fill_(UNWRITTEN))


def launch_as_configured(case: SamplingCase, x: torch.Tensor, parameters: Parameters) -> Sampled:
    """Results of the CuTe DSL kernel of the case's config."""
    # Imported here: the rest of this module serves machines without the CuTe DSL.
    from dsl_backend.sampling.cute import host

    out = unwritten(case.spec, len(x), x.device)
    function = host.build(host.key_of(case.spec, case.config, case.k_dtype), targets.detect(x.device))
    function(*args_of(case, host.with_expected_strides(x), parameters, out).tensors)
    return out


def args_of(case: SamplingCase, x: torch.Tensor, parameters: Parameters, out: Sampled) -> SampleArgs:
    """What a launch with all parameters takes, and the case's config."""
    from dsl_backend.sampling.cute import host

    results = {name: tensor for name, tensor in out._asdict().items() if name not in ("logprobs", "kept")}
    kept = {} if out.kept is None else out.kept._asdict()
    args = host.with_scratch(SampleArgs(logits=x, **vars(parameters), **results, **kept), case.spec, case.config)
    if args.pending is not None:
        args.pending.fill_(UNWRITTEN)
        args.block_max.fill_(NAN)
    return args


def row(
    distribution: str = "spread", t: float = 0.8, k: int = 0, p: float = 1.0, m: float = 0.0
) -> tuple[str, float, int, float, float]:
    return distribution, t, k, p, m


# High temperatures make the kept tokens about equally likely: only then does a token depend on the whole mask. Rows are
# repeated because one draw shows little.
FILTERS = (
    *(row(), row(t=0), row(t=3, p=0.9), row(t=9, p=0.5)),
    *4 * (row(t=9, k=5), row(t=5, k=20, p=0.8), row(t=3, m=0.05)),
    *3 * (row(t=5, k=40, p=0.95, m=0.02),),
)
CASES: tuple[SamplingCase, ...] = (
    SamplingCase(id="filters", vocab=600, rows=FILTERS, why="every path, one CTA"),
    SamplingCase(id="filters-2", kind=TWO, vocab=601, rows=FILTERS, why="clusters, an odd row, 16 bits, 32-bit tokens"),
    SamplingCase(id="filters-4", kind=FOUR, vocab=1000, rows=FILTERS, why="ties of bfloat16 over four CTAs", pad=6),
    SamplingCase(
        id="filters-16",
        kind=SIXTEEN,
        vocab=1500,
        rows=(*2 * (row(t=9, k=5), row(t=5, k=20, p=0.8), row(t=3, m=0.05)), row(t=0)),
        why="the largest cluster",
    ),
    SamplingCase(
        id="whole-16", kind=SIXTEEN, vocab=1500, rows=(row(), row(p=0.9)), why="its whole rows, which take a minute"
    ),
    SamplingCase(
        id="narrow-16", kind=SIXTEEN, vocab=6, rows=(row(k=5), row(k=20, p=0.8)), why="most CTAs have no logit"
    ),
    SamplingCase(
        id="blocks",
        vocab=5000,
        rows=(row(), row(t=5), *2 * (row(t=9, p=0.5),), row("few"), row("peaked", t=30, p=0.6), row("inf", p=0.9)),
        why="several blocks for each warp, and a part of one",
    ),
    SamplingCase(
        id="blocks-2",
        kind=TWO,
        vocab=4097,
        rows=(row(t=5), row(t=9, p=0.3), row("masked", t=30, p=0.9), row("equal", p=0.01), row("one")),
        why="blocks over two CTAs, one logit in the last",
    ),
    SamplingCase(
        id="blocks-4",
        kind=FOUR,
        vocab=2050,
        rows=(row(t=5), row(t=9, p=0.3), row("nan", t=30, p=0.9), row("sorted", t=9, k=1500, p=0.5)),
        why="CTAs without a block",
        pad=6,
    ),
    SamplingCase(
        id="small",
        kind=TWO,
        vocab=120,
        rows=4 * (row(t=5), row(t=9, p=0.7), row(t=9, k=3)),
        why="a vocabulary of fewer logits than threads, whole",
    ),
    SamplingCase(
        id="single",
        kind=TWO,
        vocab=1,
        rows=(row(), row("nan"), row("dead"), row("inf", k=1, p=0.0, m=1.0), row(t=0)),
        why="a vocabulary of one",
    ),
    SamplingCase(
        id="many-candidates",
        vocab=400,
        rows=(row("equal", k=5, p=0.5), row("ties", k=30, p=0.7), row("zeros", k=3), row("equal", t=0), row(m=1e-9)),
        why="ties exceed the candidates that fit: rows are read again",
    ),
    SamplingCase(
        id="wide-k",
        kind=FOUR,
        vocab=600,
        rows=(row(k=300), row("ties", k=400, p=0.6), row("sorted", k=599), row("huge", k=300), row("tiny", k=300)),
        why="more than a group each: radix select",
    ),
    SamplingCase(
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
    SamplingCase(
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
        why="parameters that are out of range",
    ),
    SamplingCase(
        id="scales",
        vocab=300,
        rows=(row("huge", k=5), row("tiny", p=0.5), row("steep", k=8, p=0.99), row("tiny", t=1e-4, k=5), row("huge")),
        why="quotients that overflow, and those below the smallest normal number",
    ),
)

# Rows of which a block has fewer lanes with a logit than top-k keeps, so that their maxima bound nothing.
FEW_GROUPS = (
    *4 * (row(t=30, k=20), row(t=30, k=17, p=0.7)),
    *2 * (row(t=30, k=40), row(t=30, k=34, p=0.8), row(t=30, k=30, m=0.3), row("ties", t=30, k=18, p=0.8)),
    *(row(name, t=30, k=19) for name in ("equal", "zeros", "nan", "masked", "inf", "huge", "tiny", "sorted", "steep")),
    *(row("peaked", t=30, k=20), row("few", t=30, k=20), row(t=0, k=20), row(t=30, k=59)),
)
CASES += tuple(
    SamplingCase(id=id, kind=kind, vocab=vocab, rows=rows, why=why)
    for id, kind, vocab, rows, why in (
        ("few-groups", ONE, 60, FEW_GROUPS, "all logits are candidates, whose own bound leaves few"),
        ("few-groups-4", FOUR, 64, FEW_GROUPS, "the same, read by four CTAs, and more candidates than threads"),
        (
            "few-groups-wide",
            ONE,
            600,
            (*3 * (row("masked", t=30, k=20), row("masked", t=30, k=35, p=0.8)),),
            "more logits than candidates fit, and few above -inf",
        ),
        (
            "few-threads",
            (F32, torch.int64, ClusterConfig(cluster=1, threads=256, vector=4)),
            300,
            (*2 * (row(t=9, k=50), row(t=9, k=50, p=0.9)), row(t=9, k=256), row(m=0.05), row("ties", t=9, k=100)),
            "a short vocabulary's own configuration",
        ),
    )
)

# Few finite logits, none, more ties than candidates fit, infinite ones, NaN: with and without a filter.
LIKELIEST = (
    *(
        row(),
        row(t=1),
        row(t=1, p=0.3),
        row(t=5),
        row(t=3, p=0.5),
        row(t=9, k=5),
        row(t=0),
        row(t=3, m=0.3),
        row("spread", t=30, k=400),
    ),
    *(row(name, t=5) for name in ("ties", "equal", "few", "dead", "nan", "inf", "masked")),
    *(
        row("few", k=2),
        row("equal", t=0),
        row("equal", t=2, k=3),
        row("zeros", m=0.1),
        row("inf", k=3),
        row("few", t=0),
    ),
)
CASES += (
    SamplingCase(
        id="likeliest",
        vocab=1100,
        rows=LIKELIEST,
        logprobs=(LogprobsMode.RAW_LOGPROBS, 7),
        why="the likeliest tokens and ranks, one CTA",
    ),
    SamplingCase(
        id="likeliest-2",
        kind=TWO,
        vocab=601,
        rows=LIKELIEST,
        logprobs=(LogprobsMode.RAW_LOGPROBS, 20),
        why="the same of two CTAs, in 16 bits",
    ),
    SamplingCase(
        id="likeliest-4",
        kind=FOUR,
        vocab=2050,
        pad=6,
        rows=LIKELIEST,
        logprobs=(LogprobsMode.RAW_LOGITS, 50),
        why="raw logits, more of them than CTAs with a block",
    ),
    SamplingCase(
        id="rank-alone",
        kind=TWO,
        vocab=3,
        rows=LIKELIEST,
        logprobs=(LogprobsMode.RAW_LOGPROBS, 0),
        why="only the token's own, and three logits",
    ),
)
# Rows of which top-p removes the first token often, with greedy ones, ones without a filter and odd ones beside them.
TOP_P = (
    *3 * (row(t=9, p=0.5), row(t=3, p=0.9), row(p=0.3), row("peaked", t=30, p=0.2), row("ties", t=9, p=0.4)),
    # Of three tokens: how much the drawn one has decides whether it is kept.
    *6 * (row("few", t=9, p=0.5),),
    *(row(name, t=9, p=0.3) for name in ("equal", "zeros", "nan", "all-nan", "dead", "few", "one", "inf", "huge")),
    *(row(name, t=2, p=0.5) for name in ("tiny", "steep", "sorted", "masked")),
    *(row(), row(t=0), row(t=0, p=0.1), row(p=0.0), row(t=5, p=1e-6)),
)
CASES += tuple(
    SamplingCase(id=id, kind=kind, vocab=vocab, rows=TOP_P, pad=pad, why=why)
    for id, kind, vocab, pad, why in (
        ("bounded", BOUNDED, 5000, 0, "lanes' bounds of several blocks"),
        ("finished", FINISHED, 5000, 8, "rows that a second launch draws again, with lanes' bounds"),
        ("finished-2", FINISHED_TWO, 3001, 0, "the same of two CTAs, in 16 bits, with a part of a block"),
        ("finished-narrow", FINISHED, 8, 0, "a vocabulary that only one CTA of the second launch has"),
    )
)
# Of which what the filters keep is returned: by the list of candidates, and by passes over the row. More ties than such
# a list holds, where top-p or top-k ends; sums by blocks above the limit and below; the largest range of logits.
KEPT = (
    *(row(), row(t=0, p=0.5), row(t=3, p=0.9), row(t=9, p=0.5), row(t=9, k=5), row(t=5, k=20, p=0.8), row(t=3, m=0.05)),
    *(row(t=5, k=40, p=0.95, m=0.02), row(t=30, m=0.2, p=0.7), row(k=1), row(p=0.0), row(t=30, k=400, p=0.9, m=1e-3)),
    *(row(name, t=9, p=0.6) for name in ("ties", "equal", "zeros", "nan", "all-nan", "dead", "few", "one", "inf")),
    *(row(name, t=9, k=7, p=0.6) for name in ("ties", "equal", "zeros", "nan", "dead", "few", "masked", "inf")),
    *(row(name, t=2, p=0.9) for name in ("huge", "tiny", "steep", "sorted", "peaked", "masked")),
    *(row(t=t, p=p) for t, p in ((INF, 0.5), (1e-4, 0.9), (3, 1 - 2**-24), (30, 1 - 2**-20), (9, 1e-6))),
    *2 * (row("apart", t=1, p=1 - 2**-24), row(t=1, k=9, p=0.9)),
    *(row("ties", t=30, k=350, p=0.5), row("equal", t=1, k=30, p=1e-3), row("ties", t=3, m=0.01, p=0.95)),
)
CASES += tuple(
    SamplingCase(id=id, kind=kind, vocab=vocab, rows=KEPT, pad=pad, kept=True, why=why)
    for id, kind, vocab, pad, why in (
        ("kept", ONE, 600, 0, "what the filters keep"),
        ("kept-2", TWO, 1301, 0, "the same of two CTAs, in 16 bits, with a part of a block"),
        ("kept-4", FOUR, 1000, 6, "more ties than candidates, over four CTAs of which some have no block"),
        ("kept-bounded", BOUNDED, 3000, 0, "several blocks for each warp, in the place of lanes' bounds"),
        ("kept-small", TWO, 3, 0, "a vocabulary of three"),
    )
)
# Without filters, what their probabilities are normalized with.
WHOLE = (
    *(row(), row(t=0), row("apart", t=1), *(row(t=t) for t in (INF, 30, 1e-4, 1e-5, NAN))),
    *(row(name, t=t) for name in DISTRIBUTIONS[1:] for t in (1, 9)),
)
CASES += tuple(
    SamplingCase(id=id, kind=kind, vocab=vocab, rows=WHOLE, pad=pad, kept=True, why=why)
    for id, kind, vocab, pad, why in (
        ("kept-whole", ONE, 1100, 0, "rows without filters, the last block in part"),
        ("kept-whole-4", FOUR, 1600, 6, "the same of four CTAs, in 16 bits"),
    )
)
CASES += (
    SamplingCase(
        id="kept-16",
        kind=SIXTEEN,
        vocab=1500,
        rows=(row(t=5, k=20, p=0.8), row(t=9, p=0.5), row("equal", t=9, k=7, p=0.6), row("dead", k=3)),
        kept=True,
        why="the largest cluster, most of whose CTAs have no logit",
    ),
)

WIDE = tuple(
    SamplingCase(id=id, kind=kind, vocab=vocab, rows=FILTERS, why=why)
    for id, kind, vocab, why in (
        ("vocabulary", ONE, 128_256, "a vocabulary"),
        ("vocabulary-16-bits", FOUR, 151_936, "one of bfloat16"),
        ("vocabulary-odd", TWO, 50_257, "one that no vector divides"),
        ("vocabulary-shared", SIXTEEN, 262_144, "the widest, over the largest cluster"),
    )
)


def random_case(seed: int, widest: int = 800, top_p_alone: bool = False) -> SamplingCase:
    """A problem of any kind, or with top-p and no other filter; the same for the same seed."""
    draw = random.Random(seed)
    # Sixteen CTAs run slowly, so they are not among the first cases, which every change is tested with.
    kind = KINDS[seed % 3] if seed < FEW else KINDS[seed % len(KINDS)]
    kind = TOP_P_KINDS[seed % len(TOP_P_KINDS)] if top_p_alone else kind
    vector = kind[2].vector
    vocab = vector * draw.choice((draw.randint(1, 20), draw.randint(1, widest // vector)))

    def any_row() -> tuple[str, float, int, float, float]:
        distribution = draw.choice(DISTRIBUTIONS) if draw.random() < 0.5 else "spread"
        drawn = row(
            distribution,
            t=draw.choice((0.0, 1.0, 0.5, 3.0, 10.0, 30.0)),
            k=0
            if top_p_alone
            else draw.choice((0, 0, draw.randint(1, 10), draw.randint(1, 80), draw.randint(1, vocab))),
            p=draw.choice((1.0, 1.0, 0.9, 0.999, draw.random(), draw.random() ** 4)),
            m=draw.choice((0.0, 0.0, draw.random() ** 3)),
        )
        name, temperature, _, top_p, _ = drawn
        return (name, temperature, 0, top_p, 0.0) if top_p_alone else drawn

    # Each kind with log-probabilities is another kernel to compile.
    asks = seed >= FEW and seed % 3 == 0 and not top_p_alone
    return SamplingCase(
        id=f"fuzz-{seed}",
        why="unforeseen combinations",
        kind=kind,
        vocab=vocab,
        rows=tuple(any_row() for _ in range(draw.randint(1, 3))),
        pad=vector * draw.choice((0, 3)),
        logprobs=(LogprobsMode.RAW_LOGPROBS, draw.randint(0, min(vocab, 40))) if asks else None,
        seed=seed,
    )
