# SPDX-License-Identifier: Apache-2.0
"""cuDNN's attention with e4m3 products, through the Python API of its frontend: torch passes no fp8 to it."""

from typing import Any

import torch
from dsl_backend.providers import Launch

from .inputs import Inputs, tokens_of
from .problems import Problem
from .vllm_dense import queries

# Of P, at most 1, and of outputs, which are e4m3 on Hopper: normal values stay below 448 / OUT_SCALE.
P_SCALE, OUT_SCALE = 256.0, 64.0
# The frontend's names of what `sdpa_fp8` multiplies by.
SCALES = {
    **dict.fromkeys(("descale_q", "descale_k", "descale_v"), 1.0),
    "descale_s": 1 / P_SCALE,
    "scale_s": P_SCALE,
    "scale_o": OUT_SCALE,
}


def side_by_side(problem: Problem, inputs: Inputs, rows: torch.Tensor) -> torch.Tensor:
    """Keys or values of requests of one length, [requests, heads, tokens, dim] with a token's heads together."""
    stored = rows.view(torch.uint8) if problem.is_fp8_kv else rows
    taken = [tokens_of(problem, inputs, stored, request) for request in range(problem.requests)]
    return torch.stack(taken).view(rows.dtype).transpose(1, 2)


def launch(problem: Problem, inputs: Inputs) -> Launch:
    """`sdpa_fp8`, causal; keys and values are copied to its layout before the timing, as queries are quantised."""
    import cudnn

    device = inputs.one.device
    quantised = [
        q.view(problem.requests, -1, problem.heads_q, problem.head_dim).transpose(1, 2)
        for q in queries(problem, inputs)
    ]
    operands = [
        (q, side_by_side(problem, inputs, layer.keys), side_by_side(problem, inputs, layer.values))
        for q, layer in zip(quantised, inputs.layers, strict=True)
    ]
    scales = {name: torch.full((1, 1, 1, 1), value, device=device) for name, value in SCALES.items()}
    q, _, v = operands[0]
    shape = (problem.requests, q.shape[2], problem.heads_q, v.shape[3])
    out = torch.empty(shape, dtype=problem.kv_dtype, device=device).transpose(1, 2)

    handle = cudnn.create_handle()
    wide: dict[str, Any] = dict.fromkeys(("intermediate_data_type", "compute_data_type"), cudnn.data_type.FLOAT)
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FP8_E4M3, handle=handle, **wide)
    named = dict(zip("qkv", (graph.tensor_like(one) for one in operands[0]), strict=True))
    named_scales = {name: graph.tensor_like(one) for name, one in scales.items()}
    stored, _, *largest = graph.sdpa_fp8(
        **named, **named_scales, attn_scale=problem.scale, use_causal_mask=True, generate_stats=False, name="attention"
    )
    stored.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    for one in largest:
        one.set_output(False).set_dim([1] * 4).set_stride([1] * 4).set_data_type(cudnn.data_type.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
    of_scales = {named_scales[name]: one for name, one in scales.items()}
    packs = [{**dict(zip(named.values(), layer, strict=True)), **of_scales, stored: out} for layer in operands]

    def run(index: int) -> torch.Tensor:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph.execute(packs[index], workspace, handle=handle)
        return out

    return Launch(run, lambda result: (result.float() / OUT_SCALE).to(problem.dtype).transpose(1, 2).flatten(0, 1))
