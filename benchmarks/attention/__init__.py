# SPDX-License-Identifier: Apache-2.0
"""Attention's benchmarks: decode, prefill, MLA's two, and writing keys and values into the cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.providers import Provider

from ..case import Case, Reference
from ..columns import columns

# The columns are in the order of these imports.
from . import flashinfer_peers, inputs, oracle, ours, rows, torch_sdpa, vllm_dense, vllm_latent, vllm_writes, writes  # noqa: F401
from .inputs import Inputs
from .problems import Problem, WriteProblem
from .writes import WriteInputs


@dataclass(frozen=True)
class AttentionOperator:
    """An attention operation with its rows."""

    name: str
    unit: str
    operation: Operation
    make_cases: Callable[[int], list[Case[Problem]]]
    page_size: int = 16

    def cases(self) -> Sequence[Case[Problem]]:
        return self.make_cases(self.page_size)

    def providers(self, kernels: Sequence[str]) -> Sequence[Provider]:
        return columns(self.name, ours.attention, partial(ours.objections, self.operation), kernels)

    def build(self, problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
        return inputs.build(problem, layers, device, seed)

    def poison(self, inputs: Inputs) -> None:
        for layer in inputs.layers:
            layer.out.fill_(torch.nan)

    def reference(self, problem: Problem, inputs: Inputs, layer: int, seed: int = 0) -> Reference:
        return oracle.reference(problem, inputs, layer, seed)

    def compared(self, inputs: Inputs, layer: int, result: torch.Tensor) -> torch.Tensor:
        return result


@dataclass(frozen=True)
class WriteOperator:
    """Storing a step's keys and values."""

    name: str = "write-kv"
    unit: str = "TB/s"
    page_size: int = 16

    def cases(self) -> Sequence[Case[WriteProblem]]:
        return rows.write_cases(self.page_size)

    def providers(self, kernels: Sequence[str]) -> Sequence[Provider]:
        return columns(self.name, ours.write_kv, partial(ours.objections, Operation.WRITE_KV), kernels)

    def build(self, problem: WriteProblem, layers: int, device: torch.device, seed: int) -> WriteInputs:
        return writes.build(problem, layers, device, seed)

    def poison(self, inputs: WriteInputs) -> None:
        writes.poison(inputs)

    def reference(self, problem: WriteProblem, inputs: WriteInputs, layer: int, seed: int = 0) -> Reference:
        return writes.reference(problem, inputs, layer)

    def compared(self, inputs: WriteInputs, layer: int, result: torch.Tensor) -> torch.Tensor:
        return inputs.written(result)


def operators(page_size: int = 16) -> dict[str, AttentionOperator | WriteOperator]:
    """Name -> operator, for KV caches with pages of `page_size` tokens."""
    table: list[AttentionOperator | WriteOperator] = [
        AttentionOperator("decode", "TB/s", Operation.DECODE, rows.decode_cases, page_size),
        AttentionOperator("prefill", "TFLOP/s", Operation.PREFILL, rows.prefill_cases, page_size),
        AttentionOperator("mla-decode", "TB/s", Operation.MLA_DECODE, rows.latent_cases, page_size),
        AttentionOperator("mla-prefill", "TFLOP/s", Operation.PREFILL, rows.packed_cases, page_size),
        WriteOperator(page_size=page_size),
    ]
    return {operator.name: operator for operator in table}
