# SPDX-License-Identifier: Apache-2.0
"""The table of architectures: it is whole, and kernels of one SM never serve another by default."""

from pathlib import Path

import pytest
import torch

import dsl_backend
from dsl_backend.errors import InvalidInput
from dsl_backend.gemm import configs
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime import registry
from dsl_backend.runtime.target import from_arch

PACKAGE = Path(dsl_backend.__file__).parent


def test_names_follow_from_capabilities() -> None:
    assert [arch.name for arch in registry.ARCHS] == [registry.name_of(arch.capability) for arch in registry.ARCHS]
    capabilities = [arch.capability for arch in registry.ARCHS]
    assert capabilities == sorted(set(capabilities)), "the features of an unknown GPU are those of the one below it"


@pytest.mark.parametrize("kernel_arch", registry.KERNEL_ARCHS)
def test_kernels_have_their_folders(kernel_arch: str) -> None:
    for room in ("attention/cute", "gemm"):
        assert (PACKAGE / room / kernel_arch / "__init__.py").is_file()


def test_folders_of_kernels_are_registered() -> None:
    found = {path.name for path in PACKAGE.rglob("sm*") if path.is_dir()}
    assert found == set(registry.KERNEL_ARCHS)


def test_an_emulated_device_has_kernels() -> None:
    assert set(registry.EMULATED) <= {arch.name for arch in registry.with_kernels()}


def test_with_kernels() -> None:
    assert [arch.name for arch in registry.with_kernels("sm100")] == ["sm_100a", "sm_103a"]
    assert [arch.name for arch in registry.with_kernels()] == ["sm_90a", "sm_100a", "sm_103a"]


@pytest.mark.parametrize("arch", ["sm_110a", "sm_120a", "sm_80", "cpu"])
def test_kernels_of_another_sm_are_never_chosen(arch: str) -> None:
    """Neither Hopper's tiles for SM120, nor SM100's for SM110, which has the same matrix instructions."""
    target = from_arch(arch)
    assert target.kernel_arch is None
    with pytest.raises(InvalidInput, match=f"serves GPUs of sm_90a, sm_100a, sm_103a, this is {arch}"):
        target.by_kernel_arch({"sm90": 1, "sm100": 2})
    spec = LinearSpec(n=4096, k=4096, dtypes=Dtypes.of(torch.bfloat16))
    with pytest.raises(InvalidInput, match=f"this is {arch}"):
        configs.candidates(spec, target)


def test_a_choice_that_is_missing_is_named() -> None:
    with pytest.raises(InvalidInput, match="serves GPUs of sm_90a, this is sm_100a"):
        from_arch("sm_100a").by_kernel_arch({"sm90": 1})
    assert from_arch("sm_103a").by_kernel_arch({"sm90": 1, "sm100": 2}) == 2


def test_a_note_follows_the_name() -> None:
    assert from_arch("sm_110a").arch_objections("sm100") == [
        "serves GPUs of sm_100a, sm_103a, this is sm_110a, for which CuTe DSL 4.6.0 with CUDA 12 generates no code"
    ]
    assert from_arch("sm_100a").arch_objections("sm90", "sm100") == []
