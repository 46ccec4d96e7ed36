# SPDX-License-Identifier: Apache-2.0
"""The door of linear layers, their dispatch, their operators, and the kernels that run on any host."""

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.gemm.activation import SWIGLU_OAI, Geglu, Swiglu, decoded, encoded
from dsl_backend.gemm.configs import choose
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear import api, dispatch, eager, ops, precompile, reference
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime import model, workspace
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.workspace import CapturedFlags, CapturedWorkspace, Workspace, reset_all
from dsl_backend.testing.linear import ACTIVATIONS, BF16, CASES, F16, check_linear, random_case

needs_triton = pytest.mark.skipif(
    not (torch.cuda.is_available() or targets.triton_interpreted()),
    reason="no CUDA device, and TRITON_INTERPRET is off",
)
KERNELS = ["reference", pytest.param("triton", marks=needs_triton), pytest.param("cute", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, kernel: str, device: torch.device) -> None:
    case = CASES[name]
    if kernel == "cute" and (case.n % 8 or case.k % 8):
        pytest.skip("is for Triton")
    check_linear(case, kernel, str(device))


@pytest.mark.parametrize("kernel", KERNELS)
def test_fuzz(kernel: str, device: torch.device) -> None:
    for seed in range(40):
        check_linear(random_case(random.Random(seed), 150, aligned=kernel == "cute"), kernel, str(device))


def test_halves_and_turns_are_the_same_layer() -> None:
    x, weight = torch.randn(3, 16).to(BF16), torch.randn(12, 16).to(BF16)
    turned = torch.stack(weight.chunk(2), 1).reshape(12, 16)
    one = api.linear(x, weight, activation=Swiglu())
    assert torch.equal(one, api.linear(x, turned, activation=Swiglu(), interleaved=True))
    gate, up = (x.float() @ weight.float().T).chunk(2, -1)
    torch.testing.assert_close(one, (functional.silu(gate) * up).to(BF16))


def test_swiglu_oai_is_gpt_oss() -> None:
    x, weight = 5 * torch.randn(3, 16).to(BF16), torch.randn(12, 16).to(BF16)
    made = x.double() @ weight.double().T
    gate, up = made[:, ::2].clamp(max=7.0), made[:, 1::2].clamp(-7.0, 7.0)
    right = (up + 1) * gate * torch.sigmoid(gate * 1.702)
    found = api.linear(x, weight, activation=SWIGLU_OAI, interleaved=True)
    torch.testing.assert_close(found.double(), right, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("rows", "n"), [(0, 8), (3, 0), (0, 0)])
def test_nothing_to_do(rows: int, n: int) -> None:
    out = api.linear(torch.empty(rows, 8, dtype=BF16), torch.empty(2 * n, 8, dtype=BF16), activation=Swiglu())
    assert out.shape == (rows, n)


def test_single_rows_and_columns_of_any_stride() -> None:
    x, weight = torch.randn(6, 8).to(BF16), torch.randn(4, 8).to(BF16)
    right = functional.linear(x.float(), weight.float())
    row = x[:1].as_strided((1, 8), (3, 1))
    torch.testing.assert_close(api.linear(row, weight).float(), right[:1], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(
        api.linear(x[:, 3:4], weight[:, 3:4]).float(),
        x[:, 3:4].float() @ weight[:, 3:4].float().T,
        rtol=1e-2,
        atol=1e-2,
    )
    torch.testing.assert_close(api.linear(x, weight[:1]).float(), right[:, :1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "residual", "out"])
def test_kernels_get_the_strides_that_they_expect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every call of a layout, of which the first one looks at the strides; other tensors go as they are."""
    given = []
    monkeypatch.setattr(eager, "plan_for", lambda *_: SimpleNamespace(run=given.append))
    monkeypatch.setattr(eager, "_known", {})
    tensors = {key: torch.zeros(1, 8, dtype=BF16) for key in ("x", "residual", "out")}
    tensors |= {"weight": torch.zeros(8, 8, dtype=BF16), "bias": torch.zeros(8, dtype=BF16)}
    odd = dict(tensors)
    if name in ("weight", "bias"):  # of a layer with one column
        odd |= {"weight": torch.zeros(1, 8, dtype=BF16), "bias": torch.zeros(1, dtype=BF16)}
        odd |= {key: torch.zeros(1, 1, dtype=BF16) for key in ("residual", "out")}
        odd[name] = odd[name].as_strided(odd[name].shape, (3, 1) if name == "weight" else (5,))
    else:
        odd[name] = tensors[name].as_strided((1, 8), (3, 1))
    for called in (odd, odd, tensors, tensors):
        api.linear(**called)
    for operands, called in zip(given, (odd, odd, tensors, tensors), strict=True):
        for key, tensor in called.items():
            found = getattr(operands, key)
            assert found.data_ptr() == tensor.data_ptr()
            assert found.stride(-1) == 1
            assert found.dim() == 1 or len(found) > 1 or found.stride(0) == found.shape[1]
            assert called is odd or found is tensor


X, W = torch.zeros(2, 8, dtype=BF16), torch.zeros(6, 8, dtype=BF16)


@pytest.mark.parametrize(
    ("x", "weight", "options", "message"),
    [
        (X[0], W, {}, r"x has shape \(8,\): \[any, any\] is needed"),
        (X.float(), W, {}, "x is float32: one of float16, bfloat16 is needed"),
        (X[:, :0], W[:, :0], {}, "at least one column is needed"),
        (torch.zeros(8, 2, dtype=BF16).T, W, {}, "x has stride 2 in its last dimension: 1 is needed"),
        (X[:1].expand(2**31, 8), W, {}, "x has 2147483648 rows: 2147482624 are the most"),
        (X, W.half(), {}, "weight is float16 and x bfloat16: one dtype is needed"),
        (X, W[:, :4], {}, r"weight has shape \(6, 4\): \[any, 8\] is needed"),
        (X, W[:5], {"activation": Swiglu()}, "weight has 5 rows: gate and up need an even number"),
        (X, W, {"activation": "silu"}, r"activation is 'silu': Swiglu\(...\), Geglu\(...\) or None is needed"),
        (X, W, {"interleaved": True}, "interleaved is about gate and up rows: an activation is needed"),
        (X, W, {"bias": torch.zeros(3, dtype=BF16)}, r"bias has shape \(3,\): \[6\] is needed"),
        (X, W, {"residual": X}, r"residual has shape \(2, 8\): \[2, 6\] is needed"),
        (X, W, {"out": torch.zeros(3, 6, dtype=BF16)}, r"out has shape \(3, 6\): \[2, 6\] is needed"),
        (X, W, {"out": torch.zeros(1, 6, dtype=BF16).expand(2, 6)}, r"strides \(0, 1\): its rows overlap in memory"),
        (X, W.to("meta"), {}, "weight is on meta, x on cpu"),
        (X, W, {"spare_sms": 1}, "spare_sms is 1: cpu has 0, and 0 to 0 can be spared"),
        (X, W, {"spare_sms": 0.5}, "spare_sms is 0.5: an integer"),
        (X, W, {"spare_sms": [0]}, r"spare_sms is \[0\]: an integer"),
        (X, W, {"batch_invariant": "yes"}, "batch_invariant is 'yes': True or False is needed"),
        (X, W, {"interleaved": []}, r"interleaved is \[\]: True or False is needed"),
        (X, W, {"activation": [Swiglu()]}, r"activation is \[Swiglu\(.*\)\]: Swiglu\(...\), Geglu\(...\) or None"),
        (X, W, {"kernel": ["cute"]}, r"kernel is \['cute'\]: a name from the dispatch table or None is needed"),
        (X, W, {"kernel": "fast"}, "no kernel 'fast': choose one of"),
        (X, W.clone().requires_grad_(), {}, "weight requires a gradient, and there is no backward"),
        (X, [[1.0]], {}, "weight is a list: a tensor is needed"),
        (X.to_sparse(), W, {}, "x has layout sparse_coo: a dense tensor is needed"),
        (X, W.to_sparse(), {}, "weight has layout sparse_coo: a dense tensor is needed"),
        (None, W, {}, "x is None: a tensor is needed"),
        (X, W, {"bias": 1.0}, "bias is a float: a tensor is needed"),
        (X, W, {"residual": "x"}, "residual is 'x': a tensor is needed"),
        (X, W, {"out": [0.0]}, "out is a list: a tensor is needed"),
    ],
)
def test_what_is_refused(x: torch.Tensor, weight: torch.Tensor, options: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        api.linear(x, weight, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Swiglu(alpha=None), "Swiglu's alpha is None: a finite number is needed"),
        (lambda: Swiglu(beta="1"), "Swiglu's beta is '1': a finite number is needed"),
        (lambda: Swiglu(limit=float("inf")), "Swiglu's limit is inf: a finite number of at least 0 is needed"),
        (lambda: Swiglu(limit=-7), "Swiglu's limit is -7: a finite number of at least 0 is needed"),
        (lambda: Geglu(tanh="yes"), "Geglu's tanh is 'yes': True or False is needed"),
        (lambda: Dtypes.of("bf16"), "dtype of x is 'bf16': a torch.dtype is needed"),
    ],
)
def test_activations_refuse(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


@pytest.mark.parametrize(
    ("arch", "kernel"),
    [
        *((arch, "cute") for arch in ("sm_90a", "sm_100a", "sm_103a")),
        *((arch, "triton") for arch in ("sm_110a", "sm_120a", "sm_80")),
    ],
)
def test_who_serves(arch: str, kernel: str) -> None:
    spec = LinearSpec(n=14336, k=4096, dtypes=Dtypes.of(BF16), activation=Swiglu())
    assert dispatch.choose(spec, targets.from_arch(arch)).name == kernel


def test_rows_that_tma_cannot_read_go_to_triton() -> None:
    spec = LinearSpec(n=14336, k=4096, dtypes=Dtypes.of(BF16), vector=4)
    assert dispatch.choose(spec, targets.from_arch("sm_90a")).name == "triton"
    with pytest.raises(Unsupported, match=r"TMA needs rows that start at multiples of 8 elements.*here it is 4"):
        dispatch.choose(spec, targets.from_arch("sm_90a"), "cute")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_model_names_every_kernel_that_its_mlp_may_need(arch: str) -> None:
    config = {"num_attention_heads": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    target = targets.from_arch(arch)
    found = {one.key.config for one in precompile.precompile_specs(model.shape_of(config, tensor_parallel=2), target)}
    spec = LinearSpec(n=7168, k=4096, dtypes=Dtypes.of(BF16), activation=Swiglu())
    assert {choose(spec, rows, target) for rows in (1, 9, 20, 64, 100, 200, 1000, 8192)} <= found
    assert not list(precompile.precompile_specs(model.shape_of(config), targets.from_arch("sm_80")))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cute", "triton"])
def test_offsets_past_32_bits(kernel: str, device: torch.device) -> None:
    rows, k, n = 2**20 + 3, 2048 + 8, 64
    x = torch.randn(rows, k, dtype=BF16, device=device)
    weight = torch.randn(2 * n, k, device=device).mul(k**-0.5).to(BF16)
    wide = torch.randn(rows, k, dtype=BF16, device=device)
    residual, out = wide[:, :n], torch.empty_like(wide)[:, -n:]
    api.linear(x, weight, residual=residual, out=out, activation=Swiglu(), kernel=kernel)
    for chosen in (slice(0, 4), slice(rows // 2, rows // 2 + 4), slice(rows - 4, rows)):
        right = reference.exact(x[chosen], weight, residual=residual[chosen], activation=Swiglu())
        torch.testing.assert_close(out[chosen].double(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_batch_invariance(kernel: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 512, generator=generator).to(BF16).to(device) for rows in (300, 128))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return api.linear(x, weight, activation=Swiglu(), batch_invariant=True, kernel=kernel)

    whole = layer(x)
    for first, last in ((0, 1), (3, 12), (130, 195), (299, 300)):
        assert torch.equal(layer(x[first:last]), whole[first:last]), (first, last)


def test_batch_invariance_is_not_torch() -> None:
    with pytest.raises(Unsupported, match="reference: is not batch invariant: torch sums in an order"):
        api.linear(X, W, batch_invariant=True, kernel="reference")


def test_a_call_like_an_earlier_one_is_still_looked_at() -> None:
    """What is remembered of a layout says nothing of another one, nor of gradients."""
    x, weight = torch.randn(3, 8).to(BF16), torch.randn(6, 8).to(BF16)
    right = api.linear(x, weight)
    with pytest.raises(InvalidInput, match="weight requires a gradient"):
        api.linear(x, weight.clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(api.linear(x, weight.clone().requires_grad_()), right)
    with pytest.raises(InvalidInput, match="weight has stride 2"):
        api.linear(x, weight.repeat_interleave(2, 1)[:, ::2])
    with pytest.raises(InvalidInput, match="weight has 5 rows"):
        api.linear(x, weight[:5], activation=Swiglu())
    assert torch.equal(api.linear(x, weight[:5]), right[:, :5])


def test_layouts_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "LAYOUTS", 4)
    for rows in range(1, 20):
        x, weight = torch.ones(rows, 8, dtype=BF16), torch.ones(2, 8, dtype=BF16)
        assert api.linear(x, weight).tolist() == [[8.0, 8.0]] * rows
        assert len(eager._known) <= 4


def test_activations_that_are_none() -> None:
    with pytest.raises(InvalidInput, match="Swiglu's limit is nan: a finite number of at least 0 is needed"):
        Swiglu(limit=float("nan"))


def test_old_gpus_have_no_bfloat16() -> None:
    spec = LinearSpec(n=8, k=8, dtypes=Dtypes.of(BF16))
    with pytest.raises(Unsupported, match=r"bfloat16 needs compute capability 8\.0"):
        dispatch.choose(spec, targets.from_arch("sm_75"))
    assert dispatch.choose(replace(spec, dtypes=Dtypes.of(F16)), targets.from_arch("sm_75")).name == "triton"


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_operators_carry_activations(activation: object) -> None:
    assert decoded(*encoded(activation)) == activation


def test_torch_compile_sees_one_node() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fresh = api.linear(x + 1, weight, activation=SWIGLU_OAI)
        api.linear(x, weight, residual=out, out=out)
        return fresh, out

    x, weight = torch.randn(3, 8).to(BF16), torch.randn(6, 8).to(BF16)
    expected = function(x, weight, torch.ones(3, 6, dtype=BF16))
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(x, weight, torch.ones(3, 6, dtype=BF16))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_torch_compile_of_any_number_of_rows() -> None:
    """Nothing is asked of the rows while a graph is traced: vLLM can trace with a number that nobody knows."""
    x, weight = torch.randn(3, 8).to(BF16), torch.randn(6, 8).to(BF16)
    torch._dynamo.decorators.mark_unbacked(x, 0)

    def function(x: torch.Tensor) -> torch.Tensor:
        return ops.LINEAR(x, weight, None, None, *encoded(Swiglu()), False, False, 0, None)

    found = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, api.linear(x, weight, activation=Swiglu()))


class TestGraphs:
    """What is captured has scratch of its own, which runs before have made and zeroed."""

    def test_grows_with_what_runs(self) -> None:
        cpu = torch.device("cpu")
        flags = CapturedFlags(cpu)
        for _ in range(2):
            workspace = Workspace(cpu, flags)
            workspace.flags(7)
        one, two = (CapturedWorkspace(cpu, flags, row) for row in range(2))
        assert one.flags(7).tolist() == [0] * 7
        one.flags(7).fill_(1)
        assert two.flags(7).tolist() == [0] * 7, "streams of one graph run side by side"
        assert workspace.flags(7).tolist() == [0] * 7
        with pytest.raises(InvalidInput, match="before its first run: run it once with as many rows"):
            one.flags(8)

    def test_streams_that_are_captured_have_scratch_of_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda, handles = torch.device("cuda"), iter((70, 80, 70))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(workspace, "stream_handle", lambda device: next(handles))
        monkeypatch.setattr(workspace, "_captured", {})
        assert [workspace.current_stream(cuda) for _ in range(3)] == [-1, -2, -1]
        cpu = torch.device("cpu")
        workspaces = [workspace.workspace_of(cpu, stream) for stream in (1, 2, -1, -2)]
        workspaces[0].flags(5)
        assert len({workspace.flags(5).data_ptr() for workspace in workspaces}) == 4
        workspaces[2].flags(5).fill_(3)
        reset_all()
        assert not workspaces[2].flags(5).any(), "what memory held before a sleep is not what it holds after"
        with pytest.raises(InvalidInput, match="captured on 65 streams: 64 are the most"):
            workspace.workspace_of(cpu, -65).flags(5)

    def test_capture_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        workspace = Workspace(torch.device("cpu"))
        workspace.device = torch.device("cuda")
        with pytest.raises(InvalidInput, match="before its first run: run it once with as many rows"):
            workspace.flags(1)

    @pytest.mark.gpu
    def test_streams_of_one_graph(self, device: torch.device) -> None:
        """Layers that a graph runs side by side, as vLLM does with shared experts."""
        weight = torch.randn(2 * 4096, 1024, device=device).mul(1024**-0.5).to(BF16)
        inputs = [torch.randn(8, 1024, device=device).to(BF16) for _ in range(2)]
        right = [api.linear(x, weight, activation=Swiglu()).clone() for x in inputs]
        graph, other, found = torch.cuda.CUDAGraph(), torch.cuda.Stream(), [None, None]
        with torch.cuda.graph(graph):
            other.wait_stream(torch.cuda.current_stream())
            for _ in range(20):
                with torch.cuda.stream(other):
                    found[1] = api.linear(inputs[1], weight, activation=Swiglu())
                found[0] = api.linear(inputs[0], weight, activation=Swiglu())
            torch.cuda.current_stream().wait_stream(other)
        for _ in range(20):
            graph.replay()
            for out, expected in zip(found, right, strict=True):
                assert torch.equal(out, expected)

    @pytest.mark.gpu
    @pytest.mark.parametrize("kernel", ["cute", "triton"])
    def test_replayed_in_another_order(self, kernel: str, device: torch.device) -> None:
        """The last one that was captured is replayed first, each on a stream that nothing ran on before."""
        weight = torch.randn(2 * 512, 1024, device=device).mul(1024**-0.5).to(BF16)
        captured = []
        for rows in (256, 64, 16, 1):
            x = torch.randn(rows, 1024, device=device).to(BF16)
            right = api.linear(x, weight, activation=Swiglu(), kernel=kernel).clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                out = api.linear(x, weight, activation=Swiglu(), kernel=kernel)
            # Graphs read x again.
            captured.append((graph, x, out, right))
        for _ in range(2):
            for graph, _, out, right in reversed(captured):
                out.fill_(torch.nan)
                graph.replay()
                assert torch.equal(out, right)
