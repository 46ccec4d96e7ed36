# SPDX-License-Identifier: Apache-2.0
"""Targets: names, capabilities, and what is refused."""

import re

import pytest
import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import registry, target
from dsl_backend.runtime.target import Target, cpu_target, detect, from_arch, of_capability

CAPABILITIES = ("wgmma", "tcgen05", "tma", "native_fp8", "native_bf16")


@pytest.mark.parametrize(
    ("arch", "capabilities"),
    [
        ("cpu", set()),
        ("sm_75", set()),
        ("sm_80", {"native_bf16"}),
        ("sm_86", {"native_bf16"}),
        ("sm_89", {"native_bf16", "native_fp8"}),
        ("sm_90a", {"native_bf16", "native_fp8", "tma", "wgmma"}),
        ("sm_100a", {"native_bf16", "native_fp8", "tma", "tcgen05"}),
        ("sm_103a", {"native_bf16", "native_fp8", "tma", "tcgen05"}),
        ("sm_110a", {"native_bf16", "native_fp8", "tma", "tcgen05"}),
        ("sm_120a", {"native_bf16", "native_fp8", "tma"}),
    ],
)
def test_capabilities(arch: str, capabilities: set[str]) -> None:
    chip = from_arch(arch)
    assert {name for name in CAPABILITIES if getattr(chip, name)} == capabilities
    assert chip.arch == arch, "the name of a target names it"
    assert chip.is_cpu == (arch == "cpu")


@pytest.mark.parametrize("name", ["sm_90", "sm_90a", "sm90", "sm90a", "sm_90f"])
def test_spellings(name: str) -> None:
    assert from_arch(name) == from_arch("sm_90a")


@pytest.mark.parametrize(
    "name", ["", "hopper", "sm_", "sm_9", "90", "sm_90x", "SM_90", "sm_90a ", "compute_90", "cuda"]
)
def test_other_names_are_refused(name: str) -> None:
    message = f"arch {name!r} is not a CUDA architecture: use a name such as sm_80, sm_90a, or cpu"
    with pytest.raises(InvalidInput, match=re.escape(message)):
        from_arch(name)


@pytest.mark.parametrize("name", ["sm_999", "sm_130a", "sm_91"])
def test_unknown_chips_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"arch '{name}' is not known: use cpu or one of sm_70, .*sm_90a, .*sm_121a"):
        from_arch(name)


def test_facts_of_chips() -> None:
    assert from_arch("sm_90a").smem_bytes == 227 * 1024
    assert from_arch("sm_120a").smem_bytes == 99 * 1024, "the small Blackwell has the small shared memory"
    assert from_arch("sm_90a").sm_count == 132


def test_unknown_chips_get_the_least() -> None:
    chip = of_capability((13, 0))
    assert chip.capability == (13, 0)
    assert (chip.smem_bytes, chip.sm_count) == (registry.UNKNOWN_SMEM_BYTES, registry.UNKNOWN_SM_COUNT)
    newer = [arch.smem_bytes for arch in registry.ARCHS if arch.capability >= (8, 0)]
    assert min(newer) >= registry.UNKNOWN_SMEM_BYTES
    assert {name for name in CAPABILITIES if getattr(chip, name)} == {"native_bf16", "native_fp8", "tma"}
    assert chip.arch == "sm_130a"
    assert chip.kernel_arch is None, "kernels of another SM do not serve it"


@pytest.mark.parametrize(
    ("value", "interpreted"),
    [(None, False), ("0", False), ("", False), ("false", False), ("1", True), ("true", True), ("ON", True)],
)
def test_interpreter(monkeypatch: pytest.MonkeyPatch, value: str | None, interpreted: bool) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert cpu_target().interpreted is interpreted
    assert from_arch("cpu").interpreted is interpreted
    assert not from_arch("sm_90a").interpreted, "a GPU is never interpreted"


def test_interpreter_as_triton_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two must agree, or dispatch would choose kernels that do not run."""
    knobs = pytest.importorskip("triton").knobs
    for value in ("1", "true", "0", "false", "on", "no"):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert target.triton_interpreted() == knobs.runtime.interpret, value


def test_detect_cpu() -> None:
    chip = detect(torch.device("cpu"))
    assert chip.is_cpu
    assert (chip.sm_count, chip.smem_bytes) == (0, 0)


def test_detect_without_a_device() -> None:
    assert detect().is_cpu == (not torch.cuda.is_available())


def test_detect_refuses_other_devices() -> None:
    with pytest.raises(InvalidInput, match="device meta is not supported: use a CUDA device or the CPU"):
        detect(torch.device("meta"))


@pytest.mark.gpu
def test_detect_cuda() -> None:
    chip = detect(torch.device("cuda"))
    properties = torch.cuda.get_device_properties(0)
    assert chip.capability == torch.cuda.get_device_capability()
    assert chip.sm_count == properties.multi_processor_count
    assert chip == detect(torch.device("cuda", torch.cuda.current_device()))
    if chip.capability in registry.BY_CAPABILITY:
        assert chip.smem_bytes == registry.BY_CAPABILITY[chip.capability].smem_bytes, (
            "the table says what the device says"
        )


def test_targets_are_values() -> None:
    """They are part of cache keys: equal targets are one target."""
    assert from_arch("sm_80") == Target(capability=(8, 0), sm_count=108, smem_bytes=163 * 1024)
    assert len({from_arch("sm_80"), from_arch("sm_80"), from_arch("sm_86")}) == 2
