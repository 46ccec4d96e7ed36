# SPDX-License-Identifier: Apache-2.0
"""The API of verification: errors name the argument and what is needed, and the reference's name values too."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.sampling import verification
from dsl_backend.sampling.spec import Kept, Parameters, Sampled, kept_buffers
from dsl_backend.sampling.verification import Distributions, Drafts, Known, VerificationSpec

# A request with two drafts, one without rows and one without drafts.
ROWS, VOCAB, BOUNDS = 4, 10, [0, 3, 3, 4]
ZEROS = torch.zeros(ROWS, dtype=torch.int64)
TOKENS = VerificationSpec(max_drafts=3, vocab=VOCAB)
LOGITS = replace(TOKENS, known=Known.LOGITS)
DISTRIBUTIONS = Distributions(values=torch.zeros(2, VOCAB), index=torch.tensor([0, 1, -1, 7]))
KEPT = Kept(*(one.zero_() for one in kept_buffers(ROWS, torch.device("cpu"))))


def cu_rows(*bounds: int) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


def run(spec: VerificationSpec, drafts: dict[str, Any], changed: dict[str, Any]) -> verification.Verified:
    """A step of the reference, with some arguments of `Drafts` and of `run` changed."""
    ratio = spec.known is not Known.TOKENS
    usual = {"inputs": ZEROS, "cu_rows": cu_rows(*BOUNDS), "distributions": DISTRIBUTIONS if ratio else None}
    given: dict[str, Any] = {
        "drawn": Sampled(ZEROS),
        "parameters": Parameters(seeds=ZEROS, positions=ZEROS),
        "drafts": Drafts(**usual | drafts),
        "logits": torch.zeros(ROWS, VOCAB) if ratio else None,
    }
    return verification.run(verification.plan(spec, 4, 8, "cpu", "reference"), **given | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"plan": None}, "plan is None: a VerificationPlan is needed"),
        ({"drawn": None}, "drawn is None: a Sampled is needed"),
        ({"drawn": ZEROS}, "drawn is a Tensor: a Sampled is needed"),
        ({"drawn": Sampled([0])}, "tokens is a list: a tensor is needed"),  # type: ignore[arg-type]
        (
            {"drawn": Sampled(torch.zeros(ROWS))},
            "tokens is float32 (4,): contiguous [4] of int64 or int32 is needed",
        ),
        ({"drawn": Sampled(ZEROS[0])}, "tokens is int64 (): contiguous [rows] of int64 or int32 is needed"),
        ({"drawn": Sampled(ZEROS[None])}, "tokens is int64 (1, 4): contiguous [rows] of int64 or int32 is needed"),
        ({"drawn": Sampled(ZEROS.repeat(2)[::2])}, "tokens is int64 (4,): contiguous [4]"),
        ({"drawn": Sampled(ZEROS.to("meta"))}, "tokens is on meta: cpu is needed"),
        ({"drafts": None}, "drafts is None: a Drafts is needed"),
    ],
)
def test_run_refuses(changed: dict[str, Any], message: str) -> None:
    if "plan" in changed:
        with pytest.raises(InvalidInput, match=re.escape(message)):
            verification.run(None, Sampled(ZEROS), None, None)  # type: ignore[arg-type]
        return
    with pytest.raises(InvalidInput, match=re.escape(message)):
        run(TOKENS, {}, changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parameters": None}, "parameters is None: a Parameters is needed"),
        ({"parameters": {}}, "parameters is {}: a Parameters is needed"),
        ({"drawn": Sampled(ZEROS, kept=(1,))}, "kept is (1,): a Kept is needed"),  # type: ignore[arg-type]
        (
            {"drawn": Sampled(ZEROS, kept=KEPT._replace(normals=torch.zeros(ROWS)))},
            "normals is float32 (4,): contiguous [4] of int64 is needed",
        ),
        (
            {"drawn": Sampled(ZEROS, kept=KEPT._replace(pivots=ZEROS[:2]))},
            "pivots is int64 (2,): contiguous [4] of int64 is needed",
        ),
        (
            {"drawn": Sampled(ZEROS, kept=KEPT._replace(min_probs=ZEROS.repeat(2)[::2]))},
            "min_probs is int64 (4,): contiguous [4] of int64 is needed",
        ),
    ],
)
def test_the_ratio_test_refuses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        run(LOGITS, {}, changed)


@pytest.mark.parametrize(
    ("distributions", "message"),
    [
        ((1, 2), "distributions is (1, 2): a Distributions is needed"),
        (replace(DISTRIBUTIONS, values=None), "values is None: a tensor is needed"),
        (replace(DISTRIBUTIONS, values=torch.zeros(VOCAB, 2).t()), "[n, at most 10] with contiguous rows on cpu is"),
        (replace(DISTRIBUTIONS, index=ZEROS[:3]), "index is int64 (3,): contiguous [4] of int32 or int64 is needed"),
    ],
)
def test_distributions_are_checked(distributions: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        run(LOGITS, {"distributions": distributions}, {})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_rows": cu_rows(0, 5)}, "cu_rows[1] is 5: 0 to 4 are possible, with 4 rows and none decreasing"),
        ({"cu_rows": cu_rows(2, 0)}, "cu_rows[1] is 0: 2 to 4 are possible"),
        ({"cu_rows": cu_rows(-1, 2)}, "cu_rows[0] is -1: 0 to 4 are possible"),
        ({"cu_rows": cu_rows(0, 4)}, "request 0 has 3 drafts: the spec's max_drafts, 2, are the most"),
        (
            {"distributions": replace(DISTRIBUTIONS, index=torch.tensor([0, 7, 0, 0]))},
            "index[1] is 7, of a draft of request 0: a row of values is needed, which has 2",
        ),
        ({"distributions": replace(DISTRIBUTIONS, index=ZEROS - 1)}, "index[0] is -1, of a draft of request 0"),
        ({"distributions": replace(DISTRIBUTIONS, values=torch.zeros(0, VOCAB))}, "index[0] is 0, of a draft of"),
    ],
)
def test_the_reference_refuses_values(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        run(replace(LOGITS, max_drafts=2), changed, {})


def test_what_is_not_read_may_have_any_value() -> None:
    """The index of a request's last row; and without drafts there need be no distributions."""
    assert run(LOGITS, {}, {"drawn": Sampled(ZEROS, kept=KEPT)}).counts[1:].tolist() == [0, 1]
    none = {"cu_rows": cu_rows(0, 1, 2, 3, 4), "distributions": replace(DISTRIBUTIONS, values=torch.zeros(0, VOCAB))}
    assert run(LOGITS, none, {}).counts.tolist() == [1] * 4
    assert run(TOKENS, {}, {"parameters": None}).counts.tolist() == [3, 0, 1]
