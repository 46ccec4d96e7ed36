# SPDX-License-Identifier: Apache-2.0
"""The providers of e4m3 linear layers: this package, torch._scaled_mm, and the products that vLLM calls.

A peer's gated layer is its product, then vLLM's kernel of the activation and its kernel of the quantisation.
"""

import importlib.util
from collections.abc import Callable, Sequence

import torch
from dsl_backend.linear.scaled import api, dispatch
from dsl_backend.providers import Launch, provider
from dsl_backend.quant.format import ROW_SCALED, TENSOR_SCALED
from dsl_backend.quant.reference import Quantized, dequantized
from dsl_backend.runtime import target as targets

from ..columns import missing, own_triton, reasons
from .problems import Inputs, Layer, Problem

DEEP_GEMM = "DeepGEMM"
# A product of a layer, [m, weight rows] bfloat16.
Product = Callable[[Layer], torch.Tensor]


def objections(problem: Problem, kernel: str | None = None) -> list[str]:
    return reasons(lambda: dispatch.choose(problem.spec, targets.detect(), kernel))


def with_scales(problem: Problem, layer_of: Callable[[int], Quantized]) -> Launch:
    """A launch whose quantised results are compared as they are dequantised."""
    kind = problem.spec.out
    assert kind is not None
    scales: dict[int, torch.Tensor] = {}

    def run(index: int) -> torch.Tensor:
        found = layer_of(index)
        scales[found.values.data_ptr()] = found.scale
        return found.values

    return Launch(run, lambda values: dequantized(Quantized(values, scales[values.data_ptr()], kind), torch.float32))


def ours(problem: Problem, inputs: Inputs, kernel: str | None = None) -> Launch:
    """`api.scaled_linear` or `scaled_linear_quantized`, with a kernel from the dispatch table; by default its own."""
    spec = problem.spec
    to = spec.out
    if to is None:
        return Launch(
            lambda index: api.scaled_linear(inputs.layers[index].x, inputs.layers[index].weight, kernel=kernel)
        )

    def quantised(index: int) -> Quantized:
        layer = inputs.layers[index]
        return api.scaled_linear_quantized(
            layer.x, layer.weight, to=to, out_scale=layer.out_scale, activation=spec.activation, kernel=kernel
        )

    return with_scales(problem, quantised)


def activated(problem: Problem, inputs: Inputs, product: Product) -> Launch:
    """A product; with an activation vLLM's two kernels behind it, as vLLM runs them without fusions."""
    if not problem.gated:
        return Launch(lambda index: product(inputs.layers[index]))
    from vllm import _custom_ops as vllm_ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    out = torch.empty((problem.m, problem.n), dtype=torch.bfloat16, device=inputs.layers[0].x.values.device)
    kind = problem.spec.out
    assert kind is not None

    def quantised(index: int) -> Quantized:
        layer = inputs.layers[index]
        torch.ops._C.silu_and_mul(out, product(layer))
        if kind == TENSOR_SCALED:
            values, scale = vllm_ops.scaled_fp8_quant(out, layer.out_scale)
        elif kind == ROW_SCALED:
            values, scale = vllm_ops.scaled_fp8_quant(out, use_per_token_if_dynamic=True)
            scale = scale.view(-1)
        else:
            values, scale = per_token_group_quant_fp8(out, kind.block_columns, column_major_scales=True)
        return Quantized(values, scale, kind)

    return with_scales(problem, quantised)


def of_gated(problem: Problem) -> list[str]:
    """What a gated layer of a peer needs besides its product."""
    return missing("vllm") if problem.gated else []


def torch_objections(problem: Problem) -> list[str]:
    if not torch.cuda.is_available():
        return ["needs a CUDA device"]
    found = [] if torch.cuda.get_device_capability() >= (8, 9) else ["needs compute capability 8.9 or newer"]
    return [*found, *of_gated(problem)] + (["has no 128x128 blocks here"] if problem.spec.weight.blocked else [])


@provider("scaled-linear", name="torch._scaled_mm", objections=torch_objections, package="torch")
def scaled_mm(problem: Problem, inputs: Inputs) -> Launch:
    """CuBLASLt, or CUTLASS for scales of rows."""
    by_row = problem.spec.x == ROW_SCALED

    def product(layer: Layer) -> torch.Tensor:
        scales = [one.scale for one in (layer.x, layer.weight)]
        scale_a, scale_b = (scales[0].view(-1, 1), scales[1].view(1, -1)) if by_row else scales
        return torch._scaled_mm(
            layer.x.values, layer.weight.values.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16
        )

    return activated(problem, inputs, product)


def cutlass_objections(problem: Problem) -> Sequence[str]:
    if found := missing("vllm"):
        return found
    import vllm._custom_ops as ops

    if not hasattr(torch.ops._C, "cutlass_scaled_mm"):
        return ["this vLLM has no CUDA kernels"]
    major, minor = torch.cuda.get_device_capability()
    blocks = problem.spec.weight.blocked
    ask = ops.cutlass_scaled_mm_supports_block_fp8 if blocks else ops.cutlass_scaled_mm_supports_fp8
    return (
        [] if ask(10 * major + minor) else [f"vLLM's CUTLASS kernels do not serve compute capability {major}.{minor}"]
    )


def rows_of_four(x: Quantized) -> Quantized:
    """X with rows of zeros up to a multiple of 4, and its scales of groups in columns of as many rows.

    CUTLASS computes where a scale lies from the number of rows alone: columns of one row that were padded to 16 bytes
    were read as if they lay side by side.
    """
    missing_rows = -x.values.shape[0] % 4
    values = torch.nn.functional.pad(x.values.view(torch.uint8), (0, 0, 0, missing_rows)).view(x.values.dtype)
    scale = torch.nn.functional.pad(x.scale, (0, 0, 0, missing_rows))
    return x._replace(values=values, scale=scale.t().contiguous().t())


def cutlass_product(problem: Problem, inputs: Inputs) -> Product:
    """`cutlass_scaled_mm`, as vLLM calls it: with blocks, rows are padded to a multiple of 4, here in advance."""
    from vllm import _custom_ops as ops

    blocked = problem.spec.weight.blocked
    padded = {id(layer): rows_of_four(layer.x) for layer in inputs.layers} if blocked else {}

    def product(layer: Layer) -> torch.Tensor:
        scale_a, scale_b = layer.x.scale, layer.weight.scale
        if blocked:
            values, scale, _ = padded[id(layer)]
            out = ops.cutlass_scaled_mm(values, layer.weight.values.t(), scale, scale_b.t(), torch.bfloat16)
            return out[: problem.m]
        if problem.spec.x == ROW_SCALED:
            scale_a, scale_b = scale_a.view(-1, 1), scale_b.view(-1, 1)
        return ops.cutlass_scaled_mm(layer.x.values, layer.weight.values.t(), scale_a, scale_b, torch.bfloat16)

    return product


@provider("scaled-linear", name="vLLM CUTLASS", objections=cutlass_objections, package="vllm")
def cutlass(problem: Problem, inputs: Inputs) -> Launch:
    return activated(problem, inputs, cutlass_product(problem, inputs))


def deep_gemm_objections(problem: Problem) -> Sequence[str]:
    if not problem.spec.weight.blocked:
        return ["serves 128x128 blocks alone"]
    if found := missing("vllm"):
        return found
    from vllm.utils.deep_gemm import is_deep_gemm_supported

    return [] if is_deep_gemm_supported() else ["vLLM's DeepGEMM is not installed, or does not serve this GPU"]


def deep_gemm_product(problem: Problem, inputs: Inputs) -> Product:
    """`fp8_gemm_nt` by way of vLLM, with float32 scales."""
    from vllm.utils.deep_gemm import fp8_gemm_nt

    rows = problem.spec.weight_rows

    def product(layer: Layer) -> torch.Tensor:
        # One for each layer: results are compared when all layers have run.
        out = torch.empty((problem.m, rows), dtype=torch.bfloat16, device=layer.x.values.device)
        fp8_gemm_nt(layer.x[:2], layer.weight[:2], out, is_deep_gemm_e8m0_used=False)
        return out

    return product


@provider("scaled-linear", name=DEEP_GEMM, objections=deep_gemm_objections, package="vllm")
def deep_gemm(problem: Problem, inputs: Inputs) -> Launch:
    return activated(problem, inputs, deep_gemm_product(problem, inputs))


def flashinfer_objections(problem: Problem) -> Sequence[str]:
    blocked = problem.spec.weight.blocked
    if not blocked and (problem.spec.x != TENSOR_SCALED or problem.spec.weight != TENSOR_SCALED):
        return ["is measured with one scale for each operand, and with 128x128 blocks"]
    found = missing("flashinfer", "flashinfer-python") + of_gated(problem)
    if not found and importlib.util.find_spec("flashinfer.gemm") is None:
        found = ["this FlashInfer has no products"]
    if not found and blocked and torch.cuda.get_device_capability() != (9, 0):
        found = ["its 128x128 blocks need compute capability 9.0"]
    return found


@provider("scaled-linear", name="FlashInfer", objections=flashinfer_objections, package="flashinfer-python")
def flashinfer(problem: Problem, inputs: Inputs) -> Launch:
    """`bmm_fp8` with a batch of one, as vLLM calls it; of blocks the product that vLLM has for few rows.

    vLLM gives the latter 16 bits, which it quantises itself; here x is quantised for all peers.
    """
    if problem.spec.weight.blocked:
        from flashinfer.gemm import fp8_blockscale_gemm_sm90

        def of_blocks(layer: Layer) -> torch.Tensor:
            (x, x_scale, _), (weight, weight_scale, _) = layer.x, layer.weight
            found: torch.Tensor = fp8_blockscale_gemm_sm90(x, weight, x_scale.t(), weight_scale)
            return found

        return activated(problem, inputs, of_blocks)
    from flashinfer import bmm_fp8

    def product(layer: Layer) -> torch.Tensor:
        (x, x_scale, _), (weight, weight_scale, _) = layer.x, layer.weight
        return bmm_fp8(x[None], weight.t()[None], x_scale, weight_scale, torch.bfloat16, backend="auto")[0]

    return activated(problem, inputs, product)


own_triton("scaled-linear", ours, objections, "linear/scaled/triton/gemm.py")
