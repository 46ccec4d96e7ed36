# SPDX-License-Identifier: Apache-2.0
"""The API of RMSNorm, its dispatch, its operator, and the kernels that run on any host."""

import pytest
import torch

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.norm import api, dispatch, launch, reference
from dsl_backend.norm.spec import FP8, MIN_SCALE, NormSpec, Scaling
from dsl_backend.runtime import target as targets
from dsl_backend.testing import norm, numerics
from dsl_backend.testing.norm import BF16, CASES, F16, F32, WIDE, NormCase, check_norm, random_case

needs_triton = pytest.mark.skipif(
    not (torch.cuda.is_available() or targets.triton_interpreted()),
    reason="no CUDA device, and TRITON_INTERPRET is off",
)
KERNELS = ["reference", pytest.param("triton", marks=needs_triton), pytest.param("cute", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in (*CASES, *WIDE)])
def test_case(case: NormCase, kernel: str, device: torch.device) -> None:
    check_norm(case, kernel, device)


@pytest.mark.parametrize("kernel", KERNELS)
def test_fuzz(kernel: str, device: torch.device) -> None:
    for seed in range(60):
        check_norm(random_case(seed), kernel, device)


def test_is_torchs_norm() -> None:
    x, weight = torch.randn(3, 40), torch.randn(40)
    expected = torch.nn.functional.rms_norm(x, (40,), weight, 1e-5)
    torch.testing.assert_close(api.rms_norm(x, weight, eps=1e-5), expected)
    torch.testing.assert_close(
        api.rms_norm(x, weight, weight_offset=1.0), torch.nn.functional.rms_norm(x, (40,), 1 + weight, 1e-6)
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_is_an_addition_and_a_norm(kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit: what is normalised is the sum that is stored."""
    x, residual = (torch.randn(6, 320, dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(320, dtype=dtype, device=device)
    added = x + residual
    expected = api.rms_norm(added, weight, kernel=kernel)
    out = api.rms_norm(x, weight, x, residual=residual, kernel=kernel)
    assert out is x
    assert torch.equal(out, api.rms_norm(residual, weight, kernel=kernel))
    if not (dtype == BF16 and norm.truncates(kernel, device)):
        assert torch.equal(residual, added)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_has_the_same_bits_in_every_batch(kernel: str, device: torch.device) -> None:
    x, weight = torch.randn(9, 320, device=device), torch.randn(320, device=device)
    together = api.rms_norm(x, weight, kernel=kernel)
    for row in range(9):
        assert torch.equal(api.rms_norm(x[row : row + 1], weight, kernel=kernel)[0], together[row])


@pytest.mark.parametrize("kernel", KERNELS)
def test_scales(kernel: str, device: torch.device) -> None:
    """The largest element of a row becomes 448; a row of zeros has a scale; a shape [rows, 1] is vLLM's."""
    x = torch.tensor([[1.0, -4.0, 2.0, 0.0], [0.0] * 4], device=device)
    scales = torch.empty(2, 1, device=device)
    out = api.rms_norm(x, out_dtype=FP8, scale_out=scales, kernel=kernel)
    assert out.float().tolist() == [[112.0, -448.0, 224.0, 0.0], [0.0] * 4]
    assert scales[1].item() == pytest.approx(MIN_SCALE, rel=1e-7)
    assert scales[0].item() == pytest.approx(4 / (21 / 4 + 1e-6) ** 0.5 / 448, rel=1e-6)
    out = api.rms_norm(x, out_dtype=FP8, scale=torch.tensor(2e-3, device=device), kernel=kernel)
    assert out.float()[0].tolist() == [224.0, -448.0, 448.0, 0.0], "saturated"


@pytest.mark.gpu
def test_offsets_past_32_bits(device: torch.device) -> None:
    rows, width = 2**16 + 3, 2**15 + 8
    x = torch.randn(rows, width, dtype=BF16, device=device)
    for kernel in ("cute", "triton"):
        out = api.rms_norm(x, kernel=kernel)
        for chosen in (slice(0, 4), slice(rows // 2, rows // 2 + 4), slice(rows - 4, rows)):
            expected = torch.nn.functional.rms_norm(x[chosen].float(), (width,), None, 1e-6)
            torch.testing.assert_close(out[chosen].float(), expected, rtol=1e-2, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(2000, 4096), (600, 32768), (3, 131072)])
def test_launches_wait_for_each_other(rows: int, width: int, device: torch.device) -> None:
    """Programmatic dependent launch: CTAs start before the previous kernel ends, and use the same tensors."""
    start = torch.randn(rows, width, dtype=BF16, device=device)
    weight = torch.rand(width, dtype=BF16, device=device) + 0.5
    x, residual = torch.empty_like(start), torch.empty_like(start)

    def chain(wait: bool) -> None:
        for _ in range(4):
            api.rms_norm(x, weight, x, residual=residual, kernel="cute")
            if wait:
                torch.cuda.synchronize()

    def reset() -> None:
        x.copy_(start)
        residual.copy_(start.flip(0))

    reset()
    chain(wait=True)
    expected = x.clone(), residual.clone()
    graph = torch.cuda.CUDAGraph()
    reset()
    with torch.cuda.graph(graph):
        chain(wait=False)
    for _ in range(20):
        reset()
        graph.replay()
        assert torch.equal(x, expected[0])
        assert torch.equal(residual, expected[1])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_do(shape: tuple[int, int]) -> None:
    x = torch.empty(shape)
    assert api.rms_norm(x, residual=torch.empty(shape)).shape == shape


def test_single_columns_and_rows_of_any_stride() -> None:
    x = torch.randn(6, 8)
    torch.testing.assert_close(api.rms_norm(x[:, 3:4], eps=0.0).abs(), torch.ones(6, 1))
    row = x.as_strided((1, 8), (3, 1))
    torch.testing.assert_close(api.rms_norm(row), torch.nn.functional.rms_norm(row, (8,), None, 1e-6))


X, W = torch.zeros(2, 3), torch.zeros(3)
WIDE_X = torch.zeros(2, 256)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(3), {}, r"x has shape \(3,\): \[rows, width\] is needed"),
        (torch.zeros(2, 3, dtype=torch.float64), {}, "x is float64: one of float32, float16, bfloat16 is needed"),
        (torch.zeros(3, 2).T, {}, "x has stride 2 in its last dimension: 1 is needed"),
        (torch.zeros(2, 3, requires_grad=True), {}, "requires a gradient, and there is no backward"),
        ([[1.0]], {}, "x is a list: a tensor is needed"),
        (X, {"weight": torch.zeros(4)}, r"weight has shape \(4,\): width 3 is needed"),
        (X, {"weight": torch.zeros(1, 3)}, r"weight has shape \(1, 3\): width 3 is needed"),
        (X, {"weight": torch.zeros(6)[::2]}, r"weight has strides \(2,\): contiguous elements are needed"),
        (X, {"weight": torch.zeros(3, dtype=torch.int32)}, "weight is int32: one of float32"),
        (X, {"weight": torch.zeros(3, device="meta")}, "weight is on meta, x on cpu"),
        (X, {"weight_offset": 1.0}, "weight_offset is 1 and there is no weight: 0 is needed"),
        (X, {"weight": W, "weight_offset": torch.nan}, "weight_offset is nan: a finite number is needed"),
        (X, {"eps": -1e-6}, "eps is -1e-06: a finite number of at least 0 is needed"),
        (X, {"eps": None}, "eps is None: a finite number"),
        (X, {"out": torch.zeros(3, 3)}, r"out has shape \(3, 3\): x's \(2, 3\) is needed"),
        (X, {"out": torch.zeros(1, 3).expand(2, 3)}, r"strides \(0, 1\): its rows overlap in memory"),
        (X, {"out": torch.zeros(2, 3), "out_dtype": F16}, "out is float32 and out_dtype torch.float16"),
        (X, {"out": [[0.0]]}, "out is a list: a tensor is needed"),
        (X, {"out_dtype": torch.int8}, "out_dtype is int8: one of float32, float16, bfloat16, float8_e4m3fn"),
        (X, {"residual": torch.zeros(2, 3, dtype=F16)}, "residual is float16: one of float32 is needed"),
        (X, {"residual": torch.zeros(3, 3)}, r"residual has shape \(3, 3\): x's \(2, 3\) is needed"),
        (X, {"residual": torch.zeros(1, 3).expand(2, 3)}, "residual_out has shape .* its rows overlap in memory"),
        (X, {"residual_out": torch.zeros(2, 3)}, "residual_out is given without a residual"),
        (X, {"residual": torch.zeros(2, 3), "residual_out": X, "out": X}, "residual_out and out are the same memory"),
        (X, {"out_dtype": FP8}, "out is float8_e4m3fn: either scale, one for all rows, or scale_out"),
        (X, {"out_dtype": FP8, "scale": torch.ones(1), "scale_out": torch.ones(2)}, "either scale, one for all rows"),
        (X, {"scale": torch.ones(1)}, "scale is given and out is float32: float8_e4m3fn is needed"),
        (X, {"out_dtype": FP8, "scale": 0.5}, "scale is a float: a tensor is needed"),
        (X, {"out_dtype": FP8, "scale": torch.ones(2)}, r"scale has shape \(2,\): element 1 is needed"),
        (X, {"out_dtype": FP8, "scale_out": torch.ones(3)}, r"scale_out has shape \(3,\): rows 2 is needed"),
        (X, {"out_dtype": FP8, "scale_out": torch.ones(2, dtype=F16)}, "scale_out is float16: one of float32"),
        (
            X,
            {"out_dtype": FP8, "scale_out": torch.ones(2, 2)},
            r"scale_out has shape \(2, 2\): rows 2, or for each 128",
        ),
        (WIDE_X, {"out_dtype": FP8, "scale_out": torch.ones(2, 3)}, r"of 256 columns \[2, 2\], is needed"),
        (
            WIDE_X,
            {"out_dtype": FP8, "scale_out": torch.ones(2, 2, dtype=F16)},
            "scale_out is float16: float32 is needed",
        ),
        (WIDE_X, {"out_dtype": FP8, "scale_out": torch.ones(1, 2).expand(2, 2)}, "scale_out"),
        (WIDE_X, {"scale_out": torch.ones(2, 2)}, "scale_out is given and out is float32: float8_e4m3fn is needed"),
        (X, {"kernel": ["cute"]}, r"kernel is \['cute'\]: a name from the dispatch table or None"),
        (X, {"kernel": "fast"}, "no kernel 'fast': choose one of cute, triton, reference"),
    ],
)
def test_what_is_refused(x: torch.Tensor, options: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        api.rms_norm(x, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 0}, "width 0 is not from 1 to"),
        ({"dtype": torch.int8}, "dtype is int8: one of float32, float16, bfloat16 is needed"),
        ({"out_dtype": FP8}, "out_dtype is float8_e4m3fn with scaling none: outputs in float8_e4m3fn have a scale"),
        ({"scaling": Scaling.TOKEN}, "out_dtype is float32 with scaling token"),
        ({"scaling": Scaling.GROUP, "out_dtype": FP8}, "with scales of 128 columns: a multiple of 128 is needed"),
        ({"weight_offset": 1.0}, "weight_offset is 1 and there is no weight"),
        ({"vector": 3}, "vector 3 is not 1, 2, 4 or 8"),
    ],
)
def test_specs_that_are_none(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        NormSpec(**{"width": 8, "dtype": F32, "out_dtype": F32, **fields})


def test_a_layout_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout of another shape, stride, address or offset is another, and gets a kernel of its own."""
    vectors: list[int] = []
    choose = dispatch.choose
    monkeypatch.setattr(launch, "_known", {})
    monkeypatch.setattr(dispatch, "choose", lambda spec, *rest: (vectors.append(spec.vector), choose(spec, *rest))[1])
    memory = torch.zeros(64)
    whole, half = (
        memory[start : start + 16] for start in (-memory.data_ptr() // 4 % 8, -memory.data_ptr() // 4 % 8 + 4)
    )
    x = torch.randn(3, 16, dtype=BF16)
    for weight in (whole, half):
        for _ in range(2):
            torch.testing.assert_close(api.rms_norm(x, weight), torch.zeros_like(x))
    assert vectors == [8, 4], "8 float32 are 32 bytes"
    for given, offset in ((x[:2], 0.0), (x[::2], 0.0), (x, 1.0)):
        api.rms_norm(given, whole, weight_offset=offset)
    assert len(vectors) == 5
    with pytest.raises(InvalidInput, match="x requires a gradient"):
        api.rms_norm(x.clone().requires_grad_(), whole)
    monkeypatch.setattr(launch, "LAYOUTS", 2)
    for rows in range(1, 4):
        api.rms_norm(x[:rows], half)
    assert len(launch._known) <= 2


def test_a_kernel_by_name_does_not_fall_back() -> None:
    if torch.cuda.is_available():
        pytest.skip("is about a CPU")
    with pytest.raises(Unsupported, match="norm one-pass sm90/sm100: serves GPUs of sm_90a"):
        api.rms_norm(X, kernel="cute")


@pytest.mark.parametrize(
    ("arch", "kernel"),
    [
        *((arch, "cute") for arch in ("sm_90a", "sm_100a", "sm_103a")),
        *((arch, "triton") for arch in ("sm_110a", "sm_120a", "sm_80")),
    ],
)
def test_which_kernel_serves(arch: str, kernel: str) -> None:
    spec = NormSpec(width=4096, dtype=BF16, out_dtype=FP8, weight_dtype=BF16, scaling=Scaling.TOKEN, vector=8)
    assert dispatch.choose(spec, targets.from_arch(arch)).name == kernel


def test_rows_wider_than_a_cluster_go_to_triton() -> None:
    spec = NormSpec(width=600_000, dtype=BF16, out_dtype=BF16, weight_dtype=BF16, residual=True, vector=8)
    target = targets.from_arch("sm_90a")
    assert dispatch.cute(spec, target) == ["rows of 600000 elements do not fit the registers of a cluster"]
    assert dispatch.choose(spec, target).name == "triton"


def test_old_gpus_have_no_bfloat16() -> None:
    spec = NormSpec(width=8, dtype=F16, out_dtype=F16, weight_dtype=BF16)
    with pytest.raises(Unsupported, match=r"bfloat16 needs compute capability 8\.0"):
        dispatch.choose(spec, targets.from_arch("sm_75"))


def test_torch_compile_sees_one_node() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = torch.empty(3)
        quantized = api.rms_norm(x + 1, weight, residual=residual, out_dtype=FP8, scale_out=scales)
        return quantized.float() * scales.unsqueeze(1), api.rms_norm(x, weight, out_dtype=BF16)

    x, weight, residual = torch.randn(3, 16), torch.randn(16), torch.randn(3, 16)
    stored = residual.clone()
    found, plain = torch.compile(function, backend="aot_eager", fullgraph=True)(x, weight, stored)
    torch.testing.assert_close(stored, x + 1 + residual)
    expected = torch.nn.functional.rms_norm(x + 1 + residual, (16,), weight, 1e-6)
    torch.testing.assert_close(found, expected, rtol=0.07, atol=1e-2)
    torch.testing.assert_close(plain, torch.nn.functional.rms_norm(x, (16,), weight, 1e-6).to(BF16))


class TestTheJudge:
    """What a wrong kernel would write is found."""

    CASE = NormCase(id="judged", rows=4, width=264, residual=True, why="")

    def judged(self, change: object, case: NormCase = CASE) -> None:
        before, after = norm.tensors(case), norm.tensors(case)
        reference.rms_norm(after, norm.EPS, norm.spec_of(case, after), targets.detect(torch.device("cpu")))
        norm.judge(case, before, after)
        change(after)  # type: ignore[operator]
        norm.judge(case, before, after)

    def test_a_rounding_on_the_way(self) -> None:
        """The factor times z, rounded to 16 bits before the weight, as some kernels have it."""
        case = self.CASE
        spec = norm.spec_of(case, norm.tensors(case))

        def twice(after: norm.NormTensors) -> None:
            weight = after.weight
            bare = reference.exact(norm.tensors(case)._replace(weight=torch.ones_like(weight)), spec, norm.EPS, F32)
            after.out.copy_(bare.values.to(BF16) * weight)

        with pytest.raises(AssertionError, match="further from the oracle than the budget"):
            self.judged(twice)

    @pytest.mark.parametrize("scaling", [Scaling.TENSOR, Scaling.TOKEN])
    def test_a_step_of_e4m3(self, scaling: Scaling) -> None:
        case = NormCase(id="judged", rows=4, width=264, scaling=scaling, why="")

        def next_one(after: norm.NormTensors) -> None:
            after.out.view(torch.uint8)[2, 100] ^= 1

        with pytest.raises(AssertionError, match="further from the oracle than the budget, in rows 2"):
            self.judged(next_one, case)

    def test_a_scale(self) -> None:
        case = NormCase(id="judged", rows=4, width=264, scaling=Scaling.TOKEN, why="")
        with pytest.raises(AssertionError, match="scale_out"):
            self.judged(lambda after: after.scale_out.mul_(1 + 2e-6), case)

    def test_a_sum(self) -> None:
        with pytest.raises(AssertionError, match=r"residual_out differs first at \[1, 5\]"):
            self.judged(lambda after: after.residual_out[1, 5].add_(0.0625))

    def test_a_write_beside_the_output(self) -> None:
        case = NormCase(id="judged", rows=4, width=264, pad_out=8, why="")
        with pytest.raises(AssertionError, match="out was written where it is no output"):
            self.judged(lambda after: after.out._base[264].fill_(0.0), case)
        with pytest.raises(AssertionError, match="x was written"):
            self.judged(lambda after: after.x[0, 0].fill_(0.0), case)


def test_one_more_rounding_is_found() -> None:
    exact = torch.rand(4, 100, dtype=torch.float64) + 1
    numerics.assert_rounded_once(exact.float().to(BF16), exact, exact.float(), what="once")
    with pytest.raises(AssertionError, match="further from the oracle"):
        numerics.assert_rounded_once(exact.to(F16).to(BF16), exact, exact.float(), what="twice")
