# SPDX-License-Identifier: Apache-2.0
"""The benchmark of weight-only layers: rows, bytes, inputs, a run at tiny scale, and what vLLM's kernels get."""

import json
import pathlib
from typing import Any

import pytest
import torch

import benchmarks
from benchmarks.devices import floor_us
from benchmarks.weight_only import providers
from benchmarks.weight_only.problems import Problem, build, reference
from dsl_backend.quant.weight_only import dequantized

CPU = torch.device("cpu")


def test_rows_and_their_work() -> None:
    cases = benchmarks.operators()["weight-only-linear"].cases()
    found = {case.id: case for case in cases}
    assert len(found) == len(cases)
    one = found["llama-8b-down-64"]
    assert one.traffic_bytes == 4096 * 14336 // 2 + 2 * 4096 * 112 + 2 * 64 * (14336 + 4096)
    assert found["w8-llama-8b-down-64"].traffic_bytes - one.traffic_bytes == 4096 * 14336 // 2
    # 790 TFLOP/s.
    assert floor_us(found["llama-8b-o-2048"], "NVIDIA H200") == pytest.approx(2e6 * 2048 * 4096 * 4096 / 790e12)


@pytest.mark.parametrize("bits", [4, 8])
def test_outputs_are_as_large_as_inputs(bits: int) -> None:
    problem = Problem(m=5, n=64, k=512, bits=bits)
    inputs = build(problem, 2, CPU, 0)
    assert 0.8 < reference(problem, inputs, 1).values.std() < 1.3
    assert not torch.equal(inputs.layers[0].values, inputs.layers[1].values)


def test_a_run(tmp_path: pathlib.Path, device: torch.device) -> None:
    file = tmp_path / "rows.jsonl"
    options = benchmarks.Options(rows="^tiny", seconds=0.01, device=device.type, peers="all")
    assert benchmarks.main("weight-only-linear", file, options) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()][1:]
    assert [row["parameters"]["bits"] for row in rows] == [4, 8]
    for row in rows:
        cells = {cell["provider"]: cell for cell in row["cells"]}
        assert set(cells) == {"dsl", "Marlin", "Machete", "bfloat16"}
        assert cells["dsl"]["status"] == cells["bfloat16"]["status"] == "ok", row
        assert all(cell["status"] == "ok" or cell["message"] for cell in row["cells"]), row


@pytest.mark.parametrize("bits", [4, 8])
def test_a_kernel_of_vllm_gets_the_layer_as_it_is_loaded(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a kernel that asks of parameters what Marlin and Machete ask, and reads words as GPTQ has them."""
    pytest.importorskip(f"{providers.KERNELS}.MPLinearKernel")
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
    from vllm.model_executor.parameter import BasevLLMParameter, permute_param_layout_

    class Read(MPLinearKernel):
        get_min_capability = classmethod(lambda cls: 0)
        can_implement = classmethod(lambda cls, config: (True, None))

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            def weight(x: Any) -> Any:
                assert isinstance(x, BasevLLMParameter)
                permute_param_layout_(x, input_dim=0, output_dim=1, packed_dim=0)
                shifts = torch.arange(0, 32, bits, dtype=torch.int32)[:, None]
                x.data = ((x.data[:, None] >> shifts) & ((1 << bits) - 1)).flatten(0, 1)
                return x

            def scale(x: Any) -> Any:
                assert isinstance(x, BasevLLMParameter)
                permute_param_layout_(x, input_dim=0, output_dim=1)
                return x

            self._transform_param(layer, self.w_q_name, weight)
            self._transform_param(layer, self.w_s_name, scale)

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            values, scale, _ = self._get_weight_params(layer)
            assert (self.config.group_size, self.config.weight_type.size_bits) == (128, bits)
            wide = (values.float() - (1 << (bits - 1))) * scale.float().repeat_interleave(128, 0)
            return x.float() @ wide

    monkeypatch.setattr(providers, "kernel_of", lambda name: Read)
    problem = Problem(m=3, n=16, k=256, bits=bits)
    inputs = build(problem, 2, CPU, 0)
    run = providers.vllm_kernel(problem, inputs, "Marlin")
    for index, layer in enumerate(inputs.layers):
        exact = layer.x.double() @ dequantized(layer.values, layer.scale, None, problem.kind).t()
        torch.testing.assert_close(run(index).double(), exact, rtol=1e-4, atol=1e-4)


def test_a_kernel_that_does_not_serve_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(f"{providers.KERNELS}.MPLinearKernel")
    monkeypatch.setattr(providers, "missing", lambda _: [])
    assert providers.vllm_objections(Problem(m=1, n=64, k=128), "Machete") == ["Machete only supported on CUDA"]
