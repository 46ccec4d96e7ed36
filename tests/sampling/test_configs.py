# SPDX-License-Identifier: Apache-2.0
"""The cluster size of a row, configurations that are refused, and which kernel serves."""

from dataclasses import replace

import pytest
import torch

from dsl_backend.errors import Unsupported
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import from_arch
from dsl_backend.sampling import dispatch
from dsl_backend.sampling.configs import ClusterConfig, cluster_configs, widest_vector
from dsl_backend.sampling.spec import LogprobsMode, SamplingSpec

H200 = from_arch("sm_90a")
QWEN = SamplingSpec(vocab=151936)
FITS = ClusterConfig(cluster=4, threads=512, vector=4)


@pytest.mark.parametrize(
    ("rows", "top_p_alone", "cluster"),
    [(1, False, 16), (8, False, 16), (9, False, 8), (16, False, 8), (17, False, 4), (64, False, 2), (67, False, 1),
     (1024, False, 1), (1, True, 16), (9, True, 8), (33, True, 8), (64, True, 4)],
)  # fmt: skip
def test_cluster_of_a_row(rows: int, top_p_alone: bool, cluster: int) -> None:
    config = ClusterConfig.default(QWEN, H200, rows, 4, top_p_alone)
    assert config == ClusterConfig(cluster=cluster, threads=512, vector=4)
    assert config.blocks_ahead == 1, "faster on an H200 with 100 and 256 float32 rows too: docs/performance/sampling.md"
    assert config.objections(QWEN, H200) == []


@pytest.mark.parametrize(
    ("vocab", "rows", "cluster", "bounds", "finish"),
    [(151936, 65, 4, 0, 0), (151936, 66, 2, 0, 8), (151936, 129, 1, 320, 8), (151936, 256, 1, 320, 4),
     (201088, 512, 1, 448, 4), (1 << 20, 512, 1, 0, 4), (8192, 512, 1, 0, 0)],
)  # fmt: skip
def test_many_rows_with_top_p_alone_have_a_second_launch(
    vocab: int, rows: int, cluster: int, bounds: int, finish: int
) -> None:
    spec = SamplingSpec(vocab=vocab)
    config = ClusterConfig.default(spec, H200, rows, 4, top_p_alone=True)
    assert (config.cluster, config.lane_bound_blocks, config.finish_cluster) == (cluster, bounds, finish)
    assert config.objections(spec, H200) == []
    ranked = replace(spec, logprobs_mode=LogprobsMode.RAW_LOGPROBS)
    assert ClusterConfig.default(ranked, H200, rows, 4, top_p_alone=True).finish_cluster == 0


def test_ranks_are_counted_from_the_row_s_end() -> None:
    ranked = ClusterConfig.default(replace(QWEN, logprobs_mode=LogprobsMode.RAW_LOGPROBS), H200, 256, 4)
    assert (ranked.reread_blocks, ranked.reread_backward) == (2, True)


@pytest.mark.parametrize(("vocab", "cluster"), [(1, 1), (8192, 1), (8193, 2), (32768, 4), (151936, 16)])
def test_small_vocabularies_have_small_clusters(vocab: int, cluster: int) -> None:
    assert ClusterConfig.default(SamplingSpec(vocab=vocab), H200, 1, 4).cluster == cluster
    assert ClusterConfig.default(SamplingSpec(vocab=vocab), H200, 1, 4, top_p_alone=True).cluster == cluster


@pytest.mark.parametrize("vocab", [2000, 50257, 151936])
def test_no_batch_gets_another(vocab: int) -> None:
    spec = SamplingSpec(vocab=vocab)
    each = {ClusterConfig.default(spec, H200, rows, 1, again) for rows in range(1, 1000) for again in (False, True)}
    assert set(cluster_configs(spec, H200, 100_000, 1)) == each


def test_all_that_batches_get() -> None:
    assert {config.cluster for config in cluster_configs(QWEN, H200, 1024, 4)} == {1, 2, 4, 8, 16}
    assert {config.cluster for config in cluster_configs(QWEN, H200, 8, 4)} == {16}


@pytest.mark.parametrize(
    ("dtype", "vocab", "vector"),
    [(torch.float32, 151936, 4), (torch.bfloat16, 12, 4), (torch.float16, 777, 1)],
)
def test_widest_vector(dtype: torch.dtype, vocab: int, vector: int) -> None:
    assert widest_vector(SamplingSpec(vocab=vocab, dtype=dtype)) == vector


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks_ahead": 2}, "blocks_ahead is 2: 0 or 1 is needed"),
        ({"reread_blocks": 3}, "reread_blocks is 3: 1 or 2 is needed"),
        ({"vector": 8}, "vectors of 8 logits: a divisor of 151936 up to 4 is needed"),
        ({"threads": 48}, "threads 48 is not a power of two"),
        ({"threads": 2048}, "2048 threads for each CTA are not from 32 to 1024"),
        ({"cluster": 32}, "clusters of 32 CTAs: 16 are the most"),
        ({"cluster": 16, "threads": 1024}, "16384 threads for each row: 8192 are the most"),
        ({"max_candidates": 16384}, "bytes of shared memory: 232448 are the most"),
    ],
)
def test_what_is_refused(change: dict[str, int], message: str) -> None:
    assert FITS.objections(QWEN, H200) == []
    assert any(message in reason for reason in replace(FITS, **change).objections(QWEN, H200))


def test_groups_share_the_threads_of_a_row() -> None:
    for cluster in (1, 2, 4, 8, 16):
        config = ClusterConfig(cluster=cluster, threads=512, vector=4)
        assert config.groups * config.lanes_per_group == cluster * 512
    assert ClusterConfig(cluster=1, threads=64, vector=4).groups == 64


def test_what_serves() -> None:
    cute = "triton" if toolkit.missing() else "cute"
    for spec in (QWEN, replace(QWEN, logprobs=True)):
        names = {arch: dispatch.choose(spec, from_arch(arch)).name for arch in ("sm_80", "sm_90", "sm_100", "sm_120")}
        assert names == {"sm_80": "triton", "sm_90": cute, "sm_100": cute, "sm_120": "triton"}


def test_objections_say_what_would_work() -> None:
    with pytest.raises(Unsupported, match=r"serves GPUs of sm_90a, sm_100a, sm_103a, this is sm_120a"):
        dispatch.choose(QWEN, from_arch("sm_120"), "cute")
