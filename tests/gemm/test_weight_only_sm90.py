# SPDX-License-Identifier: Apache-2.0
"""SM90's kernel of weights of 4 and 8 bits on the emulator: right, and without a finding. What it refuses."""

import json
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from weight_only_cases import ARCH, CASES, FEW, SMEM_BYTES, W4, W8, WeightOnlyEmulated, emulate, random_emulated

from dsl_backend.errors import InvalidInput
from dsl_backend.gemm.sm90.weight_only_configs import WeightOnlyConfig, chosen, fitting
from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.quant.weight_only import WeightOnlyFormat
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.linear import BF16
from tests.machine_code import found

TIMED = Path(__file__).parents[2] / "docs/data/h200-weight-only-peers.jsonl"
SCHEDULES = ("eager", "lazy", "random")
FUZZED_IN_REST, FUZZED_IN_FULL = 6, 60
QUICK = ("w4-zero-points", "w8-split", "w4-special")


def marks(one: WeightOnlyEmulated, first: bool) -> tuple[pytest.MarkDecorator, ...]:
    """One schedule of each case in `make test-rest`, of some in `make test`, the others where there is time."""
    if not first:
        return (pytest.mark.full,)
    return () if one.id in QUICK else (pytest.mark.rest,)


IN_TURN = [
    pytest.param(one, schedule, id=f"{one.id}-{schedule}", marks=marks(one, (i + j) % 3 == 0))
    for i, one in enumerate(CASES)
    for j, schedule in enumerate(SCHEDULES)
]


@pytest.mark.parametrize(("one", "schedule"), IN_TURN)
def test_case(one: WeightOnlyEmulated, schedule: str) -> None:
    emulate(one, schedule, seed=1)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.rest if seed < FUZZED_IN_REST else pytest.mark.full)
        for seed in range(FUZZED_IN_REST + FUZZED_IN_FULL)
    ],
)
def test_fuzz(seed: int) -> None:
    emulate(random_emulated(seed), SCHEDULES[seed % 3], seed)


def test_ids_are_unique() -> None:
    assert len({one.id for one in CASES}) == len(CASES)


@pytest.mark.full
@pytest.mark.parametrize("name", ["w4a16", "w4a16-zero-points", "w8a16"])
def test_registers_suffice(name: str) -> None:
    """Nothing spills but two consumers with many tokens, and products are left in flight."""
    for code in found(f"{ARCH}-{name}", 1):
        assert code.registers > 0
        spills = "groups=2" in code.config and any(f"tokens={tokens}," in code.config for tokens in (48, 64))
        assert spills or code.stack == 0, f"{code.stack} bytes of stack: {code}"
        assert not code.serialised, f"{code.products} products and {code.waits} waits for them: {code}"


@pytest.mark.parametrize("kind", [W4, W8])
def test_configurations_fit(kind: WeightOnlyFormat) -> None:
    spec = WeightOnlyGemmSpec(n=4096, k=4096, dtype=BF16, kind=kind)
    configs = list(fitting(spec, SMEM_BYTES))
    assert {config.tokens for config in configs} == {8, 16, 32, 48, 64}
    assert {config.num_splits for config in configs} == {1, 2, 4, 8}
    assert all(config.smem_bytes(spec) <= SMEM_BYTES for config in configs)


@pytest.mark.parametrize(("bits", "most", "slow"), [(4, 1.08, 0), (8, 1.2, 1)])
def test_chosen_is_nearly_the_fastest(bits: int, most: float, slow: int) -> None:
    """Of the configurations that were timed on an H200."""
    rows = [json.loads(line) for line in TIMED.read_text().splitlines()]
    regrets = []
    for row in (row for row in rows if row["bits"] == bits):
        spec = WeightOnlyGemmSpec(n=row["n"], k=row["k"], dtype=BF16, kind=WeightOnlyFormat(bits=bits))
        config = chosen(spec, row["m"], from_arch(ARCH))
        assert config.objections(spec, SMEM_BYTES) == []
        of_ours = {name: us for name, us in row["us"].items() if name not in ("marlin", "machete")}
        us = of_ours[f"{config.groups}g/{config.num_splits}s{config.stages}"]
        regrets.append(us / min(of_ours.values()))
    assert len(regrets) == 40
    assert sum(regret > most for regret in regrets) == slow, sorted(regrets)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"tile_k": 64}, "tile_k 64: packed weights have 128 columns"),
        ({"tokens": 80}, "80 tokens: 64 are the most"),
        ({"groups": 2, "split_tokens": True}, "unpack the same weights"),
        ({"stages": 100}, "bytes of shared memory"),
    ],
)
def test_objections(facts: dict, words: str) -> None:
    assert any(words in reason for reason in WeightOnlyConfig(**facts).objections(FEW.spec, SMEM_BYTES))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"n": 100}, "n is 100: a multiple of 8 is needed"),
        ({"k": 4}, "k is 4"),
        ({"k": 132}, "k is 132: a multiple of 8 is needed"),
        ({"kind": 4}, "kind is 4: a WeightOnlyFormat is needed"),
    ],
)
def test_refused_problems(facts: dict, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        WeightOnlyGemmSpec(**{"n": 64, "k": 128, "dtype": BF16, "kind": W4} | facts)
