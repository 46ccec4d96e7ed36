# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's CuTe DSL kernels and FA4 of its package are called as theirs are defined: by stand-ins for them.

The stand-ins have the parameters of FlashInfer 0.7.2 and of flash-attn-4 4.0.0b20, check what those check, and compute
attention; the result is compared with float64.
"""

import ast
import dataclasses
import importlib
import inspect
import pathlib
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import benchmarks
from benchmarks import check
from benchmarks.attention import flash_attention_4, flashinfer_peers, vllm_dense
from benchmarks.attention.problems import Problem, dense, latent, packed
from dsl_backend.providers import Provider
from dsl_backend.runtime import target as targets

ROOT = pathlib.Path(__file__).parents[2]
CUTE = "FlashInfer CuTe DSL"


def column_of(operator: str, name: str) -> Provider:
    (column,) = (one for one in benchmarks.operators()[operator].providers([]) if one.name == name)
    return column


def require_right(operator: str, name: str, problem: Problem) -> None:
    """Raises WrongResultError: a column's result is not the operator's."""
    benchmark, column = benchmarks.operators()[operator], column_of(operator, name)
    inputs = benchmark.build(problem, 2, torch.device("cpu"), 3)
    out = column.prepare(problem, inputs).run(1)
    check.require_right(out, benchmark.reference(problem, inputs, 1), column.limits(problem))


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window_left: int | None
) -> torch.Tensor:
    """Causal attention of one request: q [queries, heads_q, dim], keys and values [keys, heads_kv, dim]."""
    group = q.shape[1] // keys.shape[1]
    k, v = (one.double().repeat_interleave(group, 1) for one in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    position = torch.arange(len(keys) - len(q), len(keys))[:, None]
    key = torch.arange(len(keys))[None]
    hidden = key > position
    if window_left is not None:
        hidden |= key < position - window_left
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def of_pages(rows: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    return rows.double()[pages.long()].flatten(0, 1)[:length]


def signature(parameters: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {parameters}: None"))


def bound(given: inspect.Signature, args: tuple[Any, ...], named: dict[str, Any]) -> SimpleNamespace:
    """A call's arguments with the defaults. Raises TypeError: the signature has no such parameter."""
    call = given.bind(*args, **named)
    call.apply_defaults()
    return SimpleNamespace(**call.arguments)


class Decode:
    """`flashinfer.cute_dsl.attention.BatchDecodePagedCuteDSLWrapper`."""

    PLAN = signature(
        "indptr, indices, seq_lens, num_qo_heads, num_kv_heads, head_dim, page_size, *, q_data_type=torch.bfloat16, "
        "kv_data_type=None, o_data_type=None, sm_scale=None, kv_splits=None, reduction='auto', q_len_per_req=1, "
        "window_left=None, window_right=0, max_kv_len=None, non_blocking=True, precompile_skip_softmax_kernel=False"
    )
    RUN = signature(
        "q, k_cache, v_cache, *, out=None, sm_scale=None, o_scale=None, sinks=None, "
        "skip_softmax_threshold_scale_factor=None, lse=None, enable_pdl=True"
    )

    def __init__(self, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool = False) -> None:
        pass

    def plan(self, *args: Any, **named: Any) -> None:
        self.planned = one = bound(self.PLAN, args, named)
        assert one.page_size in (8, 16, 32, 64)
        assert one.num_qo_heads % one.num_kv_heads == 0
        assert one.head_dim > 0
        assert one.head_dim % 64 == 0
        assert one.kv_data_type in (None, one.q_data_type)
        assert one.window_right == 0
        assert one.max_kv_len == one.seq_lens.max()
        assert one.indptr.dtype == one.indices.dtype == one.seq_lens.dtype == torch.int32
        assert one.indptr[-1] == len(one.indices)

    def run(self, *args: Any, **named: Any) -> torch.Tensor:
        one, plan = bound(self.RUN, args, named), self.planned
        caches = one.k_cache, one.v_cache
        assert len(one.q) == len(plan.seq_lens) * plan.q_len_per_req
        assert one.q.dtype == plan.q_data_type
        for cache in caches:
            assert cache.dtype == plan.q_data_type
            assert cache.shape[1:] == (plan.page_size, plan.num_kv_heads, plan.head_dim)
            assert cache.stride(-1) == 1
        # The results of split keys may be added to it.
        assert one.out is None or not one.out.any()
        table = plan.indices.split(plan.indptr.diff().tolist())
        made = [
            attend(q, *(of_pages(cache, pages, length) for cache in caches), plan.sm_scale, plan.window_left)
            for q, pages, length in zip(one.q.chunk(len(table)), table, plan.seq_lens.tolist(), strict=True)
        ]
        return torch.cat(made).to(plan.o_data_type or plan.q_data_type)


class Prefill:
    """`flashinfer.cute_dsl.attention.BatchPrefillCuteDSLWrapper`."""

    PLAN = signature(
        "qo_indptr, kv_indptr=None, num_qo_heads=None, num_kv_heads=None, head_dim_qk=None, head_dim_vo=None, "
        "causal=True, sm_scale=None, q_data_type=torch.float16, kv_data_type=torch.float16, window_left=-1, "
        "variant=None, window_right=-1, page_size=None, paged_kv_indptr=None, paged_kv_indices=None, "
        "paged_kv_last_page_len=None, kv_layout='NHD'"
    )
    RUN = signature("q, paged_kv_cache, out=None, return_lse=False, lse=None")

    def __init__(self, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool = False) -> None:
        pass

    def plan(self, *args: Any, **named: Any) -> None:
        self.planned = one = bound(self.PLAN, args, named)
        assert one.causal
        assert one.variant is None
        assert one.kv_indptr is None
        assert one.kv_layout == "NHD"
        assert one.page_size in (8, 16, 32, 64, 128)
        assert one.head_dim_vo in (None, one.head_dim_qk)
        assert one.q_data_type == one.kv_data_type
        assert one.q_data_type in (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
        assert one.window_right == -1
        self.table = one.paged_kv_indices.split(one.paged_kv_indptr.diff().tolist())
        last = one.paged_kv_last_page_len.tolist()
        self.lengths = [(len(pages) - 1) * one.page_size + left for pages, left in zip(self.table, last, strict=True)]
        assert min(self.lengths) > 0

    def run_paged(self, *args: Any, **named: Any) -> torch.Tensor:
        one, plan = bound(self.RUN, args, named), self.planned
        assert one.q.dtype == plan.q_data_type
        for cache in one.paged_kv_cache:
            assert cache.dtype == plan.q_data_type
            assert cache.shape[1:] == (plan.page_size, plan.num_kv_heads, plan.head_dim_qk)
            assert cache.stride(-1) == 1
        window = None if plan.window_left < 0 else plan.window_left
        requests = one.q.split(plan.qo_indptr.diff().tolist())
        made = [
            attend(q, *(of_pages(cache, pages, length) for cache in one.paged_kv_cache), plan.sm_scale, window)
            for q, pages, length in zip(requests, self.table, self.lengths, strict=True)
        ]
        return one.out.copy_(torch.cat(made))


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A FlashInfer on an SM100."""
    attention = SimpleNamespace(BatchDecodePagedCuteDSLWrapper=Decode, BatchPrefillCuteDSLWrapper=Prefill)
    parent = SimpleNamespace(attention=attention)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(cute_dsl=parent))
    monkeypatch.setitem(sys.modules, "flashinfer.cute_dsl", parent)
    monkeypatch.setitem(sys.modules, "flashinfer.cute_dsl.attention", attention)
    monkeypatch.setattr(flashinfer_peers, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(flashinfer_peers, "missing", lambda *_: [])
    monkeypatch.setattr(targets, "detect", lambda: targets.from_arch("sm_100a"))
    return attention


FP8 = torch.float8_e4m3fn
DENSE = {
    "decode": dense(64, 8, 2, [1] * 3, [5, 16, 40]),
    "drafts": dense(64, 4, 4, [3] * 2, [9, 40], window_left=6, page_size=8),
    "decode-fp8": dense(64, 8, 2, [1] * 3, [5, 16, 40], kv_dtype=FP8),
    "prefill": dense(64, 8, 2, [7, 33, 1], [7, 40, 20]),
    "window": dense(96, 4, 4, [20, 33], [30, 40], window_left=6, page_size=8),
    "prefill-fp8": dense(64, 8, 2, [7, 33], [7, 40], kv_dtype=FP8),
}


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("name", DENSE)
def test_cute_dsl_of_flashinfer(name: str) -> None:
    operator = "decode" if name.startswith("d") else "prefill"
    assert not column_of(operator, CUTE).objections(DENSE[name])
    require_right(operator, CUTE, DENSE[name])


@pytest.mark.usefixtures("flashinfer")
def test_keys_are_not_split_in_batch_invariant_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    monkeypatch.setattr(Decode, "plan", lambda *_, **given: planned.append(given["reduction"]))
    column = column_of("decode", CUTE)
    for invariant in (False, True):
        problem = dense(64, 4, 2, [1], [40], batch_invariant=invariant)
        column.prepare(problem, benchmarks.operators()["decode"].build(problem, 1, torch.device("cpu"), 3))
    assert planned == ["auto", "none"]


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize(
    ("operator", "problem", "reason"),
    [
        ("decode", dense(64, 4, 2, [1, 2], [9, 9]), "needs the same number of queries in every request"),
        ("decode", dense(96, 4, 2, [1], [9]), "heads of 96 are not a multiple of 64"),
        ("decode", dense(64, 4, 2, [1], [9], page_size=128), "pages of 128 are not one of (8, 16, 32, 64)"),
        ("prefill", dense(64, 4, 2, [9], [9], page_size=256), "pages of 256 are not one of (8, 16, 32, 64, 128)"),
        ("prefill", dense(192, 4, 2, [9], [9]), "has heads of up to 128, in multiples of 16"),
        ("prefill", dense(80, 4, 2, [9], [9], kv_dtype=FP8), "has heads of up to 128, in multiples of 32"),
        ("prefill", dense(128, 4, 2, [9], [9], head_dim_v=64), "has keys and values of one size"),
        (
            "decode",
            dense(64, 4, 2, [1], [9], kv_dtype=torch.float8_e5m2),
            "reads fp8 keys as e4m3, these are float8_e5m2",
        ),
    ],
)
def test_cute_dsl_of_flashinfer_says_what_it_does_not_serve(operator: str, problem: Problem, reason: str) -> None:
    assert column_of(operator, CUTE).objections(problem) == [reason]


@pytest.mark.parametrize("operator", ["decode", "prefill"])
def test_cute_dsl_of_flashinfer_is_for_some_gpus_and_versions(
    operator: str, flashinfer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, column = dense(64, 4, 2, [1], [9]), column_of(operator, CUTE)
    monkeypatch.setattr(targets, "detect", lambda: targets.from_arch("sm_90a"))
    assert column.objections(problem) == ["is for SM10x, this is SM90"]
    monkeypatch.setattr(targets, "detect", lambda: targets.from_arch("sm_103a"))
    assert not column.objections(problem)
    del flashinfer.BatchDecodePagedCuteDSLWrapper, flashinfer.BatchPrefillCuteDSLWrapper
    (reason,) = column.objections(problem)
    assert reason.startswith("this flashinfer.cute_dsl.attention has no Batch")


@dataclasses.dataclass
class FA4:
    """`flash_attn.cute.interface.flash_attn_varlen_func`; remembers the numbers of splits."""

    PARAMETERS: ClassVar = signature(
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
        "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
        "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
        "block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False"
    )
    splits: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, *args: Any, **named: Any) -> tuple[torch.Tensor, None]:
        one = bound(self.PARAMETERS, args, named)
        assert one.causal
        assert one.window_size[1] in (None, 0)
        assert (one.page_table is None) == (one.seqused_k is None) == (one.cu_seqlens_k is not None)
        self.splits.append(one.num_splits)
        if one.page_table is None:
            lens = one.cu_seqlens_k.diff().tolist()
            keys, values = one.k.split(lens), one.v.split(lens)
        else:
            lens = one.seqused_k.tolist()
            rows = list(zip(one.page_table, lens, strict=True))
            keys, values = (
                [of_pages(cache, pages[: -(-length // cache.shape[1])], length) for pages, length in rows]
                for cache in (one.k, one.v)
            )
        q_lens = one.cu_seqlens_q.diff().tolist()
        assert (one.max_seqlen_q, one.max_seqlen_k) == (max(q_lens), max(lens))
        requests = zip(one.q.split(q_lens), keys, values, strict=True)
        made = [attend(*request, one.softmax_scale, one.window_size[0]) for request in requests]
        return torch.cat(made).to(one.q.dtype), None


def test_the_stand_in_has_the_parameters_of_fa4() -> None:
    """Where the peers of the emulator are installed."""
    source = ROOT / ".peers" / "flash_attn" / "cute" / "interface.py"
    if not source.is_file():
        pytest.skip("flash-attn-4 is not there: `make peers` installs it")
    tree = ast.parse(source.read_text()).body
    (theirs,) = (one.args for one in tree if getattr(one, "name", "") == "flash_attn_varlen_func")
    assert not theirs.kwonlyargs
    assert [one.arg for one in theirs.args] == list(FA4.PARAMETERS.parameters)


@dataclasses.dataclass
class Homes:
    """Where FA4 may be."""

    folder: pathlib.Path
    copy: str
    package: str

    def place(self, home: str, text: str = "def flash_attn_varlen_func(q, qv=None): ...") -> None:
        """Writes a module; a folder without `__init__.py` is a package too."""
        inner = self.folder.joinpath(*home.split("."))
        inner.mkdir(parents=True)
        (inner / "interface.py").write_text(text)
        importlib.invalidate_caches()


@pytest.fixture
def homes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Homes:
    """An SM100 without FA4; modules of names that no other test imported."""
    unique = f"fa4_{abs(hash(request.node.name))}"
    found = Homes(tmp_path, f"copy_{unique}.fa.cute", f"package_{unique}.cute")
    monkeypatch.setattr(flash_attention_4, "COPY", found.copy)
    monkeypatch.setattr(flash_attention_4, "PACKAGE", found.package)
    monkeypatch.setattr(flash_attention_4, "HOMES", {found.copy: "torch", found.package: "triton"})
    monkeypatch.setattr(flash_attention_4, "needs_gpu", list)
    monkeypatch.setattr(targets, "detect", lambda: targets.from_arch("sm_100a"))
    monkeypatch.syspath_prepend(tmp_path)
    return found


FA4_COLUMNS = ("decode", "prefill", "mla-prefill", "mla-decode")
FEW = {
    "decode": dense(64, 4, 2, [1, 1], [9, 40]),
    "prefill": dense(64, 4, 2, [9, 20], [9, 40], window_left=6),
    "mla-prefill": packed(2, [9, 20]),
    "mla-decode": latent(4, [1], [9]),
}


@pytest.mark.parametrize("operator", FA4_COLUMNS)
def test_fa4_is_the_package_where_vllm_has_no_copy(operator: str, homes: Homes) -> None:
    column = column_of(operator, "FA4")
    assert column.objections(FEW[operator]) == ["flash-attn-4 is not installed, and vLLM has no copy of it here"]
    assert column.source == "flash-attn-4, not installed"
    homes.place(homes.package)
    assert not column.objections(FEW[operator])
    assert column.source == f"triton {metadata.version('triton')}, {homes.package}"


@pytest.mark.parametrize("operator", FA4_COLUMNS)
def test_vllms_copy_of_fa4_is_preferred(operator: str, homes: Homes) -> None:
    homes.place(homes.package)
    homes.place(homes.copy)
    assert flash_attention_4.home_of() == homes.copy
    assert column_of(operator, "FA4").source == f"torch {metadata.version('torch')}, {homes.copy}"


@pytest.mark.parametrize("operator", FA4_COLUMNS)
def test_a_copy_that_cannot_be_imported_is_passed_over(operator: str, homes: Homes) -> None:
    column = column_of(operator, "FA4")
    homes.place(homes.copy, "import no_such_dsl")
    (reason,) = column.objections(FEW[operator])
    assert "No module named 'no_such_dsl'" in reason
    homes.place(homes.package)
    assert not column.objections(FEW[operator])
    assert column.source.endswith(homes.package)


def test_a_copy_without_latents_serves_dense_keys_alone(homes: Homes) -> None:
    homes.place(homes.copy, "def flash_attn_varlen_func(q): ...")
    assert column_of("mla-decode", "FA4").objections(FEW["mla-decode"]) == [f"{homes.copy} has no latents"]
    homes.place(homes.package)
    assert (flash_attention_4.home_of(), flash_attention_4.home_of(latent=True)) == (homes.copy, homes.package)


@pytest.mark.parametrize("name", ["decode", "prefill", "window", "packed", "invariant"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_fa4_of_the_package(name: str, arch: str, homes: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It splits keys on Blackwell alone, and not in batch-invariant mode."""
    homes.place(homes.package)
    stand_in = FA4()
    monkeypatch.setattr(flash_attention_4, "function_of", lambda home: stand_in)
    monkeypatch.setattr(targets, "detect", lambda: targets.from_arch(arch))
    problems = {
        **{one: DENSE[one] for one in ("decode", "prefill", "window")},
        "packed": packed(2, [20, 1, 9]),
        "invariant": dense(64, 4, 2, [1, 1], [9, 40], batch_invariant=True),
    }
    operator = {"packed": "mla-prefill", "prefill": "prefill", "window": "prefill"}.get(name, "decode")
    require_right(operator, "FA4", problems[name])
    assert stand_in.splits == [0 if arch == "sm_100a" and name != "invariant" else 1]


@pytest.mark.parametrize(("operator", "served"), [("decode", False), ("prefill", False), ("mla-prefill", True)])
def test_the_package_reads_pages_on_some_gpus(
    operator: str, served: bool, homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes.place(homes.package)
    monkeypatch.setattr(targets, "detect", lambda: targets.from_arch("sm_120a"))
    reasons = column_of(operator, "FA4").objections(FEW[operator])
    assert reasons == ([] if served else ["reads pages on SM9x and SM10x and SM11x, this is SM120"])


@pytest.mark.parametrize("operator", ["decode", "mla-prefill"])
def test_vllms_copy_is_called_through_vllm(operator: str, homes: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    attention = SimpleNamespace(
        fa_version_unsupported_reason=lambda version: None,
        flash_attn_varlen_func=lambda fa_version, **_: asked.append(fa_version),
        get_scheduler_metadata=None,
    )
    strides = SimpleNamespace(canonicalize_singleton_dim_strides=lambda rows: rows)
    for name, module in {
        "": None,
        ".utils": None,
        ".utils.torch_utils": strides,
        ".vllm_flash_attn": attention,
    }.items():
        monkeypatch.setitem(sys.modules, f"vllm{name}", module or SimpleNamespace())
    monkeypatch.setattr(vllm_dense, "missing", lambda *_: [])
    monkeypatch.setattr(vllm_dense, "broken", lambda _: ())
    homes.place(homes.package)
    homes.place(homes.copy)
    column, benchmark = column_of(operator, "FA4"), benchmarks.operators()[operator]
    assert not column.objections(FEW[operator])
    column.prepare(FEW[operator], benchmark.build(FEW[operator], 1, torch.device("cpu"), 3)).run(0)
    assert asked == [4]
