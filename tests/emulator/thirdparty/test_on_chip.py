# SPDX-License-Identifier: Apache-2.0
"""The command that asks a chip, with the emulator in its place, and the comparison with what a chip answered."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peer_answers import SAMPLE, Answer, Answers, Output, places
from peer_cases import SM90, Problem, normal
from peer_rules import BITS, ROUNDED, Rule, compare, rule_of
from run_case import CASES, PEERS

HERE = Path(__file__).resolve().parent
SMALL, OTHER = "topk", "flash-hd256"


def run_script(name: str, *arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "ignore", str(HERE / name), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **environment}
    )


def test_a_case_fails_and_others_go_on(tmp_path: Path) -> None:
    """Without flash_attn; what the others gave is what the emulator gives again, until one bit of it is changed."""
    if not (PEERS / ".set-up").is_file():
        pytest.skip(f"{PEERS} does not hold the kernels: `make peers` installs them")
    peers = tmp_path / "peers"
    peers.mkdir()
    for one in PEERS.iterdir():
        if one.name != "flash_attn":
            (peers / one.name).symlink_to(one)
    done = run_script("on_chip.py", tmp_path, "--emulate", "--only", SMALL, OTHER, PEERS=str(peers))
    assert done.returncode == 1, done.stderr
    said = done.stdout.splitlines()
    assert [line for line in said if line.startswith(f"{SMALL}: ")]
    (failed,) = [line for line in said if line.startswith(f"{OTHER}: ")]
    assert "FAILED: status 1: ModuleNotFoundError: No module named 'flash_attn'" in failed
    assert said[-1].startswith("1 of 2 cases")
    path = tmp_path / "golden_sm90.npz"
    answers = Answers.load(path)
    assert list(answers.cases) == [SMALL]
    assert answers.cases[SMALL].steady
    assert answers.source["gpu"] == "emulator"
    assert answers.source["quack-kernels"] == "0.6.3"

    answers.cases[SMALL].outputs["values"].sample[7] ^= 1
    answers.save(path)
    done = run_script("run_case.py", SM90, SMALL, "--schedules", "eager", "--answers", path)
    told = json.loads(done.stdout.splitlines()[-1])["schedules"]["eager"]["chip"]
    assert told["indices"] == {"compared": 80, "unequal": 0, "worst": 0.0, "identical": True, "wrong": ""}
    assert told["values"]["unequal"] == 1
    assert told["values"]["wrong"].startswith("element 7: emulator")


def test_files_come_back(tmp_path: Path) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    outputs = {str(kind): normal(3, 2000).to(kind) for kind in kinds}
    kept = Answers({"gpu": "H200"}, {"some": Answer("0" * 8, {k: Output.of(x) for k, x in outputs.items()}, True)})
    kept.save(tmp_path / "some.npz")
    again = Answers.load(tmp_path / "some.npz")
    assert again.source == kept.source
    for name, x in outputs.items():
        one = again.cases["some"].outputs[name]
        assert (one.dtype, one.shape, one.digest) == (str(x.dtype)[6:], (3, 2000), Output.of(x).digest)
        assert torch.equal(one.values().float(), x.flatten()[places(6000)].float())
    assert Answers.load(tmp_path / "none.npz") == Answers()


@pytest.mark.parametrize("count", [1, 80, SAMPLE, SAMPLE + 1, 6000, 256 * 128, 2 * 65536])
def test_a_sample_is_spread(count: int) -> None:
    found = places(count)
    assert len(set(found.tolist())) == len(found) == min(count, SAMPLE)
    assert found.min() >= 0
    assert found.max() < count
    if count > SAMPLE:
        assert np.diff(found).max() <= 4 * count / SAMPLE
        # All columns of a matrix, whatever its width.
        assert all(len(set((found % width).tolist())) == width for width in (16, 64, 128))


def test_inputs_are_the_same_everywhere() -> None:
    """Digests as they were made with AVX-512, AVX2 and neither, by torch 2.13."""
    torch.manual_seed(0)
    x = normal(256, 128)
    assert x.std() == pytest.approx(1, abs=0.01)
    problem = Problem(lambda x, number: {"x": x + number}, {"x": x, "number": 3}, {})
    assert problem.digest()[:16] == "21662ce9f0d69f50"
    assert Problem(lambda x: {}, {"x": x + 1}, {}).digest() != problem.digest()
    assert Problem(lambda x: {}, {"x": x.mT}, {}).digest() != problem.digest()
    assert torch.equal(problem.run()["x"], x + 3)


def changed(x: torch.Tensor, count: int, ulps: int = 1) -> torch.Tensor:
    """Some elements of the sample, 1 all of them, are so many units larger."""
    out = x.clone()
    out.view(-1)[torch.from_numpy(places(x.numel())[:count])] += ulps * torch.finfo(x.dtype).eps
    return out


ONES = torch.ones(100, 100, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("rule", "count", "ulps", "wrong"),
    [
        (BITS, 1, 1, "element 0"),
        (BITS, 0, 0, ""),
        (ROUNDED, 20, 1, ""),
        (ROUNDED, 21, 1, "21 of 4096 elements have other bits"),
        (ROUNDED, 1, 2, "element 0"),
        (Rule(2, 1, ""), SAMPLE, 2, ""),
        (Rule(2, 1, ""), 1, 3, "element 0"),
    ],
)
def test_what_a_rule_allows(rule: Rule, count: int, ulps: int, wrong: str) -> None:
    found = compare(changed(ONES, count, ulps), Output.of(ONES), rule)
    # The largest of a row has a unit more there, which makes the unit itself larger.
    assert found.wrong.startswith(wrong)
    assert bool(found.wrong) == bool(wrong)
    assert (found.unequal, found.compared, found.identical) == (count, SAMPLE, count == 0)


def test_bits_beyond_the_sample() -> None:
    other = ONES.clone()
    other.view(-1)[next(place for place in range(10000) if place not in places(10000))] = 2
    assert "not in the sample" in compare(other, Output.of(ONES), BITS).wrong
    assert not compare(other, Output.of(ONES), ROUNDED).wrong


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number(value: float) -> None:
    own, chip = (torch.ones(4, 4) for _ in range(2))
    own[1, 2] = value
    loose = Rule(1e9, 1, "")
    assert compare(own, Output.of(chip), loose).wrong
    assert compare(chip, Output.of(own), loose).wrong
    chip[1, 2] = value
    assert not compare(own, Output.of(chip), loose).wrong


def test_what_does_not_count() -> None:
    """A row of zeros has no unit; what a case's budget adds for such is no difference here either."""
    own = torch.zeros(2, 3)
    chip = own + 1e-6
    loose = Rule(1e9, 1, "")
    assert compare(own, Output.of(chip), loose).worst == torch.inf
    assert not compare(own, Output.of(chip), loose, absolute=1e-5).wrong
    assert compare(own + 1, Output.of(chip + 1 + 1e-6), Rule(1, 1, ""), absolute=1e-5).wrong
    assert not compare(own, Output.of(chip), Rule(10, 1, ""), magnitude=1.0).wrong
    assert compare(own, Output.of(chip), Rule(1, 1, ""), magnitude=1.0).wrong


def test_other_shapes_and_dtypes() -> None:
    for other in (ONES[:1], ONES.float()):
        with pytest.raises(AssertionError, match="on the chip"):
            compare(ONES, Output.of(other), BITS)


def test_every_kernel_has_a_rule() -> None:
    outputs = {"flash": ("out", "lse"), "topk": ("values", "indices"), "softmax-backward": ("dx",)}
    for name, case in CASES.items():
        for output in next((some for start, some in outputs.items() if name.startswith(start)), ("out",)):
            assert SM90 not in case.archs or rule_of(name, output).why
    with pytest.raises(KeyError, match="no rule for some/thing"):
        rule_of("some", "thing")
