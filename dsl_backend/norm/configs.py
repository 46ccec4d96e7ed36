# SPDX-License-Identifier: Apache-2.0
"""Configurations of the CuTe DSL kernel, and the default for a problem."""

from dataclasses import dataclass

from dsl_backend.norm.spec import NormSpec
from dsl_backend.rows import ACCESS_BYTES, MAX_CLUSTER, RowConfig, ceil_div, power_of_2

# The threads of a row load at least 128 adjacent bytes at a time, where the row is as long.
COALESCED_VECTORS = 8
# Elements of a thread, until a row has 16 CTAs of 512 threads: as softmax has them, not measured here.
DEFAULT_ELEMENTS = 32
CTA_THREADS, MAX_THREADS = 128, 512


@dataclass(frozen=True, kw_only=True)
class NormConfig(RowConfig):
    """Threads, CTAs and registers of a row, which is held in registers as a whole."""

    def registers(self, spec: NormSpec) -> int:
        """Registers of a thread without spills: for x, residual and weight as they are loaded, and 32 more."""
        element = spec.dtype.itemsize * (1 + spec.residual) + (spec.weight_dtype.itemsize if spec.weight_dtype else 0)
        return ceil_div(self.vector * self.vectors_per_thread * element, 4) + 32

    def objections(self, spec: NormSpec, smem_bytes: int) -> list[str]:
        """Why this configuration does not serve a problem where a CTA may have `smem_bytes`; empty if it does."""
        reasons = self.reasons_against(
            vector=spec.vector,
            widest=ACCESS_BYTES // max(dtype.itemsize for dtype in spec.dtypes),
            registers=self.registers(spec),
            smem_bytes=smem_bytes,
        )
        if self.tile_elements < spec.width:
            reasons.append(f"holds {self.tile_elements} elements of {spec.width}")
        return reasons


def widest_vector(spec: NormSpec) -> int:
    """Elements of a load or store: 16 bytes of the widest type, where rows are aligned to that."""
    return min(spec.vector, ACCESS_BYTES // max(dtype.itemsize for dtype in spec.dtypes))


def default_config(spec: NormSpec) -> NormConfig:
    """By the width alone: a thread, part of a warp, a warp, a CTA, or a cluster for each row.

    So a row's sums have one order whatever is beside it, and its output the same bits in every batch.
    """
    vector = widest_vector(spec)
    count = spec.width // vector
    threads = max(power_of_2(min(count, COALESCED_VECTORS)), power_of_2(ceil_div(spec.width, DEFAULT_ELEMENTS)))
    threads = min(threads, power_of_2(count), MAX_THREADS)
    cluster = 1
    while cluster < MAX_CLUSTER and spec.width > threads * cluster * DEFAULT_ELEMENTS:
        cluster *= 2
    return NormConfig(
        vector=vector,
        vectors_per_thread=ceil_div(count, threads * cluster),
        threads_per_row=threads,
        rows_per_cta=max(1, CTA_THREADS // threads),
        cluster=cluster,
        use_pdl=True,
    )
