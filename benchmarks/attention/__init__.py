# SPDX-License-Identifier: Apache-2.0
"""Attention's benchmarks: decode, prefill, MLA's two, and writing keys and values into the cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from dsl_backend.attention.dispatch import Operation

from ..case import Case, Provider, Reference
from . import flashinfer_peers, inputs, oracle, ours, rows, torch_sdpa, vllm_dense, vllm_latent, vllm_writes, writes
from .inputs import Inputs
from .problems import Problem, WriteProblem
from .writes import WriteInputs

Peer = Provider[Problem, Inputs]


@dataclass(frozen=True)
class AttentionOperator:
    """An attention operation with its rows and peers."""

    name: str
    unit: str
    operation: Operation
    make_cases: Callable[[int], list[Case[Problem]]]
    peers: tuple[Peer, ...]
    page_size: int = 16

    def cases(self) -> Sequence[Case[Problem]]:
        return self.make_cases(self.page_size)

    def providers(self, kernels: Sequence[str]) -> Sequence[Peer]:
        names: Sequence[str | None] = kernels or [None]
        return [*(ours.Attention(self.operation, name) for name in names), *self.peers]

    def build(self, problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
        return inputs.build(problem, layers, device, seed)

    def poison(self, inputs: Inputs) -> None:
        for layer in inputs.layers:
            layer.out.fill_(torch.nan)

    def reference(self, problem: Problem, inputs: Inputs, layer: int) -> Reference:
        return oracle.reference(problem, inputs, layer)


@dataclass(frozen=True)
class WriteOperator:
    """Storing a step's keys and values."""

    name: str = "write-kv"
    unit: str = "TB/s"
    page_size: int = 16

    def cases(self) -> Sequence[Case[WriteProblem]]:
        return rows.write_cases(self.page_size)

    def providers(self, kernels: Sequence[str]) -> Sequence[Provider[WriteProblem, WriteInputs]]:
        names: Sequence[str | None] = kernels or [None]
        return [*(ours.WriteKV(name) for name in names), vllm_writes.CudaWriter(), vllm_writes.TritonWriter()]

    def build(self, problem: WriteProblem, layers: int, device: torch.device, seed: int) -> WriteInputs:
        return writes.build(problem, layers, device, seed)

    def poison(self, inputs: WriteInputs) -> None:
        writes.poison(inputs)

    def reference(self, problem: WriteProblem, inputs: WriteInputs, layer: int) -> Reference:
        return writes.reference(problem, inputs, layer)


def operators(page_size: int = 16) -> dict[str, AttentionOperator | WriteOperator]:
    """Name -> operator, for KV caches with pages of `page_size` tokens."""
    dense = (
        vllm_dense.TritonAttention(),
        vllm_dense.FlashAttention(3, default=True),
        vllm_dense.FlashAttention(2, default=False),
        vllm_dense.FlashAttention(4, default=False),
        flashinfer_peers.Paged(),
    )
    latent = (vllm_latent.TritonMLA(), vllm_latent.FlashAttnMLA(), vllm_latent.FlashMLA(), flashinfer_peers.Latent())
    packed = (
        vllm_dense.FlashPrefill(3, default=True),
        vllm_dense.FlashPrefill(2, default=False),
        vllm_dense.FlashPrefill(4, default=False),
        flashinfer_peers.Packed(),
        torch_sdpa.CudnnPrefill(),
    )
    table: list[AttentionOperator | WriteOperator] = [
        AttentionOperator(
            "decode", "TB/s", Operation.DECODE, rows.decode_cases, (*dense, flashinfer_peers.XQA()), page_size
        ),
        AttentionOperator(
            "prefill", "TFLOP/s", Operation.PREFILL, rows.prefill_cases, (*dense, torch_sdpa.CudnnPrefill()), page_size
        ),
        AttentionOperator("mla-decode", "TB/s", Operation.MLA_DECODE, rows.latent_cases, latent, page_size),
        AttentionOperator("mla-prefill", "TFLOP/s", Operation.PREFILL, rows.packed_cases, packed, page_size),
        WriteOperator(page_size=page_size),
    ]
    return {operator.name: operator for operator in table}
