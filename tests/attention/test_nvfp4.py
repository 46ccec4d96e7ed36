# SPDX-License-Identifier: Apache-2.0
"""NVFP4 caches: where a page has what, what is stored, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsl_backend.attention import api, dispatch, reference, rope_dispatch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.rope_spec import RopeSpec, RopeStyle
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.quant.format import NVFP4_KV
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import check
from dsl_backend.testing.cases import by_id
from dsl_backend.testing.inputs import Layout
from dsl_backend.testing.kv_writes import Write, WriteCase, build, check_write

WRITE = WriteCase(nvfp4=True, heads=3, dim=96, dim_v=32, page=16, tokens=40, skipped=0)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
K_SCALE, V_SCALE = torch.tensor([0.5]), torch.tensor([0.03, 0.04, 0.05])
SPEC = by_id("nvfp4").spec


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    return (mantissa / 8) * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def from_bytes(page: torch.Tensor, token: int, head: int, heads: int, dim: int, heads_first: bool) -> list[float]:
    """A row of a page [bytes], by the page's definition: elements of all rows, then scales of all rows."""
    tokens = page.numel() // (heads * (dim // 2 + dim // 16))
    row = head * tokens + token if heads_first else token * heads + head
    numbers = []
    for column in range(dim):
        code = int(page[row * (dim // 2) + column // 2]) >> 4 * (column % 2) & 15
        scale = int(page[heads * tokens * (dim // 2) + row * (dim // 16) + column // 16])
        numbers.append((-1) ** (code >> 3) * E2M1[code & 7] * e4m3(scale))
    return numbers


def written(layout: Layout) -> Write:
    made = build(replace(WRITE, layout=layout), "cpu")
    for cache in (made.key_cache, made.value_cache):
        for part in NVFP4_KV.parts(cache):
            part.zero_()
    api.write_kv(
        WRITE.spec,
        made.key,
        made.value,
        made.key_cache,
        made.value_cache,
        made.slots,
        k_scale=K_SCALE,
        v_scale=V_SCALE,
        kernel="reference",
    )
    return made


@pytest.mark.parametrize("layout", [Layout.SIDE_BY_SIDE, Layout.HEADS_FIRST])
def test_bytes_of_a_page_are_what_the_format_says(layout: Layout) -> None:
    """Each number is within half a step of what was written, as read from the page's bytes by hand."""
    made = written(layout)
    cases = ((made.key, made.key_cache, K_SCALE.expand(3), 96), (made.value, made.value_cache, V_SCALE, 32))
    for rows, cache, scale, dim in cases:
        size = 16 * 3 * (dim // 2 + dim // 16)
        pages = cache.view(torch.uint8).as_strided((4, size), (cache.stride(0), 1), cache.storage_offset())
        for index, slot in enumerate(made.slots[: WRITE.tokens].tolist()):
            for head in range(3):
                found = from_bytes(pages[slot // 16], slot % 16, head, 3, dim, layout is Layout.HEADS_FIRST)
                got = torch.tensor(found) * scale[head]
                wanted = rows[index, head].float()
                largest = wanted.view(-1, 16).abs().amax(1).repeat_interleave(16)
                # A step is at most 2 of 6; the scale of a block is rounded to 4 bits.
                assert ((got - wanted).abs() <= largest * (1 / 6 + 1 / 16)).all(), (slot, head)
                assert (got[largest == wanted.abs()].abs() > 0.9 * largest[largest == wanted.abs()]).all()


def test_the_reference_reads_what_a_hand_reads() -> None:
    made = written(Layout.HEADS_FIRST)
    elements, scales = NVFP4_KV.parts(made.key_cache)
    rows = reference.dequantize_nvfp4(elements, scales)
    size = 16 * 3 * (48 + 6)
    pages = made.key_cache.view(torch.uint8).as_strided((4, size), (made.key_cache.stride(0), 1))
    for page, token, head in ((0, 0, 0), (1, 7, 2), (3, 15, 1)):
        assert rows[page, token, head].tolist() == from_bytes(pages[page], token, head, 3, 96, True)


def test_writes_keep_off_other_bytes() -> None:
    check_write(replace(WRITE, layout=Layout.PADDED, skipped=3), "reference", "cpu")


@pytest.mark.parametrize("mistake", ["nibbles", "neighbour", "tensor"])
def test_a_mistake_in_dequantization_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases tell swapped elements of a byte, a neighbour's scale, and no scale of the tensor."""
    right = reference.dequantize_nvfp4
    case = by_id("nvfp4")
    problem = case.problem()
    expected, magnitude = problem.expected(), problem.score_magnitude()
    if mistake == "nibbles":
        monkeypatch.setattr(
            reference, "dequantize_nvfp4", lambda elements, scales: right(elements >> 4 | elements << 4, scales)
        )
    elif mistake == "neighbour":
        monkeypatch.setattr(reference, "dequantize_nvfp4", lambda elements, scales: right(elements, scales.roll(1, -1)))
    else:
        problem.k_scale = torch.ones(1)
    result = check.run(problem, "reference")
    with pytest.raises(AssertionError):
        check.judge(result, expected, magnitude)


def problem_with(**changes: Any) -> None:
    problem = by_id("nvfp4").problem()
    plan = api.plan(problem.spec, problem.batch, kernel="reference")
    facts: dict[str, Any] = {"q": problem.q, "keys": problem.keys, "values": problem.values}
    scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
    api.run(plan, **(facts | scales | {name: change(problem) for name, change in changes.items()}))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("keys", lambda p: p.keys[..., :32], r"keys has shape .*, 32\): .*, 36\) is needed"),
        ("keys", lambda p: p.keys.view(torch.uint8), "keys is uint8: float4_e2m1fn_x2 is needed"),
        (
            "values",
            lambda p: torch.zeros(p.values.shape[0], 16, 2, 40, dtype=torch.uint8)[..., :36].view(NVFP4_KV.dtype),
            r"values has strides \(1280, 80, 40, 1\): dense pages of 16 tokens, 2 heads and 36 bytes are needed",
        ),
        ("k_scale", lambda p: None, "nvfp4 keys and values need k_scale"),
        ("v_scale", lambda p: torch.ones(3), r"one float32, or \[heads_kv = 2\] of them"),
    ],
)
def test_bad_input_is_named(name: str, change: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        problem_with(**{name: change})


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"head_dim": 72, "head_dim_v": 72}, "head size 72 is not a multiple of 16"),
        ({"page_size": None}, "an NVFP4 cache has pages"),
        (
            {"heads_kv": 1, "head_dim": 576, "head_dim_v": 512, "mla": True},
            "an NVFP4 cache has keys and values of their own",
        ),
    ],
)
def test_layers_that_no_kernel_serves(facts: dict[str, Any], message: str) -> None:
    spec = replace(SPEC, **facts)
    reasons = dispatch.reasons_against(spec, targets.cpu_target())
    assert any(message in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("arch", "operation", "kernel"),
    [
        ("sm_90a", Operation.PREFILL, "dense-prefill triton"),
        ("sm_90a", Operation.DECODE, "dense-decode triton"),
        ("sm_100a", Operation.PREFILL, "dense-prefill sm100"),
        ("sm_103a", Operation.DECODE, "dense-decode sm100"),
        ("sm_100a", Operation.WRITE_KV, "write-kv triton"),
    ],
)
def test_who_serves(arch: str, operation: Operation, kernel: str) -> None:
    pytest.importorskip("cutlass")
    assert dispatch.choose(operation, SPEC, from_arch(arch)).title == kernel


@pytest.mark.parametrize(
    ("facts", "arch", "message"),
    [
        ({}, "sm_90a", "has no NVFP4 cache"),
        ({"head_dim": 80, "head_dim_v": 80}, "sm_100a", "head size 80 of an NVFP4 cache is not a multiple of 32"),
        ({"head_dim": 512, "head_dim_v": 512}, "sm_100a", "head size 512 of an NVFP4 cache is not a multiple of 32"),
    ],
)
def test_what_cute_refuses(facts: dict[str, Any], arch: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        dispatch.choose(Operation.DECODE, replace(SPEC, **facts), from_arch(arch), "cute")


@pytest.mark.parametrize("arch", ["cpu", "sm_90a", "sm_100a"])
def test_rotation_does_not_write_it(arch: str) -> None:
    spec = RopeSpec(layer=SPEC, rotary_dim=64, style=RopeStyle.NEOX, table_dtype=SPEC.dtype)
    target = targets.cpu_target() if arch == "cpu" else from_arch(arch)
    judged = rope_dispatch.judge(spec, target)
    assert all(reasons for _, reasons in judged)
    assert any("has no NVFP4 cache" in reasons for _, reasons in judged)


def test_a_spec_says_it() -> None:
    assert "nvfp4 keys" in str(SPEC)
    assert SPEC.is_quantized_kv
    assert not SPEC.is_fp8_kv
    assert replace(SPEC, kv_dtype=SPEC.dtype).kv.width(64) == 64
