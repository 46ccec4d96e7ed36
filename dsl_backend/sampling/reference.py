# SPDX-License-Identifier: Apache-2.0
"""The sampler's definition in eager torch, and the exact probabilities in float64 to test it with.

For each row, in the order of vLLM's own sampler:

1. z: logits in float32, NaN as -inf, divided by the temperature with correct rounding, negative zero as zero;
2. the probabilities before normalization, in fixed point (fixed_point.py);
3. min-p keeps probabilities of at least min_p times the largest;
4. top-k keeps z of at least the k-th largest, so also all ties with it;
5. top-p removes kept tokens, the least likely first, while the sum of the removed probabilities is at most (1 - p)
   times the sum of the kept ones. Of equal distances it removes the lowest id first, as a stable ascending sort does.
   The last token stays;
6. the token is the first id at which the prefix sum of kept probabilities exceeds floor(U * sum / 2**62), where U are
   the 62 random bits of (seed, position).

A greedy row gets the largest logit, the lowest id of ties. A row without a logit above -inf gets token 0.
"""

import torch

from dsl_backend.runtime.target import Target
from dsl_backend.sampling import fixed_point
from dsl_backend.sampling.spec import Parameters, Sampled, SamplingSpec

LOW_31 = (1 << 31) - 1
LOW_32 = (1 << 32) - 1


def philox(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """62 random bits for each (seed, position), int64."""
    counter = [
        positions & LOW_32,
        (positions >> 32) & LOW_32,
        torch.full_like(seeds, fixed_point.PHILOX_STREAM),
        seeds * 0,
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


def multiply_high(bits: torch.Tensor, prob_sum: torch.Tensor) -> torch.Tensor:
    """floor(bits * prob_sum / 2**62) of two numbers below 2**62."""
    b1, b0, t1, t0 = bits >> 31, bits & LOW_31, prob_sum >> 31, prob_sum & LOW_31
    return b1 * t1 + ((b1 * t0 + b0 * t1 + (b0 * t0 >> 31)) >> 31)


def distances(z: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] int64: the distance of each z from its row's maximum, in fixed point."""
    row_max = z.amax(dim=-1, keepdim=True)
    below_max = torch.where(z == row_max, torch.zeros_like(z), row_max - z).clamp(max=fixed_point.MAX_DISTANCE)
    return (below_max * 2.0**fixed_point.DISTANCE_BITS).long()


def fixed_point_probs(distance: torch.Tensor) -> torch.Tensor:
    """The probabilities at distances before normalization: int64, 2**40 at distance 0."""
    t = (distance * fixed_point.LOG2_E) >> 32
    fraction = (t & ((1 << fixed_point.FRACTION_BITS) - 1)) << (32 - fixed_point.FRACTION_BITS)
    h = torch.full_like(distance, fixed_point.EXP2_COEFFICIENTS[-1])
    for coefficient in fixed_point.EXP2_COEFFICIENTS[-2::-1]:
        h = coefficient - ((fraction * h) >> 32)
    return (h << (fixed_point.PROB_BITS - 31)) >> (t >> fixed_point.FRACTION_BITS)


def scaled_logits(
    logits: torch.Tensor, temperature: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(z, float32 logits with NaN as -inf, which rows are greedy)."""
    x = logits.float()
    x = torch.where(x.isnan(), float("-inf"), x)
    if temperature is None:
        return torch.where(x == 0, 0.0, x), x, torch.zeros(len(x), dtype=torch.bool, device=x.device)
    greedy = ~(temperature >= fixed_point.GREEDY_TEMPERATURE)
    z = x / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    z = torch.where(z.isnan(), float("-inf"), z)
    return torch.where(z == 0, 0.0, z), x, greedy


def without_greedy_filters(greedy: torch.Tensor, parameters: Parameters) -> Parameters:
    """The parameters with the filters of greedy rows turned off."""

    def unless(tensor: torch.Tensor | None, off: float) -> torch.Tensor | None:
        return None if tensor is None else torch.where(greedy, torch.full_like(tensor, off), tensor)

    return Parameters(
        seeds=parameters.seeds,
        positions=parameters.positions,
        temperature=parameters.temperature,
        top_k=unless(parameters.top_k, 0),
        top_p=unless(parameters.top_p, 1),
        min_p=unless(parameters.min_p, 0),
    )


def apply_top_p(prob: torch.Tensor, distance: torch.Tensor, keep: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The mask of what top-p keeps, from the mask of what was kept before."""
    has_top_p = top_p < 1
    complement = ((1 - top_p.clamp(0, 1)) * 2.0**fixed_point.TOP_P_BITS).long()
    prob_sum = (prob * keep).sum(-1)
    budget = ((prob_sum >> 31) * complement + ((prob_sum & LOW_31) * complement >> 31)).unsqueeze(1)
    # Tokens that are masked already come first, and count 0.
    order = torch.where(keep, distance, 1 << 40).sort(dim=-1, descending=True, stable=True).indices
    removed = (prob * keep).gather(1, order).cumsum(-1) <= budget
    removed[:, -1] = False
    return keep & ~(torch.zeros_like(keep).scatter(1, order, removed) & has_top_p.unsqueeze(1))


def filter_mask(z: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """[rows, vocab] bool: the tokens that all filters keep."""
    distance = distances(z)
    prob = fixed_point_probs(distance)
    keep = torch.ones_like(z, dtype=torch.bool)
    if parameters.min_p is not None:
        min_prob = (parameters.min_p.nan_to_num(0.0).clamp(0, 1) * 2.0**fixed_point.PROB_BITS).long()
        keep &= prob >= min_prob.unsqueeze(1)
    if parameters.top_k is not None:
        k = parameters.top_k.long()
        has_top_k = (k > 0) & (k < z.shape[1])
        index = torch.where(has_top_k, k, z.shape[1]) - 1
        top_k_value = z.sort(dim=-1, descending=True).values.gather(1, index.unsqueeze(1))
        keep &= z >= top_k_value
    if parameters.top_p is not None:
        keep = apply_top_p(prob, distance, keep, parameters.top_p)
    return keep


def draw(prob: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """Tokens drawn by the probabilities, which are 0 where masked. Token 0 for a row of zeros."""
    prob_sum = prob.sum(-1)
    target = multiply_high(philox(parameters.seeds, parameters.positions), prob_sum)
    return (prob.cumsum(-1) <= target.unsqueeze(1)).sum(-1) * (prob_sum > 0)


def sample(logits: torch.Tensor, parameters: Parameters) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rows] int64 and log-probabilities [rows, vocab] float32."""
    z, x, greedy = scaled_logits(logits, parameters.temperature)
    parameters = without_greedy_filters(greedy, parameters)
    empty = z.amax(-1) == float("-inf")
    keep = filter_mask(z, parameters)
    prob = fixed_point_probs(distances(z)) * keep * ~empty.unsqueeze(1)
    tokens = torch.where(greedy, x.argmax(-1), draw(prob, parameters))
    return torch.where(empty, 0, tokens), log_probabilities(z, keep)


def log_probabilities(z: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """The log-softmax of the kept tokens, in z's dtype. -inf for masked tokens, and for all of an empty row."""
    row_max = z.amax(-1, keepdim=True)
    below_max = torch.where(z == row_max, torch.zeros_like(z), z - row_max)
    below_max = torch.where(keep & (row_max > float("-inf")), below_max, float("-inf"))
    row_sum = below_max.exp().sum(-1, keepdim=True)
    return torch.where(row_sum > 0, below_max - row_sum.log(), float("-inf"))


def probabilities(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """[rows, vocab] float64: the exact probability of each token, with the definition's mask."""
    z, _, greedy = scaled_logits(logits, parameters.temperature)
    return log_probabilities(z.double(), filter_mask(z, without_greedy_filters(greedy, parameters))).exp()


class ReferenceSampler:
    """The definition as a kernel, for CPUs."""

    def __init__(self, spec: SamplingSpec, target: Target, max_rows: int, device: torch.device) -> None:
        self.spec = spec

    def launch(self, logits: torch.Tensor, parameters: Parameters, out: Sampled) -> None:
        tokens, logprobs = sample(logits, parameters)
        out.tokens.copy_(tokens)
        if out.logprobs is None:
            return
        assert out.token_logprobs is not None, "logprobs come together"
        assert out.token_ranks is not None, "logprobs come together"
        assert out.top_ids is not None, "logprobs come together"
        assert out.top_logprobs is not None, "logprobs come together"
        out.logprobs.copy_(logprobs)
        chosen = logprobs.gather(1, tokens.unsqueeze(1))
        out.token_logprobs.copy_(chosen.squeeze(1))
        out.token_ranks.copy_((logprobs >= chosen).sum(-1))
        values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
        out.top_ids.copy_(ids[:, : self.spec.num_logprobs])
        out.top_logprobs.copy_(values[:, : self.spec.num_logprobs])
