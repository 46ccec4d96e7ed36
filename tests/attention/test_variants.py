# SPDX-License-Identifier: Apache-2.0
"""The variants that dispatch names are the kernels that the host launches, for the same batches."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsl_backend.attention import dispatch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.family import typical_layers
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.runtime import registry, toolkit
from dsl_backend.runtime.dispatch import Variant
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace

ARCHS = tuple(arch.name for arch in registry.with_kernels())
# Around every bound of a typical layer.
QUERY_LENS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 2047, 2048, 2049)


def serves(variant: Variant, query_len: int) -> bool:
    return variant.min_query_len <= query_len and (variant.max_query_len is None or query_len <= variant.max_query_len)


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
@pytest.mark.parametrize("arch", ARCHS)
def test_variants_are_what_is_launched(arch: str) -> None:
    target, workspace = from_arch(arch), Workspace(torch.device("cpu"))
    counts = set()
    for layer in typical_layers(target).values():
        if not isinstance(layer, AttentionSpec):
            continue
        for spec in (layer, replace(layer, batch_invariant=True)):
            for operation in dispatch.attention_of(spec):
                serving = [entry for entry, reasons in dispatch.judge(operation, spec, target) if not reasons]
                if not serving or serving[0].name != "cute":
                    continue
                entry = serving[0]
                kernel: Any = entry.load()(spec, target, workspace)
                other, extend = (getattr(kernel, name, None) for name in ("other", "extend"))
                variants = entry.variants(spec, target)
                launched = [one for one in (kernel, other, extend) if one is not None]
                assert [one.config for one in variants] == [one.config for one in launched]
                assert [one.few_tiles for one in variants] == [one is extend for one in launched]
                assert (extend is not None) == (operation is Operation.PREFILL and not spec.batch_invariant)
                for query_len in QUERY_LENS:
                    (chosen,) = [one for one in variants if serves(one, query_len) and not one.few_tiles]
                    is_other = other is not None and kernel.is_for_other(query_len)
                    assert chosen is variants[is_other], f"{operation.value} {spec}, {query_len} tokens"
                counts.add(len(variants))
    assert counts >= {1, 2}, "layers with one kernel and with two were among them"


def names(arch: str, layer: str, operation: Operation) -> list[tuple[str, str]]:
    target = from_arch(arch)
    spec = typical_layers(target)[layer]
    return [(one.name, one.batches) for one in dispatch.choose(operation, spec, target).variants(spec, target)]


@pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
def test_names_say_what_a_kernel_is() -> None:
    assert names("sm_100a", "head size 128", Operation.DECODE) == [
        ("128x128", "queries of 5 tokens or more"),
        ("swap-AB 16x128", "queries of at most 4 tokens"),
    ]
    assert names("sm_90a", "head size 64", Operation.PREFILL)[1] == (
        "192x96 ping-pong",
        "queries of 2048 tokens or more",
    )
    few_tiles = "few query tiles behind long keys"
    assert names("sm_90a", "head size 64", Operation.PREFILL)[2] == ("split-KV 128x128 ping-pong", few_tiles)
    assert names("sm_100a", "head size 256", Operation.PREFILL) == [
        ("2-CTA 128x128", "all batches"),
        ("split-KV 128x64", few_tiles),
    ]
    assert names("sm_100a", "MLA 576/512", Operation.MLA_DECODE) == [("2-CTA 64x128", "all batches")]


def test_triton_tells_no_variants() -> None:
    assert names("sm_80", "head size 128", Operation.DECODE) == []
