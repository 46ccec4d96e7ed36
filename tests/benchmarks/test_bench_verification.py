# SPDX-License-Identifier: Apache-2.0
"""The benchmark of verifying drafts: rows, bytes, which tokens are right, and a run at tiny scale."""

import json
import pathlib

import pytest
import torch

import benchmarks
from benchmarks.case import TABLE
from benchmarks.verification import RATIO, Problem, build, ours, plain, verdict
from dsl_backend.sampling.verification import Known

CPU = torch.device("cpu")


def problem(filters: str = "none", temperature: float = 0.8, known: Known = Known.TOKENS) -> Problem:
    return Problem(requests=5, drafts=3, vocab=100, filters=filters, temperature=temperature, known=known)


def test_rows() -> None:
    cases = benchmarks.operators()["verification"].cases()
    assert len({case.id for case in cases}) == len(cases)
    table = [case.id for case in cases if case.group == TABLE]
    assert len(table) == 12
    assert table[0] == "none-t1-1x5x128256"
    ratio = [case.id for case in cases if case.group == RATIO]
    assert len(ratio) == 8
    assert ratio[0] == "ratio-none-t0.8-1x5x128256"


def test_bytes_are_one_read() -> None:
    assert problem().traffic_bytes == 5 * 4 * (100 * 2 + 8)
    assert problem(known=Known.LOGITS).traffic_bytes == 5 * 4 * (100 * 2 + 8) + 5 * 3 * 100 * 2


@pytest.mark.parametrize("known", [Known.TOKENS, Known.LOGITS])
@pytest.mark.parametrize("filters", ["none", "k", "p", "k+p"])
def test_verification_and_plain_draws_agree(filters: str, known: Known) -> None:
    inputs = build(problem(filters, known=known), 2, CPU, 0)
    for make in (ours, plain):
        launch = make(inputs.problem, inputs)
        for index in range(2):
            assert verdict(inputs, index, launch.view(launch.run(index))).all()


def test_wrong_tokens_are_seen() -> None:
    inputs = build(problem("k"), 1, CPU, 0)
    launch = ours(inputs.problem, inputs)
    tokens = launch.run(0).clone()
    compared = len(inputs.compared)
    counts = (tokens >= 0).sum(-1)
    assert (counts > 1).any(), "no draft is accepted"
    assert (counts < 4).any(), "all drafts are accepted"

    def wrong(changed: torch.Tensor) -> int:
        return int((verdict(inputs, 0, changed) == 0).sum())

    assert wrong(tokens) == 0
    unlikely = tokens.clone()
    unlikely[:, 0] = inputs.layers[0].logits.view(5, 4, 100)[:, 0].argmin(-1)
    assert wrong(unlikely) == compared
    assert wrong(torch.full_like(tokens, -1)) == compared
    assert wrong(tokens + 100) == compared
    # Tokens behind a draft that was not accepted.
    assert wrong(tokens.clamp(min=0)) >= int((counts[inputs.compared] < 4).sum()) > 0


def test_drawn_drafts_are_accepted_by_the_ratio() -> None:
    """As often as the two distributions overlap, which is oftener than two draws are equal."""
    asked = Problem(requests=400, drafts=3, vocab=100, filters="none", temperature=0.8, known=Known.LOGITS)
    inputs = build(asked, 1, CPU, 0)
    (layer,) = inputs.layers
    assert layer.draft_logits is not None
    target = (layer.logits.view(400, 4, 100)[:, 0].float() / 0.8).softmax(-1)
    drafter = (layer.draft_logits[:, 0].float() / 0.8).softmax(-1)
    overlap = torch.minimum(target, drafter).sum(-1).mean()
    tokens = ours(asked, inputs).run(0)
    accepted = (tokens[:, 0] == layer.drafts.inputs.view(400, 4)[:, 1]).float().mean()
    assert overlap - 0.08 < accepted < overlap + 0.08
    assert accepted > (target * drafter).sum(-1).mean() + 0.08


@pytest.mark.parametrize("known", [Known.TOKENS, Known.LOGITS])
def test_tokens_that_the_definition_does_not_draw_are_seen(known: Known) -> None:
    inputs = build(problem(known=known), 1, CPU, 0)
    launch = ours(inputs.problem, inputs)
    tokens = launch.run(0)
    # Every token is possible without a filter, and this package draws one of them only.
    tokens[:, 0] = (tokens[:, 0] + 1) % 100
    tokens[:, 1:] = -1
    assert verdict(inputs, 0, tokens).all()
    assert verdict(inputs, 0, launch.view(tokens)).sum() == 5 - len(inputs.compared)


def test_a_run(tmp_path: pathlib.Path, device: torch.device) -> None:
    file = tmp_path / "rows.jsonl"
    options = benchmarks.Options(rows=r"^tiny-(none|k\+p|ratio-k\+p)-", seconds=0.01, device=device.type)
    assert benchmarks.main("verification", file, options) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()][1:]
    assert len(rows) == 3
    for row in rows:
        cells = {cell["provider"]: cell["status"] for cell in row["cells"]}
        assert cells["dsl"] == cells["plain"] == "ok", row
