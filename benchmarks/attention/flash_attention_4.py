# SPDX-License-Identifier: Apache-2.0
"""FA4: vLLM's copy of it, or the package flash-attn-4 where that is not there.

The copy's dense attention is called through vLLM (`vllm_dense`). The package's functions and the copy's own, which MLA
decode calls, have the same parameters.
"""

import importlib
import importlib.util
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from dsl_backend.providers import Run, with_version
from dsl_backend.runtime import target as targets

from ..columns import broken, needs_gpu, of_capability
from .inputs import Inputs
from .problems import Problem

# Modules, in the order of preference -> their distributions.
HOMES = {"vllm.vllm_flash_attn.cute": "vllm", "flash_attn.cute": "flash-attn-4"}
COPY, PACKAGE = HOMES
# Major compute capabilities of the package's kernels in 4.0.0b20 and b36: of all, of those that read pages, of those
# that split keys, and of those for latents.
MAJORS, PAGED_MAJORS, SPLIT_MAJORS, LATENT_MAJORS = (8, 9, 10, 11, 12), (9, 10, 11), (10, 11), (10, 11)


def is_there(home: str) -> bool:
    """Whether a module's files are there; nothing is imported, since vLLM takes seconds."""
    top, *below = home.split(".")
    spec = importlib.util.find_spec(top)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return any(pathlib.Path(folder, *below, "interface.py").is_file() for folder in folders)


def function_of(home: str) -> Callable[..., Any]:
    """Its attention over requests of several lengths; returns the output and the logarithms of the sums."""
    found: Callable[..., Any] = importlib.import_module(f"{home}.interface").flash_attn_varlen_func
    return found


def faults(home: str, latent: bool) -> list[str]:
    """Why a module that is there cannot be called. Without a GPU it is not tried.

    Args:
        latent: for absorbed MLA.
    """
    if needs_gpu():
        return []
    if found := broken(f"{home}.interface"):
        return list(found)
    has_latents = not latent or "qv" in inspect.signature(function_of(home)).parameters
    return [] if has_latents else [f"{home} has no latents"]


def home_of(latent: bool = False) -> str | None:
    """The module that runs: the first one that is there and can be called."""
    return next((home for home in HOMES if is_there(home) and not faults(home, latent)), None)


def source(latent: bool = False) -> list[str]:
    home = home_of(latent)
    return ["flash-attn-4, not installed"] if home is None else [with_version(HOMES[home]), home]


def latent_source() -> list[str]:
    return source(latent=True)


def missing(latent: bool = False) -> list[str]:
    """Why FA4 does not run here."""
    found = [why for home in HOMES if is_there(home) for why in faults(home, latent)]
    absent = [] if home_of(latent) else found or ["flash-attn-4 is not installed, and vLLM has no copy of it here"]
    return absent + needs_gpu()


def package_objections(problem: Problem) -> list[str]:
    """Of the package to dense keys, in pages or packed."""
    return of_capability(MAJORS) if problem.page_size is None else of_capability(PAGED_MAJORS, "reads pages on")


def splits_of(problem: Problem) -> int:
    """`num_splits`: 0 lets FA4 choose."""
    capability = targets.detect().capability
    return 0 if capability is not None and capability[0] in SPLIT_MAJORS and not problem.batch_invariant else 1


def attention(problem: Problem, inputs: Inputs) -> Run:
    """The package's attention over dense keys, which allocates its output."""
    function, batch, splits = function_of(PACKAGE), inputs.batch, splits_of(problem)
    keys: dict[str, Any] = {"cu_seqlens_k": batch.kv_start_loc}
    if batch.block_table is not None:
        keys = {"seqused_k": batch.seq_lens, "page_table": batch.block_table}

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        result: torch.Tensor = function(
            layer.q,
            layer.keys,
            layer.values,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_seq_len,
            softmax_scale=problem.scale,
            causal=True,
            window_size=(problem.window_left, None if problem.window_left is None else 0),
            num_splits=splits,
            **keys,
        )[0]
        return result

    return run
