# SPDX-License-Identifier: Apache-2.0
"""The model to serve: a published shape with dummy weights, a small random checkpoint, or any other model."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.models import SHAPES
from benchmarks.engine.models import write as write_shape
from integration.environment import device
from integration.models import MODELS
from integration.models import write as write_checkpoint


class SubjectError(ValueError):
    """The model does not exist. The message lists the accepted ones."""


@dataclass(frozen=True)
class Subject:
    """A model to serve.

    Attributes:
        path: the folder or the hub's name that vLLM loads.
        vocabulary: prompts have token ids below this number.
        flags: the flags of `vllm serve` that the model needs.
        tokenizer: whether the model has a tokenizer.
        backends: the backends that are compared by default: dsl and its peers.
    """

    name: str
    path: str
    vocabulary: int
    flags: tuple[str, ...]
    tokenizer: bool
    backends: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Of its server: a name on a hub may have to be fetched, and the cache's size is the user's choice."""
        given = {name: os.environ[name] for name in ("VLLM_CPU_KVCACHE_SPACE",) if name in os.environ}
        if not Path(self.path).exists():
            given["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE", "0")
        return given


def vocabulary_of(path: str) -> int:
    """The vocabulary's size, from the model's config.json in a folder or on a hub.

    Raises:
        SubjectError: there is no config.json, or it has no such field.
    """
    folder = Path(path)
    if folder.is_dir():
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise SubjectError(f"{path} is no model: {error}") from None
        config = config.get("text_config", config)
        if not isinstance(config.get("vocab_size"), int):
            raise SubjectError(f"{folder / 'config.json'} has no vocab_size; name one with --vocabulary")
        size: int = config["vocab_size"]
        return size
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(path).get_text_config().vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        known = ", ".join([*SHAPES, *MODELS])
        text = " ".join(str(error).split())[:200]
        raise SubjectError(f"no model {path!r}: choose from {known}, a folder, or a name on a hub ({text})") from None


def resolve(name: str, folder: Path, flags: Sequence[str] = (), vocabulary: int | None = None) -> Subject:
    """The model of a name.

    Args:
        folder: the folder for generated models.
        flags: the user's flags, which have precedence over the model's.

    Raises:
        SubjectError: the model does not exist.
    """
    given = {flag.partition("=")[0] for flag in flags}
    if name in SHAPES:
        shape = SHAPES[name]
        needed = ["--load-format", "dummy", "--skip-tokenizer-init"]
        needed += [] if "--max-model-len" in given else ["--max-model-len", str(shape.max_model_len)]
        path = str(write_shape(shape, folder / name))
        return Subject(name, path, shape.vocabulary, tuple(needed), False, shape.backends)
    latent = name in MODELS and "kv_lora_rank" in MODELS[name].config
    backends = ("dsl", device().mla if latent else device().dense)
    if name in MODELS:
        path = str(write_checkpoint(MODELS[name], folder / name))
        return Subject(name, path, MODELS[name].config["vocab_size"], (), True, backends)
    return Subject(name, name, vocabulary or vocabulary_of(name), (), True, backends)
