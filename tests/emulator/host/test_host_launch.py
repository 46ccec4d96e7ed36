# SPDX-License-Identifier: Apache-2.0
"""What a launch carries, and launches that a device refuses."""

import pytest
import torch
from host_machines import Recorder

import emulator
from emulator.host import entry
from emulator.host.device import Device
from emulator.host.runtime import Kernel, Module, Request

pytest.importorskip("cutlass")

from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from simple_kernels import Shaped
from tma_kernels import TmaCopy

KIB = 1024


def launched(arch="sm_90a", **asked):
    machine, out = Recorder(), torch.zeros(64)
    with emulator.device(arch=arch, machine=machine):
        Shaped(**asked)(from_dlpack(out))
    return machine.last


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_clusters(arch) -> None:
    launch = launched(arch, grid=(8, 4, 2), cluster=(4, 2, 1), block=(32, 2, 2))
    assert (launch.grid, launch.cluster, launch.block) == ((8, 4, 2), (4, 2, 1), (32, 2, 2))
    assert launch.explicit_cluster
    assert launched(arch, grid=(16, 1, 1), cluster=(16, 1, 1)).cluster == (16, 1, 1)
    assert launched(arch, grid=(4, 1, 1)).cluster == (1, 1, 1)


def test_attributes() -> None:
    assert launched(pdl=True).programmatic
    assert not launched(pdl=False).programmatic
    assert launched(cooperative=True).cooperative
    assert not launched(cooperative=False).cooperative
    assert launched(smem=12345).shared_bytes == 12345
    assert launched(smem=227 * KIB).shared_bytes == 227 * KIB


REFUSED = {
    "does not divide into clusters": {"grid": (4, 1, 1), "cluster": (3, 1, 1)},
    "at most 16 blocks": {"grid": (32, 1, 1), "cluster": (32, 1, 1)},
    "dynamic shared memory; at most": {"smem": 227 * KIB + 1},
    "at most 1024 threads": {"block": (1025, 1, 1)},
    "a grid of": {"grid": (0, 1, 1)},
    "65535": {"grid": (1, 65536, 1)},
    "cooperative grid of 5 blocks on 4 SMs": {"grid": (5, 1, 1), "cooperative": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_launch_that_a_device_refuses(reason) -> None:
    with pytest.raises(emulator.LaunchError, match=reason):
        launched(**REFUSED[reason])


PTX = """
.version 9.3
.target sm_90a
.address_size 64
.shared .align 16 .b8 first[100]; // .shared .b8 not[1000]
.shared .b64 second;
.extern .shared .align 16 .b8 dynamic[];
.visible .entry kernel(
    .param .u32 count,
    .param .align 64 .b8 map[128] /* , */,
    .param .u64 .ptr .global .align 16 data,
    .param .f32 scale
)
.reqntid 128, 1, 1
{ .shared .align 8 .b8 inner[2][8]; ret; }
.entry bare { ret; }
.entry empty () { ret; }
"""


def request(**changes):
    kernel = Kernel(Module("function", PTX), "kernel", max_dynamic_shared=227 * KIB)
    values = {
        "kernel": kernel,
        "grid": (1, 1, 1),
        "block": (32, 1, 1),
        "shared_bytes": 0,
        "stream": 0,
        "attributes": {},
        "arguments": (b"1234", b"m" * 128, b"12345678", b"1234"),
    }
    return Request(**values | changes)


def test_parameters_are_split_as_the_entry_declares_them() -> None:
    machine = Recorder()
    Device("sm_90a", 4, "lazy", 0, machine).launch(request())
    found = [(parameter.name, parameter.align, len(parameter.data)) for parameter in machine.last.parameters]
    assert found == [("count", 4, 4), ("map", 64, 128), ("data", 8, 8), ("scale", 4, 4)]


@pytest.mark.parametrize(("number", "name"), [(1, "access policy"), (7, "programmatic event"), (99, "did not name")])
def test_attributes_that_are_not_emulated_are_refused_by_number(number, name) -> None:
    with pytest.raises(emulator.Unsupported, match=f"attribute {number} .*{name}"):
        Device("sm_90a", 4, "lazy", 0, Recorder()).launch(request(attributes={number: (0,) * 16}))


def test_a_kernel_of_another_arch() -> None:
    with pytest.raises(emulator.HostError, match="compiled for sm_90a, and this device is an sm_100a"):
        Device("sm_100a", 4, "lazy", 0, Recorder()).launch(request())


def test_static_shared_memory_counts() -> None:
    # 100 bytes, 8 at the next multiple of 8, 16 behind them.
    assert entry.static_shared_bytes(PTX) == 104 + 8 + 16
    most = 227 * KIB - 128
    Device("sm_90a", 4, "lazy", 0, Recorder()).launch(request(shared_bytes=most))
    with pytest.raises(emulator.LaunchError, match="128 static"):
        Device("sm_90a", 4, "lazy", 0, Recorder()).launch(request(shared_bytes=most + 1))


def test_entries() -> None:
    found = entry.entries(PTX)
    assert list(found) == ["kernel", "bare", "empty"]
    assert found["bare"] == found["empty"] == ()
    with pytest.raises(emulator.Unsupported, match="cannot read the kernel parameter"):
        entry.entries(".entry wrong(.param .v4 .b8 x)")
    with pytest.raises(emulator.Unsupported, match=r"without a \.target"):
        entry.target("")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_tensor_copies(arch) -> None:
    """Two tensor maps and two tensors' shapes are the parameters of a copy."""
    source, target = torch.zeros(128, 96, dtype=torch.float16), torch.zeros(128, 96, dtype=torch.float16)
    machine = Recorder()
    with emulator.device(arch=arch, machine=machine):
        arguments = (from_dlpack(source, assumed_align=16), from_dlpack(target, assumed_align=16))
        cute.compile(TmaCopy(cluster=(2, 1, 1), pdl=True), *arguments)(*arguments)
    launch = machine.last
    assert (launch.grid, launch.cluster, launch.programmatic) == ((2, 3, 1), (2, 1, 1), True)
    # The tile of 64 by 32 and a barrier.
    assert launch.shared_bytes == 64 * 32 * 2 + 8
    maps = list(launch.tensor_maps.values())
    assert [found.address for found in maps] == [source.data_ptr(), target.data_ptr()]
    assert {(found.dims, found.strides, found.box) for found in maps} == {((96, 128), (192,), (32, 64))}
    assert [found.span_bytes for found in maps] == [region.bytes for region in launch.regions]
