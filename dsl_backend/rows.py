# SPDX-License-Identifier: Apache-2.0
"""What operators on the rows of a matrix share on the host: threads and CTAs of a row, checks and views of matrices."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short

WARP = 32
REGISTERS_PER_SM = 64 * 1024
THREADS_PER_SM = 2048
MAX_REGISTERS = 255
ACCESS_BYTES = 16
# CTAs of a cluster.
MAX_CLUSTER = 16
# Of inputs, and of outputs that are not quantized.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Kernels count columns and rows in 32 bits, and count past the end by less than a tile.
MAX_WIDTH = 2**31 - 2**20
MAX_ROWS = 2**31 - 2**10

ConfigT = TypeVar("ConfigT", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """Threads and CTAs of a row. Thread t of CTA c loads vectors (i * cluster + c) * threads_per_row + t.

    Attributes:
        vector: adjacent elements of one load or store.
        vectors_per_thread: that a thread holds in registers at a time.
        threads_per_row: of a CTA; a power of two, or whole warps of a CTA that has one row.
        rows_per_cta: rows that a CTA processes at the same time.
        cluster: CTAs that share a row and merge through distributed shared memory.
        ctas_per_sm: CTAs on an SM that registers are reserved for.
        use_pdl: programmatic dependent launch: the next kernel's CTAs may start while the last ones of this one run.
    """

    vector: int
    vectors_per_thread: int
    threads_per_row: int
    rows_per_cta: int
    cluster: int = 1
    ctas_per_sm: int = 1
    use_pdl: bool = False

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.threads_per_row * self.rows_per_cta

    @property
    def warps_per_row(self) -> int:
        """Warps of a CTA that share a row; 1 where a warp has several rows."""
        return max(1, self.threads_per_row // WARP)

    @property
    def tile_elements(self) -> int:
        """Elements of a row that its threads hold at a time."""
        return self.vector * self.vectors_per_thread * self.threads_per_row * self.cluster

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: two float32 for each warp of the row, and an mbarrier."""
        if self.warps_per_row == 1 and self.cluster == 1:
            return 0
        return 8 * self.warps_per_row * self.cluster * self.rows_per_cta + (8 if self.cluster > 1 else 0)

    def reasons_against(self, *, vector: int, widest: int, registers: int, smem_bytes: int) -> list[str]:
        """Why this configuration cannot run; empty if it can.

        Args:
            vector: adjacent elements that rows are aligned to.
            widest: elements of the widest type that ACCESS_BYTES hold.
            registers: of a thread, without spills.
            smem_bytes: that a CTA may have.
        """
        reasons = []
        if vector % self.vector or self.vector > widest:
            reasons.append(
                f"vectors of {self.vector} elements: rows are aligned to {vector}, and {widest} are "
                f"{ACCESS_BYTES} bytes"
            )
        counts = {name: getattr(self, name) for name in ("threads_per_row", "rows_per_cta", "cluster", "vector")}
        if self.rows_per_cta == 1 and self.threads_per_row > 0 and self.threads_per_row % WARP == 0:
            counts.pop("threads_per_row")
        reasons += [f"{name} {n} is not a power of two" for name, n in counts.items() if n < 1 or n & (n - 1)]
        if self.threads % WARP or not WARP <= self.threads <= 1024:
            reasons.append(f"{self.threads} threads for each CTA are not a multiple of {WARP} up to 1024")
        if self.vectors_per_thread < 1:
            reasons.append(f"{self.vectors_per_thread} vectors for each thread: one is needed")
        if self.cluster > MAX_CLUSTER:
            reasons.append(f"clusters of {self.cluster} CTAs: {MAX_CLUSTER} are the most")
        if self.cluster > 1 and (self.rows_per_cta > 1 or self.threads_per_row < WARP):
            reasons.append(f"a cluster shares one row, with whole warps: not {self.rows_per_cta} rows for each CTA")
        if registers > MAX_REGISTERS or registers * self.threads * self.ctas_per_sm > REGISTERS_PER_SM:
            reasons.append(
                f"{registers} registers for each of {self.threads} threads, {self.ctas_per_sm} CTAs on an SM: "
                f"{MAX_REGISTERS} for a thread and {REGISTERS_PER_SM} for an SM are the most"
            )
        if self.smem_bytes > smem_bytes:
            reasons.append(f"{self.smem_bytes} bytes of shared memory: {smem_bytes} are the most")
        return reasons


def ctas_per_sm(registers: int, threads: int) -> int:
    """The CTAs of so many threads with so many registers each that an SM holds; at least 1."""
    return max(1, min(REGISTERS_PER_SM // (registers * threads), THREADS_PER_SM // threads))


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def distinct(named: Mapping[str, ConfigT]) -> dict[str, ConfigT]:
    """The configurations with their names; of equal ones the first."""
    names: dict[ConfigT, str] = {}
    for name, config in named.items():
        names.setdefault(config, name)
    return {name: config for config, name in names.items()}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def check_shape(width: int, vector: int) -> None:
    """Raises InvalidInput where rows have no width that kernels serve, or a vector does not divide them."""
    require(1 <= width <= MAX_WIDTH, f"width {width} is not from 1 to {MAX_WIDTH}")
    require(vector in (1, 2, 4, 8), f"vector {vector} is not 1, 2, 4 or 8")
    require(width % vector == 0, f"width {width} is not a multiple of the vector {vector}")


def check_rows(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Raise InvalidInput where a tensor is not a matrix with contiguous columns."""
    checks.tensor(name, tensor)
    require(tensor.dim() == 2, f"{name} has shape {tuple(tensor.shape)}: [rows, width] is needed")
    require(
        tensor.dtype in dtypes,
        f"{name} is {short(tensor.dtype)}: one of {', '.join(short(dtype) for dtype in dtypes)} is needed",
    )
    require(tensor.shape[0] <= MAX_ROWS, f"{name} has {tensor.shape[0]} rows: {MAX_ROWS} are the most")
    require(
        tensor.shape[1] <= 1 or tensor.stride(1) == 1,
        f"{name} has stride {tensor.stride(1)} in its last dimension: 1 is needed",
    )
    checks.no_gradient(name, tensor)


def check_like(name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    """Raise InvalidInput where a tensor has not the shape and device of x."""
    require(tensor.shape == x.shape, f"{name} has shape {tuple(tensor.shape)}: x's {tuple(x.shape)} is needed")
    require(tensor.device == x.device, f"{name} is on {tensor.device}, x on {x.device}")


def common_vector(*matrices: torch.Tensor) -> int:
    """Adjacent elements that one access may take in every row of matrices of one shape: 1, 2, 4 or 8."""
    common = math.gcd(8, matrices[0].shape[1])
    for tensor in matrices:
        common = math.gcd(common, tensor.stride(0), tensor.data_ptr() // tensor.element_size())
    return common


def with_expected_strides(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same rows with the strides that kernels expect: torch allows any of a single row or column."""
    rows, width = tensor.shape
    if (width > 1 or tensor.stride(1) == 1) and (rows > 1 or tensor.stride(0) == width):
        return tensor
    return tensor.as_strided((rows, width), (tensor.stride(0) if rows > 1 else width, 1))
