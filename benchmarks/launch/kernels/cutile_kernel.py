# SPDX-License-Identifier: Apache-2.0
"""out = x + 1 in cuTile."""

import cuda.tile as ct

from ..problems import THREADS


@ct.kernel
def add_one(x, out):
    ct.store(out, index=(0,), tile=ct.load(x, index=(0,), shape=(THREADS,)) + 1)
