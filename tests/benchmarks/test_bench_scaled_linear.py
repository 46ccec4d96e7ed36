# SPDX-License-Identifier: Apache-2.0
"""The benchmark of e4m3 linear layers: rows, bytes, the floor, peers' reasons, and a run at tiny scale."""

import json
import pathlib

import pytest
import torch

import benchmarks
from benchmarks import counted
from benchmarks.devices import floor_us
from benchmarks.scaled_linear import model
from benchmarks.scaled_linear.problems import SCHEMES, Problem, build, reference
from dsl_backend.quant.format import NVFP4
from dsl_backend.quant.reference import dequantized


def test_rows_and_their_work() -> None:
    cases = benchmarks.operators()["scaled-linear"].cases()
    assert len({case.id for case in cases}) == len(cases)
    found = {case.id: case for case in cases}["llama-8b-channels-64"]
    assert found.traffic_bytes == (28672 + 64) * 4096 + 64 * 14336 + 4 * (64 + 28672 + 64)
    assert found.flops == 2 * 64 * 28672 * 4096
    deep = {case.id: case for case in cases}["plain-deepseek-v3-o-blocks-8192"]
    # 1580 TFLOP/s.
    assert floor_us(deep, "NVIDIA H200") == pytest.approx(2e6 * 8192 * 7168 * 16384 / 1580e12)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_are_what_they_say(scheme: str) -> None:
    """As normal numbers, whose quantisation costs at most 2^-4 of each."""
    problem = Problem(m=5, n=16, k=256, scheme=scheme)
    inputs = build(problem, 2, torch.device("cpu"), 0)
    wide = dequantized(inputs.layers[1].x)
    assert 0.8 < wide.std() < 1.2
    assert 0.8 < dequantized(inputs.layers[1].weight).std() * 16 < 1.2
    gate, up = (wide @ dequantized(inputs.layers[1].weight).T).chunk(2, -1)
    found = reference(problem, inputs, 1)
    torch.testing.assert_close(found.values, (torch.nn.functional.silu(gate) * up)[found.rows])


def test_a_run(tmp_path: pathlib.Path, device: torch.device) -> None:
    file = tmp_path / "rows.jsonl"
    options = benchmarks.Options(rows="^tiny", seconds=0.01, device=device.type, peers="all")
    assert benchmarks.main("scaled-linear", file, options) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()][1:]
    assert len(rows) == 2 * len(SCHEMES)
    for row in rows:
        cells = {cell["provider"]: cell for cell in row["cells"]}
        assert cells["dsl"]["status"] == "ok", row
        assert set(cells) == {"dsl", "torch._scaled_mm", "vLLM CUTLASS", "DeepGEMM", "FlashInfer", "Triton"}
        # Who does not run says why.
        assert all(cell["status"] == "ok" or cell["message"] for cell in row["cells"]), row


@pytest.mark.parametrize("form", model.FORMATS)
def test_work_that_the_emulator_counts(form: str) -> None:
    """A stage has 512 cycles of tensor cores for both formats, and fewer instructions than CUTLASS's (docs)."""
    pytest.importorskip("cutlass")
    found = model.rows_of("dsl", form)
    assert found["cycles: tensor cores"] == (512, 0)
    assert found["warp instructions"][0] < 110


@pytest.mark.skipif(not (counted.THIRDPARTY / "cases_cutlass.py").is_file(), reason="the examples' tests are missing")
def test_the_work_of_cutlass() -> None:
    """On the same operands; the child process compares the result."""
    pytest.importorskip("cutlass")
    from benchmarks.clock.stand_in import EXAMPLES, PEERS

    if not (PEERS / EXAMPLES / model.EXAMPLE).is_file():
        pytest.skip("CUTLASS's examples are not there: tools/setup_peers.py gets them")
    found = model.amounts(counted.in_child(model.MODULE, "cutlass", "mxfp8", "2"))
    assert found["cycles: tensor cores"] == 2 * 512


def test_wrong_results_are_not_counted() -> None:
    given = model.tensors(NVFP4, 2)
    with pytest.raises(AssertionError, match="from the product"):
        model.check(given)
    exact = model.mma_dequantized(given.x) @ model.mma_dequantized(given.weight).T
    given.out.copy_(exact)
    model.check(given)
    given.out[:, :16] = given.out[:, 16:32]
    with pytest.raises(AssertionError, match="from the product"):
        model.check(given)
