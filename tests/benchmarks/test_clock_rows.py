# SPDX-License-Identifier: Apache-2.0
"""The emulator's clock stays as near to measured rows as docs/emulator-clock.md says that it is."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.clock import __main__ as command
from benchmarks.clock import on_chip, predictions, problems, softmax_configs
from benchmarks.clock.configs import Ranking, rank_correlation, timed
from benchmarks.clock.measured import MEASURED, ROWS, on_hopper
from benchmarks.clock.peers import ATTENTION, DECODE, PAGE, RUNS, flops, given, normal_e4m3, packed_shapes, sizes
from benchmarks.clock.problems import target_of
from benchmarks.softmax.problems import spec_of
from dsl_backend.attention.spec import Causality
from emulator.clock.chips import CHIPS
from emulator.clock.machine import time_of

pytest.importorskip("cutlass")
CHIP = "H200"
BY_NAME = {row.name: row for row in MEASURED}
WORST = 0.33  # error of a row of this package's on an H200, by docs/emulator-clock.md


def error(name):
    """The clock's time of a row against the GPU's."""
    row = BY_NAME[name]
    times = command.clocked(command.recorded(row, None), CHIPS[CHIP])
    return sum(time.microseconds for time in times) / row.microseconds - 1


@pytest.mark.parametrize("name", ["softmax 512x8192", "softmax 4096x8192", "softmax 2048x16384"])
def test_a_row_stays_within_its_error(name):
    assert abs(error(name)) < 0.1


@pytest.mark.rest
@pytest.mark.parametrize("name", ["linear held-out-deepseek-v2-lite-shared-640"])
def test_a_gemm_stays_within_its_error(name):
    assert abs(error(name)) < 0.25


@pytest.mark.rest
def test_decode_stays_within_its_error():
    """The quickest row of attention: it has two launches, as all of decode have."""
    assert abs(error("decode hd128-h8x1-b8-k8k")) < 0.15


@pytest.mark.rest
def test_a_cache_in_8_bits_stays_within_its_error():
    """Its kernel converts keys and values: with the rate of exponentials for that the row was 33 % too slow."""
    assert abs(error("decode fp8-hd128-h32x8-b8-k8k")) < 0.15


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("decode hd64-h64x8-b8-k8k", 0.1),
        ("mla-decode h16-b8-k8k-q1", 0.15),
        ("prefill hd128-h32x8-16x1k", 0.1),
        ("prefill fp8-hd128-h32x8-16x1k", 0.1),
        ("mla-prefill h16-16x1k", 0.1),
    ],
)
def test_attention_stays_within_its_error(name, most):
    assert abs(error(name)) < most


@pytest.mark.full
@pytest.mark.parametrize(("chip", "most"), [("GB200", 10), ("GB300", 20)])
def test_attention_on_a_superchip_stays_within_its_error(chip, most):
    """In a process of its own, which believes that it has the chip."""
    asked = [sys.executable, "-W", "ignore", "-m", "benchmarks.clock", "--chip", chip, "--rows", "^flash hd192.*2x2k$"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=600, check=False)
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("| flash")]
    assert abs(int(line.split("|")[4].strip().removesuffix("%"))) <= most, done.stderr


def test_a_row_of_attention_may_have_fewer_heads_of_keys():
    rows = [(row, sizes(ATTENTION, row)) for row in ("hd128-h64x8-2x2k", "hd192v128-h128-2x2k-causal")]
    shapes = [packed_shapes(one) for _, one in rows]
    assert shapes[0] == ((2, 2048, 64, 128), (2, 2048, 8, 128), (2, 2048, 8, 128))
    assert shapes[1] == ((2, 2048, 128, 192), (2, 2048, 128, 192), (2, 2048, 128, 128))
    for row, one in rows:
        problem, spec = problems.packed(row, torch.bfloat16)
        assert (problem.heads_q, problem.heads_kv) == (one["heads"], one["heads_kv"])
        assert (spec.causality is Causality.CAUSAL) == bool(one["causal"])


# How tables head the columns of an H200's times of ours, where the operator's rows do not say more.
HEADS = ("dsl:cute us", "dsl us", "ours")
FILTERS = {"none": "no filter", "k+p": "top-k and top-p"}


def places_of(row):
    """(What a line of a table may begin with, the heads that its column may have)."""
    if row.operator == "softmax":
        rows, columns = row.row.split("x")
        yield rows, (columns,)
    elif row.row.startswith("plain-"):
        yield row.row.rpartition("x")[2], HEADS
    else:
        yield row.row.removeprefix("held-out-"), HEADS
    if row.operator == "sampling":
        filters, _, shape = row.row.rpartition("-")
        yield shape.partition("x")[0], (FILTERS.get(filters),)


def figures(page, begins, heads):
    """The numbers of a page's tables on lines that begin so and in columns with such a head."""
    found, head = [], None
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            head = None
        elif head is None:
            head = cells
        elif cells[0] == begins:
            found += [float(cell.split()[0]) for name, cell in zip(head, cells, strict=True) if name in heads and cell]
    return found


def test_what_is_predicted_of_a_timed_row_is_in_the_table():
    """An H200 takes what the page's worst row says, or the row would be the worst one."""
    found = {f"{one.operator} {one.row}": one.us for one in predictions.everything() if one.chip == CHIP}
    assert found
    errors = {name: us / BY_NAME[name].microseconds - 1 for name, us in found.items()}
    assert {name: error for name, error in errors.items() if abs(error) > WORST} == {}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_measured_time_is_in_the_page_that_it_names(name):
    """The page has the figures of today's kernels; older ones move to docs/measurements."""
    row = BY_NAME[name]
    assert row.source.startswith("docs/performance/")
    page = (Path(__file__).parents[2] / row.source).read_text()
    assert row.microseconds in [us for place in places_of(row) for us in figures(page, *place)]


def test_a_row_of_decode_may_name_its_pages(monkeypatch):
    """On both sides; else pages have what the other kernel copies at once."""
    asked = []
    monkeypatch.setattr(
        problems.problems, "dense", lambda *_, page_size: asked.append(page_size) or SimpleNamespace(spec=0)
    )
    monkeypatch.setattr(problems, "attended", lambda *_: None)
    for row in ("hd128-h64x8-b64-k1k-q1-p16", "hd128-h64x8-b64-k1k-q1"):
        problems.BESIDE["flash-decode"](row, None)
    assert asked == [sizes(DECODE, "hd128-h64x8-b64-k1k-q1-p16")["page"], PAGE] == [16, 128]


def test_every_blackwell_chip_has_its_own_file_of_a_row():
    """Kernels take other configurations on it, or other grids; Hopper's chips run the same."""
    row = next(one for one in ROWS if one.chip == "GB200")
    names = {chip: command.kept_name(replace(row, chip=chip), ours=False) for chip in CHIPS}
    assert names["H100"] == names["H200"]
    assert len(set(names.values())) == len(CHIPS) - 1


def test_a_quarter_of_the_rows_is_fitted():
    fitted_rows = [row for row in ROWS if row.fitted]
    assert len(fitted_rows) <= len(MEASURED) / 4
    assert {row.chip for row in fitted_rows} == {CHIP}
    assert len({(row.chip, row.name) for row in ROWS}) == len(ROWS)
    fitted = [known for known in CHIPS[CHIP].constants.values() if known.source.startswith("fitted")]
    assert 0 < len(fitted) <= 8


@pytest.mark.rest
def test_a_published_figure_stays_within_its_error():
    """In a process of its own, which believes that it has a B200."""
    pytest.importorskip("triton", reason="quack imports Triton")
    asked = [sys.executable, "-W", "ignore", "-m", "benchmarks.clock", "--chip", "B200", "--rows", "^quack-gemm 4096"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=400, check=False)
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("| quack-gemm")]
    assert abs(int(line.split("|")[4].strip().removesuffix("%"))) <= 15, done.stderr


@pytest.mark.parametrize(
    ("operator", "row", "right"),
    [
        ("flash", "hd128-h16-4x8k", 4 * 8192**2 * 128 * 16 * 4),
        ("flash", "hd192v128-h16-2x1k-causal", (192 + 128) * 1024**2 * 16 * 2),
        ("flash-fp8", "hd128-h16-4x8k-causal", 2 * 8192**2 * 128 * 16 * 4),
        ("flash-decode", "hd64-h64x8-b8-k4k-q2", 4 * 2 * 4096 * 64 * 64 * 8),
        ("flash", "hd128-h16-4x8k-causal", 2 * 8192**2 * 128 * 16 * 4),
        ("flash-mla", "h128-b2-k4k", 2 * 2 * 128 * 4096 * (576 + 512)),
        ("cutlass-mla-fp8", "h128-b2-k4k", 2 * 2 * 128 * 4096 * (576 + 512)),
        ("quack-gemm", "4096x512x64", 2 * 4096 * 512 * 64),
        ("quack-gated", "4096x512x64", 2 * 2 * 4096 * 512 * 64),
        ("cutlass-gemm", "4096x512x64", 2 * 4096 * 512 * 64),
    ],
)
def test_operations_are_counted_as_publishers_count_them(operator, row, right):
    assert flops(operator, row) == right
    with pytest.raises(KeyError):
        flops(operator, "llama-8b-64")


def test_attention_in_8_bits_has_e4m3_queries_keys_and_values_on_both_sides(monkeypatch):
    """Normal values: zeros would let no row's maximum move."""
    seen = {}
    monkeypatch.setattr(problems, "attended", lambda *given, **options: seen.update(given=given, options=options))
    problems.BESIDE["flash-fp8"]("hd128-h2-1x1k-causal", None)
    problem, spec, _, kernel = seen["given"]
    assert (spec.query_dtype, spec.kv_dtype, kernel) == (torch.float8_e4m3fn, torch.float8_e4m3fn, "cute-fp8")
    assert (problem.heads_q, problem.kv_lens, spec.causality) == (2, (1024,), Causality.CAUSAL)
    assert seen["options"] == {"normal": True}
    theirs = normal_e4m3(4, 64).float()
    assert 0.5 < float(theirs.std()) < 2


def test_rows_that_were_kept_are_not_simulated_again(tmp_path, capsys, monkeypatch):
    row = BY_NAME["softmax 512x4096"]
    first = command.recorded(row, tmp_path)
    monkeypatch.setattr(command, "run_of", None)
    again = command.recorded(row, tmp_path)
    times = [[time_of(one, CHIPS[CHIP]).cycles for one in some] for some in (first, again)]
    assert times[0] == times[1]
    monkeypatch.setattr("sys.argv", ["clock", "--rows", "^softmax", "--keep", str(tmp_path), "--kept"])
    assert command.main() == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[2].startswith(f"| softmax 512x4096 | {row.microseconds} |")
    assert shown[3].startswith("| mean, worst of 1 held out |")


def test_a_row_of_others_is_timed_with_random_operands(monkeypatch):
    seen = []

    def operand(row):
        x = given(int(row), 8)
        return lambda: seen.append(x)

    monkeypatch.setitem(RUNS, "flash", operand)
    found = on_chip.timed("flash", "4", 0.01, torch.device("cpu"))
    assert (found["operator"], found["row"], found["layers"]) == ("flash", "4", 1)
    assert 0 < found["p10_us"] <= found["us"] <= found["p90_us"]
    assert len(seen) > 2 * on_chip.LEAST_SAMPLES
    assert not seen[0].any()  # on a CPU it is the emulator's
    with torch.device("meta"):
        assert given(2, 3).shape == (2, 3)
    assert on_chip.chip_of("NVIDIA H100 80GB HBM3") == "H100"
    with pytest.raises(KeyError):
        on_chip.chip_of("NVIDIA B200")


def test_a_row_of_others_that_fails_costs_no_other(monkeypatch, capsys):
    monkeypatch.setattr(on_chip, "environment", dict)
    monkeypatch.setattr(on_chip.subprocess, "run", lambda command, **_: finished(command[command.index("--one") + 1]))

    def finished(name):
        if name.startswith("quack"):
            return SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nValueError: no")
        return SimpleNamespace(returncode=0, stdout="said\n{1}\n", stderr="")

    options = SimpleNamespace(seconds=0.1, limit_seconds=1, processes=2)
    found = list(on_chip.every([("quack-gemm", "1x1x1"), ("flash", "hd64-h1-1x1k")], options))
    assert found == ["{}", "{1}"]
    assert "quack-gemm 1x1x1: failed with status 1: ValueError: no" in capsys.readouterr().err


def on_a_gpu(monkeypatch, answer):
    """As if there were one: each row's process is answered by a function of its operator, row, and clock or None."""

    def run(command, **_):
        operator, row = command[command.index("--one") + 1].split(" ")
        clock = command[command.index("--clock") + 1] if "--clock" in command else None
        found = answer(operator, row, clock)
        return SimpleNamespace(returncode=int(found is None), stdout=f"{json.dumps(found)}\n", stderr="no time")

    monkeypatch.setattr(on_chip.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(on_chip, "environment", lambda: {"kind": "environment", "chip": "H100"})
    monkeypatch.setattr(on_chip, "ready", lambda _: None)
    monkeypatch.setattr(on_chip.subprocess, "run", run)


def test_mutants_are_timed_on_the_gpu_and_by_its_clock(monkeypatch, capsys, tmp_path):
    us = {"stages-4": 10.0, "stages-3": 11.0, "stages-2": 15.0}

    def answer(operator, row, clock):
        if clock and row == "stages-3":
            return None
        time = {"clock_us": 2 * us[row]} if clock else {"us": us[row]}
        return {"chip": clock or "H100", "operator": operator, "row": row, **time}

    on_a_gpu(monkeypatch, answer)
    file = tmp_path / "mutants.jsonl"
    asked = ["on_chip", "--mutants", "--rows", "^mutant stages", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", asked)
    assert on_chip.main() == 0
    told = capsys.readouterr()
    assert "mutant stages-3: failed with status 1: no time" in told.err
    records = [json.loads(line) for line in told.out.splitlines()]
    assert file.read_text() == told.out
    assert {(one["row"], one["chip"]) for one in records if "clock_us" in one} == {
        ("stages-4", "H100"),
        ("stages-2", "H100"),
    }
    ratios = [(one["row"], one["us_ratio"], one["clock_us_ratio"]) for one in records if one.get("kind") == "mutant"]
    assert ratios == [("stages-3", 1.1, None), ("stages-2", 1.5, 1.5)]


@pytest.mark.parametrize(
    ("words", "available", "status", "said"),
    [
        (["--mutants"], False, 2, "there is no CUDA device"),
        (["--mutants", "--rows", "^flash"], True, 2, "no row matches '^flash'"),
        (["--rows", "^mutant"], True, 2, "no row matches '^mutant'"),
        (["--mutants", "--rows", "stages"], True, 1, "mutant stages-4: failed with status 1"),
    ],
)
def test_what_cannot_be_timed_has_a_status(monkeypatch, capsys, words, available, status, said):
    on_a_gpu(monkeypatch, lambda *_: None)
    monkeypatch.setattr(on_chip.torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(sys, "argv", ["on_chip", *words])
    assert on_chip.main() == status
    assert said in capsys.readouterr().err


def test_a_mutant_by_the_clock(monkeypatch, capsys):
    """The process of one row: nothing of a GPU is asked for."""
    monkeypatch.setattr(on_chip, "ready", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["on_chip", "--one", "mutant outputs", "--clock", "H200"])
    assert on_chip.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["chip"], found["row"]) == ("H200", "outputs")
    assert 2 < found["clock_us"] < 6


def test_times_of_a_file_become_rows_of_its_chip(tmp_path):
    file = tmp_path / "hopper-peers.jsonl"
    lines = [
        {"kind": "environment", "chip": "H100"},
        {"chip": "H200", "operator": "quack-gemm", "row": "4096x4096x4096", "us": 2.0},
        {"chip": "H100", "operator": "flash", "row": "hd64-h32-16x1k-causal", "us": 3.0},
        {"chip": "H100", "operator": "flash", "row": "gone", "us": 3.0},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flash, gemm = on_hopper(file)
    assert (flash.chip, flash.microseconds, flash.samples, flash.fitted) == ("H100", 3.0, 8, False)
    assert (gemm.chip, gemm.name, gemm.microseconds) == ("H200", "quack-gemm 4096x4096x4096", 2.0)
    assert on_hopper(tmp_path / "none") == ()


TARGET = target_of(CHIPS[CHIP])
CONFIGS = {(one.row, one.name): one for one in timed()}


def test_every_timed_configuration_is_one_of_the_kernels():
    assert len(CONFIGS) == len(timed())
    for one in CONFIGS.values():
        assert one.config.objections(one.spec, TARGET.smem_bytes) == []
        assert 1 <= one.samples(TARGET) <= 8
    rows = [row for row, _ in CONFIGS]
    assert sum(rows.count(row) >= 8 for row in set(rows)) >= 8


@pytest.mark.parametrize(
    ("row", "name", "samples"),
    [
        # 128 tiles for 132 CTAs; a cluster for each tile.
        ("o-blocks-256", "128x64 p1 t1 c1", 1),
        ("o-blocks-256", "128x128 p1 t1 c1 halves", 1),
        # 384 tiles of 128 x 256 for 132: 120 CTAs have three, the others two.
        ("qkv-blocks-2048", "128x256 p1 t2 c1", 2),
    ],
)
def test_clusters_with_most_tiles_are_among_those_that_are_simulated(row, name, samples):
    assert CONFIGS[row, name].samples(TARGET) == samples


def test_a_choice_costs_what_it_takes_longer_on_the_chip():
    ranking = Ranking("row", "abc", [10.0, 11.0, 20.0], [9.0, 8.0, 30.0])
    assert ranking.cost == pytest.approx(0.1)
    assert ranking.error == pytest.approx((0.1 + 3 / 11 + 0.5) / 3)
    assert str(ranking).startswith("| row | 3 | a | 10.0 | b | 11.0 | 10.0% | 0.50 |")
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3], [5, 5, 5]) == 0
    # Equal ones share a place.
    assert rank_correlation([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)


def test_no_choice_falls_on_a_configuration_that_spills():
    ranking = Ranking("row", "abc", [10.0, 11.0, 20.0], [9.0, 8.5, 8.0], spilled=[0, 0, 16])
    assert (ranking.chosen, ranking.best) == (1, 0)
    assert Ranking("row", "ab", [10.0, 11.0], [9.0, 8.0], spilled=[4, 16]).chosen == 1


def test_every_timed_softmax_is_one_of_the_kernels():
    every = softmax_configs.timed()
    assert len({(one.row, one.name) for one in every}) == len(every) == len({one.file for one in every})
    for one in every:
        assert one.config.objections(spec_of(one.problem), TARGET.smem_bytes) == []
    rows = [one.row for one in every]
    assert sum(rows.count(row) >= 8 for row in set(rows)) == 16


def test_a_softmax_that_lets_the_next_one_start_is_timed_behind_others(monkeypatch, capsys):
    """Early, CTAs of the rows pack onto few SMs; late, they do not, and the H200 takes two thirds of the time."""
    some = {one.name: one for one in softmax_configs.timed() if one.row == "softmax-860x864"}
    default, late = some["default"], some["late"]
    clocked, streams = command.clocked, []

    def seen(launches, chip):
        streams.append(clocked(launches, chip))
        return streams[-1]

    monkeypatch.setattr(command, "clocked", seen)
    monkeypatch.setattr(command, "timed", list)
    monkeypatch.setattr(softmax_configs, "timed", lambda: [default, late])
    monkeypatch.setattr("sys.argv", ["clock", "--configs"])
    assert command.main() == 0
    assert "| softmax-860x864 | 2 | late | 2.2 | late | 2.2 | 0.0% |" in capsys.readouterr().out
    for one, stream in zip((default, late), streams[1::2], strict=True):
        assert len(stream) == one.in_a_row > 1
        second_half = stream[len(stream) // 2 :]
        us = sum(launch.microseconds for launch in second_half) / len(second_half)
        assert abs(us / one.microseconds - 1) < 0.2
        even = -(-stream[-1].layout.clusters // stream[-1].layout.groups)
        assert (stream[-1].placed.most > even) == (one is default)
    assert streams[1][-1].begin < streams[1][-2].end


@pytest.mark.rest
@pytest.mark.parametrize(
    ("row", "names"),
    [
        ("o-blocks-256", ("128x128 p1 t1 c1 halves", "128x64 p1 t1 c2", "128x128 p1 t2 c2 overlap")),
        # With stores into another SM's memory as fast as other copies, and fences for nothing, the halves were first.
        ("qkv-channels-256", ("128x96 p4 t1 c1", "128x192 p1 t2 c1 overlap halves")),
    ],
)
def test_configurations_that_differ_much_keep_their_order(row, names):
    some = [CONFIGS[row, name] for name in names]
    assert some == sorted(some, key=lambda one: one.microseconds)
    times = []
    for one in some:
        launched = command.simulated(partial(one.prepared, TARGET), CHIPS[CHIP], one.samples(TARGET), None)
        times.append(sum(time_of(launch, CHIPS[CHIP]).microseconds for launch in launched))
    assert times == sorted(times)
    assert all(abs(us / one.microseconds - 1) < 0.25 for us, one in zip(times, some, strict=True))
