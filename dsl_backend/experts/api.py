# SPDX-License-Identifier: Apache-2.0
"""Routed experts on tensors: plan a layer once, run it for every step.

    plan = api.plan(spec, device)
    out = api.run(plan, x, w13, w2, topk_weights, topk_ids)

The routing stays on the device: neither call reads it, so that `run` may be captured in a CUDA graph. An argument that
does not fit raises InvalidInput; a problem that no kernel serves raises Unsupported with all objections. An expert
number that is no expert's is skipped, as padding (-1) is: it is a value, which no host reads.
"""

import torch

from dsl_backend import checks
from dsl_backend.checks import facts_of, require, short
from dsl_backend.errors import InvalidInput
from dsl_backend.experts.args import ExpertsOperands, ExpertsScales
from dsl_backend.experts.plan import ExpertsPlan
from dsl_backend.experts.scales import mma_scales
from dsl_backend.experts.spec import MAX_TOKENS, ExpertsSpec, RouterWeights
from dsl_backend.gemm.activation import SWIGLU_OAI, Activation, Geglu, Swiglu
from dsl_backend.quant.format import BLOCK_SCALED, GROUP_SCALED, MXFP4, MXFP4_TILED, MXFP8, NVFP4, ROW_SCALED
from dsl_backend.quant.mxfp4_tiles import pack_experts, packed_shape
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.workspace import Workspace

__all__ = [
    "BLOCK_SCALED",
    "GROUP_SCALED",
    "MXFP4",
    "MXFP4_TILED",
    "MXFP8",
    "NVFP4",
    "ROW_SCALED",
    "SWIGLU_OAI",
    "Activation",
    "ExpertsPlan",
    "ExpertsScales",
    "ExpertsSpec",
    "Geglu",
    "RouterWeights",
    "Swiglu",
    "Workspace",
    "mma_scales",
    "pack_experts",
    "plan",
    "run",
]

# Layouts of operands to remember; a served model has one for each number of tokens.
LAYOUTS = 1 << 14
FLOAT32 = torch.float32
NO_SCALES = ExpertsScales()


def plan(
    spec: ExpertsSpec,
    device: torch.device | str,
    *,
    workspace: Workspace | None = None,
    kernel: str | None = None,
) -> ExpertsPlan:
    """Choose the kernel of a layer.

    Args:
        workspace: scratch to share with other plans of the same stream; a new one by default. Layers of a model should
            share one: it grows to two rows for each token and expert.
        kernel: a name from the dispatch table; no other kernel is taken. By default the best that serves the spec.

    Raises:
        InvalidInput: an argument does not fit.
        Unsupported: no kernel serves the spec on the device.
    """
    checks.instance("spec", spec, ExpertsSpec)
    checks.kernel(kernel)
    device = checks.device("device", device)
    if device.type == "cuda":
        device = torch.device("cuda", targets.cuda_index(device))
    if workspace is not None:
        checks.instance("workspace", workspace, Workspace)
        require(workspace.device == device, f"workspace is on {workspace.device}, the plan on {device}")
    return ExpertsPlan(spec, targets.detect(device), workspace or Workspace(device), kernel)


def run(
    plan: ExpertsPlan,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor | None,
    topk_ids: torch.Tensor,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scales: ExpertsScales = NO_SCALES,
    **shared: torch.Tensor | None,
) -> torch.Tensor:
    """The experts' weighted sum for each token; shapes as `ExpertsOperands` has them, with rows of x and out at any
    stride.

    Args:
        scales: of what is in 8 bits.
        shared: shared_w13 and shared_w2, of shared experts, where the spec has any.
        out: written in place and returned; it overlaps no other tensor. New by default. A token without an expert of
            this rank gets zeros.

    Raises:
        InvalidInput: an argument does not fit the plan's spec, or a tensor requires a gradient while gradients are on;
            the message names it. That out overlaps another tensor is not looked at.
    """
    checks.instance("plan", plan, ExpertsPlan)
    if out is None:
        checks.tensor("x", x)
        out = torch.empty(x.shape, dtype=plan.spec.dtype, device=x.device)
    checks.instance("scales", scales, ExpertsScales)
    of_shared = [shared.pop(name, None) for name in ("shared_w13", "shared_w2")]
    require(
        not shared, f"run has no argument {', '.join(shared)}: shared_w13 and shared_w2 are those of shared experts"
    )
    given = (x, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias, expert_map, out)
    operands = ExpertsOperands(*given, scales, *of_shared)
    layout = tuple(map(facts_of, (*given, *scales, *of_shared)))
    if layout not in plan.layouts:
        check(plan, operands)
        if len(plan.layouts) >= LAYOUTS:
            plan.layouts.clear()
        plan.layouts.add(layout)
    if x.shape[0]:
        plan.run(operands)
    return out


def check(plan: ExpertsPlan, operands: ExpertsOperands) -> None:
    """Raises InvalidInput where a tensor does not fit the plan."""
    spec, given = plan.spec, operands
    checks.tensor("x", given.x)
    tokens = given.x.shape[0] if given.x.dim() else 0
    require(tokens <= MAX_TOKENS, f"x has {tokens} rows: {MAX_TOKENS} are the most")
    experts, hidden, width = spec.num_experts, spec.hidden_size, spec.intermediate_size
    of_shared = spec.shared_experts * width
    weighted = spec.router_weights is not RouterWeights.NONE
    of_x, of_weights = (spec.dtype if kind is None else kind.values for kind in (spec.x, spec.weight))
    packed = 1 if spec.weight is None else spec.weight.packed
    of_w13: tuple[int, ...] = (2 * width, hidden // packed)
    of_w2: tuple[int, ...] = (hidden, width // packed)
    if spec.weight_only:
        of_part, of_w2 = packed_shape(width, hidden), packed_shape(hidden, width)
        of_w13 = (2 * of_part[0], *of_part[1:])
    wanted: tuple[tuple[str, tuple[int, ...] | None, torch.dtype], ...] = (
        ("x", (tokens, hidden), of_x),
        ("w13", (experts, *of_w13), of_weights),
        ("w2", (experts, *of_w2), of_weights),
        ("topk_weights", (tokens, spec.topk) if weighted else None, torch.float32),
        ("topk_ids", (tokens, spec.topk), spec.ids_dtype),
        ("w13_bias", (experts, 2 * width) if spec.w13_bias else None, spec.dtype),
        ("w2_bias", (experts, hidden) if spec.w2_bias else None, spec.dtype),
        ("expert_map", None if spec.global_experts is None else (spec.global_experts,), torch.int32),
        ("shared_w13", (2 * of_shared, hidden) if of_shared else None, spec.dtype),
        ("shared_w2", (hidden, of_shared) if of_shared else None, spec.dtype),
        ("out", (tokens, hidden), spec.dtype),
        *scales_wanted(spec, tokens),
    )
    scales = {f"scales.{name}": scale for name, scale in given.scales._asdict().items()}
    tensors = given._asdict() | scales
    for name, shape, dtype in wanted:
        check_tensor(name, tensors[name], shape, dtype, plan.device)
    dense = ("w13", "w2") if spec.weight_only else ()
    for name in ("topk_weights", "topk_ids", "w13_bias", "w2_bias", *scales, *dense):
        tensor = tensors[name]
        require(tensor is None or tensor.is_contiguous(), f"{name} is not contiguous")
    checks.apart("out", given.out)
    for name in ("x", "w13", "w2", "shared_w13", "shared_w2", "out"):
        tensor = getattr(given, name)
        if tensor is None:
            continue
        alignment = plan.alignment if name in ("x", "out") else plan.weight_alignment
        rows = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1]))
        other = "pad its rows" if alignment > plan.alignment else "copy it, or plan with kernel='triton'"
        require(
            all(start % alignment == 0 for start in rows),
            f"{name} has rows that do not start at multiples of {alignment} bytes, which {plan.title} needs: {other}",
        )


def scales_wanted(spec: ExpertsSpec, tokens: int) -> tuple[tuple[str, tuple[int, ...] | None, torch.dtype], ...]:
    """(name, shape or None, dtype) of all scales."""
    experts, hidden, width, kind = spec.num_experts, spec.hidden_size, spec.intermediate_size, spec.weight
    w13 = w2 = None
    if kind is not None and not kind.tiled:
        # Swizzled scales of gate rows and of up rows are padded on their own.
        rows, columns = kind.scale_shape(width if kind.swizzled else 2 * width, hidden)[:2] if kind.blocked else (0, 0)
        w13 = (experts, (2 if kind.swizzled else 1) * rows, columns) if kind.blocked else (experts, 2 * width)
        w2 = (experts, *kind.scale_shape(hidden, width))
    of_weights = FLOAT32 if kind is None else kind.scales
    whole = kind == NVFP4
    return (
        ("scales.w13", w13, of_weights),
        ("scales.w2", w2, of_weights),
        ("scales.x", None if spec.x is None else spec.x.scale_shape(tokens, hidden), FLOAT32),
        *((f"scales.{name}_global", (experts,) if whole else None, FLOAT32) for name in ("w13", "w2")),
        *((f"scales.{name}_global", (1,) if whole else None, FLOAT32) for name in ("x", "hidden")),
    )


def check_tensor(
    name: str, tensor: torch.Tensor | None, shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Raises InvalidInput unless it is as wanted, with neighbours side by side; without a shape it must be None."""
    if shape is None:
        require(tensor is None, f"{name} is given, and the plan's spec has none")
        return
    if tensor is None:
        raise InvalidInput(f"{name} is None: a tensor is needed")
    checks.tensor(name, tensor)
    if tensor.shape != shape:
        raise InvalidInput(f"{name} has shape {tuple(tensor.shape)}: {list(shape)} is needed")
    if tensor.dtype != dtype:
        raise InvalidInput(f"{name} is {short(tensor.dtype)}: {short(dtype)} is needed")
    if tensor.device != device:
        raise InvalidInput(f"{name} is on {tensor.device}, the plan on {device}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InvalidInput(f"{name} has stride {tensor.stride(-1)} in its last dimension: 1 is needed")
    checks.no_gradient(name, tensor)
