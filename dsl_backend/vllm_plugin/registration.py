# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls in each of its processes. Imports neither torch nor a kernel."""

from dsl_backend.vllm_plugin.hooks import Stage, install_hooks


def register() -> None:
    """Entry point of `vllm.general_plugins`. May run any number of times, and never raises.

    An exception here would end every vLLM process of the environment, those without DSL included. A hook that cannot be
    installed is reported when an engine's configuration is made (`startup`).
    """
    install_hooks(Stage.REGISTRATION)
