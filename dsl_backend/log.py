# SPDX-License-Identifier: Apache-2.0
"""The package's one logger: a child of vLLM's, so that its handler and level apply inside vLLM."""

import logging
from functools import cache

logger = logging.getLogger("vllm.dsl_backend")
logger.addHandler(logging.NullHandler())


@cache
def info_once(message: str) -> None:
    """Log `message` at INFO the first time that this process says it."""
    logger.info(message, stacklevel=2)


@cache
def warning_once(message: str) -> None:
    """Log `message` at WARNING the first time that this process says it."""
    logger.warning(message, stacklevel=2)
