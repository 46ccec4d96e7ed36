# SPDX-License-Identifier: Apache-2.0
"""Writes into the cache: the CuTe DSL kernel on the emulator, bit by bit, and the choice of a kernel for each call."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass")

import emulator
from dsl_backend.attention import api, reference
from dsl_backend.attention.cute import write_kv
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.quant.format import KVFormat
from dsl_backend.runtime import registry
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.compiles import compiles
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import fuzz
from dsl_backend.testing.kv_writes import WRITES, WriteCase, build, check_write
from tests.attention.emulated import SCHEDULES, SMS

ARCHS = registry.EMULATED
SMALL = [case for case in WRITES if case.tier == "smoke" and not case.nvfp4]
FUZZED, FUZZED_IN_FULL = 16, 200
SEED = 20261122
F32 = torch.float32


def emulate(case: WriteCase, arch: str, index: int) -> None:
    """Any finding or warning raises."""
    with emulator.device(arch=arch, sms=SMS, schedule=SCHEDULES[index % 3], seed=index, strict=True):
        check_write(case, "cute", "cpu", from_arch(arch))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
@pytest.mark.parametrize("arch", ARCHS)
def test_case(case: WriteCase, arch: str) -> None:
    for index in range(len(SCHEDULES)):
        emulate(case, arch, index)


@pytest.mark.parametrize(
    "index",
    [pytest.param(i, marks=() if i < FUZZED else (pytest.mark.full,)) for i in range(FUZZED + FUZZED_IN_FULL)],
)
def test_fuzz(index: int) -> None:
    case = fuzz.problem("write_kv", SEED, index, fuzz.TINY, 1)
    assert isinstance(case, WriteCase)
    emulate(case, ARCHS[index % 2], index)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("fp8", [False, True])
def test_offsets_past_31_bits(arch: str, fp8: bool) -> None:
    """Rows and pages 2^30 elements apart: memory of which a few pages are ever touched."""
    spec, step = WriteCase(heads=1, fp8=fp8).spec, 2**30 + 2**20
    rows = torch.empty(2 * step + 128, dtype=spec.dtype).as_strided((3, 1, 128), (step, 128, 1))
    cache = torch.empty(2 * step + 16 * 128, dtype=spec.kv_dtype).as_strided((3, 16, 1, 128), (step, 128, 128, 1))
    for row in range(3):
        rows[row] = torch.randn(1, 128)
    slots, one = torch.tensor([-1, 3, 2 * 16 + 8]), torch.ones(1)
    with emulator.device(arch=arch, sms=1, strict=True):
        api.Writer(spec, lambda: from_arch(arch), "cute")(
            rows[..., :64], rows[..., 64:], cache[..., :64], cache[..., 64:], slots, one, one
        )
    for row, (page, inner) in ((1, (0, 3)), (2, (2, 8))):
        expected = reference.quantize(rows[row], spec.kv_dtype, one)
        assert torch.equal(cache[page, inner].view(torch.uint8), expected.view(torch.uint8)), (page, inner)


@pytest.mark.parametrize(
    ("facts", "launch"),
    [
        ({"heads": 2, "dim": 64, "dim_v": 64}, (8, 1, 256)),
        ({"heads": 8, "dim": 128, "dim_v": 128}, (1, 1, 256)),
        ({"heads": 2, "dim": 128, "dim_v": 128}, (4, 1, 256)),
        ({"heads": 1, "dim": 512, "dim_v": 64}, (3, 1, 224)),
        ({"heads": 32, "dim": 128, "dim_v": 128}, (1, 4, 256)),
        ({"heads": 11, "dim": 96, "dim_v": 96}, (1, 2, 160)),
        ({"heads": 1, "dim": 16, "dim_v": 8}, (85, 1, 256)),
    ],
)
def test_blocks(facts: dict[str, int], launch: tuple[int, int, int]) -> None:
    """Tokens of a block, blocks of a token, threads of a block."""
    kernel = write_kv.WriteRows(write_kv.WriteKey(dtype="bfloat16", kv=KVFormat("bfloat16"), page_size=16, **facts))
    assert (kernel.tokens, kernel.parts, kernel.threads) == launch
    assert kernel.parts * kernel.cta_vectors >= kernel.token_vectors
    assert kernel.threads >= kernel.tokens * kernel.cta_vectors


# Which kernel writes


def shifted(case: WriteCase, by: int) -> tuple[torch.Tensor, ...]:
    """A case's tensors with keys that begin so many elements behind an aligned address."""
    write = build(case, "cpu")
    key = torch.empty(write.key.numel() + by, dtype=case.dtype)[by:].view(write.key.shape).copy_(write.key)
    return key, write.value, write.key_cache, write.value_cache, write.slots


@pytest.mark.skipif(not targets.triton_interpreted(), reason="the tensors lie on the CPU, and TRITON_INTERPRET is off")
def test_tensors_that_lie_badly_are_written_by_the_next_kernel() -> None:
    case = SMALL[0]
    tensors, expected = shifted(case, 1), build(case, "cpu")
    reference.write_kv(expected.key, expected.value, expected.key_cache, expected.value_cache, expected.slots)
    with emulator.device(arch="sm_90a", sms=SMS, strict=True):
        writer = api.Writer(case.spec, lambda: from_arch("sm_90a"))
        writer(*tensors)
        assert torch.equal(tensors[2].view(torch.int16), expected.key_cache.view(torch.int16))
        assert torch.equal(tensors[3].view(torch.int16), expected.value_cache.view(torch.int16))
        aligned = build(case, "cpu")
        writer(aligned.key, aligned.value, aligned.key_cache, aligned.value_cache, aligned.slots)
    assert {type(one).__module__ for one in writer._by_layout.values()} == {
        "dsl_backend.attention.triton.write_kv",
        "dsl_backend.attention.cute.write_kv_host",
    }


def test_tensors_that_lie_badly_are_refused_by_name() -> None:
    case = SMALL[0]
    with emulator.device(arch="sm_90a", sms=SMS, strict=True):
        writer = api.Writer(case.spec, lambda: from_arch("sm_90a"), "cute")
        with pytest.raises(InvalidInput, match="cute: key begins 2 bytes after a multiple of 16 and has strides of"):
            writer(*shifted(case, 1))
        key, _, *others = shifted(case, 0)
        value = torch.zeros(key.shape[0], 2, 68, dtype=case.dtype)[..., :64]
        with pytest.raises(InvalidInput, match=r"value begins at .* has strides of \[272, 136\] bytes"):
            writer(key, value, *others)


def test_a_call_like_an_earlier_one_is_still_checked() -> None:
    """What is remembered is how tensors lie: rows that are too few are refused, however often others were fine."""
    case = SMALL[0]
    write = build(case, "cpu")
    writer = api.Writer(case.spec, targets.cpu_target, "reference")
    caches = (write.key_cache, write.value_cache)
    for _ in range(2):
        writer(write.key, write.value, *caches, write.slots)
    with pytest.raises(InvalidInput, match=r"value has shape \(8, 2, 64\): \(9, 2, 64\) is needed"):
        writer(write.key, write.value[:8], *caches, write.slots)
    with pytest.raises(InvalidInput, match="slot_mapping is int64"):
        writer(write.key, write.value, *caches, torch.cat([write.slots, write.slots])[::2])
    with pytest.raises(InvalidInput, match="key is float16"):
        writer(write.key.half(), write.value, *caches, write.slots)
    with pytest.raises(InvalidInput, match="value_cache has shape"):
        writer(write.key, write.value, write.key_cache, write.value_cache[..., :32], write.slots)
    with pytest.raises(InvalidInput, match="k_scale"):
        writer(write.key, write.value, *caches, write.slots, torch.ones(3))


def test_no_more_layouts_are_remembered_than_a_server_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MOST_LAYOUTS", 3)
    writer = api.Writer(SMALL[0].spec, targets.cpu_target, "reference")
    for pages in range(4, 14):
        write = build(replace(SMALL[0], pages=pages), "cpu")
        writer(write.key, write.value, write.key_cache, write.value_cache, write.slots)
        assert 1 <= len(writer._by_layout) <= 3


@pytest.mark.parametrize("fp8", [False, True])
def test_prepared_is_compiled(fp8: bool) -> None:
    case = WriteCase(heads=3, dim=88, dim_v=88, fp8=fp8)
    write, one = build(case, "cpu"), torch.tensor(1.0)
    with emulator.device(arch="sm_90a", sms=SMS, strict=True):
        writer = api.Writer(case.spec, lambda: from_arch("sm_90a"))
        writer.prepare()
        compiled = len(compiles.events)
        writer(write.key, write.value, write.key_cache, write.value_cache, write.slots, one, one)
        assert len(compiles.events) == compiled


def spec(**facts: object) -> AttentionSpec:
    return replace(SMALL[0].spec, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "arch", "message"),
    [
        ({}, "sm_80", "serves GPUs of sm_90a, sm_100a, sm_103a, this is sm_80"),
        ({}, "sm_120a", "serves GPUs of sm_90a, sm_100a, sm_103a, this is sm_120a"),
        ({"head_dim": 68}, "sm_90a", "keys of 68 elements are not a multiple of 8"),
        ({"head_dim_v": 20}, "sm_90a", "values of 20 elements are not a multiple of 8"),
        ({"dtype": F32, "kv_dtype": F32}, "sm_90a", "dtype float32 is not one of float16, bfloat16"),
        ({"kv_dtype": torch.float16}, "sm_90a", "keys of float16 are"),
        ({"page_size": None}, "sm_90a", "needs paged keys"),
    ],
)
def test_objections(facts: dict[str, object], arch: str, message: str) -> None:
    with pytest.raises(Unsupported) as raised:
        api.Writer(spec(**facts), lambda: from_arch(arch), "cute").prepare()
    assert message in str(raised.value)
