# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA's norm, rotary embedding and cache write in one launch: definition, kernels, and their choice."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import emulator
from dsl_backend.attention import precompile, rope, rope_dispatch, rope_reference
from dsl_backend.attention.cute import mla_rope as kernel
from dsl_backend.attention.cute import mla_rope_host
from dsl_backend.attention.rope_spec import RopeSpec, RopeStyle
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.runtime import registry, toolkit
from dsl_backend.runtime.compiles import compiles
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import fuzz
from dsl_backend.testing.mla_rope_writes import (
    EPS,
    MLA_ROPES,
    MLARopeCase,
    build,
    check_mla_rope,
    judge,
    random_case,
)
from emulator.errors import EmulatorError, HostError
from emulator.machine.findings import Kind
from tests.attention.emulated import SCHEDULES, SMS, far_apart
from tests.attention.test_rope import marks_of, needs_triton
from tests.mistakes import Mistake, spoilt
from tests.primitives import dependent_chains as chains

ARCHS = registry.EMULATED
BY_ID = {case.id: case for case in MLA_ROPES}
SERVED = [
    case for case in MLA_ROPES if case.tier == "smoke" and not rope_dispatch.mla_cute(case.spec, from_arch("sm_90a"))
]
# These have one kernel.
QUICK = ("separate", "specials", "beyond", "few-slots", "no-slots", "no-tokens", "all-skipped")
OFTEN = (*QUICK, "deepseek", "neox-separate", "fp8", "fp8-padded", "specials-fp8", "e5m2", "fp16", "many")
FUZZED, FUZZED_IN_FULL = 3, 100
SEED = 20261126
F32, F16 = torch.float32, torch.float16


# The definition


def test_parts_are_those_of_their_own_definitions() -> None:
    """The latent as RMSNorm of torch has it, rope parts as products of complex numbers."""
    case = BY_ID["separate"]
    tensors = build(case, "cpu")
    q, latent, rotated = rope_reference.exact_mla(tensors, case.spec, EPS)
    normed = torch.nn.functional.rms_norm(tensors.latent[:5].double(), (case.latent,), tensors.weight.double(), EPS)
    torch.testing.assert_close(latent.squeeze(1), normed)
    cos, sin = tensors.cos_sin[tensors.positions].double().chunk(2, 1)
    for given, found in ((tensors.q[:5], q), (tensors.rope[:5, None], rotated)):
        pairs = torch.view_as_complex(given.double().unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(-2)
        torch.testing.assert_close(found, turned)


@pytest.mark.parametrize("case", [case for case in MLA_ROPES if case.tier == "smoke"], ids=lambda case: case.id)
def test_reference(case: MLARopeCase) -> None:
    check_mla_rope(case, "reference", "cpu")


# The kernels


def emulate(case: MLARopeCase, arch: str, schedule: str, seed: int = 0) -> None:
    """Any finding or warning raises."""
    with emulator.device(arch=arch, sms=SMS, schedule=schedule, seed=seed, strict=True):
        check_mla_rope(case, "cute", "cpu", from_arch(arch))


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id, marks=marks_of(case.id, QUICK, OFTEN)) for case in SERVED]
)
def test_emulated(case: MLARopeCase) -> None:
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
    case = fuzz.problem("rope_write_mla", SEED, index, fuzz.TINY, 1)
    assert isinstance(case, MLARopeCase)
    emulate(case, ARCHS[index % 2], SCHEDULES[index % 3], index)


@needs_triton
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.id,
            marks=pytest.mark.gpu if case.tier == "gpu" else marks_of(case.id, ("separate", "odd-rotation"), BY_ID),
        )
        for case in MLA_ROPES
    ],
)
def test_triton(case: MLARopeCase, device: torch.device) -> None:
    check_mla_rope(case, "triton", device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [case for case in MLA_ROPES if not rope_dispatch.mla_cute(case.spec, from_arch("sm_90a"))],
    ids=lambda case: case.id,
)
def test_cute_on_a_gpu(case: MLARopeCase) -> None:
    check_mla_rope(case, "cute", "cuda")


@pytest.mark.rest
def test_offsets_past_31_bits() -> None:
    """Rows, pages and positions 2^30 elements apart: memory of which a few pages are ever touched."""
    case, step = replace(BY_ID["separate"], tokens=3, heads=1, skipped=0, positions=3, pages=3), 2**30 + 2**20
    near = build(case, "cpu")
    spread = ("q", "latent", "rope", "q_out", "latent_out", "rope_out", "cos_sin", "cache")
    mine = near._replace(**{name: far_apart(getattr(near, name), step) for name in spread})
    with emulator.device(arch="sm_90a", sms=1, strict=True):
        writer = rope.RopeWriter(case.spec, lambda: from_arch("sm_90a"), "cute")
        writer(mine, EPS)
        writer(near, EPS)
    for name in ("q_out", "latent_out", "rope_out", "cache"):
        found, right = (getattr(one, name)[:3].contiguous().view(torch.int16) for one in (mine, near))
        assert torch.equal(found, right), name


@pytest.mark.rest
def test_bits_depend_on_nothing_beside_a_token() -> None:
    case = replace(BY_ID["fp16"], tokens=7, skipped=0, in_place=False)
    rows = ("q", "latent", "rope", "q_out", "latent_out", "rope_out", "positions", "slots")
    with emulator.device(arch="sm_90a", sms=SMS, strict=True):
        writer = rope.RopeWriter(case.spec, lambda: from_arch("sm_90a"), "cute")
        whole, parts = build(case, "cpu"), build(case, "cpu")
        writer(whole, EPS)
        for first, end in ((0, 1), (1, 4), (4, 7)):
            writer(parts._replace(**{name: getattr(parts, name)[first:end] for name in rows}), EPS)
    for name in ("q_out", "latent_out", "rope_out", "cache"):
        found, right = (getattr(one, name).contiguous().view(torch.int16) for one in (parts, whole))
        assert torch.equal(found, right), name


# Mistakes

MISTAKEN = replace(BY_ID["fp8"], tokens=19, without_slot=3, skipped=2, latent=80, gain=1.0)
MISTAKES = (
    ("sums of another token", "self.latent_lanes, eps)", "2 * self.latent_lanes, eps)"),
    ("the mean of all lanes", "rms_factor(rY, self.latent,", "rms_factor(rY, 16 * self.latent_lanes,"),
    ("a latent beyond the last token", "has_latent and token < tensors.positions.shape[0]", "has_latent"),
    ("a part beyond the last token", "if token < tensors.positions.shape[0] and lane", "if lane"),
    ("a slot of no token", "if token < tensors.slots.shape[0]:", "if True:"),
    ("an unknown slot", "if cutlass.Uint64(page) < cutlass.Uint64(tensors.cache.shape[0]):", "if slot == slot:"),
    ("the key before the queries", "is_key = part == self.key.heads", "is_key = part == 0"),
    ("the key in the latent's place", "self.latent + first, self.latent + second", "first, second"),
    ("the key as one more query", "row = address(tensors.rope_out, (token,)) if is_key else", "row ="),
    ("the scale of no cache", "divisor = tensors.scale[0]", "pass"),
    ("sines of the next position", "lane * VECTOR + self.rope // 2, rTable", "lane * VECTOR + self.rope, rTable"),
)
QUICK_MISTAKES = ("a slot of no token",)
OFTEN_MISTAKES = (*QUICK_MISTAKES, "sums of another token", "the key as one more query")


def run(case: MLARopeCase, made: Callable[..., Any]) -> None:
    """Run a case on a kernel that is compiled again: a cached one has other source."""
    key, function = mla_rope_host.key_of(case.spec), None
    for schedule in ("lazy", "random"):
        given = build(case, "cpu")
        with emulator.device(arch="sm_90a", sms=SMS, schedule=schedule, strict=True):
            function = function or toolkit.compiled(made(key), mla_rope_host.fake_args(key), "sm_90a", "")
            function(given._replace(cache=given.cache.view(torch.uint8)), given.q, EPS)
        judge(case, given, build(case, "cpu"), "cute")


@pytest.mark.rest
def test_right_without_a_mistake() -> None:
    run(MISTAKEN, kernel.RopeWriteMLA)


@pytest.mark.parametrize(
    ("name", "said", "wrong"),
    [pytest.param(*one, id=one[0], marks=marks_of(one[0], QUICK_MISTAKES, OFTEN_MISTAKES)) for one in MISTAKES],
)
def test_mistake_is_found(name: str, said: str, wrong: str, tmp_path: Path) -> None:
    module = spoilt(Mistake(name, kernel, said, wrong), tmp_path)
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        run(MISTAKEN, module.RopeWriteMLA)
    assert not isinstance(raised.value, HostError), "it ran"


@pytest.mark.rest
@pytest.mark.parametrize("edit", [chains.without_wait, chains.with_late_wait])
def test_missing_wait_is_found(edit: Callable[..., str]) -> None:
    """It would read what the projection in front of it is about to store."""
    _, machine = chains.execute(chains.latent_rotation, "sm_90a", "eager")
    (number,) = (i for i, launch in enumerate(machine.launches) if "RopeWriteMLA" in launch.kernel)
    _, mutant = chains.execute(
        chains.latent_rotation, "sm_90a", "lazy", mistake=chains.Mistake(number, partial(edit, number=0))
    )
    assert Kind.DEPENDENCY in {one.kind for one in mutant.findings}


# Which kernel serves


@needs_triton
def test_tensors_that_lie_badly_are_served_by_the_next_kernel() -> None:
    case = BY_ID["separate"]
    odd = replace(case, nope=15)
    with emulator.device(arch="sm_90a", sms=SMS, strict=True):
        writer = rope.RopeWriter(case.spec, lambda: from_arch("sm_90a"))
        for one in (odd, case):
            writer(build(one, "cpu"), EPS)
    found = [type(one).__module__.rpartition("attention.")[2] for one in writer._by_layout.values()]
    assert found == ["triton.mla_rope", "cute.mla_rope_host"]
    with pytest.raises(InvalidInput, match="cute: q begins 14 bytes after a multiple of 16"):
        rope.RopeWriter(case.spec, lambda: from_arch("sm_90a"), "cute")(build(odd, "cpu"), EPS)


def test_prepared_is_compiled() -> None:
    case = BY_ID["separate"]
    target = from_arch("sm_90a")
    (unit,) = precompile.rope_precompile_specs_of(case.spec, target)
    assert unit.key == mla_rope_host.key_of(case.spec)
    with emulator.device(arch="sm_90a", sms=SMS, strict=True):
        writer = rope.RopeWriter(case.spec, lambda: target)
        writer.prepare()
        compiled = len(compiles.events)
        writer(build(case, "cpu"), EPS)
        assert len(compiles.events) == compiled


@pytest.mark.parametrize(
    ("changes", "arch", "message"),
    [
        ({}, "sm_80", "serves GPUs of sm_90a, sm_100a, sm_103a, this is sm_80"),
        ({"latent": 72}, "sm_90a", "latent size 72: a multiple of 16 up to 512 is needed"),
        ({"rope": 24}, "sm_90a", "24 rotated elements: a multiple of 16 up to 512 is needed"),
        ({"wide_norm": True}, "sm_90a", "weights of the norm are float32: bfloat16 is needed"),
        ({"dtype": F32}, "sm_90a", "dtype float32 is not one of float16, bfloat16"),
    ],
)
def test_objections(changes: dict[str, Any], arch: str, message: str) -> None:
    case = replace(BY_ID["separate"], **changes)
    with pytest.raises(Unsupported) as raised:
        rope.RopeWriter(case.spec, lambda: from_arch(arch), "cute").prepare()
    assert message in str(raised.value)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_every_random_problem_is_served(arch: str) -> None:
    for index in range(100):
        case = random_case(random.Random(index), 40)
        assert not rope_dispatch.mla_triton(case.spec, from_arch(arch))
        assert rope_dispatch.choose(case.spec, from_arch(arch)).name == ("cute" if arch in ARCHS else "triton")
        assert len(list(precompile.rope_precompile_specs_of(case.spec, from_arch(arch)))) == (arch in ARCHS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table_dtype": F16}, "table_dtype is float16"),
        ({"style": "neox"}, "style is 'neox'"),
        ({"norm_dtype": None}, "norm_dtype is None"),
        ({"layer": replace(BY_ID["separate"].spec.layer, page_size=None)}, "packed keys have no cache"),
        ({"layer": replace(BY_ID["separate"].spec.layer, mla=False)}, "RopeSpec is for them"),
        (
            {"layer": replace(BY_ID["separate"].spec.layer, head_dim=73)},
            "9 rope elements of keys: a positive even number",
        ),
        (
            {"layer": replace(BY_ID["separate"].spec.layer, head_dim=64)},
            "0 rope elements of keys: a positive even number",
        ),
    ],
)
def test_specs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        replace(BY_ID["separate"].spec, **changes)
    assert message in str(raised.value)


def test_dense_layers_refuse_latent_ones() -> None:
    with pytest.raises(InvalidInput, match="absorbed MLA rotates a part of its own: MLARopeSpec is for it"):
        RopeSpec(layer=BY_ID["separate"].spec.layer, rotary_dim=32, style=RopeStyle.NEOX, table_dtype=torch.bfloat16)


def test_spec_as_text() -> None:
    assert str(BY_ID["deepseek"].spec) == (
        "3/1 heads of (576, 512), bfloat16, page 64, causal mla, 64 elements rotated in gptj's style, bfloat16 table, "
        "512 normalised by bfloat16 weights"
    )


BF16_ROWS = torch.zeros(6, 64).bfloat16()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": None}, "q is None"),
        ({"q": torch.zeros(4, 4, 32).bfloat16()}, "q has shape (4, 4, 32): (5, 4, 32) is needed"),
        ({"q_out": torch.zeros(6, 4, 32)}, "q_out is float32: bfloat16 is needed"),
        ({"latent": BF16_ROWS[:, :48]}, "latent has shape (6, 48): (5, 64) is needed"),
        ({"latent_out": BF16_ROWS[:1].expand(6, 64)}, "its rows overlap in memory"),
        ({"rope": BF16_ROWS}, "rope has shape (6, 64): (5, 32) is needed"),
        ({"rope_out": BF16_ROWS[:, ::2]}, "rope_out has stride 2 in its last dimension: 1 is needed"),
        ({"positions": torch.zeros(5, dtype=torch.int32)}, "positions is int32 (5,) on cpu: contiguous int64"),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, "slots has 5 elements: 4 tokens"),
        ({"positions": torch.full((5,), 50)}, "positions has 50: cos_sin has positions 0 to 49"),
        ({"cos_sin": torch.zeros(50, 30).bfloat16()}, "cos_sin has shape (50, 30): (1, 32) is needed"),
        ({"weight": torch.ones(64)}, "weight is float32 (64,) on cpu: bfloat16 [64] on cpu is needed"),
        ({"weight": None}, "weight is None"),
        ({"cache": torch.zeros(4, 16, 64).bfloat16()}, "cache has shape (4, 16, 64): (0, 16, 96) is needed"),
        ({"slots": torch.full((5,), 64)}, "slot_mapping has slot 64: the caches have slots 0 to 63"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"kernel": "fastest"}, "has no kernel 'fastest': choose one of cute, triton, reference"),
    ],
)
def test_arguments_that_are_refused(changes: dict[str, Any], message: str) -> None:
    tensors = build(BY_ID["separate"], "cpu")
    more = {name: changes.pop(name) for name in ("eps", "kernel") if name in (changes := dict(changes))}
    with pytest.raises(InvalidInput) as raised:
        rope.rope_write_mla(BY_ID["separate"].spec, tensors._replace(**changes), **{"kernel": "reference", **more})
    assert message in str(raised.value)


def test_a_scale_is_needed() -> None:
    case = BY_ID["fp8"]
    with pytest.raises(InvalidInput, match="an fp8 cache needs scale"):
        rope.rope_write_mla(case.spec, build(case, "cpu")._replace(scale=None), kernel="reference")


def test_other_problems_tensors_are_refused() -> None:
    case = BY_ID["separate"]
    with pytest.raises(InvalidInput, match="tensors is"):
        rope.rope_write_mla(case.spec, tuple(build(case, "cpu")))  # type: ignore[arg-type]


def test_a_call_like_an_earlier_one_is_still_checked() -> None:
    case = BY_ID["separate"]
    tensors = build(case, "cpu")
    with torch.no_grad():
        for _ in range(2):
            rope.rope_write_mla(case.spec, tensors)
        with pytest.raises(InvalidInput, match=r"rope has shape \(4, 32\)"):
            rope.rope_write_mla(case.spec, tensors._replace(rope=tensors.rope[:4]))


def test_ids_are_unique_and_every_case_has_a_reason() -> None:
    assert len(BY_ID) == len(MLA_ROPES)
    assert all(case.why for case in MLA_ROPES)
