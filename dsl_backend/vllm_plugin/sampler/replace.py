# SPDX-License-Identifier: Apache-2.0
"""Replaces the samplers of model runners whose attention dsl serves.

vLLM has two model runners, V1 and V2, with a sampler each, and with a rejection sampler if the model speculates. What
they do to logits before the temperature (allowed tokens, bad words, logit bias, penalties, grammars, thinking budgets)
stays vLLM's. Temperature, filters and draw become one launch of this package's kernel, and drafts are verified by what
it draws.

A runner's sampler is replaced at its first use, which is while vLLM measures memory: kernels are compiled and scratch
is allocated there. The decision is made once for an engine and not for each batch, because a request with a seed must
get the same tokens whatever other requests are in its batch.
"""

import functools
import importlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

from dsl_backend import envs
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.log import info_once, logger
from dsl_backend.runtime import target as targets
from dsl_backend.sampling import dispatch
from dsl_backend.sampling.spec import SamplingSpec
from dsl_backend.vllm_plugin import options
from dsl_backend.vllm_plugin.sampler import verification

V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
# The methods of the runners' classes that use their sampler.
USERS = {V1: ("_sample", "_dummy_sampler_run"), V2: ("sample", "_dummy_sampler_run")}

# Runners for which it is decided whose sampler they use.
_decided: "weakref.WeakSet[Any]" = weakref.WeakSet()


def install() -> None:
    """Make this process's model runners decide on their sampler before its first use. A second call changes nothing.

    Runners of models that dsl does not serve, made later in the same process, keep vLLM's sampler.
    """
    for module, methods in USERS.items():
        runner_class = getattr(sys.modules.get(module), "GPUModelRunner", None)
        if runner_class is None:
            continue
        missing = [name for name in methods if not hasattr(runner_class, name)]
        if missing:
            logger.warning(
                "vLLM's own sampler draws the tokens: %s.GPUModelRunner has no %s", module, " and no ".join(missing)
            )
            continue
        for name in methods:
            method = getattr(runner_class, name)
            if not hasattr(method, "wrapped_by_dsl"):
                setattr(runner_class, name, deciding(method, module))


def deciding(method: Callable[..., Any], module: str) -> Callable[..., Any]:
    """A runner's method that first decides on the runner's sampler, at its first call."""

    @functools.wraps(method)
    def wrapper(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if runner not in _decided:
            _decided.add(runner)
            decide(runner, module)
        return method(runner, *args, **kwargs)

    wrapper.wrapped_by_dsl = True  # type: ignore[attr-defined]
    return wrapper


def decide(runner: Any, module: str) -> None:
    """Replace a runner's sampler, or log why vLLM's stays."""
    if not options.serves_attention(runner.vllm_config):
        return
    if not envs.SAMPLER.read():
        info_once(f"vLLM's own sampler draws the tokens: {envs.SAMPLER.name} is off")
        return
    # Here, because each imports its runner's modules.
    name = "dsl_backend.vllm_plugin.sampler." + ("v1" if module == V1 else "v2")
    ours = importlib.import_module(name)
    reasons = reasons_against(runner) + ours.reasons_against(runner)
    verifies = getattr(runner, "rejection_sampler", None) is not None
    if verifies:
        theirs = importlib.import_module(f"{name}_verification")
        reasons += theirs.reasons_against(runner)
    if reasons:
        info_once(f"vLLM's own sampler draws the tokens: {'; '.join(reasons)}")
        return
    ours.DSLSampler.replace(runner)
    if verifies:
        theirs.DSLRejectionSampler.replace(runner)


def reasons_against(runner: Any) -> list[str]:
    """Why a runner of either kind keeps vLLM's sampler: settings that this package's sampler does not serve."""
    config, model = runner.vllm_config, runner.vllm_config.model_config
    reasons: list[str] = []
    if config.speculative_config is not None:
        reasons += verification.reasons_against(config.speculative_config, model.get_vocab_size(), runner.device)
    if getattr(model, "use_fp64_gumbel", False):
        reasons.append("noise in float64 was asked for (use_fp64_gumbel)")
    if model.logprobs_mode == "processed_logits":
        reasons.append("logprobs_mode processed_logits returns its masked logits")
    if getattr(model, "return_sampling_mask", False):
        reasons.append("return_sampling_mask returns its masks")
    if getattr(runner, "batch_sharder", None) is not None:
        reasons.append("each rank samples a part of the batch (enable_batch_sharded_sampling)")
    try:
        spec = SamplingSpec(vocab=model.get_vocab_size())
        dispatch.choose(spec, targets.detect(runner.device))
    except (InvalidInput, Unsupported) as error:
        reasons.append(str(error))
    return reasons
