# SPDX-License-Identifier: Apache-2.0
"""Configurations of the CuTe DSL kernel beside the default, by name. All of them draw the same tokens.

`dsl-backend tune sampling` times them. What is faster than the default becomes a tuning record (docs/tuning.md).
"""

from dataclasses import replace

from dsl_backend.rows import distinct
from dsl_backend.runtime.target import Target
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.spec import SamplingSpec

# CTAs of a row in the second launch.
FINISHING = (2, 4, 8, 16)


def for_any_filter(default: ClusterConfig, spec: SamplingSpec) -> dict[str, ClusterConfig]:
    """Half and twice as many CTAs for a row; other orders of loads and arithmetic."""
    reread = 3 - default.reread_blocks
    clusters = [one for one in (default.cluster // 2, 2 * default.cluster) if one]
    return {f"ctas-{cluster}": default.sharing(cluster, spec) for cluster in clusters} | {
        "late-loads": replace(default, blocks_ahead=0),
        f"reread-{reread}": replace(default, reread_blocks=reread),
        "forward" if default.reread_backward else "backward": replace(
            default, reread_backward=not default.reread_backward
        ),
    }


def for_top_p_alone(few: ClusterConfig, spec: SamplingSpec) -> dict[str, ClusterConfig]:
    """`few` as it is, `more` CTAs, both with bounds of lanes, and `few` with a second launch."""
    more = few.sharing(2 * few.cluster, spec)
    found = {"few": few, "few-bounds": few.with_lane_bounds(spec)}
    found |= {"more": more, "more-bounds": more.with_lane_bounds(spec)}
    for ctas in FINISHING:
        found[f"finish-{ctas}"] = replace(few, finish_cluster=ctas)
        found[f"bounds-finish-{ctas}"] = replace(few.with_lane_bounds(spec), finish_cluster=ctas)
    return found


def named(
    spec: SamplingSpec, target: Target, rows: int, vector: int, top_p_alone: bool = False
) -> dict[str, ClusterConfig]:
    """The default and what may beat it, none of them twice.

    `ctas-N` has N CTAs for a row, `late-loads` loads a block after the arithmetic of the one before, `reread-N` has N
    blocks of a warp in flight where a row is read again, and `backward` or `forward` read it in the other order.

    With top-p alone, `few` has as many CTAs for a row as rows without a filter have, `more` twice as many. `bounds` has
    bounds of lanes, and `finish-N` a second launch with N CTAs for each row that is left.
    """
    default = ClusterConfig.default(spec, target, rows, vector, top_p_alone)
    if top_p_alone:
        few = ClusterConfig.default(spec, target, rows, vector)
        found = {"default": default} | for_top_p_alone(few, spec)
    else:
        found = {"default": default} | for_any_filter(default, spec)
    return distinct({name: one for name, one in found.items() if not one.objections(spec, target)})
