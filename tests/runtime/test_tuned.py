# SPDX-License-Identifier: Apache-2.0
"""Files of tuned configurations: which records are accepted, which are refused and how, and merging."""

import dataclasses
import datetime
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import PositiveInt

from dsl_backend import envs, log
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import tuned
from dsl_backend.runtime.chip import Chip
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.tuned import TunedConfigs

GPU = "NVIDIA Test"


class ProblemShape(tuned.ProblemShape):
    width: PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    tile: int
    stages: int = 2
    patience: float = 8.0


@pytest.fixture(autouse=True)
def no_file_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(envs.TUNED_CONFIGS.name, raising=False)


@pytest.fixture
def family(tmp_path: Path) -> TunedConfigs[ProblemShape]:
    return TunedConfigs("linear", tmp_path / "tuned.json", ProblemShape, {"sm90.Tiles": Tiles})


def raw(**changes: Any) -> dict[str, Any]:
    """A whole record, as it is written in a file."""
    fields: dict[str, Any] = {
        "family": "linear",
        "gpu": GPU,
        "arch": "sm_90a",
        "date": "2026-11-22",
        "commit": "0123abc",
        "versions": {"driver": "580.1", "nvidia-cutlass-dsl": "4.6.0"},
        "problem": {"width": 128},
        "kernel": "sm90.Tiles",
        "config": {"tile": 64},
        "us": 10.0,
        "default_us": 11.0,
        "rows": ["a", "b"],
    }
    return {name: value for name, value in (fields | changes).items() if value is not ...}


def put(path: Path, *records: Any) -> Path:
    path.write_text(json.dumps({"format": 1, "records": list(records)}))
    return path


def target(gpu: str | None = GPU, arch: str = "sm_90a", chip: Chip | None = None) -> Target:
    return dataclasses.replace(from_arch(arch), gpu=gpu, chip=chip)


def facts(**changes: Any) -> dict[str, Any]:
    shared = {
        "gpu": GPU,
        "arch": "sm_90a",
        "date": datetime.date(2026, 11, 23),
        "commit": "0123abd",
        "versions": {},
        "us": 5.0,
        "default_us": 6.0,
    }
    return shared | changes


def test_what_is_understood(family: TunedConfigs[ProblemShape]) -> None:
    put(family.file, raw(), raw(family="attention", problem={"of": "another family"}))
    (record,), problems = family.found
    assert problems == []
    assert (record.problem, record.config) == (ProblemShape(width=128), Tiles(tile=64))
    assert record.measurement.date == datetime.date(2026, 11, 22)


def test_whole_numbers_are_numbers(family: TunedConfigs[ProblemShape]) -> None:
    put(family.file, raw(us=10, default_us=11, config={"tile": 64, "patience": 4}))
    (record,), problems = family.found
    assert problems == []
    assert record.config.patience == 4.0


# A change of a record, and the problem that is reported.
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "another-family": ({"family": "linaer"}, "family 'linaer' is not one of attention, experts, linear"),
    "no-family": ({"family": ...}, "family None is not one of"),
    "no-gpu": ({"gpu": ...}, "gpu: Field required"),
    "empty-gpu": ({"gpu": ""}, "gpu: String should have at least 1 character (it is '')"),
    "arch": ({"arch": "hopper"}, "arch: String should match pattern"),
    "date": ({"date": "yesterday"}, "date: Input should be a valid date"),
    "time-as-text": ({"us": "10"}, "us: Input should be a valid number (it is '10')"),
    "no-time": ({"default_us": ...}, "default_us: Field required"),
    "negative": ({"us": -1.0}, "us: Input should be greater than 0 (it is -1.0)"),
    "slower": ({"us": 12.0}, "us 12.0 is not less than default_us 11.0"),
    "strange-field": ({"note": "x"}, "note: Extra inputs are not permitted (it is 'x')"),
    "problem": ({"problem": {"width": 0}}, "width: Input should be greater than 0 (it is 0)"),
    "strange-problem": ({"problem": {"width": 8, "m": 1}}, "m: Extra inputs are not permitted (it is 1)"),
    "kernel": ({"kernel": "sm80.Tiles"}, "kernel 'sm80.Tiles' is not one of sm90.Tiles"),
    "config-field": ({"config": {"tile": 64, "warps": 4}}, "config has warps: sm90.Tiles has tile, stages, patience"),
    "config-lacks": ({"config": {}}, "config: tile: Field required"),
    "config-type": ({"config": {"tile": "64"}}, "config: tile: Input should be a valid integer (it is '64')"),
    "no-object": ({}, "family None is not one of"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_record_is_named_and_the_others_stay(family: TunedConfigs[ProblemShape], name: str) -> None:
    changes, message = BROKEN[name]
    broken = raw(**changes) if changes else 7
    put(family.file, raw(), broken, raw(problem={"width": 64}))
    found, (problem,) = family.found
    assert [record.problem.width for record in found] == [128, 64]
    assert problem.startswith(f"{family.file}: record 1: ")
    assert message in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"format": 1, "records": [{"us": NaN}]}', "is not JSON: NaN is no number there"),
        ("[]", 'is no file of tuned configurations: {"format": 1, "records": [...]} is needed'),
        ('{"format": 2, "records": []}', "is no file of tuned configurations"),
        ('{"format": 1}', "is no file of tuned configurations"),
    ],
)
def test_a_broken_file_is_named(family: TunedConfigs[ProblemShape], text: str, message: str) -> None:
    family.file.write_text(text)
    found, (problem,) = family.found
    assert found == []
    assert str(family.file) in problem
    assert message in problem
    with pytest.raises(InvalidInput, match=str(family.file)):
        family.save(family.file, target(), [], [])
    assert family.file.read_text() == text, "what cannot be understood is not overwritten"


def test_a_missing_file_is_named(family: TunedConfigs[ProblemShape]) -> None:
    assert family.found == ([], [f"{family.file} cannot be read: No such file or directory"])


def test_who_serves_goes_on_and_says_so_once(
    family: TunedConfigs[ProblemShape], caplog: pytest.LogCaptureFixture
) -> None:
    log.warning_once.cache_clear()
    put(family.file, raw(), raw(us=12.0), raw(kernel="?"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [record.config for record in family.on(target())] == [Tiles(tile=64)]
    (record,) = caplog.records
    assert "record 1: us 12.0 is not less than default_us 11.0 and 1 more; `dsl-backend doctor`" in record.getMessage()


def test_only_the_very_gpu(family: TunedConfigs[ProblemShape]) -> None:
    put(family.file, raw(), raw(gpu="NVIDIA Other", config={"tile": 32}), raw(arch="sm_100a"))

    def tiles(of: Target, **options: bool) -> list[int]:
        return [record.config.tile for record in family.on(of, **options)]

    assert tiles(target()) == [64]
    assert tiles(target("NVIDIA Other")) == [32]
    assert tiles(target("NVIDIA Third"), any_gpu=True) == []
    assert tiles(target(None)) == []
    assert tiles(target(None), any_gpu=True) == [64, 32]


CHIP = Chip(sm_count=132, memory_gb_s=4900, clock_mhz=1980, l2_bytes=50 << 20)


def test_a_record_with_a_chip_is_for_gpus_that_say_about_the_same(family: TunedConfigs[ProblemShape]) -> None:
    """Whatever their names are. A GPU that does not tell is taken by its name."""
    put(family.file, raw(chip=dataclasses.asdict(CHIP)))

    def found(gpu: str, **changes: int) -> bool:
        return bool(list(family.on(target(gpu, chip=dataclasses.replace(CHIP, **changes)))))

    assert found("NVIDIA Other")
    assert found("NVIDIA Other", memory_gb_s=4800, clock_mhz=1965)
    assert not found(GPU, memory_gb_s=3352)
    assert not found(GPU, clock_mhz=1600)
    assert not found(GPU, sm_count=114)
    assert not found(GPU, l2_bytes=60 << 20)
    assert list(family.on(target(GPU)))
    assert not list(family.on(target("NVIDIA Other")))


def test_a_merge_replaces_the_records_of_a_like_gpu(family: TunedConfigs[ProblemShape]) -> None:
    slower = dataclasses.replace(CHIP, memory_gb_s=3352)
    put(family.file, raw(chip=dataclasses.asdict(CHIP)), raw(chip=dataclasses.asdict(slower)))
    here = target("NVIDIA Other", chip=CHIP)
    made = family.record(ProblemShape(width=128), Tiles(tile=48), **facts(gpu="NVIDIA Other", chip=CHIP))
    assert family.save(family.file, here, [made.problem], [made]) == 2
    found, problems = family.read(family.file)
    assert problems == []
    assert {(record.measurement.chip, record.config.tile) for record in found} == {(CHIP, 48), (slower, 64)}


def test_ones_own_file_comes_first(
    family: TunedConfigs[ProblemShape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(family.file, raw())
    own = put(tmp_path / "own.json", raw(config={"tile": 16}), raw(family="attention", config={}))
    monkeypatch.setenv(envs.TUNED_CONFIGS.name, str(own))
    assert [record.config.tile for record in family.on(target())] == [16, 64]


def test_files_are_read_once(family: TunedConfigs[ProblemShape]) -> None:
    put(family.file, raw())
    assert len(family.found[0]) == 1
    put(family.file)
    assert len(family.found[0]) == 1
    family.forget()
    assert family.found == ([], [])


def test_what_is_saved_is_read_again(family: TunedConfigs[ProblemShape], tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    made = family.record(ProblemShape(width=8), Tiles(tile=48), rows=("a",), **facts())
    assert family.save(path, target(), [made.problem], [made]) == 1
    assert family.read(path) == ([made], [])


def test_a_merge_replaces_what_was_measured_again(family: TunedConfigs[ProblemShape]) -> None:
    """And leaves other problems, other GPUs and other families, word for word."""
    other_family = raw(family="attention", problem={"anything": 1}, config={"at": "all"})
    other_gpu = raw(gpu="NVIDIA Other")
    put(family.file, raw(), other_gpu, raw(problem={"width": 64}), raw(problem={"width": 32}), other_family)
    made = family.record(ProblemShape(width=128), Tiles(tile=48), **facts())
    # 64 was measured again too, and its heuristic has won.
    family.save(family.file, target(), [ProblemShape(width=128), ProblemShape(width=64)], [made])
    family.forget()
    found, problems = family.found
    assert problems == []
    assert [(record.measurement.gpu, record.problem.width, record.config.tile) for record in found] == [
        ("NVIDIA Other", 128, 64),
        (GPU, 128, 48),
        (GPU, 32, 64),
    ]
    assert other_family in tuned.records_of(family.file)


def test_a_merge_refuses_a_file_with_a_broken_record(family: TunedConfigs[ProblemShape]) -> None:
    put(family.file, raw(us=12.0))
    with pytest.raises(InvalidInput, match=r"record 0: us 12\.0 is not less"):
        family.save(family.file, target(), [], [])


def test_a_file_that_cannot_be_written(family: TunedConfigs[ProblemShape], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be written: No such file or directory"):
        family.save(tmp_path / "nowhere" / "tuned.json", target(), [], [])


def test_a_relative_path_is_refused(family: TunedConfigs[ProblemShape], monkeypatch: pytest.MonkeyPatch) -> None:
    put(family.file)
    monkeypatch.setenv(envs.TUNED_CONFIGS.name, "tuned.json")
    with pytest.raises(InvalidInput, match=r"DSL_BACKEND_TUNED_CONFIGS=.* is not accepted: use an absolute path"):
        list(family.on(target()))
