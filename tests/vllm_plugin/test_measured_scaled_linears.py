# SPDX-License-Identifier: Apache-2.0
"""Fp8 layers that are this package's for the numbers of rows that records name, and vLLM's for others.

Both are on a CPU: torch's product is vLLM's kernel there, the reference is this package's. Layers of 128x128 blocks
have a stand-in for vLLM's kernel.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.config import set_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm import cpu as cpu_kernels
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import PerTensorTorchFP8ScaledMMLinearKernel

from dsl_backend.errors import InvalidInput
from dsl_backend.linear.scaled import eager, tuned
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.format import BLOCK_SCALED, GROUP_SCALED
from dsl_backend.quant.reference import Quantized, dequantized
from dsl_backend.runtime.target import from_arch
from dsl_backend.vllm_plugin import loaded_models
from dsl_backend.vllm_plugin.scaled_linears import find, measured
from dsl_backend.vllm_plugin.scaled_linears.find import KERNEL, holder_of
from dsl_backend.vllm_plugin.scaled_linears.kernels import HandedOn
from dsl_backend.vllm_plugin.scaled_linears.measured import Measured, MeasuredBlocks, MeasuredRows
from tests.vllm_plugin import test_scaled_linears as layers
from tests.vllm_plugin.test_fused_mlp import model_of
from tests.vllm_plugin.test_scaled_linears import MLP, Between, K, N, error, exact_of, kernel, processed, said, x_of

pytestmark = pytest.mark.usefixtures("one_rank", "afresh")
afresh = layers.afresh

WHERE_MEASURED = {"additional_config": {"dsl": {"scaled_linears": "measured"}}}
FEW = (2, 8)
# Of layers by (n, k, whether they are gated), the rows for which they were measured to be faster.
Records = dict[tuple[int, int, bool], tuple[tuple[int, int], ...]]
GATED, DOWN, BOTH = (N, K, True), (K, N, False), (2 * N, K, False)


class BlocksOnCpu(Fp8BlockScaledMMLinearKernel):
    """In the place of DeepGEMM's."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        x, weight = Quantized(A, As, GROUP_SCALED), Quantized(B, Bs, BLOCK_SCALED)
        return (dequantized(x) @ dequantized(weight).T).to(torch.bfloat16)


class Of16Bits(BlocksOnCpu):
    """As vLLM's kernel that has FlashInfer's for few rows: it quantises x itself, and has another one beside it."""

    apply_input_quant = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.fallback = BlocksOnCpu(config)
        self.rows: list[int] = []

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        assert A.dtype == torch.bfloat16
        self.rows.append(len(A))
        values, scale = self.fallback.quant_fp8(A)
        return self.fallback.apply_block_scaled_mm(values, B, scale, Bs)


GPU = replace(from_arch("sm_90a"), gpu="NVIDIA Test")


@pytest.mark.parametrize(
    ("asked", "target", "kernel", "known"),
    [
        ({}, GPU, "cute-sm90", True),
        ({"scaled_linears_kernel": "cute-sm90"}, GPU, "cute-sm90", True),
        ({"scaled_linears_kernel": "triton"}, GPU, "triton", False),
        ({}, replace(GPU, gpu=None), "cute-sm90", False),
        ({}, replace(from_arch("sm_100a"), gpu="NVIDIA Test"), None, False),
        ({}, from_arch("cpu"), None, False),
    ],
)
def test_which_kernels_records_are_of(asked: dict[str, str], target: Any, kernel: str | None, known: bool) -> None:
    config = SimpleNamespace(additional_config={"dsl": {"scaled_linears": "measured", **asked}})
    service = find.service_of(config, target)
    assert service == find.Service(kernel, True)
    assert IS_RECORDED(service, target) is known
    assert find.service_of(SimpleNamespace(additional_config={}), target) == find.Service(None, False)


IS_RECORDED = find.is_recorded


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, bool]]:
    """(whose kernel ran, rows, columns of what it returned, whether it had an activation), in order."""
    found: list[tuple[str, int, int, bool]] = []
    of_ours, of_theirs = eager.linear, measured.Beside.product

    def ours(x: Any, weight: Any, bias: Any, out_scale: Any, how: Any) -> Any:
        out = of_ours(x, weight, bias, out_scale, how)
        found.append(("dsl", *out[0].shape, how.activation is not None))
        return out

    def theirs(self: Any, x: Any, weight: Any, bias: Any) -> Any:
        out = of_theirs(self, x, weight, bias)
        found.append(("vllm", *out.shape, False))
        return out

    monkeypatch.setattr(eager, "linear", ours)
    monkeypatch.setattr(measured.Beside, "product", theirs)
    # On a CPU.
    monkeypatch.setattr(find, "is_recorded", lambda service, target: service.kernel in (None, "reference"))
    monkeypatch.setattr(cpu_kernels, "CPUFp8BlockScaledMMKernel", BlocksOnCpu)
    return found


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[Records], None]:
    def put(records: Records) -> None:
        def ranges(spec: ScaledLinearSpec, target: Any) -> list[tuple[tuned.ProblemShape, Any]]:
            problem = tuned.problem_of(spec, 132)
            of_layer = records.get((spec.n, spec.k, spec.parts == 2), ())
            return [(problem.of_rows(*rows), tuned.Ours()) for rows in of_layer]

        monkeypatch.setattr(tuned, "ranges", ranges)

    put({})
    return put


def made(scheme: str, kind: type[MLP] = MLP, theirs: type = BlocksOnCpu, **facts: Any) -> MLP:
    """A module whose layers have kernels that a CPU can run."""
    mlp = kind(scheme, **facts)
    for name in layers.NAMES:
        holder = holder_of(getattr(mlp, name))
        before = getattr(holder, KERNEL)
        with set_current_vllm_config(layers.without_compilation()):
            if scheme == "blocks":
                setattr(holder, KERNEL, theirs(before.config))
            elif scheme == "static":
                setattr(holder, KERNEL, PerTensorTorchFP8ScaledMMLinearKernel(before.config, before.layer_param_names))
    return mlp


SCHEMES = ("channels", "blocks", "static")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_choose_the_kernel(caplog: Any, recorded: Any, seen: Any, scheme: str) -> None:
    """Of both layers apart; the results are as good as each other, and vLLM's product has the activation behind it."""
    recorded({GATED: (FEW, (16, 16)), DOWN: ((8, 8),)})
    mlp = made(scheme)
    lines = said(caplog, model_of(mlp), **WHERE_MEASURED)
    assert isinstance(kernel(mlp.gate_up_proj), MeasuredBlocks if scheme == "blocks" else MeasuredRows)
    assert type(mlp.act_fn) is HandedOn
    assert [line.partition(", for ")[2].partition(" on ")[0] for line in lines] == ["2 to 8, 16 rows,", "8 rows,"]
    processed(mlp)
    for rows, who in ((1, "vv"), (2, "dv"), (8, "dd"), (9, "vv"), (16, "dv"), (17, "vv")):
        seen.clear()
        x = x_of(rows)
        assert error(mlp(x), exact_of(mlp, x)) < 0.1
        gate = ("dsl", rows, N, True) if who[0] == "d" else ("vllm", rows, 2 * N, False)
        assert seen == [gate, ("dsl" if who[1] == "d" else "vllm", rows, K, False)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_vllms_rows_have_vllms_bits(caplog: Any, recorded: Any, seen: Any, scheme: str) -> None:
    """Of a layer that is not linked: the same quantisation and the same product."""
    recorded({BOTH: (FEW,), DOWN: (FEW,)})
    theirs, ours = made(scheme, Between), made(scheme, Between)
    said(caplog, model_of(ours), **WHERE_MEASURED)
    assert kernel(ours.gate_up_proj).link is None
    processed(ours)
    processed(theirs)
    x = x_of(37)
    assert ours(x).equal(theirs(x))
    assert [one[0] for one in seen] == ["vllm", "vllm"]


def test_inputs_are_quantised_as_vllms_kernel_has_them(caplog: Any, recorded: Any) -> None:
    """DeepGEMM's with scales that are powers of two, if vLLM is set so."""
    recorded({BOTH: (FEW,), DOWN: (FEW,)})
    theirs, ours = made("blocks", Between), made("blocks", Between)
    for mlp in (theirs, ours):
        for name in layers.NAMES:
            kernel(getattr(mlp, name)).quant_fp8.use_ue8m0 = True
    plain = theirs(x_of(37))
    said(caplog, model_of(ours), **WHERE_MEASURED)
    processed(ours)
    assert ours(x_of(37)).equal(plain)
    for name in layers.NAMES:
        kernel(getattr(theirs, name)).quant_fp8.use_ue8m0 = False
    assert not theirs(x_of(37)).equal(plain)


@pytest.mark.parametrize("rows", [(), (0,), (2, 3), (5, 7)])
def test_shapes(caplog: Any, recorded: Any, rows: tuple[int, ...]) -> None:
    recorded({GATED: (FEW,), DOWN: (FEW,)})
    mlp = made("channels")
    said(caplog, model_of(mlp), **WHERE_MEASURED)
    processed(mlp)
    out = mlp(x_of(*rows))
    assert (out.shape, out.dtype) == ((*rows, K), torch.bfloat16)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_compiled_graph_has_both_kernels(caplog: Any, recorded: Any, seen: Any, scheme: str) -> None:
    recorded({GATED: (FEW,), DOWN: (FEW,)})
    mlp = made(scheme)
    said(caplog, model_of(mlp), **WHERE_MEASURED)
    processed(mlp)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend=backend)
    for rows, who in ((20, "vllm"), (5, "dsl"), (8, "dsl"), (9, "vllm")):
        seen.clear()
        x = x_of(rows)
        wanted = mlp(x)
        seen.clear()
        assert error(compiled(x), wanted.double()) < 1e-2
        assert [one[0] for one in seen] == [who, who]
    assert len(graphs) == 1


@pytest.mark.parametrize("bias", [False, True])
def test_a_bias_is_added_once(caplog: Any, recorded: Any, bias: bool) -> None:
    recorded({GATED: (FEW,), DOWN: (FEW,)})
    mlp = made("blocks", bias=bias)
    said(caplog, model_of(mlp), **WHERE_MEASURED)
    processed(mlp)
    for rows in (5, 20):
        assert error(mlp(x_of(rows)), exact_of(mlp, x_of(rows))) < 0.1


def test_a_kernel_of_16_bits_gets_them(caplog: Any, recorded: Any, seen: Any) -> None:
    """And what a linked projection quantised goes to the kernel beside it, for which there are records of few rows."""
    recorded({GATED: (FEW, (20, 40)), DOWN: (FEW,)})
    mlp = made("blocks", theirs=Of16Bits)
    gate, down = (kernel(getattr(mlp, name)) for name in layers.NAMES)
    lines = said(caplog, model_of(mlp), **WHERE_MEASURED)
    assert [line.partition(", for ")[2].partition(" on ")[0] for line in lines] == ["32 to 40 rows,", "2 to 8 rows,"]
    processed(mlp)
    for rows in (5, 31, 32, 40, 41):
        assert error(mlp(x_of(rows)), exact_of(mlp, x_of(rows))) < 0.1
    assert (gate.rows, down.rows) == ([5, 31, 41], [])
    assert [one[0] for one in seen] == ["vllm", "dsl", *("vllm", "vllm", "dsl", "vllm", "dsl", "vllm"), "vllm", "vllm"]


def test_columns_of_scales_lie_side_by_side_for_who_needs_it(caplog: Any, recorded: Any) -> None:
    """CUTLASS computes their place from the number of rows; kernels with TMA take them at multiples of 16 bytes."""
    recorded({DOWN: (FEW,), BOTH: (FEW,)})
    strides = []

    class Strict(BlocksOnCpu):
        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> torch.Tensor:
            strides.append(As.stride())
            return super().apply_block_scaled_mm(A, B, As, Bs)

    for aligned, wanted in ((False, (1, 9)), (True, (1, 12))):
        mlp = made("blocks", Between, theirs=Strict)
        for name in layers.NAMES:
            kernel(getattr(mlp, name)).quant_fp8.tma_aligned_scales = aligned
        said(caplog, model_of(mlp), **WHERE_MEASURED)
        of_gate = kernel(mlp.gate_up_proj)
        scale = torch.ones(2, 12).t()[:9]
        x = measured.Rows(torch.ones(9, K).to(torch.float8_e4m3fn), scale)
        processed(mlp)
        strides.clear()
        measured.Beside(of_gate_spec(mlp), of_gate, of_gate.theirs, ()).product(
            x, of_gate.weight_of(mlp.gate_up_proj), None
        )
        assert strides == [wanted]


def of_gate_spec(mlp: MLP) -> ScaledLinearSpec:
    return ScaledLinearSpec(n=2 * N, k=K, x=GROUP_SCALED, weight=BLOCK_SCALED, column_major=True)


def test_without_a_record_layers_stay_as_they_are(caplog: Any, recorded: Any) -> None:
    mlp = made("channels")
    before = [kernel(getattr(mlp, name)) for name in layers.NAMES]
    mlp.down_proj._input_quant_key = "a key"
    lines = said(caplog, model_of(mlp), **WHERE_MEASURED)
    assert [kernel(getattr(mlp, name)) for name in layers.NAMES] == before
    assert mlp.down_proj._input_quant_key == "a key"
    assert type(mlp.act_fn) is not HandedOn
    assert f"vLLM serves 2 fp8 linear layers: {find.NOTHING_MEASURED}" in lines


def test_an_activation_without_a_record_stays_and_its_projection_may_not(caplog: Any, recorded: Any, seen: Any) -> None:
    recorded({BOTH: (FEW,)})
    mlp = made("channels")
    lines = said(caplog, model_of(mlp), **WHERE_MEASURED)
    assert type(mlp.act_fn) is not HandedOn
    assert isinstance(kernel(mlp.gate_up_proj), Measured)
    assert not isinstance(kernel(mlp.down_proj), Measured)
    assert f"vLLM serves 1 activations behind fp8 layers: {find.NOTHING_MEASURED}" in lines
    processed(mlp)
    assert error(mlp(x_of(5)), exact_of(mlp, x_of(5))) < 0.1
    assert seen == [("dsl", 5, 2 * N, False)]


def test_a_consumer_without_a_record_takes_what_is_quantised(caplog: Any, recorded: Any, seen: Any) -> None:
    recorded({GATED: (FEW,)})
    mlp = made("channels")
    lines = said(caplog, model_of(mlp), **WHERE_MEASURED)
    assert any("RowParallelLinear" in line and ", for no rows, on" in line for line in lines)
    processed(mlp)
    assert error(mlp(x_of(5)), exact_of(mlp, x_of(5))) < 0.1
    assert seen == [("dsl", 5, N, True), ("vllm", 5, K, False)]


def test_kernels_with_weights_of_their_own_stay(caplog: Any, recorded: Any) -> None:
    recorded({GATED: (FEW,), DOWN: (FEW,)})

    class Packs(BlocksOnCpu):
        def apply_weights(self, layer: nn.Module, x: Any, bias: Any = None, **options: Any) -> Any:
            raise AssertionError

    mlp = made("blocks", theirs=Packs)
    (line,) = said(caplog, model_of(mlp), **WHERE_MEASURED)
    assert line.startswith("vLLM serves 2 fp8 linear layers: Packs has weights or inputs of its own form")


def test_weights_that_vllms_kernel_leaves_otherwise_are_refused(caplog: Any, recorded: Any) -> None:
    """As DeepGEMM's are on SM100, whose scales become four in an integer."""
    recorded({GATED: (FEW,), DOWN: (FEW,)})

    class Packs(BlocksOnCpu):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            layer.weight_scale_inv = nn.Parameter(torch.zeros(2, 1, dtype=torch.int32), requires_grad=False)

    mlp = made("blocks", theirs=Packs)
    said(caplog, model_of(mlp), **WHERE_MEASURED)
    with pytest.raises(InvalidInput, match=r"Packs left .* with scales torch\.int32"):
        processed(mlp)


def test_records_are_of_one_kernel(caplog: Any, recorded: Any) -> None:
    """Another one that is asked for was not measured."""
    recorded({GATED: (FEW,), DOWN: (FEW,)})
    options = {"scaled_linears": "measured", "scaled_linears_kernel": "triton"}
    (line,) = said(caplog, model_of(made("channels")), additional_config={"dsl": options})
    assert line == f"vLLM serves 2 fp8 linear layers: {find.NOTHING_MEASURED}"


def test_a_second_time_changes_nothing(caplog: Any, recorded: Any) -> None:
    recorded({GATED: (FEW,), DOWN: (FEW,)})
    model = model_of(made("channels"))
    said(caplog, model, **WHERE_MEASURED)
    assert said(caplog, model, **WHERE_MEASURED) == []


def test_compiled_graphs_are_keyed_by_it(caplog: Any, recorded: Any) -> None:
    recorded({GATED: (FEW,), DOWN: (FEW,)})
    said(caplog, model_of(made("channels")), **WHERE_MEASURED)
    assert "where measured" in loaded_models.compilation_key()
