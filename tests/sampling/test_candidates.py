# SPDX-License-Identifier: Apache-2.0
"""Configurations beside the default: all of them serve."""

import pytest
import torch

from dsl_backend.runtime.target import from_arch
from dsl_backend.sampling.candidates import named
from dsl_backend.sampling.configs import ClusterConfig, widest_vector
from dsl_backend.sampling.spec import LogprobsMode, SamplingSpec

H200 = from_arch("sm_90a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 777, 8193, 151936, 1 << 21])
@pytest.mark.parametrize("rows", [1, 16, 256, 1000])
def test_all_candidates_serve(vocab: int, rows: int, dtype: torch.dtype) -> None:
    spec = SamplingSpec(vocab=vocab, dtype=dtype)
    found = named(spec, H200, rows, widest_vector(spec), top_p_alone=True)
    assert found["default"] == ClusterConfig.default(spec, H200, rows, widest_vector(spec), top_p_alone=True)
    assert len(set(found.values())) == len(found)
    for name, config in found.items():
        assert config.objections(spec, H200) == [], name
        if name != "default":
            assert (config.finish_cluster > 0) == ("finish" in name)
            assert (config.lane_bound_blocks > 0) == ("bounds" in name)


def test_names() -> None:
    found = named(SamplingSpec(vocab=151936), H200, 256, 4, top_p_alone=True)
    assert (found["default"].cluster, found["few"].cluster, found["more"].cluster) == (1, 1, 2)
    assert (found["more-bounds"].lane_bound_blocks, found["bounds-finish-8"].lane_bound_blocks) == (192, 320)
    assert "bounds-finish-4" not in found, "the default"
    assert found["finish-16"].finishing.cluster == 16
    ranked = SamplingSpec(vocab=151936, logprobs_mode=LogprobsMode.RAW_LOGPROBS)
    assert not any("finish" in name for name in named(ranked, H200, 256, 4, top_p_alone=True))
    # The bounds of so many blocks do not fit shared memory.
    wide = named(SamplingSpec(vocab=1 << 20), H200, 1000, 4, top_p_alone=True)
    assert {"more", "few"} < set(wide)
    assert "few-bounds" not in wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "rows"), [(1, 1), (777, 64), (8193, 16), (151936, 1), (151936, 40), (1 << 21, 1000)])
def test_candidates_for_any_filter(vocab: int, rows: int, dtype: torch.dtype) -> None:
    spec = SamplingSpec(vocab=vocab, dtype=dtype)
    found = named(spec, H200, rows, widest_vector(spec))
    default = found["default"]
    assert default == ClusterConfig.default(spec, H200, rows, widest_vector(spec))
    assert {"late-loads", "reread-2", "backward"} < set(found)
    halved, doubled = (f"ctas-{default.cluster // 2}", f"ctas-{2 * default.cluster}")
    assert (halved in found, doubled in found) == (default.cluster > 1, default.cluster < 16)
    for name, config in found.items():
        assert config.objections(spec, H200) == [], name
        assert config.finish_cluster == 0
        assert not name.startswith("ctas-") or config.cluster == int(name.removeprefix("ctas-"))
