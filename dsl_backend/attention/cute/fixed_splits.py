# SPDX-License-Identifier: Apache-2.0
"""Where the splits of a batch-invariant layer begin: decided by the layer alone. Needs no CuTe DSL."""

from dsl_backend.attention.cute.sizes import packed_gqa_heads
from dsl_backend.attention.spec import AttentionSpec

# Keys of a split. With 8 KV heads of 128, splits of 512, 1024 and 2048 keys took on an H100: decode of one request with
# 8k keys 17.9, 18.2 and 24.6 us, of 64 requests 747, 733 and 726, four prompts of 4k 1118, 1053 and 1028. The kernels
# without batch invariance take 17.3, 721 and 971.
SPLIT_KEYS_PER_HEAD, LEAST_SPLIT_KEYS, MOST_SPLIT_KEYS = 128, 256, 2048
# The same of absorbed MLA. To fold a split is 64 KB of L2 traffic with 16 rows, and 256 KB with 64. On an H100, in us,
# one request of 8k keys, 8 of 8k, 64 of 4k, 128 of 4k took: 16 heads with 256 keys 16.7, 43.0, 146, 304, with 512 21.3,
# 41.0, 135, 276; 128 heads with 512 keys 25.7, 71.3, 225, 446, with 1024 37.1, 57.3, 183, 360, with 2048 59.9, 71.6,
# 154, 302. The kernels without batch invariance: 12.8, 38.0, 114, 213; 21.4, 53.0, 135, 261. On an H200
# since folds of 16 rows stay in shared memory, 16 heads with 256 keys 16.2, 31.6, 93.5, 175, with 512 21.9, 29.3, 86.2,
# 162.
MLA_SPLIT_KEYS, MLA_FEW_ROWS, MLA_FEW_ROWS_SPLIT_KEYS = 1024, 16, 512


def split_keys(spec: AttentionSpec) -> int:
    """Keys of a split."""
    if spec.mla:
        return MLA_FEW_ROWS_SPLIT_KEYS if packed_gqa_heads(spec.group) <= MLA_FEW_ROWS else MLA_SPLIT_KEYS
    return min(max(SPLIT_KEYS_PER_HEAD * spec.heads_kv, LEAST_SPLIT_KEYS), MOST_SPLIT_KEYS)


def tiles_per_split(spec: AttentionSpec, tile_n: int) -> int:
    """Key tiles of a split; 0 if the layer is not batch-invariant."""
    return max(1, split_keys(spec) // tile_n) if spec.batch_invariant else 0


def against_early_dependents(asked: bool, spec: AttentionSpec) -> list[str]:
    """Why a configuration's combine kernel cannot let the next kernel start early."""
    if not (asked and spec.batch_invariant):
        return []
    return ["early_dependents: the combine kernel of a batch-invariant layer lets no kernel start early"]
