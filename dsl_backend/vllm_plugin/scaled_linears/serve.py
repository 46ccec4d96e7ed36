# SPDX-License-Identifier: Apache-2.0
"""Serves fp8, NVFP4 and MXFP8 linear layers of models whose attention dsl serves: replaces their methods' kernels.

vLLM's registry of linear kernels (`register_linear_kernel`) is asked while layers are made, of which the first come
before any point at which this plugin knows the engine; and it knows kernels of 128x128 blocks from 0.33 on. The kernel
of a method is used for the first time when weights are processed: until then it can be replaced, in every version.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn

from dsl_backend.linear.scaled import dispatch
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.log import logger
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.dispatch import explained
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import ahead, options
from dsl_backend.vllm_plugin.fused_mlp.find import gated_activations
from dsl_backend.vllm_plugin.scaled_linears import block_scaled
from dsl_backend.vllm_plugin.scaled_linears.find import (
    KERNEL,
    NOTHING_MEASURED,
    Service,
    holder_of,
    judge,
    layers,
    reasons_against_engine,
    service_of,
)
from dsl_backend.vllm_plugin.scaled_linears.handed import Link
from dsl_backend.vllm_plugin.scaled_linears.linked import linked, ours_of
from dsl_backend.vllm_plugin.served_layers import key_of, report_left, serve_each


class Served(NamedTuple):
    """How a layer is served.

    Attributes:
        kernel: the name of the kernels that serve; None is the best one that does.
        ranges: (least, most) rows that were measured; None where it is served for any number of rows.
    """

    spec: ScaledLinearSpec
    kernel: str | None
    ranges: tuple[tuple[int, int], ...] | None

    def __str__(self) -> str:
        return f"{self.spec}{'' if self.ranges is None else ' where measured'}"


# For each model that dsl serves in this process, in order: name of a layer -> how it is served.
_served: list[dict[str, Served]] = []


def serve_scaled_linears(model: nn.Module, vllm_config: Any) -> None:
    """Serve every quantised layer that can be served, and link MLPs; log how many, and why others are not."""
    if not options.serves_attention(vllm_config):
        return
    target = targets.detect(torch.device(vllm_config.device_config.device))
    against_engine = reasons_against_engine(vllm_config)
    service = service_of(vllm_config, target)
    served, left = serve_each(
        ((name, layer) for name, layer in layers(model) if not block_scaled.is_block_scaled(layer)),
        lambda layer: against_engine or judge(layer, target, service),
        lambda layer, spec: replace(layer, spec, service),
    )
    names = {id(module): name for name, module in model.named_modules()}
    apart = link_all(model, target, served, names) if served else Counter[str]()
    if service.measured:
        left += keep_measured(model, target, served)
    kinds = Counter(kind_of(model.get_submodule(name), spec) for name, spec in served.items())
    found = {name: served_of(model.get_submodule(name), spec, service) for name, spec in served.items()}
    report("fp8", kinds, target, service)
    report_left("fp8 linear layers", left)
    report_left("activations behind fp8 layers", apart)
    for form in block_scaled.FORMATS:
        specs = serve_format(form, model, against_engine, target, service, names)
        found |= {name: Served(spec, service.kernel, None) for name, spec in specs.items()}
    _served.append(found)
    ahead.compile_scaled_linears(vllm_config, served_layers())


def serve_format(
    form: block_scaled.Layers,
    model: nn.Module,
    against_engine: str,
    target: Target,
    service: Service,
    names: dict[int, str],
) -> dict[str, ScaledLinearSpec]:
    """Serve every layer of a format that can be served, and link MLPs; log how many, and why others are not."""
    served, left = serve_each(
        form.of(model),
        lambda layer: against_engine or form.judge(layer, target, service),
        lambda layer, _: form.replace(layer, service),
    )
    apart = link_all(model, target, served, names) if served else Counter[str]()
    kinds = Counter(Kind(type(model.get_submodule(name)).__name__, spec, "") for name, spec in served.items())
    report(form.name, kinds, target, service)
    report_left(f"{form.name} linear layers", left)
    report_left(f"activations behind {form.name} layers", apart)
    return served


def served_of(layer: Any, spec: ScaledLinearSpec, service: Service) -> Served:
    ranges = tuple(getattr(holder_of(layer), KERNEL).ranges) if service.measured else None
    return Served(spec, service.kernel, ranges)


def replace(layer: Any, spec: ScaledLinearSpec, service: Service) -> None:
    """Replace the kernel of a layer's method."""
    from vllm.model_executor.layers.linear import LinearBase

    from dsl_backend.vllm_plugin.scaled_linears.kernels import kernel_of
    from dsl_backend.vllm_plugin.scaled_linears.measured import measured_kernel_of

    assert isinstance(layer, LinearBase)
    holder = holder_of(layer)
    theirs = getattr(holder, KERNEL)
    ours = (measured_kernel_of if service.measured else kernel_of)(theirs, spec.x, spec.weight, service.kernel)
    setattr(holder, KERNEL, ours)
    # Fp8LinearMethod has a branch for a kernel that it knows.
    if getattr(holder, "use_marlin", False):
        holder.use_marlin = False
    # What the kernel before this one would have taken from a fused activation or norm.
    if hasattr(layer, "_input_quant_key"):
        if service.measured:
            ours.input_quant_key_before = layer._input_quant_key
        del layer._input_quant_key


def keep_measured(model: nn.Module, target: Target, served: dict[str, ScaledLinearSpec]) -> Counter[str]:
    """Give layers for which nothing is measured back to vLLM, in the model and in `served`; reason -> such layers.

    The consumer of a linked layer is kept: it gets quantised input.
    """
    from dsl_backend.vllm_plugin.scaled_linears.measured import Measured, ranges_of

    kernels: dict[str, Measured] = {name: getattr(holder_of(model.get_submodule(name)), KERNEL) for name in served}
    links = [kernel.link for kernel in kernels.values() if kernel.link is not None]
    consumers = {id(link.consumer) for link in links}
    left: Counter[str] = Counter()
    for name, kernel in kernels.items():
        layer: Any = model.get_submodule(name)
        handed = id(layer) in consumers
        ranges = ranges_of(kernel.theirs, served[name], target, handed=handed)
        if handed or ranges:
            kernel.register(served[name], ranges, handed=handed)
            continue
        setattr(holder_of(layer), KERNEL, kernel.theirs)
        if kernel.input_quant_key_before is not None:
            layer._input_quant_key = kernel.input_quant_key_before
        del served[name]
        left[NOTHING_MEASURED] += 1
    return left


def link_all(
    model: nn.Module, target: Target, served: dict[str, ScaledLinearSpec], names: dict[int, str]
) -> Counter[str]:
    """Link what can be linked, in the model and in `served`; reason -> activations that stay vLLM's."""
    from dsl_backend.vllm_plugin.scaled_linears.kernels import HandedOn

    owners = Counter(id(child) for module in model.modules() for child in module.children())
    left: Counter[str] = Counter()
    for _, parent, activation in list(gated_activations(model)):
        if not any(names.get(id(child)) in served for child in parent.children()):
            continue
        found = linked(parent, activation, owners, target)
        if isinstance(found, str):
            left[found] += 1
            continue
        gate, down, spec, (kind, interleaved) = found
        layer = getattr(parent, gate)
        consumer = None if down is None else getattr(parent, down)
        ours_of(layer).link = Link(kind, interleaved, consumer)
        setattr(parent, activation, HandedOn())
        served[names[id(layer)]] = spec
    return left


class Kind(NamedTuple):
    """Layers of which the log has one line.

    Attributes:
        layer: the name of its class.
        rows: for which it is served; empty where all are.
    """

    layer: str
    spec: ScaledLinearSpec
    rows: str


def kind_of(layer: Any, spec: ScaledLinearSpec) -> Kind:
    from dsl_backend.vllm_plugin.scaled_linears.measured import Measured

    kernel, rows = getattr(holder_of(layer), KERNEL), ""
    if isinstance(kernel, Measured):
        texts = [str(least) if least == most else f"{least} to {most}" for least, most in kernel.ranges]
        rows = f", for {', '.join(texts) or 'no'} rows"
    return Kind(type(layer).__name__, spec, rows)


def report(weights: str, kinds: Counter[Kind], target: Target, service: Service) -> None:
    """Log what is served: one line for each kind of layer with such weights."""
    for (layer, spec, rows), count in kinds.items():
        title = dispatch.choose(spec, target, service.kernel).title
        by = title if service.kernel else explained([dispatch.judge(spec, target)], [title])
        what = f"{spec}{rows}"
        logger.info(
            "dsl serves %d %s linear layers (%s), %s, on %s: by %s", count, weights, layer, what, target.arch, by
        )


def served_layers() -> set[Served]:
    """All kinds of layers that are served in this process."""
    return {one for served in _served for one in served.values()}


def compilation_key() -> str:
    """The served layers of each model of this process."""
    return key_of(_served)
