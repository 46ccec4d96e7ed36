# SPDX-License-Identifier: Apache-2.0
"""From torch tensors to the kernels of experts in MXFP4 under bfloat16: keys, compiled functions, launches."""

from typing import Any

from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.experts.cute import host
from dsl_backend.experts.cute.binding import binding
from dsl_backend.experts.cute.key import ExpertsKey
from dsl_backend.experts.cute.layer import DecodeLayer, ExpertsLayer
from dsl_backend.experts.cute.sm90.weight_only_decode import WeightOnlyDecodeGemm
from dsl_backend.experts.cute.sm90.weight_only_grouped import WeightOnlyGroupedGemm
from dsl_backend.experts.cute.sm100.weight_only_decode import WeightOnlyDecodeGemm as DecodeGemmSm100
from dsl_backend.experts.cute.sm100.weight_only_grouped import WeightOnlyGroupedGemm as GroupedGemmSm100
from dsl_backend.experts.weight_only_configs import choose
from dsl_backend.experts.weight_only_sm100_configs import UnpackedSmallMConfig, UnpackedTiles
from dsl_backend.gemm.host import ALIGNMENT
from dsl_backend.quant.mxfp4_tiles import TILES
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target

key_of, run = host.key_of, host.run


def fake_tiles(experts: int) -> Any:
    """A fake stack of matrices of packed tiles."""
    shape = (experts, cute.sym_int(), cute.sym_int(), TILES.tile_words)
    strides = (*(cute.sym_int64(divisibility=TILES.tile_words) for _ in range(2)), TILES.tile_words, 1)
    return make_fake_tensor(Int32, shape, strides, assumed_align=ALIGNMENT)


def layer_of(key: ExpertsKey) -> Any:
    """The function of x and the arguments of a launch."""
    if isinstance(key.first, UnpackedSmallMConfig):
        return DecodeLayer(key, DecodeGemmSm100)
    if key.decodes:
        return DecodeLayer(key, WeightOnlyDecodeGemm)
    if isinstance(key.first, UnpackedTiles):
        return ExpertsLayer(key, GroupedGemmSm100)
    return ExpertsLayer(key, WeightOnlyGroupedGemm)


def build(key: ExpertsKey, target: Target) -> Function:
    """The compiled function of x and `ExpertsArgs` or `DecodeArgs`; it launches on torch's current stream."""
    args = host.fake_args(key, w13=fake_tiles(key.num_experts), w2=fake_tiles(key.num_experts))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return compile_kernel(layer_of(key), (args.operands.x, args, stream), key=key, target=target)


bind = binding(choose, key_of, build, run)
