# SPDX-License-Identifier: Apache-2.0
"""The sampler's definition: vLLM's masks, known random numbers, weights that are what they say, fair draws."""

import math

import pytest
import torch

from dsl_backend.sampling import fixed_point, reference
from dsl_backend.sampling.spec import Parameters
from tests.sampling.distribution import (
    ALONG,
    BLOCKS_VOCAB,
    BY_BLOCKS,
    SETTINGS,
    assert_fair,
    logits,
    setting,
)


def parameters(rows: int, **values: torch.Tensor | None) -> Parameters:
    ids = torch.arange(rows)
    return Parameters(**{"seeds": ids, "positions": ids, **values})


def random_logits(kind: str, rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(rows, vocab, generator=generator) * 3
    return {
        "spread": x,
        "ties": x.round(),
        "bf16": x.bfloat16().float(),
        "equal": x * 0,
        "infinite": x.where(x > 0, -torch.inf),
    }[kind]


# Philox 4x32-10 of Random123's known answers: counter and key all zeros give 6627e8d5 e169c58d; the counter here has a
# stream in its third word, so that the first is checked with the stream taken out.
def test_philox_known_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_point, "PHILOX_STREAM", 0)
    zero = torch.zeros(1, dtype=torch.int64)
    assert reference.philox(zero, zero).item() == (0x6627E8D5 >> 1 << 31) | (0xE169C58D >> 1)
    monkeypatch.setattr(fixed_point, "PHILOX_STREAM", 0x13198A2E)
    # Counter 243f6a88 85a308d3 13198a2e 03707344 differs in its last word, which is always 0 here; both halves of seed
    # and position must matter.
    ones = torch.full((1,), -1)
    answers = {reference.philox(a, b).item() for a in (zero, ones, ones << 32) for b in (zero, ones, ones << 32)}
    assert len(answers) == 9
    assert all(0 <= answer < 1 << 62 for answer in answers)


def test_multiply_high_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(0, 1 << 62, (2000,), generator=generator)
    b = torch.randint(0, 1 << 62, (2000,), generator=generator) >> torch.randint(0, 40, (2000,), generator=generator)
    a[0], b[0] = (1 << 62) - 1, (1 << 62) - 1
    found = reference.multiply_high(a, b).tolist()
    assert found == [x * y >> 62 for x, y in zip(a.tolist(), b.tolist(), strict=True)]


def test_weights_are_exponentials() -> None:
    """All multiples of 2**-23, and exponents up to the largest."""
    generator = torch.Generator().manual_seed(0)
    one = 1 << 23
    random = torch.rand(100_000, dtype=torch.float64, generator=generator) * fixed_point.MAX_EXPONENT
    exponent = torch.cat([torch.arange(one).double() / one, random])
    exact = (-exponent).exp2()
    for weights, bits in ((reference.masses, fixed_point.MANTISSA_BITS), (reference.probs, fixed_point.PROB_BITS)):
        found = weights(exponent)
        assert found[0] == 1 << bits
        assert weights(torch.tensor([fixed_point.MAX_EXPONENT], dtype=torch.float64)) == 0
        assert ((found - exact * 2.0**bits).abs() <= 1 + 2e-7 * exact * 2.0**bits).all()


def test_weights_never_grow_with_the_exponent() -> None:
    """Over multiples of 2**-23, and the seam between two powers of two at 1/2."""
    one = 1 << 23
    exponent = torch.arange(int(0.45 * one), int(1.55 * one)).double() / one
    assert (reference.masses(exponent).diff() <= 0).all()
    assert (reference.probs(exponent).diff() <= 0).all()


def test_scales_are_correctly_rounded() -> None:
    """As kernels divide. A quotient of two float32 in float64 is never rounded wrong twice (Figueroa, 1995)."""
    temperature = torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 3 + 0.01
    exact = fixed_point.EXPONENT_SCALE / temperature.double()
    assert torch.equal(reference.scale_of(temperature), exact.float())


@pytest.mark.parametrize("temperature", [1e-4, 0.3, 1.0, 1.7, 1e4])
def test_exponents_are_differences_over_the_temperature(temperature: float) -> None:
    """To 1.4e-7 for each power of two."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * 10 * temperature
    exact = (x.max().double() - x.double()) / torch.tensor(temperature).double() / math.log(2)
    scale = reference.scale_of(torch.tensor(temperature))
    found = reference.exponents(x, x.max(), scale)
    assert ((found - exact).abs() <= 1.4e-7 / math.log(2) * exact)[exact < 60].all()
    # Logits that are no numbers, none, and beyond the reference.
    odd = torch.tensor([float("nan"), float("-inf"), float("inf"), 1.0])
    assert reference.exponents(odd, torch.tensor(1.0), scale).tolist() == [62, 62, 0, 0]


@pytest.mark.parametrize("vocab", [1, 1000, 1024, 5000])
def test_blocks_and_the_row_have_the_same_sums(vocab: int) -> None:
    """Prefix sums by blocks are those relative to the row's maximum, to a part of the row's sum."""
    x = torch.randn(20, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    rows = reference.rows_of(x, parameters(20))
    assert (rows.prefix.diff() >= 0).all()
    exact = rows.prob.cumsum(-1)
    assert ((rows.prefix - exact).abs() <= 1e-6 * exact[:, -1:]).all()


@pytest.mark.parametrize("kind", ["spread", "ties", "bf16", "infinite"])
@pytest.mark.parametrize("vocab", [1, 2, 7, 100, 3000])
@pytest.mark.parametrize("use", ["k", "p", "kp", "m", "mkp"])
def test_masks_are_those_of_vllm(kind: str, vocab: int, use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sort is free to order ties as it likes; a stable one is what the definition says."""
    ops = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    rows = 64
    generator = torch.Generator().manual_seed(vocab)
    x = random_logits(kind, rows, vocab, generator)
    if kind == "infinite":
        x[:, 0] = 1.0  # a row of nothing else has no mask
    k = torch.randint(1, vocab + 1, (rows,), generator=generator)
    k[:8] = torch.arange(1, 9).clamp(max=vocab)
    p = torch.rand(rows, generator=generator) * 0.999 + 1e-4
    p[8:16] = torch.tensor([1e-12, 1e-3, 0.25, 0.5, 0.75, 0.9, 0.99, 0.9999])
    min_p = torch.rand(rows, generator=generator) ** 3
    use_k, use_p = (k if "k" in use else None), (p if "p" in use else None)
    # In float64, so that its sums and its softmax do not round the mask away from the real one.
    exact = x.double()
    if "m" in use:
        chance = exact.softmax(-1)
        exact = exact.masked_fill(chance < chance.amax(-1, keepdim=True) * min_p.double().unsqueeze(1), -torch.inf)
    sort = torch.Tensor.sort
    with monkeypatch.context() as stable:
        stable.setattr(torch.Tensor, "sort", lambda tensor, **options: sort(tensor, stable=True, **options))
        expected = ops.apply_top_k_top_p_pytorch(exact, use_k, use_p).isfinite()
    rows_of = parameters(rows, top_k=use_k, top_p=use_p, min_p=min_p if "m" in use else None)
    found = reference.filter_mask(x, rows_of) & x.isfinite()
    assert torch.equal(found, expected)


def test_min_p_is_that_of_vllm_at_round_values() -> None:
    """One half of the largest is kept, the next lower is not."""
    x = torch.tensor([[0.0, -0.6931471, -0.6931475, -5.0]])
    keep = reference.filter_mask(x, parameters(1, min_p=torch.tensor([0.5])))
    assert keep.tolist() == [[True, True, False, False]]


def repeated(found: reference.Rows, rows: torch.Tensor) -> reference.Rows:
    """One row, as often as there are rows."""
    return reference.Rows(*(tensor.expand(len(rows), -1) for tensor in found))


DRAWS = [pytest.param(200_000, id="200k"), pytest.param(5_000_000, id="5M", marks=pytest.mark.full)]


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("along", ALONG)
def test_draws_have_the_exact_distribution(name: str, draws: int, along: str) -> None:
    """Of one row, by as many seeds or as many positions of one seed."""
    one = setting(name, 1, along, 0, torch.device("cpu"))
    # Weights do not depend on the seed: they are found once.
    found = reference.rows_of(logits(), one)
    assert_fair(name, along, draws, one.seeds.device, lambda rows, drawn: reference.draw(repeated(found, rows), drawn))


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("name", BY_BLOCKS)
def test_draws_from_several_blocks_have_the_exact_distribution(name: str, draws: int) -> None:
    """Of a row of three blocks, of which the last is not full."""
    found = reference.rows_of(logits(BLOCKS_VOCAB), setting(name, 1, "seeds", 0, torch.device("cpu")))
    assert_fair(
        name,
        "seeds",
        draws,
        found.x.device,
        lambda rows, drawn: reference.draw(repeated(found, rows), drawn),
        BLOCKS_VOCAB,
    )


@pytest.mark.parametrize(
    ("draws", "share"),
    [pytest.param(200_000, 0.01, id="200k"), pytest.param(5_000_000, 0.002, id="5M", marks=pytest.mark.full)],
)
def test_a_biased_block_is_found(draws: int, share: float) -> None:
    """The first block has that share of all tokens too many."""
    one = setting("all", 1, "seeds", 0, torch.device("cpu"))
    found = reference.rows_of(logits(BLOCKS_VOCAB), one)
    sums = found.prefix[:, fixed_point.BLOCK - 1 :: fixed_point.BLOCK][0]
    more = (found.prefix[0, -1] * share).long()
    first = torch.arange(BLOCKS_VOCAB) < fixed_point.BLOCK
    inside = (found.prefix.double() * (1 + more / sums[0])).long()
    biased = found._replace(prefix=torch.where(first, inside, found.prefix + more))
    with pytest.raises(AssertionError):
        assert_fair(
            "all",
            "seeds",
            draws,
            found.x.device,
            lambda rows, drawn: reference.draw(repeated(biased, rows), drawn),
            BLOCKS_VOCAB,
        )


def test_probabilities_are_float64() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0]])
    found = reference.probabilities(x, parameters(1, temperature=torch.tensor([2.0])))
    assert found.dtype == torch.float64
    assert torch.allclose(found, (x.double() / 2).softmax(-1), rtol=1e-15)


def fewer_of_the_likeliest(share: float, chance: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A share of all draws, taken from the likeliest token, is that of one with a chance of about one in a hundred."""
    likeliest, other = chance.argmax(), (chance - 0.01).abs().argmin()
    moved = torch.rand(len(tokens), generator=torch.Generator().manual_seed(1)) < share / chance[likeliest]
    return torch.where((tokens == likeliest) & moved, other, tokens)


@pytest.mark.parametrize(
    ("draws", "share"),
    [pytest.param(200_000, 0.01, id="200k"), pytest.param(5_000_000, 0.001, id="5M", marks=pytest.mark.full)],
)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_bias_of_a_thousandth_is_found(name: str, draws: int, share: float) -> None:
    """Of five million draws with each filter; where nothing is wrong the same number is fair (above)."""
    one = setting(name, 1, "seeds", 0, torch.device("cpu"))
    found, chance = reference.rows_of(logits(), one), reference.probabilities(logits(), one)[0]

    def biased(rows: torch.Tensor, drawn: Parameters) -> torch.Tensor:
        return fewer_of_the_likeliest(share, chance, reference.draw(repeated(found, rows), drawn))

    with pytest.raises(AssertionError):
        assert_fair(name, "seeds", draws, one.seeds.device, biased)


@pytest.mark.parametrize("name", SETTINGS)
def test_random_numbers_that_are_a_hundredth_too_small_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = reference.multiply_high
    monkeypatch.setattr(reference, "multiply_high", lambda bits, total: (multiply(bits, total) * 0.99).long())
    found = reference.rows_of(logits(), setting(name, 1, "seeds", 0, torch.device("cpu")))
    with pytest.raises(AssertionError):
        assert_fair(
            name, "seeds", 200_000, logits().device, lambda rows, drawn: reference.draw(repeated(found, rows), drawn)
        )
