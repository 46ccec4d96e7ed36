# SPDX-License-Identifier: Apache-2.0
"""Which of a model's modules is the first whose output for a token has other bits in another situation.

`record` is a patch for `offline.Job`; `first_difference` compares what two engines recorded.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FILE_VARIABLE = "DSL_INTEGRATION_MODULE_BITS"
# Each column has a factor of its own, so that swapped elements have another sum. Sums wrap around.
FACTOR = 6_364_136_223_846_793_005


def record() -> None:
    """Keeps a hash of each module's output for the tokens of the first request of a step, by position.

    It writes them to the file that FILE_VARIABLE names. The engine must be eager. Steps are recorded in which that
    request is still in its prompt, or alone.
    """
    from vllm.model_executor.model_loader import base_loader

    load = base_loader.BaseModelLoader.load_model

    def loaded(loader: Any, *args: Any, **named: Any) -> Any:
        model = load(loader, *args, **named)
        Recorder(model, Path(os.environ[FILE_VARIABLE]))
        return model

    base_loader.BaseModelLoader.load_model = loaded


class Recorder:
    """The hooks on a model."""

    def __init__(self, model: torch.nn.Module, file: Path):
        self.file, self.bits = file, dict[str, dict[int, int]]()
        self.positions: list[int] = []
        model.register_forward_pre_hook(self.begin, with_kwargs=True)
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(self.hook(name))
        model.register_forward_hook(self.end)

    def begin(self, module: torch.nn.Module, args: Any, named: dict[str, Any]) -> None:
        """The positions of the step's first request: the rows from the first one on whose positions are adjacent."""
        from vllm.forward_context import get_forward_context

        # vLLM runs the model without a batch too, to see how much memory it takes.
        real = get_forward_context().attn_metadata
        positions = named["positions"] if "positions" in named else args[1]
        given = positions.tolist() if real else []
        self.positions = given[: adjacent(given)]

    def hook(self, name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
        def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) else output
            if not self.positions or not isinstance(rows, torch.Tensor) or rows.shape[0] < len(self.positions):
                return
            mine = hashes(rows[: len(self.positions)])
            kept = self.bits.setdefault(name, {})
            for position, value in zip(self.positions, mine.tolist(), strict=True):
                kept.setdefault(position, value)

        return keep

    def end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.positions:
            torch.save(self.bits, self.file)


def adjacent(positions: Sequence[int]) -> int:
    """How many positions from the first one on are adjacent."""
    for index in range(1, len(positions)):
        if positions[index] != positions[index - 1] + 1:
            return index
    return len(positions)


def hashes(rows: torch.Tensor) -> torch.Tensor:
    """A number for the bits of each row: int64 [rows]."""
    words = rows.reshape(rows.shape[0], -1).contiguous()
    words = words.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[words.element_size()])
    factors = torch.arange(1, 2 * words.shape[1], 2, device=words.device) * FACTOR
    return (words.to(torch.int64) * factors).sum(dim=1)


def load(file: Path) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = torch.load(file)
    return found


def first_difference(mine: Mapping[str, Mapping[int, int]], alone: Mapping[str, Mapping[int, int]]) -> str:
    """The first module with other bits at a position that both recorded, in the order of their calls.

    What is called first is the embedding: where it differs there was another token, because the step's first request
    was another one or because the tokens before it had led elsewhere. Nothing is compared from there on.
    """
    embedding, *modules = mine

    def others(name: str) -> list[int]:
        theirs = alone.get(name, {})
        return sorted(position for position, bits in mine[name].items() if theirs.get(position, bits) != bits)

    end = min(others(embedding), default=None)
    until = "" if end is None else f"; other tokens from position {end} on"
    for name in modules:
        if other := [position for position in others(name) if end is None or position < end]:
            return f"{name}: {len(other)} tokens, the first at position {other[0]}{until}"
    return f"no module: what differs comes behind them{until}"
