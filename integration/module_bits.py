# SPDX-License-Identifier: Apache-2.0
"""Which of a model's modules is the first whose output for a token has other bits in another situation.

`record` is a patch for a job of `recorded`; `first_difference` compares what two engines recorded.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from integration.offline import Job

FILE_VARIABLE = "DSL_INTEGRATION_MODULE_BITS"
PROMPT_SUFFIX = ".prompt.json"
# Each column has a factor of its own, so that swapped elements have another sum. Sums wrap around.
FACTOR = 6_364_136_223_846_793_005


def recorded(job: Job, file: Path) -> Job:
    """The job, with what its first request's prompt leaves in each module kept in a file."""
    file.with_suffix(PROMPT_SUFFIX).write_text(json.dumps(job.prompts[0]))
    return replace(job, environment=dict(job.environment) | {FILE_VARIABLE: str(file)})


def record() -> None:
    """Keeps a hash of each module's output for the tokens of the first request, by position.

    It writes them to the file of `recorded`. The engine must be eager. Steps are recorded in which that request can be
    told from others, see `rows_of`.
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
        self.prompt: list[int] = json.loads(file.with_suffix(PROMPT_SUFFIX).read_text())
        self.first_row, self.positions = 0, list[int]()
        model.register_forward_pre_hook(self.begin, with_kwargs=True)
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(self.hook(name))
        model.register_forward_hook(self.end)

    def begin(self, module: torch.nn.Module, args: Any, named: dict[str, Any]) -> None:
        """Finds the rows of the step that are the request's."""
        from vllm.forward_context import get_forward_context

        # vLLM runs the model without a batch too, to see how much memory it takes.
        self.first_row, self.positions = 0, []
        if get_forward_context().attn_metadata:
            ids, positions = (
                named[key] if key in named else args[i] for i, key in enumerate(("input_ids", "positions"))
            )
            self.first_row, self.positions = rows_of(ids.tolist(), positions.tolist(), self.prompt)

    def hook(self, name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
        def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) else output
            end = self.first_row + len(self.positions)
            if not self.positions or not isinstance(rows, torch.Tensor) or rows.shape[0] < end:
                return
            mine = hashes(rows[self.first_row : end])
            kept = self.bits.setdefault(name, {})
            for position, value in zip(self.positions, mine.tolist(), strict=True):
                kept.setdefault(position, value)

        return keep

    def end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.positions:
            torch.save(self.bits, self.file)


def rows_of(ids: Sequence[int], positions: Sequence[int], prompt: Sequence[int]) -> tuple[int, list[int]]:
    """(row, positions): where the request with this prompt is in a step, from which row on; no positions if nowhere.

    A step has rows of adjacent positions for each request, in an order that differs from version to version. One row
    of the prompt may be another request's by chance, unless the request is alone. Behind the prompt, a row is the
    request's if no other row is as far: its prompt should be the longest.
    """
    runs = list(adjacent(positions))
    for begin, end in runs:
        mine = begin
        while mine < end and (positions[mine] >= len(prompt) or ids[mine] == prompt[positions[mine]]):
            mine += 1
        if (mine > begin + 1 and positions[begin] < len(prompt)) or (mine == end and len(runs) == 1):
            return begin, list(positions[begin:mine])
    behind = [(begin, end) for begin, end in runs if positions[begin] >= len(prompt)]
    if len(behind) == 1:
        begin, end = behind[0]
        return begin, list(positions[begin:end])
    return 0, []


def adjacent(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(begin, end) of rows whose positions are adjacent."""
    begin = 0
    for index in range(1, len(positions) + 1):
        if index == len(positions) or positions[index] != positions[index - 1] + 1:
            yield begin, index
            begin = index


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
