# SPDX-License-Identifier: Apache-2.0
"""The sampler's definition in eager torch, and the exact probabilities in float64 to test it with.

For each row, in the order of vLLM's own sampler; x is a logit in float32, NaN as -inf:

1. the probabilities before normalization, in fixed point (fixed_point.py);
2. min-p keeps probabilities of at least min_p times the largest;
3. top-k keeps x of at least the k-th largest, so also all ties with it;
4. top-p keeps of these a token, while the sum of the likelier ones is below p of the sum of all: below the sum less
   floor((1 - p) * sum). Of equal x the higher id is the likelier, as a stable ascending sort has them. The likeliest
   token stays;
5. the token is the first id at which the prefix sum of the probabilities that min-p and top-k keep exceeds
   floor(U * sum / 2**62), where U are the 62 random bits of (seed, position, 0). Where top-p removes it, the token is
   drawn again from those that are likelier than it, with the bits of (seed, position, 1), and so on. Each draw has the
   right distribution among the tokens that top-p keeps, so the accepted one has it too.

A row without min-p and top-k is summed by blocks, for the sum of 4 and for the first draw of 5. All else is relative to
the row's maximum. A greedy row gets the largest logit, the lowest id of ties. A row without a logit above -inf gets
token 0.

The likeliest tokens are ordered by x, or by processed log-probabilities; of equal ones the lower id comes first. A
token's rank is the number of tokens that are at least as likely.
"""

from typing import NamedTuple

import torch

from dsl_backend.runtime.target import Target
from dsl_backend.sampling import fixed_point
from dsl_backend.sampling.spec import LogprobsMode, Parameters, Sampled, SamplingSpec

LOW_31 = (1 << 31) - 1
LOW_32 = (1 << 32) - 1


def philox(seeds: torch.Tensor, positions: torch.Tensor, round_idx: int = 0) -> torch.Tensor:
    """62 random bits for each (seed, position), int64."""
    counter = [
        positions & LOW_32,
        (positions >> 32) & LOW_32,
        torch.full_like(seeds, fixed_point.PHILOX_STREAM),
        torch.full_like(seeds, round_idx),
    ]
    key = [seeds & LOW_32, (seeds >> 32) & LOW_32]

    def multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """High and low word of a product, which does not fit int64."""
        low = a * (b & 0xFFFF)
        high = a * (b >> 16) + (low >> 16)
        return high >> 16, ((high << 16) | (low & 0xFFFF)) & LOW_32

    for _ in range(fixed_point.PHILOX_ROUNDS):
        high0, low0 = multiply(fixed_point.PHILOX_MULTIPLIERS[0], counter[0])
        high1, low1 = multiply(fixed_point.PHILOX_MULTIPLIERS[1], counter[2])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(word + step) & LOW_32 for word, step in zip(key, fixed_point.PHILOX_INCREMENTS, strict=True)]
    return (counter[0] >> 1 << 31) | (counter[1] >> 1)


def multiply_high(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """floor(a * b / 2**62) of two numbers up to 2**62, not both of them 2**62."""
    a1, a0, b1, b0 = a >> 31, a & LOW_31, b >> 31, b & LOW_31
    return a1 * b1 + ((a1 * b0 + a0 * b1 + (a0 * b0 >> 31)) >> 31)


# --- fixed point ---


def scale_of(temperature: torch.Tensor) -> torch.Tensor:
    """What differences of logits are multiplied by, float32, correctly rounded."""
    usual = temperature.clamp(max=fixed_point.MAX_TEMPERATURE)
    # A number over a tensor is a reciprocal and a product in torch, each of them rounded.
    return torch.full_like(usual, fixed_point.EXPONENT_SCALE) / usual


def exponents(x: torch.Tensor, reference: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """How far x is below a reference, float64; all three broadcast. No infinite reference but -inf."""
    # The product of two float32 is exact in float64.
    exponent = (reference - x).double() * scale.double()
    return torch.fmin(exponent, exponent.new_tensor(fixed_point.MAX_EXPONENT)).clamp(min=0.0)


def fma(a: torch.Tensor, b: torch.Tensor, c: float) -> torch.Tensor:
    """A * b + c of float64 that are float32, rounded once to float32."""
    product = a * b  # exact
    total = product + c
    # Where float64 has rounded the sum to the middle of two float32, its error says which one is nearer.
    middle = (total.view(torch.int64) & (1 << 29) - 1) == 1 << 28
    if middle.any():
        part = total - product
        error = (product - (total - part)) + (c - part)
        beside = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf).to(total))
        total = torch.where(middle & (error != 0), beside, total)
    return total.float().double()


def powers(exponent: torch.Tensor) -> torch.Tensor:
    """2**-exponent: float64 that are float32."""
    n = -exponent.round()
    f = (-exponent - n).float().double()
    h = torch.full_like(f, fixed_point.EXP2_COEFFICIENTS[-1])
    for coefficient in fixed_point.EXP2_COEFFICIENTS[-2::-1]:
        h = fma(f, h, coefficient)
    return h / (1 << -n.long())


def masses(exponent: torch.Tensor) -> torch.Tensor:
    """The probabilities at exponents before normalization: int64, 2**29 at 0."""
    return (powers(exponent) * float(1 << fixed_point.MANTISSA_BITS)).long()


def probs(exponent: torch.Tensor) -> torch.Tensor:
    """The probabilities at exponents before normalization: int64, 2**40 at 0."""
    return (powers(exponent) * float(1 << fixed_point.PROB_BITS)).long()


def weighted(mass_sum: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """floor(mass_sum * weight / 2**29): a block's sum of masses in the row, in units of 2**-40."""
    return multiply_high(mass_sum << 11, weight << (62 - fixed_point.MANTISSA_BITS - 11))


# --- filters ---


def canonical(logits: torch.Tensor) -> torch.Tensor:
    """The logits in float32, NaN as -inf."""
    x = logits.float()
    return torch.where(x.isnan(), float("-inf"), x)


def is_greedy(temperature: torch.Tensor) -> torch.Tensor:
    return ~(temperature >= fixed_point.GREEDY_TEMPERATURE)


def temperatures_of(given: torch.Tensor | None, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """([rows] temperatures, 1 of greedy rows and where none are given; whether rows are greedy)."""
    temperature = torch.ones(len(rows), device=rows.device) if given is None else given
    greedy = is_greedy(temperature)
    return torch.where(greedy, 1.0, temperature), greedy


class Rows(NamedTuple):
    """What tokens are drawn from; tensors [rows, vocab].

    Attributes:
        x: float32, the logits.
        prob: int64, in units of 2**-40, 0 where min-p or top-k removes a token.
        prefix: int64, the prefix sums of the first draw.
        kept: bool, by all filters.
    """

    x: torch.Tensor
    prob: torch.Tensor
    prefix: torch.Tensor
    kept: torch.Tensor


def block_prefix(x: torch.Tensor, row_max: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] int64: prefix sums by blocks. row_max and scale: [rows, 1]."""
    rows, vocab = x.shape
    width = min(fixed_point.BLOCK, vocab)
    blocks = torch.nn.functional.pad(x, (0, -vocab % width), value=float("-inf")).view(rows, -1, width)
    block_max = blocks.amax(-1).clamp(max=fixed_point.MAX_LOGIT)
    mass = masses(exponents(blocks, block_max.unsqueeze(-1), scale.unsqueeze(-1)))
    weight = probs(exponents(block_max, row_max, scale))
    prefix = weighted(mass.cumsum(-1), weight.unsqueeze(-1))
    block_sum = prefix[..., -1]
    return (prefix + (block_sum.cumsum(-1) - block_sum).unsqueeze(-1)).flatten(1)[:, :vocab]


def top_p_mask(x: torch.Tensor, prob: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] bool: what top-p keeps. total: [rows, 1], the sum of which 1 - p is removed."""
    top_p = top_p.unsqueeze(1)
    complement = ((1 - top_p.clamp(0, 1)) * 2.0**fixed_point.TOP_P_BITS).long()
    budget = (total >> 31) * complement + ((total & LOW_31) * complement >> 31)
    # From the likeliest on; of equal ones the highest id first.
    order = x.shape[1] - 1 - x.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    sorted_prob = prob.gather(1, order)
    likelier = torch.empty_like(prob).scatter(1, order, sorted_prob.cumsum(-1) - sorted_prob)
    return (likelier < total - torch.minimum(budget, total - 1)) | ~(top_p < 1)


def rows_of(logits: torch.Tensor, parameters: Parameters) -> Rows:
    """The rows with the filters applied. Those of greedy rows are off."""
    x, vocab = canonical(logits), logits.shape[1]
    temperature, greedy = temperatures_of(parameters.temperature, x)
    scale = scale_of(temperature).unsqueeze(1)
    row_max = x.amax(-1, keepdim=True).clamp(max=fixed_point.MAX_LOGIT)
    prob = probs(exponents(x, row_max, scale))
    allowed = torch.ones_like(x, dtype=torch.bool)
    by_block = allowed[:, :1].clone()
    if parameters.min_p is not None:
        min_p = torch.where(greedy, 0.0, parameters.min_p).nan_to_num(0.0).clamp(0, 1)
        min_prob = (min_p * 2.0**fixed_point.PROB_BITS).long().unsqueeze(1)
        allowed &= prob >= min_prob
        by_block &= min_prob == 0
    if parameters.top_k is not None:
        k = parameters.top_k.long()
        has_top_k = (k > 0) & (k < vocab) & ~greedy
        index = torch.where(has_top_k, k, vocab) - 1
        allowed &= x >= x.sort(dim=-1, descending=True).values.gather(1, index.unsqueeze(1))
        by_block &= ~has_top_k.unsqueeze(1)
    prob = prob * allowed
    prefix = torch.where(by_block, block_prefix(x, row_max, scale), prob.cumsum(-1))
    kept = allowed
    if parameters.top_p is not None:
        top_p = torch.where(greedy, 1.0, parameters.top_p)
        kept = allowed & top_p_mask(x, prob, prefix[:, -1:], top_p)
    return Rows(x, prob, prefix, kept)


def filter_mask(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """[rows, vocab] bool: the tokens that all filters keep."""
    return rows_of(logits, parameters).kept


# --- draws ---


def search(prefix: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """[rows]: the first index at which the prefix sum exceeds the bits' share of the sum; 0 where that is 0."""
    total = prefix[:, -1]
    return (prefix <= multiply_high(bits, total).unsqueeze(1)).sum(-1) * (total > 0)


def draw(rows: Rows, parameters: Parameters) -> torch.Tensor:
    """Tokens drawn by the probabilities. Token 0 for a row of zeros."""
    seeds, positions = parameters.seeds, parameters.positions
    tokens = search(rows.prefix, philox(seeds, positions))
    ids = torch.arange(rows.x.shape[1], device=tokens.device)
    round_idx = 0
    while len(again := (~rows.kept.gather(1, tokens.unsqueeze(1)).squeeze(1) & (rows.prefix[:, -1] > 0)).nonzero()):
        again, round_idx = again.squeeze(1), round_idx + 1
        x, removed = rows.x[again], tokens[again].unsqueeze(1)
        bound = x.gather(1, removed)
        likelier = (x > bound) | ((x == bound) & (ids > removed))
        bits = philox(seeds[again], positions[again], round_idx)
        tokens[again] = search((rows.prob[again] * likelier).cumsum(-1), bits)
    return tokens


def sample(logits: torch.Tensor, parameters: Parameters) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rows] int64 and log-probabilities [rows, vocab] float32."""
    rows = rows_of(logits, parameters)
    tokens = draw(rows, parameters)
    if parameters.temperature is not None:
        tokens = torch.where(is_greedy(parameters.temperature), rows.x.argmax(-1), tokens)
    empty = rows.x.amax(-1) == float("-inf")
    return torch.where(empty, 0, tokens), log_probabilities(scaled_logits(rows.x, parameters.temperature), rows.kept)


def scaled_logits(x: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """The logits over the temperature, which is 1 for greedy rows; NaN as -inf."""
    if temperature is None:
        return x
    z = x / torch.where(is_greedy(temperature), 1.0, temperature).unsqueeze(1)
    return torch.where(z.isnan(), float("-inf"), z)


def log_probabilities(z: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """The log-softmax of the kept tokens, in z's dtype. -inf for masked tokens, and for all of an empty row."""
    row_max = z.amax(-1, keepdim=True)
    below_max = torch.where(z == row_max, torch.zeros_like(z), z - row_max)
    below_max = torch.where(keep & (row_max > float("-inf")), below_max, float("-inf"))
    row_sum = below_max.exp().sum(-1, keepdim=True)
    return torch.where(row_sum > 0, below_max - row_sum.log(), float("-inf"))


def probabilities(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """[rows, vocab] float64: the exact probability of each token, with the definition's mask."""
    rows = rows_of(logits, parameters)
    return log_probabilities(scaled_logits(rows.x.double(), parameters.temperature), rows.kept).exp()


def raw_values(logits: torch.Tensor, mode: LogprobsMode) -> torch.Tensor:
    """[rows, vocab] float32: the logits, NaN as -inf, or their log-softmax."""
    x = canonical(logits)
    if mode is LogprobsMode.RAW_LOGITS:
        return x
    return log_probabilities(x, torch.ones_like(x, dtype=torch.bool))


def likeliest(
    order: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [rows, 1 + count] of the tokens and of the likeliest ones, their values, the tokens' ranks [rows]).

    Args:
        order: [rows, vocab], larger for likelier tokens. Equal ones are ordered by id.
    """
    chosen = tokens.long().unsqueeze(1)
    ids = torch.cat([chosen, order.sort(dim=-1, descending=True, stable=True).indices[:, :count]], 1)
    return ids, values.gather(1, ids), (order >= order.gather(1, chosen)).sum(-1)


class ReferenceSampler:
    """The definition as a kernel, for CPUs."""

    returns_kept = False

    def __init__(self, spec: SamplingSpec, target: Target, max_rows: int, device: torch.device) -> None:
        self.spec = spec

    def launch(self, logits: torch.Tensor, parameters: Parameters, out: Sampled) -> None:
        tokens, logprobs = sample(logits, parameters)
        out.tokens.copy_(tokens)
        if out.logprobs is not None:
            out.logprobs.copy_(logprobs)
        mode = self.spec.logprobs_mode
        if mode is None:
            return
        assert out.top_ids is not None, "logprobs_mode asks for them"
        assert out.top_logprobs is not None, "logprobs_mode asks for them"
        assert out.token_ranks is not None, "logprobs_mode asks for them"
        processed = mode is LogprobsMode.PROCESSED_LOGPROBS
        order = logprobs if processed else canonical(logits)
        values = logprobs if processed else raw_values(logits, mode)
        results = likeliest(order, values, tokens, out.top_ids.shape[1] - 1)
        for tensor, value in zip((out.top_ids, out.top_logprobs, out.token_ranks), results, strict=True):
            tensor.copy_(value)
