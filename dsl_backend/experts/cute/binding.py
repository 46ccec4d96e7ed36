# SPDX-License-Identifier: Apache-2.0
"""How hosts of experts' kernels serve any number of tokens: choose, compile once, launch."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from dsl_backend.experts.args import ExpertsOperands
from dsl_backend.experts.kernel import Bind, Launch
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


def binding(
    choose: Callable[[ExpertsSpec, int, Target], Any],
    key_of: Callable[[ExpertsSpec, Any], Any],
    build: Callable[[Any, Target], Function],
    run: Callable[..., None],
) -> Bind:
    """The kernels of a host as a plan binds them.

    Args:
        choose: the configuration for so many tokens.
        key_of, build: of a layer in a configuration, and its compiled function.
        run: launches a function: (function, spec, configuration, operands, CTAs, workspace).
    """

    @lru_cache(maxsize=1 << 16)
    def chosen(spec: ExpertsSpec, tokens: int, target: Target, libraries: str) -> tuple[Any, tuple[int, ...], Function]:
        """The configuration for so many tokens, its CTAs and function, kept by what host code is linked with."""
        config = choose(spec, tokens, target)
        return config, config.ctas(spec, tokens, target), build(key_of(spec, config), target)

    def bind(spec: ExpertsSpec, target: Target, workspace: Workspace) -> Launch:
        """The kernels for any number of tokens."""

        def launch(operands: ExpertsOperands) -> None:
            config, ctas, function = chosen(spec, operands.x.shape[0], target, toolkit.libraries())
            run(function, spec, config, operands, ctas, workspace)

        return launch

    return bind
