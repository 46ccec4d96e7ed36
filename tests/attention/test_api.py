# SPDX-License-Identifier: Apache-2.0
"""The door: what does not fit is refused with words that name the value and what would be accepted."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from dsl_backend.attention import api, dispatch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.reference import ReferenceKernel
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality, HostLengths
from dsl_backend.errors import InvalidInput, Unsupported, by_reason
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target, cpu_target, from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check
from dsl_backend.testing.cases import BF16, FP8, FP16, FULL, Case, mla
from dsl_backend.testing.inputs import Layout, Problem, Surroundings

CASE = Case(q_lens=(1, 3), kv_lens=(20, 3))
PACKED = Case(q_lens=(1, 3), kv_lens=(20, 3), page=None)
LATENT = mla(4, (576, 512), q_lens=(1, 2), kv_lens=(9, 17))
CUTE = "triton" if toolkit.missing() else "cute"
CPU = Target(capability=None, sm_count=0, smem_bytes=0)
INTERPRETED = Target(capability=None, sm_count=0, smem_bytes=0, interpreted=True)


def spec(**facts: Any) -> AttentionSpec:
    return dataclasses.replace(CASE.spec, **facts)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"heads_kv": 0}, "heads_kv is 0: an integer from 1 to 2**31 - 1 is needed"),
        ({"heads_q": 5}, "heads_q is 5: a multiple of heads_kv, 2, is needed"),
        ({"heads_q": 0}, "heads_q is 0: an integer from 1"),
        ({"heads_q": True, "heads_kv": 1}, "heads_q is True: an integer from 1"),
        ({"heads_q": 4.0}, "heads_q is 4.0: an integer from 1"),
        ({"head_dim": 0}, "head_dim is 0: an integer from 1"),
        ({"head_dim": "64"}, "head_dim is '64': an integer from 1"),
        ({"head_dim_v": -1}, "head_dim_v is -1: an integer from 1"),
        ({"page_size": 0}, "page_size is 0: an integer from 1"),
        ({"page_size": 16.0}, "page_size is 16.0: an integer from 1"),
        ({"scale": math.inf}, "scale is inf: a finite number is needed"),
        ({"scale": math.nan}, "scale is nan: a finite number is needed"),
        ({"scale": None}, "scale is None: a finite number is needed"),
        ({"scale": "0.1"}, "scale is '0.1': a finite number is needed"),
        ({"scale": True}, "scale is True: a finite number is needed"),
        ({"scale": 10**400}, "scale is an int: a finite number is needed"),
        ({"softcap": -1.0}, "softcap is -1.0: a finite number of at least 0 is needed"),
        ({"softcap": math.inf}, "softcap is inf: a finite number of at least 0 is needed"),
        ({"softcap": None}, "softcap is None: a finite number of at least 0 is needed"),
        ({"softcap": 1e5}, "softcap is 100000: at most 1024, or 0 for scores without one, is possible"),
        ({"window_left": -1}, "window_left is -1: an integer from 0"),
        ({"window_left": 1.5}, "window_left is 1.5: an integer from 0"),
        ({"window_left": True}, "window_left is True: an integer from 0"),
        ({"window_left": 2**31}, "window_left is 2147483648: an integer from 0 to 2**31 - 1 is needed"),
        ({"window_right": -2}, "window_right is -2: an integer from 0"),
        ({"window_right": torch.zeros(1, device="meta")}, "window_right is a Tensor: an integer from 0"),
        ({"causality": "causal"}, "causality is 'causal': one of Causality.FULL, Causality.CAUSAL"),
        ({"causality": None}, "causality is None: one of Causality.FULL"),
        ({"causality": True}, "causality is True: one of Causality.FULL"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16': a torch.dtype is needed"),
        ({"kv_dtype": None}, "kv_dtype is None: a torch.dtype is needed"),
        ({"dtype": torch.complex64}, "dtype is complex64: a floating-point dtype is needed"),
        ({"kv_dtype": torch.int8}, "kv_dtype is int8: a floating-point dtype is needed"),
        ({"sinks": 1}, "sinks is 1: True or False is needed"),
        ({"alibi": "no"}, "alibi is 'no': True or False is needed"),
        ({"batch_invariant": None}, "batch_invariant is None: True or False is needed"),
        ({"mla": True}, "absorbed MLA has one key head"),
        ({"mla": True, "heads_kv": 1, "head_dim_v": 65}, "head_dim_v <= head_dim, not self.heads_kv=1"),
    ],
)
def test_spec_refuses(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        spec(**facts)


def test_spec_in_words() -> None:
    text = str(spec(window_left=3, softcap=5.0, sinks=True, kv_dtype=FP8))
    assert text == "4/2 heads of 64, bfloat16, float8_e4m3fn keys, page 16, causal window(3, None) softcap 5.0 sinks"
    assert str(LATENT.spec) == "4/1 heads of (576, 512), bfloat16, page 16, causal mla"
    assert "packed" in str(PACKED.spec)


def change(**tensors: Any) -> Callable[[Batch], Batch]:
    return lambda batch: dataclasses.replace(batch, **tensors)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("case", "broken", "message"),
    [
        (CASE, change(query_start_loc=ints(2)), r"query_start_loc has shape (2,): (3,) is needed for 2 requests"),
        (CASE, change(query_start_loc=ints(3).long()), "query_start_loc is int64: int32 is needed"),
        (CASE, change(query_start_loc=ints(6)[::2]), "query_start_loc is not contiguous"),
        (CASE, change(query_start_loc=ints(3).to("meta")), "query_start_loc is on meta, seq_lens on cpu"),
        (CASE, change(seq_lens=ints(2).long()), "seq_lens is int64: int32 is needed"),
        (CASE, change(seq_lens=ints(4)[::2]), "seq_lens is not contiguous"),
        (CASE, change(block_table=None), "paged keys need a block_table"),
        (CASE, change(block_table=ints(1, 4)), "block_table has shape (1, 4)"),
        (CASE, change(block_table=ints(8)), "block_table has shape (8,)"),
        (CASE, change(block_table=ints(2, 1).expand(2, 4)), "strides (1, 0)"),
        (CASE, change(seq_lens=ints(2, 1)), "seq_lens has shape (2, 1): [requests] is needed"),
        (CASE, change(block_table=ints(2, 4).to("meta")), "block_table is on meta, seq_lens on cpu"),
        (CASE, change(block_table=ints(4, 2).t()), "with pages contiguous in a row is needed"),
        (CASE, change(block_table=ints(2, 4).long()), "block_table is int64: int32 is needed"),
        (CASE, change(num_tokens=-1), "num_tokens is -1: an integer from 0 to 2**31 - 1 is needed"),
        (CASE, change(num_tokens=True), "num_tokens is True: an integer from 0"),
        (CASE, change(max_query_len=-1), "max_query_len is -1: an integer from 0"),
        (CASE, change(max_query_len=3.0), "max_query_len is 3.0: an integer from 0"),
        (CASE, change(max_seq_len=-5), "max_seq_len is -5: an integer from 0"),
        (CASE, change(max_seq_len=None), "max_seq_len is None: an integer from 0"),
        (CASE, change(host_lengths=3), "host_lengths is 3: a HostLengths is needed"),
        (CASE, change(host_lengths=HostLengths([1, 2], numpy.ones(2))), "queries is [1, 2]: a ndarray is needed"),
        (CASE, change(host_lengths=HostLengths(numpy.ones(2), numpy.ones(3))), "keys has shape (3,): (2,) is needed"),
        (CASE, change(seq_lens=[20, 3]), "seq_lens is a list: a tensor is needed"),
        (CASE, change(query_start_loc=None), "query_start_loc is None: a tensor is needed"),
        (CASE, change(block_table="pages"), "block_table is 'pages': a tensor is needed"),
        (PACKED, change(kv_start_loc=(0, 20, 23)), "kv_start_loc is a tuple: a tensor is needed"),
        (dataclasses.replace(CASE, causal=(True, False)), change(causal=[True, False]), "causal is a list: a tensor"),
        (PACKED, change(kv_start_loc=None), "packed keys need kv_start_loc"),
        (PACKED, change(kv_start_loc=ints(2)), "kv_start_loc has shape (2,): (3,) is needed for 2 requests"),
        (PACKED, change(kv_start_loc=ints(3).short()), "kv_start_loc is int16: int32 is needed"),
        (
            dataclasses.replace(CASE, causal=(True, False)),
            change(causal=None),
            "Causality.PER_REQUEST needs Batch.causal, [requests] bool",
        ),
        (
            dataclasses.replace(CASE, causal=(True, False)),
            change(causal=torch.ones(3, dtype=torch.bool)),
            "Causality.PER_REQUEST needs Batch.causal, [requests] bool",
        ),
        (
            dataclasses.replace(CASE, causal=(True, False)),
            change(causal=torch.ones(2)),
            "Causality.PER_REQUEST needs Batch.causal, [requests] bool",
        ),
        (
            dataclasses.replace(CASE, causal=(True, False)),
            change(causal=torch.ones(4, dtype=torch.bool)[::2]),
            "causal is not contiguous",
        ),
        (
            dataclasses.replace(CASE, causal=(True, False)),
            change(causal=torch.ones(2, dtype=torch.bool, device="meta")),
            "causal is on meta, seq_lens on cpu",
        ),
    ],
)
def test_plan_refuses(case: Case, broken: Callable[[Batch], Batch], message: str) -> None:
    problem = case.problem()
    with pytest.raises(InvalidInput, match=re.escape(message)):
        api.plan(problem.spec, broken(problem.batch), kernel="reference")


def test_workspaces_are_on_devices() -> None:
    assert Workspace("cpu").device == torch.device("cpu")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"device is 'gpu7': a torch\.device or its name"):
        Workspace("gpu7")  # type: ignore[arg-type]


def test_numbers_of_other_libraries_are_taken() -> None:
    made = spec(heads_q=numpy.int64(4), window_left=numpy.int32(7), scale=numpy.float32(0.5), softcap=3)
    assert made == spec(window_left=7, scale=0.5, softcap=3.0)
    for name in ("heads_q", "window_left", "scale", "softcap"):
        assert type(getattr(made, name)) in (int, float), name
    batch = dataclasses.replace(CASE.problem().batch, max_seq_len=numpy.int64(20), num_tokens=torch.tensor(4))
    assert (type(batch.max_seq_len), type(batch.num_tokens)) == (int, int)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"spec": None}, "spec is None: an AttentionSpec is needed"),
        ({"batch": [1, 3]}, "batch is [1, 3]: a Batch is needed"),
        ({"kernel": ["reference"]}, "kernel is ['reference']: a name from the dispatch table or None is needed"),
        ({"kernel": 3}, "kernel is 3: a name from the dispatch table"),
        ({"workspace": 2**20}, "workspace is 1048576: a Workspace is needed"),
        ({"workspace": Workspace(torch.device("meta"))}, "workspace is on meta, seq_lens on cpu"),
    ],
)
def test_plan_refuses_options(changed: dict[str, Any], message: str) -> None:
    problem = CASE.problem()
    arguments = {"spec": problem.spec, "batch": problem.batch, "kernel": "reference", **changed}
    with pytest.raises(InvalidInput, match=re.escape(message)):
        api.plan(arguments.pop("spec"), arguments.pop("batch"), **arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"spec": "bf16"}, "spec is 'bf16': an AttentionSpec is needed"),
        ({"target": "sm_90a"}, "target is 'sm_90a': a Target is needed"),
        ({"workspace": None}, "workspace is None: a Workspace is needed"),
        ({"kernel": b"cute"}, "kernel is b'cute': a name from the dispatch table or None is needed"),
    ],
)
def test_planner_refuses(changed: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"spec": CASE.spec, "target": CPU, "workspace": Workspace(torch.device("cpu")), **changed}
    with pytest.raises(InvalidInput, match=re.escape(message)):
        Planner(**options)


@pytest.mark.parametrize("page", [-2, 6, 2**31 - 1])
def test_the_reference_refuses_pages_that_are_not_there(page: int) -> None:
    problem = CASE.problem()
    assert problem.keys.shape[0] == 6
    assert problem.batch.block_table is not None
    problem.batch.block_table[0, 1] = page
    with pytest.raises(InvalidInput, match=f"block_table has page {page} of request 0: the cache has pages 0 to 5"):
        run(problem)


def test_the_reference_refuses_lengths_beyond_the_table() -> None:
    problem = CASE.problem()
    problem.batch.seq_lens[1] = 33
    with pytest.raises(InvalidInput, match="request 1 has 33 keys: block_table has 2 pages for them"):
        run(problem)


def test_plan_refuses_devices() -> None:
    batch = Batch(
        query_start_loc=ints(2).to("meta"),
        seq_lens=ints(1).to("meta"),
        num_tokens=1,
        max_query_len=1,
        max_seq_len=1,
        block_table=ints(1, 1).to("meta"),
    )
    with pytest.raises(InvalidInput, match="device meta is not supported: use a CUDA device or the CPU"):
        api.plan(CASE.spec, batch)


def run(problem: Problem, **changed: Any) -> torch.Tensor:
    """The problem on the reference, with some arguments changed."""
    arguments = {"q": problem.q, "keys": problem.keys, "values": problem.values, **problem.extras, **changed}
    return api.run(api.plan(problem.spec, problem.batch, kernel="reference"), **arguments)


# Arguments that do not fit: case, argument, what is made of the right one, message.
Wrong = Callable[[torch.Tensor], Any]
WRONG_ARGUMENTS: list[tuple[Case, str, Wrong, str]] = [
    (CASE, "q", lambda t: t[:3], "q has shape (3, 4, 64): (7, 4, 64) is needed, the first dimension or more"),
    (CASE, "q", lambda t: t[:, :2], "q has shape (9, 2, 64)"),
    (CASE, "q", lambda t: t[..., :32], "q has shape (9, 4, 32)"),
    (CASE, "q", lambda t: t.flatten(1), "q has shape (9, 256)"),
    (CASE, "q", lambda t: t.half(), "q is float16: bfloat16 is needed"),
    (CASE, "q", lambda t: t.repeat(1, 1, 2)[..., ::2], "q has stride 2 in its last dimension: 1 is needed"),
    (CASE, "q", lambda t: (t, t), "only absorbed MLA takes q in two parts"),
    (CASE, "keys", lambda t: t.float(), "keys is float32: bfloat16 is needed"),
    (CASE, "keys", lambda t: t[:, :8], "keys has shape (6, 8, 2, 64): (0, 16, 2, 64) is needed"),
    (CASE, "values", lambda t: t[:, :, :1], "values has shape (6, 16, 1, 64)"),
    (CASE, "values", lambda t: t.repeat(1, 1, 1, 2)[..., ::2], "values has stride 2 in its last dimension"),
    (PACKED, "keys", lambda t: t[None], "keys has shape (1, 28, 2, 64): (0, 2, 64) is needed"),
    (CASE, "out", lambda t: torch.zeros(3, 4, 64, dtype=BF16), "out has shape (3, 4, 64)"),
    (CASE, "out", lambda t: torch.zeros(9, 4, 64), "out is float32: bfloat16 is needed"),
    (CASE, "lse", lambda t: torch.zeros(9, 4, dtype=BF16), "lse is bfloat16 (9, 4): float32 (7, 4) is needed"),
    (CASE, "lse", lambda t: torch.zeros(4, 9), "lse is float32 (4, 9): float32 (7, 4) is needed"),
    (CASE, "lse", lambda t: torch.zeros(36), "lse is float32 (36,): float32 (7, 4) is needed"),
    (CASE, "sinks", lambda t: torch.zeros(4), "sinks were given"),
    (CASE, "alibi_slopes", lambda t: torch.zeros(4), "alibi_slopes were given"),
    (dataclasses.replace(CASE, sinks=True), "sinks", lambda t: None, "sinks are missing"),
    (dataclasses.replace(CASE, sinks=True), "sinks", lambda t: t[:2], "contiguous [heads_q = 4]"),
    (dataclasses.replace(CASE, sinks=True), "sinks", lambda t: t.double(), "sinks are float64 (4,)"),
    (dataclasses.replace(CASE, sinks=True), "sinks", lambda t: t.to("meta"), "sinks are on meta: cpu is needed"),
    (dataclasses.replace(CASE, alibi=True), "alibi_slopes", lambda t: t.half(), "contiguous [heads_q = 4] of float32"),
    (dataclasses.replace(CASE, fp8=True), "k_scale", lambda t: None, "fp8 keys and values need k_scale"),
    (dataclasses.replace(CASE, fp8=True), "v_scale", lambda t: None, "fp8 keys and values need v_scale"),
    (CASE, "q", lambda t: t.to("meta"), "q is on meta: cpu is needed"),
    (CASE, "out", lambda t: torch.zeros(9, 4, 64, dtype=BF16, device="meta"), "out is on meta: cpu is needed"),
    (CASE, "lse", lambda t: torch.zeros(9, 4, device="meta"), "lse is on meta: cpu is needed"),
    (CASE, "values", lambda t: t[1:], "pages, values"),
    (LATENT, "q", lambda t: (t, t, t), "q has 3 parts: two are needed, or one tensor"),
    (dataclasses.replace(CASE, alibi=True), "alibi_slopes", lambda t: None, "alibi_slopes are missing"),
    (
        dataclasses.replace(CASE, alibi=True),
        "alibi_slopes",
        lambda t: torch.zeros(8)[::2],
        "contiguous [heads_q = 4] of float32 is needed",
    ),
    (dataclasses.replace(CASE, fp8=True), "keys", lambda t: t.view(torch.uint8), "keys is uint8: float8_e4m3fn"),
    (
        dataclasses.replace(CASE, fp8=True),
        "k_scale",
        lambda t: t.double(),
        "k_scale is float64 (1,) on cpu: one float32",
    ),
    (
        dataclasses.replace(CASE, fp8=True),
        "v_scale",
        lambda t: t.repeat(3),
        "v_scale is float32 (3,) on cpu: one float32, or",
    ),
    (LATENT, "values", lambda t: t.clone(), "absorbed MLA's values are keys[..., :head_dim_v]"),
    (LATENT, "q", lambda t: (t[..., :512], t[..., :512]), "q[1] has shape (8, 4, 512): (6, 4, 64) is needed"),
    (LATENT, "q", lambda t: (t, t[..., 512:]), "q[0] has shape (8, 4, 576): (6, 4, 512) is needed"),
    (LATENT, "q", lambda t: (t[..., :512], None), "q[1] is None: a tensor is needed"),
    (LATENT, "q", lambda t: (None, t[..., 512:]), "q is None: a tensor is needed"),
    (CASE, "q", lambda t: t.tolist(), "q is a list: a tensor is needed"),
    (CASE, "q", lambda t: t.to_sparse(), "q has layout sparse_coo: a dense tensor is needed"),
    (CASE, "q", lambda t: None, "q is None: a tensor is needed"),
    (CASE, "keys", lambda t: None, "keys is None: a tensor is needed"),
    (CASE, "keys", lambda t: t.float().numpy(), "keys is a ndarray: a tensor is needed"),
    (CASE, "values", lambda t: "values", "values is 'values': a tensor is needed"),
    (CASE, "out", lambda t: [[0.0]], "out is a list: a tensor is needed"),
    (CASE, "lse", lambda t: "lse", "lse is 'lse': a tensor is needed"),
    (CASE, "k_scale", lambda t: 0.5, "k_scale is a float: a tensor is needed"),
    (dataclasses.replace(CASE, sinks=True), "sinks", lambda t: [0.0] * 4, "sinks is a list: a tensor is needed"),
    (CASE, "out", lambda t: torch.zeros(1, 4, 64, dtype=BF16).expand(9, 4, 64), "out has shape (9, 4, 64) and strides"),
    (
        CASE,
        "out",
        lambda t: torch.zeros(9 * 256, dtype=BF16).as_strided((9, 4, 64), (255, 64, 1)),
        "and strides (255, 64, 1): its rows overlap in memory",
    ),
    (CASE, "lse", lambda t: torch.zeros(1, 4).expand(9, 4), "lse has shape (9, 4) and strides (0, 1): its rows"),
    (CASE, "lse", lambda t: torch.zeros(40).as_strided((9, 4), (3, 1)), "strides (3, 1): its rows overlap in memory"),
    (CASE, "lse", lambda t: torch.zeros(40).as_strided((9, 4), (1, 8)), "strides (1, 8): its rows overlap in memory"),
    (CASE, "keys", lambda t: t[:1].expand(6, 16, 2, 64), "strides (0, 256, 128, 1): its rows overlap in memory"),
    (CASE, "values", lambda t: t[:, :, :1].expand(6, 16, 2, 64), "strides (4096, 256, 0, 1): its rows overlap"),
    (
        CASE,
        "keys",
        lambda t: torch.zeros(20000, dtype=BF16).as_strided((6, 16, 2, 64), (2047, 128, 64, 1)),
        "keys has shape (6, 16, 2, 64) and strides (2047, 128, 64, 1): its rows overlap in memory",
    ),
    (PACKED, "values", lambda t: t[:1].expand(28, 2, 64), "values has shape (28, 2, 64) and strides (0"),
]


@pytest.mark.parametrize(("case", "name", "wrong", "message"), WRONG_ARGUMENTS)
def test_run_refuses(case: Case, name: str, wrong: Wrong, message: str) -> None:
    problem = case.problem()
    with pytest.raises(InvalidInput, match=re.escape(message)):
        run(problem, **{name: wrong({"out": problem.q, "lse": problem.q, **vars(problem)}[name])})


def test_every_layer_is_looked_at() -> None:
    """What fits is remembered by its layout, and what does not fit is refused after something that does."""
    problem = CASE.problem()
    plan, tensors = api.plan(problem.spec, problem.batch, kernel="reference"), (problem.keys, problem.values)
    lse = torch.zeros(9, 4)
    for _ in range(2):
        api.run(plan, problem.q, *tensors, lse=lse)
        with pytest.raises(InvalidInput, match="q is float16"):
            api.run(plan, problem.q.half(), *tensors, lse=lse)
        with pytest.raises(InvalidInput, match="lse has shape"):
            api.run(plan, problem.q, *tensors, lse=lse[:1].expand(9, 4))
        with pytest.raises(InvalidInput, match="k_scale is a int"):
            api.run(plan, problem.q, *tensors, lse=lse, k_scale=1)  # type: ignore[arg-type]
    for rows in range(api.MOST_LAYOUTS + 3):
        api.run(plan, problem.q, *tensors, lse=torch.zeros(4, 9 + rows).t())
    assert len(plan.planner.layouts) <= api.MOST_LAYOUTS
    with pytest.raises(InvalidInput, match="plan is None: an AttentionPlan is needed"):
        api.run(None, problem.q, *tensors)  # type: ignore[arg-type]
    latent = LATENT.problem()
    plan = api.plan(latent.spec, latent.batch, kernel="reference")
    api.run(plan, latent.q, latent.keys, latent.values)
    with pytest.raises(InvalidInput, match="not a tensor of their own"):
        api.run(plan, latent.q, latent.keys, latent.keys.clone()[..., :512])


def test_lse_and_out_of_any_strides_without_overlap() -> None:
    problem = CASE.problem()
    out = torch.zeros(4, 9, 64, dtype=BF16).transpose(0, 1)
    lse = torch.zeros(100).as_strided((9, 4), (1, 9))
    run(problem, out=out, lse=lse)
    expected = problem.expected()
    torch.testing.assert_close(out[:4].double(), expected.out[:4], rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(lse[:4].double(), expected.lse[:4], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["q", "keys", "values", "out", "lse", "sinks"])
def test_run_refuses_gradients(name: str) -> None:
    problem = dataclasses.replace(CASE, sinks=True).problem()
    tensor = {"out": torch.zeros(9, 4, 64, dtype=BF16), "lse": torch.zeros(9, 4), **vars(problem)}[name]
    asking = tensor.detach().requires_grad_()
    with pytest.raises(InvalidInput, match=f"{name} requires a gradient, and there is no backward: call under"):
        run(problem, **{name: asking})
    with torch.no_grad():
        run(problem, **{name: asking})


def test_run_makes_an_output() -> None:
    problem = CASE.problem()
    out = run(problem)
    assert out.shape == (9, 4, 64)
    assert out.dtype == BF16
    assert (out[4:] == 0).all(), "rows of no request"
    torch.testing.assert_close(out[:4].double(), problem.expected().out[:4], rtol=2**-8, atol=1e-6)


def test_run_writes_in_place() -> None:
    problem = CASE.problem()
    out = torch.zeros_like(problem.q)
    assert run(problem, out=out) is out


@pytest.mark.parametrize("case", [CASE, PACKED, LATENT, dataclasses.replace(CASE, fp8=True, sinks=True, alibi=True)])
def test_reference_through_the_door(case: Case) -> None:
    """The kernel named reference, judged like any other; q in two parts where the case is absorbed MLA."""
    problem = case.problem()
    result = check.run(problem, "reference", split_q=case.mla)
    expected, mine = problem.expected(), problem.owned()
    check.judge(
        check.Result(result.out[mine], result.lse[mine]), rows_of(expected, mine), problem.score_magnitude()[mine]
    )


def rows_of(expected: Any, rows: torch.Tensor) -> Any:
    values = {f.name: getattr(expected, f.name)[rows] for f in dataclasses.fields(expected)}
    return dataclasses.replace(expected, **values)


# write_kv


def write(**changed: Any) -> None:
    problem = Case(q_lens=(1, 3), kv_lens=(20, 3), around=Surroundings(layout=Layout.SEPARATE)).problem()
    arguments: dict[str, Any] = {
        "spec": problem.spec,
        "key": torch.zeros(4, 2, 64, dtype=BF16),
        "value": torch.zeros(4, 2, 64, dtype=BF16),
        "key_cache": problem.keys,
        "value_cache": problem.values,
        "slot_mapping": torch.arange(4),
        "kernel": "reference",
    }
    api.write_kv(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"spec": PACKED.spec}, "a cache without pages has no slots"),
        ({"key": torch.zeros(3, 2, 64, dtype=BF16)}, "key has shape (3, 2, 64): (4, 2, 64) is needed"),
        ({"value": torch.zeros(4, 1, 64, dtype=BF16)}, "value has shape (4, 1, 64)"),
        ({"key": torch.zeros(4, 2, 64)}, "key is float32: bfloat16 is needed"),
        ({"value": torch.zeros(4, 2, 128, dtype=BF16)[..., ::2]}, "value has stride 2 in its last dimension"),
        ({"key_cache": torch.zeros(4, 16, 2, 64)}, "key_cache is float32: bfloat16 is needed"),
        ({"key_cache": torch.zeros(4, 8, 2, 64, dtype=BF16)}, "key_cache has shape (4, 8, 2, 64): (0, 16, 2, 64)"),
        ({"slot_mapping": torch.arange(4).int()}, "slot_mapping is int32 (4,): contiguous int64 [tokens] is needed"),
        ({"slot_mapping": torch.arange(8)[::2]}, "slot_mapping is int64 (4,): contiguous int64 [tokens] is needed"),
        ({"slot_mapping": torch.arange(4, device="meta")}, "key is on cpu: meta is needed"),
        ({"value_cache": torch.zeros(5, 16, 2, 64, dtype=BF16)}, "key_cache holds 6 pages, value_cache 5"),
        ({"k_scale": torch.ones(3)}, "k_scale is float32 (3,) on cpu: one float32, or [heads_kv = 2] of them, on cpu"),
        ({"spec": "bf16"}, "spec is 'bf16': an AttentionSpec is needed"),
        ({"key": [[0.0]]}, "key is a list: a tensor is needed"),
        ({"value": None}, "value is None: a tensor is needed"),
        ({"key_cache": "cache"}, "key_cache is 'cache': a tensor is needed"),
        ({"value_cache": None}, "value_cache is None: a tensor is needed"),
        ({"slot_mapping": [0, 1, 2, 3]}, "slot_mapping is a list: a tensor is needed"),
        ({"k_scale": 1.0}, "k_scale is a float: a tensor is needed"),
        ({"kernel": ["cute"]}, "kernel is ['cute']: a name from the dispatch table or None is needed"),
        (
            {"value_cache": torch.zeros(1, 16, 2, 64, dtype=BF16).expand(6, 16, 2, 64)},
            "value_cache has shape (6, 16, 2, 64) and strides (0, 128, 64, 1): its rows overlap in memory",
        ),
        (
            {"key_cache": torch.zeros(20000, dtype=BF16).as_strided((6, 16, 2, 64), (2048, 127, 64, 1))},
            "key_cache has shape (6, 16, 2, 64) and strides (2048, 127, 64, 1): its rows overlap in memory",
        ),
        ({"key": torch.zeros(4, 2, 64, dtype=BF16, requires_grad=True)}, "key requires a gradient"),
        ({"slot_mapping": torch.tensor([3, -1, 96, 4])}, "slot_mapping has slot 96: the caches have slots 0 to 95"),
        ({"kernel": "fastest"}, "attention.write_kv has no kernel 'fastest': choose one of cute, triton, reference"),
    ],
)
def test_write_kv_refuses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        write(**changed)


def test_a_slot_beyond_the_cache_writes_nothing() -> None:
    keys = torch.zeros(6, 16, 2, 64, dtype=BF16)
    key, slots = torch.ones(4, 2, 64, dtype=BF16), torch.tensor([0, 1, 2, 96])
    with pytest.raises(InvalidInput, match="slot_mapping has slot 96"):
        write(key=key, key_cache=keys, value_cache=keys.clone(), slot_mapping=slots)
    assert not keys.any(), "a part of the key cache was written"


# dispatch


def choose(operation: Operation, layer: AttentionSpec, target: Target, kernel: str | None = None) -> str:
    return dispatch.choose(operation, layer, target, kernel).name


def test_default_prefers_cute_then_triton_then_the_reference() -> None:
    for arch, kernel in (("sm_80", "triton"), ("sm_90a", CUTE), ("sm_100a", CUTE), ("sm_120a", "triton")):
        for operation in (Operation.PREFILL, Operation.DECODE):
            assert choose(operation, CASE.spec, from_arch(arch)) == kernel, (arch, operation)
            fp8 = dataclasses.replace(CASE.spec, kv_dtype=FP8)
            assert choose(operation, fp8, from_arch(arch)) == kernel, (arch, operation, "fp8")
        for layer in (CASE.spec, fp8, LATENT.spec):
            assert choose(Operation.WRITE_KV, layer, from_arch(arch)) == kernel
    assert choose(Operation.DECODE, CASE.spec, INTERPRETED) == "triton"
    assert choose(Operation.DECODE, CASE.spec, CPU) == "reference"
    assert choose(Operation.DECODE, spec(head_dim=65, head_dim_v=65), INTERPRETED) == "reference"


def test_a_name_never_falls_back() -> None:
    with pytest.raises(Unsupported) as raised:
        dispatch.choose(Operation.DECODE, spec(head_dim=65, head_dim_v=65), INTERPRETED, "triton")
    assert set(raised.value.objections) == {"dense-decode triton"}, "the other kernels were not asked for"
    with pytest.raises(Unsupported, match="is for CPUs, this is sm_90a"):
        dispatch.choose(Operation.DECODE, CASE.spec, from_arch("sm_90a"), "reference")
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1 interprets it"):
        dispatch.choose(Operation.DECODE, CASE.spec, CPU, "triton")


def test_unknown_names_are_refused() -> None:
    message = "attention.decode has no kernel 'fast': choose one of cute, cute-fp8, triton, reference"
    with pytest.raises(InvalidInput, match=re.escape(message)):
        dispatch.choose(Operation.DECODE, CASE.spec, CPU, "fast")


def test_every_objection_is_kept() -> None:
    layer = spec(head_dim=66, head_dim_v=320, page_size=24, dtype=torch.float32, kv_dtype=FP16)
    with pytest.raises(Unsupported) as raised:
        dispatch.choose(Operation.PREFILL, layer, from_arch("sm_70"))
    assert set(raised.value.objections) == {
        "dense-prefill sm90",
        "dense-prefill sm100",
        "dense-prefill triton",
        "dense-prefill reference",
    }
    assert raised.value.objections["dense-prefill triton"] == (
        "needs compute capability 7.5 or newer, this is sm_70",
        "dtype float32 is not one of float16, bfloat16",
        "keys of float16 are none of float32, float8_e4m3fn, float8_e5m2",
        "page size 24 is not a multiple of 16",
        "head size 66 is not a multiple of 8 from 64 to 256, or 512",
        "value head size 320 is not a multiple of 8 from 64 to 256, or 512",
    )
    text = str(raised.value)
    assert f"no kernel for attention.prefill ({layer}) on sm_70" in text
    assert "\n  dense-prefill reference: is for CPUs, this is sm_70" in text
    for reason in by_reason(raised.value.objections):
        assert text.count(f": {reason}\n") + text.endswith(f": {reason}") == 1, "said once"


@pytest.mark.parametrize(
    ("layer", "arch", "objection"),
    [
        (CASE.spec, "sm_75", "bfloat16 needs compute capability 8.0 or newer, this is sm_75: use float16"),
        (CASE.spec, "sm_72", "needs compute capability 7.5 or newer, this is sm_72"),
        (spec(page_size=8), "sm_90a", "page size 8 is not a multiple of 16"),
        (spec(kv_dtype=FP16), "sm_90a", "keys of float16 are none of bfloat16, float8_e4m3fn, float8_e5m2"),
        (spec(head_dim=512, head_dim_v=264), "sm_90a", "value head size 264 is not a multiple of 8 from 64"),
        (spec(head_dim=56, head_dim_v=64), "sm_90a", "head size 56 is not a multiple of 8 from 64 to 256, or 512"),
        (LATENT.spec, "sm_90a", "serves keys and values of their own, not the latent ones of MLA"),
    ],
)
def test_triton_objects(layer: AttentionSpec, arch: str, objection: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(objection)):
        dispatch.choose(Operation.PREFILL, layer, from_arch(arch), "triton")


@pytest.mark.parametrize(
    ("change", "objection"),
    [
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "dtype float32 is not one of float16, bfloat16"),
        ({"kv_dtype": FP16}, "keys of float16 are none of bfloat16, float8_e4m3fn, float8_e5m2"),
        ({"head_dim": 264, "head_dim_v": 264}, "head size 264 is not a multiple of 8 from 16 to 256, 384 or 512"),
        ({"page_size": 24}, "page size 24 is not a multiple of 16"),
        ({"head_dim": 80, "head_dim_v": 64}, "values of 64 elements and queries of 80 have different swizzles"),
    ],
)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_cute_objects(change: dict[str, Any], objection: str, arch: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(objection)):
        dispatch.choose(Operation.PREFILL, spec(**change), from_arch(arch), "cute")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_cute_takes_fp8(arch: str) -> None:
    for operation in (Operation.PREFILL, Operation.DECODE):
        dispatch.choose(operation, spec(kv_dtype=FP8), from_arch(arch), "cute")
        odd = spec(kv_dtype=FP8, head_dim=72, head_dim_v=72)
        with pytest.raises(Unsupported, match="head size 72 is not a multiple of 16 from 16 to 256"):
            dispatch.choose(operation, odd, from_arch(arch), "cute")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_cute_takes_fp8_latents(arch: str) -> None:
    layer = dataclasses.replace(LATENT.spec, kv_dtype=FP8)
    served = dispatch.choose(Operation.MLA_DECODE, layer, from_arch(arch))
    assert served.name == CUTE
    assert served.kernel.endswith("MlaSplitKV") or CUTE != "cute"
    other = dataclasses.replace(layer, kv_dtype=torch.float8_e5m2)
    assert choose(Operation.MLA_DECODE, other, from_arch(arch)) == CUTE


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("operation", [Operation.PREFILL, Operation.DECODE])
def test_cute_takes_wide_heads(arch: str, operation: Operation) -> None:
    for dims in ((384, 384), (512, 512), (256, 512), (512, 64)):
        layer = spec(head_dim=dims[0], head_dim_v=dims[1])
        assert choose(operation, layer, from_arch(arch)) == "cute"
    fp8 = spec(kv_dtype=FP8, head_dim=512, head_dim_v=512)
    if arch == "sm_90a":
        dispatch.choose(operation, fp8, from_arch(arch), "cute")
    else:
        with pytest.raises(Unsupported, match="bytes of shared memory: there are"):
            dispatch.choose(operation, fp8, from_arch(arch), "cute")


def test_cute_is_for_its_own_chips() -> None:
    with pytest.raises(Unsupported) as raised:
        dispatch.choose(Operation.PREFILL, spec(), from_arch("sm_120a"), "cute")
    assert raised.value.objections == {
        "dense-prefill sm90": ("serves GPUs of sm_90a, this is sm_120a",),
        "dense-prefill sm100": ("serves GPUs of sm_100a, sm_103a, this is sm_120a",),
    }


@pytest.mark.parametrize("operation", list(Operation))
def test_sm110_gets_no_kernels_of_sm100(operation: Operation) -> None:
    """It has tcgen05, but nothing was compiled for it or run: Triton serves."""
    layer = spec(mla=True, heads_kv=1, head_dim=576, head_dim_v=512) if operation is Operation.MLA_DECODE else spec()
    target = from_arch("sm_110a")
    assert dispatch.choose(operation, layer, target).name == "triton"
    with pytest.raises(Unsupported, match="this is sm_110a, for which CuTe DSL"):
        dispatch.choose(operation, layer, target, "cute")


@pytest.mark.parametrize(
    "arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a"]
)
def test_float16_is_served_everywhere(arch: str) -> None:
    layer = spec(dtype=FP16, kv_dtype=FP16)
    assert dispatch.reasons_against(layer, from_arch(arch)) == []
    assert dispatch.reasons_against(dataclasses.replace(layer, kv_dtype=FP8), from_arch(arch)) == []


@pytest.mark.parametrize(
    ("facts", "objection"),
    [
        ({"head_dim_v": 256}, "latent sizes 576/256 are not one of 576/512, 320/256"),
        ({"page_size": None}, "needs paged keys"),
        ({"mla": False}, "serves the latent keys of MLA only"),
    ],
)
def test_mla_objects(facts: dict[str, Any], objection: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(objection)):
        dispatch.choose(Operation.MLA_DECODE, dataclasses.replace(LATENT.spec, **facts), from_arch("sm_90a"))


def test_operations_of_a_layer() -> None:
    assert dispatch.operations_of(CASE.spec) == (Operation.PREFILL, Operation.DECODE, Operation.WRITE_KV)
    assert dispatch.operations_of(PACKED.spec) == (Operation.PREFILL, Operation.DECODE)
    assert dispatch.operations_of(LATENT.spec) == (Operation.MLA_DECODE, Operation.WRITE_KV)


def test_reasons_against_name_the_kernels_and_are_said_once() -> None:
    reasons = dispatch.reasons_against(CASE.spec, from_arch("sm_75"))
    kinds = ("dense-prefill", "dense-decode", "write-kv")
    assert f"{', '.join(f'{kind} reference' for kind in kinds)}: is for CPUs, this is sm_75" in reasons
    assert [reason for reason in reasons if "bfloat16 needs" in reason] == [
        f"{', '.join(f'{kind} triton' for kind in kinds)}: bfloat16 needs compute capability 8.0 or newer, this is "
        "sm_75: use float16"
    ]
    assert dispatch.reasons_against(CASE.spec, CPU) == []


def test_every_entry_can_be_loaded() -> None:
    """The table's paths are strings: a typing error would show only when a kernel is first chosen."""
    pytest.importorskip("triton")
    assert all(callable(entry.load()) for entries in dispatch.TABLE.values() for entry in entries)


# plan


def test_plan_reads_no_device_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning with tensors that hold nothing: meta tensors refuse to be read."""
    batch = CASE.problem().batch
    moved = {name: getattr(batch, name).to("meta") for name in ("query_start_loc", "seq_lens", "block_table")}
    planner = Planner(CASE.spec, cpu_target(), Workspace(torch.device("cpu")), "reference")
    plan = planner.plan(dataclasses.replace(batch, **moved))
    assert [part.name for part in plan.parts] == ["reference"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("case", [CASE, LATENT], ids=["dense", "mla"])
def test_plans_of_short_queries_do_not_depend_on_the_longest_context(case: Case, arch: str) -> None:
    """Steps that differ in it alone share a plan, such as the passes of a draft model."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    bf16 = dataclasses.replace(case.spec, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    planner = Planner(bf16, from_arch(arch), Workspace(torch.device("cpu")), "cute")
    batch = case.problem().batch
    assert planner.short_limit is None or batch.max_query_len <= planner.short_limit
    object.__delattr__(batch, "max_seq_len")
    assert len(planner.plan(batch).parts) == 1


def test_shares_cover_every_query_length_once() -> None:
    """Where two kernels share a batch, each request belongs to exactly one of them."""
    pytest.importorskip("triton")
    planner = Planner(CASE.spec, INTERPRETED, Workspace(torch.device("cpu")), "triton")
    assert planner.kernel_titles == {
        Operation.PREFILL: "dense-prefill triton",
        Operation.DECODE: "dense-decode triton",
    }
    limit = planner.short[2].max_query_len_served()
    assert limit is not None
    for max_seqlen_q in (0, 1, limit, limit + 1, 10 * limit):
        plan = planner.plan(dataclasses.replace(CASE.problem().batch, max_query_len=max_seqlen_q))
        for q_len in range(1, max_seqlen_q + 1):
            serving = [part for part in plan.parts if part.min_seqlen_q <= q_len <= part.max_seqlen_q]
            assert len(serving) == 1, f"{q_len=} of {max_seqlen_q=} is served {len(serving)} times"


def test_kernels_bind_once() -> None:
    """A planner that is asked again makes no new kernels: their scratch is in captured graphs."""
    planner = Planner(CASE.spec, CPU, Workspace(torch.device("cpu")))
    batch = CASE.problem().batch
    one, two = planner.plan(batch), planner.plan(batch)
    assert one.parts[0].kernel is two.parts[0].kernel
    assert isinstance(one.parts[0].kernel, ReferenceKernel)


def test_workspace_keeps_what_it_outgrew() -> None:
    workspace = Workspace(torch.device("cpu"))
    small = workspace.partials(10)
    assert workspace.partials(5).data_ptr() == small.data_ptr()
    address = small.data_ptr()
    del small
    large = workspace.partials(10_000)
    assert large.numel() >= 10_000
    assert any(buffer.data_ptr() == address for buffer in workspace._outgrown), "a graph may still point to it"


def test_causality_values_are_stable() -> None:
    """They are part of what `dsl-backend doctor` prints."""
    assert [c.value for c in Causality] == ["full", "causal", "per_request"]
    assert FULL is Causality.FULL
