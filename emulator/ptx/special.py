# SPDX-License-Identifier: Apache-2.0
"""Special registers (ISA 10)."""

from collections.abc import Mapping

VECTOR: Mapping[str, str] = dict.fromkeys(
    ("%tid", "%ntid", "%ctaid", "%nctaid", "%clusterid", "%nclusterid", "%cluster_ctaid", "%cluster_nctaid"), "u32"
)
SCALAR: Mapping[str, str] = {
    **dict.fromkeys(
        [
            "%laneid",
            "%warpid",
            "%nwarpid",
            "%smid",
            "%nsmid",
            "%cluster_ctarank",
            "%cluster_nctarank",
            "%lanemask_eq",
            "%lanemask_le",
            "%lanemask_lt",
            "%lanemask_ge",
            "%lanemask_gt",
            "%clock",
            "%clock_hi",
            "%globaltimer_lo",
            "%globaltimer_hi",
            "%total_smem_size",
            "%aggr_smem_size",
            "%dynamic_smem_size",
            "%reserved_smem_offset_begin",
            "%reserved_smem_offset_end",
            "%reserved_smem_offset_cap",
            "%reserved_smem_offset_0",
            "%reserved_smem_offset_1",
        ],
        "u32",
    ),
    **dict.fromkeys(("%gridid", "%clock64", "%globaltimer", "%current_graph_exec"), "u64"),
    "%is_explicit_cluster": "pred",
}
COMPONENTS = frozenset("xyzw")


def is_special(text: str) -> bool:
    """Whether a token, such as `%tid.x`, names a special register that the emulator has."""
    name, _, component = text.partition(".")
    return component in COMPONENTS if name in VECTOR and component else not component and text in SCALAR
