# SPDX-License-Identifier: Apache-2.0
"""The one door to the environment: every variable that the package reads, with what it accepts and what it does.

A variable that is unset or empty has its default. `problems` checks all of them: the plugin asks before vLLM starts a
process, and `dsl-backend doctor` too. Nothing here is read when a module is imported, nor by a launch.
"""

import contextlib
import difflib
import os
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import registry

T = TypeVar("T")

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """A variable of the environment.

    Attributes:
        default: where it is unset or empty.
        parse: from the text; a ValueError refuses it.
        accepts: what it accepts, for people.
        meaning: what it does.
    """

    name: str
    default: T
    parse: Callable[[str], T]
    accepts: str
    meaning: str

    def read(self) -> T:
        """The value now.

        Raises:
            InvalidInput: the text is not accepted.
        """
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise InvalidInput(f"{self.name}={text!r} is not accepted: use {self.accepts}") from None

    def problem(self) -> str | None:
        """Why its text is not accepted; None where it is."""
        try:
            self.read()
        except InvalidInput as error:
            return str(error)
        return None


def switch(text: str) -> bool:
    if text.lower() not in TRUE + FALSE:
        raise ValueError
    return text.lower() in TRUE


def absolute(text: str) -> pathlib.Path:
    path = pathlib.Path(text).expanduser()
    # A relative one would be another place for each process.
    if not path.is_absolute():
        raise ValueError
    return path


def architecture(text: str) -> str:
    if text != registry.CPU:
        registry.named(text)
    return text


CACHE = Variable("DSL_BACKEND_CACHE", True, switch, "0 or 1", "Keep compiled kernels on disk.")
CACHE_DIR = Variable[pathlib.Path | None](
    "DSL_BACKEND_CACHE_DIR",
    None,
    absolute,
    "an absolute path",
    "Keep them below this folder, not in the user's cache folder.",
)
ARCH = Variable[str | None](
    "DSL_BACKEND_ARCH",
    None,
    architecture,
    "the GPU's own architecture or one below sm_90, such as sm_80",
    "Choose kernels as if the GPU were of this architecture.",
)
TUNED_CONFIGS = Variable[pathlib.Path | None](
    "DSL_BACKEND_TUNED_CONFIGS",
    None,
    absolute,
    "an absolute path",
    "Prefer the tuned configurations in this file, as `dsl-backend tune` writes it.",
)
SAMPLER = Variable(
    "DSL_BACKEND_SAMPLER",
    True,
    switch,
    "0 or 1",
    "Draw the tokens too, in a vLLM whose attention backend is dsl.",
)
LINEAR = Variable(
    "DSL_BACKEND_LINEAR",
    True,
    switch,
    "0 or 1",
    "Make gate and up projections and their activation one kernel, in a vLLM whose attention backend is dsl.",
)
# Other programs' variables.
TRITON_INTERPRET = Variable(
    "TRITON_INTERPRET",
    False,
    # Triton takes every other text for false.
    lambda text: text.lower() in TRUE,
    "0 or 1",
    "Triton interprets kernels on the host.",
)

OURS: tuple[Variable, ...] = (CACHE, CACHE_DIR, ARCH, TUNED_CONFIGS, SAMPLER, LINEAR)
PREFIX = "DSL_BACKEND_"


def problems() -> list[str]:
    """What is wrong with the variables of this package, with what would be accepted; empty where nothing is."""
    found = []
    known = [variable.name for variable in OURS]
    for name in starting_with(PREFIX):
        if name not in known:
            near = difflib.get_close_matches(
                name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in known], n=1
            )
            meant = f"do you mean {PREFIX}{near[0]}?" if near else f"there are {', '.join(known)}"
            found.append(f"{name} is not a variable of dsl-backend: {meant}")
    return found + [problem for variable in OURS if (problem := variable.problem()) is not None]


@contextlib.contextmanager
def without_wrong_ones() -> Iterator[list[str]]:
    """What is wrong with the variables of this package, which meanwhile have their defaults where they are wrong."""
    found = problems()
    wrong = {one.name: os.environ.pop(one.name) for one in OURS if one.problem() is not None}
    try:
        yield found
    finally:
        os.environ.update(wrong)


def vllm_plugins() -> str | None:
    """VLLM_PLUGINS, the only plugins that vLLM loads, separated by commas; an empty text is none of them.

    None where it is unset: all.
    """
    return os.environ.get("VLLM_PLUGINS")


def options_set() -> dict[str, str]:
    """The variables of this package that are set, by name, as they are written."""
    return {one.name: text for one in OURS if (text := os.environ.get(one.name))}


# What else changes what is served; none of them can hold a secret.
OTHERS = (
    "CUDA_VISIBLE_DEVICES",
    "CUTE_DSL_ARCH",
    "TRITON_INTERPRET",
    "VLLM_PLUGINS",
    "VLLM_BATCH_INVARIANT",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)


def others_set() -> dict[str, str]:
    """Other programs' variables of OTHERS that are set, by name; an empty text too."""
    return {name: os.environ[name] for name in OTHERS if name in os.environ}


def starting_with(prefix: str) -> dict[str, str]:
    """All variables whose names start so, by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefix)}


def hide_gpus() -> None:
    """Let this process, and those that it starts, see no GPU; to be called before CUDA is initialised."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def interpret_triton() -> None:
    """Let this process, and those that it starts, interpret Triton's kernels; to be called before it is imported."""
    os.environ[TRITON_INTERPRET.name] = "1"
