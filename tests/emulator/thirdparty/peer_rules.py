# SPDX-License-Identifier: Apache-2.0
"""How far the emulator's results may be from a chip's, kernel by kernel, and why.

The ISA fixes the results of all but three kinds of these kernels' instructions to the bit. Approximate units (ex2, lg2,
rcp, rsqrt) are within 2 units in the last place of float32; tanh is within 2^-16 on an H200. wgmma may cut off what a
term has behind the 23rd bit of the largest one, where the emulator rounds the exact sum; of fp8 both cut off the same.
And mul.f32, add.f32 and sub.f32 without .rn may be contracted to fma by the assembler.

An error of 2^-22 turns one in some 2^13 roundings to bfloat16, one in 2^10 to float16: results of 16 bits are the same
except for a few, which are neighbours. float32 shows the errors themselves, in any share of the elements. The numbers
below are about twice the most that an H200 gave (2026-11-22), which stands beside them.
"""

import re
from dataclasses import dataclass

import torch
from peer_answers import Output, places
from peer_budgets import row_most


@dataclass(frozen=True)
class Rule:
    """What is allowed.

    Attributes:
        ulps: of an element, in units in the last place of its row's largest, and of what that is the sum of.
        share: of the elements, those that may have other bits.
    """

    ulps: float
    share: float
    why: str


BITS = Rule(0, 0, "additions, comparisons and conversions, which are exact or rounded as the ISA says")
ROUNDED = Rule(1, 0.005, "errors of 2^-22 that a rounding to bfloat16 shows now and then: 0.45 units, 0.22 %")
# By pattern of case/output, the first that fits.
RULES = {
    "topk/.*|rmsnorm-residual/residual": BITS,
    "softmax-backward/dx": Rule(0, 0, "sums of products of float32, which the assembler did not contract"),
    "gemm-fp8/out": Rule(0, 0, "sums of products of 8-bit factors are cut off at 13 bits, by the emulator too"),
    "flash-f16/out": Rule(1, 0.025, "roundings to float16 show 8 times as many errors: 0.59 units, 1.2 %"),
    "flash-softcap/out": Rule(1, 0.025, "scores by way of tanh.approx: 0.41 units, 1.3 %"),
    "flash-softcap/lse": Rule(7, 1, "scores by way of tanh.approx: 3.63 units"),
    "flash-.*/lse": Rule(2.5, 1, "scores are sums of products that are cut off, ex2 and lg2 approximate: 1.19 units"),
    "flash-.*/(dq|dk|dv)": Rule(1, 0.0125, "as ROUNDED, of weights and of their gradients: 0.22 units, 0.61 %"),
    "flash-.*/out": ROUNDED,
    "cutlass-attention.*/lse": Rule(2.5, 1, "as flash-.*/lse; no chip has been asked yet"),
    "cutlass-.*/out": Rule(1, 0.025, "in float16, as flash-f16/out; no chip has been asked yet"),
    "softmax-f32/out": Rule(2, 1, "ex2 and rcp are approximate: 1.03 units"),
    "cross-entropy/(loss|lse)": Rule(1, 0.4, "ex2 and lg2 are approximate: 0.47 units, 17 %"),
    "(softmax|cross-entropy|rmsnorm|gemm)(-.*)?/(out|dx|product)": Rule(1, 0.001, "as ROUNDED: 0.08 units, 0.05 %"),
}


def rule_of(case: str, output: str) -> Rule:
    """Raises KeyError where there is none."""
    for pattern, rule in RULES.items():
        if re.fullmatch(pattern, f"{case}/{output}"):
            return rule
    raise KeyError(f"no rule for {case}/{output}")


@dataclass(frozen=True)
class Likeness:
    """An output of the emulator beside that of a chip.

    Attributes:
        compared: elements.
        unequal: those of them with other bits.
        worst: the largest difference, in the rule's units.
        identical: whether all elements have the same bits, those that are not in the sample as well.
        wrong: what the rule does not allow, in words.
    """

    compared: int
    unequal: int
    worst: float
    identical: bool
    wrong: str = ""


def compare(
    emulated: torch.Tensor, chip: Output, rule: Rule, magnitude: float = 0.0, absolute: float = 0.0
) -> Likeness:
    """An output of a case.

    Args:
        magnitude: as of `Expected`.
        absolute: as of `Expected`; up to it, differences do not count in rows that have nothing larger.

    Raises:
        AssertionError: another shape or dtype.
    """
    own = Output.of(emulated)
    if (own.dtype, own.shape) != (chip.dtype, chip.shape):
        raise AssertionError(f"{own.dtype} {own.shape}, and {chip.dtype} {chip.shape} on the chip")
    identical = own.digest == chip.digest
    unequal = own.sample != chip.sample
    found, right = own.values().double(), chip.values().double()
    same = torch.from_numpy(~unequal) | (found.isnan() & right.isnan())
    size = torch.where(emulated.isfinite(), emulated.double().abs(), 0.0)
    unit = torch.finfo(emulated.dtype).eps * (row_most(size) + magnitude)
    error = (found - right).abs()
    parts = error / unit.expand_as(size).flatten()[places(size.numel())]
    nothing = (row_most(size) <= absolute).expand_as(size).flatten()[places(size.numel())]
    parts = torch.where(same | (nothing & (error <= absolute)), 0.0, parts.nan_to_num(nan=torch.inf, posinf=torch.inf))
    worst, count = float(parts.max()), int(unequal.sum())
    wrong = ""
    if worst > rule.ulps:
        at = int(parts.argmax())
        place = int(places(size.numel())[at])
        wrong = f"element {place}: emulator {float(found[at])}, chip {float(right[at])}"
    elif count > rule.share * len(unequal):
        wrong = f"{count} of {len(unequal)} elements have other bits"
    elif not rule.share and not identical:
        wrong = "elements that are not in the sample have other bits"
    return Likeness(len(unequal), count, worst, identical, wrong)
