# SPDX-License-Identifier: Apache-2.0
"""Attention's benchmarks: decode, prefill, MLA's two, and writing keys and values into the cache: alone, or rotated."""

from functools import partial

import torch
from dsl_backend.attention.dispatch import Operation

from ..operator import RowsOperator

# The columns are in the order of these imports.
from . import (  # noqa: F401
    flashinfer_peers,
    inputs,
    mla_ropes,
    oracle,
    ours,
    ropes,
    rows,
    tile_kernels,
    torch_sdpa,
    vllm_dense,
    vllm_mla,
    vllm_writes,
    writes,
)
from .writes import WriteInputs


def written(inputs: WriteInputs, layer: int, result: torch.Tensor) -> torch.Tensor:
    return inputs.written(result)


def operators(page_size: int = 16) -> dict[str, RowsOperator]:
    """Name -> operator, for KV caches with pages of `page_size` tokens."""
    attention = [
        RowsOperator(
            name=name,
            unit=unit,
            cases=partial(cases, page_size),
            make=ours.attention,
            objections=partial(ours.objections, operation),
            build=inputs.build,
            reference=oracle.reference,
        )
        for name, unit, operation, cases in (
            ("decode", "TB/s", Operation.DECODE, rows.decode_cases),
            ("prefill", "TFLOP/s", Operation.PREFILL, rows.prefill_cases),
            ("mla-decode", "TB/s", Operation.MLA_DECODE, rows.latent_cases),
            ("mla-prefill", "TFLOP/s", Operation.PREFILL, rows.packed_cases),
        )
    ]
    stores = RowsOperator(
        name="write-kv",
        unit="TB/s",
        cases=partial(rows.write_cases, page_size),
        make=ours.write_kv,
        objections=partial(ours.objections, Operation.WRITE_KV),
        build=writes.build,
        reference=writes.reference,
        poison=writes.poison,
        compared=written,
    )
    rotates = RowsOperator(
        name="rope-write-kv",
        unit="TB/s",
        cases=partial(ropes.cases, page_size),
        make=ropes.ours,
        objections=ropes.objections,
        build=ropes.build,
        reference=ropes.reference,
        poison=ropes.poison,
        compared=ropes.compared,
    )
    latents = RowsOperator(
        name="rope-write-mla",
        unit="TB/s",
        cases=mla_ropes.cases,
        make=ropes.ours,
        objections=ropes.objections,
        build=mla_ropes.build,
        reference=mla_ropes.reference,
        poison=mla_ropes.poison,
        compared=ropes.compared,
    )
    return {operator.name: operator for operator in (*attention, stores, rotates, latents)}
