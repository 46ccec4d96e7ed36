# SPDX-License-Identifier: Apache-2.0
"""The API of softmax, its dispatch, its operators, and the kernels that run on any host."""

import pytest
import torch

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.runtime import target as targets
from dsl_backend.softmax import api, dispatch
from dsl_backend.softmax.spec import SoftmaxSpec
from dsl_backend.testing.softmax import BF16, CASES, F16, F32, WIDE, SoftmaxCase, check_softmax, random_case

needs_triton = pytest.mark.skipif(
    not (torch.cuda.is_available() or targets.triton_interpreted()),
    reason="no CUDA device, and TRITON_INTERPRET is off",
)
KERNELS = ["reference", pytest.param("triton", marks=needs_triton), pytest.param("cute", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in (*CASES, *WIDE)])
def test_case(case: SoftmaxCase, kernel: str, device: torch.device) -> None:
    check_softmax(case, kernel, device)


@pytest.mark.parametrize("kernel", KERNELS)
def test_fuzz(kernel: str, device: torch.device) -> None:
    for seed in range(200):
        check_softmax(random_case(seed), kernel, device)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("log", [False, True])
def test_rows_without_a_softmax_are_as_torch_has_them(kernel: str, log: bool, device: torch.device) -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[1.0, nan, 2.0], [inf, 1.0, 2.0], [-inf] * 3, [-inf, 0.0, -inf], [inf] * 3], device=device)
    expected = (torch.log_softmax if log else torch.softmax)(x, -1)
    torch.testing.assert_close(api.softmax(x, log=log, kernel=kernel), expected, equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.gpu
def test_offsets_past_32_bits(device: torch.device) -> None:
    rows, width = 2**16 + 3, 2**15 + 8
    x = torch.randn(rows, width, dtype=BF16, device=device)
    for kernel in ("cute", "triton"):
        out = api.softmax(x, kernel=kernel)
        for chosen in (slice(0, 4), slice(rows // 2, rows // 2 + 4), slice(rows - 4, rows)):
            torch.testing.assert_close(out[chosen].float(), x[chosen].float().softmax(-1), rtol=1e-2, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(2000, 4096), (600, 32768), (3, 128256)])
def test_launches_wait_for_each_other(rows: int, width: int, device: torch.device) -> None:
    """Programmatic dependent launch: CTAs start before the previous kernel ends, and use the same tensors."""
    start = torch.randn(rows, width, dtype=BF16, device=device)
    x, between = torch.empty_like(start), torch.empty_like(start)

    def chain(wait: bool) -> None:
        for source, out, log in ((x, between, False), (between, between, True), (between, x, False)):
            api.softmax(source, out, log=log, kernel="cute")
            if wait:
                torch.cuda.synchronize()

    x.copy_(start)
    chain(wait=True)
    expected = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(wait=False)
    for _ in range(20):
        x.copy_(start)
        between.fill_(torch.nan)
        graph.replay()
        assert torch.equal(x, expected)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_do(shape: tuple[int, int]) -> None:
    assert api.softmax(torch.empty(shape)).shape == shape


def test_in_place() -> None:
    x = torch.randn(3, 40)
    expected = x.softmax(-1)
    assert api.softmax(x, x) is x
    torch.testing.assert_close(x, expected)


def test_single_columns_and_rows_of_any_stride() -> None:
    x = torch.randn(6, 8)
    torch.testing.assert_close(api.softmax(x[:, 3:4]), torch.ones(6, 1))
    row = x.as_strided((1, 8), (3, 1))
    torch.testing.assert_close(api.softmax(row), row.softmax(-1))
    torch.testing.assert_close(api.softmax(x[:1].expand(4, 8)), x[:1].expand(4, 8).softmax(-1))


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(3), {}, r"x has shape \(3,\): \[rows, width\] is needed"),
        (torch.zeros(2, 3, dtype=torch.float64), {}, "x is float64: one of float32, float16, bfloat16 is needed"),
        (torch.zeros(3, 2).T, {}, "x has stride 2 in its last dimension: 1 is needed"),
        (torch.zeros(2, 3), {"out": torch.zeros(3, 3)}, r"out has shape \(3, 3\): x's \(2, 3\) is needed"),
        (torch.zeros(2, 3), {"out": torch.zeros(1, 3).expand(2, 3)}, r"strides \(0, 1\): its rows overlap in memory"),
        (torch.zeros(2, 3), {"out": torch.zeros(2, 3), "out_dtype": F16}, "out is float32 and out_dtype torch.float16"),
        (torch.zeros(2, 3), {"out": torch.zeros(2, 3, device="meta")}, "out is on meta, x on cpu"),
        (torch.zeros(2, 3), {"out_dtype": torch.int32}, "out_dtype is int32: one of float32"),
        (torch.zeros(2, 3), {"out_dtype": "float16"}, "out_dtype is 'float16': a torch.dtype is needed"),
        (torch.zeros(2, 3), {"log": 1}, "log is 1: True or False is needed"),
        (torch.zeros(2, 3), {"kernel": ["cute"]}, r"kernel is \['cute'\]: a name from the dispatch table or None"),
        (torch.zeros(2, 3), {"out": [[0.0] * 3] * 2}, "out is a list: a tensor is needed"),
        (torch.zeros(2, 3), {"out": torch.zeros(9).as_strided((2, 3), (2, 1))}, "its rows overlap in memory"),
        (torch.zeros(2, 3), {"out": torch.zeros(2, 3, requires_grad=True)}, "out requires a gradient"),
        (None, {}, "x is None: a tensor is needed"),
        ("logits", {}, "x is 'logits': a tensor is needed"),
        (torch.zeros(2, 3), {"kernel": "fast"}, "no kernel 'fast': choose one of cute, triton, reference"),
        (torch.zeros(2, 3, requires_grad=True), {}, "requires a gradient, and there is no backward"),
        ([[1.0]], {}, "x is a list: a tensor is needed"),
    ],
)
def test_what_is_refused(x: torch.Tensor, options: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        api.softmax(x, **options)


def test_a_kernel_by_name_does_not_fall_back() -> None:
    if torch.cuda.is_available():
        pytest.skip("is about a CPU")
    with pytest.raises(
        Unsupported, match="softmax one-pass sm90/sm100, softmax two-pass sm90/sm100: serves GPUs of sm_90a"
    ):
        api.softmax(torch.zeros(2, 3), kernel="cute")


@pytest.mark.parametrize(
    ("arch", "kernel"),
    [
        *((arch, "cute") for arch in ("sm_90a", "sm_100a", "sm_103a")),
        *((arch, "triton") for arch in ("sm_110a", "sm_120a", "sm_80")),
    ],
)
def test_which_kernel_serves(arch: str, kernel: str) -> None:
    spec = SoftmaxSpec(width=151936, dtype=BF16, out_dtype=F32, vector=8)
    assert dispatch.choose(spec, targets.from_arch(arch)).name == kernel


@pytest.mark.parametrize(("width", "title"), [(151936, "softmax one-pass"), (600_000, "softmax two-pass")])
def test_rows_wider_than_a_cluster_are_read_twice(width: int, title: str) -> None:
    spec = SoftmaxSpec(width=width, dtype=BF16, out_dtype=BF16, vector=8)
    target = targets.from_arch("sm_90a")
    serving = [entry.title for entry in dispatch.TABLE if entry.name == "cute" and not entry.objections(spec, target)]
    assert serving == [f"{title} sm90/sm100"]


def test_old_gpus_have_no_bfloat16() -> None:
    spec = SoftmaxSpec(width=8, dtype=BF16, out_dtype=BF16)
    with pytest.raises(Unsupported, match=r"bfloat16 needs compute capability 8\.0"):
        dispatch.choose(spec, targets.from_arch("sm_75"))


def test_torch_compile_sees_one_node() -> None:
    def function(x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return api.softmax(x + 1, out_dtype=BF16), api.softmax(x, out, log=True)

    x = torch.randn(3, 5)
    fresh, written = torch.compile(function, backend="aot_eager", fullgraph=True)(x, torch.empty(3, 5))
    torch.testing.assert_close(fresh, x.softmax(-1).to(BF16))
    torch.testing.assert_close(written, x.log_softmax(-1))
