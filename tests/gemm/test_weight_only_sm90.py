# SPDX-License-Identifier: Apache-2.0
"""SM90's kernel of weights of 4 and 8 bits on the emulator: right, and without a finding. What it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from weight_only_cases import ARCH, CASES, FEW, SMEM_BYTES, W4, W8, WeightOnlyEmulated, emulate, random_emulated

from dsl_backend.errors import InvalidInput
from dsl_backend.gemm.sm90.weight_only_configs import (
    WeightOnlyConfig,
    WeightOnlyGemmConfig,
    candidates,
    chosen,
    fitting,
    gemms,
)
from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.quant.weight_only import WeightOnlyFormat
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.linear import BF16
from tests.machine_code import found

DATA = Path(__file__).parents[2] / "docs/data"
TIMED_FIRST, TIMED = DATA / "h200-weight-only-peers.jsonl", DATA / "h200-weight-only-configs.jsonl"
SCHEDULES = ("eager", "lazy", "random")
FUZZED_IN_REST, FUZZED_IN_FULL = 6, 60
QUICK = ("w4-zero-points", "w8-split", "w4-special", "w4-rows", "w8-rows")


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
    assert all(config.smem_bytes(spec) <= SMEM_BYTES for config in gemms(spec, SMEM_BYTES))
    configs = list(fitting(spec, SMEM_BYTES))
    assert {config.tokens for config in configs} == {8, 16, 32, 48, 64}
    assert {config.num_splits for config in configs} == {1, 2, 4, 8}
    assert all(config.smem_bytes(spec) <= SMEM_BYTES for config in configs)


@pytest.mark.parametrize(("bits", "most", "slow"), [(4, 1.08, 0), (8, 1.2, 1)])
def test_chosen_for_few_rows_was_nearly_the_fastest(bits: int, most: float, slow: int) -> None:
    """Of the configurations that were timed on an H200 when the kernel for few rows was new, in more layers."""
    rows = [json.loads(line) for line in TIMED_FIRST.read_text().splitlines()]
    regrets = []
    for row in (row for row in rows if row["bits"] == bits):
        spec = WeightOnlyGemmSpec(n=row["n"], k=row["k"], dtype=BF16, kind=WeightOnlyFormat(bits=bits))
        config = chosen(spec, row["m"], from_arch(ARCH))
        assert isinstance(config, WeightOnlyConfig)
        assert config.objections(spec, SMEM_BYTES) == []
        of_ours = {name: us for name, us in row["us"].items() if name not in ("marlin", "machete")}
        us = of_ours[f"{config.groups}g/{config.num_splits}s{config.stages}"]
        regrets.append(us / min(of_ours.values()))
    assert len(regrets) == 40
    assert sum(regret > most for regret in regrets) == slow, sorted(regrets)


def test_chosen_is_nearly_the_fastest() -> None:
    """Of those that were timed on an H200, for any number of rows."""
    shares = []
    for row in (json.loads(line) for line in TIMED.read_text().splitlines()):
        spec = WeightOnlyGemmSpec(n=row["n"], k=row["k"], dtype=BF16, kind=WeightOnlyFormat(bits=row["bits"]))
        config = chosen(spec, row["m"], from_arch(ARCH))
        if isinstance(config, WeightOnlyConfig):
            name = f"{config.groups}g/{config.num_splits}s{config.stages}"
        else:
            name = f"p{config.tokens}"
        of_ours = {name: us for name, us in row["us"].items() if name not in ("marlin", "machete", "bf16")}
        shares.append((min(of_ours.values()) / of_ours[name], row["n"], row["k"], row["m"], row["bits"], name))
    assert len(shares) == 70
    assert min(shares)[0] > 0.93, sorted(shares)[:5]


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (1280, 8192), (8, 8)])
@pytest.mark.parametrize("kind", [W4, W8], ids=str)
def test_any_number_of_rows_is_served_by_a_candidate(kind: WeightOnlyFormat, n: int, k: int) -> None:
    """Also those between the numbers that are looked at, and where SMs are spared."""
    spec, target = WeightOnlyGemmSpec(n=n, k=k, dtype=BF16, kind=kind), from_arch(ARCH)
    compiled = candidates(spec, target)
    assert len(compiled) <= 16
    for chip in target.chips:
        on_chip = replace(target, chip=chip)
        for rows in (1, 9, 33, 64, 65, 66, 127, 129, 1000, 1023, 3001, 8191, 8193, 20000):
            assert chosen(spec, rows, on_chip) in compiled
            assert chosen(spec, rows, on_chip.sparing(20)) in compiled


@pytest.mark.parametrize(
    ("n", "kind", "rows", "shared"),
    [
        (4096, W4, 80, True),
        (4096, W8, 80, True),
        (4096, W8, 2048, False),
        (28672, W4, 2048, True),
        (28672, W4, 1728, False),  # 27 tiles of tokens: 108 CTAs have equal shares
        (28672, W4, 2064, False),  # not timed
    ],
)
def test_what_stream_k_is_chosen_for(n: int, kind: WeightOnlyFormat, rows: int, shared: bool) -> None:
    """Just above 64 rows few tiles are divided among all SMs; with 8 bits prompts take the persistent GEMM."""
    target = from_arch(ARCH)
    config = chosen(WeightOnlyGemmSpec(n=n, k=4096, dtype=BF16, kind=kind), rows, replace(target, chip=target.chips[0]))
    assert isinstance(config, WeightOnlyConfig) == shared


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"tokens": 144}, "144 tokens are not a multiple of 16 from 16 to 128"),
        ({"tokens": 24}, "24 tokens are not a multiple of 16"),
        ({"box_n": 128}, "box_n is 128: consumers have 64 rows each"),
        ({"stages": 30}, "bytes of shared memory"),
        ({"stages": 3}, "3 stages: 4 are the fewest"),
    ],
)
def test_objections_of_the_persistent_gemm(facts: dict, words: str) -> None:
    assert any(words in reason for reason in WeightOnlyGemmConfig(**facts).objections(FEW.spec, SMEM_BYTES))


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
