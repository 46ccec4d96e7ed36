# SPDX-License-Identifier: Apache-2.0
"""Norms of heads, rotary embedding and cache write in one launch: the definition, the kernels, and their choice."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import emulator
from dsl_backend.attention import rope, rope_dispatch, rope_reference
from dsl_backend.attention.cute import rope as kernel
from dsl_backend.attention.cute import rope_host
from dsl_backend.attention.rope_spec import RopeSpec, RopeStyle, RopeTensors
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.runtime import registry, toolkit
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.compiles import compiles
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import fuzz
from dsl_backend.testing.rope_writes import EPS, ROPES, RopeCase, build, check_rope, judge, random_case
from emulator.errors import EmulatorError, HostError
from emulator.machine.findings import Kind
from tests import machine_code
from tests.attention.emulated import SCHEDULES, SMS, far_apart
from tests.mistakes import Mistake, spoilt
from tests.primitives import dependent_chains as chains

ARCHS = registry.EMULATED
BY_ID = {case.id: case for case in ROPES}
SERVED = [case for case in ROPES if case.tier == "smoke" and not rope_dispatch.cute(case.spec, from_arch("sm_90a"))]
# These have one kernel, and another one.
QUICK = ("llama", "specials", "few-slots", "beyond", "heads-first", "separate", "no-tokens", "specials-norm")
# Each has a kernel of its own.
OFTEN = (*QUICK, "gemma3", "partial-norm", "gptj-norm", "e5m2", "values-longer", "padded", "mqa", "no-slots")


def marks_of(name: str, quick: Collection[str], often: Collection[str]) -> Sequence[pytest.MarkDecorator]:
    """For every change, for what is left to longer runs, or for the longest."""
    return () if name in quick else (pytest.mark.rest,) if name in often else (pytest.mark.full,)


FUZZED, FUZZED_IN_FULL = 4, 100
SEED = 20261125
F32, F16 = torch.float32, torch.float16

needs_triton = pytest.mark.skipif(
    not (torch.cuda.is_available() or targets.triton_interpreted()),
    reason="no CUDA device, and TRITON_INTERPRET is off",
)


# The definition


@pytest.mark.parametrize("style", list(RopeStyle))
def test_rotation_is_a_product_of_complex_numbers(style: RopeStyle) -> None:
    angle = torch.rand(7, 16, dtype=torch.float64) * 6
    values = torch.randn(7, 3, 64, dtype=torch.float64)
    found = rope_reference.rotated(values, torch.cat((angle.cos(), angle.sin()), 1), style)
    neox = style is RopeStyle.NEOX
    first, second = ((0, 16), (16, 32)) if neox else ((0, 32), (1, 32))
    step = 1 if neox else 2
    real, imaginary = (slice(start, end, step) for start, end in (first, second))
    turned = (
        torch.complex(values[..., real], values[..., imaginary]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    torch.testing.assert_close(torch.complex(found[..., real], found[..., imaginary]), turned)
    assert torch.equal(found[..., 32:], values[..., 32:])


@pytest.mark.parametrize("case", [case for case in ROPES if case.tier == "smoke"], ids=lambda case: case.id)
def test_reference(case: RopeCase) -> None:
    check_rope(case, "reference", "cpu")


# The kernels


def emulate(case: RopeCase, arch: str, schedule: str, seed: int = 0) -> None:
    """Any finding or warning raises."""
    with emulator.device(arch=arch, sms=SMS, schedule=schedule, seed=seed, strict=True):
        check_rope(case, "cute", "cpu", from_arch(arch))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.id, marks=marks_of(case.id, QUICK, OFTEN)) for case in SERVED],
)
def test_emulated(case: RopeCase) -> None:
    for arch in ARCHS:
        for schedule in SCHEDULES:
            emulate(case, arch, schedule)


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(i, marks=(pytest.mark.rest if i < FUZZED else pytest.mark.full,))
        for i in range(FUZZED + FUZZED_IN_FULL)
    ],
)
def test_fuzz(index: int) -> None:
    case = fuzz.problem("rope_write_kv", SEED, index, fuzz.TINY, 1)
    assert isinstance(case, RopeCase)
    emulate(case, ARCHS[index % 2], SCHEDULES[index % 3], index)


@needs_triton
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.id,
            marks=pytest.mark.gpu if case.tier == "gpu" else marks_of(case.id, ("qwen3", "odd-rotation"), BY_ID),
        )
        for case in ROPES
    ],
)
def test_triton(case: RopeCase, device: torch.device) -> None:
    check_rope(case, "triton", device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.id)
def test_cute_on_a_gpu(case: RopeCase) -> None:
    check_rope(case, "cute", "cuda")


@pytest.mark.rest
@pytest.mark.parametrize("arch", ARCHS)
def test_offsets_past_31_bits(arch: str) -> None:
    """Rows, pages and positions 2^30 elements apart: memory of which a few pages are ever touched."""
    case, step = RopeCase(tokens=3, heads=(1, 1), skipped=0, positions=3, pages=3), 2**30 + 2**20
    tensors = build(case, "cpu")
    spread = ("q", "key", "value", "q_out", "cos_sin", "key_cache", "value_cache")
    mine = tensors._replace(**{name: far_apart(getattr(tensors, name), step) for name in spread})
    with emulator.device(arch=arch, sms=1, strict=True):
        rope.RopeWriter(case.spec, lambda: from_arch(arch), "cute")(mine, EPS)
        near = build(case, "cpu")
        rope.RopeWriter(case.spec, lambda: from_arch(arch), "cute")(near, EPS)
    for name in ("q_out", "key_cache", "value_cache"):
        found, right = (getattr(one, name)[:3].contiguous().view(torch.int16) for one in (mine, near))
        assert torch.equal(found, right), name


@pytest.mark.rest
def test_bits_depend_on_nothing_beside_a_token() -> None:
    case = replace(BY_ID["partial-norm"], tokens=7, skipped=0)
    with emulator.device(arch="sm_90a", sms=SMS, strict=True):
        writer = rope.RopeWriter(case.spec, lambda: from_arch("sm_90a"), "cute")
        whole, parts = build(case, "cpu"), build(case, "cpu")
        writer(whole, EPS)
        for first, end in ((0, 1), (1, 4), (4, 7)):
            rows = ("q", "key", "value", "q_out", "positions", "slots")
            writer(parts._replace(**{name: getattr(parts, name)[first:end] for name in rows}), EPS)
    for name in ("q_out", "key_cache", "value_cache"):
        found, right = (getattr(one, name).contiguous().view(torch.int16) for one in (parts, whole))
        assert torch.equal(found, right), name


@pytest.mark.rest
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_registers_suffice(arch: str) -> None:
    """With 64 registers a thread, eight CTAs fit an SM. Nothing spills."""
    codes = machine_code.found(f"{arch}-rope")
    assert len(codes) == 3
    for code in codes:
        assert 0 < code.registers <= 64, code
        assert code.stack == 0, code


# Mistakes

NORM = replace(BY_ID["specials-norm"], specials=False, fp8=False, rotary_dim=32, tokens=11)
SINES = "rTable[None, 0])\n            load(row, self.table_dtype, lane * VECTOR + self.{} // 2"
MISTAKES = (
    ("sums of another head", "self.lanes, eps)", "2 * self.lanes, eps)"),
    ("values are normalised", "if not is_value:\n            weight = to", "if True:\n            weight = to"),
    ("values are rotated", "rotates = not is_value and lane", "rotates = lane"),
    ("the other rotation", "rY[one] = a * cos - b * sin", "rY[one] = a * cos + b * sin"),
    ("the weight of keys", "weight = tensors.q_weight.iterator.toint() if is_query else weight", "pass"),
    ("an unknown slot", "cutlass.Uint64(page) < cutlass.Uint64(tensors.key_cache.shape[0])", "slot == slot"),
    ("a slot of no token", "if not is_query and token < tensors.slots.shape[0]:", "if not is_query:"),
    ("sines behind the head", SINES.format("key.rotary_dim"), SINES.format("dim")),
    ("a thread beyond the last token", "active = token < tensors.positions.shape[0] and lane", "active = lane"),
)
QUICK_MISTAKES: tuple[str, ...] = ()
OFTEN_MISTAKES = ("sums of another head", "a slot of no token", "the weight of keys")


def run(case: RopeCase, made: Callable[..., Any]) -> None:
    """Run a case on a kernel that is compiled again: a cached one has other source."""
    key, function = rope_host.key_of(case.spec), None
    for schedule in ("lazy", "random"):
        given = build(case, "cpu")
        with emulator.device(arch="sm_90a", sms=SMS, schedule=schedule, strict=True):
            function = function or toolkit.compiled(made(key), rope_host.fake_args(key), "sm_90a", "")
            function(given._replace(k_scale=None, v_scale=None), given.q, EPS)
        judge(case, given, build(case, "cpu"), "cute")


MISTAKEN = replace(NORM, without_slot=3, skipped=2)


@pytest.mark.rest
def test_right_without_a_mistake() -> None:
    run(MISTAKEN, kernel.RopeWriteKV)


@pytest.mark.parametrize(
    ("name", "said", "wrong"),
    [pytest.param(*one, id=one[0], marks=marks_of(one[0], QUICK_MISTAKES, OFTEN_MISTAKES)) for one in MISTAKES],
)
def test_mistake_is_found(name: str, said: str, wrong: str, tmp_path: Path) -> None:
    module = spoilt(Mistake(name, kernel, said, wrong), tmp_path)
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        run(MISTAKEN, module.RopeWriteKV)
    assert not isinstance(raised.value, HostError), "it ran"


@pytest.mark.rest
@pytest.mark.parametrize("edit", [chains.without_wait, chains.with_late_wait])
def test_missing_wait_is_found(edit: Callable[..., str]) -> None:
    """It would read what the projection in front of it is about to store."""
    _, machine = chains.execute(chains.rotation, "sm_90a", "eager")
    (number,) = (i for i, launch in enumerate(machine.launches) if "RopeWriteKV" in launch.kernel)
    _, mutant = chains.execute(
        chains.rotation, "sm_90a", "lazy", mistake=chains.Mistake(number, partial(edit, number=0))
    )
    assert Kind.DEPENDENCY in {one.kind for one in mutant.findings}


# Which kernel serves


def shifted(tensors: RopeTensors) -> RopeTensors:
    """The same with queries that begin two bytes behind an aligned address."""
    q = tensors.q
    span = 1 + sum((n - 1) * stride for n, stride in zip(q.shape, q.stride(), strict=True))
    return tensors._replace(q=torch.empty(span + 1, dtype=q.dtype)[1:].as_strided(q.shape, q.stride(), 1).copy_(q))


@needs_triton
def test_tensors_that_lie_badly_are_served_by_the_next_kernel() -> None:
    case = BY_ID["llama"]
    with emulator.device(arch="sm_90a", sms=SMS, strict=True):
        writer = rope.RopeWriter(case.spec, lambda: from_arch("sm_90a"))
        for change in (shifted, lambda tensors: tensors):
            given = change(build(case, "cpu"))
            writer(given, EPS)
    found = [type(one).__module__.rpartition("attention.")[2] for one in writer._by_layout.values()]
    assert found == ["triton.rope", "cute.rope_host"]
    with pytest.raises(InvalidInput, match="cute: q begins 2 bytes after a multiple of 16"):
        rope.RopeWriter(case.spec, lambda: from_arch("sm_90a"), "cute")(shifted(build(case, "cpu")), EPS)


def test_prepared_is_compiled() -> None:
    case = BY_ID["llama"]
    with emulator.device(arch="sm_90a", sms=SMS, strict=True):
        writer = rope.RopeWriter(case.spec, lambda: from_arch("sm_90a"))
        writer.prepare()
        compiled = len(compiles.events)
        writer(build(case, "cpu"), EPS)
        assert len(compiles.events) == compiled


@pytest.mark.parametrize(
    ("changes", "arch", "message"),
    [
        ({}, "sm_80", "serves GPUs of sm_90a, sm_100a, sm_103a, this is sm_80"),
        ({"dim": 72, "rotary_dim": 16}, "sm_90a", "head size 72: a multiple of 16 up to 512 is needed"),
        ({"rotary_dim": 24}, "sm_90a", "24 rotated elements: a multiple of 16 up to 512 is needed"),
        ({"norm": True, "wide_norm": True}, "sm_90a", "weights of a norm are float32: bfloat16 is needed"),
        ({"dtype": F32}, "sm_90a", "dtype float32 is not one of float16, bfloat16"),
    ],
)
def test_objections(changes: dict[str, Any], arch: str, message: str) -> None:
    case = replace(BY_ID["llama"], **changes)
    with pytest.raises(Unsupported) as raised:
        rope.RopeWriter(case.spec, lambda: from_arch(arch), "cute").prepare()
    assert message in str(raised.value)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_every_random_problem_is_served(arch: str) -> None:
    for index in range(100):
        case = random_case(random.Random(index), 40)
        assert not rope_dispatch.triton(case.spec, from_arch(arch))
        assert rope_dispatch.choose(case.spec, from_arch(arch)).name == ("cute" if arch in ARCHS else "triton")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_dim": 66}, "rotary_dim is 66: an even number up to the head size, 64, is needed"),
        ({"rotary_dim": 7}, "rotary_dim is 7: an even number up to the head size"),
        ({"norm_dtype": torch.int8}, "norm_dtype is int8: a floating-point dtype is needed"),
        ({"table_dtype": F16}, "table_dtype is float16"),
        ({"style": "neox"}, "style is 'neox'"),
        ({"layer": replace(BY_ID["llama"].spec.layer, page_size=None)}, "packed keys have no cache"),
    ],
)
def test_specs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        replace(BY_ID["llama"].spec, **changes)
    assert message in str(raised.value)


def test_spec_as_text() -> None:
    spec: RopeSpec = BY_ID["gemma3"].spec
    assert str(spec) == (
        "4/2 heads of 256, bfloat16, page 16, causal, 256 elements rotated in neox's style, bfloat16 table, "
        "normalised by bfloat16 weights + 1"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": None}, "q is None"),
        ({"q": torch.zeros(4, 4, 64).bfloat16()}, "q has shape (4, 4, 64): (5, 4, 64) is needed"),
        ({"q_out": torch.zeros(6, 4, 64)}, "q_out is float32: bfloat16 is needed"),
        ({"key": torch.zeros(6, 3, 64).bfloat16()}, "key has shape (6, 3, 64): (5, 2, 64) is needed"),
        ({"positions": torch.zeros(5, dtype=torch.int32)}, "positions is int32 (5,) on cpu: contiguous int64"),
        ({"positions": torch.zeros(3, 5, dtype=torch.int64)}, "positions is int64 (3, 5) on cpu: contiguous int64"),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, "slots has 5 elements: 4 tokens"),
        ({"positions": torch.full((5,), 50)}, "positions has 50: cos_sin has positions 0 to 49"),
        ({"cos_sin": torch.zeros(50, 62).bfloat16()}, "cos_sin has shape (50, 62): (1, 64) is needed"),
        ({"cos_sin": torch.zeros(50, 64)}, "cos_sin is float32: bfloat16 is needed"),
        ({"q_weight": torch.ones(64)}, "q_weight is given, and the spec has no norm"),
        ({"value_cache": torch.zeros(3, 16, 2, 64).bfloat16()}, "key_cache holds 4 pages, value_cache 3"),
        ({"slots": torch.full((5,), 64)}, "slot_mapping has slot 64: the caches have slots 0 to 63"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"kernel": "fastest"}, "has no kernel 'fastest': choose one of cute, triton, reference"),
    ],
)
def test_arguments_that_are_refused(changes: dict[str, Any], message: str) -> None:
    tensors = build(BY_ID["llama"], "cpu")
    more = {name: changes.pop(name) for name in ("eps", "kernel") if name in (changes := dict(changes))}
    more = {"kernel": "reference", **more}
    with pytest.raises(InvalidInput) as raised:
        rope.rope_write_kv(BY_ID["llama"].spec, tensors._replace(**changes), **more)
    assert message in str(raised.value)


def test_weights_are_needed() -> None:
    case = BY_ID["qwen3"]
    tensors = build(case, "cpu")
    for weight, message in (
        (None, "k_weight is needed"),
        (torch.ones(64).bfloat16(), "k_weight is bfloat16 (64,) on cpu: bfloat16 [128] on cpu is needed"),
        (torch.ones(256).bfloat16()[::2], "k_weight has strides (2,): contiguous elements are needed"),
    ):
        with pytest.raises(InvalidInput) as raised:
            rope.rope_write_kv(case.spec, tensors._replace(k_weight=weight), kernel="reference")
        assert message in str(raised.value)


def test_a_call_like_an_earlier_one_is_still_checked() -> None:
    case = BY_ID["separate"]
    tensors = build(case, "cpu")
    with torch.no_grad():
        for _ in range(2):
            rope.rope_write_kv(case.spec, tensors)
        with pytest.raises(InvalidInput, match=r"value has shape \(4, 2, 64\)"):
            rope.rope_write_kv(case.spec, tensors._replace(value=tensors.value[:4]))


def test_ids_are_unique_and_every_case_has_a_reason() -> None:
    assert len(BY_ID) == len(ROPES)
    assert all(case.why for case in ROPES)
