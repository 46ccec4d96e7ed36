# SPDX-License-Identifier: Apache-2.0
"""This package's experts as vLLM's fused MoE kernels: the classes that vLLM makes, one object for each layer.

They hold no weight. vLLM hands w13 and w2 over at each call, and biases are its parameters, so that weights that were
reloaded, moved between ranks or woken from sleep are used from the next call on.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.platforms import current_platform

from dsl_backend.errors import InvalidInput
from dsl_backend.experts import ops, tuned
from dsl_backend.experts.spec import ExpertsSpec, RouterWeights
from dsl_backend.gemm.activation import SWIGLU_OAI, Activation, Geglu, Swiglu
from dsl_backend.quant.format import BLOCK_SCALED, MXFP4, MXFP4_TILED, MXFP8, NVFP4, ROW_SCALED, ScaledFormat
from dsl_backend.runtime import target as targets

Format = modular_kernel.FusedMoEActivationFormat
# By vLLM's names; SWIGLUOAI alone has gate and up rows that alternate.
ACTIVATIONS = ("SILU", "GELU", "GELU_TANH", "SWIGLUOAI", "SWIGLUOAI_UNINTERLEAVE")
# Ways of vLLM's between the ranks of expert parallelism whose experts get tokens in another form.
OTHER_FORMS = (
    "use_passthrough_all2all",
    "use_moonep_kernels",
    "use_fi_nvl_two_sided_kernels",
    "use_fi_nvl_one_sided_kernels",
)


def scheme_of(weight: ScaledFormat | None) -> tuple[Any, Any]:
    """VLLM's keys of a format of weights, and of what they are multiplied with."""
    if weight == BLOCK_SCALED:
        return quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym
    if weight == ROW_SCALED:
        return quant_utils.kFp8StaticChannelSym, quant_utils.kFp8DynamicTokenSym
    if weight == MXFP8:
        return quant_utils.kMxfp8Static, quant_utils.kMxfp8Dynamic
    if weight == MXFP4:
        return quant_utils.kMxfp4Static, quant_utils.kMxfp8Dynamic
    if weight == MXFP4_TILED:
        return quant_utils.kMxfp4Static, None
    if weight == NVFP4:
        return quant_utils.kNvfp4Static, quant_utils.kNvfp4Dynamic
    assert weight is None, weight
    return None, None


def clamps(moe_config: Any, quant_config: Any) -> tuple[float | None, float, float]:
    """Limit, alpha and beta of a layer's SwiGLU, from the two places where models put them."""
    found = (
        (getattr(quant_config, of_quant, None), getattr(moe_config, of_moe, None))
        for of_quant, of_moe in (
            ("gemm1_clamp_limit", "swiglu_limit"),
            ("gemm1_alpha", "swiglu_alpha"),
            ("gemm1_beta", "swiglu_beta"),
        )
    )
    limit, alpha, beta = (first if first is not None else second for first, second in found)
    return limit, 1.0 if alpha is None else alpha, 0.0 if beta is None else beta


def activation_of(moe_config: Any, quant_config: Any) -> tuple[Activation, bool]:
    """The activation of a layer, and whether gate and up rows of w13 alternate.

    Raises:
        InvalidInput: no kernel has it.
    """
    name = moe_config.activation.name
    limit, alpha, beta = clamps(moe_config, quant_config)
    if name in ("GELU", "GELU_TANH") and limit is None:
        return Geglu(tanh=name == "GELU_TANH"), False
    if name == "SILU" and (alpha, beta) == (1.0, 0.0):
        return Swiglu(limit=limit), False
    if name == "SWIGLUOAI_UNINTERLEAVE" and limit is not None:
        return Swiglu(alpha=alpha, beta=beta, limit=limit), False
    # vLLM's kernels have these numbers built in, whatever the model's configuration says.
    said = (limit, alpha, beta)
    if name == "SWIGLUOAI" and said in ((None, 1.0, 0.0), (SWIGLU_OAI.limit, SWIGLU_OAI.alpha, SWIGLU_OAI.beta)):
        return SWIGLU_OAI, True
    raise InvalidInput(
        f"activation {name} with limit {limit}, alpha {alpha} and beta {beta} is not served: "
        f"{', '.join(ACTIVATIONS)} with the numbers that vLLM's kernels have are"
    )


class DSLExperts(modular_kernel.FusedMoEExpertsModular):
    """Routed experts of a rank, in vLLM's standard format: one row for each token, weighted and added up here.

    Attributes:
        kernel: the name of the kernels that serve; None is the best one that does.
        intermediate_size: of weights whose shapes do not say it.
    """

    kernel: str | None = None
    intermediate_size: int | None = None

    def __init__(self, moe_config: Any, quant_config: Any, **sizes: int) -> None:
        super().__init__(moe_config, quant_config, **sizes)
        self.activation_name, self.parameters = ops.named(*activation_of(moe_config, quant_config))

    @staticmethod
    def activation_format() -> Any:
        return Format.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cuda() or current_platform.is_cpu())

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation.name in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not any(getattr(moe_parallel_config, name, False) for name in OTHER_FORMS)

    def workspace_shapes(
        self, M: int, N: int, K: int, *others: Any, **more: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """None of vLLM's scratch is used; an output [M, K]."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        **others: Any,
    ) -> None:
        """Writes output [M, K]. With weights on the input, vLLM has multiplied them in already."""
        weights = None if apply_router_weight_on_input else topk_weights.float().contiguous()
        self.launch(output, hidden_states, w1, w2, weights, topk_ids.contiguous(), expert_map, a1q_scale)

    def launch(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        weights: torch.Tensor | None,
        ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        x_scale: torch.Tensor | None = None,
    ) -> None:
        where = RouterWeights.NONE if weights is None else RouterWeights.OUTPUT
        shared, shared_weight = self.shared()
        operands = (output, x, [w13, w2, *shared], [weights, ids, expert_map], [self.w1_bias, self.w2_bias])
        layer = (self.activation_name, self.parameters, where.value, shared_weight, self.kernel)
        ops.EXPERTS(*operands, self.scales_of(x_scale), *layer, self.intermediate_size)

    def shared(self) -> tuple[list[torch.Tensor], float]:
        """Weights of shared experts, none here, and what their results are multiplied with."""
        return [], 1.0

    def scales_of(self, x_scale: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Scales of w13, of w2, and of x where it is in 8 bits; none with weights in 16 bits."""
        return []


class SharedDSLExperts(DSLExperts):
    """As `DSLExperts`, with a layer's shared experts; a class for each layer (`shared.take`) has their parameters.

    Attributes:
        gate, down: the parameters of the MLP's projections, as they are now.
        shared_weight: what the MLP's result is multiplied with.
    """

    gate: Callable[[], torch.Tensor]
    down: Callable[[], torch.Tensor]
    shared_weight: float

    def shared(self) -> tuple[list[torch.Tensor], float]:
        return [self.gate(), self.down()], self.shared_weight


class ScaledDSLExperts(DSLExperts):
    """As `DSLExperts`, with weights in e4m3 and a scale for each 128x128 block or each output channel.

    The kernels quantise x themselves. Where vLLM has quantised it before it sent it to another rank, its scales are
    used.
    """

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) in (scheme_of(BLOCK_SCALED), scheme_of(ROW_SCALED))

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def scales_of(self, x_scale: torch.Tensor | None) -> list[torch.Tensor | None]:
        """VLLM's parameters; scales of channels are [E, rows, 1] there, and those of tokens [M, 1]."""
        weights = (self.w1_scale, self.w2_scale)
        if self.block_shape is not None:
            return [*weights, x_scale]
        return [*(scale.flatten(1) for scale in weights), None if x_scale is None else x_scale.flatten()]


class BlockScaledDSLExperts(DSLExperts):
    """As `DSLExperts`, with weights in MXFP8, MXFP4 or NVFP4. The kernels quantise x themselves.

    Args:
        layer: whose parameters are laid out as `block_scaled.lay_out` does it; they are read at each call.
        spec: of the layer.
    """

    def __init__(self, moe_config: Any, quant_config: Any, layer: Any, spec: ExpertsSpec) -> None:
        super().__init__(moe_config, quant_config)
        assert spec.weight is not None
        self.layer, self.weight = layer, spec.weight

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) in [scheme_of(kind) for kind in (MXFP8, MXFP4, NVFP4)]

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def scales_of(self, x_scale: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Those of w13 and w2; with NVFP4 also those of whole matrices: of weights, x and the activation's result."""
        layer = self.layer
        blocks = [scale.view(self.weight.scales) for scale in (layer.w13_weight_scale, layer.w2_weight_scale)]
        if self.weight != NVFP4:
            return blocks
        of_weights = [layer.w13_weight_scale_2, layer.w2_weight_scale_2]
        return [*blocks, None, *of_weights, layer.w13_input_scale, layer.w2_input_scale]


class WeightOnlyDSLExperts(BlockScaledDSLExperts):
    """As `DSLExperts`, with weights in MXFP4, scales among them, that are multiplied with tokens in 16 bits."""

    def __init__(self, moe_config: Any, quant_config: Any, layer: Any, spec: ExpertsSpec) -> None:
        super().__init__(moe_config, quant_config, layer, spec)
        self.intermediate_size = spec.intermediate_size

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == scheme_of(MXFP4_TILED)

    def moe_problem_size(self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *others: Any) -> Any:
        """As vLLM finds it, of weights in tiles."""
        return super().moe_problem_size(a1, w1.flatten(2), w2.flatten(2), *others)

    def scales_of(self, x_scale: torch.Tensor | None) -> list[torch.Tensor | None]:
        return []


class Measured(DSLExperts):
    """Where this package was measured to be faster its own kernels; for other numbers of tokens vLLM's Triton kernels.

    Both take the weights as they were loaded. A class in front of this one says which of this package's kernels.
    """

    weight: ScaledFormat | None

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        # There only where vLLM has Triton.
        from vllm.model_executor.layers.fused_moe import TritonExperts

        super().__init__(moe_config, quant_config)
        self.theirs = TritonExperts(moe_config, quant_config)

    def workspace_shapes(self, *sizes: Any, **more: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """VLLM's for any number of tokens: once it has warmed up, its workspace does not grow."""
        shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = self.theirs.workspace_shapes(*sizes, **more)
        return shapes

    def apply(self, **given: Any) -> None:
        x, w13, w2, ids = (given[name] for name in ("hidden_states", "w1", "w2", "topk_ids"))
        spec = sizes_of(w13.shape[0], x.shape[1], w2.shape[2], ids.shape[1], x.dtype, self.weight)
        if tuned.is_faster(x.shape[0], spec, targets.of_device(x.device)):
            super().apply(**given)
        else:
            self.theirs.apply(**given | self.for_theirs(x))

    def for_theirs(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """The tokens as vLLM's kernels take them, by the names of `apply`'s arguments."""
        return {"hidden_states": x}


class MeasuredExperts(Measured):
    """Of weights in 16 bits."""

    weight = None


class MeasuredScaledExperts(Measured, ScaledDSLExperts):
    """Of weights in e4m3 with a scale for each 128x128 block. VLLM's kernels get tokens that vLLM has quantised."""

    weight = BLOCK_SCALED

    def for_theirs(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        config = self.quant_config
        values, scale = moe_kernel_quantize_input(
            x, None, config.quant_dtype, config.per_act_token_quant, config.block_shape
        )
        return {"hidden_states": values, "a1q_scale": scale}


@cache
def sizes_of(
    experts: int, hidden: int, width: int, topk: int, dtype: torch.dtype, weight: ScaledFormat | None
) -> ExpertsSpec:
    """As much of a spec as tuning records depend on."""
    return ExpertsSpec(
        num_experts=experts, hidden_size=hidden, intermediate_size=width, topk=topk, dtype=dtype, weight=weight
    )


class BatchedDSLExperts(DSLExperts):
    """Routed experts of a rank in vLLM's batched format: for each expert a block of rows, of which the first count.

    Rows are neither weighted nor added up: what sent them does that.
    """

    @staticmethod
    def activation_format() -> Any:
        return Format.BatchedExperts

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, *_: Any, **more: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """None of vLLM's scratch is used; an output [experts, rows of a block, K]."""
        assert self.max_num_tokens is not None
        assert self.num_dispatchers is not None
        return (0,), (0,), (local_num_experts, self.max_num_tokens * self.num_dispatchers, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceDelegate()

    def apply(  # type: ignore[override]
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        expert_tokens_meta: Any,
        **others: Any,
    ) -> None:
        """Writes output [experts, rows, K]; rows that do not count become zeros."""
        experts, rows, hidden = hidden_states.shape
        ids = block_ids(expert_tokens_meta.expert_num_tokens, rows)
        x, out = hidden_states.view(experts * rows, hidden), output.view(experts * rows, hidden)
        self.launch(out, x, w1, w2, None, ids, None)


def block_ids(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """The expert of each row of all blocks, int32 [experts * rows, 1]; -1 for rows that do not count.

    Args:
        counts: [experts], how many of a block's rows count.
        rows: of a block.
    """
    experts = torch.arange(counts.shape[0], dtype=torch.int32, device=counts.device)[:, None]
    counted = torch.arange(rows, dtype=torch.int32, device=counts.device) < counts[:, None]
    return torch.where(counted, experts, -1).view(-1, 1)
