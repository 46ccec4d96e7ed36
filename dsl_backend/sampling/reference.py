# SPDX-License-Identifier: Apache-2.0
"""The sampler's definition in eager torch, and the exact probabilities in float64 to judge it by.

Of each row, in the order of vLLM's own sampler:

1. logits in float32, NaN as -inf, divided by the temperature, correctly rounded, and negative zero as zero: z;
2. weights (fixed.py);
3. min-p keeps weights of at least min_p times the largest;
4. top-k keeps z of at least the k-th largest: all that tie with it;
5. top-p takes away, of what is kept, from the smallest on, while the sum of what it took is at most (1 - p) times the
   sum of all; of equal distances the lowest id first, as a stable ascending sort does; the last one stays;
6. the token is the first id at which the running sum of kept weights exceeds floor(U * sum / 2**62), U the 62 random
   bits of (seed, position).

A greedy row takes the largest logit, of the lowest id. A row without any logit above -inf gives token 0.
"""

import torch

from dsl_backend.runtime.target import Target
from dsl_backend.sampling import fixed
from dsl_backend.sampling.spec import Parameters, Sampled, SamplingSpec

LOW_31 = (1 << 31) - 1
LOW_32 = (1 << 32) - 1


def philox(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """62 random bits for each (seed, position), int64."""
    counter = [positions & LOW_32, (positions >> 32) & LOW_32, torch.full_like(seeds, fixed.STREAM), seeds * 0]
    key = [seeds & LOW_32, (seeds >> 32) & LOW_32]

    def multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """High and low word of a product; int64 has no room for it in one piece."""
        low = a * (b & 0xFFFF)
        high = a * (b >> 16) + (low >> 16)
        return high >> 16, ((high << 16) | (low & 0xFFFF)) & LOW_32

    for _ in range(fixed.PHILOX_ROUNDS):
        high0, low0 = multiply(fixed.PHILOX_MULTIPLIERS[0], counter[0])
        high1, low1 = multiply(fixed.PHILOX_MULTIPLIERS[1], counter[2])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(word + step) & LOW_32 for word, step in zip(key, fixed.PHILOX_INCREMENTS, strict=True)]
    return (counter[0] >> 1 << 31) | (counter[1] >> 1)


def multiply_high(bits: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """floor(bits * total / 2**62) of two numbers below 2**62."""
    b1, b0, t1, t0 = bits >> 31, bits & LOW_31, total >> 31, total & LOW_31
    return b1 * t1 + ((b1 * t0 + b0 * t1 + (b0 * t0 >> 31)) >> 31)


def distances(z: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] int64, fixed point, from the largest of a row."""
    largest = z.amax(dim=-1, keepdim=True)
    away = torch.where(z == largest, torch.zeros_like(z), largest - z).clamp(max=fixed.FARTHEST)
    return (away * 2.0**fixed.DISTANCE_BITS).long()


def weights(v: torch.Tensor) -> torch.Tensor:
    """int64, 2**40 at distance 0."""
    t = (v * fixed.LOG2E) >> 32
    fraction = (t & ((1 << fixed.FRACTION_BITS) - 1)) << (32 - fixed.FRACTION_BITS)
    h = torch.full_like(v, fixed.COEFFICIENTS[-1])
    for coefficient in fixed.COEFFICIENTS[-2::-1]:
        h = coefficient - ((fraction * h) >> 32)
    return (h << (fixed.WEIGHT_BITS - 31)) >> (t >> fixed.FRACTION_BITS)


def scaled(logits: torch.Tensor, temperature: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """z, the logits without NaN, and which rows are greedy."""
    x = logits.float()
    x = torch.where(x.isnan(), float("-inf"), x)
    if temperature is None:
        return torch.where(x == 0, 0.0, x), x, torch.zeros(len(x), dtype=torch.bool, device=x.device)
    greedy = ~(temperature >= fixed.LEAST_TEMPERATURE)
    z = x / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    z = torch.where(z.isnan(), float("-inf"), z)
    return torch.where(z == 0, 0.0, z), x, greedy


def off_for(greedy: torch.Tensor, rows: Parameters) -> Parameters:
    """The parameters with the filters of greedy rows off."""

    def unless(tensor: torch.Tensor | None, off: float) -> torch.Tensor | None:
        return None if tensor is None else torch.where(greedy, torch.full_like(tensor, off), tensor)

    return Parameters(
        seeds=rows.seeds,
        positions=rows.positions,
        temperature=rows.temperature,
        top_k=unless(rows.top_k, 0),
        top_p=unless(rows.top_p, 1),
        min_p=unless(rows.min_p, 0),
    )


def kept_by_top_p(w: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """What top-p leaves of what was kept."""
    on = top_p < 1
    share = ((1 - top_p.clamp(0, 1)) * 2.0**fixed.SHARE_BITS).long()
    total = (w * keep).sum(-1)
    budget = ((total >> 31) * share + ((total & LOW_31) * share >> 31)).unsqueeze(1)
    # What is out already has weight 0, and comes first.
    order = torch.where(keep, v, 1 << 40).sort(dim=-1, descending=True, stable=True).indices
    removed = (w * keep).gather(1, order).cumsum(-1) <= budget
    removed[:, -1] = False
    return keep & ~(torch.zeros_like(keep).scatter(1, order, removed) & on.unsqueeze(1))


def kept(z: torch.Tensor, rows: Parameters) -> torch.Tensor:
    """[rows, vocab] bool: what the filters leave."""
    v = distances(z)
    w = weights(v)
    keep = torch.ones_like(z, dtype=torch.bool)
    if rows.min_p is not None:
        least = (rows.min_p.nan_to_num(0.0).clamp(0, 1) * 2.0**fixed.WEIGHT_BITS).long()
        keep &= w >= least.unsqueeze(1)
    if rows.top_k is not None:
        k = rows.top_k.long()
        on = (k > 0) & (k < z.shape[1])
        place = torch.where(on, k, z.shape[1]) - 1
        kth = z.sort(dim=-1, descending=True).values.gather(1, place.unsqueeze(1))
        keep &= z >= kth
    if rows.top_p is not None:
        keep = kept_by_top_p(w, v, keep, rows.top_p)
    return keep


def draw(w: torch.Tensor, rows: Parameters) -> torch.Tensor:
    """Tokens of kept weights; 0 for a row that has none."""
    total = w.sum(-1)
    goal = multiply_high(philox(rows.seeds, rows.positions), total)
    return (w.cumsum(-1) <= goal.unsqueeze(1)).sum(-1) * (total > 0)


def sample(logits: torch.Tensor, rows: Parameters) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rows] int64 and log-probabilities [rows, vocab] float32."""
    z, x, greedy = scaled(logits, rows.temperature)
    rows = off_for(greedy, rows)
    dead = z.amax(-1) == float("-inf")
    keep = kept(z, rows)
    w = weights(distances(z)) * keep * ~dead.unsqueeze(1)
    tokens = torch.where(greedy, x.argmax(-1), draw(w, rows))
    return torch.where(dead, 0, tokens), log_probabilities(z, keep)


def log_probabilities(z: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """The log-softmax of what is kept, in z's dtype; -inf elsewhere, and everywhere in a row that has nothing."""
    largest = z.amax(-1, keepdim=True)
    away = torch.where(z == largest, torch.zeros_like(z), z - largest)
    away = torch.where(keep & (largest > float("-inf")), away, float("-inf"))
    total = away.exp().sum(-1, keepdim=True)
    return torch.where(total > 0, away - total.log(), float("-inf"))


def probabilities(logits: torch.Tensor, rows: Parameters) -> torch.Tensor:
    """[rows, vocab] float64: what each token's probability should be, for the definition's mask."""
    z, _, greedy = scaled(logits, rows.temperature)
    return log_probabilities(z.double(), kept(z, off_for(greedy, rows))).exp()


class ReferenceSampler:
    """The definition as a kernel; for CPUs."""

    def __init__(self, spec: SamplingSpec, target: Target, max_rows: int, device: torch.device) -> None:
        self.spec = spec

    def launch(self, logits: torch.Tensor, rows: Parameters, out: Sampled) -> None:
        tokens, logprobs = sample(logits, rows)
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
        out.top_ids.copy_(ids[:, : self.spec.top])
        out.top_logprobs.copy_(values[:, : self.spec.top])
