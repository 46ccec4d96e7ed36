# SPDX-License-Identifier: Apache-2.0
"""A fixed handful of the fuzzer's problems; `dsl-backend verify --problems` runs as many as one likes."""

import pytest
import torch

from dsl_backend.attention import dispatch
from dsl_backend.attention.rope_spec import RopeStyle
from dsl_backend.experts.spec import RouterWeights
from dsl_backend.gemm.activation import Activation, Geglu, Swiglu
from dsl_backend.norm.configs import NormConfig
from dsl_backend.norm.spec import Scaling
from dsl_backend.quant.format import ScaledFormat
from dsl_backend.quant.weight_only import WeightOnlyFormat
from dsl_backend.runtime import target as targets
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.spec import LogprobsMode
from dsl_backend.sampling.verification_spec import Known
from dsl_backend.softmax.configs import SoftmaxConfig
from dsl_backend.testing import fuzz
from dsl_backend.testing.cases import FULL, Case
from dsl_backend.testing.experts import ExpertsCase
from dsl_backend.testing.inputs import Layout, Surroundings
from dsl_backend.testing.kv_writes import WriteCase
from dsl_backend.testing.linear import LinearCase
from dsl_backend.testing.mla_rope_writes import MLARopeCase
from dsl_backend.testing.norm import NormCase
from dsl_backend.testing.rope_writes import RopeCase
from dsl_backend.testing.sampling import SamplingCase
from dsl_backend.testing.scaled import ScaledCase
from dsl_backend.testing.softmax import SoftmaxCase
from dsl_backend.testing.verification import VerificationCase
from dsl_backend.testing.weight_only import WeightOnlyCase

ON_GPU = torch.cuda.is_available()
SIZES = fuzz.REAL if ON_GPU else fuzz.TINY
PROBLEMS = 40 if ON_GPU else 10
SPECS = 10
# Families of weights that no kernel of Triton's takes.
NOT_TRITONS = ("weight_only_linear", "block_scaled_experts", "weight_only_experts")


@pytest.mark.skipif(not (ON_GPU or targets.triton_interpreted()), reason="no CUDA device, and TRITON_INTERPRET is off")
@pytest.mark.parametrize("index", range(PROBLEMS))
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.rest if name == "scaled_experts" else ())
        for name in fuzz.FAMILIES
        if name not in NOT_TRITONS
    ],
)
def test_problem(family: str, index: int, device: torch.device) -> None:
    case = fuzz.problem(family, seed=1, index=index, sizes=SIZES, specs=SPECS)
    if isinstance(case, ExpertsCase) and case.shared:
        pytest.skip("Triton has no kernel of shared experts")
    try:
        fuzz.check(case, "triton", device.type)
    except AssertionError as error:
        raise AssertionError(f"{error}\n  {fuzz.source(case)}") from None


@pytest.mark.parametrize("family", ["decode", "prefill", "mla", "write_kv"])
def test_problems_are_served(family: str) -> None:
    """Every problem is one that the kernels claim to serve, on the oldest chip that has bfloat16 too."""
    for sizes in (fuzz.TINY, fuzz.REAL):
        for case in fuzz.problems(family, 200, 3, sizes, 48):
            operations = dispatch.operations_of(case.spec)
            if isinstance(case, WriteCase):
                operations = (dispatch.Operation.WRITE_KV,)
            for operation in operations:
                dispatch.choose(operation, case.spec, targets.from_arch("sm_80"), "triton")
            if isinstance(case, Case):
                scores = [case.heads[0] * q * kv for q, kv in zip(case.q_lens, case.kv_lens, strict=True)]
                assert max(scores, default=0) <= sizes.scores, fuzz.source(case)


@pytest.mark.parametrize("family", fuzz.FAMILIES)
def test_problems_follow_from_the_seed(family: str) -> None:
    def some(seed: int, specs: int) -> list[str]:
        return [fuzz.source(case) for case in fuzz.problems(family, 12, seed, fuzz.TINY, specs)]

    assert some(5, 4) == some(5, 4)
    assert some(5, 4) != some(6, 4)
    assert len(set(some(5, 4))) == 12, "problems of a layer differ"


@pytest.mark.parametrize("family", ["decode", "prefill", "mla"])
def test_specs_bound_the_compilations(family: str) -> None:
    cases = [case for case in fuzz.problems(family, 60, 2, fuzz.REAL, 6) if isinstance(case, Case)]
    assert len({case.spec for case in cases}) <= 6


def test_source_rebuilds_a_case() -> None:
    names = {"Case": Case, "WriteCase": WriteCase, "Surroundings": Surroundings, "Layout": Layout, "torch": torch}
    names |= {"Causality": type(FULL), "LinearCase": LinearCase, "Swiglu": Swiglu, "Geglu": Geglu}
    names |= {"RopeCase": RopeCase, "MLARopeCase": MLARopeCase, "RopeStyle": RopeStyle, "ScaledCase": ScaledCase}
    names |= {"WeightOnlyCase": WeightOnlyCase, "WeightOnlyFormat": WeightOnlyFormat}
    names |= {"SoftmaxCase": SoftmaxCase, "SoftmaxConfig": SoftmaxConfig}
    names |= {"NormCase": NormCase, "NormConfig": NormConfig, "Scaling": Scaling}
    names |= {"VerificationCase": VerificationCase, "Known": Known}
    names |= {
        "SamplingCase": SamplingCase,
        "LogprobsMode": LogprobsMode,
        "ClusterConfig": ClusterConfig,
        "ExpertsCase": ExpertsCase,
    }
    names |= {"RouterWeights": RouterWeights, "Activation": Activation, "ScaledFormat": ScaledFormat}
    for family in fuzz.FAMILIES:
        for case in fuzz.problems(family, 30, 4, fuzz.TINY, 30):
            assert eval(fuzz.source(case), names) == case
