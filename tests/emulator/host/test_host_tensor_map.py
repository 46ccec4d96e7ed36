# SPDX-License-Identifier: Apache-2.0
"""The probe: tensor maps that the DSL's host code builds say what the kernel asked for."""

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from host_machines import Recorder

import emulator
from emulator.host.tensor_map import Element, Promotion, TensorMap, decode

pytest.importorskip("cutlass")

import cutlass
from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from tma_kernels import ATOMS_OF_32, TensorMaps

ARCHES = ("sm_90a", "sm_100a")
# Address 0x7f0012345670, 3 dimensions, bf16, 64-byte swizzle.
EXAMPLE = struct.pack(
    "<QI4II5IHB5B4x64x",
    0x7F0012345670,
    2 | 2 << 4 | 10 << 7 | 2 << 13 | 2 << 17,
    *(0x40, 0x80000000, 0, 0),
    0x10,
    *(99, 199, 2, 0, 0),
    *(0, 0),
    *(31, 63, 0, 0, 0),
)


def maps_of(arch, tensor, *forms, element_type=None, internal=None) -> list[TensorMap]:
    """The tensor maps of (tile, swizzle) forms of a tensor."""
    machine = Recorder()
    with emulator.device(arch=arch, machine=machine):
        view = from_dlpack(tensor, assumed_align=16)
        if element_type is not None:
            view.element_type = element_type
        cute.compile(TensorMaps(forms, internal), view)(view)
    launch = machine.last
    assert len(launch.parameters) == len(forms)
    found = [launch.tensor_map(index) for index in range(len(forms))]
    assert launch.tensor_maps == dict(enumerate(found))
    return found


@pytest.mark.parametrize("arch", ARCHES)
def test_boxes_and_swizzles(arch) -> None:
    tensor = torch.zeros(256, 512, dtype=torch.float16)
    forms = [((64, 32), 0), ((128, 64), 128), ((256, 64), 128), ((8, 32), 64), ((16, 16), 32), ((1, 8), 0), ((3, 8), 0)]
    for (tile, swizzle), found in zip(forms, maps_of(arch, tensor, *forms), strict=True):
        assert found == TensorMap(
            address=tensor.data_ptr(),
            dims=(512, 256),
            strides=(1024,),
            box=tile[::-1],
            element_strides=(1, 1),
            element=Element.F16,
            tf32=False,
            swizzle=swizzle,
            promotion=Promotion.B128,
        )
        assert found.box_bytes == tile[0] * tile[1] * 2
        assert found.span_bytes == tensor.nbytes


SHAPES = {
    1: ((1024,), (256,)),
    2: ((77, 96), (64, 32)),
    3: ((5, 77, 96), (1, 64, 32)),
    4: ((3, 5, 77, 96), (1, 2, 64, 32)),
    5: ((2, 3, 5, 77, 96), (1, 2, 3, 4, 8)),
}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("rank", SHAPES)
def test_ranks(rank, arch) -> None:
    shape, tile = SHAPES[rank]
    tensor = torch.zeros(shape)
    (found,) = maps_of(arch, tensor, (tile, 0))
    assert (found.rank, found.dims, found.box) == (rank, shape[::-1], tile[::-1])
    assert found.strides == tuple(4 * step for step in tensor.stride()[-2::-1])
    assert found.element_strides == (1,) * rank
    assert found.span_bytes == tensor.nbytes


@pytest.mark.parametrize("row_bytes", [512, 1 << 20, (1 << 33) + 16, (1 << 38) + (1 << 35) + (1 << 31) + 48])
def test_strides(row_bytes) -> None:
    """Strides have 36 bits above the lowest four, in two places; numpy makes tensors larger than memory."""
    tensor = np.lib.stride_tricks.as_strided(
        np.zeros(128, dtype=np.float32), (3, 2, 128), (2 * row_bytes, row_bytes, 4)
    )
    (found,) = maps_of("sm_90a", tensor, ((1, 2, 32), 0))
    assert found.strides == (row_bytes, 2 * row_bytes)
    assert found.dims == (128, 2, 3)


def test_a_broadcast_dimension_has_stride_zero() -> None:
    (found,) = maps_of("sm_100a", torch.zeros(1, 256).expand(128, 256), ((64, 32), 0))
    assert (found.dims, found.strides) == ((256, 128), (0,))


def test_dimensions_of_one_element_a_box_come_last() -> None:
    tensor = torch.zeros(3, 5, 77, 96)
    (found,) = maps_of("sm_90a", tensor, ((3, 1, 64, 32), 0))
    assert (found.dims, found.box) == ((96, 77, 3, 5), (32, 64, 3, 1))
    assert found.strides == (4 * 96, 4 * 96 * 77 * 5, 4 * 96 * 77)


def test_dimensions_in_another_order() -> None:
    tensor = torch.zeros(6, 128, 64, dtype=torch.bfloat16).permute(1, 2, 0)
    (found,) = maps_of("sm_100a", tensor, ((64, 32, 1), 0))
    assert (found.dims, found.strides, found.box) == ((64, 128, 6), (128, 128 * 128), (32, 64, 1))


TYPES = (
    (torch.uint8, None, Element.U8),
    (torch.int8, None, Element.U8),
    (torch.bool, None, Element.U8),
    (torch.uint8, cutlass.Float8E4M3FN, Element.U8),
    (torch.uint8, cutlass.Float8E5M2, Element.U8),
    (torch.uint8, cutlass.Float8E8M0FNU, Element.U8),
    (torch.float8_e4m3fn, None, Element.U8),
    (torch.int16, None, Element.U16),
    (torch.uint16, None, Element.U16),
    (torch.int32, None, Element.U32),
    (torch.uint32, None, Element.U32),
    (torch.int64, None, Element.U64),
    (torch.uint64, None, Element.U64),
    (torch.float16, None, Element.F16),
    (torch.bfloat16, None, Element.BF16),
    (torch.float32, None, Element.F32),
    (torch.float64, None, Element.F64),
)


@pytest.mark.parametrize(("dtype", "element_type", "element"), TYPES)
def test_types(dtype, element_type, element) -> None:
    tensor = torch.zeros(128, 256, dtype=dtype)
    (found,) = maps_of("sm_100a", tensor, ((64, 32), 0), element_type=element_type)
    assert (found.element, found.tf32) == (element, False)
    assert found.element.bits == found.element.shared_bits == 8 * tensor.element_size()
    assert found.strides == (256 * tensor.element_size(),)
    assert found.box_bytes == 64 * 32 * tensor.element_size()


def test_types_that_are_narrower_than_a_byte() -> None:
    storage = torch.zeros(128, 256, dtype=torch.uint8)
    form = ((64, 128), 0)
    (packed,) = maps_of("sm_100a", storage, form, element_type=cutlass.Float4E2M1FN)
    (spread,) = maps_of("sm_100a", storage, form, element_type=cutlass.Float4E2M1FN, internal=cutlass.Uint8)
    (six,) = maps_of("sm_100a", storage, form, element_type=cutlass.Float6E3M2FN)
    assert (packed.element, packed.strides, packed.box_bytes) == (Element.U4, (128,), 64 * 128 // 2)
    assert (spread.element, spread.strides, spread.box_bytes) == (Element.U4_UNPACKED, (128,), 64 * 128)
    assert (six.element, six.strides, six.box_bytes) == (Element.U6_UNPACKED, (192,), 64 * 128)
    assert packed.span_bytes == spread.span_bytes == 128 * 128


def test_tf32() -> None:
    tensor = torch.zeros(128, 256)
    (asked,) = maps_of("sm_90a", tensor, ((64, 32), 0), internal=cutlass.TFloat32)
    (typed,) = maps_of("sm_90a", tensor, ((64, 32), 0), element_type=cutlass.TFloat32)
    assert asked == typed == replace(maps_of("sm_90a", tensor, ((64, 32), 0))[0], tf32=True)


def test_32_byte_atoms() -> None:
    """What M- and N-major operands of tf32 are loaded with."""
    (found,) = maps_of("sm_100a", torch.zeros(128, 256), ((64, 32), ATOMS_OF_32), internal=cutlass.TFloat32)
    assert (found.swizzle, found.atom, found.tf32) == (128, 32, True)


def test_example() -> None:
    assert decode(EXAMPLE) == TensorMap(
        address=0x7F0012345670,
        dims=(100, 200, 3),
        strides=(0x400, 0x1800000000),
        box=(32, 64, 1),
        element_strides=(1, 1, 1),
        element=Element.BF16,
        tf32=False,
        swizzle=64,
        promotion=Promotion.B128,
    )


# Which of two numbers says that a map is tiled, and whether the tensor is large.
SAME_MEANING = (8 * 8 + 1, 8 * 8 + 21)


def test_every_bit_is_read_or_refused() -> None:
    """None of the written bits may be overlooked, except for the one that says that a tensor is large."""
    plain = decode(EXAMPLE)
    for bit in range(64 * 8):
        changed = bytearray(EXAMPLE)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = decode(bytes(changed))
        except emulator.Unsupported:
            continue
        assert (found != plain) == (bit not in SAME_MEANING), bit


@pytest.mark.parametrize(
    ("bit", "words"),
    [
        (8 * 8 + 11, "flags"),
        (8 * 8 + 12, "flags"),
        (8 * 8 + 19, "32-byte atoms with a swizzle of 64 bytes"),
        (8 * 8 + 20, "flags"),
        (8 * 8, "kind"),
        (8 * 8 + 16, "tf32 of BF16"),
    ],
)
def test_what_was_never_seen_is_refused(bit, words) -> None:
    changed = bytearray(EXAMPLE)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(emulator.Unsupported, match=words):
        decode(bytes(changed))


def test_what_is_behind_the_descriptor_does_not_matter() -> None:
    assert decode(EXAMPLE[:64] + b"\xa5" * 64) == decode(EXAMPLE)
    with pytest.raises(emulator.Unsupported, match="128 bytes"):
        decode(EXAMPLE[:64])
