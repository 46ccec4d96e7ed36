# SPDX-License-Identifier: Apache-2.0
"""Where a model's attention is served by dsl, its tokens are drawn by this package too.

vLLM has two model runners, V1 and V2, with a sampler each. What these do to logits before the temperature (allowed
tokens, bad words, logit bias, penalties, grammars, thinking budgets) stays theirs; temperature, filters and draw become
one launch of ours.

A runner's sampler is taken over when it is first used, which is while vLLM measures memory: what our kernels need is
compiled and allocated there. Whether that happens is decided once for an engine and never for a batch: a request with a
seed must get the same tokens whatever is beside it.
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

V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
# The methods of the runners' classes that use their sampler.
USERS = {V1: ("_sample", "_dummy_sampler_run"), V2: ("sample", "_dummy_sampler_run")}

# Runners that were decided on, whichever way.
_decided: "weakref.WeakSet[Any]" = weakref.WeakSet()


def install() -> None:
    """Let the classes of this process's model runners look at their sampler before they use it; again is no different.

    Runners of models that dsl does not serve, made later in the same process, keep vLLM's.
    """
    for module, methods in USERS.items():
        runner_class = getattr(sys.modules.get(module), "GPUModelRunner", None)
        if runner_class is None:
            continue
        missing = [name for name in methods if not hasattr(runner_class, name)]
        if missing:
            logger.warning("vLLM's own sampler samples: %s.GPUModelRunner has no %s", module, " and no ".join(missing))
            continue
        for name in methods:
            method = getattr(runner_class, name)
            if not hasattr(method, "wrapped_by_dsl"):
                setattr(runner_class, name, deciding(method, module))


def deciding(method: Callable[..., Any], module: str) -> Callable[..., Any]:
    """A runner's method that decides on the runner's sampler first."""

    @functools.wraps(method)
    def wrapper(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if runner not in _decided:
            _decided.add(runner)
            decide(runner, module)
        return method(runner, *args, **kwargs)

    wrapper.wrapped_by_dsl = True  # type: ignore[attr-defined]
    return wrapper


def decide(runner: Any, module: str) -> None:
    """Take a runner's sampler over, or log why vLLM's stays."""
    if not options.serves_attention(runner.vllm_config):
        return
    if not envs.SAMPLER.read():
        info_once(f"vLLM's own sampler samples: {envs.SAMPLER.name} is off")
        return
    # Here, because each imports its runner's modules.
    theirs = importlib.import_module("dsl_backend.vllm_plugin." + ("sampler_v1" if module == V1 else "sampler_v2"))
    reasons = reasons_against(runner) + theirs.reasons_against(runner)
    if reasons:
        info_once(f"vLLM's own sampler samples: {'; '.join(reasons)}")
        return
    theirs.DSLSampler.take_over(runner)


def reasons_against(runner: Any) -> list[str]:
    """Why a runner of either kind keeps vLLM's sampler: all that it may be asked for and that we do not do."""
    config, model = runner.vllm_config, runner.vllm_config.model_config
    reasons = []
    if config.speculative_config is not None:
        reasons.append("drafts are verified by vLLM's, and a seed must give the same tokens with a draft and without")
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
        dispatch.choose(dispatch.Operation.SAMPLE, spec, targets.detect(runner.device))
    except (InvalidInput, Unsupported) as error:
        reasons.append(str(error))
    return reasons
