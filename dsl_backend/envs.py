# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that the package reads, with the values that it accepts and its meaning.

A variable that is unset or empty has its default. `problems` checks all variables; the plugin calls it before vLLM
starts its processes, and `dsl-backend doctor` calls it too. No variable is read at import or at a kernel launch.
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
    """An environment variable.

    Attributes:
        default: the value if the variable is unset or empty.
        parse: makes the value from the text; raises ValueError if the text is not accepted.
        accepts: the accepted values, as text for messages and docs.
        meaning: what the variable does, in one sentence.
    """

    name: str
    default: T
    parse: Callable[[str], T]
    accepts: str
    meaning: str

    def read(self) -> T:
        """The current value. Raises InvalidInput: the text is not accepted."""
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise InvalidInput(f"{self.name}={text!r} is not accepted: use {self.accepts}") from None

    def problem(self) -> str | None:
        """Why the variable's text is not accepted; None if it is."""
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
    # A relative path would mean another folder in each process.
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
    "Keep compiled kernels in this folder instead of the user's cache folder.",
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
    "DSL_BACKEND_SAMPLER", True, switch, "0 or 1", "Sample tokens with dsl kernels if vLLM's attention backend is dsl."
)
LINEAR = Variable(
    "DSL_BACKEND_LINEAR",
    True,
    switch,
    "0 or 1",
    "Fuse gate and up projections with their activation into one kernel if vLLM's attention backend is dsl.",
)
# Other programs' variables.
TRITON_INTERPRET = Variable(
    "TRITON_INTERPRET",
    False,
    # Triton treats every other text as false.
    lambda text: text.lower() in TRUE,
    "0 or 1",
    "Triton interprets kernels on the host.",
)

OURS: tuple[Variable, ...] = (CACHE, CACHE_DIR, ARCH, TUNED_CONFIGS, SAMPLER, LINEAR)
PREFIX = "DSL_BACKEND_"


def problems() -> list[str]:
    """Why variables of this package are not accepted, and which values are; empty if there is no problem."""
    found = []
    known = [variable.name for variable in OURS]
    for name in starting_with(PREFIX):
        if name not in known:
            near = difflib.get_close_matches(
                name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in known], n=1
            )
            hint = f"do you mean {PREFIX}{near[0]}?" if near else f"its variables are {', '.join(known)}"
            found.append(f"{name} is not a variable of dsl-backend: {hint}")
    return found + [problem for variable in OURS if (problem := variable.problem()) is not None]


@contextlib.contextmanager
def without_wrong_ones() -> Iterator[list[str]]:
    """Yields the problems of this package's variables, which have their defaults inside the block."""
    found = problems()
    wrong = {one.name: os.environ.pop(one.name) for one in OURS if one.problem() is not None}
    try:
        yield found
    finally:
        os.environ.update(wrong)


def vllm_plugins() -> str | None:
    """VLLM_PLUGINS: the comma-separated names of the plugins that vLLM loads.

    None means that the variable is unset and vLLM loads all plugins; with an empty text it loads none.
    """
    return os.environ.get("VLLM_PLUGINS")


def options_set() -> dict[str, str]:
    """Name -> text of this package's variables that are set."""
    return {one.name: text for one in OURS if (text := os.environ.get(one.name))}


# Other programs' variables that change which kernel serves. None of them can hold a secret.
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
    """Name -> text of the variables in OTHERS that are set, even if the text is empty."""
    return {name: os.environ[name] for name in OTHERS if name in os.environ}


def starting_with(prefix: str) -> dict[str, str]:
    """Name -> text of all variables whose names start with the prefix."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefix)}


def hide_gpus() -> None:
    """Hides all GPUs from this process and its children. Call it before CUDA is initialised or CuTe DSL is imported."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Without it CuTe DSL asks the driver for the GPU's architecture when it compiles. If the driver has no GPU, 4.8.0
    # asks again to describe that error, and again, until Python's recursion ends: on an H200's host a compilation
    # took minutes. The value is what CuTe DSL assumes without a driver; `--gpu-arch` says what is compiled for.
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")


def interpret_triton() -> None:
    """Makes Triton interpret kernels in this process and its children. Call it before Triton is imported."""
    os.environ[TRITON_INTERPRET.name] = "1"
