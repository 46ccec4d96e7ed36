# SPDX-License-Identifier: Apache-2.0
"""out = x + 1 in TileLang."""

import tilelang
import tilelang.language as T  # noqa: N812 - its documentation's name

from ..problems import THREADS


@tilelang.jit
def add_one(elements):
    @T.prim_func
    def main(x: T.Tensor((elements,), "float32"), out: T.Tensor((elements,), "float32")):
        with T.Kernel(1, threads=THREADS) as _:
            for index in T.Parallel(elements):
                out[index] = x[index] + 1.0

    return main
