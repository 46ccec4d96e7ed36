# SPDX-License-Identifier: Apache-2.0
"""What host code asks of CUDA beside launches: tensor maps, and that it does not go on after a failure."""

import ctypes
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from host_machines import Recorder

import emulator
from emulator.host.device import Device
from emulator.host.dsl import PREFIX
from emulator.host.runtime import runtime
from emulator.host.tensor_map import DATA_TYPES, SWIZZLES, Codes, Element, Promotion, TensorMap, decode, encode, tiled

BF16, NO_SWIZZLE, SWIZZLE_128, PROMOTE_256 = 9, 0, 3, 3


@dataclass
class Call:
    """Arguments of cuTensorMapEncodeTiled, those of a map of bfloat16 [3, 200, 128] to begin with."""

    address: int = 0x7F0012345670
    dims: tuple[int, ...] = (128, 200, 3)
    strides: tuple[int, ...] = (256, 256 * 200 + (5 << 32))
    box: tuple[int, ...] = (64, 256, 1)
    element_strides: tuple[int, ...] = (1, 2, 1)
    codes: Codes = field(default_factory=lambda: Codes(BF16, 0, SWIZZLE_128, PROMOTE_256, 0))

    def through_host_code(self) -> bytes:
        """What the library that compiled host code is linked with makes of it; raises what the call would."""
        library = runtime()
        map_bytes = (ctypes.c_ubyte * 128)()
        words64 = [np.array(values, np.uint64) for values in (self.dims, self.strides)]
        words32 = [np.array(values, np.uint32) for values in (self.box, self.element_strides)]
        arrays = [ctypes.c_void_p(values.ctypes.data) for values in (*words64, *words32)]
        function = getattr(ctypes.CDLL(str(library.path)), f"{PREFIX}_cuTensorMapEncodeTiled")
        type, interleave, swizzle, promotion, fill = self.codes
        with emulator.device("sm_90a", machine=Recorder()):
            base = ctypes.c_void_p(self.address)
            # What a call outside of a device may have left.
            library.pending = None
            error = function(map_bytes, type, len(self.dims), base, *arrays, interleave, swizzle, promotion, fill)
            pending, library.pending = library.pending, None
        assert bool(error) == (pending is not None)
        if pending is not None:
            raise pending
        return bytes(map_bytes)

    def changed(self, **values) -> "Call":
        return Call(**vars(self) | values)


def test_a_tensor_map_that_host_code_asks_for() -> None:
    call = Call()
    assert decode(call.through_host_code()) == TensorMap(
        call.address, call.dims, call.strides, call.box, call.element_strides, Element.BF16, tf32=False, swizzle=128,
        promotion=Promotion.B256,
    )  # fmt: skip


@pytest.mark.parametrize("type", DATA_TYPES)
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_types_and_swizzles_come_back(type, swizzle) -> None:
    element, tf32 = DATA_TYPES[type]
    wide = (32 if swizzle == 1 else 64) * 8 // element.shared_bits
    made = tiled(1 << 20, (256, 7), (512,), (wide, 3), (1, 1), Codes(type, 0, swizzle, 0, 0))
    assert (made.element, made.tf32, (made.swizzle, made.atom)) == (element, tf32, SWIZZLES[swizzle])
    assert decode(encode(made)) == made


REFUSED = {
    "address 0x7f0012345678; a multiple of 16": {"address": 0x7F0012345678},
    "strides .*; multiples of 16 below": {"strides": (256, 1000)},
    "strides .* below 2": {"strides": (256, 1 << 40)},
    "a box of .*; 1 to 256": {"box": (64, 257, 1)},
    "a box of 256 bytes .*; at most 128 are swizzled": {"box": (128, 8, 1)},
    "a box of 24 bytes .*; a multiple of 16": {"box": (12, 8, 1)},
    "strides of elements .*; 1 to 8": {"element_strides": (1, 9, 1)},
    "dimensions .*; 1 to": {"dims": (128, 0, 3)},
    "CUtensorMapDataType 3": {"codes": Codes(3, 0, SWIZZLE_128, 0, 0)},
    "CUtensorMapInterleave 1": {"codes": Codes(BF16, 1, NO_SWIZZLE, 0, 0)},
    "CUtensorMapFloatOOBfill 1": {"codes": Codes(BF16, 0, NO_SWIZZLE, 0, 1)},
    "CUtensorMapSwizzle 6": {"codes": Codes(BF16, 0, 6, 0, 0)},
    "of rank 6": {"dims": (128, 2, 2, 2, 2, 2)},
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_tensor_map_that_cuda_would_refuse(words) -> None:
    with pytest.raises(emulator.EmulatorError, match=words):
        Call().changed(**REFUSED[words]).through_host_code()


class Asserting:
    """Host code that asserts the success of a call with some result, and then launches."""

    def __init__(self, arch: str) -> None:
        from cutlass import Int32, cute
        from simple_kernels import Affine

        succeed = cute.ffi(name="cuda_dialect_assert_success", params_types=[Int32])
        affine = Affine()

        @cute.jit
        def host(x: cute.Tensor, y: cute.Tensor, error: Int32):
            succeed(error)
            affine(x, y)

        self.host = host


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_host_code_that_asserts_success(arch) -> None:
    pytest.importorskip("cutlass")
    from cutlass import Int32, cute
    from cutlass.cute.runtime import from_dlpack

    x, machine = torch.zeros(128), Recorder()
    with emulator.device(arch, machine=machine):
        views = from_dlpack(x), from_dlpack(x)
        compiled = cute.compile(Asserting(arch).host, *views, Int32(0))
        compiled(*views, Int32(0))
        assert len(machine.launches) == 1
        # CUDA's ends the process there: nothing may run.
        with pytest.raises(emulator.HostError, match="CUDA's error 719"):
            compiled(*views, Int32(719))
        assert len(machine.launches) == 1
        compiled(*views, Int32(0))
        assert len(machine.launches) == 2


PREFERRED = {4: (2, 1, 1), 11: (4, 2, 1)}


@pytest.mark.parametrize(
    ("schedule", "sms", "cluster"),
    [("lazy", 8, (4, 2, 1)), ("lazy", 4, (2, 1, 1)), ("eager", 8, (2, 1, 1)), ("random", 8, (2, 1, 1))],
)
def test_preferred_clusters(schedule, sms, cluster) -> None:
    machine = Recorder()
    device = Device("sm_90a", sms, schedule, 0, machine)
    device.launch(asked(PREFERRED))
    assert machine.last.cluster == cluster
    assert machine.last.explicit_cluster
    device.launch(asked(PREFERRED))
    assert machine.last.cluster == ((4, 2, 1) if schedule == "random" else cluster)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({4: (2, 1, 1), 11: (3, 1, 1)}, "not made of clusters of"),
        ({4: (1, 1, 1), 11: (3, 1, 1)}, "do not divide the grid"),
        ({4: (2, 1, 1), 11: (16, 1, 1)}, "none of them fits the grid"),
        ({4: (2, 1, 1), 11: (2, 1, 2)}, "their depth is not that"),
        ({4: (2, 1, 1), 11: (0, 1, 1)}, "none of them fits the grid"),
    ],
)
def test_preferred_clusters_that_cuda_would_refuse(attributes, words) -> None:
    with pytest.raises(emulator.LaunchError, match=words):
        Device("sm_90a", 64, "lazy", 0, Recorder()).launch(asked(attributes))


def asked(attributes):
    """A launch of 8 x 2 x 2 blocks with these attributes."""
    from test_host_launch import request

    return request(grid=(8, 2, 2), attributes=attributes)
